"""A step planned outside torch.autocast and called within (Trainer's bf16=True, accelerate, Lightning) is
planned there, too.
"""

import warnings

import pytest
import torch
from torch import Tensor, nn

import effcompile
from effcompile.core.errors import AutocastError, GuardError, UsageError


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x))).square().mean()


X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
PASSES = ["no-pointwise"]


def gradients(model: nn.Module, *, halved: bool) -> list[Tensor]:
    model.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=halved):
        loss = model(X)
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters())]


def test_it_is_planned_for_both_and_said_once() -> None:
    model = Model().train()
    step = effcompile.optimize(model, (X,), mode="training", passes=PASSES)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for halved in (False, True, True, False):
            found = gradients(step, halved=halved)
            for ours, wanted in zip(found, gradients(Model().train(), halved=halved), strict=True):
                torch.testing.assert_close(
                    ours, wanted, atol=0 if not halved else 1e-2, rtol=0 if not halved else 2e-2
                )
    assert (
        sum("again, under the same goal, within the torch.autocast" in str(one.message) for one in said) == 1
    )


def test_who_asks_for_errors_gets_one() -> None:
    step = effcompile.optimize(Model().train(), (X,), mode="training", passes=PASSES, on_change="error")
    with (
        torch.autocast("cpu", dtype=torch.bfloat16),
        pytest.raises(AutocastError, match="Plan and call within the same"),
    ):
        step(X)
    with pytest.raises(GuardError, match=r"drop_last=True.*leave `inputs` out"):
        step(X[:3])


def test_a_wrapped_model_says_which_way_round() -> None:
    with pytest.raises(UsageError, match=r"DataParallel\(effcompile.optimize\(model"):
        effcompile.optimize(nn.DataParallel(Model()), (X,), mode="training")


class ByName(Model):
    """Reads attributes by names made at run time, as HuggingFace's code does: then plain attributes of all
    names are guarded.
    """

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(getattr(self, "u" + "p")(x))).square().mean()


@pytest.mark.parametrize("how", [None, "eager", "replan"])
def test_what_stands_for_a_refused_call_is_no_change_of_the_model(how: str | None) -> None:
    step = effcompile.optimize(ByName().train(), (X,), mode="training", passes=PASSES, on_change=how)
    for halved in (False, True):
        for ours, wanted in zip(
            gradients(step, halved=halved), gradients(ByName().train(), halved=halved), strict=True
        ):
            torch.testing.assert_close(
                ours, wanted, atol=0 if not halved else 1e-2, rtol=0 if not halved else 2e-2
            )


def test_a_forward_that_is_wrapped_afterwards_says_what_to_do_instead() -> None:
    """accelerate's prepare sets a forward of its own on the instance, for bf16."""
    step = effcompile.optimize(ByName().train(), (X,), mode="training", passes=PASSES)
    own = step.forward
    step.forward = lambda *args: own(*args)
    with pytest.raises(GuardError, match=r"passes=\['precision'\]"):
        step(X)


class Labelled(Model):
    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return (self.down(torch.relu(self.up(x))) - labels).square().mean()


def test_labels_that_are_taken_away_say_by_whom() -> None:
    step = effcompile.optimize(
        Labelled().train(), {"x": X, "labels": torch.ones(4, 1)}, mode="training", passes=PASSES
    )
    with pytest.raises(GuardError, match="label_smoothing_factor: leave that out"):
        step(x=X)
