"""The emulated operators refuse what the documents do not allow, naming the rule."""

import pytest
import torch
from emulator_cases import TRIANGLE, dense, draw, paged

from npu import emulator
from npu.emulator import kernels
from npu.emulator.behind import operator

emulator.install()
V1, V2 = operator(kernels.FUSED), operator(kernels.FUSED_V2)


def call(*, replace=(), run=V1, arguments=None, **changes):
    """A valid dense call in BSND with some arguments changed, and tensors at some places replaced."""
    if arguments is None:
        arguments, keywords = dense(draw([3, 3], [24, 24], size=64), "BSND")
    else:
        arguments, keywords = arguments
    arguments = list(arguments)
    for place, tensor in replace:
        arguments[place] = tensor
    return run(*arguments, **keywords | changes)


def packed(**options):
    return dense(draw([3, 5], [24, 20], **options), "TND")


def pages(query_lens=(3, 5), layout="BSND", *, page_size=128, by_head=False, **options):
    return paged(draw(query_lens, [130, 20], **options), layout, page_size=page_size, by_head=by_head)


def strided(*shape):
    return torch.zeros(*shape, 2).half()[..., 0]


HALF = torch.zeros(2, 3, 4, 64).half()
KEYS = torch.zeros(2, 24, 2, 64).half()
REFUSED = {
    "float32": ("query is float16 or bfloat16", lambda: call(replace=[(i, t.float()) for i, t in enumerate((HALF, KEYS, KEYS))])),
    "float64": ("query is float16 or bfloat16", lambda: call(replace=[(0, HALF.double())])),
    "dtypes mixed": ("key has query's dtype", lambda: call(replace=[(1, KEYS.bfloat16())])),
    "query strided": ("query is contiguous", lambda: call(replace=[(0, strided(2, 3, 4, 64))])),
    "key strided": ("key is contiguous", lambda: call(replace=[(1, strided(2, 24, 2, 64))])),
    "mask strided": ("atten_mask is contiguous", lambda: call(atten_mask=torch.zeros(3, 24, 2, dtype=torch.bool)[..., 0])),
    "layout": ("Layout SBH is not supported", lambda: call(input_layout="SBH")),
    "rank": ("queryDims.3. must be 4", lambda: call(replace=[(0, HALF.flatten(2))], num_heads=4)),
    "heads of the tensor": ("query's N is num_heads", lambda: call(num_heads=8)),
    "key heads of the tensor": ("key's N is", lambda: call(num_key_value_heads=1)),
    "heads that do not divide": ("key heads divide", lambda: call(num_key_value_heads=3)),
    "65 heads a key head": (
        "at most 64 query heads",
        lambda: call(arguments=dense(draw([3], [24], heads=65, key_heads=1, size=16), "BSND")),
    ),
    "257 heads": ("N <= 256", lambda: call(arguments=dense(draw([3], [24], heads=257, key_heads=257, size=16), "BSND"))),
    "head size 72": ("multiples of 16", lambda: call(arguments=dense(draw([3], [24], size=72), "BSND"))),
    "head size 528": ("D <= 512", lambda: call(arguments=dense(draw([3], [24], size=528), "BSND"))),
    "value size": ("one shape", lambda: call(arguments=dense(draw([3], [24], size=64, value_size=32), "BSND"))),
    "batch sizes": ("one batch size", lambda: call(replace=[(1, KEYS[:1]), (2, KEYS[:1])])),
    "negative length": ("not negative", lambda: call(actual_seq_lengths=[3, -1])),
    "query length too long": ("at most Q_S", lambda: call(actual_seq_lengths=[3, 4])),
    "key length too long": ("at most KV_S", lambda: call(actual_seq_lengths_kv=[24, 25])),
    "too few lengths": (
        "1 entry or at least B = 3",
        lambda: call(arguments=dense(draw([3] * 3, [9] * 3), "BSND"), actual_seq_lengths_kv=[9, 9]),
    ),
    "packed head size 64": ("layout TND: D", lambda: call(arguments=packed(size=64))),
    "packed head size 256": ("layout TND: D", lambda: call(arguments=packed(size=256))),
    "packed, no lengths": ("needs both", lambda: call(arguments=packed(), actual_seq_lengths_kv=None)),
    "packed, lengths that fall": ("never fall", lambda: call(arguments=packed(), actual_seq_lengths_kv=[24, 20])),
    "packed, lengths that end early": ("last element of the query lengths", lambda: call(arguments=packed(), actual_seq_lengths=[3, 7])),
    "packed, lengths of different batches": ("one entry per sequence", lambda: call(arguments=packed(), actual_seq_lengths_kv=[44])),
    "packed, keys past the end": ("end at or before", lambda: call(arguments=packed(), actual_seq_lengths_kv=[24, 45])),
    "packed, a bias": ("no pse_shift", lambda: call(arguments=packed(), pse_shift=torch.zeros(2, 4, 8, 44).half())),
    "packed, a full mask": ("compressed one", lambda: call(arguments=packed(), atten_mask=torch.zeros(1, 8, 44, dtype=torch.bool))),
    "pages of 16 for several queries": ("128, 256, 384 or 512", lambda: call(arguments=pages(page_size=16))),
    "pages of 640": ("128, 256, 384 or 512", lambda: call(arguments=pages(page_size=640))),
    "decode pages of 24": ("multiple of 16 up to 512", lambda: call(arguments=pages([1, 1], page_size=24))),
    "decode pages of 1024": ("multiple of 16 up to 512", lambda: call(arguments=pages([1, 1], page_size=1024))),
    "packed pages of 1040": ("multiple of 16 up to 1024", lambda: call(arguments=pages(layout="TND", page_size=1040))),
    "pages and no page size": ("block_size is 128", lambda: call(arguments=pages(), block_size=0)),
    "another page size": ("that of the cache", lambda: call(arguments=pages(), block_size=256)),
    "pages and no lengths": ("pages need the key lengths", lambda: call(arguments=pages(), actual_seq_lengths_kv=None)),
    "int64 block table": ("int32", lambda: call(arguments=pages(), block_table=torch.zeros(2, 3, dtype=torch.int64))),
    "a block table of another batch": ("a row for each", lambda: call(arguments=pages(), block_table=torch.zeros(3, 3, dtype=torch.int32))),
    "a table too narrow": ("at most KV_S", lambda: call(arguments=pages(), block_table=torch.zeros(2, 1, dtype=torch.int32))),
    "a block id past the end": ("block ids", lambda: call(arguments=pages(), block_table=torch.full((2, 3), 5, dtype=torch.int32))),
    "a block id of -1 that is reached": (
        "block ids",
        lambda: call(arguments=pages(), block_table=torch.full((2, 3), -1, dtype=torch.int32)),
    ),
    "pages by head for BSND": ("BnNBsD", lambda: call(arguments=pages(by_head=True))),
    "pages wider than 65535": (
        "65535",
        lambda: call(arguments=pages([1, 1], heads=129, key_heads=129, size=512, page_size=16)),
    ),
    "sparse mode 5": ("sparse_mode is 0 to 4", lambda: call(sparse_mode=5)),
    "causal and no mask": ("needs atten_mask", lambda: call(sparse_mode=3)),
    "causal and a full mask": ("2048 x 2048", lambda: call(sparse_mode=3, atten_mask=torch.zeros(3, 24, dtype=torch.bool))),
    "causal and the opposite mask": ("above the diagonal", lambda: call(sparse_mode=3, atten_mask=~TRIANGLE)),
    "a mask of floats": ("bool, int8 or uint8", lambda: call(atten_mask=torch.zeros(3, 24).half())),
    "a mask too short": ("atten_mask is", lambda: call(atten_mask=torch.zeros(3, 23, dtype=torch.bool))),
    "a mask for heads": ("atten_mask is", lambda: call(atten_mask=torch.zeros(2, 4, 3, 24, dtype=torch.bool))),
    "a mask narrower than the table": (
        "KV_S = 384",
        lambda: call(arguments=pages(), atten_mask=torch.zeros(2, 1, 5, 256, dtype=torch.bool)),
    ),
    "row correction for one query": ("inner_precise", lambda: call(arguments=pages([1, 1]), inner_precise=2)),
    "no band": ("leave a band", lambda: call(sparse_mode=4, atten_mask=TRIANGLE, pre_tokens=2, next_tokens=-3)),
    "bias of another dtype": ("pse_shift has query's dtype", lambda: call(pse_shift=torch.zeros(1, 4, 3, 24).bfloat16())),
    "bias of another rank": ("pse_shift is", lambda: call(pse_shift=torch.zeros(4, 3, 24).half())),
    "bias broadcast over heads": ("pse_shift is", lambda: call(pse_shift=torch.zeros(1, 1, 3, 24).half())),
    "quantised output": ("quant_scale2 is not emulated", lambda: call(quant_scale2=torch.ones(1))),
    "a quantisation mode": ("antiquant_mode is not emulated", lambda: call(key_antiquant_mode=1)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_attention_refuses(name):
    rule, run = REFUSED[name]
    with pytest.raises(RuntimeError, match=rule) as error:
        run()
    by_the_wheel = "ERR01003 OPS invalid value" in str(error.value)  # its Meta kernel runs first
    assert by_the_wheel or "failed, error code is 161002 (emulated Ascend910B, CANN 9.1.0)" in str(error.value)


def test_what_is_refused_is_not_what_is_near():
    call()
    call(actual_seq_lengths=[3], actual_seq_lengths_kv=[24])
    call(arguments=pages())
    call(arguments=pages([1, 1], page_size=16), inner_precise=1)
    call(arguments=pages(layout="TND", page_size=1024))
    call(arguments=pages(layout="BNSD", by_head=True))
    call(arguments=dense(draw([3], [24], heads=64, key_heads=1, size=512), "BSND"))
    call(atten_mask=torch.zeros(16, 32, dtype=torch.bool))  # sizes may be rounded up


def second(**changes):
    arguments, keywords = packed(**changes.pop("draw", {}))
    named = {"actual_seq_lengths": "actual_seq_qlen", "actual_seq_lengths_kv": "actual_seq_kvlen", "num_heads": "num_query_heads"}
    return V2(*arguments, **{named.get(name, name): value for name, value in keywords.items()} | changes)


def test_limits_of_the_second_version():
    with pytest.raises(RuntimeError, match="inner_precise"):
        second(draw={"dtype": torch.bfloat16}, inner_precise=1)
    second(inner_precise=1)
    second(draw={"size": 64, "heads": 4, "key_heads": 4})
    with pytest.raises(RuntimeError, match="layout TND: D"):
        second(draw={"size": 64})
    with pytest.raises(RuntimeError, match="learnable_sink is bfloat16"):
        second(learnable_sink=torch.zeros(4).half())
    with pytest.raises(RuntimeError, match="value size of at most 128"):
        second(draw={"size": 192}, learnable_sink=torch.zeros(4).bfloat16())


K, V = torch.zeros(3, 2, 64).half(), torch.zeros(3, 2, 32).half()
KC, VC = torch.zeros(4, 16, 2, 64).half(), torch.zeros(4, 16, 2, 32).half()
SLOTS = torch.tensor([1, 0, 5], dtype=torch.int32)
SCATTER, RESHAPE = operator(kernels.SCATTER), operator(kernels.RESHAPE)
UNWRITABLE = {
    "slot -1": (r"slots are in \[0, 64\)", lambda write: write(K, V, KC, VC, torch.tensor([1, -1, 5], dtype=torch.int32))),
    "slot past the end": (r"slots are in", lambda write: write(K, V, KC, VC, torch.tensor([1, 64, 5], dtype=torch.int32))),
    "a slot twice": ("distinct", lambda write: write(K, V, KC, VC, torch.tensor([1, 5, 5], dtype=torch.int32))),
    "slots of floats": ("slot", lambda write: write(K, V, KC, VC, SLOTS.float())),
    "too few slots": ("a slot for each", lambda write: write(K, V, KC, VC, SLOTS[:2])),
    "dtypes mixed": ("key_cache has key's dtype", lambda write: write(K, V, KC.bfloat16(), VC, SLOTS)),
    "heads mixed": ("agree in tokens and heads", lambda write: write(K, V[:, :1].contiguous(), KC, VC, SLOTS)),
    "another head size": ("cache holds rows", lambda write: write(K, V, VC, KC, SLOTS)),
    "rank": ("three dimensions", lambda write: write(K.flatten(1), V.flatten(1), KC, VC, SLOTS)),
    "strided": ("key is contiguous", lambda write: write(strided(3, 2, 64), V, KC, VC, SLOTS)),
    "strided cache": ("value_cache is contiguous", lambda write: write(K, V, KC, strided(4, 16, 2, 32), SLOTS)),
}


@pytest.mark.parametrize("name", UNWRITABLE)
@pytest.mark.parametrize("write", [lambda *a: SCATTER(*a, cache_mode="Norm"), RESHAPE], ids=["scatter", "reshape"])
def test_cache_writes_refuse(name, write):
    rule, run = UNWRITABLE[name]
    with pytest.raises(RuntimeError, match=rule):
        run(write)
    assert not KC.any() and not VC.any()


def test_limits_that_differ_between_the_cache_writes():
    with pytest.raises(RuntimeError, match="slot_indices is int32"):
        RESHAPE(K, V, KC, VC, SLOTS.long())
    with pytest.raises(RuntimeError, match="key is float16, bfloat16 or int8"):
        RESHAPE(K.float(), V.float(), KC.float(), VC.float(), SLOTS)
    with pytest.raises(RuntimeError, match="PA_NZ cache"):
        SCATTER(K, V, KC, VC, SLOTS)  # the default is the tiled cache
    with pytest.raises(RuntimeError, match="cache_mode"):
        SCATTER(K, V, KC, VC, SLOTS, cache_mode="ND")


X, TABLE = torch.zeros(1, 6, 4, 64).half(), torch.zeros(1, 6, 1, 64).half()
ROTARY = operator(kernels.ROTARY)
UNROTATABLE = {
    "float64": ("float16, bfloat16 or float32", lambda: ROTARY(X.double(), TABLE.double(), TABLE.double())),
    "table of another dtype": ("r1 has input's dtype", lambda: ROTARY(X, TABLE.float(), TABLE.float())),
    "tables unlike": ("r1 and r2 are alike", lambda: ROTARY(X, TABLE, TABLE[:, :1])),
    "table of another rank": ("rank", lambda: ROTARY(X, TABLE[0], TABLE[0])),
    "half a table": ("broadcasts to input", lambda: ROTARY(X, TABLE[..., :32], TABLE[..., :32])),
    "odd size": ("D is even", lambda: ROTARY(X[..., :63], TABLE[..., :63], TABLE[..., :63])),
    "size 896": ("less than 896", lambda: ROTARY(*(torch.zeros(1, 2, 1, 896).half(),) * 3)),
    "1000 heads": ("fewer than 1000", lambda: ROTARY(torch.zeros(1, 1001, 1000, 2).half(), *(torch.zeros(1, 1001, 1, 2).half(),) * 2)),
    "mode": ("rotary_mode", lambda: ROTARY(X, TABLE, TABLE, "quarter")),
    "interleave, table per sequence": ("documented broadcasts", lambda: ROTARY(*(torch.zeros(2, 6, 4, 64).half(),) * 3, "interleave")),
}


@pytest.mark.parametrize("name", UNROTATABLE)
def test_rotary_refuses(name):
    rule, run = UNROTATABLE[name]
    with pytest.raises(RuntimeError, match=rule):
        run()


def test_the_declared_target_is_named():
    try:
        emulator.install("a3", "9.0.0")
        with pytest.raises(RuntimeError, match="emulated Ascend910_93, CANN 9.0.0"):
            call(sparse_mode=3)
        import torch_npu.op_plugin.meta._meta_registrations as meta

        assert meta.get_soc_version() == 250 and meta.get_cann_version("CANN") == "9.0.0"
    finally:
        emulator.install()
    with pytest.raises(ValueError, match="soc is 'b9'; the emulator knows the limits of 'a2', 'a3'"):
        emulator.install("b9")
