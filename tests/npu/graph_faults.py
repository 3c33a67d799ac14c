"""Ways to break a captured step, each of which some check must see."""

from __future__ import annotations

from dataclasses import replace

import torch

import npu.graph
from npu.graph import record, update


def lists_stay_what_they_were(patch):
    patch.setattr(npu.graph, "lengths", lambda batch, layout: {})


def query_lists_stay(patch):
    real = npu.graph.lengths
    patch.setattr(npu.graph, "lengths", lambda *given: {"actual_seq_lengths_kv": real(*given)["actual_seq_lengths_kv"]})


def lists_of_the_first_mask_serve_all(patch):
    def of_first(step, batch):
        return update(replace(step, operators=tuple(operator._replace(batch=0) for operator in step.operators)), batch)

    patch.setattr(npu.graph, "update", of_first)


def tables_stay_what_they_were(patch):
    patch.setattr(npu.graph, "_TENSORS", ("padded_rows", "hidden", "empty"))


def masks_stay_what_they_were(patch):
    patch.setattr(npu.graph, "_TENSORS", ("integers", "padded_rows", "empty"))


def rows_without_keys_stay_what_they_were(patch):
    patch.setattr(npu.graph, "_TENSORS", ("integers", "padded_rows", "hidden"))


def places_of_padded_rows_stay_what_they_were(patch):
    patch.setattr(npu.graph, "_TENSORS", ("integers", "hidden", "empty"))


def the_first_layer_alone_is_updated(patch):
    patch.setattr(npu.graph, "update", lambda step, batch: update(replace(step, operators=step.operators[:1]), batch))


def layers_are_updated_in_reverse(patch):
    def crossed(step, batch):
        handles = [operator.handle for operator in reversed(step.operators)]
        operators = tuple(o._replace(handle=handle) for o, handle in zip(step.operators, handles, strict=True))
        return update(replace(step, operators=operators), batch)

    patch.setattr(npu.graph, "update", crossed)


def one_group_holds_two_operators(patch):
    real = npu.graph._into

    def twice(arguments, outputs, workspace):
        real(arguments, outputs, workspace)
        return real(arguments, outputs, workspace)

    patch.setattr(npu.graph, "_into", twice)


def no_group_is_made(patch):
    patch.setattr(torch.npu, "graph_task_group_begin", lambda stream: None)
    patch.setattr(torch.npu, "graph_task_group_end", lambda stream: None)


def events_are_never_recorded(patch):
    patch.setattr(torch.npu.ExternalEvent, "record", lambda self, stream=None: None)


def events_are_not_reset(patch):
    patch.setattr(torch.npu.ExternalEvent, "reset", lambda self, stream=None: None)


def the_workspace_is_the_first_operators(patch):
    real = npu.graph._measuring

    def of_first(found):
        mine = []
        launched = real(mine)

        def measured(*described):
            launch = launched(*described)

            def call(*given):
                results = launch(*given)
                found[:] = mine[:1]
                return results

            return call

        return measured

    patch.setattr(npu.graph, "_measuring", of_first)


def the_workspace_is_for_the_captured_lengths(patch):
    real = npu.graph._operators.workspace
    short = lambda device: lambda **arguments: real(device)(**(arguments | {"actual_seq_lengths_kv": [8] * 4}))
    patch.setattr(npu.graph._operators, "workspace", short)


def an_update_brings_tensors_of_its_own(patch):
    patch.setattr(npu.graph, "_refreshed", lambda old, new: new)
    real = npu.graph.lengths
    table = lambda batch: {"block_table": batch.host.constants["block_table"]}
    patch.setattr(npu.graph, "lengths", lambda batch, layout: real(batch, layout) | table(batch))


def what_is_launched_depends_on_lengths(patch):
    real = npu.graph.place
    patch.setattr(npu.graph, "place", lambda batch, device, mask, *, bucketed: real(batch, device, mask))


def every_bucket_is_taken(patch):
    patch.setattr(npu.graph, "_of_bucket", lambda bucket, batch: batch)


def every_block_is_taken(patch):
    patch.setattr(npu.graph, "check_reach", lambda batch, *, num_blocks, writes: None)


def an_ignored_window_is_taken(patch):
    patch.setattr(npu.graph, "_check_lengths", lambda facts, batch: None)


def a_capture_is_replayed_once(patch):
    """The graph is captured anew with the eager attention, which no update reaches."""

    def without(step, batch, masks, *, device, pool=None):
        def plain(attend, *batches):
            return step(npu.paged.attend, *batches)

        return record(plain, batch, masks, device=device, pool=pool)

    patch.setattr(npu.graph, "record", without)


FAULTS = (
    lists_stay_what_they_were,
    query_lists_stay,
    lists_of_the_first_mask_serve_all,
    tables_stay_what_they_were,
    masks_stay_what_they_were,
    rows_without_keys_stay_what_they_were,
    places_of_padded_rows_stay_what_they_were,
    the_first_layer_alone_is_updated,
    layers_are_updated_in_reverse,
    one_group_holds_two_operators,
    no_group_is_made,
    events_are_never_recorded,
    events_are_not_reset,
    the_workspace_is_the_first_operators,
    the_workspace_is_for_the_captured_lengths,
    an_update_brings_tensors_of_its_own,
    what_is_launched_depends_on_lengths,
    every_bucket_is_taken,
    every_block_is_taken,
    an_ignored_window_is_taken,
    a_capture_is_replayed_once,
)
