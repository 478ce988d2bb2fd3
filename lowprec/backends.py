"""quantize, dequantize, fake_quantize: a format, its options and a backend, on numpy arrays or torch tensors.

The backend "reference" is the numpy function of the format's own file, run tile by tile so that its
temporaries stay in the cache. Another backend is a module `lowprec.kernels.<backend>.<format>` with the
reference's two functions and the same bytes; it is loaded by name. One with `TAKES_TORCH = True` works on torch
tensors where they are, and then nothing here copies to the host or waits for the device.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
import sys
from typing import Any, NamedTuple

import numpy as np

from . import tiles
from .errors import BackendError, FormatError, did_you_mean
from .formats import BUILTIN, get_format
from .formats.base import INPUT_DTYPES, Array, Format, Options, Quantized, Shape, check_input
from .qtensor import QTensor, dtype_of, is_torch, like, to_numpy

REFERENCE = "reference"
AUTO = ("cpu", REFERENCE)  # "auto" takes the first of these that is there: the fastest first
AUTO_ON_GPU = ("triton", *AUTO)  # for a torch tensor on a GPU


def quantize(x: Any, format: str | Options, *, backend: str = "auto", amax: Any = None, **options: Any) -> QTensor:
    """Quantize a tensor.

    Args:
        x: [.., M, K] in float32, float16 or bfloat16, of any strides: a numpy array, or a torch tensor, whose
            QTensor then holds torch tensors on the same device.
        format: the name of a format with its `options` as words, or its options record.
        backend: "auto", "reference", or the name of a folder of kernels. All give the same bytes.
        amax: the global amax to use instead of the tensor's own (float32, one a matrix or a row, or one
            number), for tensors that share one. Only for a format with a global scale.
        options: see the format's file; what is left out has its default.

    Raises:
        FormatError: an unknown format or option, or a tensor that the format cannot hold.
        BackendError: the backend is not there.
    """
    chosen = _options(format, options)
    fmt = get_format(chosen.format)
    kernel = _load(backend, fmt, x)
    if _takes_torch(kernel):
        result = kernel.quantize(_tensor(x, backend), chosen, _given_tensor(fmt, chosen, x, amax))
        return QTensor(**result._asdict(), options=chosen, shape=tuple(x.shape))
    array = to_numpy(x)
    check_input(fmt.name, array)
    fmt.layout(array.shape, chosen)  # refuses a shape that it cannot hold before any backend is asked
    given = None if amax is None else _given_amax(fmt, chosen, array.shape, amax)
    if kernel is None:
        result = tiles.quantize(fmt, array, chosen, given)
    else:
        result = Quantized(*kernel.quantize(array, chosen, given))
    return QTensor(
        qdata=like(result.qdata, x),
        scale=like(result.scale, x),
        global_scale=None if result.global_scale is None else like(result.global_scale, x),
        options=chosen,
        shape=array.shape,
    )


def dequantize(q: QTensor, dtype: Any = "bfloat16", *, backend: str = "auto") -> Any:
    """The values of a QTensor, [.., M, K] in `dtype`: the format's rule in float32, then one rounding.

    `dtype` is "float32", "float16" or "bfloat16", or numpy's or torch's object for one of them. The result is
    what the arrays of `q` are, numpy or torch.

    Raises:
        FormatError: arrays that do not fit the options and shape, or another dtype.
        BackendError: the backend is not there.
    """
    q.validate()
    fmt = get_format(q.format)
    target = _result_dtype(dtype)
    kernel = _load(backend, fmt, q.qdata)
    if _takes_torch(kernel):
        _tensor(q.qdata, backend)
        return kernel.dequantize(q.arrays, q.options, target.name)
    outer = None if q.global_scale is None else to_numpy(q.global_scale)
    arrays = Quantized(to_numpy(q.qdata), to_numpy(q.scale), outer)
    if kernel is None:
        result = tiles.dequantize(fmt, arrays, q.options, q.shape, target)
    else:
        result = kernel.dequantize(arrays, q.options, target)
    return like(result, q.qdata)


def fake_quantize(x: Any, format: str | Options, *, backend: str = "auto", amax: Any = None, **options: Any) -> Any:
    """`dequantize(quantize(x))` in the dtype of `x`: the values that are served. No gradient passes.

    A backend with a `fake_quantize` of its own gives them in one pass.
    """
    chosen = _options(format, options)
    fmt = get_format(chosen.format)
    kernel = _load(backend, fmt, x)
    if not hasattr(kernel, "fake_quantize"):
        return dequantize(quantize(x, chosen, backend=backend, amax=amax), dtype_of(x), backend=backend)
    if _takes_torch(kernel):
        return kernel.fake_quantize(_tensor(x, backend), chosen, _given_tensor(fmt, chosen, x, amax))
    array = to_numpy(x)
    check_input(fmt.name, array)
    given = None if amax is None else _given_amax(fmt, chosen, array.shape, amax)
    return like(kernel.fake_quantize(array, chosen, given), x)


def quantize_into(x: Array, options: Options, out: Quantized, amax: Array | None = None) -> None:
    """`quantize` on the fastest backend for the host, into arrays of the layout of `x`, or parts of larger ones.

    A tensor with one global amax for each matrix may come in stripes of `row_alignment` rows if `amax` is that of all
    of it. Raises FormatError.
    """
    fmt = get_format(options.format)
    check_input(fmt.name, x)
    given = None if amax is None else _given_amax(fmt, options, x.shape, amax)
    kernel = _load("auto", fmt, x)
    if kernel is None:
        tiles.quantize(fmt, x, options, given, out)
    else:
        kernel.quantize_into(x, options, out, given)


def dequantize_into(q: QTensor, y: Array) -> None:
    """`dequantize` on the fastest backend for the host, into an array of its shape. Raises FormatError."""
    q.validate()
    fmt = get_format(q.format)
    kernel = _load("auto", fmt, q.qdata)
    if kernel is None:
        tiles.dequantize(fmt, q.arrays, q.options, q.shape, y.dtype, y)
    else:
        kernel.dequantize_into(q.arrays, q.options, y)


def global_amax(x: Any, format: str | Options, *, backend: str = "auto", **options: Any) -> Any:
    """The global amax of a tensor, float32 [..] or [.., M]; None if the format has no global scale.

    Partners share the maximum of theirs: pass it to `quantize(amax=...)`. A numpy array, but a torch tensor on the
    device where the backend works there. A backend without a `global_amax` of its own leaves it to the reference; it is
    exact, so all give the same.
    """
    chosen = _options(format, options)
    fmt = get_format(chosen.format)
    if fmt.global_amax is None:
        check_input(fmt.name, to_numpy(x))
        return None
    kernel = _load(backend, fmt, x)
    if _takes_torch(kernel):
        return kernel.global_amax(_tensor(x, backend), chosen)
    array = to_numpy(x)
    check_input(fmt.name, array)
    if not hasattr(kernel, "global_amax"):
        return tiles.global_amax(fmt, array, chosen)
    return np.asarray(kernel.global_amax(array, chosen))


class BackendStatus(NamedTuple):
    """What `lowprec doctor` shows of a backend: whether it runs here, on what or why not, and its formats."""

    name: str
    active: bool
    detail: str
    formats: tuple[str, ...]


def status() -> list[BackendStatus]:
    """Every backend that is installed, the reference last. Never raises."""
    formats = {name: available(name) for name in BUILTIN}
    names = sorted({backend for backends in formats.values() for backend in backends} - {REFERENCE})
    found = [_status(name, tuple(fmt for fmt in BUILTIN if name in formats[fmt])) for name in names]
    return [*found, BackendStatus(REFERENCE, True, "numpy; the definition of every byte, and slow", BUILTIN)]


def _status(name: str, formats: tuple[str, ...]) -> BackendStatus:
    """A backend is active if all its kernels can be imported; its package may say more in `status() -> str`."""
    try:
        for format_name in formats:
            _import(name, format_name)
        say = getattr(importlib.import_module(f"lowprec.kernels.{name}"), "status", None)
        return BackendStatus(name, True, say() if say else "installed", formats)
    except BackendError as error:
        return BackendStatus(name, False, str(error), formats)


# ---- arguments -----------------------------------------------------------------------------------------


def _options(format: str | Options, options: dict[str, Any]) -> Options:
    if isinstance(format, str):
        parsed: Options = get_format(format).options.parse(options)
        return parsed
    if not options:
        return format
    known = {field.name: getattr(format, field.name) for field in dataclasses.fields(format)}
    return type(format).parse({**known, **options})


def _given_amax(fmt: Format, options: Options, shape: Shape, amax: Any) -> Array:
    spec = fmt.layout(shape, options).global_scale
    if spec is None:
        raise FormatError(f"{fmt.name}: amax was given, but this format has no global scale; leave it out")
    value = np.asarray(amax if isinstance(amax, int | float) else to_numpy(amax), dtype=np.float32)
    if value.ndim and value.shape != spec.shape:
        raise FormatError(
            f"{fmt.name}: amax has shape {list(value.shape)}, it must be {list(spec.shape)} or one number"
        )
    if np.isnan(value).any() or (value < 0).any():
        raise FormatError(f"{fmt.name}: amax has a negative or NaN value, give the largest |x|")
    return np.broadcast_to(value, spec.shape)


def _given_tensor(fmt: Format, options: Options, x: Any, amax: Any) -> Any:
    """`_given_amax` as a torch tensor beside `x`. Its values are not looked at: that would wait for the device."""
    if amax is None:
        return None
    shape = tuple(x.shape)
    if isinstance(amax, int | float) or not is_torch(amax):
        return like(np.array(_given_amax(fmt, options, shape, amax)), x)
    spec = fmt.layout(shape, options).global_scale
    if spec is None or (amax.ndim and tuple(amax.shape) != spec.shape) or amax.device != x.device:
        _given_amax(fmt, options, shape, amax)  # says what is wrong with it, unless it is the device
        raise FormatError(f"{fmt.name}: amax is on {amax.device}, the tensor on {x.device}; move one to the other")
    return amax.detach().float().expand(spec.shape)


def _tensor(x: Any, backend: str) -> Any:
    if not is_torch(x):
        raise BackendError(f"backend '{backend}' takes torch tensors, this is a {type(x).__name__}; use backend='auto'")
    return x.detach()


def _result_dtype(dtype: Any) -> np.dtype[Any]:
    try:
        name = np.dtype(dtype).name
    except TypeError:
        name = str(dtype).removeprefix("torch.")
    for known in INPUT_DTYPES:
        if known.name == name:
            return known
    raise FormatError(f"cannot dequantize to '{name}'{did_you_mean(name, [known.name for known in INPUT_DTYPES])}")


# ---- kernels -------------------------------------------------------------------------------------------


def available(format_name: str) -> list[str]:
    """The backends that have a kernel for a format; "reference" is always one."""
    try:
        kernels = importlib.import_module("lowprec.kernels")
    except ModuleNotFoundError:
        return [REFERENCE]
    found = {
        name
        for folder in kernels.__path__
        for name in os.listdir(folder)
        if os.path.isfile(os.path.join(folder, name, f"{format_name}.py"))
    }
    return [*sorted(found), REFERENCE]


def _load(backend: str, fmt: Format, x: Any) -> Any:
    """The kernel module for `x`, or None for the reference."""
    known = available(fmt.name)
    if backend == "auto":
        for name in AUTO_ON_GPU if _on_nvidia(x) else AUTO:
            if name in known:
                try:
                    return _load(name, fmt, x)
                except BackendError:  # its library is not there
                    continue
    if backend not in known:
        raise BackendError(f"no backend '{backend}' for {fmt.name}{did_you_mean(backend, ['auto', *known])}")
    return None if backend == REFERENCE else _import(backend, fmt.name)


def _import(backend: str, format_name: str) -> Any:
    """A kernel module. Raises BackendError if the backend cannot run here."""
    try:
        kernel = importlib.import_module(f"lowprec.kernels.{backend}.{format_name}")
    except ModuleNotFoundError as error:
        if (error.name or "lowprec").partition(".")[0] == "lowprec":
            raise  # a fault of ours
        raise BackendError(f"backend '{backend}' needs the package '{error.name}', which is not installed") from error
    why = kernel.unavailable() if hasattr(kernel, "unavailable") else None
    if why:
        raise BackendError(why)
    return kernel


def _on_nvidia(x: Any) -> bool:
    return is_torch(x) and x.device.type == "cuda" and sys.modules["torch"].version.hip is None


def _takes_torch(kernel: Any) -> bool:
    return bool(getattr(kernel, "TAKES_TORCH", False))
