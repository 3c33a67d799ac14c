"""Bad input is refused by a ValueError that names the field, the row and the value, before anything is written."""

import re
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from bad_input_cases import NUMBERS, SHAPES, Layer, batch

import fattn
import reference
from fattn.plan import batch as plan
from fattn.types import Range, StandardConfig, causal, chunk, window

ORACLE = Layer(reference, np.asarray, np.asarray, lambda batch, mask: batch)
JAX = Layer(fattn, jnp.asarray, np.asarray, lambda batch, mask: batch)

FUNCTIONS = ["dense.attend", "paged.write", "paged.attend", "standard.attend_and_write"]


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("layer", [ORACLE, JAX], ids=["reference", "fattn"])
def test_good_input_is_taken(function, layer):
    layer.call(function, {})


@pytest.mark.parametrize("function, changes, message", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("layer", [ORACLE, JAX], ids=["reference", "fattn"])
def test_arguments_that_do_not_fit_together(layer, function, changes, message):
    with pytest.raises(ValueError, match=message):
        layer.call(function, changes)


@pytest.mark.parametrize("function", ["paged.attend", "standard.attend_and_write"])
@pytest.mark.parametrize("change, message", NUMBERS.values(), ids=NUMBERS)
def test_numbers_that_the_oracle_reads(function, change, message):
    with pytest.raises(ValueError, match=message):
        ORACLE.call(function, {"batch": change})


def test_the_oracle_writes_no_slot_twice():
    with pytest.raises(ValueError, match=r"slots\[2\]=4 is already written by row 0"):
        ORACLE.call("paged.write", {"slots": np.array([4, 1, 4, 2, 3], np.int32)})


def test_masks_and_layers():
    for build, message in (
        (lambda: window(-1, 0), "window left must be a count of tokens >= 0, or None for an open side; got -1"),
        (lambda: window(0, -5), "window right must be .*; got -5"),
        (lambda: window(2.5, 0), "window left must be .*; got 2.5"),
        (lambda: window(True, 0), "window left must be .*; got True"),
        (lambda: chunk(0), "chunk size must be a count of tokens >= 1, got 0"),
        (lambda: Range(0, -1), "Range size must not be negative, got -1"),
        (lambda: Range(0.5, 2), "Range start must be an integer, got 0.5"),
        (lambda: StandardConfig(64, 9, 2, 16, 0.25, causal()), "heads=9 must be a multiple of kv_heads=2"),
        (lambda: StandardConfig(64, 4, 2, 16, 0.25, causal(), rotary="neox"), "rotary must be .*, got 'neox'"),
        (lambda: StandardConfig(64, 4, 0, 16, 0.25, causal()), "kv_heads must be at least 1, got 0"),
        (lambda: StandardConfig(64, -4, 2, 16, 0.25, causal()), "heads must be at least 1, got -4"),
        (lambda: StandardConfig(64, 4, 2, 16, 0.25, causal(), rotary_size=0), "rotary_size must be even, from 2 to head_size=16.*; got 0"),
        (lambda: StandardConfig(64, 4, 2, 16, 0.25, causal(), rotary_size=18), "rotary_size must be .*; got 18"),
    ):
        with pytest.raises(ValueError, match=message):
            build()


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda layer: layer.package.dense.alibi_slopes(0), "heads must be at least 1, got 0"),
        (lambda layer: layer.package.rope.yarn(64, theta=1e4, factor=0.5, original_length=4096), "factor must be at least 1, got 0.5"),
        (
            lambda layer: layer.package.rope.table(*map(layer.array, np.ones((2, 3), np.float32)), dtype=np.float32),
            r"positions .*float32\[3\]",
        ),
        (
            lambda layer: layer.package.paged.gather(
                layer.package.paged.allocate(2, 1, 4, 4, block_size=16, layout="pbhd", dtype=np.float32),
                layer.array(np.zeros((1, 2), np.float32)),
            ),
            r"block_table must be integers .*float32\[1, 2\]",
        ),
        (lambda layer: layer.package.rope.half(*(layer.array(np.ones(n, np.int32)) for n in ((3, 1, 4), (3, 2), (3, 2)))), "int32"),
    ],
)
@pytest.mark.parametrize("layer", [ORACLE, JAX], ids=["reference", "fattn"])
def test_small_functions(layer, call, message):
    with pytest.raises(ValueError, match=message):
        call(layer)


@pytest.mark.parametrize("function", ["dense.attend", "paged.attend"])
def test_what_is_no_mask(function):
    with pytest.raises(TypeError, match="mask must be made by fattn.types"):
        JAX.call(function, {"mask": np.ones((5, 7), bool)})


GOOD = dict(query_lens=[3, 1], seq_lens=[10, 7], block_tables=[[0, 1, 2], [4, 5]], block_size=4, num_blocks=9)

