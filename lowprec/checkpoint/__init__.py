"""Checkpoint files: a strict safetensors reader, a writer that fills files in any order, and the manifest."""

from __future__ import annotations

from .files import checksum, parse_object, read_bytes, read_json
from .header import HEADER_LIMIT, NUMPY_DTYPES, Header, Placed, encode_header, read_header, stored_order
from .manifest import (
    FORMAT_VERSION,
    MANIFEST_NAME,
    FileRecord,
    Manifest,
    Stored,
    TensorRecord,
    read_manifest,
)
from .shards import ShardReader, ShardWriter

__all__ = [
    "FORMAT_VERSION",
    "HEADER_LIMIT",
    "MANIFEST_NAME",
    "NUMPY_DTYPES",
    "FileRecord",
    "Header",
    "Manifest",
    "Placed",
    "ShardReader",
    "ShardWriter",
    "Stored",
    "TensorRecord",
    "checksum",
    "encode_header",
    "parse_object",
    "read_bytes",
    "read_header",
    "read_json",
    "read_manifest",
    "stored_order",
]
