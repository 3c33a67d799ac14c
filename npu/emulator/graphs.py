"""A recording stand-in for torch_npu's graph interface: NPUGraph, graph, task groups and their update, ExternalEvent; CPU streams.

Capturing runs a step and then takes it back: what it wrote is restored, and what it made holds junk, as where nothing ran. A replay issues
the captured operators again, on the same tensors, with the host lists of the last update, and stops at an event that is not recorded yet.
Refused: a task group that does not hold one operator, values read back in a capture, an update that issues another operator or whose
tensors have moved. Source: the documents of torch_npu.npu (graphs, ExternalEvent) and of aclmdlRICaptureTaskGrpBegin and TaskUpdateBegin.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from npu.emulator.launches import READS_BACK

_capture: list[_Capture] = []  # at most one at a time
_update: list[_Update] = []
_waiting: deque[Iterator[None]] = deque()  # replays on the one stream, in order; the first has met an event that is not recorded


class Task:
    """One captured operator with its arguments, and the new tensors that it made: their places among its results."""

    def __init__(self, operator, args, kwargs, made):
        self.operator, self.args, self.kwargs, self.made = operator, args, kwargs, made
        self.grouped = False

    def run(self):
        """Issues the operator again; what it makes goes to the tensors that the capture made."""
        results = _tensors(self.operator(*self.args, **self.kwargs))
        for place, tensor in self.made.items():
            tensor.copy_(results[place])

    def takes_lengths(self) -> bool:
        """Whether host lists of lengths are among its arguments: outside a group they stay what they were at capture."""
        return any(name.startswith("actual_seq") and value is not None for name, value in self.kwargs.items())


class _Mark(NamedTuple):
    """A captured wait for an event, or its reset."""

    kind: str
    event: ExternalEvent


class NPUGraph:
    """As torch.npu.NPUGraph. `tasks` are the captured operators."""

    def __init__(self):
        self._nodes: list[Task | _Mark] | None = None

    @property
    def tasks(self) -> list[Task]:
        return [node for node in self._nodes or () if isinstance(node, Task)]

    def capture_begin(self, pool=None, capture_error_mode="global"):
        _demand(not _capture, "a capture has begun already")
        _capture.append(_Capture())
        _capture[0].__enter__()

    def capture_end(self):
        _demand(bool(_capture), "no capture has begun")
        capture = _capture.pop()
        capture.__exit__(None, None, None)
        _demand(capture.group is None, "the capture ends inside a task group")
        capture.take_back()
        self._nodes = capture.nodes

    def replay(self):
        _demand(self._nodes is not None, "replay of a graph that was never captured")
        _demand(not _capture, "replay inside a capture")
        _waiting.append(self._run())
        _advance()

    def reset(self):
        self._nodes = None

    def pool(self):
        return id(self), 0

    def _run(self):
        for node in self._nodes:
            if isinstance(node, Task):
                with torch.no_grad():
                    node.run()
            elif node.kind == "reset":
                node.event.recorded = False
            else:
                while not node.event.recorded:
                    yield


class graph(contextlib.AbstractContextManager):
    """As torch.npu.graph: captures what runs inside."""

    def __init__(self, npu_graph, pool=None, stream=None, capture_error_mode="global"):
        self._graph, self._pool = npu_graph, pool

    def __enter__(self):
        self._graph.capture_begin(self._pool)

    def __exit__(self, kind, error, trace):
        if error is None:
            self._graph.capture_end()
        else:
            # what failed is not a graph
            _capture.pop().__exit__(None, None, None)


class ExternalEvent:
    """As torch.npu.ExternalEvent: waited for in a captured step, recorded by an update."""

    def __init__(self):
        self.recorded = False

    def wait(self, stream=None):
        if _capture:
            _capture[0].nodes.append(_Mark("wait", self))
        else:
            _demand(self.recorded, "a stream waits for an event that is not recorded: the device would hang")

    def reset(self, stream=None):
        if _capture:
            _capture[0].nodes.append(_Mark("reset", self))
        else:
            self.recorded = False

    def record(self, stream=None):
        _demand(not _capture, "an external event is recorded inside a capture: nothing outside would")
        self.recorded = True
        _advance()


def is_current_stream_capturing() -> bool:
    return bool(_capture)


def graph_pool_handle():
    return 0, 1


def graph_task_group_begin(stream):
    _demand(bool(_capture), "a task group begins outside a capture")
    _demand(_capture[0].group is None, "a task group begins inside another")
    _capture[0].group = []


def graph_task_group_end(stream) -> Task:
    _demand(bool(_capture) and _capture[0].group is not None, "a task group ends that has not begun")
    group, _capture[0].group = _capture[0].group, None
    _demand(len(group) == 1, f"a task group holds one operator; this one holds {[task.operator.name() for task in group]}")
    group[0].grouped = True
    return group[0]


def graph_task_update_begin(stream, handle: Task):
    _demand(not _capture and not _update, "an update begins inside a capture or another update")
    _demand(isinstance(handle, Task), f"an update begins with {handle!r}, which is no handle of a task group")
    _update.append(_Update(handle))
    _update[0].__enter__()


def graph_task_update_end(stream):
    _demand(bool(_update), "an update ends that has not begun")
    update = _update.pop()
    update.__exit__(None, None, None)
    _demand(update.issued is not None, "an update issued no operator")
    update.task.args, update.task.kwargs = update.issued


def waiting() -> int:
    """How many replays wait for an event that nobody recorded; on a device they would hang."""
    return len(_waiting)


def forget():
    """Drops what waits, and a capture or update that was left open."""
    for mode in (*_capture, *_update):
        mode.__exit__(None, None, None)
    for kept in (_capture, _update, _waiting):
        kept.clear()


class Stream:
    """As torch.npu.Stream where there is no device: everything runs at once."""

    def __init__(self, device=None, priority=0):
        pass

    def wait_stream(self, stream):
        _demand(not _waiting, "a stream waits for another that is stopped at an event which nobody recorded: the device would hang")

    def synchronize(self):
        synchronize()


def current_stream(device=None) -> Stream:
    return _DEFAULT


@contextlib.contextmanager
def stream(stream: Stream | None) -> Iterator[None]:
    yield


def synchronize(device=None):
    _demand(not _waiting, "the host waits for a replay that is stopped at an event which nobody recorded: the device would hang")


def replace(*, on_device: bool):
    """Puts the stand-ins in the place of torch.npu's own; its streams stay where there is a device."""
    names = [NPUGraph, graph, ExternalEvent, is_current_stream_capturing, graph_pool_handle]
    names += [graph_task_group_begin, graph_task_group_end, graph_task_update_begin, graph_task_update_end]
    names += [] if on_device else [Stream, current_stream, stream, synchronize]
    for one in names:
        setattr(torch.npu, one.__name__, one)


