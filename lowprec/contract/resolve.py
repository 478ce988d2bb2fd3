"""From a recipe and a model to a contract; every selector must select something."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import RecipeError
from ..recipe import Count, Recipe, Rule, list_recipes, load_recipe
from ..roles import LINEAR_ROLES
from .model import Model, ModelTensor
from .record import Contract
from .rules import TensorRule, glob_to_regex

# A model with fewer decoder layers than this keeps none of them for a share (spec/contract.md 2).
_SMALLEST_MODEL_FOR_SHARES = 3


def resolve(recipe: Recipe, model: Model) -> Contract:
    """Resolve a recipe for one model.

    Raises:
        RecipeError: a quantize rule or a glob that matches nothing (the message names a recipe that would fit), a
            rule that an earlier one shadows completely, a glob that would quantize what is never quantized, a layer
            that the model does not have, more layers kept than there are.
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
        rules=tuple(
            _resolve_rule(rule, model, f"recipe '{recipe.name}': rules.{index}")
            for index, rule in enumerate(recipe.rules)
        ),
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


def _resolve_rule(rule: Rule, model: Model, where: str) -> TensorRule:
    """Layer ranges become indices."""
    selector = rule.selector
    layers = selector.layers
    total = model.num_layers
    if selector.first is not None:
        layers = tuple(range(count_layers(selector.first, total, f"{where}.layers.first")))
    if selector.last is not None:
        layers = tuple(range(total - count_layers(selector.last, total, f"{where}.layers.last"), total))
    beyond = [layer for layer in layers or () if layer >= total + model.num_mtp_layers]
    if beyond:
        raise RecipeError(
            f"{where}.layers: there is no layer {beyond[0]}, the model has {total} decoder layers "
            f"and {model.num_mtp_layers} for MTP"
        )
    return TensorRule(
        roles=selector.roles,
        layers=layers,
        names=selector.names,
        weight=rule.weight,
        activation=rule.activation,
    )


def _check_rules(contract: Contract, recipe: Recipe, model: Model) -> None:
    """Every rule must select something, and not only what earlier rules already took."""
    untaken: Sequence[ModelTensor] = model.tensors
    for index, rule in enumerate(contract.rules):
        where = f"recipe '{recipe.name}': rules.{index}"
        _check_globs(rule, contract, model, where)
        if not any(rule.matches(tensor) for tensor in model.tensors):
            if rule.weight is None and not rule.names:
                continue  # keeping a role that the family does not have is fine
            raise RecipeError(f"{where} matches no tensor of this {model.model_type} model{_fitting(rule, model)}")
        rest = [tensor for tensor in untaken if not rule.matches(tensor)]
        if len(rest) == len(untaken):
            raise RecipeError(f"{where} never acts: earlier rules take every tensor that it matches")
        untaken = rest


def _check_globs(rule: TensorRule, contract: Contract, model: Model, where: str) -> None:
    """Every glob names something, and a quantizing one nothing that is never quantized unless the policy keeps it."""
    for glob in rule.names:
        pattern = glob_to_regex(glob)
        found = [tensor for tensor in model.tensors if pattern.fullmatch(tensor.name)]
        if not found:
            raise RecipeError(f"{where}: the name '{glob}' matches no tensor of the model")
        if rule.weight is None:
            continue
        for tensor in found:
            if rule.matches(tensor) and tensor.role not in LINEAR_ROLES and tensor.role not in contract.keep:
                raise RecipeError(
                    f"{where}: the name '{glob}' matches '{tensor.name}', and role '{tensor.role}' is never quantized"
                )


def _fitting(rule: TensorRule, model: Model) -> str:
    """Our recipes that do select something here: those with the same weight format, else all that quantize."""
    if rule.weight is None:
        return ""
    roles = {tensor.role for tensor in model.tensors}
    formats: dict[str, set[str]] = {}
    for name in list_recipes():
        for other in load_recipe(name).rules:
            if other.weight is not None and roles.intersection(other.selector.roles):
                formats.setdefault(other.weight.format, set()).add(name)
    names = formats.get(rule.weight.format) or set().union(*formats.values())
    return f"; recipe {' or '.join(sorted(names))} would fit" if names else ""
