"""A model that is planned to be run is called by its own step alone, which tells what a forward keeps."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import effcompile
from effcompile.capture import training
from effcompile.capture.memory import CalledAlone
from effcompile.core.errors import CaptureError


class Box:
    """An object of the user's own."""

    last: Tensor | None = None


class Remembers(nn.Module):
    """Adds what an earlier call kept, where it is not traced. `kind`: of what: "tensor", which is read again;
    "unread" is not; None for nothing at all, though the code might.
    """

    def __init__(self, kind: str | None) -> None:
        super().__init__()
        self.linear, self.box, self.kind = nn.Linear(4, 4), Box(), kind

    def forward(self, x: Tensor) -> Tensor:
        loss = self.linear(x).square().mean()
        if self.kind is not None and not torch.compiler.is_compiling():
            if self.kind == "tensor" and self.box.last is not None:
                loss = loss + self.box.last
            self.box.last = loss.detach()
        return loss


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """One entry for each time that the model was called alone."""
    found, real = list[str](), training.refuse_memory

    def noted(model: nn.Module, loss: training.Callable[[], Tensor]) -> CalledAlone:
        found.append(type(model).__name__)
        return real(model, loss)

    monkeypatch.setattr(training, "refuse_memory", noted)
    return found


def test_a_forward_that_might_keep_something_and_does_not_is_called_by_the_step_alone(
    asked: list[str],
) -> None:
    torch.manual_seed(0)
    model, x = Remembers(None), torch.randn(2, 4)
    planned = effcompile.optimize(model, (x,), mode="training")
    assert asked == []
    assert torch.equal(planned(x), model(x))


def test_what_is_kept_and_read_again_is_refused_by_the_model_s_own_step(asked: list[str]) -> None:
    with pytest.raises(CaptureError, match="reads it at the next call"):
        effcompile.optimize(Remembers("tensor"), (torch.randn(2, 4),), mode="training")
    assert asked == ["Remembers"]


def test_what_is_kept_and_not_read_is_left_unfollowed(asked: list[str]) -> None:
    torch.manual_seed(0)
    model, x = Remembers("unread"), torch.randn(2, 4)
    planned = effcompile.optimize(model, (x,), mode="training")
    assert asked == ["Remembers"]
    wanted = model(x)  # which keeps another tensor
    assert torch.equal(planned(x), wanted)


def test_a_plan_alone_has_the_model_called(asked: list[str]) -> None:
    effcompile.plan(Remembers(None), (torch.randn(2, 4),), mode="training")
    assert asked == ["Remembers"]
