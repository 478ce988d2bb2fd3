"""The documents are true: their examples run and print what is written, and the tree is the tree."""

from __future__ import annotations

import re
import shutil
import tomllib
from pathlib import Path

import pytest
import write_docs

from lowprec.cli import cli
from lowprec.recipe import list_recipes, load_recipe

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
ENGINES = {"SGLang": "sglang", "vLLM": "vllm", "transformers": "transformers"}


@pytest.mark.parametrize("path", write_docs.documents(), ids=lambda path: path.name)
def test_examples_and_tree_are_what_the_code_does(path: Path) -> None:
    """If this fails, `python tools/write_docs.py` brings the documents up to date; read what it changed."""
    text = path.read_text(encoding="utf-8")
    renewed = write_docs.renewed(text)
    assert write_docs.same(text, renewed), _first_difference(text, renewed)


@pytest.mark.parametrize(
    ("true", "false"), [("out: ok", "out: fine"), ("  plan.py", "  plans.py"), ("3.88 MB ->", "3.89 MB ->")]
)
def test_a_false_line_would_be_found(true: str, false: str) -> None:
    wrong = README.replace(true, false)
    assert wrong != README
    assert not write_docs.same(wrong, write_docs.renewed(wrong))


def test_python_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(write_docs.MODEL, tmp_path / "Qwen3-MoE")
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```$", (ROOT / "docs" / "python.md").read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 3
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, "docs/python.md", "exec"), names)


def test_every_command_is_documented() -> None:
    text = (ROOT / "docs" / "command.md").read_text(encoding="utf-8")
    for name in cli.commands:
        assert f"$ lowprec {name} --help\n" in text


def test_the_table_of_recipes_is_that_of_the_recipes() -> None:
    rows = re.findall(r"^\| `(\w+)` \|.*\| `(\w+)` \| ([^|]+) \|$", README, re.MULTILINE)
    assert sorted(name for name, _, _ in rows) == sorted(list_recipes())
    for name, dialect, loads in rows:
        recipe = load_recipe(name)
        assert dialect == recipe.dialect
        wanted = set(ENGINES.values()) if loads == "all" else {ENGINES[word] for word in loads.split(", ")}
        assert wanted == set(recipe.engines)


def test_paths_and_entry_points_in_the_documents_exist() -> None:
    for path in write_docs.documents():
        for name in re.findall(
            r"`((?:lowprec|converters|kernels|recipes|tests|tools)/[a-z0-9_./]+)`", path.read_text()
        ):
            assert (ROOT / name).exists(), f"{path.name} names {name}"


def test_nothing_committed_names_a_machine() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert settings["project"]["readme"] == "README.md"
    for path in [*write_docs.documents(), *(ROOT / "tools").iterdir(), ROOT / ".ci" / "run", ROOT / "pyproject.toml"]:
        if path.is_file():
            assert not re.search(r"(?<![\w.])/(home|root|opt|work)/|https?://", path.read_text()), path


def _first_difference(ours: str, theirs: str) -> str:
    pairs = zip(ours.splitlines(), theirs.splitlines(), strict=False)
    written, true = next(((a, b) for a, b in pairs if not write_docs.same(a, b)), ("", "its length differs"))
    return f"written: {written!r}; true: {true!r}; run tools/write_docs.py"
