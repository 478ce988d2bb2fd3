"""INT4 and MXFP4 "even" against compressed-tensors' own functions, where the rules coincide.

They coincide on float32 input. With bfloat16 weights compressed-tensors' CPU path divides in bfloat16, so a
quotient is rounded twice and codes differ from ours (and from its own Triton path, which divides in float32).
"""

from __future__ import annotations

import numpy as np
import pytest
from bitwise import BF16, F32, Array, assert_same_bits

from lowprec.formats import get_format
from lowprec.formats import numerics as nm

torch = pytest.importorskip("torch")
pytest.importorskip("compressed_tensors")

from compressed_tensors.compressors.pack_quantized.helpers import (  # noqa: E402
    pack_to_int32,
    unpack_from_int32,
)
from compressed_tensors.quantization import QuantizationArgs  # noqa: E402
from compressed_tensors.quantization.lifecycle.forward import dequantize, quantize  # noqa: E402
from compressed_tensors.quantization.utils.helpers import calculate_qparams  # noqa: E402
from compressed_tensors.quantization.utils.mxfp_utils import generate_mx_scales  # noqa: E402


def weights(seed: int, shape: tuple[int, ...] = (64, 512)) -> Array:
    rng = np.random.default_rng(seed)
    return (rng.normal(size=shape) * np.exp2(rng.integers(-12, 3, size=(shape[0], 1)))).astype(F32)


def their_int4(x: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes int8, scale) of compressed-tensors for symmetric INT4 in groups."""
    args = QuantizationArgs(
        num_bits=4, type="int", symmetric=True, strategy="group", group_size=group, scale_dtype=torch.bfloat16
    )
    grouped = x.unflatten(-1, (-1, group))
    scale, zero_point = calculate_qparams(grouped.amin(-1), grouped.amax(-1), args)
    return quantize(x, scale, zero_point, args, dtype=torch.int8), scale


@pytest.mark.parametrize("group", [32, 128])
def test_int4_amax7_5(group) -> None:
    fmt = get_format("int4_group")
    options = fmt.options(group=group, rule="amax7.5")
    x = weights(group)
    # Exact ties of x / scale: with amax 7.5 * 2^k the scale is a power of two.
    x[:8] = np.clip(np.rint(x[:8] / np.abs(x[:8]).max() * 15), -15, 14) / 2
    x[:8, ::group] = -7.5
    q = fmt.quantize(x, options, None)
    codes, scale = their_int4(torch.from_numpy(x), group)
    assert_same_bits(q.scale.astype(F32), scale.numpy(), None, "scale")
    assert_same_bits(fmt.codes(q.qdata), (codes.numpy() + 8).astype(np.uint8), x, "codes")
    assert set(np.unique(codes.numpy())) == set(range(-8, 8))
    assert_same_bits(q.qdata, pack_to_int32(codes, 4).numpy(), None, "packed")
    unpacked = unpack_from_int32(torch.from_numpy(q.qdata), 4, torch.Size(x.shape))
    assert (unpacked.numpy() == codes.numpy()).all()


@pytest.mark.parametrize("rule", ["amax7", "amax7.5"])
def test_int4_values(rule) -> None:
    """What their decompressor makes of our bytes is what we say they are, in bfloat16."""
    fmt = get_format("int4_group")
    options = fmt.options(rule=rule)
    x = weights(9)
    q = fmt.quantize(x, options, None)
    args = QuantizationArgs(num_bits=4, type="int", symmetric=True, strategy="group", group_size=32)
    codes = unpack_from_int32(torch.from_numpy(q.qdata), 4, torch.Size(x.shape))
    scale = torch.from_numpy(q.scale.view(np.int16)).view(torch.bfloat16)
    theirs = dequantize(codes, scale, None, args)
    assert theirs.dtype == torch.bfloat16
    ours = fmt.dequantize(q, options, BF16)
    assert_same_bits(ours, theirs.view(torch.int16).numpy().view(BF16), x, "values")


def test_int4_zero_group_differs_in_its_scale_only() -> None:
    """They store bfloat16's epsilon for a group of zeros, we store 1; the codes are zero in both."""
    x = np.zeros((1, 32), F32)
    codes, scale = their_int4(torch.from_numpy(x), 32)
    q = get_format("int4_group").quantize(x, get_format("int4_group").options(rule="amax7.5"), None)
    assert scale.item() == torch.finfo(torch.bfloat16).eps
    assert q.scale.astype(F32).item() == 1.0
    assert (codes.numpy() == 0).all()
    assert (get_format("int4_group").codes(q.qdata) == 8).all()


def test_int4_bfloat16_weights_are_rounded_twice_on_their_cpu_path() -> None:
    x = weights(4).astype(BF16)
    q = get_format("int4_group").quantize(x, get_format("int4_group").options(rule="amax7.5"), None)
    codes, scale = their_int4(torch.from_numpy(x.view(np.int16)).view(torch.bfloat16), 32)
    assert_same_bits(q.scale, scale.view(torch.int16).numpy().view(BF16), None, "scale")
    differ = (get_format("int4_group").codes(q.qdata).astype(int) - 8) != codes.numpy()
    quotient = x.astype(np.float64) / np.repeat(q.scale.astype(np.float64), 32, axis=1)
    twice = np.clip(np.rint(quotient.astype(F32).astype(BF16).astype(np.float64)), -8, 7)
    assert (twice == codes.numpy()).all()
    assert differ.any()


def test_mxfp4_even() -> None:
    fmt = get_format("mxfp4")
    options = fmt.options(scale_rule="even")
    x = weights(5)
    x[:4, ::32] = np.ldexp([[1.75], [1.74999], [7.0], [3.5]], 1)
    q = fmt.quantize(x, options, None)
    amax = torch.from_numpy(np.abs(x).reshape(64, 16, 32).max(-1))
    theirs = generate_mx_scales(amax).numpy()
    assert_same_bits(q.scale, theirs.astype(np.uint8), None, "byte")


def test_mxfp4_even_of_every_normal_bfloat16() -> None:
    """Every amax whose byte lies in range; they give -Inf for 0 and Inf for the largest, which are no bytes."""
    amax = np.arange(0x0180, 0x7F60, dtype=np.uint16).view(BF16)
    x = np.zeros((amax.size, 32), BF16)
    x[:, 0] = amax
    q = get_format("mxfp4").quantize(x, get_format("mxfp4").options(scale_rule="even"), None)
    theirs = generate_mx_scales(torch.from_numpy(amax.view(np.int16)).view(torch.bfloat16).float()).numpy()
    assert_same_bits(q.scale[:, 0], theirs.astype(np.uint8), amax, "byte")
    assert nm.E8M0_BIAS == 127
