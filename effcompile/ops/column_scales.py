"""Scales of the columns of x and W that leave x Wᵀ as it is and make less of it what rounding to bytes takes
away.

Some columns of what enters a trained model's linears are ten to a hundred times as large as the others, and
a row of x has one scale. So x is multiplied by c and W divided, column by column (SmoothQuant: Xiao et al.
2023, arXiv 2211.10438, eq. 4, with a = 1/2):

    c_j = √(size of W_j / size of x_j)

where a size is the largest magnitude, or the root mean square; of several weights that read x those of one
of them, or of all. It is the one, or no scales at all, of which the least error is to be expected, where each
code of a row m of x is off by its scale / √12, and each of a row n of W alike, by how much of a row of the
result that is:

    E(c) = mean_m [(max_j |x_mj c_j|)² · Σ |W / c|² + Σ_n (max_j |W_nj / c_j|)² · |x_m c|²] / |W x_m|²

Each row counts for itself: a token that most others attend to has values of few hundredths of the others'
and the largest columns (attention sinks: Xiao et al. 2024, arXiv 2309.17453), and passes what it is off by on
to all of them, though of the whole result it is next to nothing.

Legend: x (M, K) as calibration inputs make it, W (N, K), c (K).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["column_scales"]

#: Rows of a result are no less to be right than those of this share of the mean square, or of this square.
_LEAST, _TINY = 1e-6, 1e-30
#: Scales take 16 bytes a column, and are worth it where they gain this share of the error.
_LEAST_GAIN = 0.1
#: Columns are this many times apart, at the most.
_WIDEST = 1e6


@torch.no_grad()
def column_scales(x: Tensor, weights: Sequence[Tensor]) -> Tensor | None:
    """c (K) in fp32, of which 1 is the largest; None where no scales are much better, or x or a weight is not
    finite.

    Args:
        x: (M, K).
        weights: those (N, K) of all linears that read x, which share c.
    """
    x, wide = x.float(), [weight.float() for weight in weights]
    if not len(x) or not all(each.isfinite().all() for each in (x, *wide)):
        return None
    shares = [_row_shares(x @ weight.T) for weight in wide]
    least, best = (1 - _LEAST_GAIN) * _error(x, wide, shares, torch.ones_like(x[0])), None
    for size in (_largest, _usual):
        of_w = [size(weight) for weight in wide]
        for each in of_w if len(wide) == 1 else (*of_w, torch.stack(of_w).amax(0)):
            columns = _scales(size(x), each)
            if (error := _error(x, wide, shares, columns)) < least:
                least, best = error, columns
    return best


def _row_shares(made: Tensor) -> Tensor:
    """1 / |row|² of what a linear makes, in float64."""
    squares = made.double().square().sum(1)
    return 1 / squares.clamp(min=max(float(squares.mean()) * _LEAST, _TINY))


def _scales(of_x: Tensor, of_w: Tensor) -> Tensor:
    """Columns of which x or W has nothing are as the largest."""
    there = (of_x > 0) & (of_w > 0)
    columns = torch.where(there, (of_w / of_x).sqrt(), 0.0)
    largest = columns.amax()
    if not (0 < largest < torch.inf):
        return torch.ones_like(columns)
    return torch.where(there, (columns / largest).clamp(min=1 / _WIDEST), 1.0)


def _largest(x: Tensor) -> Tensor:
    return torch.maximum(x.amax(0), x.amin(0).neg())


def _usual(x: Tensor) -> Tensor:
    return x.square().mean(0).sqrt()


def _error(x: Tensor, weights: Sequence[Tensor], shares: Sequence[Tensor], columns: Tensor) -> float:
    """E(c) of all weights; in float64, for squares of squares."""
    rows = x * columns
    peaks, squares = _peaks(rows), rows.double().square().sum(1)
    error = 0.0
    for weight, share in zip(weights, shares, strict=True):
        scaled = weight / columns
        of_rows = peaks * scaled.norm().double().square() + _peaks(scaled).sum() * squares
        error += float((of_rows * share).mean())
    return error


def _peaks(rows: Tensor) -> Tensor:
    """The square of the largest magnitude of each row."""
    return torch.maximum(rows.amax(1), rows.amin(1).neg()).double().square()