BUILD = {
    "lengths that disagree": (dict(seq_lens=[10]), "query_lens has 2 sequences, seq_lens 1, block_tables 2"),
    "tables that disagree": (dict(block_tables=[[0, 1, 2]]), "query_lens has 2 sequences, seq_lens 2, block_tables 1"),
    "a negative query length": (dict(query_lens=[3, -1]), "query_lens[1] = -1: a length counts tokens"),
    "a negative length": (dict(seq_lens=[10, -7]), "seq_lens[1] = -7: a length counts tokens"),
    "an overlong length": (dict(seq_lens=[13, 7]), "block_table[0] has 3 entries, room for 12 tokens, but seq_lens[0] = 13 needs 4 blocks"),
    "an overlong length in a shorter row": (dict(seq_lens=[10, 9]), "block_table[1] has 2 entries, room for 8 tokens, but seq_lens[1] = 9"),
    "a length that is no integer": (dict(seq_lens=[10, 7.5]), "seq_lens[1] = 7.5: int32 integers would work"),
    "a length that is a truth value": (dict(query_lens=[True, False]), "query_lens[0] = True: int32 integers would work"),
    "a length that is no number": (dict(seq_lens=[10, None]), "seq_lens[1] = None: int32 integers would work"),
    "a length past int32": (dict(seq_lens=[10, 2**40]), f"seq_lens[1] = {2**40}: int32 integers would work"),
    "lengths of two axes": (dict(query_lens=[[3, 1]]), "query_lens has shape [1, 2]; 1 axis would work"),
    "a block id past the end": (dict(block_tables=[[0, 1, 9], [4, 5]]), "block_table[0, 2] = 9: block ids from 0 to 8 would work"),
    "a negative block id": (dict(block_tables=[[0, 1, 2], [-1, 5]]), "block_table[1, 0] = -1: block ids from 0 to 8 would work"),
    "a block id that is no integer": (dict(block_tables=[[0, 1, 2], [4, 0.5]]), "block_table[1][1] = 0.5: int32 integers would work"),
    "a table that is a number": (dict(block_tables=[7, 8]), "block_table[0] = 7: a list of block ids for each sequence would work"),
    "a block written by two sequences": (
        dict(block_tables=[[0, 1, 2], [4, 2]]),
        "block_table[0, 2] = 2: block 2 is written by sequences 0 and 1 in one step",
    ),
    "the same slot twice": (
        dict(query_lens=[7, 1], block_tables=[[0, 1, 1], [4, 5]]),
        "block_table[0] names block 1 2 times and writes it",
    ),
    "a block read and written under two positions": (dict(block_tables=[[2, 1, 2], [4, 5]]), "block_table[0] names block 2 2 times"),
    "no block size": (dict(block_size=0), "block_size must be an integer from 1 to 2147483647, got 0"),
    "a block size that is no integer": (dict(block_size=4.0), "block_size must be an integer from 1 to 2147483647, got 4.0"),
    "no blocks": (dict(num_blocks=0), "num_blocks must be an integer from 1 to 2147483647, got 0"),
    "more slots than int32 counts": (dict(num_blocks=2**30), "num_blocks = 1073741824: blocks of 4 give more slots than int32 counts"),
    "a label too short": (dict(query_labels={"user": [1, 2]}), "query_labels['user'] has 2 values for 4 tokens"),
    "a label that is no integer": (dict(query_labels={"user": [1, 2, 3, 0.5]}), "query_labels['user'][3] = 0.5"),
    "key labels too short": (dict(key_labels={"user": [[1] * 10, [2] * 6]}), "key_labels['user'][1] has 6 values, but seq_lens[1] = 7"),
    "key labels of too few rows": (dict(key_labels={"user": [[1] * 10]}), "key_labels['user'] has 1 rows for 2 sequences"),
    "key labels of another width": (dict(key_labels={"user": np.zeros((2, 8), int)}), "key_labels['user'] has shape [2, 8]; [2, 12]"),
    "too few trees": (dict(parents=[None]), "parents has 1 rows for 2 sequences"),
    "a tree of another size": (dict(parents=[[-1, 0], None]), "parents[0] has 2 entries, but query_lens[0] = 3"),
    "a parent that comes later": (dict(parents=[[-1, 2, 0], None]), "parents[0][1] = 2: -1 for the context, or the index of an earlier"),
    "a parent of its own": (dict(parents=[[-1, 1, 0], None]), "parents[0][1] = 1"),
    "a parent below the context": (dict(parents=[[-2, 0, 0], None]), "parents[0][0] = -2"),
    "a tree that is not all keys": (dict(seq_lens=[2, 7], parents=[[-1, 0, 0], None]), "query_lens[0] = 3, but seq_lens[0] = 2"),
    "labels of two origins": (dict(parents=[None, None], query_labels={"enter": [0] * 4}), "parents makes the label 'enter'"),
    "a null block past the end": (dict(null_blocks=[9]), "null_blocks[0] = 9: block ids from 0 to 8 would work"),
    "a null block twice": (dict(null_blocks=[8, 8]), "null_blocks = [8, 8] names a block twice"),
    "a null block in use": (dict(null_blocks=[5]), "block_table[1] writes block 5, which null_blocks reserves for padding"),
    "too few null rows": (dict(query_lens=[13, 1], null_blocks=[8], seq_lens=[4, 7]), "null_blocks has 4 rows for 9 tokens"),
}


