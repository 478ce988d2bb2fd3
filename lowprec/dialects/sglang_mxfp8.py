"""MXFP8 as SGLang and transformers read it: `weight_scale_inv` U8, quant_method "mxfp8" (spec/serving.md 1.2).

The settings go into config.json: SGLang takes a checkpoint that states MXFP8 only in hf_quant_config.json for a BF16
one. transformers 5.24 (FineGrainedFP8Config) needs nothing more on a CPU, where it dequantizes while it loads.
"""

from __future__ import annotations

from .mxfp8_pieces import Mxfp8Pieces


class SglangMxfp8(Mxfp8Pieces):
    """The spelling with `weight_scale_inv` and `modules_to_not_convert`."""

    name = "sglang_mxfp8"
    scale_word = "weight_scale_inv"
    ignore_keys = ("modules_to_not_convert",)


DIALECT = SglangMxfp8()
