"""The Triton kernels against the reference, every byte, in Triton's interpreter: no GPU is needed.

It runs the very source that is compiled, so what is left to a card is what the compiler makes of it; what the
compiler makes of it without a card is in test_triton_compiled.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import numpy as np
import pytest
from bitwise import BF16, F16, F32, Array, bf16
from hostile import DTYPES, KINDS, weights
from test_golden import GOLDEN, VARIANTS, read_safetensors, variant_of
from variants import VARIANTS as OPTIONS
from variants import name_of

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

import interpreted  # noqa: E402
import test_discriminating as rows  # noqa: E402
import test_discriminating_nvfp4 as nv  # noqa: E402
import test_discriminating_tiles as tiles  # noqa: E402

Variant = tuple[str, dict[str, Any]]
Run = Callable[..., Any]
ODD_BLOCK = (3, 5)
CASES: list[Variant] = [variant for variant in OPTIONS if variant[0] != "int4_group"]
NVFP4 = [variant for variant in CASES if variant[0] == "nvfp4"]


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """Call a function of interpreted.py in a process whose Triton interprets."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        patch.setenv("PYTHONWARNINGS", "ignore")  # numpy's, about the overflow that these tests provoke
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            assert pool.submit(interpreted.is_interpreted).result()  # the worker has started
            patch.undo()
            yield lambda function, *args: pool.submit(function, *args).result()


def every_variant(cases: list[Variant]) -> Any:
    return pytest.mark.parametrize("variant", cases, ids=map(name_of, cases))


def shape_for(variant: Variant) -> tuple[int, int]:
    """Ragged where the format allows it; small where a program has few elements, since each costs milliseconds."""
    block = variant[1].get("block", (1, 32))
    if variant[0] == "fp8_block":
        return (4, 8) if block == ODD_BLOCK else (9, 130)
    return (block[0], 96)


# ---- random, golden ------------------------------------------------------------------------------------


EVERY_CASE = [(v, dtype) for v in CASES for dtype in DTYPES if dtype != F16 or not v[1].get("four_over_six")]


@pytest.mark.parametrize(("variant", "dtype"), EVERY_CASE, ids=[f"{name_of(v)}-{dtype}" for v, dtype in EVERY_CASE])
def test_every_byte(run, variant, dtype) -> None:
    """A stack of matrices, one of each kind, as experts would be: one launch."""
    random = np.random.default_rng(0)
    x = np.stack([kind(random, shape_for(variant), dtype) for kind in KINDS])
    assert run(interpreted.compare, variant, x) > x.size


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_golden_files(run, path) -> None:
    variant = VARIANTS[variant_of(path)]
    golden = read_safetensors(path)
    amax = golden["amax"].reshape(-1 if "row" in path.stem else ()) if "amax" in golden else None
    run(interpreted.compare_bytes, variant, golden["x"], amax)


@pytest.mark.parametrize("shape", [(0, 32), (32, 0), (0, 32, 32), (2, 0, 32)], ids=str)
@every_variant([("fp8_block", {}), ("mxfp8", {}), ("mxfp4", {}), ("nvfp4", {}), ("nvfp4", {"outer": "row"})])
def test_no_elements(run, variant, shape) -> None:
    run(interpreted.compare, variant, np.zeros(shape, BF16))


@every_variant([variant for variant in CASES if variant[1].get("block") != ODD_BLOCK])
def test_nothing_but_nan(run, variant) -> None:
    """A block of NaN alone has amax 0, or NaN; beside it there is an ordinary one."""
    x = np.ones((2, *shape_for(variant)), BF16)
    x[0] = np.nan
    run(interpreted.compare_bytes, variant, x)


# ---- inputs that tell implementations apart -----------------------------------------------------------


def one_a_row(table: list[tuple], columns: int, dtype: np.dtype) -> Array:
    """A row for each value that the dtype holds, and one for its negative: zero but for the first element."""
    values = [row[0] for row in table if dtype in rows.dtypes_that_hold(np.float32(row[0]))]
    return np.concatenate(
        [rows.alone(np.float32(sign * np.float32(v)), dtype, columns) for v in values for sign in (1, -1)]
    )


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@every_variant([variant for variant in CASES if variant[0] != "nvfp4" and variant[1].get("block") != ODD_BLOCK])
def test_discriminating_amax(run, variant, dtype) -> None:
    table = {"fp8_block": rows.FP8_AMAX, "mxfp8": rows.MXFP8_AMAX, "mxfp4": rows.MXFP4_AMAX}[variant[0]]
    x = one_a_row(table, 128, dtype)
    if variant[1].get("block", (1, 1))[0] > 1:
        x = x[:, None]  # each its own block
    run(interpreted.compare, variant, x)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_discriminating_blocks(run, dtype) -> None:
    x = np.zeros((len(rows.MXFP8_BLOCKS), 32), dtype)
    for row, (values, _, _) in zip(x, rows.MXFP8_BLOCKS, strict=True):
        row[: len(values)] = values
    run(interpreted.compare, ("mxfp8", {}), x)
    run(interpreted.compare, ("mxfp4", {}), x)


