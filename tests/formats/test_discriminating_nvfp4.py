"""Inputs that tell NVFP4 implementations apart: order of operations, global amax, four over six, corners."""

from __future__ import annotations

import numpy as np
import nvfp4_oracle as oracle
import pytest
from bitwise import BF16, F32, Array, assert_same_bits, below, bf16, f32, nx
from nvfp4_oracle import fl

from lowprec.formats import get_format
from lowprec.formats import numerics as nm

NVFP4 = get_format("nvfp4")
INF, NAN = np.float32(np.inf), np.float32(np.nan)
DTYPES = pytest.mark.parametrize("dtype", [F32, BF16], ids=lambda dtype: dtype.name)


def two_blocks(block: list[float], g: float, dtype: np.dtype) -> Array:
    """A row of two blocks: the one under test and one whose first element is G."""
    x = np.zeros((1, 32), dtype)
    x[0, : len(block)] = block
    x[0, 16] = g
    return x


def first_block(x: Array, **options) -> tuple[str, str]:
    """(block scale, nibbles) of the first block, as hex digits."""
    q = NVFP4.quantize(x, NVFP4.options.parse(options), None)
    digits = "".join(f"{code:x}" for code in NVFP4.codes(q.qdata)[0, :16])
    return f"{q.scale.view(np.uint8)[0, 0]:02x}", digits


# ---- F: corners ----------------------------------------------------------------------------------------

LADDER = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]
LADDER = [*LADDER, *[-value for value in LADDER]]

# name: block, G, block scale, leading codes (the others are 0), dtypes that hold the values
CORNERS = {
    "zero": ([0.0, -0.0], 6.0, "00", "08", [F32, BF16]),
    "ladder": (LADDER, 6.0, "7e", "022446678aacceef", [F32, BF16]),
    "ladder-minus-zero": ([*LADDER[:-1], -0.0], 2688.0, "38", "022446678aaccee8", [F32, BF16]),
    "scale-underflow": ([2688 * 2.0**-20, -2688 * 2.0**-21], 2688.0, "00", "7f", [F32, BF16]),
    "scale-tie-to-zero": ([6 * 2.0**-10, -3 * 2.0**-10], 2688.0, "00", "7f", [F32, BF16]),
    "scale-above-tie": ([nx(6 * 2.0**-10), -3 * 2.0**-10], 2688.0, "01", "5b", [F32]),
    "scale-2^-9": ([6 * 2.0**-9, -3 * 2.0**-9], 2688.0, "01", "7d", [F32, BF16]),
    "scale-2^-8": ([6 * 2.0**-8, -3 * 2.0**-8], 2688.0, "02", "7d", [F32, BF16]),
    "nan": ([NAN, 1.0, -2.0], 6.0, "71", "75f", [F32, BF16]),
    "inf": ([INF, 1.0, -2.0], 1.0, "7e", "708", [F32, BF16]),
    "tiny": ([1e-38, -1e-38, 1e-39], 1e-38, "31", "5d1", [F32]),
    "subnormal": ([1e-42, -1e-42], 1e-42, "00", "08", [F32]),
}


@pytest.mark.parametrize(
    ("name", "dtype"), [(name, dtype) for name, row in CORNERS.items() for dtype in row[4]], ids=str
)
def test_corner(name, dtype) -> None:
    block, g, scale, codes, _ = CORNERS[name]
    assert first_block(two_blocks(block, g, dtype)) == (scale, codes.ljust(16, "0"))


@DTYPES
def test_zero_block_keeps_signs_in_four_over_six(dtype) -> None:
    x = two_blocks([0.0, -0.0], 6.0, dtype)
    for error in ("mae", "mse"):
        assert first_block(x, four_over_six=error, e4m3_max=256) == ("00", "08".ljust(16, "0"))


@DTYPES
def test_zero_tensor_and_tensor_with_inf_have_s_1(dtype) -> None:
    for value in (0.0, np.inf):
        x = two_blocks([value, -0.0, 1.0 if value else 0.0], 0.0, dtype)
        q = NVFP4.quantize(x, NVFP4.options(), None)
        assert q.global_scale == 1.0
    q = NVFP4.quantize(np.zeros((2, 32), dtype), NVFP4.options(), None)
    assert (q.global_scale, q.scale.view(np.uint8).any(), q.qdata.any()) == (1.0, False, False)


