"""The expected result of a call: the reference's value, and its bound for a declared precision."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

from fattn.conformance.calls import Call, is_array
from fattn.conformance.operations.base import Operation
from reference.bounded import Bounded, Precision


class Expected(NamedTuple):
    """`value` and `bound` of one structure; where a part of `bound` is None, the same bits are asked for."""

    value: Any
    bound: Any


def expected(operation: Operation, call: Call, precision: Precision) -> Expected:
    """What the reference says. Errors that it raises for the call are the caller's."""
    found = split(operation.invoke(partial(function, precision=precision), call))
    return Expected(operation.settled(call, found.value), None if found.bound is None else operation.settled(call, found.bound))


def function(name: str, *, precision: Precision) -> Callable:
    """The reference's "module.function" with its precision fixed, where it has one."""
    found = _found(name)
    return partial(found, precision=precision) if _takes_precision(name) else found


def split(result) -> Expected:
    """A result of the reference, which holds Bounded in some places, as two structures."""
    if isinstance(result, Bounded):
        return Expected(result.value, result.bound)
    if is_array(result) or not isinstance(result, tuple):
        return Expected(result, None)
    parts = [split(part) for part in result]
    kind = type(result) if hasattr(result, "_fields") else None
    values, bounds = ([part[i] for part in parts] for i in (0, 1))
    return Expected(kind(*values), kind(*bounds)) if kind else Expected(tuple(values), tuple(bounds))


@cache
def _found(name):
    module, attribute = name.split(".")
    return getattr(importlib.import_module(f"reference.{module}"), attribute)


@cache
def _takes_precision(name):
    found = _found(name)
    return not isinstance(found, type) and "precision" in inspect.signature(found).parameters
