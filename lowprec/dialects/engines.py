"""What serving engines make of a plan: the ignore list that tells them, and a simulation of how they read it.

What is served quantized must be exactly what was quantized. Engines fuse modules, match names in different ways and
mostly do not notice a mistake, so the list is derived from the plan and then tried on every module of every engine.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ..plan import Action, Plan
from .base import Dialect, Json
from .engine_modules import LM_HEAD, Kind, Module, build_modules, is_mtp, is_quantized, linear_steps, rename
from .engine_shapes import shape_problems
from .engine_table import ENGINES, Engine, Method, get_engine
from .matching import EngineRefusesError, IgnoreList
from .problem import Effect, Problem, summarize
from .support import unsupported

__all__ = ["Effect", "Problem", "expressible", "ignore_list", "simulate"]

_NUMBER = re.compile(r"(\d+)")
_PACKED_FORMATS = frozenset({"nvfp4", "mxfp4", "int4_group"})


def ignore_list(plan: Plan, dialect: Dialect) -> tuple[str, ...]:
    """The modules that must be named so that no engine takes them for quantized ones.

    They are the paths of all kept linears (routers and heads included), the fused modules all of whose members are
    kept, and the containers of routed experts all of which are kept, under the names of every engine (MTP layers have
    other ones in SGLang). Never a parent: SGLang would leave its quantized children out too. `lm_head` is there even
    if it is tied, since engines build it.
    """
    if not any(step.action is Action.QUANTIZE for step in plan.steps):
        return ()
    names = {step.tensor.module for step in linear_steps(plan) if not is_quantized(step)} | {LM_HEAD}
    for engine in ENGINES.values():
        for module in build_modules(plan, engine):
            if not module.quantized:
                names.add(module.name)
        renamed = ((rename(plan, engine, step), step) for step in linear_steps(plan) if is_mtp(plan, step))
        names.update(name for name, step in renamed if name is not None and not is_quantized(step))
    tails = _dangerous_tails(plan, dialect)
    return tuple(sorted((_guard(name, tails) for name in names), key=_natural))


def _dangerous_tails(plan: Plan, dialect: Dialect) -> frozenset[str]:
    """Last words that would hit quantized modules of other layers, in the engines that read this dialect."""
    methods = (
        engine.methods[word] for engine in ENGINES.values() for word in engine.methods.keys() & dialect.quant_methods
    )
    tails = {tail for method in methods for tail in method.any_layer_tails}
    quantized = {step.tensor.module.rpartition(".")[2] for step in linear_steps(plan) if is_quantized(step)}
    return frozenset(tails & quantized)


def _guard(name: str, tails: frozenset[str]) -> str:
    """A name that keeps its meaning as a glob, but whose last word is no longer one of `tails`."""
    return f"{name}*" if name.rpartition(".")[2] in tails else name


def _natural(name: str) -> tuple[tuple[int, int | str], ...]:
    """Sort key: numbers by value, so that layer 2 comes before layer 10."""
    return tuple((0, int(part)) if part.isdecimal() else (1, part) for part in _NUMBER.split(name) if part)


def simulate(plan: Plan, engine: str, section: Json) -> tuple[Problem, ...]:
    """Every module of which `engine`, reading the config `section`, would make something else than the bytes are.

    Raises:
        PlanError: an engine that is not known.
    """
    built = get_engine(engine)
    word = str(section.get("quant_method"))
    method = built.methods.get(word)
    modules = build_modules(plan, built)
    if method is None:
        reason = f"{built.name} {built.version} has no quant_method '{word}'"
        return (Problem(module="", effect=Effect.DOES_NOT_LOAD, reason=reason),)
    ignore = IgnoreList(_entries(section, method))
    rule = _Reader(engine=built, method=method, ignore=ignore, section=section, plan=plan)
    return tuple(problem for module in modules if (problem := rule.judge(module)) is not None)


def _entries(section: Json, method: Method) -> Iterable[str]:
    """The ignore list that a method finds in a config."""
    return next((section[key] for key in method.keys if section.get(key)), ())


@dataclass(frozen=True, kw_only=True)
class _Reader:
    """One engine with one config."""

    engine: Engine
    method: Method
    ignore: IgnoreList
    section: Json
    plan: Plan

    def judge(self, module: Module) -> Problem | None:
        """What is wrong with one module, if anything."""
        if module.mixed:
            reason = f"{module.kind} of which some are quantized ({_first(module, True)}) and some are not"
            return Problem(
                module=module.name, effect=Effect.DOES_NOT_LOAD, reason=f"{reason} ({_first(module, False)})"
            )
        try:
            served = self.serves_quantized(module)
        except EngineRefusesError as error:
            return Problem(module=module.name, effect=Effect.DOES_NOT_LOAD, reason=str(error))
        if served == module.quantized:
            return None
        on_disk = "quantized" if module.quantized else "not quantized"
        reason = f"{module.kind} that is {on_disk}, and built {'quantized' if served else 'unquantized'}"
        return Problem(module=module.name, effect=self._effect(), reason=reason)

    def serves_quantized(self, module: Module) -> bool:
        """Whether the engine builds the module quantized. Raises EngineRefusesError where it would raise."""
        packed = self.engine.packed_for(self.plan.contract.model_type)
        match module.kind:
            case Kind.LM_HEAD:
                return self.method.lm_head and not self.method.linears(self.ignore, module.name, packed)
            case _ if module.mtp and not self.method.mtp:
                return False
            case Kind.EXPERTS:
                skipped = self.method.experts(self.ignore, module.name, packed)
            case _:
                skipped = self.method.linears(self.ignore, module.name, packed)
        return not skipped and self._targeted()

    def _targeted(self) -> bool:
        """compressed-tensors: linears are quantized only if a config group targets them by their class."""
        groups = self.section.get("config_groups")
        if not isinstance(groups, Mapping) or any("Linear" in group["targets"] for group in groups.values()):
            return True
        if self.engine.name == "sglang":
            raise EngineRefusesError("no config group has the target Linear, and SGLang finds no other for a linear")
        return False

    def _effect(self) -> Effect:
        """A packed weight has another shape, which ModelOpt's loaders notice; other names or FP8 they do not."""
        formats = {step.weight.format for step in self.plan.steps if step.weight is not None}
        noticed = self.section.get("quant_method") == "modelopt" and formats <= _PACKED_FORMATS
        return Effect.DOES_NOT_LOAD if noticed else Effect.SERVED_WRONG


def _first(module: Module, quantized: bool) -> str:
    return next(step.tensor.name for step in module.members if is_quantized(step) is quantized)


def expressible(
    plan: Plan, dialect: Dialect, tp: int = 1, *, ignore: tuple[str, ...] | None = None
) -> Mapping[str, tuple[str, ...]]:
    """For each engine of the contract: why it would not load the result, or serve something else; () if it is fine.

    Args:
        tp: tensor-parallel size; block-scaled weights are cut between blocks only.
        ignore: the plan's `ignore_list`, where it is known already.

    Raises:
        PlanError: an engine that is not known, or a plan that the dialect cannot state.
    """
    engines = {name: get_engine(name) for name in plan.contract.engines}
    section, _ = dialect.config(plan, ignore_list(plan, dialect) if ignore is None else ignore)
    if section is None:
        return dict.fromkeys(engines, ())
    found: dict[str, tuple[str, ...]] = {}
    for name, engine in engines.items():
        problems = list(unsupported(plan, engine, dialect))
        if not problems:
            problems += simulate(plan, name, section)
            problems += shape_problems(plan, engine, tp)
        found[name] = summarize(problems)
    return found