def test_tiny_global_amax_has_the_largest_s() -> None:
    q = NVFP4.quantize(two_blocks([1e-38], 1e-38, F32), NVFP4.options(), None)
    assert q.global_scale == np.float32(1) / np.float32(oracle.FLT_MAX) != 0


def test_nan_is_ignored_by_the_global_amax() -> None:
    for outer in ("tensor", "row"):
        options = NVFP4.options.parse({"outer": outer})
        x = two_blocks([NAN, -2.0], 3.0, F32)
        assert NVFP4.global_amax(x, options).ravel().tolist() == [3.0]
        assert NVFP4.global_amax(np.full((1, 16), np.nan, F32), options).ravel().tolist() == [0.0]


# ---- F1: order of operations in the block scale --------------------------------------------------------

# G, A: te, and the wrong orders S*(A*R6), (A/6)*S, (A*S)/6, A/(6*s2), (A/6)/s2 with s2 = G/2688.
BLOCK_SCALE_ORDERS = [
    ("408c", "4011", "77 77 76 76 76 76"),
    ("408c", "407a", "7d 7d 7d 7c 7c 7d"),
    ("4092", "405b", "7b 7a 7a 7a 7a 7a"),
    ("409a", "403b", "78 79 78 78 78 78"),
    ("40c4", "406e", "78 78 78 78 78 79"),
]


def block_scale_orders(g: float, a: float) -> list[str]:
    s, s2, sixth = fl(2688 / g), fl(g / 2688), fl(1 / 6)
    orders = [
        a * fl(s * sixth), s * fl(a * sixth), fl(a / 6) * s, fl(a * s) / 6, a / fl(6 * s2), fl(a / 6) / s2,
    ]  # fmt: skip
    return [f"{int(oracle.e4m3(fl(value))):02x}" for value in orders]


@DTYPES
@pytest.mark.parametrize(("g", "a", "expected"), BLOCK_SCALE_ORDERS)
def test_order_of_operations_in_the_block_scale(g, a, expected, dtype) -> None:
    g, a = float(bf16(g)[0]), float(bf16(a)[0])
    # The row discriminates: the wrong orders, computed here, give what the table says they give.
    assert block_scale_orders(g, a) == expected.split()
    for exponent in (0, 20, -20):
        x = two_blocks([np.ldexp(a, exponent)], np.ldexp(g, exponent), dtype)
        assert first_block(x)[0] == expected.split()[0]


def test_every_wrong_order_of_the_block_scale_is_caught() -> None:
    columns = list(zip(*(row[2].split() for row in BLOCK_SCALE_ORDERS), strict=True))
    assert all(column != columns[0] for column in columns[1:])


# ---- F2: order of operations in the elements -----------------------------------------------------------

# G, A, x: block scale, te x*(1/(sb*Sd)), and the wrong orders x*(S/sb), x/(sb*s2), x/(sb*Sd).
ELEMENT_ORDERS = [
    ("4082", "4000", "3e82", "76", "2 2 1 2"),
    ("4084", "4009", "3fa5", "77", "5 6 6 5"),
    ("4084", "4021", "3fc6", "79", "5 5 6 6"),
    ("4085", "405d", "3f85", "7c", "4 3 4 4"),
    ("4093", "4000", "3fd2", "74", "7 6 6 7"),
]


@DTYPES
@pytest.mark.parametrize(("g", "a", "x", "scale", "expected"), ELEMENT_ORDERS)
def test_order_of_operations_in_the_elements(g, a, x, scale, expected, dtype) -> None:
    g, a, x = (float(bf16(word)[0]) for word in (g, a, x))
    s, s2, sb = fl(2688 / g), fl(g / 2688), float(oracle.e4m3_value(np.array([int(scale, 16)], np.uint8))[0])
    decode = fl(1 / s)
    orders = [x * fl(1 / fl(sb * decode)), x * fl(s / sb), x / fl(sb * s2), x / fl(sb * decode)]
    assert [f"{int(oracle.e2m1(fl(value))):x}" for value in orders] == expected.split()
    got_scale, codes = first_block(two_blocks([a, x, -x], g, dtype))
    assert (got_scale, codes[1]) == (scale, expected[0])
    assert int(codes[2], 16) == int(expected[0], 16) | 8


# ---- F3: four over six ---------------------------------------------------------------------------------

# block, G: e4m3_max 256 mae, 256 mse, 448 mae, 448 mse, plain, each "scale codes".
FOUR_OVER_SIX_BY_HAND = [
    ([4.0] * 16, "78 " + "6" * 16, "78 " + "6" * 16, "7e " + "6" * 16, "7e " + "6" * 16, "79 " + "7" * 16),
    ([3.0, 2.5, 2.0, 1.0], "70 7664", "74 6553", "76 7664", "7a 6653", "76 7664"),
]