def nvfp4_vectors(dtype: np.dtype) -> Array:
    """Every one-block vector of the NVFP4 tests beside the value that sets its global amax: [n, 1, 32]."""
    found = [nv.two_blocks(block, g, dtype) for block, g, _, _, dtypes in nv.CORNERS.values() if dtype in dtypes]
    for g, a, _ in nv.BLOCK_SCALE_ORDERS:
        found.append(nv.two_blocks([float(bf16(a)[0])], float(bf16(g)[0]), dtype))
    for g, a, x, *_ in nv.ELEMENT_ORDERS:
        values = [float(bf16(word)[0]) for word in (a, x)]
        found.append(nv.two_blocks([*values, -values[1]], float(bf16(g)[0]), dtype))
    found += [nv.two_blocks(block, 6.0, dtype) for block, *_ in nv.FOUR_OVER_SIX_BY_HAND]
    for param in nv.ADVERSARIAL:
        g, _, words, *_ = param.values
        found.append(nv.two_blocks(bf16(words).astype(np.float64).tolist(), g, dtype))
    return np.stack(found)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@every_variant(NVFP4)
def test_discriminating_nvfp4(run, variant, dtype) -> None:
    x = nvfp4_vectors(dtype)
    if variant[1].get("block") == (16, 16):
        x = np.repeat(x, 16, axis=1)
    run(interpreted.compare_bytes, variant, x)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_discriminating_tiles(run, dtype) -> None:
    """Tiles whose choice hangs on the order in which their row errors are added."""
    for g, largest, error, *_, words in tiles.TILES:
        x = np.zeros((16, 32), dtype)
        x[:, :16] = bf16(words).reshape(16, 16)
        x[0, 16] = g
        run(interpreted.compare_bytes, ("nvfp4", {"block": (16, 16), "four_over_six": error, "e4m3_max": largest}), x)


@every_variant([("nvfp4", {}), ("nvfp4", {"outer": "row"}), ("nvfp4", {"four_over_six": "mse", "e4m3_max": 256})])
def test_every_mantissa_of_the_global_amax(run, variant) -> None:
    """With one lucky global amax wrong formulas give the right bytes."""
    x = nv.X[:, :64] if variant[1].get("four_over_six") is None else nv.X[::2, :32]
    run(interpreted.compare_bytes, variant, np.ascontiguousarray(x))


# ---- views, amax, swizzle, casts -----------------------------------------------------------------------


@every_variant(
    [
        ("fp8_block", {}),
        ("fp8_block", {"block": (1, 128)}),
        ("mxfp8", {}),
        ("mxfp4", {}),
        ("nvfp4", {}),
        ("nvfp4", {"outer": "row"}),
        ("nvfp4", {"block": (16, 16)}),
        ("nvfp4", {"four_over_six": "mae", "e4m3_max": 256}),
    ]
)
def test_views_without_a_copy(run, variant) -> None:
    run(interpreted.compare_views, variant, weights(np.random.default_rng(1), (2, 64, 128), BF16))


@pytest.mark.parametrize("options", [{}, {"outer": "row"}], ids=["tensor", "row"])
def test_partners_share_the_larger_amax(run, options) -> None:
    random = np.random.default_rng(2)
    gate, up = (weights(random, (3, 32, 64), BF16) for _ in range(2))
    gate[1, 3, 5], up[2, 0, 0], up[0, 1, 1] = np.nan, -17.0, np.inf
    amax = run(interpreted.partner_amax, gate, up, options)
    wide = np.stack([np.abs(x.astype(np.float32)) for x in (gate, up)])
    want = np.where(np.isnan(wide), 0, wide).max(axis=(0, -1) if options else (0, -1, -2))
    assert (amax == want).all()
    run(interpreted.compare_bytes, ("nvfp4", options), up, amax)


def test_an_amax_that_is_given(run) -> None:
    x = weights(np.random.default_rng(3), (2, 32, 64), BF16)
    for values in ([3.5, 1e-3], [0.0, np.inf]):
        run(interpreted.compare, ("nvfp4", {}), x, np.array(values, np.float32))


@pytest.mark.parametrize("shape", [(1, 4), (127, 3), (128, 4), (129, 5), (200, 6), (256, 8), (2, 130, 40)], ids=str)
def test_swizzled_scales(run, shape) -> None:
    scale = np.random.default_rng(4).integers(1, 256, shape, np.uint8)
    *lead, m, c = shape
    want = np.zeros((*lead, -(-m // 128) * 128, -(-c // 4) * 4), np.uint8)
    flat = want.reshape(*lead, -1)
    for i in range(m):
        for j in range(c):
            at = ((i // 128) * -(-c // 4) + j // 4) * 512 + i % 32 * 16 + i % 128 // 32 * 4 + j % 4
            flat[..., at] = scale[..., i, j]
    assert (run(interpreted.swizzled, scale) == want).all()


def test_casts_of_every_bfloat16_and_its_neighbours(run) -> None:
    assert run(interpreted.compare_casts) == 1 << 18


# ---- refused -------------------------------------------------------------------------------------------


def test_refused(run) -> None:
    x = torch.zeros(2, 3, 32, 32)
    assert "int32" in run(interpreted.error_of, "quantize", ("mxfp8", {}), x.int())
    assert "not a multiple of 32" in run(interpreted.error_of, "quantize", ("mxfp4", {}), x[..., :30])
    assert "not a multiple of 16" in run(interpreted.error_of, "fake_quantize", ("nvfp4", {}), x[..., :30])
    assert "permuted" in run(interpreted.error_of, "quantize", ("mxfp8", {}), x.transpose(0, 1))
    assert "reference" in run(interpreted.error_of, "quantize", ("fp8_block", {"block": (256, 256)}), x)
