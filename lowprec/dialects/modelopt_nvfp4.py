"""NVFP4 as ModelOpt exports it, for SGLang and vLLM (spec/serving.md 1.3, 2.1).

`input_scale` is the static global scale of a calibrated activation. Our recipes calibrate nothing: they quantize
activations with one global scale a token, computed at run time. It is written all the same, as 1.0, which is what
SGLang takes for a missing one and what both engines set it to where they compute scales a token (SGLang when
`SGLANG_FLASHINFER_NVFP4_PER_TOKEN_ACTIVATION=1`, see `lowprec.launch`). vLLM 0.33 must have it: its loader allocates
the scale without a value, so a checkpoint that lacks it is served with whatever lay in memory. Where scales a token
are not switched on, 1.0 means that activations have block scales only.

No KV-cache scheme is written: engines would serve an FP8 cache with scale 1.0.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np

from ..errors import PlanError
from ..formats.base import Array, Options, Shape
from ..formats.nvfp4 import Nvfp4Options, Outer
from ..plan import Plan
from ..qtensor import QTensor
from .base import Json
from .pieces import PieceDialect, one_format
from .settings import names, optional, positive_int, quantization_section, require

_WHERE = "quantization_config"
_GROUP = 16
_INPUT_SCALE = "input_scale"


class ModeloptNvfp4(PieceDialect):
    """`<m>.weight` U8 [N, K/2], `weight_scale` F8_E4M3 [N, K/16], `weight_scale_2` F32 [], the multiplier 1/S,
    `input_scale` F32 [], which belongs to the activations and may be missing in what is read.
    """

    name = "modelopt_nvfp4"
    quant_methods = ("modelopt", "modelopt_fp4")
    formats = MappingProxyType({"nvfp4": 2})
    spare = frozenset({_INPUT_SCALE})

    def words(self, options: Options) -> Mapping[str, str]:
        """See `PieceDialect.words`. One global scale a matrix is all that the names have room for."""
        if isinstance(options, Nvfp4Options) and options.outer is not Outer.TENSOR:
            raise PlanError(f"{self.name} stores one global scale a weight; outer = '{options.outer}' has no spelling")
        return {"weight": "qdata", "weight_scale": "scale", "weight_scale_2": "global_scale"}

    def pieces(self, options: Options) -> frozenset[str]:
        """See `PieceDialect.pieces`."""
        return super().pieces(options) | {_INPUT_SCALE}

    def parts(self, options: Options, shape: Shape) -> Mapping[str, tuple[str, Shape]]:
        """See `Dialect.parts`."""
        return {**super().parts(options, shape), _INPUT_SCALE: ("F32", ())}

    def constants(self, tensor: QTensor) -> Mapping[str, Array]:
        """See `PieceDialect.constants`."""
        del tensor
        return {_INPUT_SCALE: np.array(1.0, dtype=np.float32)}

    def recognizes(self, config: Json) -> bool:
        """quant_algo "NVFP4" under a quant_method that is missing or ModelOpt's."""
        section = quantization_section(config)
        if section is None or section.get("quant_method", "modelopt") not in self.quant_methods:
            return False
        return section.get("quant_algo") == "NVFP4"

    def read_options(self, section: Json) -> Options:
        """The block size must be NVFP4's. How the scales were chosen is not recorded: the default options."""
        require(section, "quant_algo", ("NVFP4",), _WHERE)
        optional(section, "kv_cache_quant_algo", (None,), _WHERE)
        optional(section, "kv_cache_scheme", (None,), _WHERE)
        names(section, "ignore", _WHERE)
        if positive_int(section, "group_size", _WHERE) != _GROUP:
            require(section, "group_size", (_GROUP,), _WHERE)
        return Nvfp4Options()

    def config(self, plan: Plan, ignore: tuple[str, ...]) -> tuple[Json | None, Mapping[str, Json]]:
        """The flat form for config.json, the nested one for hf_quant_config.json.

        The nested form states a null KV-cache algorithm because readers of it require the key.
        """
        options = one_format(plan, self.name)
        self.require_format(options)
        self.words(options)
        flat: Json = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": _GROUP, "ignore": list(ignore)}
        nested: Json = {
            "producer": {"name": "modelopt"},
            "quantization": {
                "quant_algo": "NVFP4",
                "kv_cache_quant_algo": None,
                "group_size": _GROUP,
                "exclude_modules": list(ignore),
            },
        }
        return flat, {"hf_quant_config.json": nested}


DIALECT = ModeloptNvfp4()
