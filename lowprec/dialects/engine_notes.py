"""What a user should know of an engine although the result loads: activations, and online updates."""

from __future__ import annotations

from collections.abc import Iterable

from ..formats.base import Options
from ..formats.fp8_block import Fp8BlockOptions, Scale
from ..formats.nvfp4 import Nvfp4Options, Outer
from ..plan import Plan, Step
from .base import Dialect
from .engine_modules import is_quantized

# SGLang pads an NVFP4 weight whose rows or columns are no multiple of this, into a tensor of another shape.
_SGLANG_NVFP4_ALIGNMENT = 32
# SGLang loads the one shared expert of a DeepSeek-V3 with so many routed experts into their container.
_SGLANG_FUSED_SHARED_EXPERTS = 256
_PER_TOKEN = "SGLANG_FLASHINFER_NVFP4_PER_TOKEN_ACTIVATION=1"


def notes(plan: Plan, dialect: Dialect) -> tuple[str, ...]:
    """One line each, for the engines of the contract; none if there is nothing to say."""
    steps = [step for step in plan.steps if is_quantized(step)]
    if not steps:
        return ()
    found: list[str] = []
    engines = plan.contract.engines
    for weight, activation in _pairs(steps):
        found += _activation_notes(weight, activation, engines)
    if "sglang" in engines:
        found += _sglang_notes(plan, steps, dialect)
    return tuple(dict.fromkeys(found))


def _pairs(steps: Iterable[Step]) -> Iterable[tuple[Options, Options | None]]:
    """Every combination of weight and activation format in use."""
    pairs = {(step.rule.weight, step.rule.activation) for step in steps if step.rule is not None}
    return ((weight, activation) for weight, activation in pairs if weight is not None)


def _activation_notes(weight: Options, activation: Options | None, engines: tuple[str, ...]) -> Iterable[str]:
    """Where an engine computes with other activations than the contract says."""
    if isinstance(weight, Fp8BlockOptions):
        expected = (1, weight.block[1])
        if not isinstance(activation, Fp8BlockOptions) or activation.block != expected:
            yield f"engines quantize FP8 activations in blocks of {list(expected)}, whatever the recipe"
        elif activation.scale is not weight.scale:
            yield "the config states one kind of scale; SGLang rounds activation scales as the weights' are"
        elif weight.scale is Scale.POW2 and "vllm" in engines:
            yield "vLLM does not read scale_fmt: activation scales are powers of two only where its kernel wants them"
    if isinstance(weight, Nvfp4Options):
        per_token = isinstance(activation, Nvfp4Options) and activation.outer is Outer.ROW
        if per_token and "sglang" in engines:
            yield f"SGLang scales NVFP4 activations by token only with {_PER_TOKEN}; else their global scale is 1.0"
        if not isinstance(activation, Nvfp4Options):
            yield "engines quantize the activations of a ModelOpt NVFP4 checkpoint to NVFP4, whatever the recipe"


def _sglang_notes(plan: Plan, steps: list[Step], dialect: Dialect) -> Iterable[str]:
    """What SGLang does to shapes, and to shared experts."""
    if dialect.name == "modelopt_nvfp4":
        uneven = [s for s in steps if any(size % _SGLANG_NVFP4_ALIGNMENT for size in s.source.shape)]
        if uneven:
            first, count = uneven[0].tensor.name, len(uneven)
            yield (
                f"SGLang pads {first} {list(uneven[0].source.shape)} ({count} such): a multiple of "
                f"{_SGLANG_NVFP4_ALIGNMENT} in both directions is needed for online updates"
            )
    if dialect.name in ("deepseek_fp8", "sglang_mxfp8") and _shared_experts_differ(plan):
        yield "routed and shared experts differ; start SGLang with --disable-shared-experts-fusion"


def _shared_experts_differ(plan: Plan) -> bool:
    """Whether SGLang would load BF16 shared experts into quantized routed ones, or the reverse."""
    kinds: dict[int, set[bool]] = {}
    count = 0
    for step in plan.steps:
        role, layer = step.tensor.role, step.tensor.layer
        if layer is not None and role in ("experts.down", "shared_experts.down"):
            kinds.setdefault(layer, set()).add(is_quantized(step))
            count = max(count, (step.tensor.expert or 0) + 1)
    return count == _SGLANG_FUSED_SHARED_EXPERTS and any(len(found) > 1 for found in kinds.values())
