"""Inputs that tell implementations apart: element codecs, MXFP8, MXFP4, FP8 blocks, packing and dequantization.

Each row has what the implementation that we follow gives, found by running it. Every input is quantized in
float32, and in bfloat16 where bfloat16 can hold it. NVFP4 has its own file.
"""

from __future__ import annotations

import numpy as np
import pytest
from bitwise import BF16, F16, F32, Array, assert_same_bits, below, f32, nx, pv

from lowprec.formats import get_format
from lowprec.formats import numerics as nm
from lowprec.formats.base import Quantized

INF, NAN, FLT_MAX = np.float32(np.inf), np.float32(np.nan), np.float32(np.finfo(np.float32).max)


def dtypes_that_hold(value: np.float32) -> list[np.dtype]:
    """float32, and bfloat16 if it represents the value."""
    exact = np.isnan(value) or value.astype(BF16).astype(np.float32) == value
    return [F32, BF16] if exact else [F32]


def both_dtypes(rows: list[tuple]) -> list:
    """(dtype, *row) for every row and every dtype that holds its first item."""
    return [
        pytest.param(dtype, *row, id=f"{row[0]!r}-{dtype.name}")
        for row in rows
        for dtype in dtypes_that_hold(np.float32(row[0]))
    ]


def alone(value: np.float32, dtype: np.dtype, size: int = 32) -> Array:
    """One row that is zero but for its first element."""
    x = np.zeros((1, size), dtype)
    x[0, 0] = value
    return x


# ---- A, B, C: casts ------------------------------------------------------------------------------------

E2M1_CASTS = [
    (0.0, 0x0), (-0.0, 0x8), (f32("00000001"), 0x0), (f32("80000001"), 0x8), (-0.2, 0x8), (-0.25, 0x8),
    (0.25, 0x0), (nx(0.25), 0x1), (0.75, 0x2), (pv(0.75), 0x1), (nx(0.75), 0x2), (1.25, 0x2), (1.75, 0x4),
    (2.5, 0x4), (3.5, 0x6), (5.0, 0x6), (nx(5.0), 0x7), (6.5, 0x7), (INF, 0x7), (-7.0, 0xF), (-INF, 0xF),
    (NAN, 0x7), (-NAN, 0x7),
]  # fmt: skip
E4M3_CASTS = [
    (-0.0, 0x80), (-1e-12, 0x80), (2.0**-10, 0x00), (nx(2.0**-10), 0x01), (1.5 * 2.0**-9, 0x02),
    (2.5 * 2.0**-9, 0x02), (pv(2.0**-6), 0x08), (1.0625, 0x38), (1.1875, 0x3A), (416.0, 0x7D), (432.0, 0x7E),
    (448.0, 0x7E), (464.0, 0x7E), (nx(464.0), 0x7E), (480.0, 0x7E), (1e30, 0x7E), (INF, 0x7E), (-INF, 0xFE),
    (NAN, 0x7F), (-NAN, 0x7F),
]  # fmt: skip
E8M0_CASTS = [
    (0.0, 0x00), (-0.0, 0x00), (f32("00000001"), 0x00), (f32("00400000"), 0x00), (f32("00400001"), 0x01),
    (f32("00800000"), 0x01), (f32("00800001"), 0x02), (pv(1.0), 0x7F), (1.0, 0x7F), (nx(1.0), 0x80), (1.4, 0x80),
    (1.5, 0x80), (f32("7f000000"), 0xFE), (f32("7f000001"), 0xFE), (FLT_MAX, 0xFE), (INF, 0xFE), (NAN, 0xFF),
]  # fmt: skip


@pytest.mark.parametrize(
    ("encode", "rows"),
    [(nm.encode_e2m1, E2M1_CASTS), (nm.encode_e4m3, E4M3_CASTS), (nm.encode_e8m0, E8M0_CASTS)],
    ids=["A-e2m1", "B-e4m3", "C-e8m0"],
)
def test_casts(encode, rows) -> None:
    x = np.array([value for value, _ in rows], np.float32)
    assert_same_bits(encode(x), np.array([code for _, code in rows], np.uint8), x, "code")


