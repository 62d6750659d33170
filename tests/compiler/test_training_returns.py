"""The loss is found in whatever a forward returns: planned, proven, and given back where it was."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

import effcompile

IDS = torch.arange(64).view(8, 8) % 29
LABELS = (IDS + 1) % 29


class Named(NamedTuple):
    logits: torch.Tensor | None
    loss: torch.Tensor


@dataclass
class Fields:
    loss: torch.Tensor
    logits: torch.Tensor | None


#: What is made of (logits, loss), and where the loss is then.
RETURNS: dict[str, tuple[Callable[..., Any], Callable[[Any], torch.Tensor]]] = {
    "nanoGPT": (lambda logits, loss: (logits, loss), lambda out: out[1]),
    "with a metric": (lambda logits, loss: (logits, loss, loss.detach() * 2), lambda out: out[1]),
    "list": (lambda logits, loss: [logits, loss], lambda out: out[1]),
    "named": (lambda logits, loss: Named(logits, loss), lambda out: out.loss),
    "dataclass": (lambda logits, loss: Fields(loss, logits), lambda out: out.loss),
}


class Net(nn.Module):
    def __init__(self, returns: Callable[..., Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(29, 32)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(2)
        )
        self.returns = returns

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> Any:
        x = self.embedding(ids)
        for block in self.blocks:
            x = x + block(x)
        logits = F.linear(x, self.embedding.weight)
        return self.returns(logits, F.cross_entropy(logits.flatten(0, 1), labels.flatten()))


@pytest.mark.parametrize("kind", RETURNS)
def test_a_step_is_proven_and_gives_back_what_the_model_returns(kind: str) -> None:
    returns, loss_of = RETURNS[kind]
    model, original = Net(returns).train(), Net(returns).train()
    whole = effcompile.plan(model, (IDS, LABELS), mode="training").peak_bytes
    assert whole is not None
    made = effcompile.optimize(model, (IDS, LABELS), mode="training", memory=int(0.9 * whole))
    assert made.plan.checks and all(check.passed for check in made.plan.checks)
    assert type(made(IDS, LABELS)) is type(original(IDS, LABELS))
    loss, wanted = loss_of(made(IDS, LABELS)), loss_of(original(IDS, LABELS))
    loss.backward(), wanted.backward()
    torch.testing.assert_close(loss, wanted)
    for (name, found), (_, own) in zip(model.named_parameters(), original.named_parameters(), strict=True):
        torch.testing.assert_close(found.grad, own.grad, msg=name)
