"""What a model family is: the names of its tensors, their roles, and what its config.json says about them.

A family is data. Its file in `families/` holds one `FAMILY` with templates such as

    "model.layers.{layer}.mlp.experts.{expert}.gate_proj.weight": "experts.gate"

and is found by scanning that folder, or, in another package, through the entry point group `lowprec.families`.
What else a family knows (how Megatron lays out the same weights) is a further field beside `templates`.
"""

from __future__ import annotations

import difflib
import importlib
import pkgutil
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.metadata import entry_points
from typing import Any

from lowprec.contract import Model, ModelTensor
from lowprec.errors import PlanError, did_you_mean
from lowprec.roles import ROLES

from . import families
from .completeness import Expected, Placed, check_complete

Config = Mapping[str, Any]

# Nine digits at most: a name comes from a file that anybody may have written.
_NUMBER = re.compile(r"(?<=\.)(?:0|[1-9][0-9]{0,8})(?=\.)")
_SLOT = re.compile(r"(?<=\.)\{(\w*)\}(?=\.)|(?<=\.)([0-9]+)(?=\.)")
_PLACES = ("layer", "expert")
_MOST = 100_000  # layers or experts; a config that anybody may have written must not make us count to its number


@dataclass(frozen=True, kw_only=True)
class _Template:
    """One template. slots: what each number of a name stands for, "layer" or "expert", or the number it must be."""

    text: str
    role: str
    slots: tuple[str | int, ...]

    def match(self, name: str, numbers: tuple[int, ...]) -> ModelTensor | None:
        """The tensor, if the numbers of `name` fit; the text around them is known to."""
        places: dict[str, int] = {}
        for slot, number in zip(self.slots, numbers, strict=True):
            if isinstance(slot, str):
                places[slot] = number
            elif slot != number:
                return None
        return ModelTensor(name=name, role=self.role, layer=places.get("layer"), expert=places.get("expert"))


def _never(config: Config, layer: int) -> bool:  # noqa: ARG001
    return False


@dataclass(frozen=True, kw_only=True, eq=False)
class Family:
    """One model family.

    templates: HF tensor name with `{layer}` and `{expert}` for the indices -> role; matched in full, in this order.
    model_types: what config.json may call it.
    layers_key, mtp_layers_key, experts_keys: config.json keys of the number of decoder layers, of MTP layers (whose
        layer index counts on from the decoder's) and of routed experts (the first that is there); None, () if the
        family has none.
    is_sparse: whether the MLP of a layer is a mixture of experts, from the config.

    Raises:
        PlanError: a template with an unknown role or placeholder.
    """

    name: str
    model_types: tuple[str, ...]
    templates: Mapping[str, str]
    layers_key: str = "num_hidden_layers"
    mtp_layers_key: str | None = None
    experts_keys: tuple[str, ...] = ()
    is_sparse: Callable[[Config, int], bool] = _never

    def __post_init__(self) -> None:
        for text, role in self.templates.items():
            where = f"family '{self.name}': template '{text}'"
            if role not in ROLES:
                raise PlanError(f"{where}: unknown role '{role}'{did_you_mean(role, ROLES)}")
            places = re.findall(r"\{(.*?)\}", text)
            wrong = [place for place in places if place not in _PLACES]
            if wrong or len(set(places)) != len(places) or len(_SLOT.findall(text)) < len(places):
                raise PlanError(f"{where}: only .{{layer}}. and .{{expert}}., each once and between dots")

    @cached_property
    def _index(self) -> dict[str, list[_Template]]:
        """Templates by their text with every number and placeholder as `#`: one look-up finds the candidates."""
        index: dict[str, list[_Template]] = {}
        for text, role in self.templates.items():
            slots = tuple(place or int(number) for place, number in _SLOT.findall(text))
            index.setdefault(_SLOT.sub("#", text), []).append(_Template(text=text, role=role, slots=slots))
        return index

    def locate(self, name: str) -> ModelTensor:
        """Role and place of a tensor. Raises PlanError for a name that no template matches in full."""
        return self._place(name).tensor

    def _place(self, name: str) -> Placed:
        numbers = tuple(int(number) for number in _NUMBER.findall(name))
        for template in self._index.get(_NUMBER.sub("#", name), ()) if "#" not in name else ():
            if (tensor := template.match(name, numbers)) is not None:
                return Placed(tensor=tensor, template=template.text)
        (near,) = difflib.get_close_matches(_NUMBER.sub("{layer}", name, count=1), self.templates, n=1, cutoff=0.0)
        raise PlanError(
            f"tensor '{name}' has no role in family '{self.name}' (nearest: '{near}'); "
            f"if the model does have it, add a template for it to the family's file"
        )

    def model(self, config: Config, names: Iterable[str]) -> Model:
        """The model that config.json and the names of its tensors (logical weights, without scales) describe.

        Raises:
            PlanError: a tensor without a role; config.json lacks a key, or says something else than the tensors: a
                layer or expert too many or too few, a mixture of experts where a dense MLP should be, a tensor that
                is not there.
        """
        model_type = config.get("model_type")
        if model_type not in self.model_types:
            raise PlanError(f"config.json: model_type {model_type!r} is not of family '{self.name}'")
        num_layers = _count(config, (self.layers_key,))
        num_mtp_layers = _count(config, (self.mtp_layers_key,), absent=0) if self.mtp_layers_key else 0
        expected = Expected(
            num_layers=num_layers,
            num_mtp_layers=num_mtp_layers,
            num_experts=_count(config, self.experts_keys) if self.experts_keys else 0,
            sparse=self._sparse_layers(config, num_layers + num_mtp_layers),
            tied=bool(config.get("tie_word_embeddings", False)),
            templates=tuple(self.templates.items()),
        )
        placed = [self._place(name) for name in sorted(names)]
        check_complete(placed, expected)
        return Model(
            family=self.name,
            model_type=model_type,
            num_layers=num_layers,
            num_mtp_layers=num_mtp_layers,
            tensors=tuple(item.tensor for item in placed),
        )

    def _sparse_layers(self, config: Config, num_layers: int) -> frozenset[int]:
        """The layers with routed experts."""
        try:
            return frozenset(layer for layer in range(num_layers) if self.is_sparse(config, layer))
        except (TypeError, ValueError, ZeroDivisionError) as error:
            raise PlanError(f"config.json: it does not say which layers have experts: {error}") from None