# ---- D: MXFP8 ------------------------------------------------------------------------------------------

MXFP8_AMAX = [
    (0.0, 0x00, 0x00), (f32("00000001"), 0x00, 0x00), (f32("00800000"), 0x00, 0x40), (f32("04600000"), 0x00, 0x7E),
    (f32("04600001"), 0x00, 0x7E), (f32("3727c5ac"), 0x66, 0x7A), (1.0, 0x77, 0x78), (pv(1.75), 0x77, 0x7E),
    (1.75, 0x77, 0x7E), (nx(1.75), 0x78, 0x76), (f32("3fe10000"), 0x78, 0x76), (1.875, 0x78, 0x77),
    (1.9375, 0x78, 0x78), (pv(2.0), 0x78, 0x78), (2.0, 0x78, 0x78), (448.0, 0x7F, 0x7E), (nx(448.0), 0x80, 0x76),
    (480.0, 0x80, 0x77), (f32("7ee00000"), 0xF5, 0x7E), (f32("7ee00001"), 0xF6, 0x76), (FLT_MAX, 0xF7, 0x78),
    (INF, 0xFE, 0x7E), (NAN, 0x00, 0x7F),
]  # fmt: skip


@pytest.mark.parametrize(("dtype", "amax", "byte", "code"), both_dtypes(MXFP8_AMAX))
def test_mxfp8_amax(dtype, amax, byte, code) -> None:
    fmt = get_format("mxfp8")
    for sign in (1, -1):
        x = alone(np.float32(sign * np.float32(amax)), dtype)
        q = fmt.quantize(x, fmt.options(), None)
        want = code | 0x80 if sign < 0 and not np.isnan(amax) and amax != 0 else code
        want = 0x80 if sign < 0 and amax == 0 else want
        assert (q.scale[0, 0], fmt.codes(q.qdata)[0, 0]) == (byte, want)
        assert not fmt.codes(q.qdata)[0, 1:].any()


MXFP8_BLOCKS = [
    ([448.0, 2.0**-10, nx(2.0**-10), -(2.0**-11), 1.0625, 1.1875, -0.0, NAN], 0x7F, "7e 00 01 80 38 3a 80 7f"),
    ([INF, 1.0, FLT_MAX], 0xFE, "7e 00 40"),
    ([2.0**-126, -(2.0**-130), 2.0**-149], 0x00, "40 a0 00"),
]


@pytest.mark.parametrize(("values", "byte", "codes"), MXFP8_BLOCKS, ids=["ties", "inf", "byte-0"])
def test_mxfp8_block(values, byte, codes) -> None:
    fmt = get_format("mxfp8")
    x = np.zeros((1, 32), np.float32)
    x[0, : len(values)] = values
    q = fmt.quantize(x, fmt.options(), None)
    assert q.scale[0, 0] == byte
    assert bytes(fmt.codes(q.qdata)[0, : len(values)]).hex(" ") == codes
    assert not fmt.codes(q.qdata)[0, len(values) :].any()


# ---- E: MXFP4 ------------------------------------------------------------------------------------------

# amax: rceil, floor, even as "byte/code". Inf and NaN under floor and even are our choice, the same for the
# three rules (torchao gives ff/3); FLT_MAX under even is fd/6, where torchao and compressed-tensors overflow.
MXFP4_AMAX = [
    (0.0, "00/0 00/0 00/0"), (f32("01400000"), "00/7 00/7 00/7"), (1.0, "7d/6 7d/6 7d/6"),
    (1.5, "7d/7 7d/7 7d/7"), (nx(1.5), "7e/5 7d/7 7d/7"), (pv(1.75), "7e/5 7d/7 7d/7"), (1.75, "7e/6 7d/7 7e/6"),
    (2.0, "7e/6 7e/6 7e/6"), (nx(2.0), "7e/6 7e/6 7e/6"), (3.0, "7e/7 7e/7 7e/7"), (nx(3.0), "7f/5 7e/7 7e/7"),
    (5.0, "7f/6 7f/6 7f/6"), (6.0, "7f/7 7f/7 7f/7"), (nx(6.0), "80/5 7f/7 7f/7"), (7.0, "80/6 7f/7 80/6"),
    (FLT_MAX, "fd/6 fc/7 fd/6"), (INF, "fe/7 fe/7 fe/7"), (NAN, "00/7 00/7 00/7"),
]  # fmt: skip


