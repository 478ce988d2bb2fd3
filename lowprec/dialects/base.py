"""What a dialect is: how one kind of serving checkpoint spells quantized tensors and says so in its config."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import Any, ClassVar

from ..formats.base import Array, Options, Shape
from ..plan import Plan, SourceTensor, TensorInfo
from ..qtensor import QTensor

Json = dict[str, Any]


class Dialect(abc.ABC):
    """One serving checkpoint's spelling. Stateless; found by name with `get_dialect`.

    `parts` and `encode` / `decode` speak of a logical weight by the dialect's word for each stored piece
    ("weight", "weight_scale_inv", ...); `part_name` makes the stored name from the weight's name and that word.

    quant_methods: the words of `quantization_config.quant_method` that this dialect may recognize; for messages.
    """

    name: ClassVar[str]
    quant_methods: ClassVar[tuple[str, ...]] = ()

    @abc.abstractmethod
    def parts(self, options: Options, shape: Shape) -> Mapping[str, tuple[str, Shape]]:
        """Word -> (safetensors dtype, stored shape) of each piece of a weight of logical `shape`.

        Raises PlanError if this dialect has no spelling for the format and its options.
        """

    @abc.abstractmethod
    def encode(self, tensor: QTensor) -> Mapping[str, Array]:
        """Word -> array whose bytes are stored, with exactly the dtypes and shapes of `parts`."""

    @abc.abstractmethod
    def decode(self, options: Options, shape: Shape, arrays: Mapping[str, Array]) -> QTensor:
        """Inverse of `encode`. Raises CheckpointError if dtypes or shapes are not those of `parts`."""

    def row_pieces(self, options: Options) -> Mapping[str, str]:
        """Word -> "qdata" or "scale", for pieces stored as that array is, so that rows can be written as they come.

        All other pieces must follow from the options, the shape and the global scale alone; `encode` and `decode` then
        are given the right ones, and for the row pieces arrays of the right dtype and shape without their values.
        Empty: a weight is encoded and decoded whole.
        """
        del options
        return {}

    @abc.abstractmethod
    def recognizes(self, config: Json) -> bool:
        """Whether a source's config.json (with hf_quant_config.json under its key, if there is one) is this dialect."""

    @abc.abstractmethod
    def logical(self, config: Json, stored: Mapping[str, TensorInfo]) -> tuple[SourceTensor, ...]:
        """Group a source's stored tensors into logical ones; every stored tensor is used exactly once.

        `SourceTensor.stored` has the block or group size that the config states. Where the bytes cannot tell which
        rule made them (they can be dequantized without knowing) it has the format's default rule.

        Raises CheckpointError for a quantized tensor without its scale, a scale without its tensor, or a dtype or
        shape that the dialect does not have, naming the tensor.
        """

    @abc.abstractmethod
    def config(self, plan: Plan, ignore: tuple[str, ...]) -> tuple[Json | None, Mapping[str, Json]]:
        """The `quantization_config` for config.json (None: none), and further files by name, for a plan.

        `ignore` are the modules that engines must not treat as quantized (`lowprec.dialects.engines.ignore_list`).
        """

    def part_name(self, weight: str, word: str) -> str:
        """Stored name of one piece: `m.weight` and "weight_scale" give `m.weight_scale`."""
        return f"{weight.removesuffix('.weight')}.{word}"

    def infos(self, weight: str, options: Options, shape: Shape) -> tuple[TensorInfo, ...]:
        """The stored tensors of one quantized weight."""
        return tuple(
            TensorInfo(name=self.part_name(weight, word), dtype=dtype, shape=stored)
            for word, (dtype, stored) in self.parts(options, shape).items()
        )
