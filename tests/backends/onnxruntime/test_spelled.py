"""Operators that torch.onnx does not translate, in others."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import effcompile


class Places(nn.Module):
    """Where values lie among sorted ones: a row's own, those of all rows, and by an order that is given."""

    def __init__(self, *, right: bool, int32: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.right, self.int32 = right, int32
        self.register_buffer("bounds", torch.tensor([-1.0, 0.0, 0.5]))

    def forward(self, x: Tensor, among: Tensor) -> tuple[Tensor, ...]:
        said = {"right": self.right, "out_int32": self.int32}
        ordered, order = among.sort(-1)
        own = torch.searchsorted(ordered, x, **said)
        by_order = torch.searchsorted(among, x, sorter=order, **said)
        everyone = torch.searchsorted(ordered[0].contiguous(), x, side="right" if self.right else "left")
        return (
            self.linear(x) + own,
            own,
            by_order,
            everyone,
            torch.bucketize(x, self.bounds, right=self.right),
        )


@pytest.mark.parametrize("right", [False, True])
@pytest.mark.parametrize("int32", [False, True])
def test_places_among_sorted_values_are_torchs(right: bool, int32: bool) -> None:
    model = Places(right=right, int32=int32).eval()
    fast = effcompile.optimize(
        model, inputs=(torch.randn(3, 6), torch.randn(3, 9)), backend="onnxruntime", dynamic=True
    )
    x, among = torch.randn(5, 6), torch.randn(5, 9)
    x[0, :3] = torch.tensor([float("nan"), float("inf"), float("-inf")])
    x[1, :2] = torch.stack([among[1, 3], torch.tensor(0.5)])  # equal ones
    for ours, theirs in zip(fast(x, among), model(x, among), strict=True):
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs, equal_nan=True)
