"""How much scratch memory fused infer attention asks its caller for, in the overloads that take it."""

from __future__ import annotations

import torch
from torch import Tensor

from npu.emulator.refusal import demand


def needed(arguments: dict) -> int:
    """Bytes that a call needs. No document says how many: that they grow with the batch and its lengths is what callers must live with."""
    return 1024 + 4 * arguments["query"].numel() + 32 * sum(arguments["actual_seq_lengths_kv"] or ())


def measured(**arguments) -> Tensor:
    """What _npu_fused_infer_attention_score_get_max_workspace returns: as much memory as a call with these arguments needs."""
    return arguments["query"].new_empty(needed(arguments), dtype=torch.uint8)


def check(operator: str, workspace: Tensor | None, arguments: dict):
    """Raises RuntimeError where the caller's scratch memory is too small; overwrites it, as an operator does."""
    if workspace is None:
        return
    size = workspace.numel() * workspace.itemsize
    demand(size >= needed(arguments), operator, f"the workspace has the {needed(arguments)} bytes that the call needs", f"{size} bytes")
    workspace.view(torch.uint8).fill_(0xA5)
