"""compressed-tensors checkpoints: MXFP4 ("mxfp4-pack-quantized") and INT4 groups ("pack-quantized").

Pieces and settings are those of compressed-tensors (compressors/mxfp4, compressors/pack_quantized,
quantization/quant_config.py); who loads which is in spec/serving.md 1.5 and 2.1.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np

from ..errors import CheckpointError, FormatError
from ..formats.base import Array, Options, Shape
from ..formats.int4_group import Int4GroupOptions
from ..formats.mxfp4 import Mxfp4Options
from ..plan import Plan
from ..qtensor import QTensor
from .base import Json
from .compressed_tensors_config import Scheme, read_scheme, write_config
from .pieces import PieceDialect, one_format
from .settings import quantization_section

_SHAPE = "weight_shape"


class CompressedTensors(PieceDialect):
    """MXFP4: `weight_packed` U8 [N, K/2], `weight_scale` U8 [N, K/32].

    INT4: `weight_packed` I32 [N, K/8], `weight_scale` BF16 [N, K/g], `weight_shape` I64 [2], which holds N and K
    (released checkpoints have it as I32 as well).
    """

    name = "compressed_tensors"
    quant_methods = ("compressed-tensors",)
    formats = MappingProxyType({"mxfp4": 2, "int4_group": 8})
    main_word = "weight_packed"

    def words(self, options: Options) -> Mapping[str, str]:
        """See `PieceDialect.words`."""
        del options
        return {"weight_packed": "qdata", "weight_scale": "scale"}

    def pieces(self, options: Options) -> frozenset[str]:
        """See `PieceDialect.pieces`."""
        return super().pieces(options) | ({_SHAPE} if isinstance(options, Int4GroupOptions) else frozenset())

    def parts(self, options: Options, shape: Shape) -> Mapping[str, tuple[str, Shape]]:
        """See `Dialect.parts`."""
        pieces = dict(super().parts(options, shape))
        if isinstance(options, Int4GroupOptions):
            pieces[_SHAPE] = ("I64", (len(shape),))
        return pieces

    def constants(self, tensor: QTensor) -> Mapping[str, Array]:
        """See `PieceDialect.constants`."""
        if not isinstance(tensor.options, Int4GroupOptions):
            return {}
        return {_SHAPE: np.array(tensor.shape, dtype=np.int64)}

    def decode(self, options: Options, shape: Shape, arrays: Mapping[str, Array]) -> QTensor:
        """See `Dialect.decode`. `weight_shape` must hold the shape that the other pieces have."""
        if _SHAPE in arrays and tuple(arrays[_SHAPE].tolist()) != shape:
            raise CheckpointError(
                f"{_SHAPE} holds {arrays[_SHAPE].tolist()}, but the packed weight has shape {list(shape)}"
            )
        return super().decode(options, shape, arrays)

    def read_dtypes(self, word: str, dtype: str) -> tuple[str, ...]:
        """`weight_shape` may be read as I32."""
        return (dtype, "I32") if word == _SHAPE else (dtype,)

    def recognizes(self, config: Json) -> bool:
        """quant_method "compressed-tensors"."""
        section = quantization_section(config)
        return section is not None and section.get("quant_method") == "compressed-tensors"

    def read_options(self, section: Json) -> Options:
        """Format and group size from the one config group; the rule is not recorded: the default one."""
        scheme = read_scheme(section)
        if scheme.format == "mxfp4-pack-quantized":
            return Mxfp4Options()
        try:
            return Int4GroupOptions(group=scheme.group_size)
        except FormatError as error:
            raise CheckpointError(f"config: quantization_config: {error}") from None

    def config(self, plan: Plan, ignore: tuple[str, ...]) -> tuple[Json | None, Mapping[str, Json]]:
        """See `Dialect.config`."""
        options = one_format(plan, self.name)
        self.require_format(options)
        activations = {step.rule.activation for step in plan.steps if step.rule is not None}
        return write_config(Scheme.of(options, activations), ignore), MappingProxyType({})


DIALECT = CompressedTensors()
