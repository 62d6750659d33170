"""Copies of a model that is planned at its first call compute with their own parameters."""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import effcompile

X = torch.linspace(-1.0, 1.0, 32).reshape(4, 8)


class Regression(nn.Module):
    """Returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ((self.layers(x) - x) ** 2).mean()


def deferred(model: nn.Module) -> Any:
    return effcompile.optimize(model, mode="training", passes=["no-pointwise"])


@pytest.mark.parametrize("called", [False, True])
def test_a_deep_copy_of_a_step_trains_itself(called: bool) -> None:
    model, plain = Regression(), Regression()
    step = deferred(model)
    if called:
        step(X)
    twin = copy.deepcopy(step)
    with torch.no_grad():
        for changed in (twin, plain):
            changed.get_parameter("layers.0.weight").mul_(2.0)
    loss, wanted = twin(X), plain(X)
    loss.backward()
    wanted.backward()
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-6) != pytest.approx(step(X).item(), rel=1e-3)
    for ours, theirs in zip(twin.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_an_average_of_a_step_is_the_average() -> None:
    def averaged(model: nn.Module, step: Any) -> float:
        average, optimizer = AveragedModel(step), torch.optim.SGD(model.parameters(), lr=1.0)
        for _ in range(3):
            step(X).backward()
            optimizer.step()
            optimizer.zero_grad()
            average.update_parameters(step)
        return float(average(X))

    model, plain = Regression(), Regression()
    assert averaged(model, deferred(model)) == pytest.approx(averaged(plain, plain), rel=1e-5)


def test_a_shallow_copy_shares_the_parameters() -> None:
    model = Regression()
    twin = copy.copy(deferred(model))
    twin(X).backward()
    assert twin.model is model and model.get_parameter("layers.0.weight").grad is not None


def test_a_copy_answers_with_its_own_weights() -> None:
    model = Regression().layers.eval()
    answer = effcompile.optimize(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        before = answer(X)
        twin = copy.deepcopy(answer)
        with torch.no_grad():
            twin.get_parameter("2.bias").add_(1.0)
        torch.testing.assert_close(twin(X), before + 1.0)
        torch.testing.assert_close(answer(X), before)


@pytest.mark.parametrize("mode", ["inference", "training"])
def test_pickling_is_refused_in_words(mode: str) -> None:
    with pytest.raises(effcompile.UsageError, match=r"cannot be pickled.*state_dict"):
        pickle.dumps(effcompile.optimize(Regression(), mode=mode))  # type: ignore[call-overload]
