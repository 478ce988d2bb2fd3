"""The public surface of conversion: explain, convert, verify, inspect. Each command is one of these calls."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lowprec.errors import RecipeError
from lowprec.recipe import Recipe, load_recipe

from .convert import convert_planned, require_apart
from .hf import open_checkpoint
from .inspect import inspect_checkpoint
from .meter import OnProgress
from .plans import plan_conversion
from .report import Conversion, ConvertReport, InspectReport, VerifyReport
from .verify import verify_target

StrPath = str | Path


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
    opened = open_checkpoint(source)
    return plan_conversion(opened, _load(recipe, overrides), force=force, max_shard_size=max_shard_size)


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
        workers: threads; None: one for each processor. Each takes a few stripes of rows, and for formats with a global
            amax 64 MiB more; the size of tensors matters only to dialects that cannot be written row by row.
        allow_nonfinite: carry NaN and Inf of the source over instead of refusing them, in weights that are quantized
            and in those that are kept. A finite weight that a format would turn into Inf is refused all the same.
        progress: is told about every finished tensor.

    Raises:
        LowprecError: as `explain`; further CheckpointError for a target that may not be written, another run at work
            there, too little space, NaN or Inf in a tensor, a source that changed. What was finished is kept, and the
            same call continues it.
    """
    opened = open_checkpoint(source)
    require_apart(opened.folder, Path(target))
    conversion = plan_conversion(opened, _load(recipe, overrides), force=force, max_shard_size=max_shard_size)
    return convert_planned(
        opened, Path(target), conversion, workers=workers, allow_nonfinite=allow_nonfinite, progress=progress
    )


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
    return verify_target(Path(target), against=against, workers=workers, progress=progress)


def inspect(path: StrPath) -> InspectReport:
    """What a checkpoint is: dialect, formats by role, sizes, oddities; from headers, with or without a manifest.

    Raises:
        CheckpointError: it cannot be read as a checkpoint.
    """
    return inspect_checkpoint(Path(path))


def _load(recipe: StrPath | Recipe, overrides: Sequence[str]) -> Recipe:
    """The recipe, whichever way it was named."""
    if not isinstance(recipe, Recipe):
        return load_recipe(recipe, overrides)
    if overrides:
        raise RecipeError("overrides go with a recipe's name or path; change the Recipe itself instead")
    return recipe
