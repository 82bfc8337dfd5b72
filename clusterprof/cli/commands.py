"""The commands, and how they are read from the command line.

A command file holds options, one call into the library, one print and one exit. It imports the
library inside its function, so that `record` never loads the analysis and `--help` stays quick.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from clusterprof import __version__
from clusterprof.cli.analyze import analyze
from clusterprof.cli.compare import compare
from clusterprof.cli.demo import demo
from clusterprof.cli.doctor import doctor
from clusterprof.cli.dump import dump
from clusterprof.cli.explain import explain
from clusterprof.cli.export import export
from clusterprof.cli.gate import gate
from clusterprof.cli.record import record
from clusterprof.cli.top import top
from clusterprof.errors import EXIT_USAGE, UsageError

ROOT = "clusterprof"

COMMANDS: dict[str, Callable[..., Any]] = {
    "record": record,
    "analyze": analyze,
    "gate": gate,
    "compare": compare,
    "explain": explain,
    "export": export,
    "top": top,
    "doctor": doctor,
    "demo": demo,
    "dump": dump,
}

# every ClickException, in the click that typer brings with it and in the click of older typers
_ClickException: Any = typer.BadParameter.__mro__[2]


class _Group(TyperGroup):
    """Names the nearest command when one is unknown."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] not in self.commands and not args[0].startswith("-"):
            from clusterprof.profiles import nearest

            raise UsageError(f"no such command: {args[0]!r}{nearest(args[0], self.commands)}")
        return super().resolve_command(ctx, args)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"{ROOT} {__version__}")
        raise typer.Exit()


def _root(
    ctx: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Say why the GPUs of a training job idle: record it unchanged, then analyse the recording."""
    if ctx.invoked_subcommand is None:
        print(ctx.get_help(), file=sys.stderr)
        raise typer.Exit(EXIT_USAGE)


def _app() -> typer.Typer:
    app = typer.Typer(
        name=ROOT,
        cls=_Group,
        add_completion=False,
        rich_markup_mode=None,  # rich would cost every --help 60 ms
        pretty_exceptions_enable=False,
        pretty_exceptions_show_locals=False,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    )
    app.callback(invoke_without_command=True)(_root)
    for name, command in COMMANDS.items():
        # `record -- CMD` hands over everything behind CMD as it stands
        settings = {"allow_interspersed_args": False} if name == "record" else None
        app.command(name, context_settings=settings)(command)
    return app


def run(words: list[str]) -> object:
    """Run one command; raise `UsageError` for what its options cannot mean."""
    try:
        return _app()(args=words, prog_name=ROOT, standalone_mode=False)
    except _ClickException as error:
        raise UsageError(error.format_message(), _usage_of(error)) from None
    except typer.Abort:
        raise KeyboardInterrupt from None


def _usage_of(error: Any) -> str:
    context = getattr(error, "ctx", None)
    return f"see: {context.command_path} --help" if context is not None else ""
