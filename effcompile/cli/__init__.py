"""The command line.

Exit status: 0 done, 1 infeasible or not verified, 2 the request is wrong (130 interrupted).

torch takes seconds to import, so each command imports what it needs: `--help`, `targets`, `explain` and
`diff` do not need it. Results go to stdout, progress and errors to stderr; with `--json` stdout carries one
JSON document, an error's too.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from typing import Annotated

import typer

from effcompile import console
from effcompile.cli import commands
from effcompile.core.errors import EffcompileError, InternalError

app = typer.Typer(
    cls=commands.Commands,
    help="Declare the budget; get the fastest transformer that fits, with proof.",
    epilog="Start with:  effcompile optimize examples/bert.py --max-error 0.031 -o out/bert\n\n"
    "or, to train:  effcompile optimize examples/train_gpt2.py --mode training --memory 1150MiB -o out/train",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings=commands.HELP_NAMES,
)
commands.add_all(app)


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and stop.", is_eager=True)
    ] = False,
) -> None:
    if version:
        from effcompile import __version__

        typer.echo(f"effcompile {__version__}")
        raise typer.Exit


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line and exit; errors raised on purpose are told without a traceback."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    # torch's profiler writes its own start and stop to stderr
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    console.prepare(own_process=argv is None)
    try:
        status = _run(arguments)
    except OSError as error:
        status = console.tell_lost_output(error)
    sys.exit(status)


def _run(arguments: list[str]) -> int:
    """The exit status of a command that did not exit by itself.

    Raises:
        OSError: what it says cannot be written.
    """
    try:
        console.check_current_folder()
        with console.stoppable():
            app(args=arguments, prog_name="effcompile", obj=arguments)
    except EffcompileError as error:
        if os.environ.get("EFFCOMPILE_DEBUG") or isinstance(error, InternalError):
            traceback.print_exc()
        return console.tell(error, "--json" in arguments)
    except (KeyboardInterrupt, console.Stopped) as error:
        sys.stderr.write("Interrupted.\n")
        return error.status if isinstance(error, console.Stopped) else 130
    except Exception as error:
        if isinstance(error, OSError) and error.filename is None:  # of a stream: opening a file names it
            raise
        return console.tell_bug(error, "--json" in arguments)
    return 0
