"""Laws of paged attention and of the layer: where keys lie, how a sequence is cut, and who shares the batch change nothing."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fattn.conformance import compare
from fattn.conformance.calls import Call
from fattn.conformance.laws.base import Law
from fattn.conformance.operations import batches
from fattn.conformance.oracle import Expected
from fattn.conformance.plain import paged as plain
from fattn.conformance.trial import Trial
from fattn.plan import batch as plan
from fattn.types import LAYOUTS, Pages, Partial


def relocation(trial: Trial) -> bool | None:
    """Pages elsewhere, with a block table that says so, give the same result."""
    call = trial.call
    cache, batch = call.arguments["cache"], call.arguments["batch"]
    axis = cache.layout.index("p")
    order = trial.rng().permutation(cache.k.shape[axis])
    moved = replace(cache, k=cache.k.take(order, axis), v=cache.v.take(order, axis))
    table = np.where(batch.block_table >= 0, np.argsort(order)[batch.block_table], -1).astype(np.int32)
    trial.agrees(trial.run(call.change(cache=moved, batch=replace(batch, block_table=table))), label="result of relocated pages")


def table_tail(trial: Trial) -> bool | None:
    """Entries of a block table at or beyond ceil(seq_len / block_size) are never followed: stale, negative and far ids change no bit."""
    batch, rng = trial.call.arguments["batch"], trial.rng()
    unused = np.arange(batch.block_table.shape[1]) >= -(-batch.seq_lens // batch.block_size)[:, None]
    if not unused.any():
        return False
    first = trial.run(trial.call)
    for ids in ([0, 1, 2], [-1, -100], [2066, 7768, 2**31 - 1]):
        table = np.where(unused, rng.choice(ids, unused.shape), batch.block_table).astype(np.int32)
        got = trial.run(trial.call.change(batch=replace(batch, block_table=table)))
        compare.identical(got, first, label=f"result with {ids} in the tail")


def block_size(trial: Trial) -> bool | None:
    """Blocks of twice the size give the same result."""
    call, batch = trial.call, trial.call.arguments["batch"]
    again = rebatched(call, [*range(len(batch.host.seq_lens))], block_size=2 * batch.block_size)
    if _refused(trial, again):
        return False
    trial.agrees(trial.run(again), label="result with larger blocks")


def dense(trial: Trial) -> bool | None:
    """Attention over pages is dense attention over the keys that the block table names in order, one sequence at a time."""
    call, batch = trial.call, trial.call.arguments["batch"]
    row = _some_row(trial)
    if row is None or call.arguments["slopes"] is not None:
        return False
    rows, queries, keys, table = plain.sequence(batch, row)
    k, v = (x[0, : keys.pos.size] for x in plain.gather(call.arguments["cache"], table))
    sides = [side if side.labels else side.pos for side in (queries, keys)]
    arguments = {"q": call.arguments["q"][rows], "k": k, "v": v, "q_pos": sides[0], "k_pos": sides[1], "bias": None}
    static = {name: call.static[name] for name in ("mask", "scale", "softcap")}
    same = Call("dense.attend", arguments, static)
    if _refused(trial, same):
        return False
    got = trial.run(same)
    expected = _rows(trial.expected, rows)
    trial.agrees(got if call.static["lse"] else Partial(got.out, None), expected, label=f"dense result of sequence {row}")


def alone(trial: Trial) -> bool | None:
    """A sequence alone has the result that it has in any batch."""
    row = _some_row(trial)
    if row is None:
        return False
    again = rebatched(trial.call, [row])
    if _refused(trial, again):
        return False
    rows = plain.sequence(trial.call.arguments["batch"], row)[0]
    trial.agrees(trial.run(again), _rows(trial.expected, rows), label=f"result of sequence {row} alone")


def chunks(trial: Trial) -> bool | None:
    """A sequence's queries in chunks, each with the keys up to its end, have the result of one shot; chunks of one are decode steps.

    It holds for masks that show no later key.
    """
    call, batch = trial.call, trial.call.arguments["batch"]
    row = _some_row(trial, least=2)
    if row is None or batch.key_labels or "Causal" not in repr(call.static["mask"]):
        return False
    rows = plain.sequence(batch, row)[0]
    count, length = rows.stop - rows.start, int(batch.seq_lens[row])
    cut = 1 if trial.rng().random() < 0.5 else count // 2
    for start in (0, cut):
        stop = cut if start == 0 else count
        end = length - (count - stop)
        if end <= 0:
            continue
        part = rebatched(call, [row], lens=[(stop - start, end)], queries=[slice(rows.start + start, rows.start + stop)])
        if _refused(trial, part):
            return False
        wanted = _rows(trial.expected, slice(rows.start + start, rows.start + stop))
        trial.agrees(trial.run(part), wanted, label=f"queries {start}..{stop - 1} of sequence {row} as a chunk")


def without_padding(trial: Trial) -> bool | None:
    """Bucket padding changes no real row."""
    call, batch = trial.call, trial.call.arguments["batch"]
    real = [row for row, length in enumerate(batch.host.seq_lens) if length > 0]
    if not real:
        return False
    again = rebatched(call, real)
    if _refused(trial, again):
        return False
    rows = np.concatenate([np.arange(batch.query_start_loc[row], batch.query_start_loc[row + 1]) for row in real])
    trial.agrees(trial.run(again), _rows(trial.expected, rows), label="result without padding")


def written_then_read(trial: Trial) -> bool | None:
    """What write stores, gather finds: the rows at their slots, everything else as it was."""
    cache, slots = trial.call.arguments["cache"], trial.call.arguments["slots"]
    after = trial.run(trial.call)
    blocks = cache.k.shape[cache.layout.index("p")]
    table = np.arange(blocks, dtype=np.int32)[None]
    found = trial.run(Call("paged.gather", {"cache": after, "block_table": table}, {}))
    before = plain.gather(cache, table)
    real = (slots >= 0) & (slots < blocks * cache.block_size)
    for name, got, old in zip("kv", found, before, strict=True):
        wanted = old[0].copy()
        wanted[slots[real]] = trial.call.arguments[name][real]
        compare.identical(got[0], wanted, label=f"gathered {name}")


def there_and_back(trial: Trial) -> bool | None:
    """Converting to another layout and back gives the same bits."""
    cache = trial.call.arguments["cache"]
    there = trial.run(trial.call)
    back = trial.run(Call("paged.convert", {"cache": there}, {"layout": cache.layout}))
    compare.identical(back, cache, label="cache converted there and back")


class _Reached(Exception):
    """The attention that a layer was given has been called."""


def given_attend(trial: Trial) -> None:
    """A layer calls the attention that it is given, not its own."""

    def attend(q, cache, batch, slopes=None, *, mask, scale, softcap=None, lse=True):
        raise _Reached

    try:
        trial.run(Call(trial.call.operation, trial.call.arguments, {**trial.call.static, "attend": attend}))
    except _Reached:
        return
    raise compare.Mismatch("the attend= that was given is not called")


def every_layout(trial: Trial) -> None:
    """A cache converted to each layout holds the same rows: sizes that agree by chance hide no exchanged axes."""
    for layout in LAYOUTS:
        got = trial.run(trial.call.change(layout=layout))
        compare.identical(got, plain.convert(trial.call.arguments["cache"], layout=layout), label=f"cache as {layout}")


def rebatched(call: Call, sequences, *, block_size: int | None = None, lens=None, queries=None) -> Call:
    """The call for some of its sequences alone, with their keys in fresh blocks, in order, of `block_size`.

    `lens` and `queries` give other (query, key) lengths and packed rows for them.
    """
    batch, cache = call.arguments["batch"], call.arguments["cache"]
    size = block_size or batch.block_size
    lens = lens or [(batch.host.query_lens[row], batch.host.seq_lens[row]) for row in sequences]
    queries = queries or [plain.sequence(batch, row)[0] for row in sequences]
    pages = [max(-(-length // size), 1) for _, length in lens]
    starts = np.cumsum([0, *pages])
    padded = max(n for n, _ in lens)
    nulls = -(-sum(n for n, _ in lens) // size) + 1
    old = plain.convert(cache, layout="pbhd")
    k, v = (np.zeros((starts[-1] + nulls, size, *array.shape[2:]), array.dtype) for array in (old.k, old.v))
    for index, row in enumerate(sequences):
        at = batches.slots_of(batch, row)[: lens[index][1]]
        for new, array in ((k, old.k), (v, old.v)):
            new[starts[index] : starts[index + 1]].reshape(-1, *array.shape[2:])[: len(at)] = array.reshape(-1, *array.shape[2:])[at]
    rows = np.concatenate([np.arange(part.start, part.stop) for part in queries])
    made = plan.build(
        [n for n, _ in lens],
        [length for _, length in lens],
        [range(starts[index], starts[index + 1]) for index in range(len(lens))],
        block_size=size,
        num_blocks=int(starts[-1] + nulls),
        query_labels={name: label[rows] for name, label in batch.query_labels.items()},
        key_labels={name: [label[row, : lens[i][1]] for i, row in enumerate(sequences)] for name, label in batch.key_labels.items()},
        null_blocks=range(starts[-1], starts[-1] + nulls),
    )
    made = replace(made, max_query_len=max(made.max_query_len, padded))
    pages = plain.convert(Pages(k, v, "pbhd", size), layout=cache.layout)
    return call.change(q=call.arguments["q"][rows], cache=pages, batch=made)


def _some_row(trial, least: int = 1) -> int | None:
    batch = trial.call.arguments["batch"]
    fitting = np.flatnonzero((np.diff(batch.query_start_loc) >= least) & (batch.seq_lens > 0))
    return int(trial.rng().choice(fitting)) if fitting.size else None


def _rows(expected: Expected, rows) -> Expected:
    return Expected(*(Partial(*(None if array is None else array[rows] for array in part)) for part in expected))


def _refused(trial, call) -> bool:
    return trial.target.refusal is not None and trial.target.refusal(call) is not None


ATTEND = (
    Law("relocated pages", "bound", relocation, every=3),
    Law("table tail", "bits", table_tail, every=4),
    Law("block size", "bound", block_size, every=3, narrow=True),
    Law("paged = dense", "bound", dense, every=3, narrow=True),
    Law("sequence alone", "bound", alone, every=3, narrow=True),
    Law("chunks", "bound", chunks, every=3, narrow=True),
    Law("padding", "bound", without_padding, every=3, narrow=True),
)
WRITE = (Law("written, then read", "bits", written_then_read, every=2),)
CONVERT = (Law("there and back", "bits", there_and_back, every=2), Law("every layout", "bits", every_layout, every=1))
LAYER = (Law("table tail", "bits", table_tail, every=4), Law("given attend", "bits", given_attend, every=3, narrow=True))
