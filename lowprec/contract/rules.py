"""One resolved rule: what it matches, what it asks for, and its JSON."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

from ..formats import get_format
from ..formats.base import Options
from ..roles import ROLES
from .canonical import expect
from .model import ModelTensor


@dataclass(frozen=True, kw_only=True)
class TensorRule:
    """One resolved rule: roles, layers and globs it matches, and the formats of weight and activation.

    Invariant: roles, layers and names are sorted, so that equal rules are equal records. weight None means keep;
    activation None means that the engine computes with unquantized activations.
    """

    roles: tuple[str, ...]
    layers: tuple[int, ...] | None
    names: tuple[str, ...]
    weight: Options | None
    activation: Options | None

    def __post_init__(self) -> None:
        object.__setattr__(self, "roles", tuple(sorted(self.roles)))
        object.__setattr__(self, "names", tuple(sorted(self.names)))
        object.__setattr__(self, "layers", None if self.layers is None else tuple(sorted(self.layers)))

    @cached_property
    def _sets(self) -> tuple[frozenset[str], frozenset[int | None] | None, tuple[re.Pattern[str], ...]]:
        layers: frozenset[int | None] | None = None if self.layers is None else frozenset(self.layers)
        return frozenset(self.roles), layers, tuple(glob_to_regex(glob) for glob in self.names)

    def matches(self, tensor: ModelTensor) -> bool:
        """Full match of every condition that is given."""
        roles, layers, patterns = self._sets
        if roles and tensor.role not in roles:
            return False
        if layers is not None and tensor.layer not in layers:
            return False
        return not patterns or any(pattern.fullmatch(tensor.name) for pattern in patterns)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values, every option of the formats stated."""
        return {
            "roles": list(self.roles),
            "layers": None if self.layers is None else list(self.layers),
            "names": list(self.names),
            "weight": None if self.weight is None else self.weight.to_json(),
            "activation": None if self.activation is None else self.activation.to_json(),
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> TensorRule:
        """Inverse of `to_json`. Raises KeyError, TypeError, ValueError or LowprecError for anything else."""
        rule = cls(
            roles=tuple(expect(role, str, ROLES) for role in content["roles"]),
            layers=None if content["layers"] is None else tuple(expect(layer, int) for layer in content["layers"]),
            names=tuple(expect(name, str) for name in content["names"]),
            weight=_options_from_json(content["weight"]),
            activation=_options_from_json(content["activation"]),
        )
        if not rule.roles and not rule.names:
            raise ValueError("a rule without roles and names would match everything")
        return rule


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What the contract says about one tensor, and why. rule None: keep."""

    rule: TensorRule | None
    reason: str


@cache
def glob_to_regex(glob: str) -> re.Pattern[str]:
    """A glob over dotted names: `*` is anything without a dot, `?` one character without a dot; full match."""
    parts = {"*": "[^.]*", "?": "[^.]"}
    return re.compile("".join(parts.get(char, re.escape(char)) for char in glob))


def _options_from_json(content: Mapping[str, Any] | None) -> Options | None:
    if content is None:
        return None
    values = {key: value for key, value in content.items() if key != "format"}
    options: Options = get_format(content["format"]).options.parse(values)
    return options
