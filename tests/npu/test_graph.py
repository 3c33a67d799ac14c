"""A captured step, replayed with other lengths, tables and slots, is the eager step; what an update may not do is refused."""

import graph_faults
import numpy as np
import pytest
import torch
from graph_cases import BLOCKS, Engine, assert_step_is_eager, batch_of

import npu
import npu.graph
from fattn.plan import batch as plan
from fattn.types import Unsupported, Window, causal, same, window
from npu.emulator import graphs

torch.set_num_threads(1)
ONE, BOTH = (causal(),), (causal(), window(70, 0))


def recorded(head_size=128, masks=ONE, next_n=1, sequences=4, keys=8, **options):
    """An engine whose step is captured with `keys` keys a sequence, and that capture."""
    size = dict(tokens=next_n * sequences, sequences=sequences)
    engine = Engine(head_size, masks, tokens=size["tokens"], **options)
    batch = batch_of([next_n] * (sequences - 1), [keys] * (sequences - 1), **size)
    return engine, npu.graph.record(engine.step, batch, masks, device="cpu")


def b79(head_size=128, next_n=1):
    """Captured at 8 keys, replayed at 9 to 40 and beyond a block, three sequences padded to four."""
    engine, step = recorded(head_size, next_n=next_n)
    for keys in (9, 17, 40):
        batch = batch_of([next_n] * 3, [keys, keys + 3, keys + 100], tokens=4 * next_n, sequences=4, seed=keys)
        assert_step_is_eager(engine, step, batch, keys)
    return engine, step


@pytest.mark.parametrize("head_size", [128, 64])
@pytest.mark.parametrize("next_n", [1, 2, 4])
def test_b79_replay_is_eager(next_n, head_size):
    b79(head_size, next_n)


