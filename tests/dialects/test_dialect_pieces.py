"""Every format, option and shape that a dialect has: what is stored, read back to the same bits, and nothing else."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from types import MappingProxyType

import ml_dtypes
import numpy as np
import pytest

from lowprec.dialects import get_dialect, list_dialects
from lowprec.errors import CheckpointError, PlanError
from lowprec.formats import get_format
from lowprec.formats.base import Array, Options, Shape
from lowprec.formats.fp8_block import Fp8BlockOptions, Rule, Scale
from lowprec.formats.int4_group import Int4GroupOptions
from lowprec.formats.int4_group import Rule as Int4Rule
from lowprec.formats.mxfp4 import Mxfp4Options, ScaleRule
from lowprec.formats.mxfp8 import Mxfp8Options
from lowprec.formats.nvfp4 import FourOverSix, Nvfp4Options, Outer
from lowprec.qtensor import QTensor

FP8 = [
    Fp8BlockOptions(rule=rule, scale=scale, block=block)
    for rule, scale, block in itertools.product(Rule, Scale, ((128, 128), (64, 64), (1, 128)))
]
NVFP4 = [
    Nvfp4Options(block=block, four_over_six=mode, e4m3_max=maximum)
    for block, mode, maximum in itertools.product(((1, 16), (16, 16)), (None, *FourOverSix), (448, 256))
    if maximum == 448 or mode is not None
]
MXFP4 = [Mxfp4Options(scale_rule=rule) for rule in ScaleRule]
INT4 = [Int4GroupOptions(group=group, rule=rule) for group, rule in itertools.product((32, 128), Int4Rule)]
HELD: Mapping[str, list[Options]] = MappingProxyType(
    {
        "deepseek_fp8": FP8,
        "sglang_mxfp8": [Mxfp8Options()],
        "vllm_mxfp8": [Mxfp8Options()],
        "modelopt_nvfp4": NVFP4,
        "compressed_tensors": [*MXFP4, *INT4],
    }
)
SHAPES: list[Shape] = [(16, 128), (128, 256), (144, 384)]
RAGGED_FP8: list[Shape] = [(130, 200), (1, 1), (129, 128), (0, 128)]
CASES = [(dialect, options, shape) for dialect, held in HELD.items() for options in held for shape in SHAPES]
CASES += [("deepseek_fp8", options, shape) for options in FP8 for shape in RAGGED_FP8]


def quantized(options: Options, shape: Shape) -> QTensor:
    x = np.random.default_rng(7).standard_normal(shape).astype(ml_dtypes.bfloat16)
    arrays = get_format(options.format).quantize(x, options, None)
    return QTensor(
        qdata=arrays.qdata, scale=arrays.scale, global_scale=arrays.global_scale, options=options, shape=shape
    )


def same_bytes(ours: Array | None, theirs: Array | None) -> bool:
    if ours is None or theirs is None:
        return ours is theirs
    return ours.dtype == theirs.dtype and ours.shape == theirs.shape and ours.tobytes() == theirs.tobytes()


@pytest.mark.parametrize(("name", "options", "shape"), CASES, ids=str)
def test_decode_is_the_inverse_of_encode(name: str, options: Options, shape: Shape) -> None:
    dialect, tensor = get_dialect(name), quantized(options, shape)
    stored = dialect.encode(tensor)
    back = dialect.decode(options, shape, stored)
    assert (back.options, back.shape) == (options, shape)
    assert same_bytes(back.qdata, tensor.qdata)
    assert same_bytes(back.scale, tensor.scale)
    assert same_bytes(back.global_scale, tensor.global_scale)


# Written by hand from the tables of the engines' loaders, for a weight of shape [144, 384].
STORED = [
    ("deepseek_fp8", Fp8BlockOptions(), {"weight": ("F8_E4M3", (144, 384)), "weight_scale_inv": ("F32", (2, 3))}),
    (
        "deepseek_fp8",
        Fp8BlockOptions(scale=Scale.POW2, block=(64, 64)),
        {"weight": ("F8_E4M3", (144, 384)), "weight_scale_inv": ("F32", (3, 6))},
    ),
    ("sglang_mxfp8", Mxfp8Options(), {"weight": ("F8_E4M3", (144, 384)), "weight_scale_inv": ("U8", (144, 12))}),
    ("vllm_mxfp8", Mxfp8Options(), {"weight": ("F8_E4M3", (144, 384)), "weight_scale": ("U8", (144, 12))}),
    (
        "modelopt_nvfp4",
        Nvfp4Options(),
        {
            "weight": ("U8", (144, 192)),
            "weight_scale": ("F8_E4M3", (144, 24)),
            "weight_scale_2": ("F32", ()),
            "input_scale": ("F32", ()),
        },
    ),
    ("compressed_tensors", Mxfp4Options(), {"weight_packed": ("U8", (144, 192)), "weight_scale": ("U8", (144, 12))}),
    (
        "compressed_tensors",
        Int4GroupOptions(group=128),
        {"weight_packed": ("I32", (144, 48)), "weight_scale": ("BF16", (144, 3)), "weight_shape": ("I64", (2,))},
    ),
]
DTYPES = {
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "BF16": ml_dtypes.bfloat16,
    "F32": np.float32,
    "I32": np.int32,
    "I64": np.int64,
    "U8": np.uint8,
}


@pytest.mark.parametrize(("name", "options", "expected"), STORED, ids=str)
def test_dtype_and_shape_of_every_piece(
    name: str, options: Options, expected: dict[str, tuple[str, tuple[int, ...]]]
) -> None:
    dialect, shape = get_dialect(name), (144, 384)
    assert dict(dialect.parts(options, shape)) == expected
    arrays = dialect.encode(quantized(options, shape))
    assert {word: (array.dtype, array.shape) for word, array in arrays.items()} == {
        word: (np.dtype(DTYPES[dtype]), stored) for word, (dtype, stored) in expected.items()
    }
    infos = dialect.infos("model.layers.0.mlp.up_proj.weight", options, shape)
    assert {info.name: (info.dtype, info.shape) for info in infos} == {
        f"model.layers.0.mlp.up_proj.{word}": piece for word, piece in expected.items()
    }


def test_values_that_are_not_arrays_of_the_tensor() -> None:
    int4 = get_dialect("compressed_tensors").encode(quantized(Int4GroupOptions(), (144, 384)))
    assert int4["weight_shape"].tolist() == [144, 384]
    nvfp4 = get_dialect("modelopt_nvfp4").encode(quantized(Nvfp4Options(), (144, 384)))
    assert float(nvfp4["input_scale"]) == 1.0


@pytest.mark.parametrize(("name", "options", "expected"), STORED, ids=str)
def test_every_wrong_piece_is_refused(
    name: str, options: Options, expected: dict[str, tuple[str, tuple[int, ...]]]
) -> None:
    dialect, shape = get_dialect(name), (144, 384)
    good = dict(dialect.encode(quantized(options, shape)))
    for word in expected:
        wrong = [np.zeros(good[word].shape, np.float16), np.concatenate([good[word].reshape(-1)] * 2)]
        if good[word].ndim == 2:
            wrong.append(good[word].T)
        for array in wrong:
            with pytest.raises(CheckpointError, match=word):
                dialect.decode(options, shape, {**good, word: array})
        without = {key: value for key, value in good.items() if key != word}
        if word == "input_scale":
            assert dialect.decode(options, shape, without).shape == shape
            continue
        with pytest.raises(CheckpointError, match=f"its {word} is missing"):
            dialect.decode(options, shape, without)
    with pytest.raises(CheckpointError, match="not a piece"):
        dialect.decode(options, shape, {**good, "weight_zero_point": good[word]})


def test_what_is_written_is_checked_too() -> None:
    tensor = quantized(Fp8BlockOptions(), (128, 128))
    broken = QTensor(
        qdata=tensor.qdata.view(np.uint8),
        scale=tensor.scale,
        global_scale=None,
        options=tensor.options,
        shape=tensor.shape,
    )
    with pytest.raises(CheckpointError, match="weight F8_E4M3"):
        get_dialect("deepseek_fp8").encode(broken)


def test_scales_typed_as_e8m0_are_refused() -> None:
    """SGLang loads them as zeros."""
    dialect, options = get_dialect("sglang_mxfp8"), Mxfp8Options()
    good = dict(dialect.encode(quantized(options, (16, 128))))
    good["weight_scale_inv"] = good["weight_scale_inv"].view(ml_dtypes.float8_e8m0fnu)
    with pytest.raises(CheckpointError, match=r"float8_e8m0fnu.*weight_scale_inv U8"):
        dialect.decode(options, (16, 128), good)


def test_a_weight_shape_that_lies_is_refused() -> None:
    dialect, options = get_dialect("compressed_tensors"), Int4GroupOptions()
    good = dict(dialect.encode(quantized(options, (16, 128))))
    assert dialect.decode(options, (16, 128), {**good, "weight_shape": np.array([16, 128], np.int32)}).shape == (
        16,
        128,
    )
    with pytest.raises(CheckpointError, match=r"weight_shape holds \[128, 16\]"):
        dialect.decode(options, (16, 128), {**good, "weight_shape": np.array([128, 16], np.int64)})


REFUSED = [
    ("deepseek_fp8", Mxfp8Options(), (16, 128), "no spelling for mxfp8"),
    ("sglang_mxfp8", Nvfp4Options(), (16, 128), "no spelling for nvfp4"),
    ("vllm_mxfp8", Fp8BlockOptions(), (16, 128), "no spelling for fp8_block"),
    ("modelopt_nvfp4", Mxfp4Options(), (16, 128), "no spelling for mxfp4"),
    ("modelopt_nvfp4", Nvfp4Options(outer=Outer.ROW), (16, 128), "one global scale a weight"),
    ("compressed_tensors", Nvfp4Options(), (16, 128), "no spelling for nvfp4"),
    ("compressed_tensors", Int4GroupOptions(group=128), (16, 160), "compressed_tensors: int4_group"),
    ("deepseek_fp8", Fp8BlockOptions(), (4, 128, 128), "stores matrices"),
    ("deepseek_fp8", Fp8BlockOptions(), (128,), "stores matrices"),
    ("bf16", Fp8BlockOptions(), (128, 128), "a bf16 checkpoint holds no fp8_block weight"),
]


@pytest.mark.parametrize(("name", "options", "shape", "message"), REFUSED, ids=str)
def test_what_a_dialect_cannot_spell_is_a_plan_error(name: str, options: Options, shape: Shape, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        get_dialect(name).parts(options, shape)


def test_formats_and_dialects_fit_each_other() -> None:
    """No pair is missing from HELD: everything else is refused."""
    options = [Fp8BlockOptions(), Mxfp8Options(), Nvfp4Options(), Mxfp4Options(), Int4GroupOptions()]
    for name, one in itertools.product(list_dialects(), options):
        if type(one) in {type(held) for held in HELD.get(name, [])}:
            assert get_dialect(name).parts(one, (128, 128))
        else:
            with pytest.raises(PlanError):
                get_dialect(name).parts(one, (128, 128))


def test_an_unknown_dialect_names_the_nearest() -> None:
    with pytest.raises(PlanError, match="did you mean 'deepseek_fp8'"):
        get_dialect("deepseek_fp")
