"""Indices that an integer overflow makes negative, on torch-inductor: to a C++ compiler none does."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import effcompile
from effcompile.core.errors import LoweringError


class Looked(nn.Module):
    def __init__(self, at: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.table, self.at = nn.Embedding(64, 16), at

    def forward(self, x: Tensor) -> Tensor:
        return self.table.weight[self.at(x.long())] * 2


@pytest.mark.parametrize(
    ("at", "bad"),
    [
        (torch.abs, [float("inf"), float("-inf"), float("nan"), 1e20, 64.0]),
        (lambda i: i.clamp(min=0) * 4, [2.0**63 - 2**10, 3 * 2.0**61, 16.0]),
    ],
    ids=["abs", "clamped and multiplied"],
)
def test_an_index_that_overflows_is_refused_as_by_torch(
    at: Callable[[Tensor], Tensor], bad: list[float]
) -> None:
    model = Looked(at).eval()
    good = torch.tensor([1.0, 2.0, 3.0] * 8, dtype=torch.float64)
    fast = effcompile.optimize(model, inputs=good, backend="torch-inductor")
    torch.testing.assert_close(fast(good), model(good))
    for value in bad:
        wrong = torch.where(good == 2.0, value, good)
        with pytest.raises(IndexError):
            model(wrong)
        with pytest.raises(LoweringError):
            fast(wrong)


def test_what_others_compile_is_compiled_as_it_was() -> None:
    from torch._inductor import cpp_builder

    from effcompile.core.torch_compat_inductor import compiling

    with compiling():
        inside = cpp_builder._get_optimization_cflags("g++")[0]
    outside = cpp_builder._get_optimization_cflags("g++")[0]
    assert [flag for flag in inside if flag not in outside] == ["fwrapv"]
