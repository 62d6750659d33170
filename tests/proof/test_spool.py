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


@pytest.mark.parametrize("value", [torch.randn(300, 400), torch.randn(400, 300).t(), torch.ones(2).bool()])
def test_a_mapped_tensor_is_the_same_and_its_own(value: torch.Tensor) -> None:
    """What is written to it is not in the file, and it outlives the spool."""
    aside = spool.Spool()
    aside.put("before", torch.ones(3))
    aside.put("x", value)
    found, again = aside.mapped("x"), aside.mapped("x")
    assert found is not None and again is not None
    assert found.stride() == value.stride() and torch.equal(found, value)
    found.zero_()
    assert torch.equal(again, value) and torch.equal(aside["x"], value)  # type: ignore[arg-type]
    del aside
    assert torch.equal(again, value) and not found.any()


def test_asking_for_a_name_reads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    aside = spool.Spool()
    aside.put("x", torch.ones(3))
    monkeypatch.setattr(spool.Spool, "__getitem__", None)
    assert "x" in aside and "y" not in aside
