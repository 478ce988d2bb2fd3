"""Which engine has a loader at all for a dialect and format; the rest of the table of spec/contract.md 4."""

from __future__ import annotations

from collections.abc import Iterable

from ..plan import Plan
from .base import Dialect
from .engine_modules import is_mtp
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
}
# Engine, dialect -> what happens to routed experts that are kept.
_KEPT_EXPERTS = {
    ("transformers", "compressed_tensors"): (
        _FAILS,
        "transformers takes every routed expert of a compressed-tensors checkpoint for a quantized one",
    ),
}


def unsupported(plan: Plan, engine: Engine, dialect: Dialect) -> Iterable[Problem]:
    """What of a plan the engine cannot load in this dialect, whatever the ignore list says."""
    whole = _NO_LOADER.get((engine.name, dialect.name))
    if whole is not None:
        yield Problem(module="", effect=whole[0], reason=whole[1])
        return
    for step in plan.steps:
        if engine.mtp is None and is_mtp(plan, step):
            continue  # it does not build MTP layers
        routed = step.tensor.expert is not None
        if step.weight is not None:
            table = _EXPERTS if routed else _DENSE
            found = table.get((engine.name, dialect.name, step.weight.format))
        else:
            found = _KEPT_EXPERTS.get((engine.name, dialect.name)) if routed else None
        if found is not None:
            yield Problem(module=step.tensor.module, effect=found[0], reason=found[1])
