"""A rate is measured once a machine, a torch and a compiler, and again where what is kept cannot be used."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from effcompile.machine import rates
from effcompile.passes.training import levers
from effcompile.passes.training.compress import Compress
from effcompile.passes.training.offload import _link


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    monkeypatch.setenv("EFFCOMPILE_CACHE", str(tmp_path))
    return []


def test_one_is_measured_once(asked: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measure() -> tuple[float, float]:
        asked.append("")
        return 1e-9 * len(asked), 2e-9

    assert (
        rates.kept_rates("link", "cpu", measure) == rates.kept_rates("link", "cpu", measure) == (1e-9, 2e-9)
    )
    assert len(asked) == 1
    assert rates.kept_rates("another", "cpu", measure)[0] == 2e-9  # and the first stays
    assert rates.kept_rates("link", "cpu", measure)[0] == 1e-9
    rates.kept_rates("link", "cuda", measure)  # a GPU is measured by its own clock, and another may lie there
    assert len(asked) == 3
    monkeypatch.setattr(rates, "_kernels", lambda: "others")
    assert rates.kept_rates("link", "cpu", measure)[0] == 4e-9


def test_what_cannot_be_a_rate_is_neither_kept_nor_read(asked: list[str], tmp_path: Path) -> None:
    assert rates.kept_rates("link", "cpu", lambda: (0.0,)) == (0.0,)
    assert rates.kept_rates("link", "cpu", lambda: (1e-9,)) == (1e-9,)
    (file,) = tmp_path.glob("rates-*.json")
    for content in ("", "{}", file.read_text().replace("1e-9", "-1")):
        file.write_text(content)
        assert rates.kept_rates("link", "cpu", lambda: (3e-9,)) == (3e-9,)
        file.unlink()


def test_the_link_and_the_codecs_are_kept(asked: list[str], tmp_path: Path) -> None:
    _link.cache_clear()
    levers.packing_seconds.cache_clear()
    way, *_ = Compress().ways
    first = _link("", "cpu"), levers.packing_seconds(way, torch.float32, "cpu")
    _link.cache_clear()
    levers.packing_seconds.cache_clear()
    assert (_link("", "cpu"), levers.packing_seconds(way, torch.float32, "cpu")) == first
    assert list(tmp_path.glob("rates-*.json"))
