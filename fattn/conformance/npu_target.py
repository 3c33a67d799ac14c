"""The target `npu`: torch tensors, batches placed by the package, refusals predicted from its table of limits. Imported on use."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from types import ModuleType

import numpy as np

from fattn.conformance.calls import Call
from fattn.conformance.targets import Arrays, Target, library
from fattn.types import Batch, Mask, Unsupported
from reference.bounded import ROUNDOFF, Precision


def make(package: ModuleType, get: Callable, device: str, assume: str | None = None) -> Target:
    """`npu` on a CPU through its emulator, or on `npu` tensors: a real device's, else those of the emulator's host-memory device.

    `assume` is a file of `python -m npu probe`: the emulator is the chip that it is about, and answers as it did. Raises OSError or
    ValueError where the file cannot be read or is about a chip that the emulator does not know.
    """
    from npu import emulator, probe

    report = None if assume is None else probe.read(assume)
    if report is None:
        provider = emulator.install(device=device)
    else:
        provider = emulator.install(report.soc, report.cann, probe.variants(report), device=device)
    arrays = library("torch") if device == "cpu" else _on_device(library("torch"))
    return Target(
        "npu",
        provider,
        get,
        arrays,
        precision=lambda dtype: Precision(**package.PRECISION.get(dtype, {"bias": ROUNDOFF.get(dtype, 0.0)})),
        place=lambda batch, mask: package.place(batch, "cpu" if device == "cpu" else "npu:0", mask),
        refusal=refusal,
        excluded=excluded,
        finite_hidden=True,
        batch_invariant=getattr(package, "BATCH_INVARIANT", False),
        notes=tuple(_notes(report, assume)),
    )


def _notes(report, assume) -> Iterator[str]:
    """What the results rest on: the answers that the emulator follows, those that it cannot, and what no device was ever asked."""
    from npu import probe

    if report is not None:
        followed = probe.variants(report)
        yield f"the emulator answers as {assume} ({report.provider}, CANN {report.cann}) says: {', '.join(followed) or 'as believed'}"
        for name, what in probe.dependent(followed):
            yield f"npu depends on {name!r} not being so: do not use {what}"
        for answer in probe.unfollowed(report):
            yield f"not followed: {answer.kind} {answer.id!r} {answer.answer}: {answer.message}"
    never, count = probe.never_probed(report), len(probe.questions())
    if never:
        names = f": {', '.join(never)}" if len(never) < count else ""
        yield f"never probed on a device: {len(never)} of {count} limits and assumptions{names} (python -m npu probe, docs/on-a-device.md)"


def refusal(call: Call) -> Unsupported | None:
    """What the package's limits say of a call, from what its host knows."""
    from npu import limits

    for facts in _facts(call):
        found = limits.refusal(facts)
        if found is not None:
            return found
    return None


def excluded(call: Call) -> str | None:
    """Calls that the package's documentation leaves to the caller to avoid, and which a device does not check."""
    if call.operation != "paged.write":
        return None
    cache, slots = call.arguments["cache"], call.arguments["slots"]
    inside = (slots >= 0) & (slots < cache.k.shape[cache.layout.index("p")] * cache.block_size)
    return None if inside.all() else "slots outside the cache never reach the operator: the plan maps padding to null blocks"


def _facts(call: Call):
    """Each operator call that a call leads to, as limits see it."""
    from npu import limits
    from npu._forms import dense_form

    arguments = call.arguments
    if call.operation == "dense.attend":
        q, k, v, bias = (arguments[name] for name in ("q", "k", "v", "bias"))
        yield limits.Facts(
            call.operation,
            q.dtype.name,
            heads=q.shape[1],
            kv_heads=k.shape[1],
            head_size=q.shape[2],
            value_size=v.shape[2],
            queries=len(q),
            keys=len(k),
            explicit=dense_form(arguments["q_pos"], arguments["k_pos"], call.static["mask"], biased=bias is not None) == "explicit",
            additive=None if bias is None else bias.dtype.name,
            softcap=call.static["softcap"],
        )
    elif call.operation in ("rope.half", "rope.interleaved"):
        x = arguments["x"]
        yield limits.Facts(call.operation, x.dtype.name, heads=x.shape[1], head_size=2 * arguments["cos"].shape[1])
    elif call.operation == "paged.write":
        yield _written(arguments["cache"])
    elif call.operation == "paged.attend":
        yield _paged(arguments["cache"], arguments["batch"], arguments["slopes"], arguments["q"].shape[1], call.static, lse=True)
    elif call.operation == "standard.attend_and_write":
        yield _written(arguments["cache"])
        lse = arguments["sinks"] is not None
        yield _paged(arguments["cache"], arguments["batch"], arguments["slopes"], arguments["q"].shape[1], call.static, lse=lse)
    elif call.operation == "standard.forward":
        config = call.static["config"]
        yield _written(arguments["cache"])
        static = {"mask": config.mask, "softcap": config.softcap}
        weights = arguments["weights"]
        lse = weights.sinks is not None
        yield _paged(arguments["cache"], arguments["batch"], weights.slopes, config.heads, static, lse=lse)


def _written(cache):
    from npu import limits

    kv_heads = cache.k.shape[cache.layout.index("h")]
    return limits.Facts("paged.write", cache.k.dtype.name, kv_heads=kv_heads, layout=cache.layout)


def _paged(cache, batch: Batch, slopes, heads: int, static: dict, *, lse: bool):
    from npu import limits
    from npu._forms import batch_form

    mask: Mask = static["mask"]
    form = batch_form(batch.host.query_lens, batch.host.seq_lens, mask)
    return limits.Facts(
        "paged.attend",
        cache.k.dtype.name,
        heads=heads,
        kv_heads=cache.k.shape[cache.layout.index("h")],
        head_size=cache.k.shape[-1],
        value_size=cache.v.shape[-1],
        queries=form.queries,
        keys=max(batch.host.seq_lens, default=0),
        sequences=len(batch.host.seq_lens),
        explicit=form.explicit,
        additive=None if slopes is None else cache.k.dtype.name,
        softcap=static["softcap"],
        exact=batch.host.exact,
        layout=cache.layout,
        block_size=cache.block_size,
        output_alone=form.uniform and form.queries == 1 and not lse,
    )


def _on_device(arrays: Arrays) -> Arrays:
    """torch's arrays, on npu:0."""
    moved = lambda array: arrays.to_array(array).to("npu:0")
    return replace(arrays, to_array=moved, strided=lambda array: arrays.strided(np.asarray(array)).to("npu:0"))
