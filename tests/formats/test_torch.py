"""torch tensors in, torch tensors out: the bytes are numpy's, and nothing is copied that need not be."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from bitwise import BF16, F16, F32, assert_same_bits
from variants import EVERY_VARIANT, VARIANTS

import lowprec
from lowprec.errors import FormatError
from lowprec.formats import get_format
from lowprec.qtensor import like, to_numpy

torch = pytest.importorskip("torch")

TORCH = {F32: torch.float32, F16: torch.float16, BF16: torch.bfloat16}
DTYPES = pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=lambda dtype: dtype.name)


def tensor(x: np.ndarray) -> torch.Tensor:
    """The same bits, made by torch."""
    raw = torch.from_numpy(x.view(f"i{x.dtype.itemsize}").copy())
    return raw.view(TORCH[x.dtype])


def raw(x: torch.Tensor) -> np.ndarray:
    """The bits, read by torch."""
    size = x.element_size()
    return x.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[size]).numpy().view(f"u{size}")


@DTYPES
@EVERY_VARIANT
def test_same_bytes_as_numpy(variant, dtype) -> None:
    x = np.random.default_rng(1).normal(size=(2, 32, 256)).astype(dtype)
    ours = lowprec.quantize(x, variant[0], **variant[1])
    theirs = lowprec.quantize(tensor(x), variant[0], **variant[1])
    theirs.validate()
    layout = get_format(variant[0]).layout(x.shape, theirs.options)
    for array, ten, spec in zip(ours.arrays, theirs.arrays, layout, strict=True):
        if spec is None:
            assert array is ten is None
            continue
        assert isinstance(ten, torch.Tensor)
        assert ten.dtype == getattr(torch, spec.dtype.name)
        assert (raw(ten) == array.view(f"u{array.itemsize}")).all()
    assert theirs.nbytes == ours.nbytes
    codes = theirs.codes()
    assert codes.dtype == torch.uint8
    assert_same_bits(codes.numpy(), ours.codes(), x, "codes")
    for result in (F32, F16, BF16):
        values = lowprec.dequantize(theirs, TORCH[result])
        assert values.dtype == TORCH[result]
        assert (raw(values) == lowprec.dequantize(ours, result).view(f"u{result.itemsize}")).all()
    fake = lowprec.fake_quantize(tensor(x), variant[0], **variant[1])
    assert fake.dtype == TORCH[dtype]
    assert (raw(fake) == lowprec.fake_quantize(x, variant[0], **variant[1]).view(f"u{dtype.itemsize}")).all()


@DTYPES
def test_views_share_memory(dtype) -> None:
    x = np.arange(6, dtype=np.float32).reshape(2, 3).astype(dtype)
    t = tensor(x)
    assert to_numpy(t).ctypes.data == t.data_ptr()
    assert_same_bits(to_numpy(t), x)
    assert_same_bits(to_numpy(t.t()), np.ascontiguousarray(x.T))
    back = like(x, t)
    assert back.data_ptr() == x.ctypes.data
    assert back.dtype == TORCH[dtype]
    assert like(np.zeros((), np.float32), t).shape == ()


@DTYPES
def test_strides(dtype) -> None:
    x = np.random.default_rng(2).normal(size=(64, 64)).astype(dtype)
    want = lowprec.quantize(np.ascontiguousarray(x.T)[::2], "nvfp4")
    got = lowprec.quantize(tensor(x).t()[::2], "nvfp4")
    assert_same_bits(got.codes().numpy(), want.codes(), None, "codes")
    assert_same_bits(raw(got.scale), want.scale.view(np.uint8), None, "scale")


def test_parameters_and_gradients() -> None:
    """A parameter is read without its graph; the result has none."""
    p = torch.nn.Parameter(torch.randn(16, 32, generator=torch.Generator().manual_seed(0)))
    q = lowprec.quantize(p, "mxfp8")
    assert type(q.qdata) is torch.Tensor
    assert not lowprec.fake_quantize(p, "mxfp8").requires_grad


def test_given_amax_as_a_tensor() -> None:
    x = torch.ones(2, 16, 32)
    q = lowprec.quantize(x, "nvfp4", amax=torch.tensor([2.0, 4.0]))
    want = lowprec.quantize(x.numpy(), "nvfp4", amax=np.array([2, 4], F32))
    assert_same_bits(q.global_scale.numpy(), want.global_scale, None, "global scale")


def test_refusals() -> None:
    with pytest.raises(FormatError, match="a float64 tensor cannot be used"):
        lowprec.quantize(torch.ones(2, 32, dtype=torch.float64), "mxfp8")
    with pytest.raises(FormatError, match="no rows and columns"):
        lowprec.quantize(torch.ones(32), "mxfp8")
    with pytest.raises(FormatError, match="cannot quantize uint8"):
        lowprec.quantize(torch.ones(2, 32, dtype=torch.uint8), "mxfp8")
    q = lowprec.quantize(torch.ones(2, 32), "mxfp8")
    mixed = type(q)(qdata=q.qdata, scale=q.scale.numpy(), global_scale=None, options=q.options, shape=q.shape)
    with pytest.raises(FormatError, match="mixed"):
        mixed.validate()


def test_nothing_imports_torch_for_numpy_input() -> None:
    code = (
        "import sys, lowprec\n"
        "assert not {'numpy', 'torch', 'ml_dtypes'} & set(sys.modules)\n"
        "import numpy as np\n"
        "q = lowprec.quantize(np.ones((16, 128), np.float32), 'nvfp4')\n"
        "lowprec.dequantize(q); q.codes(); q.validate()\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_device_tensors() -> None:
    x = torch.randn(2, 32, 256).to(torch.bfloat16)
    for name, values in VARIANTS:
        want = lowprec.quantize(x, name, **values)
        got = lowprec.quantize(x.cuda(), name, **values)
        for array, ten in zip(want.arrays, got.arrays, strict=True):
            if array is not None:
                assert ten.is_cuda
                assert (raw(array) == raw(ten.cpu())).all()
        assert lowprec.dequantize(got).is_cuda
