"""Saliency: what every weight, block, neuron and head of a linear layer is worth, and which of them a
sparsity keeps.

Pure functions. An element saliency (`magnitude`, `wanda`, `snip`) is reduced to what is kept or dropped as
one (`blocks`, `neurons`, `heads`), and `masks` keeps the best of it.

Legend: O, I out and in features; b block side; R = O / b and C = I / b, the grid of blocks; F hidden neurons;
H heads; D width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from effcompile.core.errors import UsageError

__all__ = [
    "balanced_count",
    "blocks",
    "counts",
    "given",
    "heads",
    "magnitude",
    "masks",
    "neurons",
    "snip",
    "top",
    "two_of_four",
    "wanda",
]

Distribution = Literal["uniform", "global"]


# ---------------------------------------------------------------- elements


def magnitude(weight: Tensor) -> Tensor:
    """|W|, (O, I) → (O, I)."""
    return weight.detach().abs()


def wanda(weight: Tensor, norms: Tensor) -> Tensor:
    """|W_oi| · ‖x_i‖₂, (O, I) and (I) → (O, I); the norms are those of calibration inputs (Sun et al. 2023,
    eq. 1).

    Raises:
        UsageError: another number of norms than input features.
    """
    if norms.shape != weight.shape[1:]:
        raise UsageError(
            f"Wanda takes one norm per input feature, {tuple(weight.shape[1:])}; given {tuple(norms.shape)}."
        )
    return weight.detach().abs() * norms


def snip(weight: Tensor, gradient: Tensor) -> Tensor:
    """|g · W|, both (O, I) → (O, I); the gradient is that of the loss at initialisation (Lee et al. 2019, eq.
    5, not normalised).

    Raises:
        UsageError: the shapes differ.
    """
    if weight.shape != gradient.shape:
        raise UsageError(
            f"SNIP takes a gradient of the weight's shape, {tuple(weight.shape)}; given "
            f"{tuple(gradient.shape)}."
        )
    return (weight.detach() * gradient).abs()


# ---------------------------------------------------------------- groups of elements


def blocks(saliency: Tensor, block: int) -> Tensor:
    """The sum over every b×b block, (O, I) → (R, C): of |W| it is the L1 norm, Dietrich et al.'s best
    (2108.06277, table A.3).

    Raises:
        UsageError: the block does not divide both dimensions.
    """
    rows, columns = saliency.shape
    if rows % block or columns % block:
        raise UsageError(f"Blocks of {block} do not divide a weight of {rows} × {columns}.")
    return saliency.reshape(rows // block, block, columns // block, block).sum(dim=(1, 3))


def neurons(rows: Sequence[Tensor], columns: Sequence[Tensor]) -> Tensor:
    """What each hidden neuron is worth, (F): its row in every (F, D) that makes it and its column in every
    (D, F) that reads it.
    """
    return torch.stack([*(s.sum(dim=1) for s in rows), *(s.sum(dim=0) for s in columns)]).sum(dim=0)


def heads(rows: Sequence[Tensor], columns: Sequence[Tensor], count: int) -> Tensor:
    """What each of H attention heads is worth, (H): rows are of Q, K and V, (H·d, D), columns of the output
    projection, (D, H·d).

    Raises:
        UsageError: the rows are not a multiple of the heads.
    """
    per_row = neurons(rows, columns)
    if per_row.numel() % count:
        raise UsageError(f"{per_row.numel()} rows are not {count} heads of one size.")
    return per_row.reshape(count, -1).sum(dim=1)


# ---------------------------------------------------------------- choice


def top(scores: Tensor, count: Tensor) -> Tensor:
    """In every line the `count` best, (L, n) and (L) → bool (L, n). Of equal ones, the first."""
    order = scores.argsort(dim=1, descending=True, stable=True)
    places = torch.arange(scores.shape[1], device=scores.device).expand_as(order)
    rank = torch.empty_like(order).scatter_(1, order, places)
    return rank < count.to(rank.device)[:, None]


def two_of_four(saliency: Tensor) -> Tensor:
    """The two best of every four neighbours in a row, (O, I) → bool (O, I).

    Raises:
        UsageError: I is no multiple of 4.
    """
    rows, columns = saliency.shape
    if columns % 4:
        raise UsageError(f"2:4 needs rows of a multiple of 4; this weight has {columns} input features.")
    lines = saliency.reshape(-1, 4)
    return top(lines, torch.full((len(lines),), 2)).reshape(rows, columns)


def counts(
    scores: Mapping[str, Tensor], sparsity: float, distribution: Distribution = "uniform"
) -> dict[str, int]:
    """How many blocks every layer keeps, at least one.

    uniform: the same share everywhere. global: as many as it has among the best of all layers.
    """
    if distribution == "uniform":
        return {name: max(1, round(s.numel() * (1 - sparsity))) for name, s in scores.items()}
    flat = torch.cat([s.reshape(1, -1) for s in scores.values()], dim=1)
    best = top(flat, torch.tensor([max(1, round(flat.shape[1] * (1 - sparsity)))]))
    parts = best.squeeze(0).split([s.numel() for s in scores.values()])
    return {name: max(1, int(part.sum())) for name, part in zip(scores, parts, strict=True)}


def balanced_count(count: int, rows: int) -> int:
    """Blocks of each row when a layer's blocks are spread evenly over its rows: at least one."""
    return max(1, round(count / rows))


def masks(
    scores: Mapping[str, Tensor],
    sparsity: float,
    distribution: Distribution = "uniform",
    balanced: bool = False,
) -> dict[str, Tensor]:
    """The blocks that every layer keeps, (R, C) → bool (R, C); balanced: equally many in every block row."""
    kept = counts(scores, sparsity, distribution)
    return {name: _best(s, kept[name], balanced) for name, s in scores.items()}


def _best(scores: Tensor, count: int, balanced: bool) -> Tensor:
    rows = scores.shape[0]
    if balanced:
        return top(scores, torch.full((rows,), balanced_count(count, rows)))
    return top(scores.reshape(1, -1), torch.tensor([count])).reshape(scores.shape)


def given(name: str, mask: Tensor, shape: tuple[int, int], block: int) -> Tensor:
    """A mask of elements (O, I) or of blocks (R, C) as bool (R, C): a block is kept when any of its elements
    is.

    Raises:
        UsageError: of neither shape (a mask for another model), or it keeps nothing.
    """
    grid = (shape[0] // block, shape[1] // block)
    if tuple(mask.shape) not in (shape, grid):
        allowed = f"{shape[0]} × {shape[1]} (elements) or {grid[0]} × {grid[1]} (blocks of {block})"
        raise UsageError(
            f"The mask of {name!r} is {' × '.join(map(str, mask.shape))}; it must be {allowed}. Is it of "
            "another model?"
        )
    found = mask.bool() if tuple(mask.shape) == grid else blocks(mask.ne(0).float(), block) > 0
    if not found.any():
        raise UsageError(
            f"The mask of {name!r} keeps nothing. Keep at least one block, or leave the layer out of "
            "`layers`."
        )
    return found