def _count(config: Config, keys: tuple[str, ...], absent: int | None = None) -> int:
    """The number under the first of `keys` that the config has."""
    for key in keys:
        value = config.get(key)
        if value is None:
            continue
        if type(value) is not int or value < (absent is None):
            raise PlanError(f"config.json: {key} = {value!r} must be a number of at least {int(absent is None)}")
        if value > _MOST:
            raise PlanError(f"config.json: {key} = {value} is more than {_MOST}, which no model has")
        return value
    if absent is None:
        raise PlanError(f"config.json: key '{keys[0]}' is missing; the family needs it")
    return absent


@cache
def builtin_families() -> tuple[Family, ...]:
    """The families that come with lowprec, in order of their file names."""
    names = sorted(info.name for info in pkgutil.iter_modules(families.__path__))
    return tuple(importlib.import_module(f"{families.__name__}.{name}").FAMILY for name in names)


@cache
def _plugin_families() -> tuple[Family, ...]:
    """Families of other packages. Raises PlanError for an entry point that does not lead to one."""
    found = []
    for entry in sorted(entry_points(group="lowprec.families"), key=lambda entry: entry.name):
        family: Any = entry.load()
        if not isinstance(family, Family):
            raise PlanError(f"entry point '{entry.name}' of lowprec.families is a {type(family).__name__}, no Family")
        found.append(family)
    return tuple(found)


def find_family(model_type: str) -> Family:
    """The family of a config's `model_type`, ours before those of other packages. Raises PlanError if there is none."""
    known: list[str] = []
    for group in (builtin_families, _plugin_families):  # plugins are loaded only if none of ours fits
        for family in group():
            if model_type in family.model_types:
                return family
            known += family.model_types
    near = difflib.get_close_matches(model_type, known, n=1, cutoff=0.8)
    hint = f" (did you mean '{near[0]}'?)" if near else ""
    raise PlanError(
        f"model_type '{model_type}' is not known{hint}; known: {', '.join(sorted(known))}; to add one, write "
        f"converters/families/<name>.py as llama.py there, or register a Family under the entry point group "
        f"lowprec.families"
    )
