"""The schemas of the operators that `npu` calls, in releases of torch_npu, kept as JSON: calls are checked against each of VERSIONS.

OTHERS are kept to say what releases of CANN have which operators and arguments (`npu.releases`).

`python -m npu.emulator.schemas WHEEL...` writes the files anew from downloaded wheels, without importing them.
"""

from __future__ import annotations

import json
import re
import sys
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from npu.emulator import install

VERSIONS = ("2.8.0", "2.10.0.post4", "2.13.0")
OTHERS = ("2.4.0.post2", "2.5.1", "2.6.0", "2.9.0", "2.9.0.post2")
OPERATORS = (
    "npu::npu_fused_infer_attention_score",
    "npu::npu_fused_infer_attention_score.out",
    "npu::npu_fused_infer_attention_score_v2",
    "npu::npu_fused_infer_attention_score_v2.out",
    "npu::npu_scatter_pa_kv_cache",
    "npu::npu_rotary_mul",
    "atb::_npu_reshape_and_cache",
    "atb::_npu_paged_attention",
)
_FOLDER = Path(__file__).with_name("schemas")
_PROVENANCE = "schema literals read from the shared libraries of {wheel}, not imported"
# name(arguments) -> results, NUL-terminated among a library's strings
_LITERAL = re.compile(rb"(?<=\0)((?:npu::|atb::)?_?[a-z]\w*(?:\.\w+)?\([^\0]{0,8000}?\) -> [^\0]{1,300})(?=\0)")
# the same where the compiler left other bytes right before it
_GLUED = re.compile(rb"(_npu_(?:reshape_and_cache|paged_attention)\(Tensor [^\0]{0,8000}?\) -> [^\0]{1,300})(?=\0)")
_CHECKS = {
    "Tensor": lambda value: isinstance(value, torch.Tensor),
    "int": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "float": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
    "bool": lambda value: isinstance(value, bool),
    "str": lambda value: isinstance(value, str),
    "List[int]": lambda value: isinstance(value, list | tuple) and all(isinstance(item, int) for item in value),
    "List[Tensor]": lambda value: isinstance(value, list | tuple) and all(isinstance(item, torch.Tensor) for item in value),
}
_CHECKS["number"] = _CHECKS["float"]


def load(version: str) -> dict[str, str]:
    """Operator name to schema, for one of VERSIONS and OTHERS. Raises ValueError for another."""
    if version not in VERSIONS + OTHERS:
        raise ValueError(f"no schemas are kept of torch_npu {version!r}; there are {', '.join(VERSIONS + OTHERS)}")
    return json.loads((_FOLDER / f"{version}.json").read_text())["schemas"]


def bind(version: str, name: str, args: Sequence, kwargs: Mapping):
    """Raises TypeError that says why where a call of the operator with these arguments does not fit its schema in this release."""
    schemas = load(version)
    if name not in schemas:
        raise TypeError(f"torch_npu {version} has no operator {name}; of what npu calls it has {', '.join(schemas)}")
    schema = torch._C.parse_schema(schemas[name])
    where = f"{name} of torch_npu {version}"
    arguments = {argument.name: argument for argument in schema.arguments}
    positional = [argument.name for argument in schema.arguments if not argument.kwarg_only]
    if len(args) > len(positional):
        raise TypeError(f"{where} takes {len(positional)} positional arguments, {len(args)} were given")
    given = dict(zip(positional, args, strict=False))
    twice = sorted(given.keys() & kwargs.keys())
    if twice:
        raise TypeError(f"{where}: {', '.join(twice)} given twice")
    unknown = sorted(kwargs.keys() - arguments.keys())
    if unknown:
        raise TypeError(f"{where} has no argument {', '.join(unknown)}; it has {', '.join(arguments)}")
    given |= kwargs
    missing = [argument.name for argument in schema.arguments if argument.name not in given and not argument.has_default_value()]
    if missing:
        raise TypeError(f"{where} misses {', '.join(missing)}")
    for argument_name, value in given.items():
        kind = str(arguments[argument_name].type)
        optional = re.fullmatch(r"Optional\[(.*)\]", kind)
        if optional and value is None:
            continue
        kind = (optional.group(1) if optional else kind).replace("SymInt", "int")
        if kind not in _CHECKS or not _CHECKS[kind](value):
            raise TypeError(f"{where}: {argument_name} is {type(value).__name__}, not {arguments[argument_name].type}")


def extract(wheel: Path) -> dict[str, str]:
    """Operator name to schema of those of OPERATORS that a wheel file defines, read from its libraries without importing it."""
    found = {}
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.namelist():
            if re.search(r"lib/lib(torch_npu|op_plugin[^/]*)\.so$", member):
                namespace = "atb" if "atb" in member else "npu"
                content = archive.read(member)
                for match in (*_LITERAL.finditer(content), *_GLUED.finditer(content)):
                    schema = match.group(1).decode("utf8", "replace")
                    schema = schema if "::" in schema.split("(")[0] else f"{namespace}::{schema}"
                    found.setdefault(schema.split("(")[0], schema)
    return {name: found[name] for name in OPERATORS if name in found}


def from_dispatcher(name: str) -> str:
    """The schema of an operator of the torch_npu that is imported."""
    namespace, _, rest = name.partition("::")
    base, _, overload = rest.partition(".")
    return str(getattr(getattr(getattr(torch.ops, namespace), base), overload or "default")._schema)


def _write(wheel):
    version = wheel.name.split("-")[1]
    schemas, provenance = extract(wheel), _PROVENANCE.format(wheel=wheel.name)
    missed = [name for name in OPERATORS if name not in schemas]
    # A compiler may keep a short string in instructions, where no search finds it.
    if missed and install().endswith(f" {version}"):
        schemas |= {name: from_dispatcher(name) for name in missed}
        provenance += f"; {', '.join(missed)}: from the dispatcher of the imported wheel"
    content = {"torch_npu": version, "provenance": provenance, "schemas": schemas}
    (_FOLDER / f"{version}.json").write_text(json.dumps(content, indent=1) + "\n")
    print(f"{version}: {len(schemas)} of {len(OPERATORS)} operators")


if __name__ == "__main__":
    _FOLDER.mkdir(exist_ok=True)
    for path in sys.argv[1:]:
        _write(Path(path))
