"""The compiled kernels: exhaustive and hostile inputs, every way to hand over memory, what else the process does."""

from __future__ import annotations

import ctypes
import ctypes.util
import platform
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from bitwise import BF16, F16, F32, Array, assert_same_bits
from hostile import DTYPES, assert_same_as_reference, finite_patterns, load, patterns, weights
from variants import EVERY_VARIANT, some

from lowprec.errors import FormatError
from lowprec.formats import BUILTIN
from lowprec.formats.base import ArraySpec, Quantized

FEW = pytest.mark.parametrize("name", BUILTIN)  # with the default options


def parts(variant: tuple[str, dict]) -> tuple:
    kernel = load("cpu", variant[0])
    return kernel, kernel.format.options.parse(variant[1])


def default(name: str) -> tuple:
    return parts((name, {}))


# ---- exhaustive ----------------------------------------------------------------------------------------


def every_pattern(dtype: np.dtype) -> Array:
    return np.arange(1 << 16, dtype=np.uint16).view(dtype)


@some("fp8_block", "mxfp8", "mxfp4", "nvfp4", "int4_group", without=((128, 128), (3, 5), (16, 16)))
@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_every_16_bit_pattern_alone_in_its_block(variant, dtype) -> None:
    """It is the block's amax, and where 64 of them are a matrix, sometimes the global one."""
    kernel, options = parts(variant)
    x = np.zeros((1 << 10, 64, options.column_alignment), dtype)
    x[:, :, 5] = every_pattern(dtype).reshape(1 << 10, 64)
    assert_same_as_reference(kernel, x, options)


@some("nvfp4", without=("row", (1, 16)))
@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_every_eighth_16_bit_pattern_alone_in_its_tile(variant, dtype) -> None:
    kernel, options = parts((variant[0], {**variant[1], "block": (16, 16)}))
    x = np.zeros((1 << 7, 16, 1024), dtype)
    x[:, 3, ::16] = every_pattern(dtype)[5::8].reshape(1 << 7, 64)
    assert_same_as_reference(kernel, x, options)


@EVERY_VARIANT
@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize("amax", [6.0, 448.0, 0.37, 1e-7])
def test_every_finite_16_bit_pattern_beside_an_amax(variant, dtype, amax) -> None:
    kernel, options = parts(variant)
    x = every_pattern(dtype)
    x = np.where(np.isfinite(x.astype(np.float32)) & (np.abs(x.astype(np.float32)) <= amax), x, dtype.type(-0.0))
    x = np.random.default_rng(0).permutation(x).reshape(512, 128)
    x[:, ::16] = dtype.type(amax)
    assert_same_as_reference(kernel, x, options)


@EVERY_VARIANT
def test_a_million_float32_patterns(variant) -> None:
    kernel, options = parts(variant)
    random = np.random.default_rng(5)
    assert_same_as_reference(kernel, patterns(random, (256, 3072), F32), options)
    assert_same_as_reference(kernel, finite_patterns(random, (256, 1024), F32), options)


@some("nvfp4")
def test_every_mantissa_of_the_global_amax(variant) -> None:
    """With one lucky global amax wrong orders of operations do not show."""
    kernel, options = parts(variant)
    x = weights(np.random.default_rng(2), (128, 16, 128), F32).astype(BF16)
    x[:, 0, 0] = (np.arange(128) + 0x4080).astype(np.uint16).view(BF16)  # [4, 8)
    assert_same_as_reference(kernel, x, options)


@EVERY_VARIANT
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_blocks_of_nothing_but_nan_or_inf(variant, dtype) -> None:
    kernel, options = parts(variant)
    x = np.full((256, 512), np.nan, dtype)
    assert_same_as_reference(kernel, x, options)
    x[::2, ::3] = -x[::2, ::3]
    x[128:, :256] = 1
    x[:128, 256:384] = -np.inf
    assert_same_as_reference(kernel, x, options)


@pytest.mark.parametrize("rule", ["te", "deepgemm", "deepseek"])
@pytest.mark.parametrize("block", [(1, 5000), (16, 4500), (7, 2049), (300, 6144), (5000, 20000)], ids=str)
def test_blocks_wider_than_a_tile(block, rule) -> None:
    kernel, options = parts(("fp8_block", {"block": block, "rule": rule}))
    random = np.random.default_rng(6)
    assert_same_as_reference(kernel, weights(random, (40, 10001), BF16), options)
    assert_same_as_reference(kernel, patterns(random, (40, 10001), F32), options)