@DTYPES
@pytest.mark.parametrize("row", FOUR_OVER_SIX_BY_HAND, ids=["fours", "steps"])
def test_four_over_six_by_hand(row, dtype) -> None:
    block, *expected, plain = row
    x = two_blocks(block, 6.0, dtype)
    got = [
        " ".join(first_block(x, four_over_six=error, e4m3_max=largest))
        for largest in (256, 448)
        for error in ("mae", "mse")
    ]
    assert got == [want.ljust(19, "0") for want in expected]
    assert " ".join(first_block(x)) == plain.ljust(19, "0")


# G, e4m3_max, block, scale of map-to-4, of map-to-6, {error: which is taken}. Who else takes another is in the id.
ADVERSARIAL = [
    pytest.param(
        6.125, 256, "3f3a bf36 3e98 be70 bf0c bf7f becf 3f7b bf94 3e37 bed7 bf23 3f73 bef9 3ebe 3edb",
        "69", "64", {"mae": 6}, id="error-times-1/g-takes-4",
    ),
    pytest.param(
        4.375, 256, "be3c bfef 3f76 bed4 bf87 bf84 be80 bf05 3f83 3ef0 3ecc 3fa9 bfc7 bf8d 3f5d 3f37",
        "72", "6e", {"mae": 4}, id="tree-and-8+8-take-6",
    ),
    pytest.param(
        4.375, 448, "beb4 3e92 3fb1 3e80 3f23 3fb6 3f7e be17 c013 bf1d beb7 befe 3e8b 4012 3fae bf69",
        "7b", "77", {"mae": 6}, id="tree-and-8+8-take-4",
    ),
    pytest.param(
        4.375, 448, "3fa7 3f06 401b 3ff4 3f39 3e2c 3d19 bf88 3f4a 3ebe 3fc8 be3e 3ff5 bf8b 3fbb 3eaf",
        "7c", "78", {"mse": 4}, id="fma-takes-6",
    ),
    pytest.param(
        6.125, 256, "400f 3ea5 3f4e 3f18 bf92 bfa3 3f45 be73 3fae 3f1d beae bf0c 3ee6 3f99 bcab 3fe5",
        "71", "6c", {"mae": 6, "mse": 4}, id="equal-errors-take-6",
    ),
]  # fmt: skip


@DTYPES
@pytest.mark.parametrize(("g", "largest", "words", "four", "six", "picks"), ADVERSARIAL)
def test_four_over_six_adversarial(g, largest, words, four, six, picks, dtype) -> None:
    block = bf16(words).astype(np.float64)
    x = two_blocks(block.tolist(), g, dtype)
    by_four, by_six = oracle.candidates(block[None], np.array([g]), float(largest))
    assert (f"{by_four.scale[0]:02x}", f"{by_six.scale[0]:02x}") == (four, six)
    for error, pick in picks.items():
        scale, codes = first_block(x, four_over_six=error, e4m3_max=largest)
        want = by_four if pick == 4 else by_six
        assert (scale, codes) == (four if pick == 4 else six, "".join(f"{c:x}" for c in want.codes[0]))
        # The same block as row of a tile of 16 equal rows: the tree of equal errors is 16 times one of them.
        tile = np.repeat(x, 16, axis=0)
        q = NVFP4.quantize(
            tile, NVFP4.options.parse({"four_over_six": error, "e4m3_max": largest, "block": (16, 16)}), None
        )
        assert (q.scale.view(np.uint8)[:, 0] == int(scale, 16)).all()


def test_equal_errors_are_equal() -> None:
    """The last adversarial row is there for its tie: its two sums of |d| are the same float32."""
    g, largest, words, *_ = ADVERSARIAL[-1].values
    block = bf16(words).astype(np.float64)[None]
    four, six = oracle.candidates(block, np.array([g]), float(largest))
    e4, e6 = (oracle.errors(block, np.array([g]), float(largest), result, "mae") for result in (four, six))
    assert e4[0] == e6[0] != 0


# ---- F4: rows, tiles -----------------------------------------------------------------------------------


