"""inspect, and what verify makes of targets with random damage."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from folders import DEEPSEEK_V3, INDEX, MODEL, QWEN3, copy, edit_json, split

from lowprec import convert, inspect, verify
from lowprec.converters.staging import PARTIAL

DIALECTS = {
    "fp8_block": "deepseek_fp8", "mxfp8": "sglang_mxfp8", "nvfp4": "modelopt_nvfp4", "bf16": "bf16",
    "int4_experts": "compressed_tensors", "mxfp4_mxfp8": "compressed_tensors",
}  # fmt: skip


@pytest.mark.parametrize("recipe", DIALECTS)
def test_what_we_write_is_recognized_without_a_manifest(recipe: str, tmp_path: Path) -> None:
    report = convert(DEEPSEEK_V3, tmp_path / "target", recipe)
    found = inspect(tmp_path / "target")
    json.dumps(found.to_json())
    assert found.digest == report.conversion.contract.digest
    assert found.loads == report.conversion.loads
    (tmp_path / "target" / "lowprec.json").unlink()
    found = inspect(tmp_path / "target")
    assert found.oddities == ()
    assert (found.dialect, found.family, found.digest) == (DIALECTS[recipe], "deepseek_v3", None)
    assert found.bytes == report.conversion.bytes_after
    assert {role.role: dict(role.formats) for role in found.roles} == {
        role.role: dict(role.formats) for role in report.conversion.roles
    }
    assert sum(role.bytes_after for role in found.roles) == found.bytes


def test_oddities(tmp_path: Path) -> None:
    source = split(QWEN3, tmp_path / "source", lambda name: len(name) % 2, 2)
    assert inspect(source).oddities == ()
    index = json.loads((source / INDEX).read_text())
    index["metadata"]["total_size"] = 5
    (source / INDEX).write_text(json.dumps(index))
    (source / PARTIAL).mkdir()
    (source / "pytorch_model.bin").write_text("")
    (source / "lowprec.json").write_text("[]")
    edit_json(source / "config.json", model_type="qwen17")
    found = inspect(source)
    assert found.family is None
    assert [role.role for role in found.roles] == ["unknown"]
    text = "\n".join(found.oddities)
    for part in (
        "model_type 'qwen17' is not known",
        "lowprec.json' is not a JSON object",
        "'pytorch_model.bin' is not part of the checkpoint: .bin files are not carried over",
        "an unfinished conversion lies in it",
        "the index claims 5 bytes, the tensors have 3870976",
    ):
        assert part in text


def test_names_without_a_role_are_oddities(tmp_path: Path) -> None:
    source = copy(QWEN3, tmp_path / "source", lambda tensors: {**tensors, "extra.weight": tensors["model.norm.weight"]})
    found = inspect(source)
    assert any("tensor 'extra.weight' has no role in family 'llama'" in line for line in found.oddities)
    assert {role.role: role.tensors for role in found.roles}["unknown"] == 1


@pytest.mark.parametrize("recipe", ["nvfp4", "fp8_block"])
def test_verify_survives_random_damage_and_sees_it(recipe: str, tmp_path: Path) -> None:
    """One changed byte in any file of a target: never an exception, always a fault."""
    convert(QWEN3, tmp_path / "target", recipe)
    chosen = random.Random(11)
    target = tmp_path / "target"
    originals = {path: path.read_bytes() for path in sorted(target.iterdir())}
    header = 8 + int.from_bytes(originals[target / MODEL][:8], "little")
    for number in range(120):
        path = chosen.choice(list(originals))
        data = bytearray(originals[path])
        limit = header if path.name == MODEL and number % 2 else len(data)
        at = chosen.randrange(limit)
        data[at] = chosen.choice(
            [value for value in (*b'0123456789{}[]",:x', chosen.randrange(256)) if value != data[at]]
        )
        path.write_bytes(data)
        report = verify(target, workers=1)
        assert report.faults, (path.name, at, data[at])
        path.write_bytes(originals[path])
    assert verify(target).ok
