"""A checkpoint without quantization: every tensor plain, no quantization config."""

from __future__ import annotations

from collections.abc import Mapping

from ..errors import CheckpointError, PlanError
from ..formats.base import Array, Options, Shape
from ..plan import Action, Plan, SourceTensor, TensorInfo
from ..qtensor import QTensor
from .base import Dialect, Json
from .pieces import plain_source
from .settings import quantization_section


class Bf16(Dialect):
    """BF16, FP16 or FP32 weights as Hugging Face stores them."""

    name = "bf16"

    def parts(self, options: Options, shape: Shape) -> Mapping[str, tuple[str, Shape]]:
        """No format has a spelling here: always raises PlanError."""
        raise PlanError(f"a bf16 checkpoint holds no {options.format} weight (shape {list(shape)}); choose its dialect")

    def encode(self, tensor: QTensor) -> Mapping[str, Array]:
        """Always raises PlanError."""
        return dict.fromkeys(self.parts(tensor.options, tensor.shape), tensor.qdata)

    def decode(self, options: Options, shape: Shape, arrays: Mapping[str, Array]) -> QTensor:
        """Always raises CheckpointError."""
        raise CheckpointError(f"a bf16 checkpoint holds no {options.format} weight ({sorted(arrays)}, {list(shape)})")

    def recognizes(self, config: Json) -> bool:
        """A config that says nothing of quantization."""
        return quantization_section(config) is None

    def logical(self, config: Json, stored: Mapping[str, TensorInfo]) -> tuple[SourceTensor, ...]:
        """Every tensor is itself. FP8, packed or scale tensors are refused: their config or scale was lost."""
        if not self.recognizes(config):
            raise CheckpointError("config.json has a quantization config; this is not a bf16 checkpoint")
        return tuple(sorted((plain_source(info, self.name) for info in stored.values()), key=lambda item: item.name))

    def config(self, plan: Plan, ignore: tuple[str, ...]) -> tuple[Json | None, Mapping[str, Json]]:
        """No quantization config. Raises PlanError for a plan that quantizes."""
        for step in plan.steps:
            if step.action is Action.QUANTIZE:
                raise PlanError(f"'{step.tensor.name}' would be quantized; a bf16 checkpoint cannot say so")
        if ignore:
            raise PlanError(f"a bf16 checkpoint has no place for an ignore list ('{ignore[0]}', ...)")
        return None, {}


DIALECT = Bf16()
