"""The public surface of conversion: explain, convert, verify, inspect. Each command of the CLI is one of these calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from lowprec.recipe import Recipe

from .report import Conversion, ConvertReport, InspectReport, Progress, VerifyReport

StrPath = str | Path
OnProgress = Callable[[Progress], None]


def explain(
    source: StrPath,
    recipe: StrPath | Recipe,
    *,
    overrides: Sequence[str] = (),
    force: bool = False,
    max_shard_size: int | None = None,
) -> Conversion:
    """What a conversion would do, from headers alone; nothing is written. This is convert's dry run.

    Args:
        source: a Hugging Face checkpoint folder: plain BF16, FP16 or FP32, or in one of our dialects.
        recipe: a recipe's name, the path of a recipe file, or a Recipe.
        overrides: `key.path=value` items, applied to the recipe last; not with a Recipe.
        force: go on although no engine of the recipe can load the result; the plan and the manifest say so.
        max_shard_size: cut the result into files of at most so many bytes of tensors; None keeps the source's files.

    Raises:
        RecipeError: the recipe or an override is wrong.
        CheckpointError: the source is not a checkpoint that can be read.
        PlanError: source and recipe do not fit together, or no engine could load the result and `force` is not set.
    """
    raise NotImplementedError


def convert(
    source: StrPath,
    target: StrPath,
    recipe: StrPath | Recipe,
    *,
    overrides: Sequence[str] = (),
    workers: int | None = None,
    max_shard_size: int | None = None,
    allow_nonfinite: bool = False,
    force: bool = False,
    progress: OnProgress | None = None,
) -> ConvertReport:
    """Convert `source` into the folder `target`, or continue an interrupted conversion into it.

    The result is the same, byte for byte, for any number of workers and however often the run was killed. `progress`
    is called from one thread at a time, not always the same one; an exception it raises stops the run.

    Args:
        source: see `explain`, as for the other arguments that it has.
        target: a folder that does not exist, is empty, or holds this conversion, finished or not.
        workers: threads; None: one for each processor. Memory grows with workers times the largest tensor.
        allow_nonfinite: carry NaN and Inf of the source over instead of refusing them.
        progress: is told about every finished tensor.

    Raises:
        LowprecError: as `explain`; further CheckpointError for a target that may not be written, another run at work
            there, too little space, NaN or Inf in a tensor, a source that changed. What was finished is kept, and the
            same call continues it.
    """
    raise NotImplementedError


def verify(
    target: StrPath,
    *,
    against: StrPath | None = None,
    workers: int | None = None,
    progress: OnProgress | None = None,
) -> VerifyReport:
    """Check a converted checkpoint against its manifest and, with `against`, against its source, byte for byte.

    A damaged target is no exception: all faults are collected in the report.

    Raises:
        CheckpointError: `target` is not a folder, or `against` cannot be read.
    """
    raise NotImplementedError


def inspect(path: StrPath) -> InspectReport:
    """What a checkpoint is: dialect, formats by role, sizes, oddities; from headers, with or without a manifest.

    Raises:
        CheckpointError: it cannot be read as a checkpoint.
    """
    raise NotImplementedError
