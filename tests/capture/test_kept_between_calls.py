"""What a forward keeps from one call for the next is followed in buffers, and refused elsewhere; a capture
leaves no trace of itself.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from effcompile.capture import capture, capture_training
from effcompile.capture.memory import as_it_was, refuse_memory
from effcompile.core.errors import CaptureError
from effcompile.core.torch_compat import is_fake


class Box:
    def __init__(self) -> None:
        self.state = torch.zeros(4)


class Keeping(nn.Module):
    """Adds what the last call kept to what this one computes; `how` says where it is kept."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.linear, self.how = nn.Linear(4, 4), how
        self.state, self.past, self.held, self.box = (
            torch.zeros(4),
            [torch.zeros(4)],
            {"state": torch.zeros(4)},
            Box(),
        )

    def forward(self, x: Tensor) -> Tensor:
        kept = {
            "attribute": self.state,
            "list": self.past[-1],
            "dict": self.held["state"],
            "object": self.box.state,
        }[self.how]
        y = torch.tanh(self.linear(x) + kept)
        new = y.detach().mean(0)
        if self.how == "attribute":
            self.state = new
        elif self.how == "list":
            self.past.append(new)
        elif self.how == "dict":
            self.held["state"] = new
        else:
            self.box.state = new
        return y.square().mean()


@pytest.mark.parametrize("how", ["attribute", "list", "dict", "object"])
def test_what_is_kept_outside_of_buffers_and_read_again_is_refused(how: str) -> None:
    model, x = Keeping(how).train(), torch.randn(3, 4)
    with pytest.raises(CaptureError, match="keeps something outside of its buffers"):
        capture_training(model, (x,))
    held: list[Any] = [model.state, *model.past, *model.held.values(), model.box.state]
    assert len(held) == 4 and not any(is_fake(value) or value.any() for value in held)
    model(x)  # it is the user's own still


@pytest.mark.parametrize("how", ["list", "dict", "object"])
def test_a_capture_for_inference_leaves_nothing_of_its_own(how: str) -> None:
    model = Keeping(how).eval()
    capture(model, (torch.randn(3, 4),), dynamic=False)
    held: list[Any] = [model.state, *model.past, *model.held.values(), model.box.state]
    assert not any(is_fake(value) for value in held)


class Tables(nn.Module):
    """Makes a table once for each length, and counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.tables, self.calls = nn.Linear(4, 4), dict[int, Tensor](), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if len(x) not in self.tables:
            self.tables[len(x)] = torch.arange(len(x))[:, None] / 7
        return (self.linear(x) + self.tables[len(x)]).square().mean()


def test_what_is_kept_and_stays_the_same_is_taken() -> None:
    model = Tables().train()
    capture_training(model, (torch.randn(3, 4),))
    assert not model.tables and not model.calls


class Average(nn.Module):
    """A buffer that each call replaces: it is read for the loss, or it is not."""

    def __init__(self, *, read: bool) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))
        self.mean: Tensor
        self.read = read

    def forward(self, h: Tensor) -> Tensor:
        out = h - self.mean if self.read else h
        self.mean = 0.9 * self.mean + 0.1 * h.detach().mean(0)
        return out


class Around(nn.Module):
    def __init__(self, *, read: bool) -> None:
        super().__init__()
        self.linear, self.average = nn.Linear(4, 4), Average(read=read)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.average(self.linear(x))).square().mean()


@pytest.mark.parametrize("read", [True, False])
def test_a_buffer_of_a_submodule_that_is_replaced_is_written(read: bool) -> None:
    torch.manual_seed(0)
    model, x = Around(read=read).train(), torch.randn(3, 4)
    before = model.average.mean
    step = capture_training(model, (x,))
    assert step.updated == ("average.mean",)
    assert model.average.mean is before and not before.any()


def test_a_model_without_values_is_not_run() -> None:
    with torch.device("meta"):
        model, x = Around(read=True).train(), torch.randn(3, 4)
    assert capture_training(model, (x,)).updated == ("average.mean",)


class Growing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("all", torch.zeros(0, 4))

    def forward(self, x: Tensor) -> Tensor:
        self.all = torch.cat([self.all, x])
        return self.linear(x).square().mean()


def test_a_buffer_that_grows_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"replaces the buffer all, torch.float32 \(0, 4\), by a tensor"):
        capture_training(Growing().train(), (torch.randn(3, 4),))


def test_all_is_put_back() -> None:
    model = Keeping("list")
    model.past.extend([torch.ones(4)] * 2)
    before = copy.copy(model.past)
    with as_it_was(model):
        model.past.pop()
        model.new, model.box.other = 1, 2  # type: ignore[attr-defined]
        del model.held["state"]
    assert (
        all(a is b for a, b in zip(model.past, before, strict=True))
        and not hasattr(model, "new")
        and not hasattr(model.box, "other")
    )
    assert list(model.held) == ["state"]


def test_a_model_without_a_memory_is_run_once() -> None:
    model, x, calls = nn.BatchNorm1d(4).train(), torch.randn(3, 4), list[int]()

    def loss() -> Tensor:
        calls.append(1)
        return (model(x) * torch.rand(4)).sum()

    assert model.running_mean is not None
    refuse_memory(model, loss)
    assert len(calls) == 1 and not model.running_mean.any()
