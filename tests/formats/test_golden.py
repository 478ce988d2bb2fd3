"""Every golden file, every byte. See tests/golden/README.md for what made them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bitwise import assert_same_bits, read_safetensors

from lowprec.formats import get_format

GOLDEN = sorted((Path(__file__).parents[1] / "golden").glob("*.safetensors"))

# File name without shape and input dtype -> format and options.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "fp8_block_te_fp32": ("fp8_block", {"rule": "te", "scale": "fp32"}),
    "fp8_block_te_pow2": ("fp8_block", {"rule": "te", "scale": "pow2"}),
    "fp8_block_deepgemm_fp32": ("fp8_block", {"rule": "deepgemm", "scale": "fp32"}),
    "fp8_block_deepgemm_pow2": ("fp8_block", {"rule": "deepgemm", "scale": "pow2"}),
    "fp8_1x128_deepgemm_fp32": ("fp8_block", {"rule": "deepgemm", "scale": "fp32", "block": (1, 128)}),
    "fp8_1x128_deepgemm_ue8m0": ("fp8_block", {"rule": "deepgemm", "scale": "pow2", "block": (1, 128)}),
    "mxfp8": ("mxfp8", {}),
    "mxfp4": ("mxfp4", {"scale_rule": "rceil"}),
    "nvfp4_tensor": ("nvfp4", {}),
    "nvfp4_row": ("nvfp4", {"outer": "row"}),
    "nvfp4_2d": ("nvfp4", {"block": (16, 16)}),
    "nvfp4_4over6_256_mae": ("nvfp4", {"four_over_six": "mae", "e4m3_max": 256}),
    "nvfp4_4over6_256_mse": ("nvfp4", {"four_over_six": "mse", "e4m3_max": 256}),
    "nvfp4_4over6_448_mae": ("nvfp4", {"four_over_six": "mae", "e4m3_max": 448}),
    "nvfp4_4over6_448_mse": ("nvfp4", {"four_over_six": "mse", "e4m3_max": 448}),
}


def variant_of(path: Path) -> str:
    return re.sub(r"(_\d+x\d+)?_(bf16|fp32)$", "", path.stem)


def test_every_variant_has_files_of_both_dtypes() -> None:
    found = {(variant_of(path), path.stem.rsplit("_", 1)[1]) for path in GOLDEN}
    assert found == {(variant, dtype) for variant in VARIANTS for dtype in ("bf16", "fp32")}
    assert len(GOLDEN) == 38


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_every_byte(path: Path) -> None:
    name, values = VARIANTS[variant_of(path)]
    fmt = get_format(name)
    options = fmt.options.parse(values)
    golden = read_safetensors(path)
    x = golden["x"]

    quantized = fmt.quantize(x, options, None)

    assert_same_bits(fmt.codes(quantized.qdata), golden["codes"], x, "codes")
    scale = golden["scale"] if "scale" in golden else golden["block_scale"]
    assert_same_bits(quantized.scale.view(scale.dtype), scale, None, "scale")
    if fmt.global_amax is not None:
        amax = golden["amax"].reshape(quantized.global_scale.shape)
        assert_same_bits(fmt.global_amax(x, options), amax, None, "global amax")
        # In float64 the quotients are far from a float32 tie, so rounding twice is rounding once.
        with np.errstate(divide="ignore"):
            s = (6.0 * options.e4m3_max / amax.astype(np.float64)).astype(np.float32)
        s = np.where(amax == 0, np.float32(1), s)
        assert_same_bits(quantized.global_scale, (1.0 / s.astype(np.float64)).astype(np.float32), None, "global")
        given = fmt.quantize(x, options, amax)
        for ours, theirs, what in zip(given, quantized, quantized._fields, strict=True):
            assert_same_bits(ours, theirs, None, what)