@pytest.mark.parametrize(("dtype", "amax", "expected"), both_dtypes(MXFP4_AMAX))
def test_mxfp4_amax(dtype, amax, expected) -> None:
    fmt = get_format("mxfp4")
    for rule, want in zip(("rceil", "floor", "even"), expected.split(), strict=True):
        q = fmt.quantize(alone(np.float32(amax), dtype), fmt.options.parse({"scale_rule": rule}), None)
        assert f"{q.scale[0, 0]:02x}/{fmt.codes(q.qdata)[0, 0]:x}" == want, rule


# ---- G: FP8 blocks -------------------------------------------------------------------------------------

# amax: te fp32, te pow2, deepgemm fp32, deepgemm pow2, each as "scale code".
FP8_AMAX = [
    (0.0, "3f800000 00, 3f800000 00, 346facad 00, 34800000 00"),
    (f32("2b8cbccc"), "2720d7c5 7e, 27800000 79, 346facad 00, 34800000 00"),  # 1e-12
    (f32("2edbe6ff"), "2a7b5123 7e, 2a800000 7e, 346facad 00, 34800000 00"),  # 1e-10
    (f32("358637bd"), "31196446 7e, 31800000 78, 346facad 49, 34800000 48"),  # 1e-6
    (f32("38cf9e38"), "346d471c 7e, 34800000 7d, 346facad 7e, 34800000 7d"),  # 9.9e-5
    (1.75, "3b800000 7e, 3b800000 7e, 3b800000 7e, 3b800000 7e"),
    (nx(1.75), "3b800001 7e, 3c000000 76, 3b800001 7e, 3c000000 76"),
    (pv(1.75), "3b7ffffe 7e, 3b800000 7e, 3b7fffff 7e, 3b800000 7e"),
    (3.0, "3bdb6db7 7e, 3c000000 7c, 3bdb6db7 7e, 3c000000 7c"),
    (100.0, "3e649249 7e, 3e800000 7c, 3e649249 7e, 3e800000 7c"),
    (448.0, "3f800000 7e, 3f800000 7e, 3f800000 7e, 3f800000 7e"),
    (nx(448.0), "3f800001 7e, 40000000 76, 3f800001 7e, 40000000 76"),
    (INF, "3f800000 7e, 3f800000 7e, 7f800000 7f, 7f000000 7e"),
    (NAN, "3f800000 7f, 3f800000 7f, 7fc00000 7f, 7f000000 7f"),
]
FP8_RULES = [("te", "fp32"), ("te", "pow2"), ("deepgemm", "fp32"), ("deepgemm", "pow2")]


def fp8_alone(value, dtype, rule: str, scale: str, block: tuple[int, int] = (128, 128)) -> str:
    fmt = get_format("fp8_block")
    options = fmt.options.parse({"rule": rule, "scale": scale, "block": block})
    q = fmt.quantize(alone(np.float32(value), dtype, 128), options, None)
    return f"{q.scale.view(np.uint32)[0, 0]:08x} {fmt.codes(q.qdata)[0, 0]:02x}"


@pytest.mark.parametrize("block", [(128, 128), (1, 128)], ids=str)
@pytest.mark.parametrize(("dtype", "amax", "expected"), both_dtypes(FP8_AMAX))
def test_fp8_block_amax(dtype, amax, expected, block) -> None:
    for (rule, scale), want in zip(FP8_RULES, expected.split(", "), strict=True):
        assert fp8_alone(amax, dtype, rule, scale, block) == want, (rule, scale)


