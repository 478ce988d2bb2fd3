"""Everything a person sees. The only module that prints; rich is loaded when a table or a progress bar is drawn.

Results go to standard output, progress and errors to standard error. On a terminal tables fit its width and tensors
that differ only in layer or expert are one row; in a pipe each tensor is one line with its full name, for grep.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from . import __version__

if TYPE_CHECKING:
    from rich.console import RenderableType

    from .backends import BackendStatus
    from .contract import TensorRule
    from .converters.report import Conversion, ConvertReport, InspectReport, Progress, RoleSummary, VerifyReport
    from .formats.base import Options
    from .plan import Step
    from .recipe import Recipe


_WIDE = 110  # columns from which on a terminal holds the long form of every table


def error(message: str, *, debug: bool = False) -> None:
    """One line on standard error; before it the traceback if `debug`."""
    if debug:
        traceback.print_exc()
    print(f"lowprec: error: {' '.join(message.split())}", file=sys.stderr)


def text(content: str) -> None:
    """Plain text on standard output, as it is."""
    sys.stdout.write(content)


def as_json(content: Any) -> None:
    """One JSON document on standard output."""
    json.dump(content, sys.stdout, indent=2, allow_nan=False)
    sys.stdout.write("\n")


def begin() -> None:
    """Give streams that the caller has closed (`>&-`) somewhere to write to, so that a command does its work."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 - as long as the process lives


def close() -> None:
    """Flush standard output while a closed pipe or a full disk can still be answered. Raises OSError."""
    sys.stdout.flush()


def discard() -> None:
    """Send the rest of the output nowhere: nobody can have it, and the interpreter flushes once more at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def size(count: int) -> str:
    """Bytes for a reader, in powers of ten as disks and hubs count them: `269 MB`."""
    if count < 1000:
        return f"{count} B"
    value = count / 1000
    for unit in ("kB", "MB", "GB"):
        if value < 999.5:
            return f"{value:.0f} {unit}" if value >= 100 else f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} TB"


def show_recipes(recipes: Sequence[Recipe]) -> None:
    """One row a recipe."""
    rows = [(recipe.name, ", ".join(recipe.engines), recipe.dialect, recipe.description) for recipe in recipes]
    if _narrow():
        _table(("recipe", "loads in", "what"), [(name, engines, what) for name, engines, _, what in rows])
    else:
        _table(("recipe", "loads in", "dialect", "what"), rows)


def show_plan(conversion: Conversion) -> None:
    """Every tensor, then what they add up to."""
    if not sys.stdout.isatty():
        _table(("tensor", "role", "layer", "format", "why", "partners"), _unfolded(conversion))
    elif _narrow():
        rows = [
            (name.removesuffix(".weight"), role, layers, form, why.partition(":")[0])
            for name, role, layers, _, form, why in _folded(conversion)
        ]
        _table(("tensor", "role", "layer", "format", "why"), rows)
    else:
        _table(("tensor", "role", "layer", "count", "format", "why"), _folded(conversion), right=(3,))
    _show_summary(conversion)


def show_converted(report: ConvertReport) -> None:
    """What was written and what can be done with it."""
    conversion = report.conversion
    done = "already complete" if report.nothing_to_do else f"written in {report.seconds:.1f} s"
    counts = {"written": report.tensors_written, "kept": report.tensors_kept, "done again": report.tensors_redone}
    _facts(
        (
            ("target", f"{report.target}: {done}"),
            ("tensors", ", ".join(f"{count} {word}" for word, count in counts.items() if count)),
            ("size", _sizes(conversion.bytes_before, conversion.bytes_after)),
            ("loads in", _loads(conversion)),
            ("contract", conversion.contract.digest),
        )
    )


def show_verified(report: VerifyReport) -> None:
    """Error by role if the source was there, every fault, and the verdict."""
    if report.errors:
        rows = [
            (item.role, str(item.tensors), f"{item.sqnr_db:.2f}", f"{item.max_relative_error:.4f}")
            for item in report.errors
        ]
        _table(("role", "tensors", "SQNR dB", "max relative error"), rows, right=(1, 2, 3))
    if report.faults:
        _table(("fault", "where", "what"), [(fault.kind, fault.where, fault.what) for fault in report.faults])
    proof = f"bytes equal to those made again from {report.against}" if report.against else "structure only"
    verdict = f"ok, {proof}" if report.ok else _count(len(report.faults), "fault")
    _facts(
        (
            ("target", f"{report.target}: {verdict}"),
            ("read", f"{_count(report.tensors, 'tensor')}, {size(report.bytes)}, in {report.seconds:.1f} s"),
            ("contract", report.digest or "none recorded"),
        )
    )


def show_inspected(report: InspectReport) -> None:
    """What a checkpoint is."""
    _roles(report.roles, with_before=False)
    family = report.family or "no family of ours"
    _facts(
        (
            ("path", report.path),
            ("model", f"{report.model_type} ({family})"),
            ("dialect", report.dialect),
            ("loads in", ", ".join(report.loads) or "-"),
            ("size", f"{size(report.bytes)}, {_count(report.tensors, 'tensor')} in {_count(report.shards, 'file')}"),
            ("contract", report.digest or "none recorded"),
            *(("note", oddity) for oddity in report.oddities),
        )
    )


def show_backends(backends: Sequence[BackendStatus]) -> None:
    """Which kernels there are."""
    rows = [(item.name, "yes" if item.active else "no", ", ".join(item.formats), item.detail) for item in backends]
    _table(("backend", "active", "formats", "how"), rows)
    _facts((("lowprec", __version__), ("python", sys.version.partition(" ")[0]), ("platform", platform.platform())))


@contextmanager
def progress(*, quiet: bool) -> Iterator[Callable[[Progress], None] | None]:
    """A progress bar on standard error, to be fed with reports; None if that is no terminal or `quiet`."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as Bars
    from rich.table import Column

    bars = Bars(
        TextColumn("{task.description}"),
        BarColumn(bar_width=None, table_column=Column(min_width=8, ratio=1)),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[tensor]}", table_column=Column(max_width=36, no_wrap=True, ratio=2)),
        console=Console(stderr=True),
        transient=True,
        expand=True,
    )
    with bars:
        task = bars.add_task("start", total=None, tensor="")

        def report(item: Progress) -> None:
            bars.update(
                task,
                description=str(item.phase),
                completed=item.done_bytes,
                total=item.total_bytes,
                tensor=item.tensor.removeprefix("model."),
            )

        yield report


