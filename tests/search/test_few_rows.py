"""Text that a model writes is written by its own numbers, however its products are ordered."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F  # noqa: N812 - its customary name

from effcompile.search.generation.text import _FewRows


@pytest.mark.parametrize("rows", [1, 2, 4, 5])
@pytest.mark.parametrize("biased", [False, True])
def test_products_of_few_rows_are_those_of_the_definition(rows, biased):
    torch.manual_seed(0)
    x, weight = torch.randn(rows, 1, 24), torch.randn(40, 24)
    bias = torch.randn(40) if biased else None
    with _FewRows():
        found = F.linear(x, weight, bias)
    told = torch.einsum("bsk,nk->bsn", x.double(), weight.double())
    torch.testing.assert_close(found.double(), told + (bias.double() if biased else 0), rtol=1e-5, atol=1e-5)
    assert found.shape == (rows, 1, 40)
