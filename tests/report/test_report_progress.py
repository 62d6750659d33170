"""Progress goes to its console only, says what took long, and never hides a failure."""

from __future__ import annotations

import copy
import io

import pytest
from rich.console import Console

from effcompile.report import ProgressSteps, Shown, progress


def console(terminal: bool = False) -> tuple[Console, io.StringIO]:
    stream = io.StringIO()
    return Console(file=stream, width=80, force_terminal=terminal), stream


def test_silent_when_not_enabled(capfd: pytest.CaptureFixture[str]) -> None:
    out, stream = console(terminal=True)
    with ProgressSteps(out, enabled=False) as steps, steps.step("capture"):
        steps.update("kernels", 1, 2)
    with (
        pytest.raises(ValueError, match="broken"),
        ProgressSteps(out, enabled=False) as steps,
        steps.step("capture"),
    ):
        raise ValueError("broken")
    assert stream.getvalue() == ""
    assert capfd.readouterr() == ("", "")


def test_default_is_stderr(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_WORTH_TELLING", 0.0)
    with ProgressSteps() as steps, steps.step("capture"):
        pass
    captured = capfd.readouterr()
    assert captured.out == ""
    assert "✔ capture" in captured.err or "+ capture" in captured.err


def test_short_steps_are_not_told_on_a_pipe() -> None:
    out, stream = console()
    with ProgressSteps(out) as steps, steps.step("solve"):
        steps.update("solve", 1, 2)
    assert stream.getvalue() == ""


def test_long_and_nested_steps_are_told_with_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 0.0, 10.0, 12.5, 13.0])
    monkeypatch.setattr(progress.time, "perf_counter", lambda: next(clock))
    out, stream = console()
    with ProgressSteps(out) as steps, steps.step("calibrate"), steps.step("kernels"):
        pass
    assert stream.getvalue().splitlines() == ["   ✔ kernels 2.50 s", " ✔ calibrate 13.0 s"]


def test_a_failed_step_is_told_and_the_error_passes() -> None:
    out, stream = console()
    with pytest.raises(ValueError, match="broken"), ProgressSteps(out) as steps, steps.step("lower"):
        raise ValueError("broken")
    assert stream.getvalue().startswith(" ✘ lower")


def test_counts_show_on_a_terminal() -> None:
    out, stream = console(terminal=True)
    with ProgressSteps(out) as steps, steps.step("calibrate"):
        steps.update("kernels [raw]", 3, 60)
        steps._live.refresh()
        assert "3/60" in stream.getvalue()
        assert "kernels [raw]" in stream.getvalue()
        steps.update("kernels [raw]", 60, 60)
        assert len(steps._live.tasks) == 1
    assert not steps._live.live.is_started


def test_a_profile_says_what_each_step_took_and_what_lies_between(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 1.0, 2.0, 6.0, 7.0, 8.0])
    monkeypatch.setattr(progress.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(progress, "_processors", lambda: 0.0)
    out, stream = console()
    with (
        ProgressSteps(out, enabled=False, profile=True) as steps,
        steps.step("calibrate"),
        steps.step("kernels"),
    ):
        pass
    assert [line.split() for line in stream.getvalue().splitlines()[2:]] == [
        ["calibrate", "6.0", "0.0", "75%"],
        ["kernels", "4.0", "0.0", "50%"],
        ["between", "these", "steps", "2.0", "0.0", "25%"],
        ["in", "all", "8.0", "0.0", "100%"],
    ]


def test_a_call_shows_its_steps_and_can_be_copied(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "_WORTH_TELLING", 0.0)
    shown = Shown()
    with shown.step("solve"):
        shown.update("solve", 1, 2)
        with shown.step("prove"):
            pass
    copy.deepcopy(shown).update("solve", 2, 2)
    assert [line.split()[1] for line in capfd.readouterr().err.splitlines()] == ["prove", "solve"]
