"""Tensors put aside: the same ones come back, and the large ones are no memory of the process meanwhile."""

import pytest
import torch

from effcompile.proof import spool


@pytest.mark.parametrize("large", [True, False])
def test_what_is_put_aside_comes_back(large: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spool, "_LARGE", 1 if large else 1 << 30)
    values = [
        torch.randn(3, 5),
        torch.arange(6).view(2, 3).t(),
        torch.tensor(float("nan")),
        torch.zeros(0, 4),
    ]
    aside = spool.put_aside(values)
    assert isinstance(aside, tuple) is not large
    assert (
        len(aside) == 4
        and aside[-1].shape == (0, 4)
        and [t.dtype for t in aside[:2]] == [torch.float32, torch.int64]
    )
    for found, wanted in zip(aside, values, strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)
    assert (aside[0] is values[0]) is not large
    with pytest.raises(IndexError):
        aside[4]
