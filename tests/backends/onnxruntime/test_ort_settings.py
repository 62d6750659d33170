"""ONNX Runtime's settings are those that were measured fastest, by more than noise, beside defaults measured
before and after.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch

from effcompile.backends.onnxruntime import session
from effcompile.backends.onnxruntime.session import Settings

DEFAULT = Settings(threads=4)
QUIET, BARE, HALF = Settings(threads=4, spinning=False), Settings(threads=4, arena=False), Settings(threads=2)


@pytest.mark.parametrize(
    ("defaults", "others", "wanted"),
    [
        ((1.0, 1.0), {QUIET: 0.9, BARE: 0.8, HALF: 1.1}, BARE),
        ((1.0, 1.0), {QUIET: 0.99, BARE: 1.0, HALF: 1.0}, DEFAULT),  # 1 % is noise
        ((1.0, 1.2), {QUIET: 1.05, BARE: 1.2, HALF: 1.3}, QUIET),  # the machine became slower meanwhile
        ((1.0, 0.8), {QUIET: 0.9, BARE: 0.95, HALF: 1.0}, DEFAULT),
    ],
)
def test_the_fastest_by_more_than_noise(
    defaults: tuple[float, float],
    others: Mapping[Settings, float],
    wanted: Settings,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    left, asked = list(defaults), []

    def seconds(opened: Settings, feeds: object) -> float:
        asked.append(opened)
        return left.pop(0) if opened == DEFAULT else others[opened]

    monkeypatch.setattr(session, "open_session", lambda path, settings: settings)
    monkeypatch.setattr(session, "timed", seconds)
    monkeypatch.setattr(session, "usable_threads", lambda: 4)
    chosen, told, opened = session.tune(Path("model.onnx"), {}, left.pop(0))
    assert chosen == wanted and asked == [QUIET, BARE, HALF, DEFAULT]
    assert opened == (DEFAULT if wanted == DEFAULT else None)  # a session of the chosen ones, or none
    assert told == {
        "4 threads": defaults[0],
        **{settings.describe(): value for settings, value in others.items()},
    }


def test_a_model_is_timed_under_them_once_and_of_another_day_it_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from effcompile.backends.onnxruntime import tuned

    monkeypatch.setenv("EFFCOMPILE_CACHE", str(tmp_path / "cache"))
    timed: list[Path] = []

    def tune() -> tuple[Settings, dict[str, float]]:
        timed.append(path)
        return QUIET, {"4 threads": 0.5, "4 threads no spinning": 0.25}

    path, x = tmp_path / "model.onnx", np.zeros((2, 3), np.float32)
    path.write_bytes(b"one")
    first, second = tuned.tuned(path, {"x": x}, tune), tuned.tuned(path, {"x": x + 1}, tune)
    assert first == second and first.chosen == QUIET and len(timed) == 1
    said = "4 threads: 500 ms, 4 threads no spinning: 250 ms"
    assert second.told() == said
    monkeypatch.setattr(tuned, "_today", lambda: "2031-01-02")
    assert tuned.tuned(path, {"x": x}, tune).told() == f"{said} ({first.day})"
    # at other sizes, with other bytes, and with other settings to choose from, it is another question
    tuned.tuned(path, {"x": x[:1]}, tune)
    path.write_bytes(b"two")
    tuned.tuned(path, {"x": x}, tune)
    path.with_name("model.onnx.data").write_bytes(b"weights")
    tuned.tuned(path, {"x": x}, tune)
    monkeypatch.setattr(session, "usable_threads", lambda: 7)
    tuned.tuned(path, {"x": x}, tune)
    assert len(timed) == 5
    for file in (tmp_path / "cache" / "sessions").iterdir():
        file.write_text('{"chosen": {"threads": "many"}, "seconds": {}, "day": ""}')
    assert tuned.tuned(path, {"x": x}, tune).chosen == QUIET and len(timed) == 6


def test_torchs_threads_are_as_many_as_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "usable_cores", lambda: 8)
    before = torch.get_num_threads()
    try:
        for threads, wanted in ((1, 1), (3, 3), (16, 8)):
            torch.set_num_threads(threads)
            assert session.default_settings().threads == session.settings_of({}).threads == wanted
            assert max(each.threads for each in session.candidates()) == wanted
        assert session.settings_of({"threads": 5}).threads == 5  # what a plan says stands
    finally:
        torch.set_num_threads(before)
    monkeypatch.delitem(sys.modules, "torch")
    assert session.default_settings().threads == 8
