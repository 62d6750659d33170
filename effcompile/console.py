"""What a command says: progress and errors on stderr, one JSON document on stdout, and checks before the work
starts.
"""

from __future__ import annotations

import atexit
import gc
import logging
import os
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from types import FrameType
from typing import TYPE_CHECKING

import msgspec
import typer
from rich.console import Console
from rich.text import Text

from effcompile import report
from effcompile.core.errors import EffcompileError, InfeasibleError, UsageError

if TYPE_CHECKING:
    from effcompile.core.goal import Goal

#: Seconds after which a signal that a library swallowed is told again.
_AGAIN = 0.5
#: Whether the process is the command's own.
_process = {"own": False}


class Stopped(BaseException):
    """The process was told to end: by Ctrl-C, by SIGTERM, or by its terminal going away.

    It cleans up first.
    """

    def __init__(self, number: int) -> None:
        super().__init__()
        self.status = 128 + number


@contextmanager
def stoppable() -> Iterator[None]:
    """Signals that end a process raise `Stopped` in the main thread; those that it was started to ignore
    (nohup) it ignores.

    A library may swallow what is raised in its destructor or import: then it is raised again, and errors that
    follow from it are not told.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []

    def stop(number: int, frame: FrameType | None) -> None:
        if number != _ALARM:
            came.append(number)
            if _ALARM is not None:
                signal.signal(_ALARM, stop)
                signal.setitimer(signal.ITIMER_REAL, _AGAIN, _AGAIN)
        elif _is_stopping():
            return
        raise Stopped(came[-1])

    asked = [number for number in _ENDING if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, stop) for number in asked}
    hook, sys.unraisablehook = (
        sys.unraisablehook,
        lambda lost: None if isinstance(lost.exc_value, Stopped) else hook(lost),
    )
    try:
        yield
    except Exception as error:
        if came:
            raise Stopped(came[-1]) from error
        raise
    finally:
        if came and _ALARM is not None:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(_ALARM, signal.SIG_DFL)
        sys.unraisablehook = hook
        for number, handler in before.items():
            signal.signal(number, handler)


_ENDING = (signal.SIGINT, signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM))
_ALARM = getattr(signal, "SIGALRM", None)


def _is_stopping() -> bool:
    """Whether what runs is the cleaning up after `Stopped`."""
    error = sys.exc_info()[1]
    while error is not None and not isinstance(error, Stopped):
        error = error.__context__
    return error is not None


def prepare(*, own_process: bool) -> None:
    """Make do with what a shell may have left: streams that are closed, a terminal that is said to have no
    columns.

    `own_process`: nothing else runs in it.
    """
    _process["own"] = own_process
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # takes the lowest number that is free: the next file opened may not become stdout
            os.open(os.devnull, os.O_RDWR)
    sys.stdout = sys.stdout or os.fdopen(1, "w", encoding="utf-8", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", encoding="utf-8", closefd=False)
    if not os.environ.get("COLUMNS", "80").strip("0"):
        del os.environ["COLUMNS"]


def keep_what_is_there() -> None:
    """Where the process is the command's own, libraries and the model stay to its end: Python's collector,
    asked whenever graphs of a large model are let go, need not look at them each time (a tenth of planning
    BERT-base); nor at what planning a step left, when all that remains is to tell (half a second of GPT-2).
    At that end it does: libraries that are bound by nanobind (triton) report at length what is left over.
    """
    if _process["own"]:
        gc.freeze()
        atexit.register(gc.unfreeze)


def check_current_folder() -> None:
    """Without it no relative path means anything.

    Raises:
        UsageError: it was removed.
    """
    try:
        os.getcwd()
    except OSError as error:
        raise UsageError(
            f"The current folder cannot be used: {error.strerror}. Change to another one (cd)."
        ) from error


def emit(data: object) -> None:
    """One JSON document on stdout."""
    sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode(data), indent=1) + b"\n")
    sys.stdout.flush()


def tell(error: EffcompileError, as_json: bool) -> int:
    """An error raised on purpose, as one block without a traceback; returns the exit status."""
    if as_json:
        emit({"error": error_data(error, error.exit_code)})
    else:
        Console(stderr=True, soft_wrap=True).print(_marked("✘ ", "bold red", str(error)))
    return error.exit_code


def tell_lost_output(error: OSError) -> int:
    """What was to be said cannot be written: in words on stderr, and quietly where who read it has gone;
    returns the exit status.
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what is left in a buffer goes nowhere at exit
    if not isinstance(error, BrokenPipeError):
        with suppress(OSError):
            sys.stderr.write(f"✘ Cannot write the output: {error.strerror or error}.\n")
            sys.stderr.flush()
    return 1


def warn(text: str) -> None:
    """What the user should know before the result, on stderr; nothing for an empty text."""
    if text:
        Console(stderr=True, soft_wrap=True).print(_marked("⚠ ", "yellow", text))


def _marked(mark: str, style: str, text: str) -> Text:
    return Text(mark, style=style) + Text(report.printable(text))


def say(text: str) -> None:
    """A line on stdout that may hold what a file says."""
    typer.echo(report.printable(text))


def tell_bug(error: Exception, as_json: bool) -> int:
    """An error that nobody foresaw: its traceback, and what to do about it; returns the exit status."""
    traceback.print_exc()
    sys.stderr.write(
        f"\n✘ effcompile stopped on an error that it did not foresee: {type(error).__name__}. This is a bug "
        "in effcompile; please report it with the lines above and your model file.\n"
    )
    if as_json:
        emit({"error": error_data(error, 1)})
    return 1


def error_data(error: Exception, status: int) -> dict[str, object]:
    """An error as data for `--json`."""
    data: dict[str, object] = {"type": type(error).__name__, "message": str(error), "exit_code": status}
    if isinstance(error, InfeasibleError):
        causes = [{"cause": type(cause).__name__} | asdict(cause) for cause in (*error.why, *error.untried)]  # type: ignore[call-overload]
        data |= {"binding": list(error.binding), "nearest": error.nearest, "causes": causes}
    return data


@contextmanager
def steps(as_json: bool, verbose: bool = False, profile: bool = False) -> Iterator[report.ProgressSteps]:
    """Progress on stderr, silent with --json but for what was asked for; and the libraries below us kept
    quiet unless `verbose`.
    """
    with warnings.catch_warnings():
        if not verbose:
            warnings.filterwarnings(
                "ignore", module=r"(torch|torchao|onnx|onnxscript|transformers|copyreg)(\..*)?"
            )
            for name in (
                "torchao",
                "torch.utils._pytree",
                "torch.onnx",
                "onnxscript",
                "transformers",
                "nncf",
            ):
                logging.getLogger(name).setLevel(logging.ERROR)
        with report.ProgressSteps(enabled=not as_json, profile=profile) as running:
            yield running


@contextmanager
def explaining(goal: Goal, as_json: bool, typed: Sequence[str] | None = None) -> Iterator[None]:
    """An infeasible goal is explained, with the flags, and the whole commands after what was `typed`, that
    would be feasible.
    """
    try:
        yield
    except InfeasibleError as error:
        if as_json:
            raise
        report.print_infeasible(error, goal, Console(stderr=True), arguments=typed)
        raise typer.Exit(error.exit_code) from error
