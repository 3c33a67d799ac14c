"""What a law is: a statement about an implementation, checked through it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fattn.conformance.trial import Trial


@dataclass(frozen=True)
class Law:
    """`check` raises Mismatch where the law does not hold and returns False where it says nothing about the trial.

    Its docstring is the law. `kind` is "bits" or "bound". Of the cases, every `every`-th is tried; `narrow` laws change
    shapes: where a library compiles every new shape they are tried on a few cases alone.
    """

    name: str
    kind: str
    check: Callable[[Trial], bool | None]
    every: int = 4
    narrow: bool = False

    @property
    def statement(self) -> str:
        """The law in words."""
        return (self.check.__doc__ or "").strip()
