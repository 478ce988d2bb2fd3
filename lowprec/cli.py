"""The `lowprec` command. Each subcommand is one call of the library; the console shows what comes back.

Exit codes: 0 done; 1 it failed, or `verify` found faults; 2 the command line or the recipe is wrong; 130 interrupted.
"""

from __future__ import annotations

import errno
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING, Any, TypeVar

import click

from . import __version__, console
from .errors import LowprecError, did_you_mean

if TYPE_CHECKING:
    from .recipe import Recipe

F = TypeVar("F", bound=Callable[..., Any])

FAILED = 1
USAGE = 2
INTERRUPTED = 130  # 128 + SIGINT, as shells count
PIPE_CLOSED = 141  # 128 + SIGPIPE

_NO_OUTPUT = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)
_UNITS = {"": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}


@dataclass(kw_only=True)
class Run:
    """What one invocation has been told or has found out about itself."""

    debug: bool = False
    resumable: bool = False


class Commands(click.Group):
    """Commands in the order of their use, and a suggestion for a misspelt one."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        """In order of definition."""
        return list(self.commands)

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        """As click's, with our message. Raises UsageError."""
        if args[0] not in self.commands and not args[0].startswith("-"):
            raise click.UsageError(f"no command '{args[0]}'{did_you_mean(args[0], self.commands)}", ctx)
        return super().resolve_command(ctx, args)


def parse_size(text: str) -> int:
    """Bytes of a size such as 5GB, 500MB or 2GiB. Raises BadParameter."""
    found = re.fullmatch(r"(\d{1,18}(?:\.\d{1,18})?)\s*([a-z]*)", text.strip().lower())
    count = int(Decimal(found[1]) * _UNITS[found[2]]) if found and found[2] in _UNITS else 0
    if not count:
        raise click.BadParameter(f"'{text}' is not a size such as 5GB, 500MB or 2GiB")
    return count


def _debug(ctx: click.Context, _: click.Parameter, value: bool) -> None:
    ctx.ensure_object(Run).debug |= value


def _option(*names: str, **how: Any) -> Callable[[F], F]:
    return click.option(*names, **how)


_with_debug = _option("--debug", is_flag=True, expose_value=False, callback=_debug, help="Show an error's traceback.")
_with_json = _option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
_with_recipe = _option("--recipe", "-r", required=True, metavar="R", help="A recipe's name, or a TOML file.")
_with_set = _option(
    "--set", "overrides", multiple=True, metavar="K=V", help="Change a key of the recipe: policy.last=0. Repeatable."
)
_with_engine = _option(
    "--engine", metavar="E", help="Write it for this engine alone, in its own spelling. [default: the recipe's]"
)
_with_dtype = _option(
    "--dtype",
    type=click.Choice(["bfloat16", "float16", "float32"]),
    help="What dequantized weights are rounded to. [default: the recipe's]",
)
_with_shard = _option(
    "--max-shard-size",
    type=parse_size,
    metavar="SIZE",
    help="Cut the result into files of at most SIZE (5GB). [default: the source's files]",
)
_with_force = _option(
    "--force", is_flag=True, help="Go on although no engine can load the result; the manifest says so."
)
_with_workers = _option(
    "--workers", type=click.IntRange(min=1), metavar="N", help="Threads. [default: one a processor]"
)
_with_quiet = _option("--quiet", "-q", is_flag=True, help="No progress and no summary.")
_source = click.argument("source", metavar="SRC")


@click.group(
    cls=Commands,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, message="lowprec %(version)s")
@_with_debug
@click.pass_context
def cli(ctx: click.Context) -> None:
    """Convert LLM checkpoints to FP8, MXFP8, NVFP4, MXFP4 and INT4 by one recipe, and prove that it was kept."""
    if ctx.invoked_subcommand is None:
        console.text(f"{ctx.get_help()}\n")


