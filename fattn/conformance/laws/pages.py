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
from fattn.conformance.plain.masks import positions
from fattn.conformance.trial import Trial
from fattn.plan import batch as plan
from fattn.types import LAYOUTS, Batch, Pages, Partial, Tokens


def relocation(trial: Trial) -> bool | None:
    """Pages elsewhere, with a block table that says so, give the same result."""
    call = trial.call
    cache, batch = call.arguments["cache"], call.arguments["batch"]
    axis = cache.layout.index("p")
    order = trial.rng().permutation(cache.k.shape[axis])
    moved = replace(cache, k=cache.k.take(order, axis), v=cache.v.take(order, axis))
    table = np.where(batch.block_table >= 0, np.argsort(order)[batch.block_table], -1).astype(np.int32)
    trial.agrees(trial.run(call.change({"cache": moved, "batch": replace(batch, block_table=table)})), label="result of relocated pages")


def table_tail(trial: Trial) -> bool | None:
    """Entries of a block table at or beyond ceil(seq_len / block_size) are never followed: stale, negative and far ids change no bit."""
    batch, rng = trial.call.arguments["batch"], trial.rng()
    unused = np.arange(batch.block_table.shape[1]) >= -(-batch.seq_lens // batch.block_size)[:, None]
    if not unused.any():
        return False
    first = trial.run(trial.call)
    for ids in ([0, 1, 2], [-1, -100], [2066, 7768, 2**31 - 1]):
        table = np.where(unused, rng.choice(ids, unused.shape), batch.block_table).astype(np.int32)
        got = trial.run(trial.call.change({"batch": replace(batch, block_table=table)}))
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
    q, count = call.arguments["q"][rows], rows.stop - rows.start
    if trial.target.arrays.compiles:  # in one shape, whatever the lengths: what is added stands at negative positions
        q, queries = _longer(q, len(batch.slot_mapping)), _longer_side(queries, len(batch.slot_mapping))
        longest = batch.block_table.shape[1] * batch.block_size
        k, v, keys = _longer(k, longest), _longer(v, longest), _longer_side(keys, longest)
    sides = [side if side.labels else side.pos for side in (queries, keys)]
    arguments = {"q": q, "k": k, "v": v, "q_pos": sides[0], "k_pos": sides[1], "bias": None}
    static = {name: call.static[name] for name in ("mask", "scale", "softcap")}
    same = Call("dense.attend", arguments, static)
    if _refused(trial, same):
        return False
    got = _first(trial.run(same), count)
    expected = _rows(trial.expected, rows)
    trial.agrees(got if call.static["lse"] else Partial(got.out, None), expected, label=f"dense result of sequence {row}")


def alone(trial: Trial) -> bool | None:
    """A sequence alone has the result that it has in any batch: the same bits where the package says so (BATCH_INVARIANT)."""
    row = _some_row(trial)
    if row is None:
        return False
    again = rebatched(trial.call, [row], like=None if trial.target.batch_invariant else _shape(trial))
    if _refused(trial, again):
        return False
    rows = plain.sequence(trial.call.arguments["batch"], row)[0]
    got = _first(trial.run(again), rows.stop - rows.start)
    trial.agrees(got, _rows(trial.expected, rows), label=f"result of sequence {row} alone")
    if trial.target.batch_invariant:
        compare.identical(got, _take(trial.got, rows), label=f"result of sequence {row} alone")


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
        chosen = slice(rows.start + start, rows.start + stop)
        part = rebatched(call, [row], lens=[(stop - start, end)], queries=[chosen], like=_shape(trial))
        if _refused(trial, part):
            return False
        got = _first(trial.run(part), stop - start)
        trial.agrees(got, _rows(trial.expected, chosen), label=f"queries {start}..{stop - 1} of sequence {row} as a chunk")


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
        got = trial.run(trial.call.change({"layout": layout}))
        compare.identical(got, plain.convert(trial.call.arguments["cache"], layout=layout), label=f"cache as {layout}")


def rebatched(call: Call, sequences, *, block_size: int | None = None, lens=None, queries=None, like: Batch | None = None) -> Call:
    """The call for some of its sequences alone, with their keys in fresh blocks, in order, of `block_size`.

    `lens` and `queries` give other (query, key) lengths and packed rows for them. `like` is a batch whose shapes the new one is padded to.
    """
    batch, cache = call.arguments["batch"], call.arguments["cache"]
    size = block_size or batch.block_size
    lens = lens or [(batch.host.query_lens[row], batch.host.seq_lens[row]) for row in sequences]
    queries = queries or [plain.sequence(batch, row)[0] for row in sequences]
    rows = np.concatenate([np.arange(part.start, part.stop) for part in queries])
    pages = [max(-(-length // size), 1) for _, length in lens]
    starts = np.cumsum([0, *pages])
    nulls = -(-len(rows) // size) + 1
    num_blocks = int(starts[-1] + nulls) if like is None else cache.k.shape[cache.layout.index("p")]
    old = plain.convert(cache, layout="pbhd")
    k, v = (np.zeros((num_blocks, size, *array.shape[2:]), array.dtype) for array in (old.k, old.v))
    for index, row in enumerate(sequences):
        at = batches.slots_of(batch, row)[: lens[index][1]]
        for new, array in ((k, old.k), (v, old.v)):
            new[starts[index] : starts[index + 1]].reshape(-1, *array.shape[2:])[: len(at)] = array.reshape(-1, *array.shape[2:])[at]
    key_labels = {name: [label[row, : lens[i][1]] for i, row in enumerate(sequences)] for name, label in batch.key_labels.items()}
    if like is not None and like.max_query_len > 1:  # one sequence without keys holds the padding; the plan pads a decode batch
        surplus = len(like.slot_mapping) - len(rows)
        rows, lens, pages = np.append(rows, np.zeros(surplus, int)), [*lens, (surplus, 0)], [*pages, 0]
        key_labels = {name: [*parts, parts[0][:0]] for name, parts in key_labels.items()}
    made = plan.build(
        [n for n, _ in lens],
        [length for _, length in lens],
        [range(start, start + count) for start, count in zip(np.cumsum([0, *pages]), pages, strict=False)],
        block_size=size,
        num_blocks=num_blocks,
        query_labels={name: label[rows] for name, label in batch.query_labels.items()},
        key_labels=key_labels,
        null_blocks=range(starts[-1], num_blocks),
    )
    made = replace(made, max_query_len=max(made.max_query_len, *(n for n, _ in lens)))
    if like is not None:
        b, p = like.block_table.shape
        made = plan.pad(made, tokens=len(like.slot_mapping), sequences=b, pages=p, null_blocks=range(starts[-1], num_blocks))
        made = replace(made, max_query_len=like.max_query_len)
    q = call.arguments["q"][rows]
    pages = plain.convert(Pages(k, v, "pbhd", size), layout=cache.layout)
    return call.change({"q": _longer(q, len(made.slot_mapping)), "cache": pages, "batch": made})


def _shape(trial) -> Batch | None:
    """The batch that a call about its sequences is padded like, where a library compiles for every shape."""
    return trial.call.arguments["batch"] if trial.target.arrays.compiles else None


def _longer(rows, count: int):
    """The rows, and zeros up to `count`."""
    return np.concatenate([rows, np.zeros((count - len(rows), *rows.shape[1:]), rows.dtype)])


def _longer_side(side: Tokens, count: int) -> Tokens:
    """The tokens, and padding up to `count`."""
    pos = positions(side)
    pos = np.concatenate([pos, np.full(count - len(pos), -1)]).astype(np.int32)
    return Tokens(pos, {name: _longer(label, count) for name, label in side.labels.items()})


def _first(got: Partial, count: int) -> Partial:
    return _take(got, slice(count))


def _take(got: Partial, rows) -> Partial:
    return Partial(*(None if array is None else array[rows] for array in got))


def _some_row(trial, least: int = 1) -> int | None:
    batch = trial.call.arguments["batch"]
    fitting = np.flatnonzero((np.diff(batch.query_start_loc) >= least) & (batch.seq_lens > 0))
    return int(trial.rng().choice(fitting)) if fitting.size else None


def _rows(expected: Expected, rows) -> Expected:
    return Expected(*(_take(part, rows) for part in expected))


def _refused(trial, call) -> bool:
    return trial.target.refusal is not None and trial.target.refusal(call) is not None


ATTEND = (
    Law("relocated pages", "bound", relocation, every=3),
    Law("table tail", "bits", table_tail, every=4),
    Law("block size", "bound", block_size, every=3, narrow=True),
    Law("paged = dense", "bound", dense, every=3, narrow=True),
    Law("sequence alone", "bound", alone, every=3),
    Law("chunks", "bound", chunks, every=3),
    Law("padding", "bound", without_padding, every=3, narrow=True),
)
WRITE = (Law("written, then read", "bits", written_then_read, every=2),)
CONVERT = (Law("there and back", "bits", there_and_back, every=2), Law("every layout", "bits", every_layout, every=1))
LAYER = (Law("table tail", "bits", table_tail, every=4), Law("given attend", "bits", given_attend, every=3, narrow=True))
