"""The contract: a recipe resolved for one model. Every rule that decides a bit is a named field of it.

Conversion, training, serving export and online update all ask `Contract.rule_for`, and prove that they asked
the same contract by its digest.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from .errors import ContractError, RecipeError
from .formats import get_format
from .formats.base import Options
from .recipe import SCHEMA_VERSION, Backward, Count, Mtp, Recipe, Rule, list_recipes, load_recipe
from .roles import PARTNERS

# A model with fewer decoder layers than this keeps none of them for a share (spec/contract.md 2).
_SMALLEST_MODEL_FOR_SHARES = 3


@dataclass(frozen=True, kw_only=True, order=True)
class ModelTensor:
    """One logical tensor of a model: its HF weight name, what it is for, and where it stands.

    layer: decoder layer, MTP layers counting on from `num_layers`; None outside the layers. expert: None unless
    the tensor is one routed expert's.
    """

    name: str
    role: str
    layer: int | None = None
    expert: int | None = None

    @property
    def module(self) -> str:
        """Path of the module that holds the tensor: the name without `.weight` or `.bias`."""
        return self.name.rpartition(".")[0]


@dataclass(frozen=True, kw_only=True)
class Model:
    """What a contract needs to know of a model; a family makes it from config.json and the tensor names."""

    family: str
    model_type: str
    num_layers: int
    num_mtp_layers: int
    tensors: tuple[ModelTensor, ...]


@dataclass(frozen=True, kw_only=True)
class TensorRule:
    """One resolved rule: roles, layers and globs it matches, and the formats of weight and activation.

    weight None means keep; activation None means that the engine computes with unquantized activations.
    """

    roles: tuple[str, ...]
    layers: tuple[int, ...] | None
    names: tuple[str, ...]
    weight: Options | None
    activation: Options | None

    def matches(self, tensor: ModelTensor) -> bool:
        """Full match of every condition that is given."""
        if self.roles and tensor.role not in self.roles:
            return False
        if self.layers is not None and tensor.layer not in self.layers:
            return False
        return not self.names or any(glob_to_regex(glob).fullmatch(tensor.name) for glob in self.names)


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What the contract says about one tensor, and why. rule None: keep."""

    rule: TensorRule | None
    reason: str


