"""The contract as a record: what it decides for a tensor, its JSON and its digest."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ..errors import ContractError, LowprecError
from ..formats import get_format
from ..recipe import DTYPES, ENGINES, SCHEMA_VERSION, Backward, Mtp
from ..roles import PARTNERS, ROLES
from .canonical import canonical, expect, first_difference
from .model import ModelTensor
from .rules import Decision, TensorRule


@dataclass(frozen=True, kw_only=True)
class Contract:
    """A recipe resolved for one model. Equal contracts have equal digests and the reverse.

    Invariant: engines and keep are sorted; keep_first and keep_last are numbers of layers.
    """

    model_type: str
    num_layers: int
    num_mtp_layers: int
    dialect: str
    engines: tuple[str, ...]
    quantize_from: str
    dtype: str
    rules: tuple[TensorRule, ...]
    keep_first: int
    keep_last: int
    mtp: Mtp
    keep: tuple[str, ...]
    backward: Backward

    def __post_init__(self) -> None:
        object.__setattr__(self, "engines", tuple(sorted(self.engines)))
        object.__setattr__(self, "keep", tuple(sorted(self.keep)))

    def rule_for(self, tensor: ModelTensor) -> Decision:
        """The one rule for a tensor. Policy is asked first, then the rules in order; no match is keep."""
        kept = self._policy_keeps(tensor)
        if kept:
            return Decision(rule=None, reason=kept)
        for index, rule in enumerate(self.rules):
            if rule.matches(tensor):
                if rule.weight is None:
                    return Decision(rule=None, reason=f"rules.{index}: keep")
                return Decision(rule=rule, reason=f"rules.{index}: {tensor.role}")
        return Decision(rule=None, reason="no rule matches")

    def _policy_keeps(self, tensor: ModelTensor) -> str:
        """Why the policy keeps a tensor, or an empty string."""
        if tensor.role in self.keep:
            return f"policy.keep: {tensor.role}"
        layer = tensor.layer
        if layer is None:
            return ""
        if layer >= self.num_layers:
            return "policy.mtp: keep" if self.mtp is Mtp.KEEP else ""
        if layer < self.keep_first:
            return f"policy.first: {self.keep_first} of {self.num_layers} layers"
        if layer >= self.num_layers - self.keep_last:
            return f"policy.last: {self.keep_last} of {self.num_layers} layers"
        return ""

    def to_json(self) -> dict[str, Any]:
        """The canonical content: plain JSON values, every option and every numeric rule of the formats stated."""
        return {
            "schema_version": SCHEMA_VERSION,
            "model": {
                "model_type": self.model_type,
                "num_layers": self.num_layers,
                "num_mtp_layers": self.num_mtp_layers,
            },
            "dialect": self.dialect,
            "engines": list(self.engines),
            "quantize_from": self.quantize_from,
            "dtype": self.dtype,
            "rules": [rule.to_json() for rule in self.rules],
            "policy": {
                "first": self.keep_first,
                "last": self.keep_last,
                "mtp": str(self.mtp),
                "keep": list(self.keep),
            },
            "partners": [list(group) for group in PARTNERS],
            "backward": {"mode": str(self.backward)},
            "numerics": self._numerics(),
        }

    def _numerics(self) -> dict[str, Any]:
        """Every bit-deciding rule of every format in use, keyed by its canonical options."""
        used = {
            canonical(options.to_json()): options
            for rule in self.rules
            for options in (rule.weight, rule.activation)
            if options is not None
        }
        return {key: get_format(options.format).describe(options) for key, options in used.items()}

    @cached_property
    def digest(self) -> str:
        """sha256 of the canonical JSON, as hex."""
        return hashlib.sha256(canonical(self.to_json()).encode()).hexdigest()

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Contract:
        """Read back what `to_json` wrote. Raises ContractError if it is not exactly a contract of this lowprec."""
        try:
            model, policy = content["model"], content["policy"]
            contract = cls(
                model_type=expect(model["model_type"], str),
                num_layers=expect(model["num_layers"], int),
                num_mtp_layers=expect(model["num_mtp_layers"], int),
                dialect=expect(content["dialect"], str),
                engines=tuple(expect(engine, str, ENGINES) for engine in content["engines"]),
                quantize_from=expect(content["quantize_from"], str, DTYPES),
                dtype=expect(content["dtype"], str, DTYPES),
                rules=tuple(TensorRule.from_json(rule) for rule in content["rules"]),
                keep_first=expect(policy["first"], int, range(model["num_layers"] + 1)),
                keep_last=expect(policy["last"], int, range(model["num_layers"] + 1)),
                mtp=Mtp(policy["mtp"]),
                keep=tuple(expect(role, str, ROLES) for role in policy["keep"]),
                backward=Backward(content["backward"]["mode"]),
            )
            difference = first_difference(contract.to_json(), content)
        except (KeyError, TypeError, ValueError, AttributeError, LowprecError) as error:
            raise ContractError(f"the recorded contract cannot be read: {type(error).__name__}: {error}") from None
        if difference:
            raise ContractError(f"the recorded contract is not one of this lowprec version: {difference}")
        return contract

    def require_same(self, other: Contract, where: str) -> None:
        """Raises ContractError naming the first field in which `other` differs."""
        difference = first_difference(self.to_json(), other.to_json())
        if difference:
            raise ContractError(f"{where} was made under another contract: {difference}")
