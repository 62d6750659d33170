"""The critical batch, measured: how many examples average out as much noise as there is signal in the
gradient.

With the gradient G over all examples and the covariance Σ of one example's, the noise scale tr Σ / |G|² is
the batch at which training takes twice the fewest steps and twice the fewest examples (McCandlish et al.
2018, arXiv 1812.06162, section 2; the estimators of appendix A.1, each without bias, from gradients of two
sizes of batch: those of single batches, and of all of them together).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from time import perf_counter

import torch
from torch import nn

from effcompile.capture.mends import evaluating
from effcompile.capture.training import Loss
from effcompile.core.errors import InputsError
from effcompile.core.types import Example
from effcompile.loader.loaded import as_inputs
from effcompile.runs.scoring import count_of, gradients_of, square_of


@dataclass(frozen=True, slots=True)
class CriticalBatch:
    """`examples`: the noise scale.

    `signal`: |G|², `noise`: tr Σ. `batches`, `seconds`: that it was measured of, and that it took.
    """

    examples: float
    signal: float
    noise: float
    batches: int
    seconds: float

    def __float__(self) -> float:
        return self.examples


def critical_batch(model: nn.Module, batches: Iterable[Example], loss: Loss | None = None) -> CriticalBatch:
    """Measure the critical batch of a model as it is now, of a mean loss; it grows as training goes on.

    Args:
        model: it is not changed.
        batches: at least two of one size, each like `inputs` of `effcompile.schedule`; the more, the better
            the estimate.
        loss: loss(outputs, inputs) for a model that returns none.

    Raises:
        InputsError: fewer than two batches, of different sizes, or so few that the signal is lost in the
            noise.
    """
    start, parameters = perf_counter(), [p for p in model.parameters() if p.requires_grad]
    sums, squares, sizes = [torch.zeros_like(p) for p in parameters], list[float](), set[int]()
    with evaluating(model):
        for batch in batches:
            args, kwargs = as_inputs(batch)
            gradients = gradients_of(model, parameters, args, kwargs, loss)
            squares.append(square_of(gradients))
            sizes.add(count_of(args, kwargs))
            for total, gradient in zip(sums, gradients, strict=True):
                total += 0 if gradient is None else gradient
    count = len(squares)
    if count < 2 or len(sizes) > 1:
        raise InputsError(
            f"critical_batch: two batches of one size are wanted at the least; there are {count}, of "
            f"{sorted(sizes)} examples."
        )
    (size,), small, large = sizes, sum(squares) / count, square_of(sums) / count**2
    noise = (small - large) / (1 / size - 1 / (count * size))
    signal = (count * size * large - size * small) / (count * size - size)
    if signal <= 0:
        raise InputsError(
            f"critical_batch: over {count} batches of {size} examples the gradient's mean is lost in its "
            "noise. Give more batches."
        )
    return CriticalBatch(noise / signal, signal, noise, count, perf_counter() - start)
