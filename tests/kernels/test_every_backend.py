"""Every file kernels/<backend>/<format>.py against the reference: a new one is tested by existing."""

from __future__ import annotations

import numpy as np
import pytest
from bitwise import Array
from hostile import DTYPES, KINDS, Kernel, assert_same_as_reference, assert_same_values, found, load
from test_golden import GOLDEN, VARIANTS, read_safetensors, variant_of
from variants import VARIANTS as OPTIONS
from variants import name_of

from lowprec.errors import BackendError, FormatError
from lowprec.formats import BUILTIN, get_format
from lowprec.formats.base import Quantized

SHAPES = ((32, 256), (3, 16, 128), (2, 3, 16, 128), (130, 200), (33, 7), (1, 1), (0, 128), (16, 0), (2, 0, 128))
CASES = [(backend, variant) for backend, name in found() for variant in OPTIONS if variant[0] == name]
EVERY_CASE = pytest.mark.parametrize(
    ("backend", "variant"), CASES, ids=[f"{backend}-{name_of(variant)}" for backend, variant in CASES]
)


def kernel_of(backend: str, format_name: str) -> Kernel:
    """The kernel, or a skip that says why it does not run here. The CPU's must run everywhere."""
    try:
        kernel = load(backend, format_name)
        x = np.ones((16, 128), np.float32)
        kernel.quantize(x, kernel.format.options())
    except (BackendError, ImportError) as error:
        if backend == "cpu":
            raise
        pytest.skip(f"{backend}: {error}")
    return kernel


def test_the_cpu_backend_has_every_format() -> None:
    assert {name for backend, name in found() if backend == "cpu"} == set(BUILTIN)


@EVERY_CASE
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_byte(backend, variant, dtype) -> None:
    kernel = kernel_of(backend, variant[0])
    options = kernel.format.options.parse(variant[1])
    random = np.random.default_rng(0)
    compared = 0
    for shape in SHAPES:
        try:
            kernel.format.layout(shape, options)
        except FormatError:
            with pytest.raises(FormatError):
                kernel.quantize(np.zeros(shape, dtype), options)
            continue
        for kind in KINDS:
            compared += assert_same_as_reference(kernel, kind(random, shape, dtype), options)
    assert compared > 100_000


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
@pytest.mark.parametrize("backend", sorted({backend for backend, _ in found()}))
def test_golden_files(backend, path) -> None:
    name, values = VARIANTS[variant_of(path)]
    if (backend, name) not in found():
        pytest.skip(f"kernels/{backend} has no {name}")
    kernel = kernel_of(backend, name)
    golden = read_safetensors(path)
    options = kernel.format.options.parse(values)
    assert_same_as_reference(kernel, golden["x"], options)
    if "amax" in golden:
        shape = kernel.format.layout(golden["x"].shape, options).global_scale.shape
        assert_same_as_reference(kernel, golden["x"], options, golden["amax"].reshape(shape))


def any_arrays(variant: tuple[str, dict], shape: tuple[int, ...]) -> Quantized:
    """Every code, beside every scale byte: what a file may hold, not only what quantizing makes."""
    random = np.random.default_rng(3)
    fmt = get_format(variant[0])
    layout = fmt.layout(shape, fmt.options.parse(variant[1]))

    def fill(spec) -> Array:
        if spec.dtype.itemsize == 1 or spec.dtype == np.int32:
            size = int(np.prod(spec.shape)) * spec.dtype.itemsize
            return random.integers(0, 256, size, np.uint8).view(spec.dtype).reshape(spec.shape)
        values = np.asarray(np.exp2(random.uniform(-140, 127, spec.shape)), dtype=np.float32)
        if values.size > 8:
            values.reshape(-1)[:3] = 0, np.inf, np.nan
        return values.astype(spec.dtype)

    return Quantized(*(None if spec is None else fill(spec) for spec in layout))


@EVERY_CASE
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_decodes_whatever_is_stored(backend, variant, dtype) -> None:
    kernel = kernel_of(backend, variant[0])
    options = kernel.format.options.parse(variant[1])
    assert_same_values(kernel, any_arrays(variant, (256, 512)), options, dtype)
