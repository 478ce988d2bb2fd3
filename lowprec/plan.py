"""The plan: every tensor of a checkpoint, what happens to it, and why. Pure: made from headers alone."""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from types import MappingProxyType
from typing import Protocol

from .contract import Contract, ModelTensor, TensorRule
from .errors import FormatError, PlanError
from .formats import get_format
from .formats.base import Options, Shape
from .roles import PARTNERS

# safetensors dtype names and their bytes per element.
DTYPE_BYTES = MappingProxyType(
    {
        "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "U16": 2, "U32": 4,
        "U64": 8, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    }
)  # fmt: skip

FLOAT_DTYPES = MappingProxyType({"BF16": "bfloat16", "F16": "float16", "F32": "float32"})
_SAFETENSORS_NAME = {name: code for code, name in FLOAT_DTYPES.items()}

_PARTNERS_OF: Mapping[str, tuple[str, ...]] = MappingProxyType({role: group for group in PARTNERS for role in group})


@dataclass(frozen=True, kw_only=True)
class TensorInfo:
    """Name, safetensors dtype and shape of one stored tensor."""

    name: str
    dtype: str
    shape: Shape

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor's data."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, kw_only=True)
class SourceTensor:
    """One logical tensor of a source: a plain tensor, or a quantized one with its companion scales.

    name: the HF weight name (`...q_proj.weight`) whatever the dialect calls the pieces. stored: None if plain.
    parts: the stored tensors it consists of, by the dialect's word for each ("weight" alone if plain).
    """

    name: str
    dtype: str
    shape: Shape
    stored: Options | None = None
    parts: Mapping[str, TensorInfo] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Stored bytes, companion scales included."""
        return sum(part.nbytes for part in self.parts.values())


class Action(enum.StrEnum):
    """What a step does with its tensor."""

    KEEP = "keep"
    QUANTIZE = "quantize"
    DEQUANTIZE = "dequantize"


@dataclass(frozen=True, kw_only=True)
class Step:
    """One tensor's part of the plan.

    dtype: safetensors dtype of the result where it is not quantized. partners: names of the tensors, itself
    included, that share one global amax; empty if none does.
    """

    tensor: ModelTensor
    source: SourceTensor
    action: Action
    reason: str
    dtype: str
    rule: TensorRule | None = None
    partners: tuple[str, ...] = ()

    @property
    def weight(self) -> Options | None:
        """Format of the result; None if it is not quantized."""
        return self.rule.weight if self.rule is not None else None


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Every tensor of one source exactly once, in order of its name."""

    contract: Contract
    steps: tuple[Step, ...]


class Locator(Protocol):
    """The part of a family that a plan needs."""

    def locate(self, name: str) -> ModelTensor:
        """Role and place of a weight name. Raises PlanError for a name the family does not know."""
        ...


def build_plan(contract: Contract, family: Locator, index: Sequence[SourceTensor]) -> Plan:
    """Decide what happens to every tensor.

    Raises:
        PlanError: a tensor without a role, one that occurs twice, a shape that its format cannot hold, a source
            that is quantized already, or a contract that quantizes nothing here although it has rules.
    """
    seen: set[str] = set()
    steps: list[Step] = []
    for source in sorted(index, key=lambda item: item.name):
        if source.name in seen:
            raise PlanError(f"tensor '{source.name}' occurs twice in the source")
        seen.add(source.name)
        steps.append(_plan_tensor(contract, family.locate(source.name), source))
    wants = any(rule.weight is not None for rule in contract.rules)
    if wants and not any(step.action is Action.QUANTIZE for step in steps):
        raise PlanError(
            "nothing would be quantized: the policy keeps every tensor that a rule selects; see policy.last"
        )
    groups = partner_groups([step for step in steps if step.action is Action.QUANTIZE])
    return Plan(contract=contract, steps=tuple(_with_partners(step, groups) for step in steps))


def _plan_tensor(contract: Contract, tensor: ModelTensor, source: SourceTensor) -> Step:
    """The step of one tensor, partners left out."""
    decision = contract.rule_for(tensor)
    result = _SAFETENSORS_NAME[contract.dtype]
    if decision.rule is None:
        if source.stored is None:
            return Step(tensor=tensor, source=source, action=Action.KEEP, reason=decision.reason, dtype=source.dtype)
        reason = f"{decision.reason}; stored as {source.stored.format}"
        return Step(tensor=tensor, source=source, action=Action.DEQUANTIZE, reason=reason, dtype=result)
    options = decision.rule.weight
    assert options is not None, "rule_for returns only rules that quantize"
    if source.stored is not None:
        raise PlanError(
            f"tensor '{source.name}' is already {source.stored.format}; convert the checkpoint with --recipe bf16 first"
        )
    if source.dtype not in FLOAT_DTYPES:
        raise PlanError(f"tensor '{source.name}' is {source.dtype}; only BF16, F16 and F32 weights can be quantized")
    try:
        get_format(options.format).layout(source.shape, options)
    except FormatError as error:
        raise PlanError(
            f"tensor '{source.name}' of shape {list(source.shape)}: {error}; keep its role or choose another recipe"
        ) from None
    return Step(
        tensor=tensor,
        source=source,
        action=Action.QUANTIZE,
        reason=decision.reason,
        dtype=source.dtype,
        rule=decision.rule,
    )


def partner_groups(steps: Sequence[Step]) -> dict[str, tuple[str, ...]]:
    """For each step that has a partner: the names that share its global amax, in the order of PARTNERS.

    Partners stand under one parent module (one layer, one expert) and have the same format and options, one with a
    global scale for the whole matrix: a scale for each row has nothing to share.
    """
    found: dict[tuple[str, tuple[str, ...], Options], list[Step]] = {}
    for step in steps:
        group = _PARTNERS_OF.get(step.tensor.role)
        options = step.weight
        if group is None or options is None or not _has_matrix_scale(options, step.source.shape):
            continue
        parent = step.tensor.module.rpartition(".")[0]
        found.setdefault((parent, group, options), []).append(step)
    groups: dict[str, tuple[str, ...]] = {}
    for (_, roles, _), members in found.items():
        ordered = sorted(members, key=lambda step: (roles.index(step.tensor.role), step.tensor.name))
        names = tuple(step.tensor.name for step in ordered)
        groups.update(dict.fromkeys(names, names) if len(names) > 1 else {})
    return groups


@cache
def _has_matrix_scale(options: Options, shape: Shape) -> bool:
    """Whether the format holds one global scale for each matrix of a tensor."""
    scale = get_format(options.format).layout(shape, options).global_scale
    return scale is not None and scale.shape == shape[:-2]


def _with_partners(step: Step, groups: Mapping[str, tuple[str, ...]]) -> Step:
    names = groups.get(step.tensor.name, ())
    return dataclasses.replace(step, partners=names) if names else step
