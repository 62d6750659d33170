"""Copies of a planned training model, and of the model in its own class: right, or refused in words."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from scaled_net import Net, X

from effcompile import optimize
from effcompile.core.errors import UsageError


def through_torch(value: object) -> Any:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


WAYS: dict[str, Callable[[Any], Any]] = {
    "copy": copy.copy, "deepcopy": copy.deepcopy, "pickle": lambda value: pickle.loads(pickle.dumps(value)),
    "torch.save": through_torch,
}  # fmt: skip


@pytest.fixture(scope="module")
def planned() -> Any:
    torch.manual_seed(0)
    return optimize(Net(), inputs={"x": X}, mode="training", passes=["no-pointwise"], on_change="eager")


@pytest.mark.parametrize("way", WAYS)
def test_the_model_in_its_own_class_is_copied_as_it_always_was(planned: Any, way: str) -> None:
    made = WAYS[way](planned.unplanned())
    assert type(made) is Net and not {"runner", "plan", "optimizer"} & vars(made).keys()
    assert torch.equal(made(X), planned.unplanned()(X))
    assert (made.part.weight is planned.part.weight) == (way == "copy")


@pytest.mark.parametrize("way", WAYS)
def test_a_planned_model_is_copied_or_says_how_it_is_kept(planned: Any, way: str) -> None:
    if way in ("pickle", "torch.save"):
        with pytest.raises(UsageError, match="cannot be pickled"):
            WAYS[way](planned)
        return
    made = WAYS[way](planned)
    made(X).backward()
    assert made.part.weight.grad is not None and made.plan.decisions == planned.plan.decisions
    made.zero_grad()


def test_what_is_set_on_one_is_set_on_the_other(planned: Any) -> None:
    """Or a call that the plan does not hold for would run the model as it was.

    A copy has guards of its own: the first one's stay.
    """
    own, _ = planned.unplanned(), copy.copy(planned)
    planned.scale = 3.0
    try:
        with pytest.warns(UserWarning, match="runs the original Net"):
            found = planned(X)
        assert own.scale == 3.0 and torch.equal(found, own(X))
    finally:
        planned.scale = 2.0
