"""Whether the tensors of a checkpoint are the ones that its config.json promises: none missing, none too many."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lowprec.contract import ModelTensor
from lowprec.errors import PlanError


@dataclass(frozen=True, kw_only=True)
class Placed:
    """A tensor and the template of its family that it matched."""

    tensor: ModelTensor
    template: str


@dataclass(frozen=True, kw_only=True)
class Expected:
    """What config.json says.

    sparse: layers with routed experts. tied: there need be no output head. templates: (template, role) of the family.
    """

    num_layers: int
    num_mtp_layers: int
    num_experts: int
    sparse: frozenset[int]
    tied: bool
    templates: Sequence[tuple[str, str]]


Layers = Mapping[int, Mapping[str, set[int | None]]]  # layer -> template -> experts


def check_complete(placed: Sequence[Placed], expected: Expected) -> None:
    """Raises PlanError naming the first tensor, layer or expert in which checkpoint and config.json disagree."""
    _check_unique(placed)
    layers: dict[int, dict[str, set[int | None]]] = {}
    for item in placed:
        tensor = item.tensor
        if tensor.layer is not None:
            _check_layer_of(tensor, expected)
            layers.setdefault(tensor.layer, {}).setdefault(item.template, set()).add(tensor.expert)
    _check_outer({item.tensor.role for item in placed if item.tensor.layer is None}, expected)
    _check_layers(layers, expected)
    for layer, templates in layers.items():
        _check_experts(layer, templates, expected)
    _check_alike(layers, expected)


def _check_unique(placed: Sequence[Placed]) -> None:
    names = [item.tensor.name for item in placed]
    twice = next((name for name, following in itertools.pairwise(names) if name == following), None)
    if twice is not None:
        raise PlanError(f"tensor '{twice}' occurs twice in the source")


def _check_layer_of(tensor: ModelTensor, expected: Expected) -> None:
    """No tensor beyond the last layer, no MTP tensor below it."""
    assert tensor.layer is not None
    said = f"config.json has {expected.num_layers} decoder layers and {expected.num_mtp_layers} for MTP"
    if tensor.layer >= expected.num_layers + expected.num_mtp_layers:
        raise PlanError(f"tensor '{tensor.name}' is in layer {tensor.layer}, but {said}")
    if tensor.role.startswith("mtp.") and tensor.layer < expected.num_layers:
        raise PlanError(f"tensor '{tensor.name}' belongs to MTP but is in layer {tensor.layer}; {said}")


def _check_outer(roles: set[str], expected: Expected) -> None:
    """Embedding, final norm and, unless it is tied, output head."""
    for template, role in expected.templates:
        if "{layer}" in template or role not in ("embedding", "norm", "lm_head"):
            continue
        if role not in roles and not (role == "lm_head" and expected.tied):
            hint = " and config.json does not tie it to the embedding" if role == "lm_head" else ""
            raise PlanError(f"tensor '{template}' is missing from the source{hint}")


def _check_layers(layers: Layers, expected: Expected) -> None:
    """Every decoder layer is there; of the MTP layers all or none, since trainers and transformers leave them out."""
    total = expected.num_layers + expected.num_mtp_layers
    has_mtp = any(layer >= expected.num_layers for layer in layers)
    for layer in range(total if has_mtp else expected.num_layers):
        if layer not in layers:
            raise PlanError(f"layer {layer} is missing: config.json has {expected.num_layers} decoder layers")


def _check_experts(layer: int, templates: Mapping[str, set[int | None]], expected: Expected) -> None:
    """In the layers that config.json makes a mixture of experts all of them and no dense MLP; elsewhere none."""
    sparse = layer in expected.sparse
    for template, role in expected.templates:
        found = templates.get(template, set())
        if sparse and found and role.startswith("mlp."):
            raise PlanError(f"layer {layer} has a dense '{template}', but config.json makes it a mixture of experts")
        if "{expert}" not in template:
            continue
        if not sparse and found:
            raise PlanError(f"layer {layer} has routed experts '{template}', but config.json makes it dense")
        wrong = found.symmetric_difference(range(expected.num_experts if sparse else 0))
        if wrong:
            expert = min(wrong, key=lambda item: -1 if item is None else item)
            said = f"config.json has {expected.num_experts} experts"
            raise PlanError(
                f"layer {layer} {'has' if expert in found else 'lacks'} expert {expert} of '{template}'; {said}"
            )


def _check_alike(layers: Layers, expected: Expected) -> None:
    """All dense layers have the same tensors, and all sparse ones, and all MTP ones: what one lacks is missing."""
    first: dict[tuple[bool, bool], int] = {}
    for layer in sorted(layers):
        model = first.setdefault((layer >= expected.num_layers, layer in expected.sparse), layer)
        differing = sorted(set(layers[model]).symmetric_difference(layers[layer]))
        if differing:
            poor, rich = (layer, model) if differing[0] in layers[model] else (model, layer)
            raise PlanError(f"layer {poor} has no '{differing[0]}', but layer {rich} has")
