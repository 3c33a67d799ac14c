"""Questions about the limits of ATB's paged attention, for decode over few keys."""

from __future__ import annotations

import torch

from npu import _operators
from npu.probe.calls import Lengths, dense, exact, near, paged
from npu.probe.outcome import Trial


def trial(says: str, *, heads: int = 65, size: int = 64, value_size: int | None = None, block: int = 128) -> Trial:
    """Two sequences of 9 and 40 keys, one key head; "" where the output is the exact one."""

    def run(device):
        call = paged(
            dense(Lengths((1, 1), (9, 40)), device, heads=heads, key_heads=1, size=size, value_size=value_size), device, block=block
        )
        query = call.arguments["query"].flatten(0, 1)
        out = query.new_zeros(2, heads, value_size or size)
        _operators.paged_attention(torch.device(device).type)(
            query=query,
            key_cache=call.arguments["key"].unsqueeze(2),
            value_cache=call.arguments["value"].unsqueeze(2),
            num_kv_heads=1,
            num_heads=heads,
            scale_value=call.arguments["scale"],
            block_table=call.arguments["block_table"],
            context_lens=torch.tensor([9, 40], dtype=torch.int32),
            out=out,
        )
        expected = torch.cat([exact(call, row, torch.ones(1, len(keys), dtype=torch.bool))[0] for row, keys in enumerate(call.k)])
        return "" if near(out.cpu(), expected) else "the output is wrong"

    return Trial(says, run)


HEAD_SIZES = (
    (trial("256 dims, 65 query heads on one key head", size=256), trial("40 dims and values of 24", size=40, value_size=24)),
    (trial("272 dims", size=272),),
)
BLOCKS = (
    (trial("blocks of 16", block=16), trial("blocks of 128, 128 query heads on one key head", heads=128)),
    (trial("blocks of 24", block=24), trial("blocks of 144", block=144)),
)