@DTYPES
def test_zero_row_and_row_of_minus_zeros_have_s_1(dtype) -> None:
    x = np.zeros((4, 32), dtype)
    x[1] = -0.0
    x[2] = 448 * 2.0**3
    x[3, 5] = 2.0**-126
    q = NVFP4.quantize(x, NVFP4.options.parse({"outer": "row"}), None)
    assert q.global_scale.shape == (4,)
    assert q.global_scale[:3].tolist() == [1.0, 1.0, float(fl(1 / fl(2688 / 3584)))]
    assert 0 < q.global_scale[3] < 2.0**-126
    codes = NVFP4.codes(q.qdata)
    assert (codes[0] == 0).all()
    assert (codes[1] == 8).all()
    assert not q.scale.view(np.uint8)[:2].any()


def test_global_scale_is_the_reciprocal_of_s_not_amax_over_2688() -> None:
    amax = np.random.default_rng(7).uniform(1, 2, 1000).astype(np.float32)
    x = np.zeros((1000, 16), np.float32)
    x[:, 3] = amax
    q = NVFP4.quantize(x, NVFP4.options.parse({"outer": "row"}), None)
    wide = amax.astype(np.float64)
    assert_same_bits(q.global_scale, fl(1 / fl(2688 / wide)).astype(np.float32), amax, "global scale")
    differ = int((fl(1 / fl(2688 / wide)) != fl(wide / 2688)).sum())
    assert 200 < differ < 400  # numerics.md 4.4: 29 % of random rows


@DTYPES
def test_two_rows_per_tensor_and_per_row(dtype) -> None:
    x = np.zeros((2, 32), dtype)
    x[0, :4] = [4.0625, 3.046875, -1.0, 0.2539]
    x[1, :4] = [-0.0, 1e-3, 2.0**-14, -448.0]
    for outer, scales in (("tensor", ["4800", "7e00"]), ("row", ["7e00", "7e00"])):
        q = NVFP4.quantize(x, NVFP4.options.parse({"outer": outer}), None)
        assert [bytes(row).hex() for row in q.scale.view(np.uint8)] == scales
        codes = NVFP4.codes(q.qdata)
        assert ["".join(f"{c:x}" for c in row[:4]) for row in codes] == ["76b1", "800f"]
        assert not codes[:, 4:].any()


@DTYPES
def test_tile_with_its_amax_in_the_last_row(dtype) -> None:
    x = (np.random.default_rng(5).uniform(-0.01, 0.01, size=(32, 32))).astype(dtype)
    x[15, 7], x[31, 31] = 1.0, -6.0
    options = NVFP4.options.parse({"block": (16, 16)})
    q = NVFP4.quantize(x, options, None)
    scale = q.scale.view(np.uint8)
    assert all((scale[i : i + 16] == scale[i]).all() for i in (0, 16))
    assert scale[0, 0] != scale[0, 1]
    # A tile is square, so quantizing the transpose gives the transpose.
    t = NVFP4.quantize(np.ascontiguousarray(x.T), options, None)
    assert_same_bits(NVFP4.codes(t.qdata), np.ascontiguousarray(NVFP4.codes(q.qdata).T), None, "codes")
    assert_same_bits(t.scale.view(np.uint8)[::16], np.ascontiguousarray(scale[::16].T), None, "scale")


@pytest.mark.parametrize(
    ("dtype", "largest"), [(F32, f32("7f7fffff")), (np.dtype(np.float16), np.float32(65504))], ids=["fp32", "fp16"]
)
def test_largest_input(dtype, largest) -> None:
    x = np.zeros((1, 48), dtype)
    x[0, :2] = [largest, -largest]
    q = NVFP4.quantize(x, NVFP4.options(), None)
    assert (q.scale.view(np.uint8)[0, 0], q.qdata[0, 0]) == (0x7E, 0xF7)
    s = fl(2688 / float(largest))
    assert q.global_scale == fl(1 / s)


# ---- global amax, every bfloat16 mantissa --------------------------------------------------------------


def sweep() -> tuple[Array, Array]:
    """x [128, 128, 32] bfloat16: a matrix for each G of [4, 8), a row for each amax of a block, in some binade."""
    g = np.arange(0x4080, 0x4100, dtype=np.uint16)
    x = np.zeros((128, 128, 32), np.uint16)
    for row in range(128):
        amax = 0x4000 + row if row % 3 else 0x3E80 + row
        x[:, row, :16] = below(np.uint16(amax).view(BF16), 16).view(np.uint16)
        x[:, row, 1:16] ^= ((np.arange(128)[:, None] * 5 + np.arange(15) * 3) & 0x3F).astype(np.uint16)
        x[:, row, 1:16] = np.where((x[:, row, 1:16] & 0x7FFF) > amax, x[:, row, 1:16] - 0x40, x[:, row, 1:16])
        x[:, row, 0] = amax
    x[:, :, 16] = g[:, None]
    return x.view(BF16), g.view(BF16)


