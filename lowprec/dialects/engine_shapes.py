"""Sizes that engines demand of block-scaled weights: no block may straddle two shards or two ranks."""

from __future__ import annotations

from collections.abc import Iterable

from ..formats import get_format
from ..formats.base import Options, Shape
from ..formats.fp8_block import Fp8BlockOptions
from ..plan import Plan, Step
from .engine_modules import Kind, Module, build_modules, is_quantized
from .engine_table import Engine
from .problem import Effect, Problem

# Cut along K over the ranks; everything else is cut along its rows or not at all.
_ROW_PARALLEL = frozenset({"attention.o", "mlp.down", "shared_experts.down", "experts.down"})
_REPLICATED = frozenset({"mla.q_down", "mla.kv_down"})
_KEY_VALUE = frozenset({"attention.k", "attention.v"})


def shape_problems(plan: Plan, engine: Engine, tp: int) -> Iterable[Problem]:
    """Quantized weights whose shape this engine refuses or reads wrongly with `tp` ranks."""
    for module in build_modules(plan, engine):
        for step in module.members:
            if not is_quantized(step) or step.weight is None:
                continue
            if engine.name == "transformers":
                yield from _grid_problems(step, step.weight)
            else:
                yield from _block_problems(module, step, step.weight, tp)


def _block_problems(module: Module, step: Step, options: Options, tp: int) -> Iterable[Problem]:
    """SGLang and vLLM (spec/serving.md 1.1): rows of merged or cut shards and columns a rank are whole blocks."""
    rows, columns = step.source.shape[-2:]
    block_rows, block_columns = _block(options)
    role = step.tensor.role
    if role in _ROW_PARALLEL:
        yield from _divides(step, "K", columns, tp, block_columns)
    else:
        yield from _divides(step, "K", columns, 1, block_columns)
        last = module.kind is Kind.FUSED and step is module.members[-1]
        if role in _REPLICATED:
            if not last and module.kind is Kind.FUSED:
                yield from _divides(step, "N", rows, 1, block_rows)
        elif module.kind is not Kind.LINEAR or tp > 1:
            cut = tp if role not in _KEY_VALUE or rows // tp >= block_rows else 1  # few KV heads are replicated
            yield from _divides(step, "N", rows, cut, block_rows)


def _divides(step: Step, axis: str, size: int, tp: int, block: int) -> Iterable[Problem]:
    if size % (tp * block) == 0:
        return
    ranks = f" over {tp} ranks" if tp > 1 else ""
    reason = f"{axis} = {size}{ranks} is not a multiple of the block size {block}"
    yield Problem(module=step.tensor.module, effect=Effect.DOES_NOT_LOAD, reason=f"{step.tensor.role}: {reason}")


def _grid_problems(step: Step, options: Options) -> Iterable[Problem]:
    """transformers derives the block size from the scale's shape, so a ragged edge moves every block."""
    if not isinstance(options, Fp8BlockOptions):
        return
    scale: Shape = get_format(options.format).layout(step.source.shape, options).scale.shape
    for axis, size, count, block in zip("NK", step.source.shape, scale, options.block, strict=True):
        if count == 1 or size % block == 0:
            continue
        effect = Effect.SERVED_WRONG if size % count == 0 else Effect.DOES_NOT_LOAD
        reason = f"{axis} = {size} is not a multiple of {block}; transformers would take blocks of {size}/{count}"
        yield Problem(module=step.tensor.module, effect=effect, reason=f"{step.tensor.role}: {reason}")


def _block(options: Options) -> tuple[int, int]:
    """Rows and columns that share a scale."""
    match options.to_json():
        case {"block": [int(rows), int(columns)]}:
            return rows, columns
        case {"group": int(columns)}:
            return 1, columns
        case _:
            return 1, _MX_BLOCK


_MX_BLOCK = 32
