"""Every bfloat16 value through every codec, against ml_dtypes and gfloat; every bfloat16 amax through every scale rule.

Where an oracle is known to differ (numerics.md 1.2) the difference is asserted, not skipped:

- ml_dtypes E4M3 does not saturate: above 464 and for Inf it gives NaN. Its NaN keeps its sign (ours is 0x7F).
- ml_dtypes E2M1 gives 0x8 or 0x0 for NaN, the hardware 0x7. gfloat has no NaN in E2M1 and cannot encode one.
- gfloat's code of NaN in E4M3 is 0xFF, the hardware's 0x7F; both decode to NaN.
- ml_dtypes E8M0 rounds to nearest and is no oracle for rounding up; gfloat is, but it rounds a subnormal
  (below 2^-127) up to byte 0 as a value and knows no zero.
"""

from __future__ import annotations

import itertools
from fractions import Fraction

import gfloat
import ml_dtypes
import numpy as np
import pytest
from bitwise import BF16, F32, assert_same_bits
from gfloat.formats import format_info_ocp_e2m1, format_info_ocp_e4m3, format_info_ocp_e8m0

from lowprec.formats import get_format
from lowprec.formats import numerics as nm

ALL = np.arange(1 << 16, dtype=np.uint16).view(BF16)
with np.errstate(invalid="ignore"):
    ALL32 = ALL.astype(np.float32)
IS_NAN = np.isnan(ALL32)
POSITIVE = np.arange(1, 0x7F80, dtype=np.uint16).view(BF16)  # finite and not zero


def random_float32(seed: int, count: int = 1 << 20) -> np.ndarray:
    bits = np.random.default_rng(seed).integers(0, 1 << 32, count, dtype=np.uint64).astype(np.uint32)
    return bits.view(np.float32)


def gfloat_codes(info, x: np.ndarray) -> np.ndarray:
    """gfloat's saturating round to nearest even, as codes."""
    with np.errstate(invalid="ignore"):
        wide = x.astype(np.float64)
    return gfloat.encode_ndarray(info, gfloat.round_ndarray(info, wide, gfloat.RoundMode.TiesToEven, True)).astype(
        np.uint8
    )


# ---- E4M3 ----------------------------------------------------------------------------------------------


