"""Progress of a command on stderr: a spinner or bar while a step runs, one line for each step longer than a second."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, Task, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

from effcompile.core.units import format_seconds
from effcompile.report.page import BAD, DIM, GOOD, Page

_WORTH_TELLING = 1.0  # seconds


class Steps:
    """`with Steps(console) as steps: with steps.step("capture"): ...; steps.update("kernels", 3, 60)`.

    Nothing is printed when not enabled. On something that is not a terminal only finished steps are printed.

    Args:
        console: where to; default stderr, as stdout belongs to the result.
        enabled: False silences everything (`--json`).
    """

    def __init__(self, console: Console | None = None, *, enabled: bool = True) -> None:
        self.enabled = enabled
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

    def __enter__(self) -> Steps:
        self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._live.stop()

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """A named step; steps may nest. Its time is printed when it ends, if longer than a second or if it failed."""
        started = time.perf_counter()
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
            self._tell(name, time.perf_counter() - started, done)

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
        self._page.line(Text(indent), mark, self._page.text(f" {name} "), self._page.text(format_seconds(seconds), DIM))


class _BarWhenCounted(BarColumn):
    """A bar, for tasks whose total is known; nothing for the others, which have a spinner."""

    def render(self, task: Task) -> Text:  # type: ignore[override]
        return Text() if task.total is None else super().render(task)  # type: ignore[return-value]


class _CountWhenCounted(MofNCompleteColumn):
    """`3/60`, for tasks whose total is known."""

    def render(self, task: Task) -> Text:
        return Text() if task.total is None else super().render(task)
