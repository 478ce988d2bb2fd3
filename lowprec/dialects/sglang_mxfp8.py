"""MXFP8 as SGLang and transformers read it: `weight_scale_inv` U8, quant_method "mxfp8" (spec/serving.md 1.2).

The settings go into config.json: SGLang takes a checkpoint that states MXFP8 only in hf_quant_config.json for a BF16
one. transformers 5.24 (FineGrainedFP8Config) dequantizes while it loads on a CPU; on a GPU it takes the scale bytes for
exponents only if `scale_fmt` is "ue8m0", which is also what SGLang fills in for ModelOpt's MXFP8.
"""

from __future__ import annotations

from .mxfp8_pieces import Mxfp8Pieces


class SglangMxfp8(Mxfp8Pieces):
    """The spelling with `weight_scale_inv` and `modules_to_not_convert`."""

    name = "sglang_mxfp8"
    scale_word = "weight_scale_inv"
    ignore_keys = ("modules_to_not_convert",)
    scale_fmt = "ue8m0"


DIALECT = SglangMxfp8()
