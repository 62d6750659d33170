"""ONNX Runtime's settings are those that were measured fastest, by more than noise, beside defaults measured
before and after.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

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
