"""The three packages say the same thing three times: one table of what exists where, and signatures that agree word by word.

Reads the sources as text and imports nothing, so that each layer may lack the others' libraries.
"""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = {"R": "reference", "J": "fattn", "N": "npu"}
ALL = "RJN"

# module -> what it defines, in the order of definition, and the packages that have it
TABLE = {
    "masks": {"visible": ALL, "compressed": ALL, "expand": ALL},
    "dense": {"attend": ALL, "alibi": ALL, "alibi_slopes": ALL},
    "merge": {"empty": ALL, "merge": ALL, "finish": ALL},
    "rope": {"frequencies": ALL, "yarn": ALL, "table": ALL, "half": ALL, "interleaved": ALL},
    "paged": {"allocate": ALL, "convert": ALL, "write": ALL, "gather": ALL, "attend": ALL},
    "quant": dict.fromkeys(("Scales", "quantise", "dequantise", "token_scales", "allocate", "write", "gather", "attend"), ALL),
    "standard": {"Weights": ALL, "Prepared": ALL, "prepare": ALL, "attend_and_write": ALL, "forward": ALL},
}
# what a package may have beside the shared vocabulary and the table
OWN_MODULES = {"R": {"bounded"}, "J": {"types"}, "N": {"evidence", "graph", "limits", "nz", "releases", "support"}}
# keyword-only arguments that one package may add to any function
OWN_ARGUMENTS = {"R": {"precision"}, "J": set(), "N": {"out", "workspace"}}
# results of reference that are copies, so that they carry no bound
EXACT = {("paged", "gather")}

SHARED = [(module, name, layer) for module, names in TABLE.items() for name, layers in names.items() for layer in layers if layer != "J"]


class _OneArray(ast.NodeTransformer):
    """Each package calls its own array type by its own name; so does the oracle what it returns with a bound."""

    def __init__(self, bounded=False):
        self.bounded = bounded

    def visit_Name(self, node):
        if node.id == "Tensor":
            return ast.Name("Array")
        return ast.Name("Bounded") if self.bounded and node.id == "Partial" else node

    def visit_Subscript(self, node):
        if self.bounded and isinstance(node.value, ast.Name) and node.value.id == "Float":
            return ast.Name("Bounded")
        return self.generic_visit(node)


def written(node, *, bounded=False):
    return None if node is None else ast.unparse(_OneArray(bounded).visit(ast.parse(ast.unparse(node), mode="eval").body))


def definitions(layer, module):
    """The public functions and classes of a module, in order of definition."""
    body = ast.parse((ROOT / PACKAGES[layer] / f"{module}.py").read_text()).body
    return {node.name: node for node in body if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_")}


def signature(node, layer):
    """(name, kind, annotation, default) of every argument, without those that the layer alone may have."""
    assert not node.args.vararg and not node.args.kwarg, f"{node.name} takes any arguments: none may be swallowed"
    places = [*node.args.posonlyargs, *node.args.args]
    defaults = [None] * (len(places) - len(node.args.defaults)) + node.args.defaults
    rows = [(a.arg, "positional", written(a.annotation), written(default)) for a, default in zip(places, defaults, strict=True)]
    for a, default in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True):
        if a.arg in OWN_ARGUMENTS[layer]:
            assert default is not None, f"{node.name}: {a.arg} is this layer's own, so callers must be free to leave it out"
        else:
            rows.append((a.arg, "keyword", written(a.annotation), written(default)))
    return rows


def fields(node):
    """(name, annotation, default) of every field of a NamedTuple."""
    return [(f.target.id, written(f.annotation), written(f.value)) for f in node.body if isinstance(f, ast.AnnAssign)]


@pytest.mark.parametrize("layer", ALL)
@pytest.mark.parametrize("module", TABLE)
def test_each_module_defines_what_the_table_says_in_its_order(module, layer):
    assert list(definitions(layer, module)) == [name for name, layers in TABLE[module].items() if layer in layers]


@pytest.mark.parametrize("layer", ALL)
def test_there_is_no_public_module_that_the_table_lacks(layer):
    found = {path.stem for path in (ROOT / PACKAGES[layer]).glob("*.py") if not path.stem.startswith("_")}
    assert found == TABLE.keys() | OWN_MODULES[layer]


@pytest.mark.parametrize("module, name, layer", SHARED)
def test_signatures_agree(module, name, layer):
    ours, theirs = definitions("J", module)[name], definitions(layer, module)[name]
    if isinstance(ours, ast.ClassDef):
        assert fields(theirs) == fields(ours)
        return
    assert signature(theirs, layer) == signature(ours, "J")
    bounded = layer == "R" and (module, name) not in EXACT
    assert written(theirs.returns) == written(ours.returns, bounded=bounded)


@pytest.mark.parametrize("layer", ALL)
@pytest.mark.parametrize("module", TABLE)
def test_every_public_function_says_what_it_computes(module, layer):
    for name, node in definitions(layer, module).items():
        assert ast.get_docstring(node), f"{PACKAGES[layer]}/{module}.py: {name} has no docstring"
        assert isinstance(node, ast.ClassDef) or node.returns is not None, f"{name} does not say what it returns"


def test_files_stay_small():
    rooms = [path for package in (*PACKAGES.values(), "tests", "examples") for path in (ROOT / package).rglob("*.py")]
    assert not {str(path.relative_to(ROOT)): n for path in rooms if (n := len(path.read_text().splitlines())) > 350}