@dataclass(frozen=True, kw_only=True)
class Contract:
    """A recipe resolved for one model. Equal contracts have equal digests and the reverse."""

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
            "engines": sorted(self.engines),
            "quantize_from": self.quantize_from,
            "dtype": self.dtype,
            "rules": [_rule_to_json(rule) for rule in self.rules],
            "policy": {
                "first": self.keep_first,
                "last": self.keep_last,
                "mtp": str(self.mtp),
                "keep": sorted(self.keep),
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
            contract = cls(
                model_type=content["model"]["model_type"],
                num_layers=content["model"]["num_layers"],
                num_mtp_layers=content["model"]["num_mtp_layers"],
                dialect=content["dialect"],
                engines=tuple(content["engines"]),
                quantize_from=content["quantize_from"],
                dtype=content["dtype"],
                rules=tuple(_rule_from_json(rule) for rule in content["rules"]),
                keep_first=content["policy"]["first"],
                keep_last=content["policy"]["last"],
                mtp=Mtp(content["policy"]["mtp"]),
                keep=tuple(content["policy"]["keep"]),
                backward=Backward(content["backward"]["mode"]),
            )
            difference = first_difference(contract.to_json(), content)
        except Exception as error:
            raise ContractError(f"the recorded contract cannot be read: {type(error).__name__}: {error}") from None
        if difference:
            raise ContractError(f"the recorded contract is not one of this lowprec version: {difference}")
        return contract

    def require_same(self, other: Contract, where: str) -> None:
        """Raises ContractError naming the first field in which `other` differs."""
        difference = first_difference(self.to_json(), other.to_json())
        if difference:
            raise ContractError(f"{where} was made under another contract: {difference}")


def resolve(recipe: Recipe, model: Model) -> Contract:
    """Resolve a recipe for one model.

    Raises:
        RecipeError: a quantize rule or a glob that matches nothing (the message names a recipe that would fit), a
            rule that an earlier one shadows completely, more layers kept than there are.
    """
    policy = recipe.policy
    contract = Contract(
        model_type=model.model_type,
        num_layers=model.num_layers,
        num_mtp_layers=model.num_mtp_layers,
        dialect=recipe.dialect,
        engines=recipe.engines,
        quantize_from=recipe.quantize_from,
        dtype=recipe.dtype,
        rules=tuple(_resolve_rule(rule, model, index) for index, rule in enumerate(recipe.rules)),
        keep_first=count_layers(policy.first, model.num_layers, "policy.first"),
        keep_last=count_layers(policy.last, model.num_layers, "policy.last"),
        mtp=policy.mtp,
        keep=policy.keep,
        backward=recipe.backward,
    )
    _check_rules(contract, recipe, model)
    return contract


def count_layers(count: Count, num_layers: int, where: str) -> int:
    """How many layers a count or a share is: `(p * L + 50) // 100`, at least 1, and 0 when L < 3.

    So "15%" of 3, 30, 48 and 61 layers is 1, 5, 7 and 9 (spec/contract.md 2). Raises RecipeError if there are
    fewer layers than a count asks for.
    """
    if isinstance(count, str):
        percent = int(count.removesuffix("%"))
        if num_layers < _SMALLEST_MODEL_FOR_SHARES or percent == 0:
            return 0
        return max(1, (percent * num_layers + 50) // 100)
    if count > num_layers:
        raise RecipeError(f"{where} = {count}, but the model has {num_layers} decoder layers")
    return count


def _resolve_rule(rule: Rule, model: Model, index: int) -> TensorRule:
    """Layer ranges become indices."""
    selector = rule.selector
    layers = selector.layers
    total = model.num_layers
    if selector.first is not None:
        layers = tuple(range(count_layers(selector.first, total, f"rules.{index}.layers.first")))
    if selector.last is not None:
        layers = tuple(range(total - count_layers(selector.last, total, f"rules.{index}.layers.last"), total))
    return TensorRule(
        roles=selector.roles,
        layers=layers,
        names=selector.names,
        weight=rule.weight,
        activation=rule.activation,
    )


def _check_rules(contract: Contract, recipe: Recipe, model: Model) -> None:
    """Every rule must select something, and not only what earlier rules already took."""
    untaken = list(model.tensors)
    for index, rule in enumerate(contract.rules):
        where = f"recipe '{recipe.name}': rules.{index}"
        for glob in rule.names:
            pattern = glob_to_regex(glob)
            if not any(pattern.fullmatch(tensor.name) for tensor in model.tensors):
                raise RecipeError(f"{where}: the name '{glob}' matches no tensor of the model")
        if not any(rule.matches(tensor) for tensor in model.tensors):
            if rule.weight is None and not rule.names:
                continue  # keeping a role that the family does not have is fine
            raise RecipeError(f"{where} matches no tensor of this {model.model_type} model{_fitting(rule, model)}")
        taken = [tensor for tensor in untaken if rule.matches(tensor)]
        if not taken:
            raise RecipeError(f"{where} never acts: earlier rules take every tensor that it matches")
        untaken = [tensor for tensor in untaken if not rule.matches(tensor)]


def _fitting(rule: TensorRule, model: Model) -> str:
    """The recipes of ours with the same weight format that do select something here."""
    roles = {tensor.role for tensor in model.tensors}
    fitting = [
        name
        for name in list_recipes()
        for other in load_recipe(name).rules
        if rule.weight is not None
        and other.weight is not None
        and other.weight.format == rule.weight.format
        and roles.intersection(other.selector.roles)
    ]
    return f"; recipe {' or '.join(sorted(set(fitting)))} would fit" if fitting else ""


def glob_to_regex(glob: str) -> re.Pattern[str]:
    """A glob over dotted names: `*` is anything without a dot, `?` one character without a dot; full match."""
    parts = {"*": "[^.]*", "?": "[^.]"}
    return re.compile("".join(parts.get(char, re.escape(char)) for char in glob))


def canonical(content: Any) -> str:
    """Canonical JSON text: sorted keys, no spaces, ASCII."""
    return json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def first_difference(ours: Any, theirs: Any, path: str = "contract") -> str:
    """The first place, in sorted order, where two JSON values differ, as `path: ours against theirs`; "" if equal."""
    if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
        for key in sorted({*ours, *theirs}):
            if key not in ours or key not in theirs:
                side = "only in the second" if key not in ours else "only in the first"
                return f"{path}.{key} is {side}"
            if found := first_difference(ours[key], theirs[key], f"{path}.{key}"):
                return found
        return ""
    if isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        pairs = enumerate(zip(ours, theirs, strict=True))
        return next((found for i, (a, b) in pairs if (found := first_difference(a, b, f"{path}.{i}"))), "")
    return "" if ours == theirs else f"{path} is {json.dumps(ours)} against {json.dumps(theirs)}"


def _rule_to_json(rule: TensorRule) -> dict[str, Any]:
    return {
        "roles": sorted(rule.roles),
        "layers": None if rule.layers is None else list(rule.layers),
        "names": sorted(rule.names),
        "weight": None if rule.weight is None else rule.weight.to_json(),
        "activation": None if rule.activation is None else rule.activation.to_json(),
    }


def _rule_from_json(content: Mapping[str, Any]) -> TensorRule:
    return TensorRule(
        roles=tuple(content["roles"]),
        layers=None if content["layers"] is None else tuple(content["layers"]),
        names=tuple(content["names"]),
        weight=_options_from_json(content["weight"]),
        activation=_options_from_json(content["activation"]),
    )


def _options_from_json(content: Mapping[str, Any] | None) -> Options | None:
    if content is None:
        return None
    values = {key: value for key, value in content.items() if key != "format"}
    options: Options = get_format(content["format"]).options.parse(values)
    return options