def _show_summary(conversion: Conversion) -> None:
    """By role, then the facts."""
    _roles(conversion.roles, with_before=True)
    contract = conversion.contract
    groups = len({step.partners for step in conversion.plan.steps if step.partners})
    kept = (
        f"first {contract.keep_first} and last {contract.keep_last} of {contract.num_layers} layers, MTP {contract.mtp}"
    )
    _facts(
        (
            ("source", f"{conversion.source} ({contract.model_type}, {conversion.source_dialect})"),
            ("dialect", f"{conversion.dialect}, {_count(len(conversion.layout.shards), 'file')}"),
            *((f"rules.{index}", _rule(rule)) for index, rule in enumerate(contract.rules)),
            ("policy", f"kept: {kept}"),
            *((("partners", f"{_count(groups, 'group')} with one amax each"),) if groups else ()),
            ("size", _sizes(conversion.bytes_before, conversion.bytes_after)),
            ("loads in", _loads(conversion)),
            *((f"not {engine}", why[0]) for engine, why in conversion.engines.items() if why),
            *(("note", note) for note in conversion.notes),
            ("contract", contract.digest),
        )
    )


def _roles(roles: Sequence[RoleSummary], *, with_before: bool) -> None:
    """Table by role."""
    rows = []
    for item in roles:
        formats = ", ".join(
            f"{count} {name}" if len(item.formats) > 1 else name for name, count in item.formats.items()
        )
        before = (size(item.bytes_before),) if with_before else ()
        rows.append((item.role, str(item.tensors), *before, size(item.bytes_after), formats))
    columns = ("before", "after") if with_before else ("bytes",)
    _table(("role", "tensors", *columns, "formats"), rows, right=(1, 2, 3) if with_before else (1, 2))