def test_e4m3_against_ml_dtypes() -> None:
    codes = nm.encode_e4m3(ALL32)
    with np.errstate(invalid="ignore"):
        theirs = ALL32.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
        clamped = np.clip(ALL32, -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    overflow = np.abs(ALL32) > 464
    assert_same_bits(codes[~IS_NAN & ~overflow], theirs[~IS_NAN & ~overflow], ALL[~IS_NAN & ~overflow], "code")
    assert_same_bits(codes[~IS_NAN], clamped[~IS_NAN], ALL[~IS_NAN], "code, clamped first")
    assert set(theirs[overflow]) == {0x7F, 0xFF}
    assert set(codes[overflow]) == {0x7E, 0xFE}
    assert set(theirs[IS_NAN]) == {0x7F, 0xFF}
    assert set(codes[IS_NAN]) == {0x7F}


def test_e4m3_against_gfloat() -> None:
    codes = nm.encode_e4m3(ALL32)
    theirs = gfloat_codes(format_info_ocp_e4m3, ALL32)
    assert_same_bits(codes[~IS_NAN], theirs[~IS_NAN], ALL[~IS_NAN], "code")
    assert set(theirs[IS_NAN]) == {0xFF}
    assert set(codes[IS_NAN]) == {0x7F}


def test_e4m3_float32_bit_patterns() -> None:
    x = random_float32(1)
    with np.errstate(invalid="ignore"):
        want = np.clip(x, -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    want = np.where(np.isnan(x), 0x7F, want).astype(np.uint8)
    assert_same_bits(nm.encode_e4m3(x), want, x, "code")


def test_e4m3_values() -> None:
    codes = np.arange(256, dtype=np.uint8)
    values = nm.decode_e4m3(codes)
    gfloat_values = gfloat.decode_ndarray(format_info_ocp_e4m3, codes)
    ml_values = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    for theirs in (gfloat_values, ml_values):
        assert np.isnan(values).tolist() == np.isnan(theirs).tolist() == [code & 0x7F == 0x7F for code in range(256)]
        finite = ~np.isnan(values)
        assert_same_bits(values[finite].astype(np.float64), theirs[finite], None, "value")
    assert_same_bits(nm.encode_e4m3(values[~np.isnan(values)]), codes[~np.isnan(values)], None, "code of its value")


# ---- E2M1 ----------------------------------------------------------------------------------------------


def test_e2m1_against_ml_dtypes() -> None:
    codes = nm.encode_e2m1(ALL32)
    with np.errstate(invalid="ignore"):
        theirs = ALL32.astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    assert_same_bits(codes[~IS_NAN], theirs[~IS_NAN], ALL[~IS_NAN], "code")
    assert set(theirs[IS_NAN]) <= {0x0, 0x8}
    assert set(codes[IS_NAN]) == {0x7}


def test_e2m1_against_gfloat() -> None:
    x = ALL32[~IS_NAN]
    assert_same_bits(nm.encode_e2m1(x), gfloat_codes(format_info_ocp_e2m1, x), ALL[~IS_NAN], "code")


def test_e2m1_float32_bit_patterns() -> None:
    x = random_float32(2)
    with np.errstate(invalid="ignore"):
        want = x.astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    want = np.where(np.isnan(x), 0x7, want).astype(np.uint8)
    assert_same_bits(nm.encode_e2m1(x), want, x, "code")


def test_codecs_just_beside_every_tie() -> None:
    """float32 neighbours of every midpoint of two codes: where folding 16 bits into one could go wrong."""
    for decode, encode, count in ((nm.decode_e4m3, nm.encode_e4m3, 127), (nm.decode_e2m1, nm.encode_e2m1, 8)):
        values = decode(np.arange(count, dtype=np.uint8))
        for code, (low, high) in enumerate(itertools.pairwise(values)):
            tie = np.float32((np.float64(low) + np.float64(high)) / 2)
            x = np.array([np.nextafter(tie, np.float32(0)), tie, np.nextafter(tie, np.float32(np.inf))], F32)
            assert encode(x).tolist() == [code, code + code % 2, code + 1]
            sign = 0x80 if count > 8 else 0x8
            assert encode(-x).tolist() == [code | sign, (code + code % 2) | sign, (code + 1) | sign]


def test_e2m1_values() -> None:
    codes = np.arange(16, dtype=np.uint8)
    theirs = gfloat.decode_ndarray(format_info_ocp_e2m1, codes)
    assert_same_bits(nm.decode_e2m1(codes).astype(np.float64), theirs, None, "value")
    ml_values = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float64)
    assert_same_bits(nm.decode_e2m1(codes).astype(np.float64), ml_values, None, "value")


# ---- E8M0 ----------------------------------------------------------------------------------------------


def e8m0_bit_rule(v: np.ndarray) -> np.ndarray:
    """numerics.md 1.2, one value at a time."""
    out = []
    for bits in np.atleast_1d(v).view(np.uint32).tolist():
        exponent, mantissa = bits >> 23 & 0xFF, bits & 0x7FFFFF
        if exponent == 255 and mantissa:
            out.append(255)
        elif exponent == 0:
            out.append(int(mantissa > 0x400000))
        else:
            out.append(min(254, exponent + (mantissa != 0)))
    return np.array(out, np.uint8)


def test_e8m0_bit_rule() -> None:
    positive = ALL32[:0x8000]
    assert_same_bits(nm.encode_e8m0(positive), e8m0_bit_rule(positive), ALL[:0x8000], "byte")
    random = np.abs(random_float32(3, 1 << 17))
    assert_same_bits(nm.encode_e8m0(random), e8m0_bit_rule(random), random, "byte")


def test_e8m0_against_gfloat() -> None:
    v = POSITIVE.astype(np.float32)
    v = np.concatenate([v, np.nextafter(v, np.float32(np.inf))[:-1]])
    representable = v[v >= 2.0**-127].astype(np.float64)
    rounded = gfloat.round_ndarray(format_info_ocp_e8m0, representable, gfloat.RoundMode.TowardPositive, True)
    theirs = gfloat.encode_ndarray(format_info_ocp_e8m0, rounded).astype(np.uint8)
    assert_same_bits(nm.encode_e8m0(representable.astype(np.float32)), theirs, representable, "byte")
    assert set(nm.encode_e8m0(v[v < 2.0**-127])) == {0}
    assert nm.encode_e8m0(np.array([np.nan], F32)) == format_info_ocp_e8m0.code_of_nan


def test_e8m0_values() -> None:
    codes = np.arange(256, dtype=np.uint8)
    for theirs in (
        gfloat.decode_ndarray(format_info_ocp_e8m0, codes),
        codes.view(ml_dtypes.float8_e8m0fnu).astype(np.float64),
    ):
        assert_same_bits(nm.decode_e8m0(codes)[:255].astype(np.float64), theirs[:255], None, "value")
        assert np.isnan(theirs[255])
    assert np.isnan(nm.decode_e8m0(codes)[255])
    assert np.isnan(nm.e8m0_multiplier(codes)[255])
    product = nm.decode_e8m0(codes)[:255].astype(np.float64) * nm.e8m0_multiplier(codes)[:255]
    assert (product == 1).all()


def test_ml_dtypes_e8m0_is_no_oracle() -> None:
    """It rounds to nearest and makes 0 a NaN: the reason for a codec of our own."""
    v = np.array([1.4, 0.0], np.float32)
    assert v.astype(ml_dtypes.float8_e8m0fnu).view(np.uint8).tolist() == [0x7F, 0xFF]
    assert nm.encode_e8m0(v).tolist() == [0x80, 0x00]


# ---- every bfloat16 amax, in exact arithmetic ----------------------------------------------------------


def floor_log2(value: Fraction) -> int:
    exponent = value.numerator.bit_length() - value.denominator.bit_length()
    return exponent if Fraction(2) ** exponent <= value else exponent - 1


def ceil_log2(value: Fraction) -> int:
    exponent = floor_log2(value)
    return exponent if Fraction(2) ** exponent == value else exponent + 1


FRACTIONS = [Fraction(float(value)) for value in POSITIVE]


def amax_rows(size: int) -> np.ndarray:
    x = np.zeros((POSITIVE.size, size), BF16)
    x[:, size // 2] = POSITIVE
    return x


def test_mxfp8_byte_of_every_amax() -> None:
    """The smallest power of two that is not below A / 448."""
    fmt = get_format("mxfp8")
    want = np.array([max(ceil_log2(value / 448) + 127, 0) for value in FRACTIONS], np.uint8)
    q = fmt.quantize(amax_rows(32), fmt.options(), None)
    assert_same_bits(q.scale[:, 0], want, POSITIVE, "byte")


@pytest.mark.parametrize("rule", ["rceil", "floor", "even"])
def test_mxfp4_byte_of_every_amax(rule) -> None:
    fmt = get_format("mxfp4")
    exact = {
        "rceil": lambda a: ceil_log2(a / 6),  # up iff A > 1.5 * 2^k
        "floor": lambda a: floor_log2(a) - 2,
        "even": lambda a: floor_log2(a) - 2 + (a >= Fraction(7, 4) * Fraction(2) ** floor_log2(a)),
    }[rule]
    want = np.array([max(exact(value) + 127, 0) for value in FRACTIONS], np.uint8)
    q = fmt.quantize(amax_rows(32), fmt.options.parse({"scale_rule": rule}), None)
    assert_same_bits(q.scale[:, 0], want, POSITIVE, "byte")


@pytest.mark.parametrize("rule", ["te", "deepgemm", "deepseek"])
def test_fp8_power_of_two_scale_of_every_amax(rule) -> None:
    """The smallest power of two that is not below A / 448; for te as far as 448 / A is finite."""
    fmt = get_format("fp8_block")
    floor = Fraction(0) if rule == "te" else Fraction(float(np.float32(1e-4)))
    want = np.array([2.0 ** ceil_log2(max(value, floor) / 448) for value in FRACTIONS], np.float32)
    options = fmt.options.parse({"rule": rule, "scale": "pow2", "block": (1, 1)})
    q = fmt.quantize(POSITIVE[None, :], options, None)
    defined = POSITIVE.astype(np.float32) >= 1.3165538e-36 if rule == "te" else slice(None)
    assert_same_bits(q.scale[0][defined], want[defined], POSITIVE[defined], "scale")
    if rule == "te":  # below it the encode scale is 2^127, the power of two in the largest bfloat16
        assert set(q.scale[0][~defined]) == {np.float32(2.0**-127)}


@pytest.mark.parametrize("dtype", [F32, BF16], ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("rule", ["te", "deepgemm", "deepseek"])
def test_fp8_float32_scale_of_every_amax(rule, dtype) -> None:
    """In float64, rounded once an operation."""
    fmt = get_format("fp8_block")
    x = POSITIVE.astype(dtype)
    wide = x.astype(np.float64)
    if rule == "te":
        with np.errstate(over="ignore"):
            encode = (448.0 / wide).astype(np.float32)
        largest = np.float32(ml_dtypes.finfo(dtype).max)
        encode = np.where(np.isinf(encode), largest, encode)
        want = (1.0 / encode.astype(np.float64)).astype(np.float32)
        scaled = (wide * encode.astype(np.float64)).astype(np.float32)
    else:
        want = (np.maximum(wide, np.float64(np.float32(1e-4))) / 448.0).astype(np.float32)
        s = want.astype(np.float64)
        scaled = wide / s if rule == "deepseek" else wide * (1.0 / s).astype(np.float32).astype(np.float64)
        scaled = scaled.astype(np.float32)
    q = fmt.quantize(x[None, :], fmt.options.parse({"rule": rule, "block": (1, 1)}), None)
    assert_same_bits(q.scale[0], want, x, "scale")
    codes = np.clip(scaled, -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    assert_same_bits(fmt.codes(q.qdata)[0], codes, x, "code")


@pytest.mark.parametrize(("rule", "divisor"), [("amax7", 7.0), ("amax7.5", 7.5)])
def test_int4_scale_of_every_amax(rule, divisor) -> None:
    fmt = get_format("int4_group")
    q = fmt.quantize(amax_rows(32), fmt.options.parse({"rule": rule}), None)
    ideal = (POSITIVE.astype(np.float64) / divisor).astype(np.float32)
    u = ideal.view(np.uint32)
    want = ((u + 0x7FFF + (u >> 16 & 1)) >> 16).astype(np.uint16).view(BF16)
    want = np.where(want == 0, BF16.type(1), want)
    assert_same_bits(q.scale[:, 0], want, POSITIVE, "scale")
    quotient = (POSITIVE.astype(np.float64) / want.astype(np.float64)).astype(np.float32)
    code = np.minimum(np.rint(quotient), 7).astype(np.int64)
    code = np.where(ideal.astype(BF16) == 0, 0, code)
    assert fmt.codes(q.qdata)[:, 16].tolist() == (code + 8).tolist()
    assert (np.delete(fmt.codes(q.qdata), 16, axis=1) == 8).all()
