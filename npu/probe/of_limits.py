"""A question for each limit: what it allows runs with right results, what it forbids is refused."""

from __future__ import annotations

import torch

from npu._operators import scatter
from npu.probe import of_atb
from npu.probe.calls import Attention, Lengths, band, causal, changed, dense, paged, raw, right
from npu.probe.outcome import DIFFERS, HOLDS, Outcome, Trial, of_limit

_TWO, _ONE, _PACKED = Lengths((3, 5), (9, 40)), Lengths((1, 1), (9, 40)), Lengths((3, 5), (9, 40))


def _attention(says: str, make) -> Trial:
    """A trial of the call that `make(device)` describes, every query seeing every key."""
    return Trial(says, lambda device: right(make(device)))


def _sized(size: int) -> Trial:
    return _attention(f"head size {size}", lambda device: dense(_TWO, device, size=size))


def _headed(heads: int, key_heads: int) -> Trial:
    return _attention(f"{heads} query heads on {key_heads}", lambda device: dense(_ONE, device, heads=heads, key_heads=key_heads, size=16))


def _blocks(block: int, lengths: Lengths, size: int, layout: str = "BSND") -> Trial:
    says = f"blocks of {block} in {layout}, head size {size}"
    return _attention(says, lambda device: paged(dense(lengths, device, size=size, layout=layout), device, block=block))


def _many(sequences: int, layout: str, size: int) -> Trial:
    """Decode over many sequences that read the same block."""

    def make(device):
        one = paged(dense(Lengths((1,), (9,)), device, size=size, heads=1, key_heads=1, layout=layout), device, block=16)
        repeats = [sequences] + [1] * (one.arguments["query"].ndim - 1)
        lens = list(range(1, sequences + 1)) if layout == "TND" else [1] * sequences
        arguments = {"query": one.arguments["query"].repeat(repeats), "block_table": one.arguments["block_table"].repeat(sequences, 1)}
        arguments |= {"actual_seq_lengths": lens, "actual_seq_lengths_kv": [9] * sequences}
        return Attention(one.q * sequences, one.k * sequences, one.v * sequences, {**one.arguments, **arguments})

    return _attention(f"{sequences} sequences in {layout}", make)


