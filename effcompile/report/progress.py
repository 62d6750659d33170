"""Progress on stderr: a spinner or bar while a step runs, one line for each step longer than a second, and
where the time went.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.text import Text

from effcompile.core.units import format_seconds
from effcompile.report.page import BAD, DIM, GOOD, Column, Page, Row

_WORTH_TELLING = 1.0  # seconds
_WORTH_SHOWING = 0.001  # of the whole, in a profile


@dataclass(frozen=True, slots=True)
class Took:
    """What a step took: seconds, and those of processors, of compilers that it started too.

    `depth`: of how many steps it is a part.
    """

    name: str
    depth: int
    seconds: float
    cpu: float


class ProgressSteps:
    """`with Steps(console) as steps: with steps.step("capture"): ...; steps.update("kernels", 3, 60)`.

    Nothing is printed when not enabled. On something that is not a terminal only finished steps are printed.

    Args:
        console: where to; default stderr, as stdout belongs to the result.
        enabled: False silences everything (`--json`).
        profile: say at the end what each step took.
    """

    def __init__(
        self, console: Console | None = None, *, enabled: bool = True, profile: bool = False
    ) -> None:
        self.enabled, self.profile = enabled, profile
        self.took: list[Took] = []
        self._began = time.perf_counter(), _processors()
        self._page = Page(console or Console(stderr=True))
        self._live = Progress(
            SpinnerColumn(style="cyan"),
            TextColumn("{task.description}", markup=False),
            _BarWhenCounted(bar_width=24),
            _CountWhenCounted(),
            TimeElapsedColumn(),
            console=self._page.console,
            transient=True,
            redirect_stdout=False,  # stdout may be a pipe that reads our JSON
            disable=not (enabled and self._page.console.is_terminal),
        )
        self._running: list[tuple[str, TaskID]] = []
        self._counted: dict[str, TaskID] = {}

    def __enter__(self) -> ProgressSteps:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()
        if self.profile:
            self._tell_profile()

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """A named step; steps may nest.

        Its time is printed when it ends, if longer than a second or if it failed.
        """
        started, cpu = time.perf_counter(), _processors()
        at = len(self.took)
        task = self._live.add_task(name, total=None)
        self._running.append((name, task))
        done = False
        try:
            yield
            done = True
        finally:
            self._running.pop()
            self._live.remove_task(task)
            if not self._running:
                self._forget_counts()
            seconds = time.perf_counter() - started
            self.took.insert(at, Took(name, len(self._running), seconds, _processors() - cpu))
            self._tell(name, seconds, done)

    def update(self, name: str, done: int, total: int) -> None:
        """Show `done` of `total`, on the running step of that name or on a line of its own below it."""
        running = dict(self._running)
        if name in running:
            task = running[name]
        elif name in self._counted:
            task = self._counted[name]
        else:
            task = self._counted[name] = self._live.add_task(f"  {name}", total=total)
        self._live.update(task, completed=done, total=total)
        if name in self._counted and done >= total:
            self._live.remove_task(self._counted.pop(name))

    def _forget_counts(self) -> None:
        for task in self._counted.values():
            self._live.remove_task(task)
        self._counted.clear()

    def _tell(self, name: str, seconds: float, done: bool) -> None:
        if not self.enabled or (done and seconds < _WORTH_TELLING):
            return
        mark = self._page.text("✔" if done else "✘", GOOD if done else BAD)
        indent = " " + "  " * len(self._running)
        self._page.line(
            Text(indent), mark, self._page.text(f" {name} "), self._page.text(format_seconds(seconds), DIM)
        )

    def _tell_profile(self) -> None:
        """Seconds of every step, those of its parts among them, and what lies between the steps."""
        seconds, cpu = time.perf_counter() - self._began[0], _processors() - self._began[1]
        outer = [step for step in self.took if step.depth == 0]
        rest = Took(
            "between these steps", 0, seconds - sum(s.seconds for s in outer), cpu - sum(s.cpu for s in outer)
        )
        shown = [step for step in (*self.took, rest) if step.seconds >= _WORTH_SHOWING * seconds]
        rows = [("  " * step.depth + step.name, step.seconds, step.cpu) for step in shown]
        figures = (
            Column(header="seconds", right=True),
            Column(header="CPU", right=True),
            Column(header="share", right=True),
        )
        self._page.blank()
        self._page.table(
            [Column(header="planning", fit="cut"), *figures],
            [
                Row(cells=[name, f"{took:.1f}", f"{used:.1f}", f"{took / seconds:.0%}"])
                for name, took, used in (*rows, ("in all", seconds, cpu))
            ],
        )


class Shown:
    """Progress of a call from Python: its display lives while a step runs, so that what holds this may be
    copied.
    """

    def __init__(self) -> None:
        self._steps: ProgressSteps | None = None

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """A step, with a display where it is the first."""
        if self._steps is not None:
            with self._steps.step(name):
                yield
            return
        with ProgressSteps() as self._steps:
            try:
                with self._steps.step(name):
                    yield
            finally:
                self._steps = None

    def update(self, name: str, done: int, total: int) -> None:
        """Counts, on the display."""
        if self._steps is not None:
            self._steps.update(name, done, total)


def _processors() -> float:
    """Seconds that processors worked for this process, and for those that it waited for."""
    return sum(os.times()[:4])


class _BarWhenCounted(BarColumn):
    """A bar, for tasks whose total is known; nothing for the others, which have a spinner."""

    def render(self, task: Task) -> Text:  # type: ignore[override]
        return Text() if task.total is None else super().render(task)  # type: ignore[return-value]


class _CountWhenCounted(MofNCompleteColumn):
    """`3/60`, for tasks whose total is known."""

    def render(self, task: Task) -> Text:
        return Text() if task.total is None else super().render(task)
