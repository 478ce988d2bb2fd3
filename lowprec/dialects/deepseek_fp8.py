"""DeepSeek's FP8 checkpoints: `weight` and `weight_scale_inv`, quant_method "fp8".

Loaded by SGLang, vLLM and transformers (spec/serving.md 1.1; sglang fp8.py, vllm fp8.py, transformers
FineGrainedFP8Config). `weight_scale_inv` is the multiplier, whatever its name says, and stays float32 when it is a
power of two; `scale_fmt` then says "ue8m0", and engines round activation scales up to powers of two as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from ..formats.base import Options
from ..formats.fp8_block import Fp8BlockOptions, Scale
from ..plan import Plan
from .base import Json
from .pieces import PieceDialect, one_format
from .settings import names, optional, positive_ints, quantization_section, require

_WHERE = "quantization_config"


class DeepseekFp8(PieceDialect):
    """`<m>.weight` F8_E4M3 [N, K], `<m>.weight_scale_inv` F32 [ceil(N/bm), ceil(K/bk)]."""

    name = "deepseek_fp8"
    quant_methods = ("fp8",)
    formats = MappingProxyType({"fp8_block": 1})

    def words(self, options: Options) -> Mapping[str, str]:
        """See `PieceDialect.words`."""
        del options
        return {"weight": "qdata", "weight_scale_inv": "scale"}

    def recognizes(self, config: Json) -> bool:
        """quant_method "fp8"."""
        section = quantization_section(config)
        return section is not None and section.get("quant_method") == "fp8"

    def read_options(self, section: Json) -> Options:
        """Block from `weight_block_size`, scale kind from `scale_fmt`; the rule is not recorded: the default one."""
        require(section, "activation_scheme", ("dynamic",), _WHERE)
        optional(section, "fmt", ("e4m3",), _WHERE)
        scale_fmt = optional(section, "scale_fmt", ("ue8m0", "float", None), _WHERE)
        names(section, "modules_to_not_convert", _WHERE)
        block = positive_ints(section, "weight_block_size", 2, _WHERE)
        return Fp8BlockOptions(scale=Scale.POW2 if scale_fmt == "ue8m0" else Scale.FP32, block=(block[0], block[1]))

    def config(self, plan: Plan, ignore: tuple[str, ...]) -> tuple[Json | None, Mapping[str, Json]]:
        """See `Dialect.config`."""
        options = one_format(plan, self.name)
        self.require_format(options)
        assert isinstance(options, Fp8BlockOptions)
        section: Json = {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": list(options.block),
            "fmt": "e4m3",
        }
        if options.scale is Scale.POW2:
            section["scale_fmt"] = "ue8m0"
        section["modules_to_not_convert"] = list(ignore)
        return section, {}


DIALECT = DeepseekFp8()