def _long(keys: int) -> Trial:
    """One query over `keys` keys in blocks that are all one block of zeros: the output is zero, the LSE is ln(keys)."""

    def run(device):
        one = paged(dense(Lengths((1,), (512,)), device, heads=1, key_heads=1, size=16), device, block=512)
        table = torch.zeros(1, -(-keys // 512), dtype=torch.int32, device=device)
        cache = {name: torch.zeros_like(one.arguments[name]) for name in ("key", "value")}
        out, lse = raw(changed(one, {**cache, "block_table": table, "actual_seq_lengths_kv": [keys]}))
        return "" if not out.any() and abs(lse.item() - torch.tensor(float(keys)).log().item()) < 0.01 else "the result is wrong"

    return Trial(f"{keys} keys for one query", run)


def _strided(device: str) -> Attention:
    """Keys and values as the halves of one tensor."""
    call = paged(dense(_ONE, device), device, block=16)
    both = torch.cat([call.arguments["key"], call.arguments["value"]], -1)
    width = call.arguments["key"].shape[-1]
    return changed(call, {"key": both[..., :width], "value": both[..., width:]})


def _head_first(device: str) -> Attention:
    """A cache that is stored [hk p b d], seen as [p hk b d]."""
    call = paged(dense(_ONE, device, layout="BNSD"), device, block=16, by_head=True)
    stored = {name: call.arguments[name].transpose(0, 1).contiguous().transpose(0, 1) for name in ("key", "value")}
    return changed(call, stored)


def _mixed(device: str) -> Attention:
    """float16 queries on a float32 cache."""
    call = paged(dense(_ONE, device), device, block=16)
    return changed(call, {name: call.arguments[name].float() for name in ("key", "value")})


def _biased(dtype: torch.dtype) -> Trial:
    says = f"a bias of {str(dtype).removeprefix('torch.')} for float16"
    return _attention(
        says, lambda device: changed(dense(_TWO, device), {"pse_shift": torch.zeros(1, 4, 5, 40, dtype=dtype, device=device)})
    )


def _causal(says: str, size: int, value_size: int, layout: str) -> Trial:
    def run(device):
        call = causal(dense(_PACKED, device, size=size, value_size=value_size, layout=layout), device)
        return right(call, [band(len(q), len(k), len(k) - len(q), len(k), 0) for q, k in zip(call.q, call.k, strict=True)])

    return Trial(says, run)


def _rows(tokens: int = 3):
    return torch.arange(tokens * 2 * 16, dtype=torch.float32).reshape(tokens, 2, 16).half() / 64


def _write(says: str, shape, prepare=lambda cache: cache) -> Trial:
    """Three rows into a cache of this shape, whose first axes are (page, place) where it is plain."""

    def run(device):
        cache = [prepare(torch.zeros(shape, dtype=torch.float16, device=device)) for _ in range(2)]
        rows, slots = _rows().to(device), torch.tensor([7, 0, 20], dtype=torch.int32, device=device)
        scatter(torch.device(device).type)(rows, rows + 1, *cache, slots)
        expected = torch.zeros(shape, dtype=torch.float16).flatten(0, 1)
        expected[[7, 0, 20]] = _rows()
        found = cache[0].cpu().flatten(0, 1)
        return "" if found.shape == expected.shape and torch.equal(found, expected) else "rows are not where the slots say"

    return Trial(says, run)


def _rotated(says: str, shape, dtype: torch.dtype) -> Trial:
    def run(device):
        random = torch.Generator().manual_seed(1)
        x = torch.randn(shape, generator=random).to(dtype)
        angles = torch.randn(1, shape[1], 1, shape[3] // 2, generator=random).repeat(1, 1, 1, 2)
        angles = torch.nn.functional.pad(angles, (0, shape[3] % 2))
        cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
        found = torch.ops.npu.npu_rotary_mul.default(x.to(device), cos.to(device), sin.to(device), "half").cpu()
        first, second = x.double().chunk(2, -1)
        expected = x.double() * cos.double() + torch.cat([-second, first], -1) * sin.double()
        return "" if torch.allclose(found.double(), expected, atol=0.02, rtol=0.02) else "the result is wrong"

    return Trial(says, run)


_PLAIN = (2, 16, 2, 16)  # pages, rows, heads, size
# What runs within a limit, and what must be refused beyond it. A limit's name is its question's.
TRIALS: dict[str, tuple[tuple[Trial, ...], tuple[Trial, ...]]] = {
    "attention dtype": (
        (_sized(64), _attention("bfloat16", lambda device: dense(_TWO, device, dtype=torch.bfloat16))),
        (_attention("float32", lambda device: dense(_TWO, device, dtype=torch.float32)),),
    ),
    "bias dtype": ((_biased(torch.float16),), (_biased(torch.float32),)),
    "head size": ((_sized(64), _sized(80), _sized(512)), (_sized(72), _sized(528))),
    "value size": (
        (_causal("values of 128 for keys of 192 in TND", 192, 128, "TND"),),
        (_attention("values of 32 for keys of 64", lambda device: dense(_TWO, device, value_size=32)),),
    ),
    "heads": ((_headed(256, 256),), (_headed(257, 257),)),
    "group": ((_headed(64, 1),), (_headed(65, 1),)),
    "ATB head size": of_atb.HEAD_SIZES,
    "ATB block": of_atb.BLOCKS,
    "cache layout": (
        (
            _attention("[p b hk*d]", lambda device: paged(dense(_ONE, device), device, block=16)),
            _attention("[p hk b d]", lambda device: paged(dense(_ONE, device, layout="BNSD"), device, block=16, by_head=True)),
        ),
        (_attention("[hk p b d]", _head_first),),
    ),
    "cache strides": ((), (_attention("keys and values as halves of one tensor", _strided),)),
    "cache width": (
        (
            _attention(
                "127 key heads of size 512",
                lambda device: paged(dense(_ONE, device, heads=127, key_heads=127, size=512), device, block=16),
            ),
        ),
        (
            _attention(
                "129 key heads of size 512",
                lambda device: paged(dense(_ONE, device, heads=129, key_heads=129, size=512), device, block=16),
            ),
        ),
    ),
    "packed block": (
        (_blocks(16, _PACKED, 128, "TND"), _blocks(128, _PACKED, 128, "TND"), _blocks(1024, _PACKED, 128, "TND")),
        (_blocks(24, _PACKED, 128, "TND"), _blocks(1040, _PACKED, 128, "TND")),
    ),
    "prefill block": ((_blocks(128, _TWO, 64), _blocks(512, _TWO, 64)), (_blocks(64, _TWO, 64), _blocks(640, _TWO, 64))),
    "decode block": ((_blocks(16, _ONE, 64), _blocks(512, _ONE, 64)), (_blocks(24, _ONE, 64), _blocks(528, _ONE, 64))),
    "packed sequences": ((_many(64, "TND", 128),), (_many(4097, "TND", 128),)),
    "sequences": ((_many(64, "BSND", 16),), (_many(65537, "BSND", 16),)),
    "decode keys": ((_long(262144),), (_long(262145),)),
    "cache dtype": ((_write("float16", _PLAIN),), (_attention("float16 queries on a float32 cache", _mixed),)),
    "write layout": ((_write("[p b hk d]", _PLAIN),), (_write("[p hk b d]", (2, 2, 16, 16)),)),
    "write strides": ((), (_write("a strided cache", _PLAIN, lambda cache: torch.cat([cache, cache], -1)[..., :16]),)),
    "rotary dtype": (
        tuple(_rotated(str(dtype)[6:], (1, 5, 4, 64), dtype) for dtype in (torch.float16, torch.bfloat16, torch.float32)),
        (_rotated("float64", (1, 5, 4, 64), torch.float64),),
    ),
    "rotary size": (
        (_rotated("894 dims", (1, 5, 4, 894), torch.float32),),
        (_rotated("896 dims", (1, 5, 4, 896), torch.float32), _rotated("63 dims", (1, 5, 4, 63), torch.float32)),
    ),
    "rotary heads": (
        (_rotated("999 heads", (1, 1001, 999, 2), torch.float32),),
        (_rotated("1000 heads", (1, 1001, 1000, 2), torch.float32),),
    ),
}


def _of_schema(name: str) -> Outcome:
    """The two limits that the operator's own schema answers."""
    types = {argument.name: str(argument.type) for argument in torch.ops.npu.npu_fused_infer_attention_score.default._schema.arguments}
    if name == "softcap":
        caps = [argument for argument in types if "cap" in argument]
        return Outcome(DIFFERS if caps else HOLDS, message=f"the schema has {', '.join(caps) or 'no such argument'}")
    kinds = {argument: types[argument] for argument in ("actual_seq_lengths", "actual_seq_lengths_kv")}
    return Outcome(HOLDS if all("int" in kind.lower() for kind in kinds.values()) else DIFFERS, message=f"the schema says {kinds}")


SCHEMA_ANSWERS = ("softcap", "exact lengths")


def ask(name: str, device: str) -> Outcome:
    """What the operators of this host say about a limit of `limits.LIMITS`. Raises RuntimeError where the device fails."""
    return _of_schema(name) if name in SCHEMA_ANSWERS else of_limit(device, *TRIALS[name])
