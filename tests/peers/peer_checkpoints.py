"""Converted checkpoints for tests against real libraries, and the values that we say lie in them."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from make_checkpoint import make_checkpoint
from safetensors.torch import load_file

import lowprec
from lowprec.dialects import detect
from lowprec.formats import get_format
from lowprec.plan import SourceTensor, TensorInfo

Json = dict[str, Any]

NAMES = {
    torch.float8_e4m3fn: "F8_E4M3",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.uint8: "U8",
}


@cache
def converted(folder: Path, kind: str, recipe: str, overrides: tuple[str, ...] = ()) -> Path:
    """A small checkpoint of `kind`, converted under `recipe`; one of each a folder."""
    source = folder / kind
    if not source.exists():
        make_checkpoint(kind, source, layers=3)
    target = folder / f"{kind}-{recipe}-{len(overrides)}"
    lowprec.convert(source, target, recipe, overrides=overrides)
    return target


def read_config(folder: Path) -> Json:
    config: Json = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return config


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Every stored tensor, read by safetensors itself."""
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(path)
    return tensors


def to_numpy(tensor: torch.Tensor) -> Any:
    """The same bytes as numpy with ml_dtypes."""
    import ml_dtypes

    plain = {torch.float8_e4m3fn: ml_dtypes.float8_e4m3fn, torch.bfloat16: ml_dtypes.bfloat16}
    if tensor.dtype not in plain:
        return tensor.numpy()
    return tensor.contiguous().view(torch.uint8).numpy().view(plain[tensor.dtype]).reshape(tensor.shape)


def to_torch(array: Any) -> torch.Tensor:
    """bfloat16 numpy -> torch, the same bytes."""
    return torch.from_numpy(np.ascontiguousarray(array).view(np.uint16)).view(torch.bfloat16)


def quantized_sources(folder: Path) -> dict[str, SourceTensor]:
    """The quantized logical weights of a checkpoint, by name."""
    infos = {
        name: TensorInfo(name=name, dtype=NAMES[tensor.dtype], shape=tuple(tensor.shape))
        for name, tensor in read_tensors(folder).items()
    }
    config = read_config(folder)
    return {source.name: source for source in detect(config).logical(config, infos) if source.stored is not None}


def our_values(folder: Path) -> dict[str, torch.Tensor]:
    """Every weight in bfloat16 as our reference dequantizes it, and every plain tensor as it is."""
    import ml_dtypes

    stored, config = read_tensors(folder), read_config(folder)
    dialect = detect(config)
    quantized = quantized_sources(folder)
    used = {info.name for source in quantized.values() for info in source.parts.values()}
    values = {name: tensor for name, tensor in stored.items() if name not in used}
    for name, source in quantized.items():
        assert source.stored is not None
        arrays = {word: to_numpy(stored[info.name]) for word, info in source.parts.items()}
        tensor = dialect.decode(source.stored, source.shape, arrays)
        dequantize = get_format(source.stored.format).dequantize
        values[name] = to_torch(dequantize(tensor.arrays, source.stored, np.dtype(ml_dtypes.bfloat16)))
    return values


def first_difference(ours: torch.Tensor, theirs: torch.Tensor) -> str:
    """ "" if every bit is equal, else dtype, shape or the first place where they differ."""
    if ours.dtype != theirs.dtype or ours.shape != theirs.shape:
        return f"{ours.dtype} {tuple(ours.shape)} against {theirs.dtype} {tuple(theirs.shape)}"
    a, b = (x.contiguous().view(torch.uint8).reshape(-1) for x in (ours, theirs))
    if torch.equal(a, b):
        return ""
    at = int((a != b).nonzero()[0, 0]) // ours.element_size()
    flat, other = ours.reshape(-1), theirs.reshape(-1)
    count = int((flat != other).sum())
    return f"{count} of {flat.numel()} differ, first at {at}: {flat[at].item()!r} against {other[at].item()!r}"