@pytest.mark.parametrize("change, message", BUILD.values(), ids=BUILD)
def test_the_plan_builds_no_bad_batch(change, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        plan.build(**(GOOD | change))


@pytest.mark.parametrize("parents", [[None, None], [[-1, 0, 0], [-1]]])
def test_entries_and_blocks_that_nothing_reads_may_be_anything(parents):
    plan.build([3, 1], [3, 1], [[3, 99, -1, 10**6], [1, 3, 3]], block_size=4, num_blocks=4, parents=parents)


def moved(field, index, value):
    def change(step):
        array = getattr(step, field).copy()
        array[index] = value
        return replace(step, **{field: array}, host=None)

    return change


CHECK = {
    "starts that fall": (moved("query_start_loc", 1, 5), "query_start_loc[2] = 4: it starts at 0 and never falls"),
    "starts that begin elsewhere": (moved("query_start_loc", 0, 1), "query_start_loc[0] = 1"),
    "starts that end elsewhere": (moved("query_start_loc", 2, 5), "query_start_loc[2] = 5, but slot_mapping has 4 tokens"),
    "starts of another length": (lambda b: replace(b, query_start_loc=b.query_start_loc[:2]), "query_start_loc has 2 entries, seq_lens 2"),
    "positions of another length": (lambda b: replace(b, positions=b.positions[:3]), "query_start_loc[2] = 4, but positions has 3 tokens"),
    "another block size": (lambda b: replace(b, block_size=3), "seq_lens[0] = 10 needs 4 blocks of 3"),
    "a slot of another token": (moved("slot_mapping", 0, 8), "slot_mapping[0] and slot_mapping[1] are both 8"),
    "a slot elsewhere": (moved("slot_mapping", 1, 12), "slot_mapping[1] = 12: the block table looks for this token in slot 8"),
    "a slot past the end": (moved("slot_mapping", 3, 36), "slot_mapping[3] = 36"),
    "a block of two sequences": (moved("block_table", (1, 1), 2), "block 2 is written by sequences 0 and 1"),
    "too low a bound": (lambda b: replace(b, max_query_len=2), "max_query_len = 2, but sequence 0 has 3 queries"),
    "a label too short": (lambda b: replace(b, query_labels={"user": np.zeros(3, np.int32)}), "query_labels['user'] has 3 values"),
    "a key label too narrow": (
        lambda b: replace(b, key_labels={"user": np.zeros((2, 3), np.int32)}),
        "key_labels['user'] has shape [2, 3]",
    ),
    "a host that disagrees": (lambda b: replace(b, host=replace(b.host, seq_lens=(10, 8))), "host.seq_lens[1] = 8, but the arrays say 7"),
    "a bound below": (lambda b: replace(b, host=replace(b.host, seq_lens=(9, 9), exact=False)), "host.seq_lens[0] = 9, but"),
    "a host of another size": (
        lambda b: replace(b, host=replace(b.host, query_lens=(4,))),
        "host.query_lens has 1 sequences, the arrays 2",
    ),
    "a host's slots elsewhere": (
        lambda b: replace(b, host=replace(b.host, slots=b.host.slots + 1)),
        "host.slots differs from slot_mapping",
    ),
}


@pytest.mark.parametrize("change, message", CHECK.values(), ids=CHECK)
def test_the_plan_finds_what_is_wrong_with_a_batch_made_by_hand(change, message):
    step = plan.build(**GOOD)
    plan.check(step, num_blocks=9)
    with pytest.raises(ValueError, match=re.escape(message)):
        plan.check(change(step), num_blocks=9)


@pytest.mark.parametrize("change, message", NUMBERS.values(), ids=NUMBERS)
def test_the_plan_finds_what_layers_under_jit_cannot_see(change, message):
    with pytest.raises(ValueError, match=message):
        plan.check(change(batch()), num_blocks=6)


def test_sizes_that_are_too_small_to_pad_to():
    step = plan.build(**GOOD, null_blocks=[8])
    for sizes, message in (
        (dict(tokens=3, sequences=2, pages=3), "tokens = 3: the batch has 4 already; 4 or more would work"),
        (dict(tokens=4, sequences=1, pages=3), "sequences = 1: the batch has 2 already"),
        (dict(tokens=4, sequences=2, pages=2), "pages = 2: the batch has 3 already"),
        (
            dict(tokens=8, sequences=2, pages=3),
            "sequences = 2: 4 padding tokens need 1 sequences of seq_len 0 beside the batch's 2; 3 or more",
        ),
        (dict(tokens=16, sequences=4, pages=3, null_blocks=[8]), "null_blocks has 4 rows for 12 tokens that are not written"),
        (dict(tokens=4.0, sequences=2, pages=3), "tokens must be an integer"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            plan.pad(step, **sizes)
    with pytest.raises(ValueError, match=re.escape("tokens = 4 exceeds every bucket of [1, 2]; a bucket of 4 or more would work")):
        plan.bucket(step, tokens=[1, 2])
