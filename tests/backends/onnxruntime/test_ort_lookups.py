"""A negative index that the model computes: PyTorch raises, ONNX Runtime alone would count it
from the end.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import effcompile
from effcompile.core.errors import LoweringError

Use = Callable[["Model", Tensor, Tensor], Tensor]
#: What is done with hidden states and indices.
USES: dict[str, Use] = {
    "embedding": lambda model, h, at: h + model.table(at),
    "gather": lambda model, h, at: h.gather(2, at.unsqueeze(-1)),
    "index_select": lambda model, h, at: h + model.table.weight.index_select(0, at.flatten()).view_as(h),
    "scatter": lambda model, h, at: h.scatter(2, at.unsqueeze(-1), 1.0),
    "one_hot": lambda model, h, at: h + F.one_hot(at, 8),
    "one_hot, never negative": lambda model, h, at: h + F.one_hot((2 * at - 7).abs(), 8),
    "nll_loss": lambda model, h, at: F.nll_loss(
        h.flatten(0, 1).log_softmax(-1), at.flatten(), reduction="none"
    ),
}


class Model(nn.Module):
    def __init__(self, use: Use) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.linear, self.use = nn.Embedding(8, 8), nn.Linear(8, 8), use

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self, self.linear(self.table(x % 8)), x - 3)


@pytest.mark.slow
@pytest.mark.parametrize("use", USES.values(), ids=list(USES))
def test_a_computed_index_that_is_out_of_range_raises(use: Use) -> None:
    model, good = Model(use).eval(), torch.tensor([[3, 4, 10], [9, 5, 3]])
    run = effcompile.optimize(model, inputs=good, backend="onnxruntime", target="cpu-generic", dynamic=False)
    with torch.no_grad():
        torch.testing.assert_close(run(good), model(good), rtol=1e-4, atol=1e-5)
        for wrong in (2, 0, -5, 11, 4000):
            bad = good.clone()
            bad[1, 1] = wrong
            with pytest.raises((IndexError, RuntimeError)):
                model(bad)
            with pytest.raises(LoweringError):
                run(bad)
        run(good)
