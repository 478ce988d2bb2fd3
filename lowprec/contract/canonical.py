"""Canonical JSON, reading it strictly, and where two JSON values differ."""

from __future__ import annotations

import json
from collections.abc import Container, Mapping
from typing import Any

_LONGEST = 200  # characters of a value in a message


def canonical(content: Any) -> str:
    """Canonical JSON text: sorted keys, no spaces, ASCII."""
    return json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def first_difference(ours: Any, theirs: Any, path: str = "contract") -> str:
    """The first place, in sorted order, where two JSON values differ, as `path: ours against theirs`; "" if equal.

    Equal means the same canonical text: 1, 1.0 and true differ, NaN is equal to itself.
    """
    if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
        for key in sorted({*ours, *theirs}):
            if key not in ours or key not in theirs:
                return f"{path}.{key} is only in the {'second' if key not in ours else 'first'}"
            if found := first_difference(ours[key], theirs[key], f"{path}.{key}"):
                return found
        return ""
    if isinstance(ours, list) and isinstance(theirs, list):
        return _first_difference_of_lists(ours, theirs, path)
    one, other = json.dumps(ours), json.dumps(theirs)
    return "" if one == other else f"{path} is {_shortened(one)} against {_shortened(other)}"


def _shortened(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


def _first_difference_of_lists(ours: list[Any], theirs: list[Any], path: str) -> str:
    """Lists of words are compared as sets first: a word too many is no difference in every later place."""
    if all(isinstance(item, str) for item in (*ours, *theirs)):
        for word in sorted({*ours} ^ {*theirs}):
            return f"{path}: '{word}' is only in the {'first' if word in ours else 'second'}"
    for index, (one, other) in enumerate(zip(ours, theirs, strict=False)):
        if found := first_difference(one, other, f"{path}.{index}"):
            return found
    return "" if len(ours) == len(theirs) else f"{path} has {len(ours)} entries against {len(theirs)}"


def expect(value: Any, kind: type[Any], choices: Container[Any] | None = None) -> Any:
    """A value read from JSON, if it is of exactly that type (true is no number), one of `choices`, not negative.

    Raises:
        TypeError: another type.
        ValueError: another value.
    """
    if type(value) is not kind:
        raise TypeError(f"{value!r} is not of type {kind.__name__}")
    if (choices is not None and value not in choices) or (kind is int and value < 0):
        raise ValueError(f"{value!r} is not known here")
    return value
