"""A backend that was not built, and may be as fast as the best turned out to be, is built and timed, too."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import nn

import effcompile
from effcompile.backends.base import Backend
from effcompile.backends.torch import TorchInductor
from effcompile.compiler import borne_out, measure
from effcompile.compiler import compile as compiling
from effcompile.compiler import settle as settling
from effcompile.compiler.settle import Outcome
from effcompile.core.errors import LoweringError
from effcompile.core.findings import Failed, NotBuilt
from effcompile.ir.program import Program
from effcompile.search import raced


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """What is built first takes a second a call, what is built later half of one; whoever was compared.
    Nothing is known of an earlier run.
    """
    monkeypatch.setattr(raced, "recalled", lambda *_: None)
    monkeypatch.setattr(compiling, "SHORTLIST", 0.0)
    compared: list[list[str]] = []

    def compare(program: Program, model: nn.Module, outcomes: Sequence[Outcome]) -> dict[str, float]:
        names = [outcome.plan.backend for outcome in outcomes]
        compared.append(names)
        return {measure.ORIGINAL: 2.0} | {name: 1.0 if name == names[0] else 0.5 for name in names}

    monkeypatch.setattr(measure, "compare", compare)
    return compared


def plan(**asked: object) -> effcompile.Plan:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)).eval()
    made: effcompile.Plan = effcompile.optimize(model, inputs=(torch.randn(3, 8),), **asked).plan  # type: ignore[call-overload]
    return made


def test_what_may_be_as_fast_is_built_and_taken(slow: list[list[str]]) -> None:
    found = plan()
    first, again, then = slow[:3]
    assert first == again and len(first) == 1 and set(first) < set(then)
    assert found.backend in then[1:]
    assert not any(isinstance(each.note, NotBuilt) for each in found.candidates)
    assert {each.backend for each in found.candidates if each.measured_seconds} == set(then)


def test_one_that_fails_is_told_and_the_best_stays(
    slow: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise LoweringError("it cannot be")

    first = plan(effort="low").backend
    for backend in (TorchInductor,):
        if backend.name != first:
            monkeypatch.setattr(backend, "lower", fails)
    found = plan()
    if first != TorchInductor.name:
        (of,) = (each for each in found.candidates if each.backend == TorchInductor.name)
        assert isinstance(of.note, Failed) and "it cannot be" in of.note.message, of


def test_none_is_built_twice_where_what_was_measured_is_doubted(
    slow: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[str] = []
    lower = settling._lower_and_check

    def counted(shop: settling.Workshop, backend: Backend, made: effcompile.Plan) -> Outcome:
        built.append(backend.name)
        return lower(shop, backend, made)

    monkeypatch.setattr(settling, "_lower_and_check", counted)
    monkeypatch.setattr(borne_out, "busy", lambda: "others")
    monkeypatch.setattr("effcompile.ir.plan.FAR_APART", 1.5)
    assert plan().misjudged is not None
    assert len(slow) > 3 and len(built) == len(set(built))


def test_a_second_look_may_decide(slow: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []

    def compare(program: Program, model: nn.Module, outcomes: Sequence[Outcome]) -> dict[str, float]:
        looks.append(len(outcomes))
        fast = 1e-12 if len(looks) > 1 else 1.0
        return {measure.ORIGINAL: 2.0} | {outcome.plan.backend: fast for outcome in outcomes}

    monkeypatch.setattr(measure, "compare", compare)
    assert any(isinstance(each.note, NotBuilt) for each in plan().candidates)
    assert looks == [1, 1]


def test_not_with_low_effort(slow: list[list[str]]) -> None:
    found = plan(effort="low")
    assert all(len(names) == 1 for names in slow), slow
    assert any(isinstance(each.note, NotBuilt) for each in found.candidates), found.candidates
