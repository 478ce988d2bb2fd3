"""What can go wrong between a checkpoint and an engine, as a record."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass


class Effect(enum.StrEnum):
    """What the user sees. An engine that serves wrongly says nothing."""

    DOES_NOT_LOAD = "does not load"
    SERVED_WRONG = "is served wrongly"


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One module ("" for the whole checkpoint), what happens to it, and by which rule."""

    module: str
    effect: Effect
    reason: str


def summarize(problems: Iterable[Problem]) -> tuple[str, ...]:
    """One line for each effect and reason, with the first module and how many more there are."""
    groups: dict[tuple[Effect, str], list[str]] = {}
    for problem in problems:
        groups.setdefault((problem.effect, problem.reason), []).append(problem.module)
    lines: list[str] = []
    for (effect, reason), modules in groups.items():
        more = f" and {len(modules) - 1} more" if len(modules) > 1 else ""
        where = f"{modules[0]}{more}" if modules[0] else "the checkpoint"
        verb = f"{effect}: " if not more else f"{_PLURAL[effect]}: "
        lines.append(f"{where} {verb}{reason}")
    return tuple(lines)


_PLURAL = {Effect.DOES_NOT_LOAD: "do not load", Effect.SERVED_WRONG: "are served wrongly"}
