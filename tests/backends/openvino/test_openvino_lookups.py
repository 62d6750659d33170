"""Indices that the model computes: OpenVINO raises for none, ends a call without a word or writes beside a
tensor; skipped where the extra is not installed.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from effcompile.backends.openvino import OpenVino
from effcompile.capture import capture
from effcompile.core.errors import InputsError, LoweringError

pytestmark = pytest.mark.skipif(
    OpenVino().unavailable() is not None, reason="openvino or nncf is not installed"
)

Use = Callable[[Tensor, Tensor, Tensor], Tensor]
#: Of hidden states, an index of each token and a table of 8 rows. Some count from the end, some do not.
INDICES: dict[str, Use] = {
    "gather": lambda h, at, table: h + h.gather(2, at.unsqueeze(-1)),
    "gather of tokens": lambda h, at, table: h + h.gather(1, at.unsqueeze(-1).expand_as(h)),
    "a table": lambda h, at, table: h + nn.functional.embedding(at, table),
    "select": lambda h, at, table: h + h.index_select(1, at[0]),
    "scatter": lambda h, at, table: h + torch.zeros_like(h).scatter(2, at.unsqueeze(-1), 1.0),
    "rows": lambda h, at, table: h + table[at],
    "a token of each": lambda h, at, table: h + h[torch.arange(h.shape[0]), at[:, 0]].unsqueeze(1),
    "put": lambda h, at, table: h.index_put((torch.arange(h.shape[0]), at[:, 0]), h[:, 0]),
    "fill": lambda h, at, table: h.index_fill(1, at[0], 0.5),
    "take": lambda h, at, table: h + torch.take(table, at * 8).unsqueeze(-1),
    "of sizes": lambda h, at, table: (
        h + h[torch.arange(h.shape[0]), -1 - torch.arange(h.shape[0]) % 2].unsqueeze(1)
    ),
}


class Indexed(nn.Module):
    """Each token has an index, which is read off its first number."""

    def __init__(self, use: Use) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.use = nn.Linear(8, 8), use
        self.register_buffer("table", torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self.linear(x), x[..., 0].round().long(), self.table)


def tokens(indices: list[list[int]]) -> Tensor:
    at = torch.tensor(indices, dtype=torch.float32)
    return torch.cat([at.unsqueeze(-1), torch.randn(*at.shape, 7)], -1)


@pytest.mark.parametrize("use", INDICES.values(), ids=list(INDICES))
def test_an_index_in_no_row_is_refused_and_any_other_is_taken(use: Use) -> None:
    model = Indexed(use).eval()
    lowered = OpenVino().lower(capture(model, (tokens([[0, 1, 2], [2, 1, 0]]),)), None, [])
    asked = [
        [[1, 0, 2], [0, 2, 1]], [[1, 0, 2], [0, 2, -1]], [[-3, 1, -2], [-1, -2, 0]], [[0, 1, 0], [3, 3, 3]],
        [[7, 1, 0], [-8, 0, 1]], [[8, 0, 1], [8, 1, 0]], [[-9, 0, 1], [1, 0, 2]], [[4000, 1, 2], [0, 0, 0]],
        [[4, 3, 2, 1, 0], [-5, 4, 1, 2, 4]], [[1, 0], [0, 1]], [[2, 0], [0, 1]], [[0, -2], [0, 1]],
        [[0]], [[1]],
    ]  # fmt: skip
    for indices in [*asked, *asked]:  # of what was refused before, no answer is left
        x = tokens(indices)
        try:
            wanted = model(x).detach()
        except (IndexError, RuntimeError):
            with pytest.raises(LoweringError, match=r"negative or too large"):
                lowered(x)
            continue
        torch.testing.assert_close(lowered(x)[0], wanted, rtol=1e-4, atol=1e-4)


class Remainders(nn.Module):
    def forward(self, ids: Tensor) -> Tensor:
        return ids % 7


def test_integers_that_openvino_rounds_are_refused() -> None:
    ids = torch.tensor([[3, -2], [9, 2**24]])
    lowered = OpenVino().lower(capture(Remainders(), (ids,)), None, [])
    assert torch.equal(lowered(ids)[0], ids % 7)
    for number in (2**24 + 1, 2**31, -(2**31) - 1, 2**32 + 1, -(2**63)):
        with pytest.raises(InputsError, match=rf"ids has {number}\..*another backend"):
            lowered(torch.tensor([[3, number], [1, 2]]))
