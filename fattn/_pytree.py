"""Registers the dataclasses of fattn.types with JAX: static fields become part of the tree's structure, host-only ones are dropped."""

import dataclasses

import jax

from fattn import types


def _register(cls):
    fields = dataclasses.fields(cls)
    jax.tree_util.register_dataclass(
        cls,
        data_fields=[f.name for f in fields if not f.metadata.get("static") and not f.metadata.get("drop")],
        meta_fields=[f.name for f in fields if f.metadata.get("static")],
        drop_fields=[f.name for f in fields if f.metadata.get("drop")],
    )


for _cls in (types.Range, types.Tokens, types.Pages, types.Batch, types.StandardConfig):
    _register(_cls)
