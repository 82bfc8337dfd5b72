"""Register the commands and parse the command line.

A command file holds options, one call into the library, one print and one exit. It
imports the library inside its function, so that `record` never loads the analysis and
`--help` stays fast.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from clusterprof import __version__
from clusterprof.cli.analyze import HELP_END, analyze
from clusterprof.cli.collect import collect
from clusterprof.cli.compare import compare
from clusterprof.cli.demo import demo
from clusterprof.cli.doctor import doctor
from clusterprof.cli.explain import explain
from clusterprof.cli.export import dump, export
from clusterprof.cli.fleet import fleet
from clusterprof.cli.gate import gate
from clusterprof.cli.record import record
from clusterprof.cli.top import top
from clusterprof.errors import EXIT_USAGE, UsageError

PROGRAM_NAME = "clusterprof"

COMMANDS: dict[str, Callable[..., Any]] = {
    "record": record,
    "analyze": analyze,
    "gate": gate,
    "compare": compare,
    "explain": explain,
    "export": export,
    "fleet": fleet,
    "top": top,
    "collect": collect,
    "doctor": doctor,
    "demo": demo,
    "dump": dump,
}

# base of every click exception, in typer's own click and in the click of older typers
_ClickException: Any = typer.BadParameter.__mro__[2]


class _CommandGroup(TyperGroup):
    """Suggests the nearest command for an unknown one."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] not in self.commands and not args[0].startswith("-"):
            from clusterprof.config import format_suggestion

            raise UsageError(
                f"no such command: {args[0]!r}{format_suggestion(args[0], self.commands)}"
            )
        return super().resolve_command(ctx, args)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"{PROGRAM_NAME} {__version__}")
        raise typer.Exit()


def _run_root(
    ctx: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Find out why the GPUs of a training job are idle.

    First record the unchanged job with `record`, then read the report of `analyze`.
    """
    if ctx.invoked_subcommand is None:
        print(ctx.get_help(), file=sys.stderr)
        raise typer.Exit(EXIT_USAGE)


def _build_app() -> typer.Typer:
    app = typer.Typer(
        name=PROGRAM_NAME,
        cls=_CommandGroup,
        rich_markup_mode=None,  # rich would cost every --help 60 ms
        pretty_exceptions_enable=False,
        pretty_exceptions_show_locals=False,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    )
    app.callback(invoke_without_command=True)(_run_root)
    for name, command in COMMANDS.items():
        # `record -- CMD` passes everything after CMD on unchanged
        settings = {"allow_interspersed_args": False} if name == "record" else None
        epilog = HELP_END if name == "analyze" else None
        app.command(name, context_settings=settings, epilog=epilog)(command)
    return app


def run_command(words: list[str]) -> object:
    """Run one command.

    Raises: UsageError for invalid options, KeyboardInterrupt when typer aborts.
    """
    try:
        return _build_app()(args=words, prog_name=PROGRAM_NAME, standalone_mode=False)
    except _ClickException as error:
        raise UsageError(error.format_message(), _format_usage_hint(error)) from None
    except typer.Abort:
        raise KeyboardInterrupt from None


def _format_usage_hint(error: Any) -> str:
    context = getattr(error, "ctx", None)
    return f"see: {context.command_path} --help" if context is not None else ""