class _Capture(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.nodes: list[Task | _Mark] = []
        self.group: list[Task] | None = None
        self._before: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        _demand(func.name().split(".")[0] not in READS_BACK, f"{func.name()} in a capture makes the host wait for values of the device")
        if func.is_view:
            return func(*args, **kwargs)
        self._before += [(tensor, tensor.clone()) for tensor in _written(func, args, kwargs)]
        result = func(*args, **kwargs)
        old = {tensor.untyped_storage().data_ptr() for tensor in _tensors((args, kwargs))}
        made = {
            place: tensor
            for place, tensor in enumerate(_tensors(result))
            if tensor.numel() and tensor.untyped_storage().data_ptr() not in old
        }
        task = Task(func, args, kwargs, made)
        self.nodes.append(task)
        if self.group is not None:
            self.group.append(task)
        return result

    def take_back(self):
        """Restores what the captured step wrote, and puts junk into what it made."""
        for tensor, before in reversed(self._before):
            tensor.copy_(before)
        for task in self.nodes:
            for tensor in task.made.values() if isinstance(task, Task) else ():
                tensor.fill_(torch.nan if tensor.dtype.is_floating_point else 77)


class _Update(TorchDispatchMode):
    def __init__(self, task):
        super().__init__()
        self.task, self.issued = task, None

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func.is_view:
            return func(*args, **kwargs)
        _demand(self.issued is None, f"an update issues a second operator, {func.name()}")
        _demand(func is self.task.operator, f"an update issues {func.name()} for a group of {self.task.operator.name()}")
        before, now = (_described(func, *call) for call in ((self.task.args, self.task.kwargs), (args, kwargs)))
        moved = sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))
        _demand(not moved, f"an update of {func.name()} changes tensors {', '.join(moved)}: a graph's addresses stay what they were")
        self.issued = args, kwargs
        return tuple(kwargs.get("out", ()))


def _advance():
    """Lets replays run, in order, up to the first event that is not recorded."""
    while _waiting:
        try:
            next(_waiting[0])
        except StopIteration:
            _waiting.popleft()
        else:
            return


def _written(func, args, kwargs):
    """The tensors that a call writes: those its schema marks, and lists called `out`, which these schemas do not mark."""
    named = _named(func, args, kwargs)
    marked = {argument.name for argument in func._schema.arguments if argument.is_write or argument.name == "out"}
    return _tensors([value for name, value in named.items() if name in marked])


def _described(func, args, kwargs):
    """Where every tensor among the arguments lies: its address, shape, strides and dtype by the name of the argument."""
    described = {}
    for name, value in _named(func, args, kwargs).items():
        tensors = _tensors(value)
        if tensors:
            described[name] = [(tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype) for tensor in tensors]
    return described


def _named(func, args, kwargs) -> dict[str, Any]:
    return dict(zip([argument.name for argument in func._schema.arguments], args, strict=False)) | kwargs


def _tensors(tree):
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _demand(holds, text):
    if not holds:
        raise RuntimeError(f"emulated graph: {text}")


_DEFAULT = Stream()
