"""Capturing a step of an engine as a graph, and refreshing what changes from step to step, as one value.

A captured step holds the host lists of its operators, so each replay is preceded by an update, which hands over the new ones. Device
tensors (block tables, slots, positions, labels, masks) keep their addresses and get new contents. The step is captured once for each
bucket of `fattn.plan.batch.bucket`. On a host with no NPU, `npu.emulator.graphs` stands in for torch_npu's graph interface.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fattn.types import Batch, Mask, Partial
from npu import _operators, limits
from npu._admit import admit, check_reach
from npu._checks import cache_sizes
from npu._forms import batch_form
from npu._paged import attend_by, lengths
from npu._place import place

# Of a placed batch what is on the device, under the names of host.constants: `integers` holds every integer array as one tensor
_TENSORS = ("integers", "padded_rows", "hidden", "empty")


class Bucket(NamedTuple):
    """The sizes that a step is captured for; `plan.batch.bucket` and `pad` bring a batch to them."""

    tokens: int
    sequences: int
    pages: int
    max_query_len: int
    block_size: int


class Operator(NamedTuple):
    """One captured attention operator: what an update needs to hand it new lengths."""

    handle: Any  # of its task group
    event: Any  # that a replay waits for before it runs the operator, and an update records
    arguments: Mapping[str, Any]
    outputs: list[Tensor]
    batch: int  # which of Step.batches
    facts: limits.Facts
    num_blocks: int


@dataclass(frozen=True)
class Step:
    """A captured step and everything that it reads anew: host lists, block tables, slots, positions and masks in `batches`, one a mask.

    `result` is what the step returned: its tensors hold each replay's results. `workspace` is scratch memory for all its operators.
    """

    graph: Any  # torch.npu.NPUGraph
    bucket: Bucket
    masks: tuple[Mask, ...]
    batches: tuple[Batch, ...]
    operators: tuple[Operator, ...]
    workspace: Tensor | None
    result: Any
    stream: Any  # on which updates are issued


def record(step: Callable[..., Any], batch: Batch, masks: Sequence[Mask], *, device, pool=None) -> Step:
    """Captures step(attend, *batches), in which `batches` are `batch` placed on `device` for each of `masks`.

    `batch` is planned and padded to its bucket. Pass `attend` on to every layer (`attend=`); it takes the batches given. The step runs
    once before it is captured, so that its scratch memory is known, and writes what it writes. `pool` is a torch.npu.graph_pool_handle()
    that several graphs share. Raises what paged.attend raises, ValueError for a batch with rows that have no slot, and RuntimeError where
    the operators cannot run.
    """
    _operators.attention(torch.device(device).type)
    batches = tuple(place(batch, device, mask, bucketed=True) for mask in masks)
    measured: list[Tensor] = []
    step(_attend(batches, _measuring(measured)), *batches)
    workspace = max(measured, key=lambda tensor: tensor.numel() * tensor.itemsize, default=None)
    operators: list[Operator] = []
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph, pool=pool):
        result = step(_attend(batches, _recording(operators, workspace)), *batches)
    return Step(graph, _bucket(batch), tuple(masks), batches, tuple(operators), workspace, result, torch.npu.Stream())


def update(step: Step, batch: Batch) -> Step:
    """Hands a captured step the lengths, tables, slots, positions and labels of `batch`, for one replay: `step.graph.replay()`.

    A replay without an update of its own waits for ever. Raises ValueError that names the sizes where `batch` is of another bucket, and as
    paged.attend where it leads outside a cache; nothing is changed then.
    """
    batch = _of_bucket(step.bucket, batch)
    device = step.batches[0].block_table.device
    placed = [place(batch, device, mask, bucketed=True) for mask in step.masks]
    for old, new in zip(step.batches, placed, strict=True):
        _check_same_tensors(old, new)
    for operator in step.operators:
        _check_operator(operator, placed[operator.batch])
    current = torch.npu.current_stream()
    # what a replay that still runs has yet to read may not change under it
    step.stream.wait_stream(current)
    batches = tuple(_refreshed(old, new) for old, new in zip(step.batches, placed, strict=True))
    with torch.npu.stream(step.stream):
        for operator in step.operators:
            new = lengths(batches[operator.batch], operator.arguments["input_layout"])
            torch.npu.graph_task_update_begin(step.stream, operator.handle)
            _into(operator.arguments | new, operator.outputs, step.workspace)
            torch.npu.graph_task_update_end(step.stream)
            operator.event.record(step.stream)
    return replace(step, batches=batches)


def replay(step: Step, batch: Batch) -> Any:
    """`update`, then a replay: the step's result for `batch`, in the same tensors each time. Raises as `update`."""
    step = update(step, batch)
    step.graph.replay()
    return step.result


