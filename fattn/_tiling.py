"""A packed ragged batch cut into tiles of queries of one sequence, every extent static: a loop over them can be differentiated."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int32

from fattn.types import Batch, Partial

LONGEST = 128  # queries attended at once: enough to keep matrix units busy, few enough to bound the scores held


class Standing(NamedTuple):
    """Where every packed row stands: its sequence, its place among the sequence's queries, and its position (-1 where it sees nothing)."""

    sequence: Int32[Array, "t"]
    offset: Int32[Array, "t"]
    position: Int32[Array, "t"]


class Tiles(NamedTuple):
    """Tile i holds queries part[i] * size, ... of sequence[i]; sequences without keys have no tile."""

    sequence: Int32[Array, "n"]
    part: Int32[Array, "n"]
    first: Int32[Array, "b"]  # the first tile of each sequence
    size: int
    rows: int
    batch: Batch


def standing(batch: Batch, rows: int) -> Standing:
    """Where `rows` packed rows stand: query i of a sequence at seq_len - query_len + i."""
    start, row = batch.query_start_loc, jnp.arange(rows, dtype=jnp.int32)
    sequence = jnp.clip(jnp.searchsorted(start, row, side="right") - 1, 0, batch.seq_lens.shape[0] - 1)
    position = batch.seq_lens[sequence] - start[sequence + 1] + row
    owned = (row >= start[sequence]) & (row < start[sequence + 1]) & (position >= 0)
    return Standing(sequence, row - start[sequence], jnp.where(owned, position, -1))


def tiles(batch: Batch, rows: int) -> Tiles:
    """The tiles of `rows` packed rows. Their size and the most that can be needed follow from static values alone."""
    longest, sequences = max(1, batch.max_query_len), batch.seq_lens.shape[0]
    size = min(longest, LONGEST)
    needed = jnp.where(batch.seq_lens > 0, -(-_query_lens(batch) // size), 0)
    end = jnp.cumsum(needed)
    index = jnp.arange(min(rows // size + sequences, sequences * -(-longest // size)), dtype=jnp.int32)
    sequence = jnp.minimum(jnp.searchsorted(end, index, side="right"), sequences - 1).astype(jnp.int32)
    return Tiles(sequence, index - (end - needed)[sequence], end - needed, size, rows, batch)


def queries(tiles: Tiles, sequence, part) -> tuple[Int32[Array, "size"], Int32[Array, "size"]]:
    """The rows of a tile and their positions, -1 past the end of the sequence."""
    batch, offset = tiles.batch, part * tiles.size + jnp.arange(tiles.size, dtype=jnp.int32)
    start, count = batch.query_start_loc[sequence], _query_lens(batch)[sequence]
    position = jnp.where(offset < count, batch.seq_lens[sequence] - count + offset, -1)
    return jnp.minimum(start + offset, tiles.rows - 1), position


def unpacked(partials: Partial, tiles: Tiles) -> Partial:
    """The results of all tiles [n size ...], row by row [t ...]. A row that stands nowhere sees nothing."""
    at = standing(tiles.batch, tiles.rows)
    tile = jnp.minimum(tiles.first[at.sequence] + at.offset // tiles.size, tiles.sequence.shape[0] - 1)
    out, lse = (results[tile, at.offset % tiles.size] for results in partials)
    some = (at.position >= 0)[:, None]
    return Partial(jnp.where(some[..., None], out, 0), jnp.where(some, lse, -jnp.inf))


def _query_lens(batch):
    return batch.query_start_loc[1:] - batch.query_start_loc[:-1]
