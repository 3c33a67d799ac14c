"""Pairwise covering arrays: few rows in which every two values of two options meet."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources

from fattn.conformance.cases import Scalar

Columns = Mapping[str, Sequence[Scalar]]
Row = tuple[Scalar, ...]


def pairs(columns: Columns) -> set[tuple[str, Scalar, str, Scalar]]:
    """Every pair of values of two different options."""
    found = set()
    for (a, of_a), (b, of_b) in itertools.combinations(columns.items(), 2):
        found |= {(a, x, b, y) for x in of_a for y in of_b}
    return found


def reached(columns: Columns, rows: Iterable[Row]) -> set[tuple[str, Scalar, str, Scalar]]:
    """The pairs that some row holds."""
    names, found = list(columns), set()
    for row in rows:
        found |= {(a, x, b, y) for (a, x), (b, y) in itertools.combinations(zip(names, row, strict=True), 2)}
    return found


def generate(columns: Columns) -> list[Row]:
    """Rows that reach every pair, greedily: each new row is filled so that every value adds as many unreached pairs as it can.

    Deterministic. The two longest options meet first, because their product is the least number of rows.
    """
    names = list(columns)
    if len(names) == 1:
        return [(value,) for value in columns[names[0]]]
    missing, rows, used = pairs(columns), [], {}
    while missing:
        a, x, b, y = max(missing, key=lambda pair: (len(columns[pair[0]]) * len(columns[pair[2]]), repr(pair)))
        row = {a: x, b: y}
        for name in sorted(set(names) - {a, b}, key=lambda name: (-len(columns[name]), name)):
            ranked = [(_gain(missing, names, row, name, value), -used.get((name, value), 0), repr(value), value) for value in columns[name]]
            row[name] = max(ranked, key=lambda entry: entry[:3])[3]
        rows.append(tuple(row[name] for name in names))
        for name, value in row.items():
            used[name, value] = used.get((name, value), 0) + 1
        missing -= reached(columns, rows[-1:])
    return rows


def committed(operation: str) -> list[Row]:
    """The rows of an operation in covering.json."""
    return [tuple(row) for row in _table()[operation]["rows"]]


def write(columns_of: Mapping[str, Columns], path: str):
    """Generates the rows of every operation and writes them as JSON."""
    table = {name: {"options": list(columns), "rows": generate(columns)} for name, columns in columns_of.items()}
    lines = []
    for name, entry in table.items():
        rows = ",\n".join("      " + json.dumps(row) for row in entry["rows"])
        lines.append(f'  {json.dumps(name)}: {{\n    "options": {json.dumps(entry["options"])},\n    "rows": [\n{rows}\n    ]\n  }}')
    with open(path, "w") as file:
        file.write("{\n" + ",\n".join(lines) + "\n}\n")


def _gain(missing, names, row, name, value):
    gain = 0
    for other, chosen in row.items():
        pair = (other, chosen, name, value) if names.index(other) < names.index(name) else (name, value, other, chosen)
        gain += pair in missing
    return gain


def _table():
    return json.loads(resources.files("fattn.conformance").joinpath("covering.json").read_text())
