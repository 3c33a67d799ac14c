"""A real model writes through `npu.standard`: every layer's attention within the oracle's bound, and what float16 costs in its logits."""

import json
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import npu
import reference.paged
from examples import checkpoint, eager, smollm2, smollm2_npu
from npu import paged
from reference.bounded import Precision

DATA = Path(__file__).parents[1] / "data"
CASES = json.loads((DATA / "smollm2_greedy.json").read_text())["cases"]
END_OF_TEXT = 2
# transformers 5.24.0 on torch 2.13.0's CPU, eager attention with q, k, v cast to float16: distance from its own float32 logits
TRANSFORMERS = 0.0271, 0.0910


@pytest.fixture(scope="module")
def session():
    return smollm2.begin("npu", checkpoint.load())


def checked(shares):
    """npu.paged.attend that also appends the largest error of its output, as a share of the oracle's bound, to `shares`."""

    def attend(q, cache, batch, slopes=None, *, mask, scale, softcap=None, lse=True):
        result = paged.attend(q, cache, batch, slopes, mask=mask, scale=scale, softcap=softcap, lse=lse)
        names = ("query_start_loc", "seq_lens", "block_table", "slot_mapping", "positions")
        plain = replace(batch, **{name: getattr(batch, name).cpu().numpy() for name in names}, host=None)
        pages = replace(cache, k=cache.k.cpu().numpy(), v=cache.v.cpu().numpy())
        precision = Precision(**npu.PRECISION["float16"])
        value, bound = reference.paged.attend(q.cpu().numpy(), pages, plain, mask=mask, scale=scale, lse=False, precision=precision)
        error = np.abs(result.out.cpu().numpy().astype(np.float64) - value.out)
        padding = bound.out == 0
        assert (error[padding] == 0).all()
        shares.append((error[~padding] / bound.out[~padding]).max())
        return result

    return attend


def test_every_layers_attention_is_within_the_oracles_bound(session, monkeypatch):
    shares = []
    monkeypatch.setattr(smollm2_npu, "step", partial(smollm2_npu.step, attend=checked(shares)))
    for _ in session.generate(CASES[1]["ids"], tokens=4, report=smollm2.Report(), banned=(END_OF_TEXT,)):
        pass
    session.logits(CASES[0]["ids"] + CASES[0]["gen"], chunk=16)
    assert len(shares) == (1 + 3 + 3) * len(session.model.layers)
    print(f"largest share of the bound: {max(shares):.3f}")
    assert max(shares) <= 1


@pytest.mark.parametrize("case", [0, 1])
def test_float16_costs_what_it_costs_transformers(session, case):
    distances = eager.distances(session, CASES[case]["ids"] + CASES[case]["gen"])
    print(f"{distances}; transformers' eager attention itself: {TRANSFORMERS[case]}")
    assert TRANSFORMERS[case] / 2 < distances.eager < TRANSFORMERS[case] * 2
    assert 0 < distances.npu < TRANSFORMERS[case] * 2


def test_writes_the_same_text_as_float32(session):
    """Case 0's smallest gap between the best two logits, 0.051, is wider than what float16 costs."""
    session.prefixes.forget()
    written = session.generate(CASES[0]["ids"], tokens=32, report=smollm2.Report(), banned=(END_OF_TEXT,))
    assert list(written) == CASES[0]["gen"]


def test_command_prints_text_distance_and_rates():
    command = [sys.executable, "-m", "examples.smollm2", "--layer", "npu", "--prompt", CASES[0]["prompt"], "--tokens", "12"]
    printed = subprocess.run(command, cwd=DATA.parents[1], capture_output=True, text=True, check=True).stdout
    assert "The capital of France is Paris.\n\nThe answer is: 201" in printed
    for words in ("emulated torch_npu", "tokens/s", "prefix hits 16 tokens", "from those in float32", "peak memory"):
        assert words in printed
