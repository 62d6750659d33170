"""How important each example is to the training, scored early in it.

EL2N and GraNd: Paul et al. 2021 (arXiv 2107.07075): the norm of the error vector, and of the gradient. GraNd
at the very start was later found to be no better than chance (arXiv 2303.14753): score after some steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Literal

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from effcompile.capture.mends import evaluating
from effcompile.capture.training import Loss
from effcompile.core.errors import InputsError, UsageError
from effcompile.core.types import Args, Example, Kwargs
from effcompile.loader.loaded import as_inputs
from effcompile.search.training.work import loss_of

Kind = Literal["grand", "el2n"]


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """`values`: of each example, in their order. `kind`: how they were found. `seconds`: that it took."""

    values: Tensor
    kind: str
    seconds: float

    def __repr__(self) -> str:
        return f"Scores({len(self.values)} by {self.kind})"


def scores(
    model: nn.Module, batches: Iterable[Example], loss: Loss | None = None, *, kind: Kind = "grand"
) -> Scores:
    """Score every example of the batches.

    Args:
        model: as it is now; it is not changed.
        batches: each like `inputs` of `effcompile.schedule`, examples along the first axis.
        loss: loss(outputs, inputs) for a model that returns none.
        kind: "grand": norm of the loss's gradient of one example by all parameters. "el2n": norm of
            softmax(logits) − one-hot labels, for models that return `logits` and take `labels`; over the
            places that have a label.

    Raises:
        UsageError: another kind. InputsError: no batch, or what the kind needs is missing.
    """
    score = {"grand": _gradient_norms, "el2n": _error_norms}.get(kind)
    if score is None:
        raise UsageError(f"scores(kind={kind!r}): 'grand' or 'el2n' is wanted.")
    start = perf_counter()
    with evaluating(model):
        found = [score(model, *as_inputs(batch), loss) for batch in batches]
    if not found:
        raise InputsError("scores: there is no batch to score.")
    return Scores(torch.cat(found), kind, perf_counter() - start)


def _gradient_norms(model: nn.Module, args: Args, kwargs: Kwargs, loss: Loss | None) -> Tensor:
    """One backward for each example; a model of any kind can be asked so."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    norms = []
    for place in range(count_of(args, kwargs)):
        one_args, one_kwargs = pytree.tree_map_only(Tensor, _alone(place), (tuple(args), dict(kwargs)))
        norms.append(square_of(gradients_of(model, parameters, one_args, one_kwargs, loss)) ** 0.5)
    return torch.tensor(norms)


def _alone(place: int) -> Callable[[Tensor], Tensor]:
    return lambda value: value[place : place + 1] if value.dim() else value


def _error_norms(model: nn.Module, args: Args, kwargs: Kwargs, loss: Loss | None) -> Tensor:
    labels = kwargs.get("labels")
    with torch.no_grad():
        outputs = model(*args, **kwargs)
    logits = outputs.get("logits") if isinstance(outputs, Mapping) else getattr(outputs, "logits", None)
    if not isinstance(labels, Tensor) or not isinstance(logits, Tensor) or labels.shape != logits.shape[:-1]:
        raise InputsError(
            "scores(kind='el2n') needs `labels` among the inputs, and outputs with `logits` of a class "
            "more axis. Use 'grand'."
        )
    given = labels >= 0
    hot = nn.functional.one_hot(labels.clamp(min=0), logits.shape[-1])
    errors = (logits.softmax(-1) - hot).norm(dim=-1) * given
    return errors.flatten(1).sum(1) / given.flatten(1).sum(1).clamp(min=1) if errors.dim() > 1 else errors


def gradients_of(
    model: nn.Module, parameters: Sequence[Tensor], args: Args, kwargs: Kwargs, loss: Loss | None
) -> tuple[Tensor | None, ...]:
    """Of the loss of one batch; None for a parameter that it does not read."""
    value = loss_of(model(*args, **kwargs), kwargs or args, loss)
    return torch.autograd.grad(value, parameters, allow_unused=True)


def square_of(gradients: Iterable[Tensor | None]) -> float:
    """The squared norm of all of them together."""
    return sum(float(g.double().square().sum()) for g in gradients if g is not None)


def count_of(args: Args, kwargs: Kwargs) -> int:
    """The examples of a batch.

    Raises:
        InputsError: no tensor has an axis of them.
    """
    sizes = [
        leaf.shape[0]
        for leaf in pytree.tree_leaves((args, dict(kwargs)))
        if isinstance(leaf, Tensor) and leaf.dim()
    ]
    if not sizes:
        raise InputsError("scores: a batch has no tensor with an axis of examples.")
    return max(sizes)
