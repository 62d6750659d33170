"""What is no attention, or may not be replaced: left as it is, with a reason."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from match_helpers import MIN, Attend, B, H, Model, S, close, exported, inputs, only, refused
from torch import Tensor, nn

from effcompile.sites.attention.rewrite import Rewritten, rewrite


def plain(m: Model, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
    return close(q @ k.mT, v)


def router(m: Model, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
    return torch.softmax(m.q(q), -1).topk(2, -1).values


def no_values(m: Model, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
    return torch.softmax(q @ k.mT, -1).relu()


def other_axis(m: Model, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
    return torch.softmax(q @ k.mT, -2) @ v


def weak_fill(m: Model, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
    return close((q @ k.mT).masked_fill(hidden, -5.0), v)


def weighed_keys(m: Model, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
    return close((q @ k.mT) * k.sum(-1)[:, :, None], v)


def tanh_of_sum(m: Model, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
    return close(torch.tanh(q @ k.mT + m.sinks[:, None, None]), v)


def scores_kept(m: Model, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
    scores = q @ k.mT
    return close(scores * 0.3, v) + scores.sum()


def floored(m: Model, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
    return close(torch.max(q @ k.mT + torch.where(hidden, MIN, 0.0), torch.tensor(MIN)), v)


def aliased(m: Model, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
    """`scores` is doubled through a view of it, off the way to the softmax."""
    scores = q @ k.mT
    scores.view(-1).mul_(2.0)
    return close(scores, v)


def overwritten(m: Model, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
    weights = torch.softmax(q @ k.mT, -1)
    q.mul_(2.0)
    return weights @ v + q


def wrong_part(m: Model, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
    sinks = m.sinks.reshape(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[2], -1)
    return torch.softmax(torch.cat([q @ k.mT, sinks], -1), -1)[..., 1:] @ v


REFUSED: list[tuple[Attend, str]] = [
    (router, "not from a product of queries and keys"),
    (no_values, "meet no values: they are read by relu"),
    (other_axis, "over an axis that is not the last"),
    (weak_fill, "-5, which hides nothing"),
    (weighed_keys, "weighs keys one by one"),
    (tanh_of_sum, "a tanh of more than the scaled scores"),
    (scores_kept, "are read by sum"),
    (floored, "clamps the scores"),
    (aliased, "are read by view"),
    (overwritten, "writes to its operands"),
    (wrong_part, "another part of the weights"),
]


@pytest.mark.parametrize(("attend", "reason"), REFUSED, ids=[attend.__name__ for attend, _ in REFUSED])
def test_what_is_left_has_a_reason(attend: Attend, reason: str) -> None:
    model = Model(attend)
    graph = exported(model, *inputs())
    assert reason in refused(graph)
    rewrite(graph.graph)
    torch.testing.assert_close(graph(*inputs()), model(*inputs()))


def test_dropout_and_returned_weights_are_declined() -> None:
    class Returning(Model):
        def forward(self, x: Tensor, hidden: Tensor) -> Any:
            q, k, v = (linear(x).view(B, S, H, -1).transpose(1, 2) for linear in (self.q, self.k, self.v))
            weights = torch.softmax(q @ k.mT, -1)
            return weights @ v, weights

    def dropping(m: Model, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
        return nn.functional.dropout(torch.softmax(q @ k.mT, -1), 0.25, training=True) @ v

    graph = exported(Returning(plain), *inputs())
    found = only(graph)
    assert found.weights is found.anchor
    assert "returned or read again" in str(getattr(rewrite(graph.graph)[0], "reason", ""))
    graph = exported(Model(dropping), *inputs())
    assert only(graph).dropout == 0.25
    assert "drops 0.25" in str(getattr(rewrite(graph.graph)[0], "reason", ""))


def test_training_refuses_what_has_other_gradients() -> None:
    def twice_masked(m: Model, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
        causal = torch.ones(S, S, dtype=torch.bool).tril()
        return close(torch.where(causal, q @ k.mT, MIN) + torch.where(hidden, MIN, 0.0), v)

    for form in ("attention", "sdpa"):
        model = Model(twice_masked)
        graph = exported(model, *inputs())
        (outcome,) = rewrite(graph.graph, forms=(form,), training=True)  # type: ignore[arg-type]
        assert "gradient" in str(getattr(outcome, "reason", ""))
        (outcome,) = rewrite(graph.graph, forms=(form,))  # type: ignore[arg-type]
        assert isinstance(outcome, Rewritten)
        torch.testing.assert_close(graph(*inputs()), model(*inputs()), rtol=1e-5, atol=1e-5)
