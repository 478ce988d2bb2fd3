"""What must hold of the bytes of a quantized tensor: scales finite, of the declared kind, codes without NaN."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from lowprec.formats.base import Array
from lowprec.formats.fp8_block import Fp8BlockOptions, Scale
from lowprec.formats.numerics import E8M0_MAX
from lowprec.qtensor import QTensor

_E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)


def scale_faults(tensor: QTensor) -> list[str]:
    """Everything that is wrong with a tensor's scales and codes, in words; empty if nothing is."""
    faults = []
    if tensor.qdata.dtype == _E4M3 and (count := _count(np.isnan(tensor.qdata))):
        faults.append(f"{count} of its codes are NaN")
    scale = tensor.scale
    if scale.dtype == np.uint8:
        if count := _count(scale > E8M0_MAX):
            faults.append(f"{count} of its E8M0 scales are NaN")
    elif scale.dtype == _E4M3:
        # A zero block has the scale 0, so only a sign is too little here.
        faults += _float_faults("block scales", scale, np.signbit(scale), "negative")
    else:
        faults += _float_faults("scales", scale, scale <= 0, "not positive")
    if isinstance(tensor.options, Fp8BlockOptions) and tensor.options.scale is Scale.POW2:
        mantissa, _ = np.frexp(scale[np.isfinite(scale) & (scale > 0)])
        if count := _count(mantissa != np.float32(0.5)):
            faults.append(f"{count} of its scales are no powers of two, which the contract declares")
    if tensor.global_scale is not None:
        outer = tensor.global_scale
        faults += _float_faults("global scales", outer, outer <= 0, "not positive")
    return faults


def _float_faults(what: str, scale: Array, wrong: Array, word: str) -> list[str]:
    faults = []
    if count := _count(~np.isfinite(scale)):
        faults.append(f"{count} of its {what} are NaN or Inf")
    if count := _count(wrong & np.isfinite(scale)):
        faults.append(f"{count} of its {what} are {word}")
    return faults


def _count(mask: Array) -> int:
    return int(np.count_nonzero(mask))
