"""What a command says: progress and errors on stderr, one JSON document on stdout, and checks before the work starts."""

from __future__ import annotations

import logging
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import msgspec
import typer
from rich.console import Console
from rich.text import Text

from effcompile.core.errors import EffcompileError, InfeasibleError
from effcompile.core.goal import Goal
from effcompile.report import Steps, print_infeasible


class Stopped(BaseException):
    """The process was told to end: by SIGTERM, or by its terminal going away. It cleans up, as after Ctrl-C."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.status = 128 + number


@contextmanager
def stoppable() -> Iterator[None]:
    """Signals that end a process raise `Stopped` in the main thread."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise Stopped(number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM))}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def emit(data: Any) -> None:
    """One JSON document on stdout."""
    sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode(data), indent=1) + b"\n")
    sys.stdout.flush()


def tell(error: EffcompileError, as_json: bool) -> int:
    """An error raised on purpose, as one block without a traceback; returns the exit status."""
    if as_json:
        emit({"error": error_data(error, error.exit_code)})
    else:
        Console(stderr=True, soft_wrap=True).print(Text("✘ ", style="bold red") + Text(str(error)))
    return error.exit_code


def warn(text: str) -> None:
    """What the user should know before the result, on stderr; nothing for an empty text."""
    if text:
        Console(stderr=True, soft_wrap=True).print(Text("⚠ ", style="yellow") + Text(text))


def tell_bug(error: Exception, as_json: bool) -> int:
    """An error that nobody foresaw: its traceback, and what to do about it; returns the exit status."""
    traceback.print_exc()
    sys.stderr.write(
        f"\n✘ effcompile stopped on an error that it did not foresee: {type(error).__name__}. This is a bug in effcompile; "
        "please report it with the lines above and your model file.\n"
    )
    if as_json:
        emit({"error": error_data(error, 1)})
    return 1


def error_data(error: Exception, status: int) -> dict[str, Any]:
    """An error as data for `--json`."""
    data: dict[str, Any] = {"type": type(error).__name__, "message": str(error), "exit_code": status}
    if isinstance(error, InfeasibleError):
        data |= {"binding": list(error.binding), "nearest": error.nearest}
    return data


@contextmanager
def steps(as_json: bool, verbose: bool = False) -> Iterator[Steps]:
    """Progress on stderr, silent with --json; and the libraries below us kept quiet unless `verbose`."""
    with warnings.catch_warnings():
        if not verbose:
            warnings.filterwarnings("ignore", module=r"(torch|torchao|onnx|onnxscript|transformers|copyreg)(\..*)?")
            for name in ("torchao", "torch.utils._pytree", "torch.onnx", "onnxscript", "transformers", "nncf"):
                logging.getLogger(name).setLevel(logging.ERROR)
        with Steps(enabled=not as_json) as running:
            yield running


@contextmanager
def explaining(goal: Goal, as_json: bool, typed: Sequence[str] | None = None) -> Iterator[None]:
    """An infeasible goal is explained, with the flags, and the whole commands after what was `typed`, that would be feasible."""
    try:
        yield
    except InfeasibleError as error:
        if as_json:
            raise
        print_infeasible(error, goal, Console(stderr=True), arguments=typed)
        raise typer.Exit(error.exit_code) from error
