"""Which engine has a loader at all for a dialect and format; the rest of the table of spec/contract.md 4."""

from __future__ import annotations

from collections.abc import Iterable

from ..plan import Plan, Step
from .base import Dialect
from .engine_modules import is_mtp, is_quantized
from .engine_table import Engine
from .problem import Effect, Problem

_WRONG, _FAILS = Effect.SERVED_WRONG, Effect.DOES_NOT_LOAD

# Engine, dialect -> what happens to the whole checkpoint. What is not here has a loader.
_NO_LOADER = {
    ("vllm", "sglang_mxfp8"): (
        _WRONG,
        "vLLM reads weight_scale and ignored_layers; write the dialect vllm_mxfp8 for it",
    ),
    ("transformers", "vllm_mxfp8"): (
        _WRONG,
        "transformers reads weight_scale_inv; write the dialect sglang_mxfp8 for it",
    ),
    ("transformers", "modelopt_nvfp4"): (_FAILS, "transformers has no quantizer for ModelOpt checkpoints"),
}

# Engine, dialect, format -> what happens to its dense linears and to its routed experts.
_DENSE = {
    ("sglang", "compressed_tensors", "mxfp4"): (_FAILS, "SGLang has no scheme for dense MXFP4 linears"),
}
_EXPERTS = {
    ("sglang", "compressed_tensors", "mxfp4"): (
        _WRONG,
        "SGLang's loader drops experts named weight_packed, except for Kimi-K3, and makes every layer's experts MXFP4",
    ),
    ("transformers", "compressed_tensors", "mxfp4"): (_WRONG, "transformers does not fuse compressed-tensors experts"),
    ("transformers", "compressed_tensors", "int4_group"): (
        _WRONG,
        "transformers does not fuse compressed-tensors experts",
    ),
}


def unsupported(plan: Plan, engine: Engine, dialect: Dialect) -> Iterable[Problem]:
    """What of a plan the engine cannot load in this dialect, whatever the ignore list says."""
    whole = _NO_LOADER.get((engine.name, dialect.name))
    if whole is not None:
        yield Problem(module="", effect=whole[0], reason=whole[1])
        return
    for step in plan.steps:
        if not is_quantized(step) or step.weight is None or _not_built(plan, engine, step):
            continue
        table = _DENSE if step.tensor.expert is None else _EXPERTS
        found = table.get((engine.name, dialect.name, step.weight.format))
        if found is not None:
            yield Problem(module=step.tensor.module, effect=found[0], reason=found[1])


def _not_built(plan: Plan, engine: Engine, step: Step) -> bool:
    """Whether the engine ignores the tensor because it has no such layer."""
    return engine.mtp is None and is_mtp(plan, step)
