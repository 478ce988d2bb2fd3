"""From torch tensors to launches: shapes and strides, tile sizes, the target, and the launch itself.

A format's file plans (which kernels, with which arguments, into which new tensors) and then runs the plan. A plan can
be made for tensors without memory (device "meta"), which is how `tools/triton_report.py` compiles every kernel ahead
of time exactly as it would be launched.

Nothing here waits for the device or reads from it, so all of it can be captured in a CUDA graph.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import torch
import triton

from lowprec.errors import BackendError, FormatError
from lowprec.formats.base import ArraySpec, Layout, Shape

INTERPRETED = 0  # the TARGET of Triton's interpreter, see casts.py
T = TypeVar("T")

TURNED_COLUMNS = 64  # width of a tile whose columns are not contiguous


class QuantizedTensors(NamedTuple):
    """The three tensors of a quantized tensor, contiguous; shapes and dtypes are those of `Format.layout`."""

    qdata: torch.Tensor
    scale: torch.Tensor
    global_scale: torch.Tensor | None


@dataclass(frozen=True, kw_only=True)
class Matrices:
    """A tensor as `count` matrices of `rows` x `columns`, with its strides in elements."""

    count: int
    rows: int
    columns: int
    stride_matrix: int
    stride_row: int
    stride_column: int

    def as_rows(self) -> Matrices:
        """One matrix with all the rows, where the strides allow it; for formats whose blocks lie in one row."""
        if self.count > 1 and self.stride_matrix != self.rows * self.stride_row:
            return self
        return Matrices(
            count=1,
            rows=self.count * self.rows,
            columns=self.columns,
            stride_matrix=0,
            stride_row=self.stride_row,
            stride_column=self.stride_column,
        )

    def as_one_row(self) -> Matrices:
        """Each matrix as one long row, where the strides allow it, so that tiles have no ragged edge to waste."""
        if self.rows > 1 and (self.stride_column != 1 or self.stride_row != self.columns):
            return self
        return Matrices(
            count=self.count,
            rows=1,
            columns=self.rows * self.columns,
            stride_matrix=self.stride_matrix,
            stride_row=0,
            stride_column=self.stride_column,
        )

    def arguments(self) -> dict[str, int]:
        """The arguments of these names that every kernel has."""
        return {
            "rows": self.rows,
            "columns": self.columns,
            "stride_matrix": self.stride_matrix,
            "stride_row": self.stride_row,
            "stride_column": self.stride_column,
        }


@dataclass(frozen=True, kw_only=True)
class Tile:
    """`rows` x `columns` elements a program, powers of two; tiles lie `step_rows` x `step_columns` apart."""

    rows: int
    columns: int
    step_rows: int
    step_columns: int

    def programs(self, x: Matrices) -> int:
        """Programs that cover all matrices."""
        return x.count * -(-x.rows // self.step_rows) * -(-x.columns // self.step_columns)


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One kernel launch: `constants` are known when it is compiled, `arguments` (tensors, integers) when it runs."""

    kernel: Any
    programs: int
    arguments: dict[str, Any]
    constants: dict[str, Any]
    warps: int

    def run(self, device: torch.device) -> None:
        """Launch on the current stream of `device`; in the interpreter, run."""
        if not self.programs:
            return
        constants = self.constants | ({"TARGET": target_of(device)} if "TARGET" in self.kernel.arg_names else {})
        on_device = torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
        with on_device:
            self.kernel[(self.programs,)](**self.arguments, **constants, num_warps=self.warps, enable_fp_fusion=False)


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter (it is asked for before these modules are imported)."""
    return bool(triton.knobs.runtime.interpret)


def unavailable() -> str | None:
    """Why these kernels do not run here; None if they do."""
    if interpreted():
        return None
    if torch.version.hip is not None:
        return "triton: these kernels are for NVIDIA GPUs, this is a ROCm build of torch"
    return None if torch.cuda.is_available() else "triton: torch finds no NVIDIA GPU"


def target_of(device: torch.device) -> int:
    """Compute capability times ten, 0 for the interpreter.

    Raises:
        BackendError: a device that these kernels are not for.
    """
    if interpreted():
        return INTERPRETED
    if device.type != "cuda" or torch.version.hip is not None:
        raise BackendError(f"triton: a tensor on {device} cannot be used, it must be on an NVIDIA GPU; move it there")
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


@dataclass(frozen=True)
class Plan(Generic[T]):
    """What will be in `result` once the `launches` have run, one after the other."""

    result: T
    launches: tuple[Launch, ...]

    def run(self, x: torch.Tensor) -> T:
        """Launch everything on the device of `x`."""
        for launch in self.launches:
            launch.run(x.device)
        return self.result


# ---- tensors -------------------------------------------------------------------------------------------


def matrices(x: torch.Tensor) -> Matrices:
    """[.., M, K] of any strides. Leading dimensions that no single stride spans are refused.

    Raises:
        FormatError: such a tensor.
    """
    *lead, rows, columns = x.shape
    *lead_strides, stride_row, stride_column = x.stride()
    outer = [(size, stride) for size, stride in zip(lead, lead_strides, strict=True) if size != 1]
    for (_, stride), (inner_size, inner_stride) in itertools.pairwise(outer):
        if stride != inner_size * inner_stride:
            raise FormatError(f"triton: the leading dimensions of {list(x.shape)} are permuted, make a contiguous copy")
    return Matrices(
        count=math.prod(lead),
        rows=rows,
        columns=columns,
        stride_matrix=outer[-1][1] if outer else 0,
        stride_row=stride_row,
        stride_column=stride_column,
    )


def carrier(x: torch.Tensor) -> torch.Tensor:
    """The tensor as kernels see it: bfloat16 as int16 and float8 as uint8 bits."""
    if x.dtype == torch.bfloat16:
        return x.view(torch.int16)
    return x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x


def empty(spec: ArraySpec, x: torch.Tensor) -> torch.Tensor:
    """An uninitialized tensor of this shape and dtype where `x` is."""
    return torch.empty(spec.shape, dtype=getattr(torch, spec.dtype.name), device=x.device)


def empties(layout: Layout, x: torch.Tensor) -> QuantizedTensors:
    """Uninitialized tensors of this layout where `x` is."""
    outer = None if layout.global_scale is None else empty(layout.global_scale, x)
    return QuantizedTensors(empty(layout.qdata, x), empty(layout.scale, x), outer)


def check_input(format_name: str, x: torch.Tensor) -> Shape:
    """The shape of `x`. Raises FormatError unless it is [.., M, K] in float32, float16 or bfloat16."""
    if x.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise FormatError(f"{format_name}: cannot quantize {x.dtype}, cast it to float32, float16 or bfloat16 first")
    return tuple(x.shape)


def torch_dtype(dtype: Any) -> torch.dtype:
    """torch's dtype for a name, or for numpy's or torch's object."""
    found: torch.dtype = dtype if isinstance(dtype, torch.dtype) else getattr(torch, getattr(dtype, "name", str(dtype)))
    return found


def power_of_two(n: int) -> int:
    """The smallest power of two that is not below `n`."""
    return 1 << max(n - 1, 0).bit_length()


def tile(x: Matrices, *, elements: int, block: int) -> Tile:
    """A tile of about `elements` elements, in whole blocks of `block` columns.

    Wide where columns are contiguous, but not so wide that an eighth of it would lie beyond the edge. A matrix that
    is contiguous along its rows is read in columns: the tile is then high, for long reads.
    """
    wide = min(power_of_two(x.columns), elements)
    if x.stride_column != 1:
        wide = min(wide, TURNED_COLUMNS)
    while wide > block and 8 * (-x.columns % wide) > x.columns:
        wide //= 2
    wide = max(wide, block)
    high = min(power_of_two(x.rows), max(elements // wide, 1))
    return Tile(rows=high, columns=wide, step_rows=high, step_columns=wide)
