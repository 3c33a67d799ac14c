"""Public releases of CANN and torch_npu, the chips, and which operators and arguments a release has: read from its schemas."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

SOCS = {"a2": "Atlas A2 (Ascend910B)", "a3": "Atlas A3 (Ascend910_93)", "950": "Ascend 950"}
_SCHEMAS = Path(__file__).parent / "emulator" / "schemas"
_ARGUMENT = re.compile(r"(\w+)(?:=[^,]*)?$")


class Release(NamedTuple):
    """A CANN release, the torch_npu releases made for it, and those of them whose schemas are kept.

    `documented` says that the documents from which the limits come describe it.
    """

    cann: str
    op_plugin: str
    torch_npu: tuple[str, ...]
    schemas: tuple[str, ...]
    documented: bool = True


RELEASES = (
    Release("8.0.0", "6.0.0", ("2.1.0.post10", "2.3.1.post4", "2.4.0.post2"), ("2.4.0.post2",), documented=False),
    Release("8.1.RC1", "7.0.0", ("2.1.0.post12", "2.3.1.post6", "2.4.0.post4", "2.5.1"), ("2.5.1",), documented=False),
    Release("8.2.RC1", "7.1.0", ("2.1.0.post13", "2.5.1.post1", "2.6.0"), ("2.6.0",), documented=False),
    Release("8.3.RC1", "7.2.0", ("2.1.0.post17", "2.6.0.post3", "2.7.1", "2.8.0"), ("2.8.0",)),
    Release("8.5.0", "7.3.0", ("2.6.0.post5", "2.7.1.post2", "2.8.0.post2", "2.9.0"), ("2.9.0",)),
    Release("9.0.0", "26.0.0", ("2.7.1.post4", "2.8.0.post4", "2.9.0.post2"), ("2.9.0.post2",)),
    Release(
        "9.1.0",
        "26.1.0 and later",
        ("2.7.1.post8", "2.7.1.post11", "2.9.0.post6", "2.10.0.post4", "2.11.0", "2.12.0", "2.13.0", "2.14.0"),
        ("2.10.0.post4", "2.13.0"),
    ),
)


def release(cann: str) -> Release:
    """The release of that name; its first two numbers ("8.3") are enough. Raises ValueError that names the known ones."""
    found = [one for one in RELEASES if one.cann == cann or ".".join(one.cann.split(".")[:2]) == cann]
    if not found:
        raise ValueError(f"cann is {cann!r}; the known releases are {', '.join(one.cann for one in RELEASES)}")
    return found[0]


def check_soc(soc: str):
    """Raises ValueError that names the known chips for another one."""
    if soc not in SOCS:
        raise ValueError(f"soc is {soc!r}; the known chips are {', '.join(SOCS)}")


def operators(one: Release) -> Mapping[str, frozenset[str]]:
    """Full operator name to the names of its arguments: of the operators that npu calls or considers, what all kept schemas have."""
    kept = [_schemas(version) for version in one.schemas]
    return {name: frozenset.intersection(*(found[name] for found in kept)) for name in kept[0] if all(name in found for found in kept)}


@functools.cache
def _schemas(version):
    texts = json.loads((_SCHEMAS / f"{version}.json").read_text())["schemas"]
    return {name: frozenset(_arguments(text)) for name, text in texts.items()}


def _arguments(schema):
    """Argument names of "name(Type a, *, Type? b=1, Type(a!) c) -> ()"."""
    inside = schema[schema.index("(") + 1 : schema.rindex(") -> ")]
    return [_ARGUMENT.search(part.strip()).group(1) for part in inside.split(", ") if part.strip() != "*"]