# ---- memory --------------------------------------------------------------------------------------------


@EVERY_VARIANT
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_strides(variant, dtype) -> None:
    kernel, options = parts(variant)
    x = weights(np.random.default_rng(1), (4, 128, 512), dtype)
    for view in (
        x[:, :32, 128:384],
        x[::2, ::2],
        x[:, :, ::2],
        x.transpose(0, 2, 1)[:, :256],
        x.transpose(1, 0, 2)[:16].reshape(16, 4, 512).transpose(1, 0, 2),
        x[::-1, ::-1],
        np.broadcast_to(x[:1, :1], (2, 16, 512)),
    ):
        assert_same_as_reference(kernel, view, options)


@FEW
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_input_may_begin_at_any_byte(name, dtype) -> None:
    kernel, options = default(name)
    x = weights(np.random.default_rng(1), (128, 384), dtype)
    for offset in (1, 2, 3, 7):
        moved = np.frombuffer(bytes(offset) + x.tobytes(), np.uint8)[offset:].view(dtype).reshape(x.shape)
        assert_same_as_reference(kernel, moved, options)


def framed(spec) -> tuple[Array, Array]:
    """An array of a layout inside a larger one full of 0xA5, and the larger one's bytes."""
    *lead, rows, columns = spec.shape
    around = np.full((*lead, rows + 4, (columns + 6) * spec.dtype.itemsize), 0xA5, np.uint8)
    return around.view(spec.dtype)[..., 2 : rows + 2, 3 : columns + 3], around


@EVERY_VARIANT
def test_writes_nothing_beside_the_result(variant) -> None:
    kernel, options = parts(variant)
    module = kernel.module
    x = weights(np.random.default_rng(1), (2, 48, 384), BF16)
    layout = kernel.format.layout(x.shape, options)
    (qdata, around_qdata), (scale, around_scale) = framed(layout.qdata), framed(layout.scale)
    outer = None if layout.global_scale is None else np.empty(layout.global_scale.shape, np.float32)
    module.quantize_into(x, options, Quantized(qdata, scale, outer))
    want = kernel.format.quantize(x, options, None)
    for got, expected in zip((qdata, scale, outer), want, strict=True):
        if got is not None:
            assert_same_bits(got, expected)
    y, around_y = framed(ArraySpec(x.shape, BF16))
    module.fake_quantize_into(x, options, y)
    assert_same_bits(y, kernel.format.dequantize(want, options, BF16))
    y[...] = 0
    module.dequantize_into(want, options, y)
    assert_same_bits(y, kernel.format.dequantize(want, options, BF16))
    for part, around in ((qdata, around_qdata), (scale, around_scale), (y, around_y)):
        part.view(np.uint8)[...] = 0xA5
        assert (around == 0xA5).all()


