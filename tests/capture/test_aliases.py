"""A parameter that the forward reads by a name that is not registered: refused in words before anything is
planned, and nothing else is.
"""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor, nn

from effcompile.capture.training import capture_training
from effcompile.core.errors import CaptureError

KEPT: dict[str, Tensor] = {}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.head = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return (self.head(self.linear(x)) @ self.other()).square().mean()

    def other(self) -> Tensor:
        raise NotImplementedError


class InList(Model):
    def __init__(self) -> None:
        super().__init__()
        self.kept = [self.linear.weight]

    def other(self) -> Tensor:
        return self.kept[0]


class InAttribute(Model):
    def __init__(self) -> None:
        super().__init__()
        self.__dict__["plain"] = self.linear.weight

    def other(self) -> Tensor:
        found: Tensor = self.plain
        return found


class InGlobal(Model):
    def __init__(self) -> None:
        super().__init__()
        KEPT["weight"] = self.linear.weight

    def other(self) -> Tensor:
        return KEPT["weight"]


class OfAView(Model):
    def __init__(self) -> None:
        super().__init__()
        self.views = [self.linear.weight.view(8, 8)]

    def other(self) -> Tensor:
        return self.views[0]


class Detached(Model):
    """No gradient goes through it."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = [self.linear.weight.detach()]

    def other(self) -> Tensor:
        return self.kept[0]


class DetachedBesideOne(Detached):
    """What is not detached is read by nobody."""

    def __init__(self) -> None:
        super().__init__()
        self.beside = [self.linear.weight]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * len(self.beside)


class DetachedAndNot(DetachedBesideOne):
    """Both are read, the detached one first."""

    def other(self) -> Tensor:
        return self.kept[0] + self.beside[0]


class DetachedAndNotOfAnother(DetachedBesideOne):
    def other(self) -> Tensor:
        return self.beside[0] + self.kept[0]


class DetachedViewOfOne(InList):
    """It is detached when it is read, and is no tensor that anybody holds."""

    def other(self) -> Tensor:
        return self.kept[0].detach() + self.kept[0]


class Listed(Model):
    """Its list is read for its length alone."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = list(self.parameters())

    def other(self) -> Tensor:
        return self.head.weight * len(self.kept)


class Registered(Model):
    def __init__(self) -> None:
        super().__init__()
        self.kept = nn.ParameterList([self.linear.weight])
        self.tied = self.linear.weight

    def other(self) -> Tensor:
        return self.kept[0] + self.tied


@pytest.mark.parametrize(
    ("kind", "place"),
    [
        (InList, "model.kept[0]"),
        (InAttribute, "model.plain"),
        (InGlobal, "KEPT['weight']"),
        (OfAView, "model.views[0]"),
        (DetachedAndNot, "model.beside[0]"),
        (DetachedAndNotOfAnother, "model.beside[0]"),
        (DetachedViewOfOne, "model.kept[0]"),
    ],
)
def test_an_alias_is_named(kind: type[Model], place: str) -> None:
    with pytest.raises(CaptureError, match=rf"reads the parameter linear\.weight at \S*{re.escape(place)}"):
        capture_training(kind().train(), (torch.randn(4, 8),))


@pytest.mark.parametrize("kind", [Detached, DetachedBesideOne, Listed, Registered])
def test_what_is_no_alias_is_captured(kind: type[Model]) -> None:
    assert capture_training(kind().train(), (torch.randn(4, 8),)).roles


def test_a_frozen_one_has_no_gradient_to_lose() -> None:
    model = InList().train()
    model.linear.weight.requires_grad_(False)
    assert capture_training(model, (torch.randn(4, 8),)).roles


@pytest.mark.parametrize("kind", [InList, OfAView])
def test_machines_that_are_not_here(kind: type[Model]) -> None:
    """Tensors without values lie at no address that tells them apart."""
    with torch.device("meta"):
        model = kind().train()
        with pytest.raises(CaptureError, match=r"linear\.weight at"):
            capture_training(model, (torch.randn(4, 8),))
        assert capture_training(Detached().train(), (torch.randn(4, 8),)).roles
