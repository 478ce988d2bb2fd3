"""Layouts, empty tensors, options and refusals."""

from __future__ import annotations

import dataclasses
import json
import math

import numpy as np
import pytest
from bitwise import BF16, F16, F32, assert_same_bits
from variants import EVERY_VARIANT, VARIANTS

import lowprec
from lowprec import backends
from lowprec.errors import BackendError, FormatError
from lowprec.formats import BUILTIN, get_format
from lowprec.qtensor import QTensor

E4M3 = "float8_e4m3fn"

# format, options, shape: qdata, scale, global scale as (shape, dtype)
LAYOUTS = [
    ("fp8_block", {}, (130, 200), ((130, 200), E4M3), ((2, 2), "float32"), None),
    ("fp8_block", {"block": (1, 128)}, (3, 130, 200), ((3, 130, 200), E4M3), ((3, 130, 2), "float32"), None),
    ("fp8_block", {}, (1, 1), ((1, 1), E4M3), ((1, 1), "float32"), None),
    ("fp8_block", {"block": (64, 32)}, (2, 2, 65, 33), ((2, 2, 65, 33), E4M3), ((2, 2, 2, 2), "float32"), None),
    ("mxfp8", {}, (5, 96), ((5, 96), E4M3), ((5, 3), "uint8"), None),
    ("mxfp4", {}, (4, 5, 96), ((4, 5, 48), "uint8"), ((4, 5, 3), "uint8"), None),
    ("nvfp4", {}, (5, 48), ((5, 24), "uint8"), ((5, 3), E4M3), ((), "float32")),
    ("nvfp4", {}, (7, 5, 48), ((7, 5, 24), "uint8"), ((7, 5, 3), E4M3), ((7,), "float32")),
    ("nvfp4", {"outer": "row"}, (7, 5, 48), ((7, 5, 24), "uint8"), ((7, 5, 3), E4M3), ((7, 5), "float32")),
    ("nvfp4", {"block": (16, 16)}, (32, 48), ((32, 24), "uint8"), ((32, 3), E4M3), ((), "float32")),
    ("int4_group", {}, (5, 64), ((5, 8), "int32"), ((5, 2), "bfloat16"), None),
    ("int4_group", {"group": 128}, (2, 5, 256), ((2, 5, 32), "int32"), ((2, 5, 2), "bfloat16"), None),
]


@pytest.mark.parametrize(("name", "values", "shape", "qdata", "scale", "outer"), LAYOUTS, ids=str)
def test_layout(name, values, shape, qdata, scale, outer) -> None:
    fmt = get_format(name)
    options = fmt.options.parse(values)
    said = [None if spec is None else (spec.shape, spec.dtype.name) for spec in fmt.layout(shape, options)]
    assert said == [qdata, scale, outer]
    q = lowprec.quantize(np.ones(shape, BF16), name, backend="reference", **values)
    made = [None if array is None else (array.shape, array.dtype.name) for array in q.arrays]
    assert made == said
    q.validate()
    assert q.nbytes == sum(
        math.prod(spec.shape) * spec.dtype.itemsize for spec in fmt.layout(shape, options) if spec is not None
    )
    assert q.codes().shape == shape == q.shape
    assert lowprec.dequantize(q).shape == shape


@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("shape", [(0, 128), (16, 0), (0, 0), (0, 16, 128), (3, 0, 128), (3, 16, 0)], ids=str)
@EVERY_VARIANT
def test_empty(variant, shape, dtype) -> None:
    q = lowprec.quantize(np.zeros(shape, dtype), variant[0], backend="reference", **variant[1])
    q.validate()
    assert q.codes().shape == shape
    values = lowprec.dequantize(q, dtype, backend="reference")
    assert (values.shape, values.dtype) == (shape, dtype)
    if q.global_scale is not None:
        assert (q.global_scale == 1).all()


@EVERY_VARIANT
def test_options_survive_json(variant) -> None:
    fmt = get_format(variant[0])
    options = fmt.options.parse(variant[1])
    plain = json.loads(json.dumps(options.to_json()))
    assert set(plain) == {"format", *(field.name for field in dataclasses.fields(options))}
    assert plain.pop("format") == variant[0]
    assert fmt.options.parse(plain) == options
    assert fmt.options(**variant[1]) == options  # plain words are understood by the record itself, too


def test_defaults_are_the_contracts() -> None:
    assert {name: get_format(name).options().to_json() for name in BUILTIN} == {
        "fp8_block": {"format": "fp8_block", "rule": "te", "scale": "fp32", "block": [128, 128]},
        "mxfp8": {"format": "mxfp8"},
        "nvfp4": {
            "format": "nvfp4", "outer": "tensor", "block": [1, 16], "four_over_six": "none", "e4m3_max": 448,
        },
        "mxfp4": {"format": "mxfp4", "scale_rule": "rceil"},
        "int4_group": {"format": "int4_group", "group": 32, "rule": "amax7"},
    }  # fmt: skip


