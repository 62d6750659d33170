"""How far the tensors of a rank are from those of one process."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor
from torch.distributed.tensor import DTensor


class Errors:
    """The largest relative error, and whose it is.

    A tensor that is nothing but rounding counts by the usual size.
    """

    def __init__(self) -> None:
        self.worst: tuple[float, str] = (0.0, "")

    def add(self, found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
        count = sum(v.numel() for v in wanted.values())
        usual = (sum(float(v.double().square().sum()) for v in wanted.values()) / max(1, count)) ** 0.5
        for name, value in wanted.items():
            ours = found[name].detach()
            ours = ours.full_tensor() if isinstance(ours, DTensor) else ours
            scale = max(float(value.norm()), 1e-3 * usual * value.numel() ** 0.5, 1e-30)
            self.worst = max(self.worst, (float((ours - value).norm()) / scale, name))
