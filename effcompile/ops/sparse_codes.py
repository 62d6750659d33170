"""Sparse weights as bytes, in torch: what the compiled product (`int8_sparse.cpp`) reads.

Sixteen outputs share one list of the quads, four columns side by side, in which any of them has a weight
that is not 0: blocks of 16 and more are then held exactly, of smaller ones their union.

Legend: W (N, K), codes s8; strips ⌈N/16⌉; Q quads in all; values (Q, 16, 4) s8; quads (Q) int32, columns / 4;
starts (⌈N/16⌉ + 1) int32: where the quads of a strip begin; sums (16 ⌈N/16⌉) int32: of each output's codes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

__all__ = ["LANES", "QUAD", "SparseCodes"]

#: Outputs of a strip, and columns of a quad.
LANES, QUAD = 16, 4


@dataclass(frozen=True, slots=True)
class SparseCodes:
    """See above."""

    values: Tensor
    quads: Tensor
    starts: Tensor
    sums: Tensor

    @classmethod
    def of(cls, codes: Tensor) -> SparseCodes:
        """Those of codes (N, K), −127 to 127."""
        n, k = codes.shape
        padded = F.pad(codes, (0, -k % QUAD, 0, -n % LANES))
        strips = padded.view(-1, LANES, padded.shape[1] // QUAD, QUAD).transpose(1, 2)  # (strip, quad, 16, 4)
        used = (strips != 0).flatten(2).any(2)
        starts = F.pad(used.sum(1).cumsum(0), (1, 0)).to(torch.int32)
        quads = used.nonzero()[:, 1].to(torch.int32)
        return cls(strips[used].contiguous(), quads, starts, padded.sum(1, dtype=torch.int32))

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """As the operator takes them."""
        return self.values, self.quads, self.starts, self.sums

    def dense(self, n: int, k: int) -> Tensor:
        """The codes (N, K) again."""
        strips = self.starts.numel() - 1
        made = self.values.new_zeros(strips, -(-k // QUAD), LANES, QUAD)
        counts = self.starts.diff().long()
        rows = torch.repeat_interleave(torch.arange(strips), counts)
        made[rows, self.quads.long()] = self.values
        return made.transpose(1, 2).reshape(strips * LANES, -1)[:n, :k]
