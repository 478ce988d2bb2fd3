"""From a source, or from a manifest, to a whole Conversion: contract, plan, files, configs. Reads headers only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from lowprec.checkpoint import Manifest
from lowprec.contract import Contract, resolve
from lowprec.dialects import detect, get_dialect
from lowprec.dialects.base import Dialect
from lowprec.dialects.engine_notes import notes
from lowprec.dialects.engines import expressible, ignore_list
from lowprec.errors import CheckpointError, PlanError, RecipeError
from lowprec.plan import Action, Plan, SourceTensor, Step, TensorInfo, build_plan
from lowprec.recipe import Recipe

from .family import Family, find_family
from .hf import CONFIG, Checkpoint
from .layout import Files, Json, Outputs, config_with, home, plan_layout
from .report import Conversion, RoleSummary


@dataclass(frozen=True, kw_only=True)
class _Input:
    """What a plan is made from, wherever it comes from. name: what messages call it."""

    name: str
    dialect: str
    config: Json
    index: Sequence[SourceTensor]
    files: Files


def plan_conversion(source: Checkpoint, recipe: Recipe, *, force: bool, max_shard_size: int | None) -> Conversion:
    """Plan the conversion of an opened checkpoint under a recipe.

    Raises:
        RecipeError, PlanError, CheckpointError: see `lowprec.converters.api.explain`.
    """
    _require_dialect(recipe)
    dialect = detect(source.config)
    index = dialect.logical(source.config, source.infos())
    family = family_of(source.config, str(source.folder))
    model = family.model(source.config, [tensor.name for tensor in index])
    contract = resolve(recipe, model)
    given = _Input(
        name=str(source.folder),
        dialect=dialect.name,
        config=source.config,
        index=index,
        files=Files(
            shard_of={tensor.name: home(tensor, source.shard_of) for tensor in index},
            indexed=source.indexed,
            carried=source.carried,
            left_out=source.left_out,
        ),
    )
    conversion = _plan(given, contract, family, max_shard_size)
    if conversion.unloadable and not force:
        reasons = "; ".join(f"{engine}: {problems[0]}" for engine, problems in conversion.engines.items())
        raise PlanError(
            f"no engine of recipe '{recipe.name}' could load the result ({reasons}); --force converts anyway"
        )
    return conversion


def _require_dialect(recipe: Recipe) -> None:
    """Raises RecipeError if the recipe names a dialect that nobody knows."""
    try:
        get_dialect(recipe.dialect)
    except PlanError as error:
        raise RecipeError(f"recipe '{recipe.name}': {error}") from None


def plan_of_manifest(manifest: Manifest, config: Json, name: str) -> Conversion:
    """The conversion that a finished target came from, without its source.

    `config` is the target's config.json. Raises PlanError or CheckpointError if manifest and config do not fit.
    """
    shard_of = {record.source.name: record.outputs[0].shard for record in manifest.tensors if record.outputs}
    given = _Input(
        name=name,
        dialect=manifest.source_dialect,
        config=config,
        index=[record.source for record in manifest.tensors],
        files=Files(shard_of=shard_of, indexed=manifest.indexed, carried=manifest.carried),
    )
    missing = next((tensor.name for tensor in given.index if tensor.name not in shard_of), None)
    if missing is not None:
        raise CheckpointError(f"the manifest has no result for tensor '{missing}'")
    return _plan(given, manifest.contract, family_of(config, name), manifest.max_shard_size)


def family_of(config: Json, where: str) -> Family:
    """The family that config.json names. Raises PlanError."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise PlanError(f"'{where}': {CONFIG} has no model_type; it names the model family")
    return find_family(model_type)


def _plan(given: _Input, contract: Contract, family: Family, max_shard_size: int | None) -> Conversion:
    plan = build_plan(contract, family, given.index)
    dialect = get_dialect(contract.dialect)
    outputs = {step.tensor.name: stored_for(step, dialect) for step in plan.steps}
    ignore = ignore_list(plan, dialect)
    engines = dict(sorted(expressible(plan, dialect, ignore=ignore).items()))  # a contract gives no order
    section, extra = dialect.config(plan, ignore)
    dequantized = any(step.action is Action.DEQUANTIZE for step in plan.steps)
    config = config_with(given.config, section, contract.dtype if dequantized else None)
    return Conversion(
        source=given.name,
        source_dialect=given.dialect,
        dialect=dialect.name,
        contract=contract,
        plan=plan,
        outputs=outputs,
        layout=plan_layout(outputs, given.files, max_shard_size),
        max_shard_size=max_shard_size,
        configs={CONFIG: config, **extra},
        ignore=ignore,
        engines=engines,
        loads=tuple(engine for engine, problems in engines.items() if not problems),
        notes=notes(plan, dialect),
        bytes_before=sum(step.source.nbytes for step in plan.steps),
        bytes_after=sum(info.nbytes for infos in outputs.values() for info in infos),
        roles=_summarize(plan, outputs),
    )


def stored_for(step: Step, dialect: Dialect) -> tuple[TensorInfo, ...]:
    """The tensors that are stored for a step's result. Raises PlanError if the dialect cannot spell it."""
    if step.action is Action.QUANTIZE:
        assert step.weight is not None, "a step that quantizes has a format"
        return dialect.infos(step.tensor.name, step.weight, step.source.shape)
    return (TensorInfo(name=step.tensor.name, dtype=step.dtype, shape=step.source.shape),)


def _summarize(plan: Plan, outputs: Outputs) -> tuple[RoleSummary, ...]:
    steps: dict[str, list[Step]] = {}
    for step in plan.steps:
        steps.setdefault(step.tensor.role, []).append(step)
    return tuple(
        RoleSummary(
            role=role,
            tensors=len(members),
            formats=dict(sorted(Counter(format_name(step) for step in members).items())),
            bytes_before=sum(step.source.nbytes for step in members),
            bytes_after=sum(info.nbytes for step in members for info in outputs[step.tensor.name]),
        )
        for role, members in sorted(steps.items())
    )


def format_name(step: Step) -> str:
    """What a step's result is, in one word: a format, or a dtype."""
    return step.weight.format if step.action is Action.QUANTIZE and step.weight is not None else step.dtype
