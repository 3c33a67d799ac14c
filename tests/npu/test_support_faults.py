"""Faults of npu, of the emulator and of the probe, each of which a check of `support_cases` must see."""

import pytest
import support_cases as cases
import torch
from operator_calls import forgotten

from npu import _errors, _operators, limits, probe, releases, support
from npu.emulator import atb, attention, attention_rules, cache
from npu.probe import outcome


def without(rule):
    """Rules of the emulated attention that let one pass."""
    real = attention_rules._rule

    def pass_over(operator, holds, text, value):
        real(operator, holds or rule in text, text, value)

    return pass_over


def without_of_writes(rule):
    real = cache._rule
    return lambda operator, holds, text, value: real(operator, holds or rule in text, text, value)


def without_of_atb(rule):
    real = atb._rule
    return lambda holds, text, value: real(holds or rule in text, text, value)


def shifted(seen):
    """The causal mask one key too wide."""
    return lambda call, sequence, queries, keys: (
        seen(call, sequence, queries, keys)
        | (
            torch.zeros(queries, keys, dtype=torch.bool)
            if call.mode != 3
            else torch.arange(keys)[None] == torch.arange(queries)[:, None] + keys - queries + 1
        )
    )


def without_rule(name):
    """limits' rules that never find one limit broken."""
    return {
        operation: lambda facts, rule=rule: (found for found in rule(facts) if found[0] != name)
        for operation, rule in limits._RULES.items()
    }


def first_only(schema):
    """A reader of schemas that loses their last argument."""
    return arguments(schema)[:-1]


def tiled(device):
    """The writer with cache_mode left at its default."""
    return _operators._read(_operators._operator("npu", "npu_scatter_pa_kv_cache", device), "npu_scatter_pa_kv_cache")


def unread(operator, name):
    return operator


arguments, softmax = releases._arguments, attention._softmax

FAULTS = {
    # the emulator
    "float32 attention is taken": (attention_rules, "_rule", without("float16 or bfloat16"), cases.check_probe_holds),
    "blocks of 64 for prefill are taken": (attention_rules, "_rule", without("several queries: block_size"), cases.check_probe_holds),
    "65 query heads read one key head": (attention_rules, "_rule", without("at most 64 query heads"), cases.check_probe_holds),
    "ATB takes blocks of 144": (atb, "_rule", without_of_atb("block_size % 16"), cases.check_probe_holds),
    "packed lengths may end early": (attention_rules, "_rule", without("last element of the query lengths"), cases.check_probe_holds),
    "strided caches are taken": (attention_rules, "_rule", without("is contiguous"), cases.check_probe_holds),
    "slot -1 is skipped": (cache, "_rule", without_of_writes("slots are in"), cases.check_probe_holds),
    "causal one key too wide": (attention, "_seen", shifted(attention._seen), cases.check_probe_holds),
    "an LSE of base 2": (
        attention,
        "_softmax",
        lambda *given: (softmax(*given)[0], softmax(*given)[1] / torch.log(torch.tensor(2.0))),
        cases.check_probe_holds,
    ),
    "empty rows have LSE 0": (attention, "_EMPTY_LSE", dict.fromkeys(("+inf", "-inf", "lowest"), 0.0), cases.check_probe_sees_variants),
    "the answer to padded queries is ignored": (
        attention,
        "answer",
        lambda id: "actual" if id == "padded-query-alignment" else cases.assumptions.answer(id),
        cases.check_probe_sees_variants,
    ),
    # npu
    "64 goes by the packed layout": (limits, "PACKED_SIZES", (*limits.PACKED_SIZES, (64, 64)), cases.check_all_attention),
    "softcap is not refused": (limits, "_RULES", without_rule("softcap"), cases.check_required),
    "blocks of prefill are not checked": (limits, "_RULES", without_rule("prefill block"), cases.check_all_attention),
    "strides of caches are not checked": (limits, "_RULES", without_rule("cache strides"), cases.check_all_attention),
    "layouts of written caches are not checked": (limits, "_RULES", without_rule("write layout"), cases.check_writes_and_turns),
    "groups are not checked": (limits, "_RULES", without_rule("group"), cases.check_edges),
    "blocks of ATB are not checked": (limits, "_RULES", without_rule("ATB block"), cases.check_edges),
    "caches are written as tiled ones": (_operators, "scatter", tiled, cases.check_writes_and_turns),
    "errors are not read": (_operators, "_read", unread, cases.check_errors),
    "failures of the device are refusals": (_errors, "_REFUSALS", {**_errors._REFUSALS, 507015: "x"}, cases.check_errors),
    "every error is read": (_errors, "code_of", lambda error: 561002, cases.check_errors),
    "an argument is lost": (releases, "_arguments", first_only, cases.check_releases),
    "releases without documents count as documented": (
        releases,
        "RELEASES",
        tuple(one._replace(documented=True) for one in releases.RELEASES),
        cases.check_releases,
    ),
    "old releases write with the new operator": (support, "_operator", lambda operation, has: support.SCATTER, cases.check_releases),
    "refusals are not looked up": (limits, "broken", lambda facts: None, cases.check_all_attention),
    # the probe
    "an emulation counts as a device": (
        probe,
        "never_probed",
        lambda report: [] if report else [id for _, id in probe.questions()],
        cases.check_reports,
    ),
    "variants are lost": (probe, "variants", lambda report: [], cases.check_reports),
    "what is taken beyond a limit holds": (
        outcome,
        "of_limit",
        lambda device, inside, outside: outcome.Outcome("holds"),
        cases.check_limit_answers,
    ),
}


@pytest.fixture
def fresh():
    with forgotten():
        yield


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_seen(name, monkeypatch, fresh):
    module, attribute, faulty, check = FAULTS[name]
    assert hasattr(module, attribute)
    monkeypatch.setattr(module, attribute, faulty)
    with pytest.raises(AssertionError):
        check()
