"""The rules of the house that a reader would otherwise have to check by eye, over the syntax tree of every module."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "lowprec"

# A module may import what stands before it. Names on one line do not import each other.
ORDER = (
    {"errors"},
    {"formats"},
    {"kernels"},  # loaded by name; they know formats and nothing else of ours
    {"qtensor"},
    {"roles"},
    {"recipes"},  # data
    {"recipe"},
    {"contract"},
    {"tiles"},
    {"backends"},
    {"plan"},
    {"dialects"},
    {"checkpoint"},
    {"converters", "training", "sync", "launch"},
    {"console"},
    {"cli"},
    {"__main__"},
)
RANK = {name: rank for rank, names in enumerate(ORDER) for name in names}

# Optional packages: imported inside the function that needs them, by the parts that say so.
HEAVY = {
    "torch",
    "transformers",
    "compressed_tensors",
    "safetensors",
    "gguf",
    "accelerate",
    "triton",
    "megatron",
    "ray",
}
HEAVY_AT_MODULE_LEVEL = {"training", "sync", "kernels"}
# The command imports late on purpose, so that --help is quick; the package itself, so that it costs nothing.
LATE_IMPORTS = {"", "cli", "console", "__main__"}
ENVIRONMENT_READERS = {"cli", "console", "launch"}
FORMAT_CONSTANTS = {448, 6, 127, 2688}


@dataclass(frozen=True)
class Module:
    """One source file of the package, under the name it is imported by."""

    name: str
    path: Path

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.path.read_text(encoding="utf-8"), str(self.path))

    @property
    def part(self) -> str:
        """The component after `lowprec.`; empty for the package itself."""
        return self.name.partition(".")[2].partition(".")[0]

    def where(self, node: ast.AST) -> str:
        return f"{self.path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}"

    def imports(self) -> Iterator[tuple[ast.stmt, str, bool]]:
        """Every import as (statement, absolute module name, whether it stands inside a function)."""
        inside = {
            id(node)
            for function in ast.walk(self.tree)
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            for node in ast.walk(function)
        }
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    yield node, alias.name, id(node) in inside
            elif isinstance(node, ast.ImportFrom):
                base = self._absolute(node)
                if base == "lowprec":  # `from lowprec import plan`, `from . import plan`
                    for alias in node.names:
                        yield node, f"{base}.{alias.name}", id(node) in inside
                else:
                    yield node, base, id(node) in inside

    def _absolute(self, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        parts = self.name.split(".")
        if self.path.name != "__init__.py":
            parts = parts[:-1]
        parts = parts[: len(parts) - (node.level - 1)]
        return ".".join([*parts, node.module] if node.module else parts)


def modules() -> list[Module]:
    found = []
    for path in sorted(PACKAGE.rglob("*.py")) + [
        path for link in ("kernels", "converters") for path in sorted((PACKAGE / link).rglob("*.py"))
    ]:
        parts = list(path.relative_to(ROOT).with_suffix("").parts)
        if parts[-1] == "__init__":
            parts.pop()
        found.append(Module(name=".".join(parts), path=path))
    return sorted(set(found), key=lambda module: module.name)


MODULES = modules()


@pytest.fixture(params=MODULES, ids=lambda module: module.name)
def module(request: pytest.FixtureRequest) -> Module:
    return request.param


def test_the_walk_sees_the_links_too() -> None:
    names = {module.name for module in MODULES}
    assert {"lowprec.errors", "lowprec.cli", "lowprec.formats.base"} <= names
    assert any(name.startswith("lowprec.converters.families.") for name in names)


def test_import_order(module: Module) -> None:
    if module.part == "":  # the package gives its names on demand
        return
    assert module.part in RANK, f"{module.name} has no place in the import order"
    faults = []
    for node, name, _ in module.imports():
        if not name.startswith("lowprec."):
            continue
        other = name.split(".")[1]
        if other == module.part:
            continue
        if other == "__version__":
            continue
        if other not in RANK:
            faults.append(f"{module.where(node)}: {name}: import it from the module that it is defined in")
        elif RANK[other] >= RANK[module.part] or (module.part == "kernels" and other not in {"errors", "formats"}):
            faults.append(f"{module.where(node)}: {module.part} may not import {other}")
        if other == "kernels":
            faults.append(f"{module.where(node)}: kernels are loaded by name")
    assert not faults


def test_heavy_packages_stay_optional(module: Module) -> None:
    faults = [
        f"{module.where(node)}: {name} at module level"
        for node, name, inside in module.imports()
        if name.partition(".")[0] in HEAVY and not inside and module.part not in HEAVY_AT_MODULE_LEVEL
    ]
    assert not faults


def test_no_import_inside_a_function_but_of_heavy_packages(module: Module) -> None:
    if module.part in LATE_IMPORTS:
        return
    faults = [
        f"{module.where(node)}: {name} inside a function"
        for node, name, inside in module.imports()
        if inside and name.partition(".")[0] not in HEAVY
    ]
    assert not faults


def test_no_environment_reads_in_the_core(module: Module) -> None:
    if module.part in ENVIRONMENT_READERS:
        return
    words = {"environ", "environb", "getenv", "getenvb"}
    faults = [
        module.where(node)
        for node in ast.walk(module.tree)
        if (isinstance(node, ast.Attribute) and node.attr in words)
        or (isinstance(node, ast.ImportFrom) and any(alias.name in words for alias in node.names))
    ]
    assert not faults


def test_only_the_console_prints(module: Module) -> None:
    if module.part == "console":
        return
    faults = [
        f"{module.where(node)}: {ast.unparse(node)}"
        for node in ast.walk(module.tree)
        if (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print")
        or (isinstance(node, ast.Call) and ast.unparse(node.func) in {"click.echo", "click.secho"})
        or (isinstance(node, ast.Attribute) and ast.unparse(node) in {"sys.stdout", "sys.stderr"})
    ]
    faults += [
        f"{module.where(node)}: {name}" for node, name, _ in module.imports() if name.partition(".")[0] == "rich"
    ]
    assert not faults


def test_constants_of_the_formats_have_one_home(module: Module) -> None:
    if module.name == "lowprec.formats.numerics" or module.part in {"cli", "console"}:
        return
    faults = [
        f"{module.where(node)}: {node.value}"
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Constant) and type(node.value) in (int, float) and node.value in FORMAT_CONSTANTS
    ]
    assert not faults, "these belong in formats/numerics.py, under a name"


def test_no_substring_ladder(module: Module) -> None:
    """No chain of `if "q_proj" in name: ... elif "k_proj" in name: ...`: roles and exact rules decide."""

    def asks_for_a_part(node: ast.AST) -> bool:
        if isinstance(node, ast.Compare):
            return isinstance(node.ops[0], ast.In | ast.NotIn) and _is_text(node.left)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            return node.func.attr in {"startswith", "endswith"} and any(_is_text(arg) for arg in node.args)
        return False

    faults = [
        module.where(node)
        for node in ast.walk(module.tree)
        if isinstance(node, ast.If)
        and any(asks_for_a_part(part) for part in ast.walk(node.test))
        and len(node.orelse) == 1
        and isinstance(node.orelse[0], ast.If)
        and any(asks_for_a_part(part) for part in ast.walk(node.orelse[0].test))
    ]
    assert not faults


def test_no_global_statement(module: Module) -> None:
    assert not [module.where(node) for node in ast.walk(module.tree) if isinstance(node, ast.Global)]


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


SOURCES = sorted({module.path.resolve() for module in MODULES} | set((ROOT / "tools").glob("*.py")))


@pytest.mark.parametrize("path", SOURCES + sorted((ROOT / "tests").rglob("*.py")), ids=lambda path: path.stem)
def test_files_are_short(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 400


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_functions_are_short(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    faults = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {node.name} has {node.end_lineno - node.lineno + 1} lines"
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno is not None
        and node.end_lineno - node.lineno + 1 > 50
    ]
    assert not faults


@pytest.mark.parametrize("folder", ["kernels", "converters", "recipes", "tools"])
def test_top_level_folders_are_no_packages(folder: str) -> None:
    """`kernels` is also the name of Hugging Face's package, which transformers imports; ours must not shadow it."""
    assert not (ROOT / folder / "__init__.py").exists()


def _loaded(code: str) -> set[str]:
    """Top-level names in sys.modules after `code` ran in a fresh interpreter."""
    script = f"{code}\nimport sys; print(*sorted({{name.partition('.')[0] for name in sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT.anchor)
    return set(done.stdout.split())


def test_import_lowprec_is_free() -> None:
    assert not {"numpy", "torch", "click", "rich"} & _loaded("import lowprec")


def test_the_core_never_imports_torch() -> None:
    code = "import lowprec.converters.api, lowprec.backends, lowprec.checkpoint, lowprec.cli, lowprec.console"
    assert not HEAVY & _loaded(code)
