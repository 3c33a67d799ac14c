"""python -m npu support: what it says is what runs, by the operators and arguments of each release."""

import support_cases as cases
from typer.testing import CliRunner

from npu import limits, support
from npu.__main__ import app
from npu.emulator import assumptions
from npu.evidence import CONFLICTS, KINDS
from npu.releases import RELEASES, SOCS

run = CliRunner().invoke


def test_attention_runs_where_the_table_says_and_as_it_says():
    cases.check_all_attention()


def test_writes_and_rotations_run_where_the_table_says():
    cases.check_writes_and_turns()


def test_required_features_run_on_every_chip_and_release():
    cases.check_required()


def test_operators_and_arguments_are_those_of_the_releases():
    cases.check_releases()


def test_each_limit_begins_where_it_says():
    cases.check_edges()


def test_operators_own_errors_are_read():
    cases.check_errors()


def test_every_statement_has_evidence_and_conflicts_are_asked():
    for limit in limits.LIMITS.values():
        assert {limit.evidence_on(soc) for soc in SOCS} <= set(KINDS)
    for soc in SOCS:
        for one in RELEASES:
            rows = support.table(soc, one.cann)
            assert all(row.evidence in KINDS and row.detail for row in rows)
            assert len({row[:2] for row in rows}) == len(rows)
    known = set(limits.LIMITS) | {one.id for one in assumptions.TABLE}
    for conflict in CONFLICTS:
        assert len(conflict.claims) >= 2 and {claim.evidence for claim in conflict.claims} <= set(KINDS)
        assert set(conflict.asked_as) <= known, conflict.question


def test_markdown_has_a_row_for_each_feature():
    result = run(app, ["support", "--soc", "a2", "--md"])
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    table = lines[2 : lines.index("", 2)]
    assert len(table) - 2 == len(support.table("a2", "9.1.0")) >= 40
    assert all(line.startswith("| ") and line.count(" | ") == len(support.Row._fields) - 1 for line in table)
    assert sum(conflict.question in result.stdout for conflict in CONFLICTS) == len(CONFLICTS)


def test_another_chip_and_release():
    result = run(app, ["support", "--soc", "950", "--cann", "8.3", "--md"])
    assert result.exit_code == 0 and "Ascend 950, CANN 8.3.RC1 (torch_npu " in result.stdout
    assert "(950: multiples of 16 up to 1024 for head size 64)" in result.stdout and "_npu_reshape_and_cache" in result.stdout
    assert "not available" in run(app, ["support", "--cann", "8.0.0"]).stdout


def test_unknown_chips_and_releases_name_the_known_ones():
    for arguments, known in ((["--soc", "a9"], SOCS), (["--cann", "7.0"], [one.cann for one in RELEASES])):
        result = run(app, ["support", *arguments])
        assert result.exit_code == 2
        assert all(name in result.output for name in known), result.output
