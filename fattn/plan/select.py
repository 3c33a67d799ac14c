"""Which module serves a model."""

from __future__ import annotations

from collections.abc import Mapping


def get_attn_backend_cls(use_mla: bool, use_sparse: bool, use_compress: bool) -> str:
    """The module for three flags: with use_mla "sfa" where use_sparse, else "mla"; without it "dsa" where use_compress, else "standard".

    Follows the original's document for all eight combinations: use_compress is ignored where use_mla is set, and use_sparse where it is
    not. Raises TypeError for a flag that is not a bool.
    """
    for name, flag in (("use_mla", use_mla), ("use_sparse", use_sparse), ("use_compress", use_compress)):
        if not isinstance(flag, bool):
            raise TypeError(f"{name} must be True or False, got {flag!r}")
    if use_mla:
        return "sfa" if use_sparse else "mla"
    return "dsa" if use_compress else "standard"


def backend_for(config) -> str:
    """The module for a Hugging Face-style configuration, a mapping or an object with attributes.

    "dsa" where it has compress_ratios, else "sfa" where it has index_topk, else "mla" where it has kv_lora_rank, else "standard".
    A field that is None, 0 or empty counts as absent.
    """

    def field(name):
        return config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)

    if field("compress_ratios"):
        return "dsa"
    return get_attn_backend_cls(bool(field("kv_lora_rank") or field("index_topk")), bool(field("index_topk")), False)
