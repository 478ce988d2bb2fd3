"""Safetensors headers, readers and writers, and the manifest, against the safetensors library and damaged files."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from folders import MODEL, QWEN3_MOE, encode, load, write_header
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from lowprec.checkpoint import ShardReader, ShardWriter, checksum, read_header
from lowprec.checkpoint import shards as shards_module
from lowprec.checkpoint.shards import as_bytes
from lowprec.errors import CheckpointError, LowprecError
from lowprec.plan import DTYPE_BYTES, TensorInfo

TORCH = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U64": torch.uint64, "U32": torch.uint32,
    "U16": torch.uint16, "U8": torch.uint8, "BOOL": torch.bool, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
}  # fmt: skip
SHAPES = ((), (0,), (3,), (2, 5), (4, 0, 2), (1, 2, 3))


def bits(dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    count = int(np.prod(shape, dtype=int)) * DTYPE_BYTES[dtype]
    data = torch.arange(count, dtype=torch.int64).remainder(2 if dtype == "BOOL" else 251).to(torch.uint8)
    return data.view(TORCH[dtype]).reshape(shape)


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def test_reads_what_the_library_writes(tmp_path: Path) -> None:
    assert TORCH.keys() == DTYPE_BYTES.keys()
    tensors = {f"{dtype}{i}": bits(dtype, shape) for dtype in TORCH for i, shape in enumerate(SHAPES)}
    save_file(tensors, tmp_path / MODEL, {"format": "pt", "other": "text"})
    reader = ShardReader(tmp_path / MODEL)
    assert reader.header.metadata == {"format": "pt", "other": "text"}
    assert set(reader.header.tensors) == set(tensors)
    for name, tensor in tensors.items():
        array = reader.read(name)
        assert (array.tobytes(), array.shape) == (raw(tensor), tuple(tensor.shape)), name
        assert b"".join(piece.tobytes() for piece in reader.chunks(name)) == raw(tensor), name


def test_the_library_reads_what_we_write(tmp_path: Path) -> None:
    infos = [
        TensorInfo(name=f"{dtype}{i}", dtype=dtype, shape=shape) for dtype in TORCH for i, shape in enumerate(SHAPES)
    ]
    writer = ShardWriter(tmp_path / MODEL, infos[::-1])
    assert not writer.is_prepared()
    writer.create()
    assert writer.is_prepared()
    for info in infos:
        data = np.frombuffer(raw(bits(info.dtype, info.shape)), np.uint8)
        for start in range(0, data.size, 3):  # in pieces, as a large tensor comes
            writer.write(info.name, start, data[start : start + 3])
    loaded = load_file(tmp_path / MODEL)
    for info in infos:
        assert loaded[info.name].dtype == TORCH[info.dtype]
        assert tuple(loaded[info.name].shape) == info.shape
        assert raw(loaded[info.name]) == raw(bits(info.dtype, info.shape))
        assert writer.tensors[info.name].offset % DTYPE_BYTES[info.dtype] == 0
        assert b"".join(piece.tobytes() for piece in writer.chunks(info.name)) == raw(bits(info.dtype, info.shape))
    with safe_open(tmp_path / MODEL, "pt") as file:
        assert file.metadata() == {"format": "pt"}
    assert (tmp_path / MODEL).stat().st_size == writer.size


def test_a_file_is_not_prepared_if_size_or_header_differ(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path / MODEL, [TensorInfo(name="a", dtype="F32", shape=(2,))])
    other = ShardWriter(tmp_path / MODEL, [TensorInfo(name="b", dtype="F32", shape=(2,))])
    writer.create()
    assert writer.size == other.size
    assert not other.is_prepared()
    os.truncate(writer.path, writer.size - 1)
    assert not writer.is_prepared()


def test_tensors_are_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = np.arange(1000, dtype=np.uint8)
    (tmp_path / MODEL).write_bytes(encode({"a": data}))
    monkeypatch.setattr(shards_module, "CHUNK", 64)
    pieces = list(ShardReader(tmp_path / MODEL).chunks("a"))
    assert [piece.size for piece in pieces] == [64] * 15 + [40]
    assert np.array_equal(np.concatenate(pieces), data)


def test_a_file_that_shrinks_while_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / MODEL
    path.write_bytes(encode({"a": np.zeros(100, np.float32)}))
    reader = ShardReader(path)
    os.truncate(path, path.stat().st_size - 8)
    with pytest.raises(CheckpointError, match="became shorter while it was read"):
        reader.read("a")


def entry(dtype: object = "F32", shape: object = (2,), offsets: object = (0, 8)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


EIGHT = bytes(8)
BAD_HEADERS = {
    "list": ("[]", EIGHT, "its header does not begin with '{'"),
    "spaces": (' {"a":1}', EIGHT, "its header does not begin with '{'"),
    "cut": ('{"a":', EIGHT, "is not valid JSON"),
    "deep": ('{"a":' + "[" * 100_000, EIGHT, "nested too deeply"),
    "twice": ('{"a":1,"a":1}', EIGHT, "the key 'a' occurs twice"),
    "number": ({"a": 1}, EIGHT, "must have exactly dtype, shape and data_offsets"),
    "missing": ({"a": {"dtype": "F32", "shape": [2]}}, EIGHT, "must have exactly dtype, shape and data_offsets"),
    "extra": ({"a": {**entry(), "more": 1}}, EIGHT, "must have exactly dtype, shape and data_offsets"),
    "dtype": ({"a": entry("F4")}, EIGHT, "has dtype 'F4', which is not supported"),
    "dtype list": ({"a": entry(["F32"])}, EIGHT, "has dtype ['F32'], which is not supported"),
    "negative": ({"a": entry(shape=[-2])}, EIGHT, "has shape [-2], which is not a list of sizes"),
    "float": ({"a": entry(shape=[2.0])}, EIGHT, "has shape [2.0], which is not a list of sizes"),
    "bool": ({"a": entry(shape=[True, 2])}, EIGHT, "has shape [True, 2], which is not a list of sizes"),
    "huge": ({"a": entry(shape=[2**63, 0], offsets=[0, 0])}, b"", "which is not a list of sizes"),
    "digits": ('{"a":{"dtype":"F32","shape":[' + "9" * 5000 + '],"data_offsets":[0,8]}}', EIGHT, "is not valid JSON"),
    "offsets": ({"a": entry(offsets=[0])}, EIGHT, "has data_offsets [0], which are not two offsets"),
    "backwards": ({"a": entry(offsets=[8, 0])}, EIGHT, "8 bytes, but its data_offsets are [8, 0]"),
    "size": ({"a": entry(offsets=[0, 4])}, EIGHT, "is F32 [2], 8 bytes, but its data_offsets are [0, 4]"),
    "hole": ({"a": entry(offsets=[4, 12])}, bytes(12), "tensor 'a' at 4 leaves a hole before it, which ends at 0"),
    "overlap": ({"a": entry(), "b": entry(offsets=[4, 12])}, bytes(12), "'b' at 4 overlaps the tensor before it"),
    "short": ({"a": entry()}, bytes(7), "is truncated: the header describes"),
    "long": ({"a": entry()}, bytes(9), "has 1 bytes that no tensor of its header covers"),
    "metadata": ({"__metadata__": {"a": 1}}, b"", "__metadata__ must map names to texts"),
    "metadata list": ({"__metadata__": []}, b"", "__metadata__ must map names to texts"),
    "newline": ({"a\nb": entry()}, EIGHT, "'a\\nb' is not a printable tensor name"),
    "surrogate": ({"\ud800": entry()}, EIGHT, "is not a printable tensor name"),
    "no name": ({"": entry()}, EIGHT, "'' is not a printable tensor name"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_HEADERS)
def test_bad_headers_are_refused(case: str, tmp_path: Path) -> None:
    header, data, message = BAD_HEADERS[case]
    write_header(tmp_path / MODEL, header, data)
    with pytest.raises(CheckpointError) as caught:
        read_header(tmp_path / MODEL)
    assert message in str(caught.value)
    assert MODEL in str(caught.value)
    assert "\n" not in str(caught.value)


def test_files_that_are_no_files(tmp_path: Path) -> None:
    path = tmp_path / MODEL
    cases = [
        (b"", "is truncated: 0 bytes cannot hold a safetensors header"),
        (b"1234567", "is truncated: 7 bytes cannot hold a safetensors header"),
        (struct.pack("<Q", 100_000_001), "its header would have 100000001 bytes, the limit is 100000000"),
        (struct.pack("<Q", 2**64 - 1), "its header would have 18446744073709551615 bytes, the limit is 100000000"),
        (struct.pack("<Q", 50) + b"{}", "is truncated: the header has 50 bytes, the file 10; fetch it again"),
        (struct.pack("<Q", 2) + b"\xff\xff", "does not begin with '{'"),
        (struct.pack("<Q", 3) + b"{\xff}", "is not valid JSON"),
    ]
    for data, message in cases:
        path.write_bytes(data)
        with pytest.raises(CheckpointError) as caught:
            read_header(path)
        assert message in str(caught.value)
    path.unlink()
    with pytest.raises(CheckpointError, match="does not exist"):
        read_header(path)
    path.mkdir()
    with pytest.raises(CheckpointError, match="is not a regular file"):
        read_header(path)
    path.rmdir()
    os.mkfifo(path)  # must be refused, not waited for
    with pytest.raises(CheckpointError, match="is not a regular file"):
        read_header(path)


ORIGINAL = (QWEN3_MOE / MODEL).read_bytes()
HEADER_BYTES = 8 + struct.unpack("<Q", ORIGINAL[:8])[0]


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    edits=st.lists(
        st.tuples(
            st.integers(0, HEADER_BYTES - 1), st.one_of(st.sampled_from(b'0123456789{}[],:"\\'), st.integers(0, 255))
        ),
        min_size=1,
        max_size=3,
    ),
    cut=st.one_of(st.none(), st.integers(0, len(ORIGINAL))),
)
def test_only_our_errors_escape_from_damaged_headers(
    edits: list[tuple[int, int]], cut: int | None, tmp_path: Path
) -> None:
    data = bytearray(ORIGINAL[:cut])
    for position, value in edits:
        if position < len(data):
            data[position] = value
    path = tmp_path / MODEL
    path.write_bytes(data)
    try:
        reader = ShardReader(path)
    except LowprecError:
        return
    for name in reader.header.tensors:
        reader.read(name)
    with safe_open(path, "pt") as file:  # what we accept, the library accepts, with the same names
        assert set(file.keys()) == set(reader.header.tensors)


def test_we_are_not_stricter_than_the_library_on_real_files() -> None:
    for source in QWEN3_MOE.parent.parent.glob(f"*/hf/{MODEL}"):
        ours, theirs = ShardReader(source), load_file(source)
        assert {name: ours.read(name).tobytes() for name in ours.header.tensors} == {
            name: raw(tensor) for name, tensor in theirs.items()
        }


def test_checksum_is_xxh3_of_the_bytes() -> None:
    assert checksum(b"") == "99aa06d3014798d86001c324468d497f"  # the value of the xxHash specification's own library
    tensors = load(QWEN3_MOE / MODEL)
    array = tensors["model.norm.weight"]
    assert checksum(as_bytes(array)) == checksum(array.tobytes())
