"""The stand-in for torch_npu's graph interface: what it records and replays, and what it refuses."""

import pytest
import torch

import npu.emulator
from npu.emulator import graphs

npu.emulator.install()
Q = torch.randn(2, 4, 128, generator=torch.Generator().manual_seed(0)).half()
K = torch.randn(9, 2, 128, generator=torch.Generator().manual_seed(1)).half()


@pytest.fixture(autouse=True)
def nothing_left():
    yield
    graphs.forget()


def attention(out, keys=9, **changes):
    arguments = {"num_heads": 4, "num_key_value_heads": 2, "input_layout": "TND", "scale": 0.1, "out": out}
    arguments |= {"actual_seq_lengths": [2], "actual_seq_lengths_kv": [keys]}
    return torch.ops.npu.npu_fused_infer_attention_score.out(Q, K, K, **(arguments | changes))


def outputs():
    return [torch.empty(2, 4, 128, dtype=torch.float16), torch.empty(0)]


def captured(*steps):
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        results = [step() for step in steps]
    return graph, results


def grouped(out, **given):
    def step():
        torch.npu.graph_task_group_begin(torch.npu.current_stream())
        attention(out, **given)
        return torch.npu.graph_task_group_end(torch.npu.current_stream())

    return step


def test_a_replay_reads_what_its_inputs_hold_then():
    x, total = torch.ones(3), torch.zeros(3)
    graph, (made, _) = captured(lambda: x * 2, lambda: total.add_(x))
    assert made.isnan().all() and total.tolist() == [0] * 3
    x.fill_(5)
    graph.replay()
    graph.replay()
    assert made.tolist() == [10] * 3 and total.tolist() == [10] * 3


def test_views_and_constants():
    x = torch.arange(6.0)
    graph, (made,) = captured(lambda: (x.view(2, 3).T.contiguous() @ torch.tensor([[1.0], [10.0]])).flatten())
    x.add_(1)
    graph.replay()
    assert made.tolist() == [41, 52, 63]


def test_an_update_brings_new_lists_without_running_the_operator():
    out = outputs()
    before = out[0].fill_(7).clone()
    graph, (handle,) = captured(grouped(out))
    torch.npu.graph_task_update_begin(torch.npu.current_stream(), handle)
    attention(out, keys=4)
    torch.npu.graph_task_update_end(torch.npu.current_stream())
    assert torch.equal(out[0], before)
    graph.replay()
    expected = outputs()
    attention(expected, keys=4)
    assert torch.equal(out[0], expected[0]) and [task.grouped for task in graph.tasks] == [True]


def update(handle, issue):
    torch.npu.graph_task_update_begin(None, handle)
    issue()
    torch.npu.graph_task_update_end(None)


REFUSED = {
    "two operators in a group": (
        lambda: captured(
            lambda: torch.npu.graph_task_group_begin(None), lambda: Q * 2, lambda: Q * 3, lambda: torch.npu.graph_task_group_end(None)
        ),
        "holds one operator.*aten::mul",
    ),
    "an empty group": (
        lambda: captured(lambda: torch.npu.graph_task_group_begin(None), lambda: torch.npu.graph_task_group_end(None)),
        "holds one operator",
    ),
    "an open group": (lambda: captured(lambda: torch.npu.graph_task_group_begin(None)), "ends inside a task group"),
    "a group in a group": (lambda: captured(*[lambda: torch.npu.graph_task_group_begin(None)] * 2), "begins inside another"),
    "a group outside": (lambda: torch.npu.graph_task_group_begin(None), "outside a capture"),
    "a value read back": (lambda: captured(lambda: Q.sum().item()), "makes the host wait"),
    "an event recorded inside": (lambda: captured(lambda: torch.npu.ExternalEvent().record()), "recorded inside a capture"),
    "an event never recorded": (lambda: torch.npu.ExternalEvent().wait(), "would hang"),
    "a replay of nothing": (lambda: torch.npu.NPUGraph().replay(), "never captured"),
    "a capture in a capture": (lambda: captured(lambda: captured()), "begun already"),
    "an update of nothing": (lambda: torch.npu.graph_task_update_begin(None, None), "no handle of a task group"),
}


@pytest.mark.parametrize("run, message", REFUSED.values(), ids=REFUSED)
def test_refused(run, message):
    with pytest.raises(RuntimeError, match=message):
        run()


def test_updates_that_are_refused():
    out, others, mask = outputs(), outputs(), torch.zeros(2, 9, dtype=torch.bool)
    _, (handle,) = captured(grouped(out))
    issues = {
        "issued no operator": lambda: None,
        "an update issues aten::mul": lambda: Q * 2,
        "issues a second operator": lambda: [attention(out), attention(out)],
        "changes tensors out": lambda: attention(others),
        "changes tensors atten_mask": lambda: attention(out, atten_mask=mask),
    }
    for message, issue in issues.items():
        with pytest.raises(RuntimeError, match=message):
            update(handle, issue)
        graphs.forget()


def test_a_capture_that_fails_is_no_graph():
    graph = torch.npu.NPUGraph()
    with pytest.raises(ZeroDivisionError), torch.npu.graph(graph):
        raise ZeroDivisionError
    assert not torch.npu.is_current_stream_capturing()
    with pytest.raises(RuntimeError, match="never captured"):
        graph.replay()


def test_replays_wait_in_order():
    """A replay launched before its update stops at the event, and what follows it waits too."""
    event, log = torch.npu.ExternalEvent(), torch.zeros(1)
    graph, _ = captured(event.wait, event.reset, lambda: log.add_(1))
    graph.replay()
    graph.replay()
    assert (graphs.waiting(), log.item()) == (2, 0)
    event.record()
    assert (graphs.waiting(), log.item()) == (1, 1)
    event.record()
    assert (graphs.waiting(), log.item()) == (0, 2)
