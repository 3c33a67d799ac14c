"""Cases: small serialisable values from which every array of a call follows."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

import numpy as np

from fattn.types import Mask, causal, chunk, full, same, tree, window

Scalar = str | int | float | None

MASKS: dict[str, Mask] = {
    "full": full(),
    "causal": causal(),
    "causal & window(8, 0)": causal() & window(8, 0),
    "window(6, 3)": window(6, 3),
    "window(None, 2)": window(None, 2),
    "window(4, None)": window(4, None),
    "causal & chunk(16)": causal() & chunk(16),
    "causal & same": causal() & same("segment"),
    "causal & window(20, 0) & same": causal() & window(20, 0) & same("segment"),
    "tree": tree("enter", "exit"),
    "causal & (window(3, 0) | same)": causal() & (window(3, 0) | same("segment")),
}


@dataclass(frozen=True)
class Case:
    """One example of an operation: options and lengths, and the generator, seed and edits that make its arrays."""

    operation: str
    options: tuple[tuple[str, Scalar], ...]
    lengths: tuple[tuple[int, int], ...] = ()
    generator: str = "gaussian"
    seed: int = 0
    edits: tuple[str, ...] = ()

    def __getitem__(self, option: str) -> Scalar:
        return dict(self.options)[option]

    def option(self, name: str, value: Scalar) -> Case:
        """The case with one option changed."""
        return replace(self, options=tuple((key, value if key == name else old) for key, old in self.options))

    def rng(self) -> np.random.Generator:
        """The source of everything that is drawn for this case."""
        return np.random.default_rng(self.seed)

    def to_json(self) -> str:
        """The case as one line of JSON."""
        parts = {"operation": self.operation, "options": dict(self.options), "lengths": self.lengths}
        return json.dumps(parts | {"generator": self.generator, "seed": self.seed, "edits": self.edits})

    @classmethod
    def from_json(cls, text: str) -> Case:
        """The case that to_json wrote."""
        parts = json.loads(text)
        lengths = tuple((int(a), int(b)) for a, b in parts["lengths"])
        return cls(parts["operation"], tuple(parts["options"].items()), lengths, parts["generator"], parts["seed"], tuple(parts["edits"]))

    def __str__(self) -> str:
        options = ", ".join(f"{name}={value}" for name, value in self.options if value is not None)
        lengths = f" lengths={list(self.lengths)}" if self.lengths else ""
        edits = f" edits={list(self.edits)}" if self.edits else ""
        return f"{self.operation}({options}){lengths} {self.generator} seed={self.seed}{edits}"


def case_of(operation: str, options: dict[str, Scalar]) -> Case:
    """A case by hand: gaussian, seed 0, with these options."""
    return Case(operation, tuple(options.items()))


def numbers(text: Scalar) -> tuple[int, ...]:
    """The sizes in an option such as "6/2" or "17x66"."""
    return tuple(int(part) for part in str(text).replace("x", "/").split("/"))


def dtype_of(name: Scalar) -> np.dtype:
    """A NumPy dtype by name, bfloat16 included."""
    return np.dtype(str(name))
