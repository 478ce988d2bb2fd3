"""The modules that an engine builds for a plan, under the engine's own names, and what lies in them on disk."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ..plan import Action, Plan, Step
from ..roles import LINEAR_ROLES
from .engine_table import Engine

LM_HEAD = "lm_head"

# Linears outside LINEAR_ROLES: never quantized by us, but by an engine that is not told to leave them.
_OTHER_LINEARS = frozenset({"router", "lm_head", "shared_experts.router", "mtp.proj", "mtp.head", "vision"})
_EXPERT_ROLES = ("experts.gate", "experts.up", "experts.down")


class Kind(enum.StrEnum):
    """What an engine builds of some weights."""

    LINEAR = "linear"
    FUSED = "fused linear"
    EXPERTS = "routed experts"
    LM_HEAD = "output head"


@dataclass(frozen=True, kw_only=True)
class Module:
    """One module of an engine: its path there, and the plan's steps whose weights it holds.

    mtp: it belongs to a layer after the last decoder layer. A head without members is tied to another tensor.
    """

    name: str
    kind: Kind
    members: tuple[Step, ...]
    mtp: bool = False

    @property
    def quantized(self) -> bool:
        """Whether any member is quantized on disk."""
        return any(is_quantized(step) for step in self.members)

    @property
    def mixed(self) -> bool:
        """Whether some members are quantized and some are not."""
        return self.quantized and not all(is_quantized(step) for step in self.members)


def is_quantized(step: Step) -> bool:
    """Whether the result holds this weight quantized."""
    return step.action is Action.QUANTIZE


def linear_steps(plan: Plan) -> tuple[Step, ...]:
    """Every weight matrix that is a linear of the model, quantized or not."""
    return tuple(
        step
        for step in plan.steps
        if (step.tensor.role in LINEAR_ROLES or step.tensor.role in _OTHER_LINEARS)
        and step.tensor.name.endswith(".weight")
        and len(step.source.shape) == 2
    )


def is_mtp(plan: Plan, step: Step) -> bool:
    """Whether a tensor belongs to a multi-token-prediction layer."""
    return step.tensor.layer is not None and step.tensor.layer >= plan.contract.num_layers


def rename(plan: Plan, engine: Engine, step: Step) -> str | None:
    """Path of a weight's module as the engine calls it before it fuses; None if the engine does not build it."""
    if not is_mtp(plan, step):
        return step.tensor.module
    layer = step.tensor.layer
    if engine.mtp is None or engine.mtp_head is None:
        return None
    if "{layer}" not in engine.mtp and layer != plan.contract.num_layers:
        return None  # one name for all of them: the engine builds only the first
    if step.tensor.role == "mtp.head":
        return engine.mtp_head.format(layer=layer)
    return step.tensor.module.replace(f"model.layers.{layer}", engine.mtp.format(layer=layer), 1)


def build_modules(plan: Plan, engine: Engine) -> tuple[Module, ...]:
    """All modules of `engine` that its quantization method is asked about, in order of their names."""
    named = [(name, step) for step in linear_steps(plan) if (name := rename(plan, engine, step)) is not None]
    groups: dict[str, list[tuple[str, Step]]] = {}
    for name, step in named:
        groups.setdefault(_parent(name, step), []).append((name, step))
    modules: list[Module] = []
    for parent, items in groups.items():
        modules += _modules_below(plan, engine, parent, items)
    present = {module.name for module in modules}
    for name, mtp in _heads(plan, engine).items():
        if name not in present:
            modules.append(Module(name=name, kind=Kind.LM_HEAD, members=(), mtp=mtp))
    return tuple(sorted(modules, key=lambda module: module.name))


def _heads(plan: Plan, engine: Engine) -> Mapping[str, bool]:
    """Output heads that an engine builds even where the checkpoint has no tensor for them; whether they are MTP's."""
    total = plan.contract.num_layers
    layers = range(total, total + plan.contract.num_mtp_layers) if engine.mtp_head is not None else ()
    return {LM_HEAD: False, **{str(engine.mtp_head).format(layer=layer): True for layer in layers}}


def _parent(name: str, step: Step) -> str:
    """The module that fuses: for a routed expert's projection the container of all experts, else the parent."""
    above = name.rpartition(".")[0]
    return above.rpartition(".")[0] if step.tensor.role in _EXPERT_ROLES else above


def _modules_below(plan: Plan, engine: Engine, parent: str, items: list[tuple[str, Step]]) -> Iterable[Module]:
    """What the engine builds of the linears below one module."""
    mtp = any(is_mtp(plan, step) for _, step in items)
    experts = tuple(step for _, step in items if step.tensor.role in _EXPERT_ROLES)
    if experts:
        yield Module(name=parent, kind=Kind.EXPERTS, members=experts, mtp=mtp)
    by_role: Mapping[str, Step] = {step.tensor.role: step for _, step in items}
    fused: set[str] = set()
    for roles, word in engine.fused.items():
        if all(role in by_role for role in roles):
            members = tuple(by_role[role] for role in roles)
            fused.update(roles)
            yield Module(name=f"{parent}.{word}", kind=Kind.FUSED, members=members, mtp=mtp)
    for name, step in items:
        role = step.tensor.role
        if role in ("lm_head", "mtp.head"):
            yield Module(name=name, kind=Kind.LM_HEAD, members=(step,), mtp=mtp)
            continue
        plain = role in LINEAR_ROLES and role not in _EXPERT_ROLES and role not in fused
        if plain or (role == "router" and engine.router_is_linear(plan.contract.model_type)):
            yield Module(name=name, kind=Kind.LINEAR, members=(step,), mtp=mtp)
