"""A lever over values as another package would have it: floats are held in 16 bits between forward and
backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from effcompile.machine.target import Target
from effcompile.passes.training.levers import Rates
from effcompile.schedules.ways import Codec, Way


@torch.library.custom_op("effcompile_half::pack", mutates_args=())
def pack(x: Tensor, stride: Sequence[int]) -> Tensor:
    return x.as_strided((x.numel(),), (1,)).to(torch.bfloat16).view(torch.uint8)


@torch.library.custom_op("effcompile_half::unpack", mutates_args=())
def unpack(packed: Tensor, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
    x = torch.empty_strided(size, stride, dtype=dtype, device=packed.device)
    x.as_strided((x.numel(),), (1,)).copy_(packed.view(torch.bfloat16))
    return x


pack.register_fake(lambda x, stride: x.new_empty(2 * x.numel(), dtype=torch.uint8))
unpack.register_fake(
    lambda packed, size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype, device=packed.device)
)

HALF = Way(
    name="half",
    by="half",
    said="in 16 bits",
    exact=False,
    without="nothing is held in 16 bits",
    codec=Codec(
        pack=torch.ops.effcompile_half.pack.default,
        unpack=torch.ops.effcompile_half.unpack.default,
        packed_bytes=lambda count: 2 * count,
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Half:
    """`share`: values below this share of their block's bytes stay as they are."""

    share: float = 0.02

    name: ClassVar[str] = "half"
    exact: ClassVar[bool] = False
    known: ClassVar[tuple[Way, ...]] = (HALF,)

    @property
    def ways(self) -> tuple[Way, ...]:
        return self.known

    def takes(self, value: Tensor, learned: bool) -> bool:
        return learned and value.dtype == torch.float32

    def rates(self, target: Target, here: bool) -> Rates:
        return Rates(pack={"half": 6 / target.memory_bandwidth})