def test_fp8_block_tiny_amax_takes_the_largest_value_of_the_input_dtype() -> None:
    smallest_normal = f32("00800000")
    assert fp8_alone(smallest_normal, F32, "te", "fp32") == "00200000 48"
    assert fp8_alone(smallest_normal, BF16, "te", "fp32") == "00202020 48"
    for dtype in (F32, BF16):
        assert fp8_alone(smallest_normal, dtype, "te", "pow2") == "00400000 40"
    # Where 448 / A overflows: at the threshold it does not, one below it does. It cannot for float16.
    threshold = f32("03e00001")
    assert np.isfinite(np.float32(448) / threshold)
    scale_at = np.float32(1) / (np.float32(448) / threshold)
    assert fp8_alone(threshold, F32, "te", "fp32").split()[0] == f"{scale_at.view(np.uint32):08x}"
    assert fp8_alone(pv(threshold), F32, "te", "fp32").split()[0] == "00200000"
    smallest_half = np.float32(2.0**-24)
    assert fp8_alone(smallest_half, F16, "te", "pow2") == fp8_alone(smallest_half, F32, "te", "pow2")
    assert fp8_alone(smallest_half, F16, "te", "fp32") == fp8_alone(smallest_half, F32, "te", "fp32")


def test_fp8_block_inf_beside_finite_elements() -> None:
    """te: scale 1. deepgemm with FP32 scales: Inf reaches the scale, finite elements are 0, Inf is NaN."""
    fmt = get_format("fp8_block")
    x = np.zeros((1, 128), np.float32)
    x[0, :3] = [INF, 2.0, NAN]
    te = fmt.quantize(x, fmt.options.parse({"rule": "te"}), None)
    assert (te.scale[0, 0], bytes(fmt.codes(te.qdata)[0, :3]).hex()) == (1.0, "7e407f")
    x[0, 2] = -3.0
    for rule in ("deepgemm", "deepseek"):
        q = fmt.quantize(x, fmt.options.parse({"rule": rule}), None)
        assert (q.scale[0, 0], bytes(fmt.codes(q.qdata)[0, :3]).hex()) == (np.inf, "7f0080")


def test_deepseek_divides_where_deepgemm_multiplies() -> None:
    """The same scales; a pair (A, x) of bfloat16 values where the two codes differ, found by search."""
    fmt = get_format("fp8_block")
    found = 0
    for amax in np.arange(0x4080, 0x4100, dtype=np.uint16).view(BF16):
        x = np.zeros((1, 128), BF16)
        x[0, 0] = amax
        x[0, 1:] = below(amax, 127)
        codes = {}
        scales = {}
        for rule in ("deepgemm", "deepseek"):
            q = fmt.quantize(x, fmt.options.parse({"rule": rule}), None)
            codes[rule], scales[rule] = fmt.codes(q.qdata), q.scale
        assert_same_bits(scales["deepseek"], scales["deepgemm"], None, "scale")
        s = np.float64(np.float32(np.float64(amax) / 448))
        divided = (x.astype(np.float64) / s).astype(np.float32)
        multiplied = (x.astype(np.float64) * np.float64(np.float32(1 / s))).astype(np.float32)
        assert_same_bits(codes["deepseek"], nm.encode_e4m3(divided), x, "x / s")
        assert_same_bits(codes["deepgemm"], nm.encode_e4m3(multiplied), x, "x * (1 / s)")
        found += int((codes["deepgemm"] != codes["deepseek"]).sum())
    assert found > 0


