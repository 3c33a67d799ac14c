"""Failures as files: the case, the check, the target and every array, without pickle."""

from __future__ import annotations

import hashlib
import json
import zipfile
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fattn.conformance.calls import bits, leaves
from fattn.conformance.cases import Case
from fattn.conformance.operations import OPERATIONS


class Saved(NamedTuple):
    """A failure that was saved: `arrays` by path, as integers of their width where NumPy has no such dtype."""

    target: str
    check: str
    case: Case
    arrays: dict[str, np.ndarray]


def save(folder: str, target: str, check: str, case: Case) -> str:
    """Writes a failing case to `folder` and returns the file's path."""
    call = OPERATIONS[case.operation].build(case)
    arrays = {f"argument{path}": bits(array) if array.dtype.name == "bfloat16" else array for path, array in leaves(call.arguments)}
    about = json.dumps({"target": target, "check": check, "case": case.to_json(), "call": repr(call.static)})
    name = f"{case.operation}-{check.replace(' ', '-')}-{hashlib.sha1(about.encode()).hexdigest()[:8]}.npz"
    Path(folder).mkdir(parents=True, exist_ok=True)
    path = Path(folder) / name
    np.savez_compressed(path, about=np.array(about), **arrays)
    return str(path)


def load(path: str) -> Saved:
    """Reads what save wrote. Raises ValueError where the file is none of ours, or the case now makes other arrays than it did then."""
    if Path(path).exists() and not zipfile.is_zipfile(path):
        raise ValueError(f"{path} is not a saved failure: a file failures/OPERATION-CHECK-....npz would work")
    with np.load(path, allow_pickle=False) as file:
        if "about" not in file:
            raise ValueError(f"{path} is not a saved failure: it has {sorted(file)}")
        about = json.loads(str(file["about"]))
        arrays = {name: file[name] for name in file if name != "about"}
    case = Case.from_json(about["case"])
    call = OPERATIONS[case.operation].build(case)
    made = {f"argument{name}": bits(array) if array.dtype.name == "bfloat16" else array for name, array in leaves(call.arguments)}
    changed = [name for name, array in arrays.items() if name not in made or bits(made[name]).tobytes() != bits(array).tobytes()]
    if changed:
        raise ValueError(f"{path} was saved by another version of the generators: {case} now makes other {', '.join(changed)}")
    return Saved(about["target"], about["check"], case, arrays)