def _attend(batches, launched):
    """An attend, as paged.attend, whose operator is called by launched(facts, number of blocks, which batch)."""

    def attend(q, cache, batch, slopes=None, *, mask: Mask, scale: float, softcap: float | None = None, lse: bool = True) -> Partial:
        which = next((at for at, known in enumerate(batches) if known.host.constants is batch.host.constants), None)
        if which is None:
            raise ValueError("batch is none of those that the step was given: an update would not reach it")
        sizes = cache_sizes(cache)
        facts = admit(q, cache, sizes, batch, slopes, mask=mask, softcap=softcap)
        _check_lengths(facts, batch)
        check_reach(batch, num_blocks=sizes[0], writes=True)
        launch = launched(facts, sizes[0], which)
        return attend_by(launch, facts, q, cache, batch, slopes, scale=scale, lse=lse, own_memory=True)

    return attend


def _measuring(found):
    """Calls the operator, and adds the scratch memory that it needs for the bucket's longest keys to `found`."""

    def launched(facts, num_blocks, which):
        def launch(arguments, outputs):
            table = arguments["block_table"]
            longest = {"actual_seq_lengths_kv": [table.shape[1] * facts.block_size] * table.shape[0]}
            found.append(_operators.workspace(table.device.type)(**(arguments | longest)))
            return _into(arguments, outputs, None)

        return launch

    return launched


def _recording(operators, workspace):
    """Calls the operator as a task group of its own, behind an event, and adds it to `operators`."""

    def launched(facts, num_blocks, which):
        def launch(arguments, outputs):
            stream, event = torch.npu.current_stream(), torch.npu.ExternalEvent()
            event.wait(stream)
            event.reset(stream)
            torch.npu.graph_task_group_begin(stream)
            results = _into(arguments, outputs, workspace)
            handle = torch.npu.graph_task_group_end(stream)
            operators.append(Operator(handle, event, arguments, outputs, which, facts, num_blocks))
            return results

        return launch

    return launched


def _into(arguments, outputs, workspace):
    return _operators.attention_call(outputs[0].device.type, workspace)(arguments, outputs)


def _bucket(batch):
    table = np.asarray(batch.block_table)
    return Bucket(len(np.asarray(batch.slot_mapping)), *table.shape, batch.max_query_len, batch.block_size)


def _of_bucket(bucket, batch):
    """The batch as one of the bucket: its longest query may be shorter."""
    if batch.host is not None and batch.host.constants:
        raise ValueError("batch is placed already: an update takes the batch as planned, and places it")
    own = _bucket(batch)
    if own._replace(max_query_len=bucket.max_query_len) != bucket or own.max_query_len > bucket.max_query_len:
        raise ValueError(
            f"batch is of bucket {_said(own)}, but the step was recorded for {_said(bucket)}: "
            "plan.batch.pad brings it there where it fits, else record a step for its own bucket"
        )
    return replace(batch, max_query_len=bucket.max_query_len)


def _said(bucket):
    return ", ".join(f"{name}={value}" for name, value in bucket._asdict().items())


def _check_same_tensors(old, new):
    before, now = (
        {name: tensor.shape for name, tensor in constants.items() if isinstance(tensor, Tensor)}
        for constants in (old.host.constants, new.host.constants)
    )
    if before != now:
        names = sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))
        raise ValueError(f"batch makes other tensors than the recorded one ({', '.join(names)}): its labels differ")


def _check_operator(operator, batch):
    facts = replace(operator.facts, keys=batch.host.constants["longest"], exact=batch.host.exact)
    limits.check(facts)
    _check_lengths(facts, batch)
    check_reach(batch, num_blocks=operator.num_blocks, writes=True)


def _check_lengths(facts, batch):
    """Raises ValueError where the operator would not apply a window, which it ignores where no packed sequence has two queries."""
    lens, mask = batch.host.query_lens, batch.host.constants["mask"]
    if facts.packed and facts.queries > 1 and max(lens, default=0) <= 1 and batch_form(lens, batch.host.seq_lens, mask).explicit:
        raise ValueError(
            f"every sequence has one query, for which the operator ignores {mask}: a step recorded with max_query_len=1, not "
            f"{facts.queries}, would work"
        )


def _refreshed(old, new):
    """The recorded batch with the contents of a new one: host values are the new ones, tensors the old with new contents."""
    constants = dict(new.host.constants)
    for name in _TENSORS:
        if name in constants:
            old.host.constants[name].copy_(constants[name])
    constants |= {name: value for name, value in old.host.constants.items() if isinstance(value, Tensor)}
    return replace(old, host=replace(new.host, constants=constants))
