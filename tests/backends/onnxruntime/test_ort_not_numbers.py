"""Infinite values and NaN: ONNX Runtime's own Clip, largest values, places and orders differ from
PyTorch's.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from effcompile.backends.onnxruntime import OnnxRuntime
from effcompile.capture import capture

NAN, INF = math.nan, math.inf
ROWS = torch.tensor([
    [1, 2, NAN, 4, 5, 6, 7, 8], [1, INF, 3, 4, 5, 6, 7, 8], [-INF] * 8, [NAN] * 8, [INF] * 8,
    [INF, -1, -INF, 2, NAN, 3, 4, 5], [-1, -INF, -2, -3, -4, -5, -6, -7], [0] * 8,
])  # fmt: skip
OPERATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu, "clamp": lambda x: x.clamp(-1, 1), "from below": lambda x: x.clamp(min=0.5),
    "from above": lambda x: x.clamp(max=0.5), "largest": lambda x: x.amax(-1),
    "smallest of all": lambda x: x.amin(-1, keepdim=True), "largest of all": lambda x: x.max(),
    "place": lambda x: x.argmax(-1), "place of the smallest": lambda x: x.argmin(-1, keepdim=True),
    "down": lambda x: x.argmax(0), "largest, its place": lambda x: x.max(-1).indices,
    "best": lambda x: x[:5].topk(3)[0], "in order": lambda x: x[:5].sort(-1)[0],
    "greater": lambda x: torch.maximum(x, x.flip(-1)), "softmax": lambda x: x.softmax(-1),
    "log": lambda x: x.log_softmax(-1), "sign": torch.sign,
    "by hand": lambda x: (x - x.amax(-1, keepdim=True)).exp(),
    "of length 1": lambda x: F.normalize(x, dim=-1),
}  # fmt: skip


class Each(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(operator(x) for operator in OPERATORS.values())


def test_answers_are_pytorchs() -> None:
    torch.manual_seed(0)
    model, x = Each(), torch.randn(8, 8)
    lowered = OnnxRuntime().lower(capture(model, (x,), {}), None, [[x]])
    for given in (x, ROWS):
        for name, found, wanted in zip(OPERATORS, lowered(given), model(given), strict=True):
            torch.testing.assert_close(
                found,
                wanted,
                rtol=1e-5,
                atol=1e-6,
                equal_nan=True,
                msg=lambda told, name=name: f"{name}: {told}",
            )
