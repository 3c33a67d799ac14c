"""Each layer is imported with the libraries that it must not need blocked, each time in a process of its own."""

import json
import os
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import fattn
import npu
import reference

ROOT = Path(__file__).parents[1]
JAX, TORCH = ("jax", "jaxlib"), ("torch", "torch_npu", "transformers")

# refuses the blocked libraries as a host without them would, then imports, and says what that brought in
IMPORTER = """
import importlib, json, sys, time

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in BLOCKED:
            raise ModuleNotFoundError(f"No module named {name!r} (blocked by this test)", name=name)

NAMES, BLOCKED = json.loads(sys.argv[1])
sys.meta_path.insert(0, Blocked())
began = time.perf_counter()
modules = [importlib.import_module(name) for name in NAMES]
seconds = time.perf_counter() - began
print(json.dumps({"seconds": seconds, "files": [module.__file__ for module in modules], "loaded": list(sys.modules)}))
"""


def imported(names, blocked=(), *, cwd=ROOT):
    """What a fresh interpreter loads for `names`: its seconds, their files, and all modules."""
    # no PYTHON* variable of this process may reach that one
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    command = [sys.executable, "-c", IMPORTER, json.dumps([list(names), list(blocked)])]
    done = subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def modules(package, *, apart=()):
    """All modules of a package, found without importing any, those of `apart` left out with what is beneath them."""
    found, folders = [package.__name__], [(package.__name__, path) for path in package.__path__]
    while folders:
        prefix, folder = folders.pop()
        for entry in pkgutil.iter_modules([folder], prefix + "."):
            if entry.name not in apart:
                found.append(entry.name)
                folders += [(entry.name, str(Path(folder, entry.name.rpartition(".")[2])))] * entry.ispkg
    return sorted(found)


def test_types_and_plan_need_neither_library():
    names = ["fattn.types", "fattn.plan", "fattn.plan.batch", "fattn.plan.select"]
    loaded = imported(names, JAX + TORCH)["loaded"]
    assert not {"scipy", "ml_dtypes", "reference", "npu"} & set(loaded)


def test_reference_needs_neither_library_and_of_fattn_the_types_alone():
    loaded = imported(modules(reference), JAX + TORCH)["loaded"]
    assert {name for name in loaded if name.startswith("fattn.")} == {"fattn.types"}
    assert not {"npu", "scipy"} & set(loaded)


def test_fattn_needs_no_torch():
    names = modules(fattn)
    assert {"fattn.dense", "fattn.paged", "fattn.standard", "fattn.plan.batch"} <= set(names)
    loaded = imported(names, TORCH)["loaded"]
    assert "jax" in loaded and "npu" not in loaded


def test_npu_needs_no_jax_and_torch_npu_only_when_called():
    names = modules(npu)
    assert {"npu.dense", "npu.paged", "npu.standard", "npu.limits"} <= set(names)
    loaded = imported(names, (*JAX, "torch_npu"))["loaded"]
    assert {name for name in loaded if name.startswith("fattn.")} <= {"fattn.types", "fattn.plan", "fattn.plan.batch"}
    assert "reference" not in loaded


@pytest.mark.parametrize("name", ["fattn", "npu", "reference"])
def test_the_package_itself_imports_nothing_heavy_and_is_quick(name):
    runs = [imported([name]) for _ in range(3)]
    assert min(run["seconds"] for run in runs) < 0.3
    assert not {"jax", "numpy", "torch", "torch_npu"} & set(runs[0]["loaded"])


def test_the_blocker_blocks():
    with pytest.raises(AssertionError, match="blocked by this test"):
        imported(["fattn.dense"], JAX)
    with pytest.raises(AssertionError, match="blocked by this test"):
        imported(["npu.dense"], TORCH)


@pytest.mark.parametrize("elsewhere", [False, True], ids=["checkout", "elsewhere"])
def test_the_packages_are_this_repository_s(elsewhere, tmp_path):
    """Another distribution's `npu` (the name is free for all on an index) must not shadow ours."""
    files = imported(["fattn", "npu", "reference"], cwd=tmp_path if elsewhere else ROOT)["files"]
    assert [Path(file).parents[1] for file in files] == [ROOT] * 3