X, G = sweep()
BLOCKS = X[:, :, :16].astype(np.float64).reshape(-1, 16)
BLOCK_G = np.repeat(G.astype(np.float64), 128)


def test_the_sweep_is_what_it_says() -> None:
    assert (NVFP4.global_amax(X, NVFP4.options()) == G.astype(np.float32)).all()
    assert len(np.unique(X[0, :, 0])) == 128
    assert (np.abs(X[:, :, :16].astype(np.float32)).max(axis=-1) == X[:, :, 0].astype(np.float32)).all()


@DTYPES
@pytest.mark.parametrize("outer", ["tensor", "row"])
def test_every_global_amax(outer, dtype) -> None:
    q = NVFP4.quantize(X.astype(dtype), NVFP4.options.parse({"outer": outer}), None)
    want = oracle.plain(BLOCKS, BLOCK_G)
    assert_same_bits(q.scale.view(np.uint8)[:, :, 0].ravel(), want.scale, None, "scale")
    assert_same_bits(NVFP4.codes(q.qdata)[:, :, :16].reshape(-1, 16), want.codes, BLOCKS, "codes")
    decode = fl(1 / oracle.encode_scale(G.astype(np.float64), 448.0)).astype(np.float32)
    want_scale = decode if outer == "tensor" else np.repeat(decode[:, None], 128, axis=1)
    assert_same_bits(q.global_scale, want_scale, None, "global scale")


def test_every_global_amax_with_tiles() -> None:
    q = NVFP4.quantize(X, NVFP4.options.parse({"block": (16, 16)}), None)
    amax = np.repeat(np.abs(BLOCKS).reshape(-1, 256).max(axis=-1), 16)
    want = oracle.plain(BLOCKS, BLOCK_G, amax)
    assert_same_bits(q.scale.view(np.uint8)[:, :, 0].ravel(), want.scale, None, "scale")
    assert_same_bits(NVFP4.codes(q.qdata)[:, :, :16].reshape(-1, 16), want.codes, BLOCKS, "codes")


@pytest.mark.parametrize("block", [(1, 16), (16, 16)], ids=["rows", "tiles"])
@pytest.mark.parametrize("error", ["mae", "mse"])
@pytest.mark.parametrize("largest", [256, 448])
def test_every_global_amax_four_over_six(largest, error, block) -> None:
    options = NVFP4.options.parse({"four_over_six": error, "e4m3_max": largest, "block": block})
    q = NVFP4.quantize(X, options, None)
    want = oracle.four_over_six(BLOCKS, BLOCK_G, float(largest), error, tile=block == (16, 16))
    assert_same_bits(q.scale.view(np.uint8)[:, :, 0].ravel(), want.scale, None, "scale")
    assert_same_bits(NVFP4.codes(q.qdata)[:, :, :16].reshape(-1, 16), want.codes, BLOCKS, "codes")
    decode = fl(1 / oracle.encode_scale(G.astype(np.float64), float(largest))).astype(np.float32)
    assert_same_bits(q.global_scale, decode, None, "global scale")


def test_given_amax_is_used() -> None:
    x = X[0]
    for outer, amax in (("tensor", np.float32(7.5)), ("row", np.linspace(5, 9, 128, dtype=np.float32))):
        options = NVFP4.options.parse({"outer": outer})
        q = NVFP4.quantize(x, options, np.asarray(amax))
        g = np.broadcast_to(amax, 128).astype(np.float64)
        want = oracle.plain(x[:, :16].astype(np.float64), g)
        assert_same_bits(q.scale.view(np.uint8)[:, 0], want.scale, None, "scale")
        assert_same_bits(NVFP4.codes(q.qdata)[:, :16], want.codes, x[:, :16], "codes")
        decode = fl(1 / fl(2688 / np.asarray(amax, np.float64))).astype(np.float32)
        assert_same_bits(q.global_scale, np.asarray(decode), None, "global scale")


def test_constants_are_the_single_rounded_reciprocals() -> None:
    assert nm.RECIPROCAL_OF_6.view(np.uint32) == 0x3E2AAAAB
    assert nm.RECIPROCAL_OF_448.view(np.uint32) == 0x3B124925