def test_b79_a_verified_row_is_its_own_decode():
    """Row i of several drafts equals the one-token decode that has i more keys."""
    engine, step = recorded(next_n=4)
    batch = batch_of([4, 4, 4], [30, 41, 140], tokens=16, sequences=4, seed=3)
    assert_step_is_eager(engine, step, batch, 3)
    verified = [out.clone() for out in step.result]
    for row, (sequence, keys) in enumerate(zip(np.repeat(range(3), 4), np.asarray(batch.positions)[:12] + 1, strict=True)):
        one = plan.build([1], [int(keys)], [batch.block_table[sequence].tolist()], block_size=128, num_blocks=BLOCKS)
        one = npu.place(one, "cpu", causal())
        q = engine.x[0][row : row + 1]
        found = npu.paged.attend(q, engine.caches[0], one, mask=causal(), scale=0.1, lse=False).out
        torch.testing.assert_close(verified[0][row : row + 1], found, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("head_size, next_n, sinks", [(128, 4, False), (64, 4, True), (128, 1, True), (64, 1, False)])
def test_replay_is_eager_over_200_random_steps(head_size, next_n, sinks):
    random_steps(head_size, next_n, sinks, 50)


def random_steps(head_size, next_n, sinks, steps):
    """Sequences of up to next_n queries each, a full bucket of four in some steps, under two masks in turn, in a step of two layers."""
    rng = np.random.default_rng(head_size)
    engine, step = recorded(head_size, BOTH, next_n=next_n, sinks=sinks)
    for number in range(steps):
        keys = rng.integers(next_n, 380, rng.integers(1, 5))
        queries = rng.integers(1, next_n + 1, len(keys))
        queries[: 4 if len(keys) == 4 else 1] = next_n
        batch = batch_of(queries.tolist(), keys.tolist(), tokens=4 * next_n, sequences=4, seed=number)
        assert_step_is_eager(engine, step, batch, number)


def test_capturing_runs_nothing():
    engine = Engine(128, (causal(),), tokens=4)
    batch = batch_of([1] * 3, [8] * 3, tokens=4, sequences=4)
    before = [cache.k.clone() for cache in engine.eager(batch)[1]]
    step = npu.graph.record(engine.step, batch, (causal(),), device="cpu")
    assert engine.calls == 3  # eager above, once to measure, once captured
    assert all(torch.equal(cache.k[2:], old[2:]) for cache, old in zip(engine.caches, before, strict=True))
    assert all(out.isnan().all() for out in step.result)


def test_each_operator_is_one_group_that_an_update_reaches():
    _, step = b79()
    tasks = [task for task in step.graph.tasks if task.takes_lengths()]
    assert len(tasks) == len(step.operators) == 2 and all(task.grouped for task in tasks)
    for operator, task in zip(step.operators, tasks, strict=True):
        assert operator.handle is task and task.kwargs["actual_seq_lengths_kv"] == [40, 43, 140, 0]


def test_addresses_stay():
    engine, step = recorded(64, BOTH, next_n=4)
    tensors = lambda: [*step.result, step.workspace, *(b.block_table for b in step.batches), *(b.slot_mapping for b in step.batches)]
    before = [tensor.data_ptr() for tensor in tensors()]
    after = npu.graph.update(step, batch_of([4, 1], [200, 9], tokens=16, sequences=4, seed=1))
    assert before == [tensor.data_ptr() for tensor in tensors()]
    assert [b.block_table.data_ptr() for b in after.batches] == [b.block_table.data_ptr() for b in step.batches]
    assert after.batches[0].host.seq_lens == (200, 9, 0, 0) and step.batches[0].host.seq_lens == (8, 8, 8, 0)
    after.graph.replay()
    assert graphs.waiting() == 0


def test_the_workspace_is_the_largest_of_the_bucket():
    """Of the operators that the step launches, and of the lengths that its bucket allows."""
    measure = torch.ops.npu._npu_fused_infer_attention_score_get_max_workspace
    for masks in ((window(70, 0), causal()), (causal(), window(70, 0))):
        _, step = recorded(64, masks)
        windowed = 256 if isinstance(masks[0], Window) else 384
        longest = [[keys] * 4 for keys in (windowed, 256 + 384 - windowed)]
        arguments = [
            dict(operator.arguments) | {"actual_seq_lengths_kv": keys} for operator, keys in zip(step.operators, longest, strict=True)
        ]
        needed = [measure(**given).nbytes for given in arguments]
        assert step.workspace.nbytes == max(needed) > min(needed)


def test_a_replay_without_an_update_would_hang():
    """The first one, and the one after a replay that had its update; recorded events let it go on."""
    engine, step = recorded()
    for _ in range(2):
        step.graph.replay()
        assert graphs.waiting() == 1
        with pytest.raises(RuntimeError, match="would hang"):
            torch.npu.synchronize()
        for operator in step.operators:
            operator.event.record(step.stream)
        assert graphs.waiting() == 0
    assert_step_is_eager(engine, step, batch_of([1] * 3, [20, 30, 140], tokens=4, sequences=4), 1)
    step.graph.replay()
    assert graphs.waiting() == 1
    graphs.forget()


SIZES = {
    "sequences": (dict(tokens=8, sequences=8), [1] * 3, "sequences=8.*recorded for tokens=4, sequences=4"),
    "tokens": (dict(tokens=8, sequences=4), [3] * 2, "tokens=8"),
    "queries": (dict(tokens=4, sequences=4), [2, 1], "max_query_len=2"),
}


@pytest.mark.parametrize("size, queries, message", SIZES.values(), ids=SIZES)
def test_another_buckets_batch_is_refused_by_name(size, queries, message):
    engine, step = recorded()
    before = step.batches[0].host.constants["integers"].clone()
    with pytest.raises(ValueError, match=message):
        npu.graph.update(step, batch_of(queries, [30] * len(queries), **size))
    assert torch.equal(before, step.batches[0].host.constants["integers"])


def far():
    batch = plan.build([1] * 4, [9] * 4, [[2], [3], [4], [BLOCKS]], block_size=128, num_blocks=BLOCKS + 1)
    return plan.pad(batch, tokens=4, sequences=4, pages=3)


def slotless():
    batch = plan.build([1] * 3, [9] * 3, [[2], [3], [4]], block_size=128, num_blocks=BLOCKS)
    return plan.pad(batch, tokens=4, sequences=4, pages=3)


def inexact():
    batch = plan.build([1] * 4, [9] * 4, [[2], [3], [4], [5]], block_size=128, num_blocks=BLOCKS, exact=False)
    return plan.pad(batch, tokens=4, sequences=4, pages=3)


def placed():
    return npu.place(far(), "cpu", causal())


def labelled():
    labels = {"query_labels": {"user": [0] * 4}, "key_labels": {"user": [[0] * 9] * 4}}
    batch = plan.build([1] * 4, [9] * 4, [[2], [3], [4], [5]], block_size=128, num_blocks=BLOCKS, **labels)
    return plan.pad(batch, tokens=4, sequences=4, pages=3)


@pytest.mark.parametrize(
    "make, error, message",
    [
        (far, ValueError, rf"block_table\[3, 0\]={BLOCKS}"),
        (slotless, ValueError, "slot_mapping.*null_blocks"),
        (inexact, Unsupported, "exact"),
        (placed, ValueError, "placed already"),
        (labelled, ValueError, "labels differ"),
    ],
    ids=["far", "slotless", "inexact", "placed", "labelled"],
)
def test_a_bad_update_changes_nothing(make, error, message):
    engine, step = recorded()
    before = step.batches[0].host.constants["integers"].clone()
    with pytest.raises(error, match=message):
        npu.graph.update(step, make())
    assert torch.equal(before, step.batches[0].host.constants["integers"])
    assert_step_is_eager(engine, step, batch_of([1] * 3, [20, 30, 140], tokens=4, sequences=4), 1)


def test_a_window_that_the_operator_would_ignore_is_refused():
    """Packed sequences of one query each, in a step captured for several."""
    engine, size = Engine(128, (window(70, 0),), tokens=4), dict(tokens=4, sequences=4)
    step = npu.graph.record(engine.step, batch_of([4], [8], **size), (window(70, 0),), device="cpu")
    assert_step_is_eager(engine, step, batch_of([2, 1], [200, 150], **size), 1)
    with pytest.raises(ValueError, match="ignores.*max_query_len=1, not 4"):
        npu.graph.update(step, batch_of([1] * 4, [200] * 4, **size))


def test_a_batch_that_the_step_makes_itself_is_refused():
    engine = Engine(128, (causal(),), tokens=4)
    batch = batch_of([1] * 3, [8] * 3, tokens=4, sequences=4)
    with pytest.raises(ValueError, match="none of those"):
        npu.graph.record(lambda attend, placed: engine.step(attend, npu.place(batch, "cpu", causal())), batch, (causal(),), device="cpu")


def test_labels_are_refreshed():
    """A mask over labels goes as an array, which an update makes anew."""
    mask = causal() & same("user")

    def labelled(split):
        labels = {"query_labels": {"user": [1, 1]}, "key_labels": {"user": [[0] * split + [1] * (9 - split), [1] * 9]}}
        batch = plan.build([1, 1], [9, 9], [[2], [3]], block_size=128, num_blocks=BLOCKS, **labels)
        return plan.pad(batch, tokens=2, sequences=2, pages=2)

    engine = Engine(64, (mask,), tokens=2)
    step = npu.graph.record(engine.step, labelled(2), (mask,), device="cpu")
    for split in (5, 0, 8):
        assert_step_is_eager(engine, step, labelled(split), split)


@pytest.mark.parametrize("fault", graph_faults.FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_is_seen(fault, monkeypatch):
    """Each breaks one thing in what records, updates or places; some check above fails on it."""
    fault(monkeypatch)
    checks = (
        b79,
        lambda: b79(64, 4),
        lambda: random_steps(64, 4, True, 5),
        lambda: random_steps(128, 1, True, 5),
        test_a_replay_without_an_update_would_hang,
        test_addresses_stay,
        test_each_operator_is_one_group_that_an_update_reaches,
        test_the_workspace_is_the_largest_of_the_bucket,
        lambda: test_another_buckets_batch_is_refused_by_name(*SIZES["sequences"]),
        lambda: test_a_bad_update_changes_nothing(far, ValueError, "block_table"),
        test_labels_are_refreshed,
        test_a_window_that_the_operator_would_ignore_is_refused,
    )
    for check in checks:
        try:
            check()
        except (AssertionError, AttributeError, RuntimeError, ValueError, KeyError, pytest.fail.Exception):
            return
        finally:
            graphs.forget()
    pytest.fail("no check saw it")
