"""How the rows of x become bytes where calibration tells what x is: scales of the columns of x and W that
leave x Wᵀ as it is, and codes that are lowered by the middle of their row, make less of what rounding takes.

Some columns of what enters a trained model's linears are ten to a hundred times as large as the others, and
a row of x has one scale. So x is multiplied by c and W divided, column by column (SmoothQuant: Xiao et al.
2023, arXiv 2211.10438, eq. 4, with a = 1/2):

    c_j = √(size of W_j / size of x_j)

where a size is the largest magnitude, or the root mean square; of several weights that read x those of one
of them, or of all. It is the one, or no scales at all, of which the least error is to be expected, where each
code of a row m of x is off by its scale / √12, and each of a row n of W alike, by how much of a row of the
result that is:

    E(c) = mean_m [p_m² · Σ |W / c|² + Σ_n (max_j |W_nj / c_j|)² · |x_m c|²] / |W x_m|²

    p_m = (max(0, max_j x_mj c_j) − min(0, min_j x_mj c_j)) / 2, for with scales, of 1 too, codes are lowered
          by the middle of their row: of what a GELU makes it is half of max_j |x_mj|, that of plain rows

What rounding W then still adds on average, (W − Ŵ) · mean_m x_m of each output, is taken off its bias (Nagel
et al. 2019, arXiv 1906.04721, section 4.2).

Each row counts for itself: a token that most others attend to has values of few hundredths of the others'
and the largest columns (attention sinks: Xiao et al. 2024, arXiv 2309.17453), and passes what it is off by on
to all of them, though of the whole result it is next to nothing.

Legend: x (M, K) as calibration inputs make it, W (N, K), c (K).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Coding", "coding"]

#: Rows of a result are no less to be right than those of this share of the mean square, or of this square.
_LEAST, _TINY = 1e-6, 1e-30
#: Scales and codes that are lowered take 16 bytes a column, and 1 to 4 % of a kernel's time, and are worth it
#: where they gain this share of the error.
_LEAST_GAIN = 0.1
#: Columns are this many times apart, at the most.
_WIDEST = 1e6


class Coding(NamedTuple):
    """The mean of the rows of x (K), and scales of its columns (K) in fp32, of which 1 is the largest, with
    which codes of x are lowered by the middle of their row; None where plain rows are as good.
    """

    mean: Tensor
    columns: Tensor | None = None

    def entering(self, x: Tensor) -> Tensor:
        """x (..., K) times its scales."""
        return x if self.columns is None else x * self.columns

    def weight(self, weight: Tensor) -> Tensor:
        """A weight (N, K) divided by them."""
        return weight if self.columns is None else weight / self.columns

    def correction(self, weight: Tensor, rounded: Tensor) -> Tensor:
        """What a bias (N) is to have more in fp32, where a weight (N, K) is rounded, and divided still."""
        return weight.float() @ self.mean - rounded.float() @ self.entering(self.mean)


@torch.no_grad()
def coding(x: Tensor, weights: Sequence[Tensor]) -> Coding | None:
    """None where x or a weight is not finite.

    Args:
        x: (M, K).
        weights: those (N, K) of all linears that read x, which share c.
    """
    x, wide = x.float(), [weight.float() for weight in weights]
    if not len(x) or not all(each.isfinite().all() for each in (x, *wide)):
        return None
    shares = [_row_shares(x @ weight.T) for weight in wide]
    plain = Coding(x.mean(0))
    found = [plain._replace(columns=columns) for columns in (torch.ones_like(x[0]), *_candidates(x, wide))]
    errors = [_error(x, wide, shares, how) for how in found]
    worth = min(errors) < (1 - _LEAST_GAIN) * _error(x, wide, shares, plain)
    return found[errors.index(min(errors))] if worth else plain


def _candidates(x: Tensor, weights: Sequence[Tensor]) -> Iterator[Tensor]:
    for size in (_largest, _usual):
        of_w = [size(weight) for weight in weights]
        for each in of_w if len(weights) == 1 else (*of_w, torch.stack(of_w).amax(0)):
            yield _scales(size(x), each)


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


def _error(x: Tensor, weights: Sequence[Tensor], shares: Sequence[Tensor], how: Coding) -> float:
    """E(c) of all weights; in float64, for squares of squares."""
    rows = how.entering(x)
    peaks, squares = _peaks(rows, how.columns is not None), rows.double().square().sum(1)
    error = 0.0
    for weight, share in zip(weights, shares, strict=True):
        scaled = how.weight(weight)
        of_rows = peaks * scaled.norm().double().square() + _peaks(scaled).sum() * squares
        error += float((of_rows * share).mean())
    return error


def _peaks(rows: Tensor, lowered: bool = False) -> Tensor:
    """p² of each row."""
    above, below = rows.amax(1), rows.amin(1).neg()
    half = (above.clamp(min=0) + below.clamp(min=0)) / 2 if lowered else torch.maximum(above, below)
    return half.double().square()
