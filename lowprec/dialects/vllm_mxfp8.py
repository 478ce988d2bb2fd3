"""MXFP8 as vLLM reads it: `weight_scale` U8, ignore list under `ignored_layers` (spec/serving.md 2.1).

SGLang loads this spelling from disk too (it renames the scale there, but not in an online update), so the ignore
list is also written under the key that SGLang reads. transformers does not load it.
"""

from __future__ import annotations

from .mxfp8_pieces import Mxfp8Pieces


class VllmMxfp8(Mxfp8Pieces):
    """The spelling with `weight_scale` and `ignored_layers`."""

    name = "vllm_mxfp8"
    scale_word = "weight_scale"
    ignore_keys = ("ignored_layers", "modules_to_not_convert")


DIALECT = VllmMxfp8()
