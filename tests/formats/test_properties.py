"""What holds for every input: hypothesis chooses shapes, magnitudes and values."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from bitwise import BF16, F16, F32, Array, assert_same_bits, bits
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from variants import EVERY_VARIANT, some

import lowprec
from lowprec import backends, tiles
from lowprec.formats import get_format
from lowprec.formats.base import Quantized

FEW = settings(
    max_examples=15,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
DTYPES = st.sampled_from([F32, F16, BF16])
Variant = tuple[str, dict[str, Any]]


def fits(variant: Variant, dtype: np.dtype, seed: int, lead: tuple[int, ...], m: int, k: int, spread: int) -> Array:
    """A tensor that the variant can hold, of finite values over about 2 * spread binades, with zeros of both signs."""
    fmt = get_format(variant[0])
    options = fmt.options.parse(variant[1])
    if variant[0] != "fp8_block":
        m *= options.row_alignment
        k *= 128 if options.column_alignment == 128 else 32
    rng = np.random.default_rng(seed)
    shape = (*lead, m, k)
    x = rng.normal(size=shape) * np.exp2(rng.integers(-spread, spread + 1, size=shape))
    x[rng.random(shape) < 0.05] = 0.0
    x[rng.random(shape) < 0.05] = -0.0
    return np.clip(x, -3e38 if dtype != F16 else -65504, 3e38 if dtype != F16 else 65504).astype(dtype)


@st.composite
def tensors(draw: st.DrawFn, variant: Variant, lead: tuple[int, ...] = ()) -> Array:
    return fits(
        variant,
        draw(DTYPES),
        draw(st.integers(0, 1 << 32)),
        lead,
        draw(st.integers(1, 5)),
        draw(st.integers(1, 5)),
        draw(st.sampled_from([0, 3, 40, 120])),
    )


def same(a: Quantized, b: Quantized) -> None:
    for ours, theirs, name in zip(a, b, Quantized._fields, strict=True):
        if ours is None or theirs is None:
            assert ours is theirs
        else:
            assert_same_bits(ours, theirs, None, name)


def reference(x: Array, variant: Variant) -> Quantized:
    fmt = get_format(variant[0])
    return fmt.quantize(x, fmt.options.parse(variant[1]), None)


@EVERY_VARIANT
@FEW
@given(data=st.data())
def test_finite_in_finite_out(variant, data) -> None:
    """No code and no scale is NaN or Inf, and the arrays are what the layout says."""
    x = data.draw(tensors(variant))
    q = lowprec.quantize(x, variant[0], backend="reference", **variant[1])
    q.validate()
    codes = q.codes()
    assert (codes.shape, codes.dtype) == (x.shape, np.uint8)
    if variant[0] in ("fp8_block", "mxfp8"):
        assert not ((codes & 0x7F) == 0x7F).any()
    else:
        assert codes.max() < 16
    if q.scale.dtype == np.uint8:
        assert q.scale.max() < 255
    else:
        assert np.isfinite(q.scale.astype(np.float32)).all()
    if q.global_scale is not None:
        assert np.isfinite(q.global_scale).all()


@EVERY_VARIANT
def test_finite_extremes(variant) -> None:
    """The largest and the smallest values of each dtype, alone and together, beside zeros."""
    for dtype in (F32, F16, BF16):
        largest = np.array([np.inf], dtype).view(f"u{dtype.itemsize}") - 1
        words = np.array([1, 0, int(largest[0]), 1, 2, 3], f"u{dtype.itemsize}")
        for keep in ([0], [2], [0, 2], [4, 5], [1]):
            x = np.zeros((16, 128), dtype)
            x[::3, 1 : 1 + len(keep)] = words[keep].view(dtype)
            x[1::3, 7 : 7 + len(keep)] = -words[keep].view(dtype)
            q = lowprec.quantize(x, variant[0], backend="reference", **variant[1])
            scale = q.scale.astype(np.float32)
            assert np.isfinite(scale).all()
            assert variant[0] not in ("mxfp8", "mxfp4") or q.scale.max() < 255
            assert variant[0] not in ("fp8_block", "mxfp8") or not ((q.codes() & 0x7F) == 0x7F).any()
            assert q.global_scale is None or np.isfinite(q.global_scale).all()


@EVERY_VARIANT
@FEW
@given(data=st.data())
def test_tiles_change_nothing(variant, data, monkeypatch) -> None:
    x = data.draw(tensors(variant, data.draw(st.sampled_from([(), (2,), (2, 3)]))))
    tile = data.draw(st.sampled_from([1, 37, 256, 1000]))
    fmt = get_format(variant[0])
    options = fmt.options.parse(variant[1])
    whole = fmt.quantize(x, options, None)
    with monkeypatch.context() as patch:
        patch.setattr(tiles, "TILE_ELEMENTS", tile)
        q = lowprec.quantize(x, options, backend="reference")
        same(q.arrays, whole)
        values = lowprec.dequantize(q, x.dtype, backend="reference")
        amax = backends.global_amax(x, options)
    assert_same_bits(values, fmt.dequantize(whole, options, x.dtype), x, "values")
    assert (amax is None) == (fmt.global_amax is None)
    if fmt.global_amax is not None:
        assert_same_bits(amax, np.asarray(fmt.global_amax(x, options)), None, "global amax")


@EVERY_VARIANT
@FEW
@given(data=st.data())
def test_stack_is_its_matrices(variant, data) -> None:
    x = data.draw(tensors(variant, (3,)))
    stacked = reference(x, variant)
    for i in range(3):
        alone = reference(x[i], variant)
        outer = None if stacked.global_scale is None else np.asarray(stacked.global_scale[i])
        same(Quantized(stacked.qdata[i], stacked.scale[i], outer), alone)


@EVERY_VARIANT
@FEW
@given(data=st.data())
def test_strides_change_nothing(variant, data) -> None:
    x = data.draw(tensors(variant))
    want = reference(x, variant)
    wide = np.zeros((2 * x.shape[0], 3 * x.shape[1]), x.dtype)
    wide[::2, ::3] = x
    for view in (np.asfortranarray(x), wide[::2, ::3], x[::-1, ::-1].copy()[::-1, ::-1]):
        same(reference(view, variant), want)
        same(lowprec.quantize(view, variant[0], backend="reference", **variant[1]).arrays, want)


@EVERY_VARIANT
@FEW
@given(data=st.data())
def test_sign_symmetry(variant, data) -> None:
    """-x has the scales of x and the codes with the other sign."""
    x = data.draw(tensors(variant))
    a = lowprec.quantize(x, variant[0], backend="reference", **variant[1])
    b = lowprec.quantize(-x, variant[0], backend="reference", **variant[1])
    assert_same_bits(a.scale, b.scale, None, "scale")
    if variant[0] != "int4_group":
        sign = 0x80 if variant[0] in ("fp8_block", "mxfp8") else 0x8
        assert_same_bits(a.codes() ^ np.uint8(sign), b.codes(), x, "codes")
    else:
        ours, theirs = a.codes().astype(int) - 8, b.codes().astype(int) - 8
        if variant[1]["rule"] == "amax7.5":  # it reaches -8 but not +8
            ours, theirs = np.maximum(ours, -7), np.maximum(theirs, -7)
        assert (ours == -theirs).all()


@EVERY_VARIANT
@FEW
@given(data=st.data())
def test_monotone_within_a_block(variant, data) -> None:
    """x <= y in one block means decoded x <= decoded y: the columns of every block in ascending order."""
    fmt = get_format(variant[0])
    options = fmt.options.parse(variant[1])
    width = options.column_alignment
    rng = np.random.default_rng(data.draw(st.integers(0, 1 << 32)))
    shape = (2 * options.row_alignment, 128 // width, width)
    x = rng.normal(size=shape) * np.exp2(rng.integers(-9, 9, size=shape))
    x = np.sort(x.astype(data.draw(DTYPES)), axis=-1)
    values = fmt.dequantize(fmt.quantize(x.reshape(shape[0], -1), options, None), options, F32)
    assert (np.diff(values.reshape(shape), axis=-1) >= 0).all()


@some("mxfp8", "mxfp4", "nvfp4")
@FEW
@given(data=st.data())
def test_scaling_by_a_power_of_two_moves_the_scales_only(variant, data) -> None:
    """Away from overflow and underflow, 2^n * x has the codes of x, and scales that are 2^n times larger."""
    x = fits(variant, F32, data.draw(st.integers(0, 1 << 32)), (), 2, 3, 4)
    n = data.draw(st.integers(-40, 40))
    a, b = reference(x, variant), reference(np.ldexp(x, n).astype(F32), variant)
    assert_same_bits(a.qdata, b.qdata, None, "qdata")
    if variant[0] == "nvfp4":
        assert_same_bits(a.scale, b.scale, None, "scale")
        zero = np.asarray(get_format("nvfp4").global_amax(x, get_format("nvfp4").options.parse(variant[1]))) == 0
        want = np.where(zero, np.float32(1), np.ldexp(a.global_scale, n))
        assert_same_bits(b.global_scale, want.astype(F32), None, "global scale")
    else:
        zero = a.scale == 0
        assert (np.where(zero, 0, a.scale.astype(int) + n) == b.scale).all()


@some("fp8_block", "mxfp8", "mxfp4", without=("fp32",))
@FEW
@given(data=st.data())
def test_quantizing_again_gives_the_same_values(variant, data) -> None:
    """MX and power-of-two FP8 scales: values are idempotent, bytes need not be."""
    x = fits(variant, F32, data.draw(st.integers(0, 1 << 32)), (), 2, 3, data.draw(st.sampled_from([0, 4, 20])))
    once = lowprec.fake_quantize(x, variant[0], backend="reference", **variant[1])
    twice = lowprec.fake_quantize(once, variant[0], backend="reference", **variant[1])
    assert (once == twice).all()


def test_mx_bytes_are_not_idempotent() -> None:
    """amax just above 448 takes the next exponent; decoded it is 448, which does not."""
    x = np.zeros((1, 32), F32)
    x[0, 0] = np.nextafter(np.float32(448), np.float32(np.inf))
    q = lowprec.quantize(x, "mxfp8", backend="reference")
    assert (int(q.scale[0, 0]), int(q.codes()[0, 0])) == (0x80, 0x76)
    again = lowprec.quantize(lowprec.dequantize(q, "float32"), "mxfp8", backend="reference")
    assert (int(again.scale[0, 0]), int(again.codes()[0, 0])) == (0x7F, 0x7E)


# Four over six is left out: the order of the error sum can change the choice.
@some("mxfp8", "mxfp4", "nvfp4", without=("four_over_six",))
@FEW
@given(data=st.data())
def test_order_inside_a_block_leaves_the_scale(variant, data) -> None:
    x = fits(variant, BF16, data.draw(st.integers(0, 1 << 32)), (), 2, 3, 4)
    width = get_format(variant[0]).options.parse(variant[1]).column_alignment
    blocks = x.reshape(x.shape[0], -1, width)
    mixed = blocks[..., data.draw(st.permutations(range(width)))].reshape(x.shape)
    a, b = reference(x, variant), reference(mixed, variant)
    assert_same_bits(bits(a.scale), bits(b.scale), None, "scale")


@EVERY_VARIANT
def test_16_bit_input_is_its_float32(variant) -> None:
    """Only the input's value counts, but for te's tiny blocks (see test_discriminating)."""
    for dtype in (BF16, F16):
        x = fits(variant, dtype, 11, (), 3, 3, 3)
        same(reference(x, variant), reference(x.astype(F32), variant))


@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=lambda dtype: dtype.name)
@EVERY_VARIANT
def test_every_result_dtype_is_one_rounding_of_float32(variant, dtype) -> None:
    x = fits(variant, F32, 12, (), 3, 3, 3)
    q = lowprec.quantize(x, variant[0], backend="reference", **variant[1])
    want = lowprec.dequantize(q, "float32").astype(dtype)
    assert_same_bits(lowprec.dequantize(q, dtype), want, x, "values")
    assert_same_bits(lowprec.dequantize(q, dtype.name), want, x, "values")
