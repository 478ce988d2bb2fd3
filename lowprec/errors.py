"""Everything lowprec raises on purpose, as one tree.

    LowprecError
    ├── RecipeError        a recipe, an override or a selector is wrong (the command exits 2: usage)
    ├── ContractError      two contracts that must agree do not
    ├── PlanError          the model and the contract do not fit together
    ├── FormatError        an array cannot be held in a format
    ├── CheckpointError    files: unreadable, inconsistent, not ours to overwrite, no space
    ├── BackendError       a backend that was asked for is not there
    └── SyncError          an online update failed

Every message says what, where and what to do, in one line: the command prints it as it is.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class LowprecError(Exception):
    """Base class. `exit_code` is what the command returns for it."""

    exit_code = 1


class RecipeError(LowprecError):
    """A recipe, an override or a selector that cannot be used."""

    exit_code = 2


class ContractError(LowprecError):
    """Two contracts that must agree do not."""


class PlanError(LowprecError):
    """The model and the contract do not fit together."""


class FormatError(LowprecError):
    """An array cannot be held in a format."""


class CheckpointError(LowprecError):
    """Files that cannot be read, do not agree, may not be written, or do not fit."""


class BackendError(LowprecError):
    """A backend that was asked for is not available."""


class SyncError(LowprecError):
    """An online weight update failed."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """` (did you mean 'x'?)` for the nearest of `known`, else the list of what is known; to end a message."""
    choices = sorted(known)
    near = difflib.get_close_matches(word, choices, n=1, cutoff=0.5)
    if near:
        return f" (did you mean '{near[0]}'?)"
    return f" (known: {', '.join(choices)})" if choices else ""