def test_description_tells_every_two_variants_apart() -> None:
    """Options that give other bits have another description, so the digest tells them apart too."""
    described = {}
    for name, values in VARIANTS:
        fmt = get_format(name)
        rules = fmt.describe(fmt.options.parse(values))
        assert {"element", "block_shape", "ragged_edge", "amax_floor", "zero_block", "scale_codec", "scale",
                "encode", "packing", "decode", "source", "nonfinite_amax"} <= set(rules)  # fmt: skip
        text = json.dumps([name, rules], sort_keys=True)
        assert described.setdefault(text, (name, values)) == (name, values)
    assert len(described) == len(VARIANTS)


REFUSED_OPTIONS = [
    ("fp8_block", {"rule": "deepgem"}, "did you mean 'deepgemm'?"),
    ("fp8_block", {"scales": "fp32"}, "did you mean 'scale'?"),
    ("fp8_block", {"block": (128,)}, "must have 2 numbers"),
    ("fp8_block", {"block": (0, 128)}, "positive integers"),
    ("fp8_block", {"block": 128}, "positive integers"),
    ("mxfp8", {"block": 32}, "unknown option 'block'"),
    ("nvfp4", {"block": (16, 1)}, "[1, 16], [16, 16]"),
    ("nvfp4", {"outer": "rows"}, "did you mean 'row'?"),
    ("nvfp4", {"outer": "row", "block": (16, 16)}, "use outer = 'tensor'"),
    ("nvfp4", {"e4m3_max": 256}, "needs four_over_six"),
    ("nvfp4", {"e4m3_max": 240, "four_over_six": "mae"}, "known: 256, 448"),
    ("nvfp4", {"four_over_six": "maee"}, "did you mean 'mae'?"),
    ("nvfp4", {"four_over_six": True}, "four_over_six"),
    ("mxfp4", {"scale_rule": "ceil"}, "did you mean 'rceil'?"),
    ("int4_group", {"group": 64}, "known: 32, 128"),
    ("int4_group", {"group": "32"}, "must be of type int"),
    ("int4_group", {"rule": "amax8"}, "amax7"),
]


@pytest.mark.parametrize(("name", "values", "says"), REFUSED_OPTIONS, ids=str)
def test_wrong_options_are_refused(name, values, says) -> None:
    with pytest.raises(FormatError) as error:
        lowprec.quantize(np.zeros((16, 128), F32), name, **values)
    assert says in str(error.value)
    assert str(error.value).startswith(f"{name}: ")
    assert "\n" not in str(error.value)


REFUSED_TENSORS = [
    ("mxfp8", {}, np.zeros((2, 33), F32), "33 columns in shape [2, 33] are not a multiple of 32"),
    ("mxfp4", {}, np.zeros((2, 16), F32), "multiple of 32"),
    ("nvfp4", {}, np.zeros((2, 24), F32), "multiple of 16"),
    ("nvfp4", {"block": (16, 16)}, np.zeros((15, 32), F32), "15 rows"),
    ("int4_group", {"group": 128}, np.zeros((2, 64), F32), "multiple of 128"),
    ("fp8_block", {}, np.zeros(128, F32), "no rows and columns"),
    ("fp8_block", {}, np.zeros((), F32), "no rows and columns"),
    ("fp8_block", {}, np.zeros((2, 2), np.float64), "cannot quantize float64"),
    ("fp8_block", {}, np.zeros((2, 2), np.int32), "cannot quantize int32"),
    ("fp8_block", {}, np.zeros((2, 2), ">f4"), "cannot quantize"),
    ("fp8_block", {}, [[1.0, 2.0]], "a list cannot be quantized"),
    ("fp9_block", {}, np.zeros((2, 2), F32), "did you mean 'fp8_block'?"),
]


@pytest.mark.parametrize(("name", "values", "x", "says"), REFUSED_TENSORS, ids=lambda value: str(value)[:40])
def test_wrong_tensors_are_refused(name, values, x, says) -> None:
    with pytest.raises(FormatError) as error:
        lowprec.quantize(x, name, **values)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", BUILTIN)
def test_the_reference_itself_refuses(name) -> None:
    fmt = get_format(name)
    for x in (np.zeros((2, 2), np.float64), np.zeros(128, F32)):
        with pytest.raises(FormatError):
            fmt.quantize(x, fmt.options(), None)


def test_amax_argument() -> None:
    x = np.ones((3, 16, 32), F32)
    for amax in (2.0, 2, np.float32(2), np.full(3, 2, F32)):
        q = lowprec.quantize(x, "nvfp4", amax=amax)
        assert_same_bits(q.arrays.global_scale, lowprec.quantize(2 * x, "nvfp4").global_scale, None, "global scale")
    for amax, says in (
        (np.ones(2, F32), "amax has shape [2], it must be [3] or one number"),
        (-1.0, "negative or NaN"),
        (math.nan, "negative or NaN"),
        ("2", "a str cannot be"),
    ):
        with pytest.raises(FormatError, match=r"amax|cannot be") as error:
            lowprec.quantize(x, "nvfp4", amax=amax)
        assert says in str(error.value)
    with pytest.raises(FormatError, match="no global scale"):
        lowprec.quantize(x, "mxfp8", amax=1.0)


