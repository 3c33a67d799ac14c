"""The plan: what it builds, how it pads, and that what it builds is what the definition says."""

import timeit
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fattn.plan import batch as plan

TWO = dict(query_lens=[3, 1], seq_lens=[10, 7], block_tables=[[0, 1, 2], [4, 5]], block_size=4, num_blocks=9)

lengths = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 20)), max_size=6)


def drawn(lens, block_size, random, null_blocks=0):
    """The batch of (query_len, seq_len) pairs over shuffled blocks, its tables with entries past every length, the number of blocks."""
    pages = [-(-length // block_size) for _, length in lens]
    blocks = sum(pages) + 1 + null_blocks
    ids = list(range(null_blocks, blocks))
    random.shuffle(ids)
    tables = [[ids.pop() for _ in range(n)] + [-7] * random.randint(0, 2) for n in pages]
    step = plan.build(
        [q for q, _ in lens],
        [s for _, s in lens],
        tables,
        block_size=block_size,
        num_blocks=blocks,
        null_blocks=range(null_blocks),
    )
    return step, tables, blocks


def test_a_prefill_chunk_and_a_decode_step():
    step = plan.build(**TWO)
    assert step.query_start_loc.tolist() == [0, 3, 4] and step.seq_lens.tolist() == [10, 7]
    assert step.positions.tolist() == [7, 8, 9, 6]
    assert step.slot_mapping.tolist() == [1 * 4 + 3, 2 * 4, 2 * 4 + 1, 5 * 4 + 2]
    assert step.block_table.tolist() == [[0, 1, 2], [4, 5, -1]]
    assert step.max_query_len == 3 and step.block_size == 4
    assert step.host.query_lens == (3, 1) and step.host.seq_lens == (10, 7)
    assert step.host.slots.dtype == np.int64 and step.host.slots.tolist() == step.slot_mapping.tolist() and step.host.exact
    for array in (step.query_start_loc, step.seq_lens, step.block_table, step.slot_mapping, step.positions):
        assert array.dtype == np.int32


def test_tables_as_an_array_and_lengths_as_arrays():
    table = np.array([[0, 1, 2], [4, 5, 99]])
    step = plan.build(np.array([3, 1]), np.array([10, 7], np.uint8), table, block_size=4, num_blocks=9)
    assert step.block_table.tolist() == [[0, 1, 2], [4, 5, -1]], "an entry that no length reaches is not kept"
    assert step.slot_mapping.tolist() == plan.build(**TWO).slot_mapping.tolist()


def test_more_queries_than_keys_stand_at_negative_positions_and_write_nothing():
    step = plan.build([5], [2], [[3]], block_size=4, num_blocks=4)
    assert step.positions.tolist() == [-3, -2, -1, 0, 1]
    assert step.slot_mapping.tolist() == [-1, -1, -1, 12, 13] == step.host.slots.tolist()
    step = plan.build([5], [2], [[3]], block_size=4, num_blocks=4, null_blocks=[1])
    assert step.host.slots.tolist() == [4, 5, 6, 12, 13]


def test_no_sequences():
    step = plan.build([], [], [], block_size=4, num_blocks=4)
    assert step.slot_mapping.size == 0 and step.query_start_loc.tolist() == [0] and step.block_table.shape == (0, 1)
    plan.check(step, num_blocks=4)
    plan.check(plan.bucket(step), num_blocks=4)


def test_a_shared_prefix_is_read_by_both_and_may_be_written_in_the_same_step():
    step = plan.build([8, 2], [8, 10], [[0, 1], [0, 1, 2]], block_size=4, num_blocks=3)
    assert step.slot_mapping.tolist() == [*range(8), 8, 9]


@given(lengths, st.integers(1, 7), st.randoms(use_true_random=False))
def test_positions_and_slots_follow_the_definition(lens, block_size, random):
    step, tables, blocks = drawn(lens, block_size, random)
    row = 0
    for (queries, length), table in zip(lens, tables, strict=True):
        for i in range(queries):
            p = length - queries + i
            assert step.positions[row] == p
            assert step.slot_mapping[row] == (table[p // block_size] * block_size + p % block_size if p >= 0 else -1)
            row += 1
    assert row == step.query_start_loc[-1]
    plan.check(step, num_blocks=blocks)


@given(lengths, st.integers(1, 7), st.randoms(use_true_random=False))
def test_padding_stands_at_negative_positions_and_writes_to_distinct_null_rows(lens, block_size, random):
    step, _, blocks = drawn(lens, block_size, random, null_blocks=90)
    rows, sequences = step.slot_mapping.size, step.seq_lens.size
    padded = plan.bucket(step, null_blocks=range(90))
    plan.check(padded, num_blocks=blocks)
    assert padded.query_start_loc[-1] == padded.slot_mapping.size == padded.positions.size == sum(padded.host.query_lens)
    assert all(n & (n - 1) == 0 for n in (padded.slot_mapping.size, *padded.block_table.shape, padded.max_query_len))
    for field in ("slot_mapping", "positions"):
        assert getattr(padded, field)[:rows].tolist() == getattr(step, field).tolist()
    assert padded.seq_lens.tolist() == step.seq_lens.tolist() + [0] * (padded.seq_lens.size - sequences)
    assert (padded.positions[rows:] < 0).all() and (padded.slot_mapping[rows:] == -1).all()
    written = padded.slot_mapping >= 0
    assert padded.host.slots[written].tolist() == padded.slot_mapping[written].tolist()
    assert (padded.host.slots[~written] < 90 * block_size).all() and len(set(padded.host.slots.tolist())) == padded.slot_mapping.size


def test_decode_pads_with_one_query_each_and_prefill_with_one_long_sequence():
    decode = plan.bucket(plan.build([1] * 3, [5, 6, 7], [[0, 1], [2, 3], [4, 5]], block_size=4, num_blocks=8))
    assert decode.query_start_loc.tolist() == [0, 1, 2, 3, 4] and decode.seq_lens.tolist() == [5, 6, 7, 0]
    assert decode.max_query_len == 1 and decode.positions.tolist() == [4, 5, 6, -1]
    prefill = plan.bucket(plan.build(**TWO), tokens=(8, 16), sequences=(4, 8), pages=(3,))
    assert prefill.query_start_loc.tolist() == [0, 3, 4, 8, 8] and prefill.seq_lens.tolist() == [10, 7, 0, 0]
    assert prefill.host.query_lens == (3, 1, 4, 0) and prefill.positions.tolist() == [7, 8, 9, 6, -4, -3, -2, -1]
    assert prefill.max_query_len == 4, "a bucket of its own; the padding sequence has no keys, so it does not count"


def test_empty_sequences_in_a_decode_step_leave_room_for_its_padding():
    step = plan.build([1, 0, 1, 0, 1], [1] * 5, [[0], [1], [2], [3], [4]], block_size=4, num_blocks=5)
    padded = plan.bucket(step)
    assert padded.slot_mapping.size == 4 and padded.host.query_lens == (1, 0, 1, 0, 1, 1, 0, 0)


def test_the_same_bucket_is_the_same_shape():
    shapes = set()
    for queries in ([1] * 5, [1] * 6, [1] * 8):
        step = plan.build(
            queries, [9] * len(queries), [[3 * i, 3 * i + 1, 3 * i + 2] for i in range(len(queries))], block_size=4, num_blocks=24
        )
        padded = plan.bucket(step)
        shapes.add((padded.slot_mapping.shape, padded.block_table.shape, padded.query_start_loc.shape, padded.max_query_len))
    assert len(shapes) == 1


def test_padding_keeps_unwritten_slots_for_npu_to_refuse_where_nothing_is_reserved():
    assert plan.bucket(plan.build(**TWO), tokens=(8,)).host.slots.tolist() == [7, 8, 9, 22, -1, -1, -1, -1]


def test_upper_bounds_are_marked():
    assert plan.bucket(plan.build(**TWO, exact=False)).host.exact is False


def test_labels_travel_and_padding_gets_labels_too():
    step = plan.build(**TWO, query_labels={"user": [7, 7, 7, 8]}, key_labels={"user": [[7] * 10, [8] * 7]})
    assert step.key_labels["user"].tolist() == [[7] * 10 + [0] * 2, [8] * 7 + [0] * 5]
    padded = plan.bucket(step)
    assert padded.query_labels["user"].tolist() == [7, 7, 7, 8]
    assert padded.key_labels["user"].shape == (2, 16) and padded.key_labels["user"][:, :12].tolist() == step.key_labels["user"].tolist()
    again = plan.build(**TWO, query_labels=step.query_labels, key_labels=step.key_labels)
    assert again.key_labels["user"].tolist() == step.key_labels["user"].tolist(), "labels as an array [b, p * block_size]"


def sees(labels_of_keys, labels_of_queries, sequence, rows):
    enter = labels_of_queries["enter"][rows]
    return (labels_of_keys["enter"][sequence] <= enter[:, None]) & (enter[:, None] < labels_of_keys["exit"][sequence])


def test_a_draft_tree_beside_a_chain():
    #        0        2
    #      1   3      (4 is a child of 3)
    parents = [-1, 0, -1, 0, 3]
    step = plan.build([5, 2], [9, 3], [[0, 1, 2], [3]], block_size=4, num_blocks=4, parents=[parents, None])
    assert step.positions.tolist() == [4, 5, 4, 5, 6, 1, 2], "context + depth"
    assert step.slot_mapping.tolist() == [4, 5, 6, 7, 8, 13, 14], "but each has a slot of its own"
    tree = sees(step.key_labels, step.query_labels, 0, slice(0, 5))
    assert tree[:, :4].all(), "everybody sees the context"
    assert tree[:, 4:9].astype(int).tolist() == [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 0, 1, 0, 0], [1, 0, 0, 1, 0], [1, 0, 0, 1, 1]]
    assert sees(step.key_labels, step.query_labels, 1, slice(5, 7))[:, :3].tolist() == [[True, True, False], [True, True, True]]
    plan.check(plan.bucket(step), num_blocks=4)


@given(st.lists(st.integers(0, 100), max_size=12))
def test_tree_labels_say_who_is_an_ancestor(draws):
    parents = [draw % (i + 1) - 1 for i, draw in enumerate(draws)]
    enter, exit = plan.tree_labels(parents)
    assert enter.dtype == exit.dtype == np.int32
    for i in range(len(parents)):
        line, node = set(), i
        while node >= 0:
            line.add(node)
            node = parents[node]
        assert line == {j for j in range(len(parents)) if enter[j] <= enter[i] < exit[j]}


def test_an_engine_may_leave_tokens_unwritten():
    plan.check(replace(plan.build(**TWO), slot_mapping=np.full(4, -1, np.int32), host=None), num_blocks=9)


@pytest.mark.parametrize("sequences", [1, 256])
def test_building_takes_less_than_a_millisecond(sequences):
    tables = np.arange(sequences * 32).reshape(sequences, 32).tolist()
    queries, lens = [1] * sequences, [500] * sequences
    once = lambda: plan.build(queries, lens, tables, block_size=16, num_blocks=sequences * 32)
    assert min(timeit.repeat(once, number=5, repeat=20)) / 5 < 1e-3
