"""The commands by name. Each is loaded when it is run, or asked for its help: a list of them needs none.

torch takes seconds to import, and what the commands stand on a quarter of one.
"""

from __future__ import annotations

from importlib import import_module

import typer
from typer.core import TyperCommand, TyperGroup

HELP_NAMES = {"help_option_names": ["-h", "--help"]}

#: Name → module, function, and the first line of its help.
COMMANDS = {
    "optimize": (
        "deciding",
        "optimize",
        "Plan, lower and verify a model; print what was decided and measured.",
    ),
    "plan": (
        "deciding",
        "plan",
        "Decide without lowering; --target h100-sxm for a machine that is not here, --devices 64 for "
        "many. Of a file's stages, a run.",
    ),
    "frontier": (
        "deciding",
        "frontier",
        "What each byte of memory buys: predicted plans, none both larger and slower than another; of a "
        "saved plan, an estimate.",
    ),
    "explain": (
        "reading",
        "explain",
        "Why this choice, and why not another; where time, error and memory go; what another limit would "
        "change.",
    ),
    "diff": ("reading", "diff", "How two plans differ: goals, totals, decisions."),
    "targets": ("reading", "targets", "The machines that effcompile has figures of."),
    "run": (
        "running",
        "run",
        "Run and time a saved artifact; of a generation, stream the text that follows a prompt.",
    ),
    "serve": (
        "running",
        "serve",
        "Serve a generation over HTTP, by the OpenAI completions protocol; as many requests at once as "
        "the plan's batch.",
    ),
    "verify": (
        "ranks",
        "verify",
        "Train a small copy of a plan for many devices on gloo ranks of this machine, and compare with "
        "one process.",
    ),
    "export": (
        "ranks",
        "export",
        "Write a plan for many devices as the configuration of a stock engine, with the peak that is "
        "predicted under it.",
    ),
    "calibrate": ("running", "calibrate", "Measure this machine once; `--target auto` reads the result."),
    "passes": (
        "upkeep",
        "passes",
        "The passes of --pass and the backends of --backend, and what each does; with -v the options of "
        "the passes.",
    ),
    "cache": (
        "upkeep",
        "cache",
        "What effcompile measured and compiled here; it is made again where it is missing.",
    ),
    "doctor": (
        "upkeep",
        "doctor",
        "Run every part on something small and compare it with what is known: what is right here, what is "
        "missing, what to do.",
    ),
}


class Commands(TyperGroup):
    """The group of the commands, which are loaded when they are run."""

    def resolve_command(  # type: ignore[override]  # typer hands it a context of its own
        self, ctx: typer.Context, args: list[str]
    ) -> tuple[str | None, TyperCommand | None, list[str]]:
        """The command that the arguments name, and those that are left for it."""
        name, _, left = super().resolve_command(ctx, args)
        return name, None if name is None else loaded(name), left


def loaded(name: str) -> TyperCommand:
    """A command with its options."""
    module, function, _ = COMMANDS[name]
    alone = typer.Typer(
        add_completion=False,
        rich_markup_mode="rich",
        pretty_exceptions_enable=False,
        context_settings=HELP_NAMES,
    )
    alone.command(name)(getattr(import_module(f"effcompile.cli.{module}"), function))
    made = typer.main.get_command(alone)
    assert isinstance(made, TyperCommand), "an app of one command is that command"
    return made


def add_all(app: typer.Typer) -> None:
    """The commands with their names and first lines alone."""
    for name, (_, _, first) in COMMANDS.items():
        app.command(name, help=first)(_not_loaded)


def _not_loaded() -> None:
    raise AssertionError("Commands.resolve_command loads it")
