"""SmolLM2 with eager attention in plain torch, cast where `smollm2_npu` casts: what float16 alone costs, without any operator.

Scores, mask, softmax and products are taken one by one, in the dtypes that transformers' eager attention takes them in
(`eager_attention_forward` of its Llama). transformers 5.24.0 itself, its q, k, v cast to float16 there, on torch 2.13.0's CPU: logits at
most 0.0271 from its float32 ones over the tokens of case 0 in tests/data/smollm2_greedy.json, 0.0910 over those of case 1.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from examples.smollm2 import Session
from examples.smollm2_npu import Model, logits, mlp, norm
from fattn.types import StandardConfig


class Distances(NamedTuple):
    """The largest difference of any logit from attention in float32: of `npu` with its operators, and of eager attention, in float16."""

    npu: float
    eager: float

    def __str__(self):
        return f"logits, attention in float16, are at most {self.npu:.4f} (npu) and {self.eager:.4f} (eager) from those in float32"


def distances(session: Session, tokens: list[int]) -> Distances:
    """How far the logits of an npu session, and of eager attention cast at the same places, are from float32 over the same tokens."""
    rows = np.arange(len(tokens), dtype=np.int32)
    exact, cast = (logits(session.model, hidden(session.model, tokens, dtype=dtype), rows) for dtype in (torch.float32, torch.float16))
    return Distances(np.abs(session.logits(tokens) - exact).max(), np.abs(cast - exact).max())


def hidden(model: Model, tokens: list[int], *, dtype: torch.dtype) -> Float[Tensor, "t d"]:
    """The last hidden states of the tokens of one text, run in one step, with q, k, v and attention in `dtype`, the rest in float32."""
    x = model.embedding[torch.tensor(tokens, device=model.embedding.device)]
    for weights in model.layers:
        projected = norm(x, weights.attention_norm, model.norm_epsilon) @ weights.attention.wqkv
        attended = _attend(projected, model.config, dtype).to(x.dtype)
        x = mlp(x + attended @ weights.attention.wo, weights, model.norm_epsilon)
    return x


def _attend(projected, config: StandardConfig, dtype):
    """Causal attention, from the fused projections [t (h+2hk)*d] to outputs [t h*d]."""
    t, group = projected.shape[0], config.heads // config.kv_heads
    q, k, v = projected.view(t, -1, config.head_size).split([config.heads, config.kv_heads, config.kv_heads], dim=1)
    q, k, v = (x.to(dtype).transpose(0, 1) for x in (_rotate(q, config), _rotate(k, config), v))
    k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    hidden_keys = torch.ones(t, t, dtype=torch.bool, device=q.device).triu(1)
    scores = (q @ k.transpose(1, 2) * config.scale).masked_fill(hidden_keys, -torch.inf)
    weights = torch.softmax(scores, -1, dtype=torch.float32).to(dtype)
    return (weights @ v).transpose(0, 1).reshape(t, -1)


def _rotate(x, config: StandardConfig):
    """Turns each pair of x [t h d], its members half a head apart, by position * theta^(-2i/d)."""
    half = config.head_size // 2
    frequencies = config.rotary_theta ** (-torch.arange(half, device=x.device) / half)
    angles = torch.arange(x.shape[0], device=x.device)[:, None, None] * frequencies
    first, second = x[..., :half], x[..., half:]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