@pytest.mark.parametrize("shape", [(130, 130), (1, 130)])
@pytest.mark.parametrize(("rule", "scale"), [*FP8_RULES, ("deepseek", "fp32"), ("deepseek", "pow2")])
def test_fp8_ragged_blocks_are_blocks_padded_with_zeros(shape, rule, scale) -> None:
    fmt = get_format("fp8_block")
    options = fmt.options.parse({"rule": rule, "scale": scale})
    m, k = shape
    x = np.random.default_rng(3).normal(size=shape).astype(np.float32)
    padded = np.zeros((-(-m // 128) * 128, -(-k // 128) * 128), np.float32)
    padded[:m, :k] = x
    ragged, whole = fmt.quantize(x, options, None), fmt.quantize(padded, options, None)
    assert_same_bits(ragged.scale, whole.scale, None, "scale")
    assert_same_bits(fmt.codes(ragged.qdata), fmt.codes(whole.qdata)[:m, :k], x, "codes")


# ---- H: packing ----------------------------------------------------------------------------------------


def test_even_element_in_the_low_nibble() -> None:
    packed = nm.pack_nibbles(nm.encode_e2m1(np.array([[0.5, 6.0]], np.float32)))
    assert packed.tolist() == [[0x71]]
    assert_same_bits(nm.decode_e2m1_packed(packed), np.array([[0.5, 6.0]], np.float32))


def test_packing_every_pair() -> None:
    low, high = np.meshgrid(np.arange(16, dtype=np.uint8), np.arange(16, dtype=np.uint8))
    codes = np.stack([low.ravel(), high.ravel()], axis=-1)
    packed = nm.pack_nibbles(codes)
    assert_same_bits(packed, np.arange(256, dtype=np.uint8)[:, None], None, "packed")
    assert_same_bits(nm.unpack_nibbles(packed), codes, None, "codes")
    assert_same_bits(nm.decode_e2m1_packed(packed), nm.decode_e2m1(codes), None, "values")


# ---- I: dequantization ---------------------------------------------------------------------------------


def test_mxfp8_subnormal_scale_is_not_flushed() -> None:
    fmt = get_format("mxfp8")
    q = fmt.quantize(alone(f32("04600000"), F32), fmt.options(), None)
    assert fmt.dequantize(q, fmt.options(), F32)[0, 0] == f32("04600000")  # 448 * 2^-127
    least = q._replace(qdata=np.full((1, 32), 0x01, np.uint8).view(nm.FLOAT8_E4M3FN))
    assert fmt.dequantize(least, fmt.options(), F32)[0, 0] == np.float32(2.0**-136)


def test_fp8_block_rounds_to_float32_then_to_bfloat16() -> None:
    """fl(q * scale), then one rounding to bfloat16: not the same as rounding the exact product once.

    q = 9/8 and scales S * 2^-23 with 9 * S just above a bfloat16 tie: the float32 rounding makes it a tie, which
    then goes to even; rounded once, it goes up.
    """
    fmt = get_format("fp8_block")
    inverse_of_9 = pow(9, -1, 1 << 20)
    significands = [
        s
        for distance in range(1, 8)
        for s in range((inverse_of_9 * ((1 << 19) + distance)) % (1 << 20), 1 << 24, 1 << 20)
        if 9 * s >= 1 << 27
    ]
    products = [9 * s for s in significands]
    assert all((product >> 4) & 0xFFFF == 0x8000 for product in products)  # what float32 keeps of it is a tie
    scales = np.ldexp(np.array(significands, np.float64), -23).astype(np.float32)
    qdata = np.full((1, 128 * scales.size), 0x39, np.uint8).view(nm.FLOAT8_E4M3FN)
    q = Quantized(qdata, scales[None, :], None)
    got = fmt.dequantize(q, fmt.options(), BF16)[0, ::128]
    kept = [product >> 20 for product in products]
    even = [value + (value & 1) for value in kept]
    assert even != [value + 1 for value in kept]  # rounded once, all of them would go up
    assert got.astype(np.float64).tolist() == [float(value) * 2.0**-6 for value in even]


@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=lambda dtype: dtype.name)
def test_nvfp4_decodes_scale_first(dtype) -> None:
    """fl(fl(sb * global_scale) * q), against fl(sb * q) * global_scale, which differs in the last bit for some."""
    fmt = get_format("nvfp4")
    options = fmt.options()
    scale_codes = np.arange(0x7F, dtype=np.uint8)
    k = 16 * scale_codes.size
    differ = 0
    for bits in range(0x40800000, 0x41000000, 0x0003A7B1):
        outer = np.float32(1) / (np.float32(2688) / np.uint32(bits).view(np.float32))
        qdata = nm.pack_nibbles(np.tile(np.arange(16, dtype=np.uint8), scale_codes.size)[None, :])
        q = fmt.quantize(np.zeros((1, k), F32), options, None)
        q = q._replace(qdata=qdata, scale=scale_codes[None, :].view(nm.FLOAT8_E4M3FN))
        q = q._replace(global_scale=np.array(outer))
        got = fmt.dequantize(q, options, dtype)
        element = np.tile([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], scale_codes.size)
        block = np.repeat(nm.decode_e4m3(scale_codes), 16).astype(np.float64)
        factor = (block * np.float64(outer)).astype(np.float32).astype(np.float64)
        want = (factor * element).astype(np.float32)
        assert_same_bits(got[0], want.astype(dtype), want, "value")
        other = ((block * element) * np.float64(outer)).astype(np.float32)
        differ += int((other != want).sum())
    assert differ > 0


# ---- INT4: no table in the discriminating inputs, so each corner of the contract's rule ----------------


def int4(x: Array, rule: str) -> tuple[Array, Array]:
    """(scales, codes without their offset)."""
    fmt = get_format("int4_group")
    q = fmt.quantize(x, fmt.options.parse({"rule": rule}), None)
    return q.scale, fmt.codes(q.qdata).astype(int) - 8


@pytest.mark.parametrize(("rule", "lowest"), [("amax7", -7), ("amax7.5", -8)])
def test_int4_range(rule, lowest) -> None:
    """A subnormal scale is far from the ideal one: both ends of the range clamp."""
    tiny = 2.0**-133  # the smallest bfloat16
    x = np.zeros((1, 32), BF16)
    x[0, :4] = [10 * tiny, -10 * tiny, 3 * tiny, -tiny]
    scale, codes = int4(x, rule)
    assert scale.astype(np.float64).item() == tiny
    assert codes[0, :4].tolist() == [7, lowest, 3, -1]


@pytest.mark.parametrize(("rule", "largest"), [("amax7", 3), ("amax7.5", 3)])
def test_int4_scale_underflow_is_a_zero_group(rule, largest) -> None:
    x = np.zeros((1, 32), BF16)
    x[0, 0] = largest * 2.0**-133
    scale, codes = int4(x, rule)
    assert scale.astype(np.float64).item() == 1.0
    assert not codes.any()


@pytest.mark.parametrize(("rule", "divisor"), [("amax7", 7.0), ("amax7.5", 7.5)])
def test_int4_scale_is_a_division_rounded_to_float32_then_to_bfloat16(rule, divisor) -> None:
    """Amaxes whose scale lies beside a bfloat16 tie, where a multiplication by 1/7 rounds to the other side."""
    ties = np.arange(0x3F808000, 0x40008000, 0x10000, dtype=np.uint32).view(np.float32).astype(np.float64)
    near = (ties * divisor).astype(np.float32).view(np.int32)
    amax = np.concatenate([near + np.int32(step) for step in range(-3, 4)]).view(np.float32)
    x = np.zeros((amax.size, 32), np.float32)
    x[:, 5] = -amax
    ideal = (amax.astype(np.float64) / divisor).astype(np.float32)
    scale, _ = int4(x, rule)
    assert_same_bits(scale[:, 0], ideal.astype(BF16), amax, "scale")
    multiplied = amax * np.float32(1 / divisor)
    assert (multiplied.astype(BF16) != ideal.astype(BF16)).any()


@pytest.mark.parametrize("rule", ["amax7", "amax7.5"])
def test_int4_nan_and_inf(rule) -> None:
    x = np.zeros((2, 32), np.float32)
    x[0, :3] = [NAN, 7.5, -1.0]
    x[1, :4] = [INF, -INF, NAN, 1.0]
    scale, codes = int4(x, rule)
    assert codes[0, :3].tolist() == [0, 7, -1]
    assert codes[1, :4].tolist() == [7, -7 if rule == "amax7" else -8, 0, 0]
    assert scale[1, 0] == np.array([0x7F7F], np.uint16).view(BF16)[0]