def _unfolded(conversion: Conversion) -> Iterator[tuple[str, ...]]:
    """One row a tensor."""
    for step in conversion.plan.steps:
        layer = "-" if step.tensor.layer is None else str(step.tensor.layer)
        yield step.tensor.name, step.tensor.role, layer, _format(step), step.reason, " ".join(step.partners) or "-"


def _folded(conversion: Conversion) -> Iterator[tuple[str, ...]]:
    """One row for all tensors that differ only in their layer or expert; names without the part before the layer."""
    found: dict[tuple[str, ...], list[int]] = {}
    for step in conversion.plan.steps:
        name = step.tensor.name
        layer = step.tensor.layer
        if layer is not None:
            name = name.partition(f".{layer}.")[2]
        if step.tensor.expert is not None:
            name = name.replace(f".{step.tensor.expert}.", ".*.")
        why = step.reason.removesuffix(f": {step.tensor.role}")
        found.setdefault((name, step.tensor.role, _format(step), why), []).append(-1 if layer is None else layer)
    for (name, role, form, why), layers in found.items():
        yield name, role, _ranges(layers), str(len(layers)), form, why


def _ranges(numbers: Iterable[int]) -> str:
    """`0-3, 7` for 0, 1, 2, 3 and 7; `-` for the -1 that stands for no layer."""
    spans: list[list[int]] = []
    for number in sorted(set(numbers)):
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join("-" if first < 0 else str(first) if first == last else f"{first}-{last}" for first, last in spans)


def _format(step: Step) -> str:
    return step.weight.format if step.weight is not None else step.dtype


def _rule(rule: TensorRule) -> str:
    """A rule's formats on one line."""
    if rule.weight is None:
        return "keep"
    activation = "16 bit" if rule.activation is None else _options(rule.activation)
    return f"weights {_options(rule.weight)}; activations {activation}"


def _options(options: Options) -> str:
    """`nvfp4(outer=tensor, block=1x16)`."""
    values = options.to_json()
    name = values.pop("format")
    words = (f"{key}={'x'.join(map(str, item)) if isinstance(item, list) else item}" for key, item in values.items())
    return f"{name}({', '.join(words)})" if values else name


def _count(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def _sizes(before: int, after: int) -> str:
    share = f" ({after / before:.3f} of it)" if before else ""
    return f"{size(before)} -> {size(after)}{share}"


def _loads(conversion: Conversion) -> str:
    if conversion.unloadable:
        return "no engine loads this"
    return ", ".join(conversion.loads) or "-"


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]], right: Sequence[int] = ()) -> None:
    """Columns under heads, a blank line after them: fitted to a terminal, or padded plain lines in a pipe."""
    if not sys.stdout.isatty():
        _plain([heads, *rows], right)
        text("\n")
        return
    from rich import box
    from rich.table import Table
    from rich.text import Text

    gap = 1 if _narrow() else 2
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, header_style="bold", pad_edge=False, padding=(0, gap, 0, 0))
    for index, head in enumerate(heads):
        table.add_column(head, justify="right" if index in right else "left", overflow="fold", no_wrap=index in right)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    _print(table)
    text("\n")


def _facts(facts: Iterable[tuple[str, str]]) -> None:
    """`name  value` lines, values aligned."""
    if not sys.stdout.isatty():
        _plain(list(facts))
        return
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in facts:
        grid.add_row(Text(name, style="bold"), Text(value))
    _print(grid)


def _narrow() -> bool:
    """Whether standard output is a terminal with room for the short form of a table only."""
    return sys.stdout.isatty() and shutil.get_terminal_size().columns < _WIDE


def _print(drawing: RenderableType) -> None:
    from rich.console import Console

    Console(highlight=False).print(drawing)


def _plain(rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> None:
    """Lines of words padded to columns, nothing cut, no space at the end."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        text("  ".join(cells).rstrip() + "\n")
