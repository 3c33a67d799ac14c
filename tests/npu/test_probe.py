"""python -m npu probe: every limit and assumption is a question, answers are told apart, and conform follows them."""

import json

import pytest
import support_cases as cases
from typer.testing import CliRunner

from fattn.__main__ import app as fattn_app
from fattn.conformance import targets
from npu import emulator, probe
from npu.__main__ import app
from npu.emulator import assumptions
from npu.probe import here, of_assumptions

run = CliRunner().invoke


@pytest.fixture(autouse=True)
def as_believed():
    yield
    emulator.install()


def test_everything_holds_on_the_emulation():
    cases.check_probe_holds()


def test_variants_are_told_from_beliefs():
    cases.check_probe_sees_variants()


def test_limits_that_do_not_hold():
    cases.check_limit_answers()


def test_reports_say_what_was_never_probed():
    cases.check_reports()


def test_the_command_writes_what_it_asked(tmp_path):
    path = tmp_path / "f.json"
    result = run(app, ["probe", "--json", str(path), "--only", "norm-cache", "--only", "softcap"])
    assert result.exit_code == 0, result.output
    assert "answers of the emulation: they test the probe, and say nothing about a device" in result.stdout
    report = probe.read(path)
    assert report.emulated and (report.soc, report.cann) == ("a2", "9.1.0") and report.provider.startswith("emulated torch_npu")
    assert [(answer.kind, answer.id, answer.answer) for answer in report.answers] == [
        ("limit", "softcap", "holds"),
        ("assumption", "norm-cache", "holds"),
    ]
    result = run(app, ["probe", "--only", "norm cash"])
    assert result.exit_code == 2 and "norm-cache" in result.output


def written(tmp_path, *variants, soc="a2", emulated=False):
    """The file of a device that answers so."""
    with emulator.variant(*variants):
        answers = probe.ask("cpu", [variant.partition(":")[0] for variant in variants])
    probe.write(tmp_path / "f.json", cases.report_of(answers, soc=soc, emulated=emulated))
    return str(tmp_path / "f.json")


def test_conform_follows_the_answers(tmp_path):
    path = written(tmp_path, "lse-empty-decode:-inf", "shared-pages:no", soc="a3")
    target = targets.target_of("npu", assume=path)
    assert assumptions.answer("lse-empty-decode") == "-inf" and assumptions.answer("shared-pages") == "no"
    assert emulator.target.target().soc == "a3"
    notes = "\n".join(target.notes)
    assert "lse-empty-decode:-inf, shared-pages:no" in notes
    assert "npu depends on 'shared-pages:no' not being so: do not use batches whose sequences share" in notes
    assert "never probed on a device: 46 of 48 limits and assumptions: attention dtype, softcap" in notes
    assert "lse-empty-decode," not in notes.partition("never probed")[2]
    targets.target_of("npu")
    assert assumptions.answer("lse-empty-decode") == "lowest"


def test_conform_under_answers_passes_and_says_so(tmp_path):
    path, results = written(tmp_path, "lse-empty-prefill:-inf", emulated=True), tmp_path / "results.json"
    arguments = ["conform", "npu", "--assume", path, "--op", "rope.half", "--op", "dense.alibi", "--examples", "2", "--json", str(results)]
    result = run(fattn_app, arguments)
    assert result.exit_code == 0, result.output
    assert "never probed on a device: 48 of 48" in " ".join(result.stdout.split())
    assert any("lse-empty-prefill:-inf" in note for note in json.loads(results.read_text())["notes"])


def test_files_that_are_no_answers(tmp_path):
    bad = tmp_path / "bad.json"
    for text, says in (("{", "not a report"), ('{"answers": [{"id": 1}]}', "not a report"), ("[]", "not a report")):
        bad.write_text(text)
        with pytest.raises(ValueError, match=says):
            probe.read(bad)
    content = json.loads(open(written(tmp_path, "norm-cache:yes")).read())
    content["answers"][0]["answer"] = "maybe"
    bad.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="'norm-cache' is 'maybe', not one of holds, differs, refused, not asked"):
        probe.read(bad)
    result = run(fattn_app, ["conform", "npu", "--assume", str(bad)])
    assert result.exit_code == 2 and "maybe" in result.output
    result = run(fattn_app, ["conform", "fattn", "--assume", str(bad)])
    assert result.exit_code == 2 and "for npu's" in result.output
    result = run(fattn_app, ["conform", "npu", "--assume", written(tmp_path, "norm-cache:yes", soc="950")])
    assert result.exit_code == 2 and "'a2', 'a3'" in result.output


def test_after_a_failure_of_the_device_nothing_is_an_answer(monkeypatch):
    def fails(device):
        raise RuntimeError("aicore exception, error code is 507015")

    monkeypatch.setitem(of_assumptions.QUESTIONS, "norm-cache", fails)
    answers = {answer.id: answer for answer in probe.ask("cpu", ["lse-not-asked", "norm-cache", "negative-slot"])}
    assert answers["lse-not-asked"].answer == "holds"
    assert answers["norm-cache"].answer == "refused" and "the device failed" in answers["norm-cache"].message
    assert answers["negative-slot"].answer == "not asked" and "--only 'negative-slot'" in answers["negative-slot"].message


def test_what_may_harm_a_device_is_asked_last():
    assert probe.questions()[-1] == ("assumption", "negative-slot")


def test_chips_by_their_own_names():
    names = {"Ascend910B3": "a2", "Ascend910_9382": "a3", "Ascend950PR_9579": "950"}
    assert {name: here.soc_of(name) for name in names} == names
    with pytest.raises(RuntimeError, match="'Ascend310P3'; the limits are about Ascend910B"):
        here.soc_of("Ascend310P3")