def test_options_record_and_words_together() -> None:
    options = get_format("nvfp4").options(outer="row")
    x = np.ones((4, 32), F32)
    assert lowprec.quantize(x, options).options == options
    assert lowprec.quantize(x, options, outer="tensor").options == get_format("nvfp4").options()


def test_result_dtype_is_refused_with_the_nearest() -> None:
    q = lowprec.quantize(np.ones((4, 32), F32), "mxfp8")
    for dtype in ("bf16", np.float64, np.int8, "float8_e4m3fn"):
        with pytest.raises(FormatError, match="cannot dequantize to"):
            lowprec.dequantize(q, dtype)
    assert lowprec.dequantize(q).dtype == BF16


def broken(q: QTensor, **changes) -> QTensor:
    return dataclasses.replace(q, **changes)


def test_validate_names_the_array() -> None:
    q = lowprec.quantize(np.ones((32, 64), F32), "nvfp4")
    faults = [
        (broken(q, scale=q.scale[:, :-1]), "scale", "float8_e4m3fn [32, 3], it must be float8_e4m3fn [32, 4]"),
        (broken(q, scale=q.scale.view(np.uint8)), "scale", "uint8 [32, 4], it must be float8_e4m3fn [32, 4]"),
        (broken(q, qdata=q.qdata.astype(np.int32)), "qdata", "int32 [32, 32], it must be uint8"),
        (broken(q, qdata=np.asfortranarray(q.qdata)), "qdata", "not contiguous"),
        (broken(q, global_scale=None), "global_scale", "is missing"),
        (broken(q, global_scale=q.global_scale[None]), "global_scale", "float32 [1], it must be float32 []"),
        (broken(q, shape=(32, 48)), "qdata", "it must be uint8 [32, 24]"),
    ]  # fmt: skip
    for wrong, array, says in faults:
        with pytest.raises(FormatError) as error:
            wrong.validate()
        assert f"nvfp4: {array} of a tensor" in str(error.value)
        assert says in str(error.value)
        with pytest.raises(FormatError):
            lowprec.dequantize(wrong)
    mx = lowprec.quantize(np.ones((32, 64), F32), "mxfp8")
    with pytest.raises(FormatError, match=r"global_scale .* must be None"):
        broken(mx, global_scale=q.global_scale).validate()


# ---- backends ------------------------------------------------------------------------------------------


def test_unknown_backend_lists_what_is_there() -> None:
    with pytest.raises(BackendError, match=r"no backend 'referense' for mxfp8.*did you mean 'reference'"):
        lowprec.quantize(np.ones((4, 32), F32), "mxfp8", backend="referense")
    with pytest.raises(BackendError, match=r"known: .*auto.*reference"):
        lowprec.quantize(np.ones((4, 32), F32), "mxfp8", backend="zzz")
    assert backends.available("mxfp8")[-1] == "reference"


KERNEL = """
from lowprec.formats import mxfp8

CALLS = []

def quantize(x, options, amax=None):
    CALLS.append("quantize")
    return mxfp8.quantize(x, options, amax)

def dequantize(quantized, options, dtype):
    CALLS.append("dequantize")
    return mxfp8.dequantize(quantized, options, dtype)
"""


def test_a_kernel_is_loaded_by_the_name_of_its_folder(tmp_path, monkeypatch) -> None:
    import lowprec.kernels

    folder = tmp_path / "from_a_test"
    folder.mkdir()
    (folder / "mxfp8.py").write_text(KERNEL)
    monkeypatch.setattr(lowprec.kernels, "__path__", [*lowprec.kernels.__path__, str(tmp_path)])
    x = np.random.default_rng(0).normal(size=(4, 64)).astype(F32)
    assert "from_a_test" in backends.available("mxfp8")
    assert "from_a_test" not in backends.available("mxfp4")
    q = lowprec.quantize(x, "mxfp8", backend="from_a_test")
    values = lowprec.dequantize(q, backend="from_a_test")
    assert_same_bits(values, lowprec.fake_quantize(x, "mxfp8").astype(BF16), x, "values")
    import lowprec.kernels.from_a_test.mxfp8 as kernel

    assert kernel.CALLS == ["quantize", "dequantize"]


@pytest.mark.parametrize(("name", "values"), VARIANTS[:1] + VARIANTS[18:23], ids=str)
def test_temporaries_stay_small(name, values) -> None:
    """Beyond the result, a few MiB whatever the tensor's size."""
    import tracemalloc

    x = np.ones((256, 16384), BF16)
    lowprec.quantize(x[:, :256], name, backend="reference", **values)
    tracemalloc.start()
    try:
        q = lowprec.quantize(x, name, backend="reference", **values)
        made = tracemalloc.get_traced_memory()[1] - q.nbytes
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        values_again = lowprec.dequantize(q, backend="reference")
        read = tracemalloc.get_traced_memory()[1] - before - values_again.nbytes
    finally:
        tracemalloc.stop()
    assert made < 4 << 20
    assert read < 4 << 20
