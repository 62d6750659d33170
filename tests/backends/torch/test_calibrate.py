"""Ranges of activations are found once for the same program and inputs, and anew where anything changed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import fx, nn

from effcompile.backends.torch import calibrate
from effcompile.backends.torch.calibrate import activation_ranges
from effcompile.capture import capture
from effcompile.cli.upkeep import _clean
from effcompile.ir.program import Program
from effcompile.sites.parts import linears


def made() -> Program:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 8)).eval()
    return capture(model, (torch.randn(4, 16),), {})


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[int]:
    """Grows by one whenever the program is run, with an empty cache."""
    monkeypatch.setenv("EFFCOMPILE_CACHE", str(tmp_path))
    times: list[int] = []

    class Counted(calibrate._Observing):
        def run(self, *args: object, **kwargs: object) -> object:  # type: ignore[override]
            times.append(1)
            return super().run(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(calibrate, "_Observing", Counted)
    return times


def found(program: Program, x: torch.Tensor, sites: int = 2) -> list[tuple[float, int]]:
    """In the order of the sites: nodes are others in another capture."""
    nodes: list[fx.Node] = [site.x for site in linears(program)][:sites]
    ranges = activation_ranges(program, nodes, [[x], [2 * x]])
    return [ranges[node] for node in nodes]


def test_ranges_are_those_of_the_values_and_are_read_back(runs: list[int]) -> None:
    program = made()
    x = torch.linspace(-2.0, 3.0, 64).view(4, 16)
    first = found(program, x)
    scale, zero = first[0]
    assert -4.0 - scale <= -zero * scale <= -2.0  # the second input is twice as wide; outliers are cut
    assert len(runs) == 2
    assert found(made(), x) == first
    assert len(runs) == 2


def test_what_is_kept_is_cleaned_as_ours(runs: list[int], tmp_path: Path) -> None:
    found(made(), torch.randn(4, 16))
    assert list(tmp_path.iterdir())
    _clean(tmp_path)
    assert not list(tmp_path.iterdir())


def test_what_changed_is_observed_again(runs: list[int]) -> None:
    program, x = made(), torch.linspace(-2.0, 3.0, 64).view(4, 16)
    first = found(program, x)
    assert found(program, x + 1)[0] != first[0]
    assert len(runs) == 4
    assert found(program, x, sites=1) == first[:1]
    assert len(runs) == 6
    with torch.no_grad():
        next(iter(program.module.parameters()))[0, 0] += 4  # one element of one weight
    assert found(program, x)[1] != first[1]
    assert len(runs) == 8
    torch.set_num_threads((threads := torch.get_num_threads()) + 1)
    try:
        found(program, x)
        assert len(runs) == 10
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("text", ["", "[]", "[[1.0, 3]]", "[[0.0, 3], [1.0, 2]]", "[[1.0, 300], [1.0, 2]]"])
def test_a_broken_file_costs_observing_again(runs: list[int], tmp_path: Path, text: str) -> None:
    program, x = made(), torch.randn(4, 16)
    first = found(program, x)
    (kept,) = (tmp_path / "ranges").iterdir()
    kept.write_text(text)
    assert found(program, x) == first
    assert len(runs) == 4
    assert found(program, x) == first
    assert len(runs) == 4