@EVERY_VARIANT
def test_stripes_are_the_whole(variant) -> None:
    """What the converter does: rows at a time, into the whole result, with the global amax of the whole."""
    kernel, options = parts(variant)
    x = weights(np.random.default_rng(4), (512, 640), BF16)
    want = kernel.format.quantize(x, options, None)
    amax = None if want.global_scale is None else np.asarray(kernel.module.global_amax(x, options))
    out = Quantized(*(None if array is None else np.empty_like(array) for array in want))
    step = 64 if options.row_alignment == 1 else 128 // options.row_alignment * options.row_alignment
    for begin in range(0, 512, step):
        end = min(begin + step, 512)
        scale_rows = slice(begin, end)
        if want.scale.shape[0] != 512:
            scale_rows = slice(begin // options.row_alignment, -(-end // options.row_alignment))
        per_row = amax is not None and amax.ndim
        outer = None if out.global_scale is None else out.global_scale[begin:end] if per_row else out.global_scale
        given = None if amax is None else amax[begin:end] if per_row else amax
        stripe = Quantized(out.qdata[begin:end], out.scale[scale_rows], outer)
        kernel.module.quantize_into(x[begin:end], options, stripe, given)
    for got, expected, what in zip(out, want, want._fields, strict=True):
        if got is not None:
            assert_same_bits(got, expected, None, what)


@FEW
def test_refuses_what_would_write_elsewhere(name) -> None:
    kernel, options = default(name)
    module, x = kernel.module, np.zeros((128, 256), BF16)
    good = module.quantize(x, options)
    read_only = good.qdata.copy()
    read_only.flags.writeable = False
    for bad in (
        good._replace(qdata=good.qdata[:-1]),
        good._replace(scale=np.zeros(good.scale.shape, np.float64)),
        good._replace(qdata=np.zeros((256, *good.qdata.shape[1:]), good.qdata.dtype)[::2][:, ::2]),
        good._replace(qdata=np.asfortranarray(good.qdata)),
        good._replace(qdata=read_only),
    ):
        with pytest.raises(FormatError):
            module.quantize_into(x, options, bad)
    for y in (np.zeros((128, 255), BF16), np.zeros((128, 256), np.float64), np.zeros((256, 128), BF16).T):
        with pytest.raises(FormatError):
            module.dequantize_into(good, options, y)
        with pytest.raises(FormatError):
            module.fake_quantize_into(x, options, y)
    with pytest.raises(FormatError):
        module.dequantize(good._replace(scale=good.scale[:-1]), options, BF16)
    with pytest.raises(FormatError):
        module.quantize(np.zeros((128, 256), np.float64), options)


def test_nvfp4_refuses_an_amax_of_another_shape() -> None:
    kernel, options = default("nvfp4")
    x = np.zeros((2, 16, 32), BF16)
    with pytest.raises(FormatError, match=r"amax has shape \[16\], it must be \[2\]"):
        kernel.module.quantize(x, options, np.ones(16, np.float32))
    with pytest.raises(FormatError, match="global_scale is missing"):
        kernel.module.dequantize(kernel.quantize(x, options)._replace(global_scale=None), options, BF16)


# ---- the process ---------------------------------------------------------------------------------------


@FEW
def test_threads_do_not_disturb_each_other(name) -> None:
    kernel, options = default(name)
    inputs = [weights(np.random.default_rng(seed), (128, 512), BF16) for seed in range(8)]
    wanted = [kernel.format.quantize(x, options, None) for x in inputs]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(10):
            for got, want in zip(pool.map(lambda x: kernel.quantize(x, options), inputs), wanted, strict=True):
                assert_same_bits(got.qdata, want.qdata)
                assert_same_bits(got.scale, want.scale)


@FEW
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bytes_do_not_depend_on_the_rounding_mode_of_the_process(name, dtype) -> None:
    kernel, options = default(name)
    x = finite_patterns(np.random.default_rng(7), (128, 512), dtype)
    want = kernel.format.quantize(x, options, None)
    values = kernel.format.dequantize(want, options, BF16)
    libm = ctypes.CDLL(ctypes.util.find_library("m"))
    upward = {"x86_64": 0x800, "aarch64": 0x400000}[platform.machine()]
    nearest = libm.fegetround()
    try:
        assert libm.fesetround(upward) == 0
        got, fake = kernel.module.quantize(x, options), kernel.module.fake_quantize(x, options)
        assert libm.fegetround() == upward, "the caller's mode must come back"
        decoded = kernel.module.dequantize(want, options, BF16)
    finally:
        libm.fesetround(nearest)
    for ours, expected in ((got.qdata, want.qdata), (got.scale, want.scale), (decoded, values)):
        assert_same_bits(ours, expected)
    if dtype == BF16:
        assert_same_bits(fake, values)


@FEW
def test_bytes_do_not_depend_on_flushed_subnormals(name) -> None:
    torch = pytest.importorskip("torch")
    kernel, options = default(name)
    x = (finite_patterns(np.random.default_rng(7), (256, 512), BF16).view(np.uint16) & 0x84FF).view(BF16)
    want = kernel.format.quantize(x, options, None)
    values = kernel.format.dequantize(want, options, F32)
    assert torch.set_flush_denormal(True)
    try:
        assert torch.tensor([1e-40], dtype=torch.float32).mul(1.0).item() == 0.0, "subnormals are flushed now"
        got = kernel.module.quantize(x, options)
        decoded = kernel.module.dequantize(want, options, F32)
    finally:
        torch.set_flush_denormal(False)
    for ours, expected in ((got.qdata, want.qdata), (got.scale, want.scale), (decoded, values)):
        assert_same_bits(ours, expected)
