"""The sparse forms that a weight can be served in: those that its zeros allow as it is, and those that
pruning makes.

Legend: weight (N, K), block side b, grid (R, C) = (N / b, K / b).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from effcompile.ir.formats import TWO_OF_FOUR, WeightFormat, in_bytes, sparse_format
from effcompile.sparse import BLOCKS, saliency
from effcompile.sparse.forms import coded_bytes, pattern_format, stored_bytes

#: A weight with a larger share of kept entries is no sparse weight; there is nothing to gain.
MOST_KEPT = 0.75


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseForm:
    """One sparse form of a weight: `kept` of `blocks` blocks of side b; `mask` makes the grid (R, C) of them.

    `given`: everything else is 0 already, so that the form changes no result.
    """

    format: WeightFormat
    block: int
    kept: int
    blocks: int
    given: bool
    mask: Callable[[], Tensor]

    @property
    def density(self) -> float:
        return self.kept / self.blocks

    @property
    def coded(self) -> bool:
        """Whether what is kept is held in bytes."""
        return self.format.bits == 8

    @property
    def kernel(self) -> str:
        return "linear/sparse_int8" if self.coded else "linear/sparse"

    def nbytes(self, n: int, k: int) -> int:
        """Of a weight (N, K) in this form."""
        if self.coded:
            return coded_bytes(self.mask(), self.block)
        return stored_bytes(self.kept, self.block, n, k)

    def in_bytes(self) -> SparseForm:
        """The same blocks as bytes, which changes results."""
        return replace(self, format=in_bytes(self.format), given=False)


def fitting(shape: Sequence[int]) -> tuple[int, ...]:
    """The block sides that divide both axes of a weight."""
    return tuple(block for block in BLOCKS if not any(size % block for size in shape))


def given_forms(weight: Tensor) -> list[SparseForm]:
    """The forms that keep every entry of a weight that is not 0, the largest block first.

    A block that keeps no fewer entries than a larger one is left out: it does the same products in smaller
    pieces.
    """
    if int(weight.count_nonzero()) > MOST_KEPT * weight.numel():
        return []
    found: list[SparseForm] = []
    for block in reversed(fitting(weight.shape)):
        form = _of_mask(_blocks_of(weight != 0, block), block)
        if 0 < form.density <= MOST_KEPT and all(form.density < larger.density for larger in found):
            found.append(form)
    return found


def masked_forms(weight: Tensor, mask: Tensor, blocks: Sequence[int]) -> list[SparseForm]:
    """The forms that keep what a mask (N, K) keeps of a weight."""
    return [_of_mask(_blocks_of((weight != 0) & (mask != 0), block), block, given=False) for block in blocks]


def pruned_forms(
    weight: Tensor, shares: Sequence[float], blocks: Sequence[int], score: Callable[[], Tensor]
) -> list[SparseForm]:
    """The forms that keep the best blocks by a score (N, K), made when a mask is asked for; with 2:4 where
    single weights are pruned.
    """
    forms = [_pruned(weight, share, block, score) for share in shares for block in blocks]
    if 1 in blocks and weight.shape[1] % 4 == 0:
        half = weight.numel() // 2
        mask = lambda: saliency.two_of_four(score())  # noqa: E731
        forms.append(
            SparseForm(format=TWO_OF_FOUR, block=1, kept=half, blocks=2 * half, given=False, mask=mask)
        )
    return [form for form in forms if form.kept < form.blocks]


def _pruned(weight: Tensor, sparsity: float, block: int, score: Callable[[], Tensor]) -> SparseForm:
    total = weight.numel() // block**2
    kept = max(1, round(total * (1 - sparsity)))

    def mask() -> Tensor:
        scores = saliency.blocks(score(), block)
        chosen = torch.zeros(total, dtype=torch.bool)
        chosen[scores.flatten().topk(kept).indices] = True
        return chosen.view(scores.shape)

    return SparseForm(
        format=sparse_format(kept, total, block), block=block, kept=kept, blocks=total, given=False, mask=mask
    )


def _of_mask(kept: Tensor, block: int, *, given: bool = True) -> SparseForm:
    return SparseForm(
        format=pattern_format(kept, block),
        block=block,
        kept=int(kept.sum()),
        blocks=kept.numel(),
        given=given,
        mask=lambda: kept,
    )


def _blocks_of(entries: Tensor, block: int) -> Tensor:
    """(R, C): the blocks with any of these entries."""
    return entries.unflatten(0, (-1, block)).unflatten(2, (-1, block)).any(3).any(1)


def keep(weight: Tensor, form: SparseForm) -> Tensor:
    """The weight (N, K), 0 in the blocks that a form does not keep."""
    return weight * form.mask().repeat_interleave(form.block, 0).repeat_interleave(form.block, 1)