@cli.command()
@_source
@click.argument("target", metavar="DST")
@_with_recipe
@_with_set
@_with_engine
@_with_dtype
@_with_shard
@_with_workers
@_option("--allow-nonfinite", is_flag=True, help="Carry NaN and Inf over instead of refusing them.")
@_with_force
@_option("--dry-run", is_flag=True, help="Only say what would be done, as `explain` does.")
@_with_json
@_with_quiet
@_with_debug
@click.pass_obj
def convert(
    run: Run,
    source: str,
    target: str,
    recipe: str,
    overrides: tuple[str, ...],
    engine: str | None,
    dtype: str | None,
    max_shard_size: int | None,
    workers: int | None,
    allow_nonfinite: bool,
    force: bool,
    dry_run: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Convert the checkpoint SRC into the folder DST.

    SRC is a Hugging Face checkpoint: BF16, FP16 or FP32, or one that is quantized already with --recipe bf16. Stop it
    at any moment and run the same command again: it continues, and the result is the same byte for byte.
    """
    from .converters import api

    chosen = _recipe(recipe, overrides, engine, dtype)
    if dry_run:
        plan = api.explain(source, chosen, force=force, max_shard_size=max_shard_size)
        _show(plan, console.show_plan, as_json, quiet)
        return
    run.resumable = True
    with console.progress(quiet=quiet) as progress:
        report = api.convert(
            source,
            target,
            chosen,
            workers=workers,
            max_shard_size=max_shard_size,
            allow_nonfinite=allow_nonfinite,
            force=force,
            progress=progress,
        )
    _show(report, console.show_converted, as_json, quiet)


@cli.command()
@_source
@_with_recipe
@_with_set
@_with_engine
@_with_dtype
@_with_shard
@_with_force
@_with_json
@_with_debug
def explain(
    source: str,
    recipe: str,
    overrides: tuple[str, ...],
    engine: str | None,
    dtype: str | None,
    max_shard_size: int | None,
    force: bool,
    as_json: bool,
) -> None:
    """Show what a conversion of SRC would do.

    From headers alone: each tensor with its role, layer, format and why; the size before and after; the engines that
    load the result.
    """
    from .converters import api

    chosen = _recipe(recipe, overrides, engine, dtype)
    plan = api.explain(source, chosen, force=force, max_shard_size=max_shard_size)
    _show(plan, console.show_plan, as_json)


@cli.command()
@click.argument("target", metavar="DST")
@_option("--against", metavar="SRC", help="The source: quantize it again and compare every byte.")
@_with_workers
@_with_json
@_with_quiet
@_with_debug
@click.pass_context
def verify(
    ctx: click.Context, target: str, against: str | None, workers: int | None, as_json: bool, quiet: bool
) -> None:
    """Check the converted checkpoint DST.

    Its structure against its manifest and, with --against, every byte against its source. Exit code 1 and a table of
    all faults if there are any.
    """
    from .converters import api

    with console.progress(quiet=quiet) as progress:
        report = api.verify(target, against=against, workers=workers, progress=progress)
    _show(report, console.show_verified, as_json, quiet and report.ok)
    if not report.ok:
        ctx.exit(FAILED)


@cli.command()
@click.argument("path", metavar="PATH")
@_with_json
@_with_debug
def inspect(path: str, as_json: bool) -> None:
    """Say what the checkpoint at PATH is.

    Dialect, formats by role, sizes and engines, from headers alone; also of checkpoints that lowprec did not write.
    """
    from .converters import api

    _show(api.inspect(path), console.show_inspected, as_json)


@cli.command()
@click.argument("name", metavar="[NAME]", required=False)
@_with_debug
def recipes(name: str | None) -> None:
    """List the recipes, or print one.

    What is printed is the file, to start your own from: `extends = "NAME"` inherits all that it does not say.
    """
    from .recipe import list_recipes, load_recipe, recipe_text

    if name is not None:
        console.text(recipe_text(name))
    else:
        console.show_recipes([load_recipe(known) for known in list_recipes()])


@cli.command()
@_with_json
@_with_debug
def doctor(as_json: bool) -> None:
    """Say which kernels run on this machine.

    All of them write the same bytes. Where no compiled ones are active a conversion is much slower; the reason says
    why they are not.
    """
    from . import backends

    found = backends.status()
    if as_json:
        console.as_json([backend._asdict() for backend in found])
    else:
        console.show_backends(found)


def _recipe(name: str, overrides: Sequence[str], engine: str | None, dtype: str | None) -> Recipe:
    """The recipe with what the command line says of it. Raises RecipeError."""
    from .dialects.spelling import for_engine
    from .recipe import load_recipe

    said = (*overrides, f'dtype="{dtype}"') if dtype else overrides
    recipe = load_recipe(name, said)
    return recipe if engine is None else for_engine(recipe, engine)


def _show(result: Any, show: Callable[[Any], None], as_json: bool, quiet: bool = False) -> None:
    if as_json:
        console.as_json(result.to_json())
    elif not quiet:
        show(result)


def main(args: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code; every failure is one line on standard error."""
    run = Run()
    console.begin()
    try:
        code = _invoke(args, run)
        console.close()
    except BrokenPipeError:
        console.discard()
        return PIPE_CLOSED
    except click.UsageError as error:
        command = error.ctx.command_path if error.ctx else "lowprec"
        console.error(f"{error.format_message().rstrip('.')}; see '{command} --help'", debug=run.debug)
        return USAGE
    except LowprecError as error:
        console.error(str(error), debug=run.debug)
        return error.exit_code
    except (KeyboardInterrupt, click.Abort):
        console.error("interrupted; run the same command again to continue" if run.resumable else "interrupted")
        return INTERRUPTED
    except Exception as error:
        if isinstance(error, OSError) and error.errno in _NO_OUTPUT:  # files raise CheckpointError
            console.error(f"the output cannot be written: {error.strerror or error}", debug=run.debug)
            console.discard()
            return FAILED
        hint = "" if run.debug else "; run it again with --debug and report the traceback"
        console.error(f"a bug in lowprec: {type(error).__name__}: {error}{hint}", debug=run.debug)
        return FAILED
    return code


def _invoke(args: Sequence[str] | None, run: Run) -> int:
    """What click's own `main` does, without its handling of errors."""
    words = list(sys.argv[1:] if args is None else args)
    try:
        with cli.make_context("lowprec", words, obj=run) as context:
            cli.invoke(context)
    except click.exceptions.Exit as ending:  # --help, --version, and ctx.exit
        return int(ending.exit_code)
    return 0
