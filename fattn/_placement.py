"""Where the types of arrays say that they are placed: nothing but under an Explicit mesh, whose shardings are visible on the type."""

from __future__ import annotations

import jax
from jax.sharding import NamedSharding, PartitionSpec

from fattn.types import Pages, Unsupported


def check_placed(name, array, *, heads, free=()):
    """Raises Unsupported where an array is sharded along anything but its heads (axis `heads`) and the axes in `free`."""
    spec = jax.typeof(array).sharding.spec
    for axis, over in enumerate(spec):
        if over is not None and axis != heads and axis not in free:
            raise Unsupported(
                name,
                spec,
                f"axis {axis} is sharded over {over!r}, and only heads (axis {heads}) may be",
                "shard the heads (jax.reshard), or attend to each shard's keys by itself and merge.merge the Partials",
            )


def check_alike(name, array, heads, other, peer, peer_heads):
    """Raises Unsupported where the heads of two arrays, at axes `heads` and `peer_heads`, are not sharded the same way."""
    spec = jax.typeof(array).sharding.spec
    theirs = jax.typeof(peer).sharding.spec[peer_heads]
    if spec[heads] != theirs:
        raise Unsupported(
            name,
            spec,
            f"its heads are sharded over {spec[heads]!r}, but those of {other} over {theirs!r}",
            "place both alike with jax.reshard, over a mesh axis that divides the key heads",
        )


def heads_like(rows, cache: Pages):
    """rows [t h d] with the heads sharded as the cache's are."""
    sharding = jax.typeof(cache.k).sharding
    over = sharding.spec[cache.layout.index("h")]
    return rows if over is None else jax.sharding.reshard(rows, NamedSharding(sharding.mesh, PartitionSpec(None, over, None)))


def gathered(rows):
    """rows [t h d] with every head in every place."""
    sharding = jax.typeof(rows).sharding
    return rows if sharding.spec[1] is None else jax.sharding.reshard(rows, NamedSharding(sharding.mesh, PartitionSpec(None, None, None)))
