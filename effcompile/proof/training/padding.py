"""Which padding of a training step's inputs leaves loss and gradients as they are, found by running it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from effcompile.capture.training import Loss
from effcompile.core.errors import InputsError
from effcompile.core.types import Args, Kwargs
from effcompile.proof.training.in_parts import Undrawn
from effcompile.proof.training.verify import restored

#: (examples, tokens).
Shape = tuple[int, int]
#: Value of what is added to an input, by its name; 0 for others.
_ADDED: Mapping[str, int] = {"labels": -100, "decoder_labels": -100}
#: Of a step: its loss alone, gradients, and buffers that it changed.
_Learned = tuple[Sequence[Tensor], Sequence[Tensor], Sequence[Tensor]]
#: What padding may change of loss and gradients, relative to their norm: another order of sums.
_ROUNDING = 1e-5
#: Tokens that most models take: a causal loss has none of its own at one.
_FEW = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketPadding:
    """Which padding was found to be exact: of `rows`, of `tokens`."""

    rows: bool
    tokens: bool

    def takes(self, given: Shape, bucket: Shape) -> bool:
        """Whether inputs of a shape may be padded to another."""
        return (given[0] == bucket[0] or (self.rows and given[0] < bucket[0])) and (
            given[1] == bucket[1] or (self.tokens and given[1] < bucket[1])
        )


def shape_of(args: Args, kwargs: Kwargs) -> Shape:
    """(examples, tokens): the first two axes of the first tensor that has two.

    Raises:
        InputsError: there is none.
    """
    for leaf in pytree.tree_leaves((tuple(args), dict(kwargs))):
        if isinstance(leaf, Tensor) and leaf.dim() >= 2:
            return leaf.shape[0], leaf.shape[1]
    raise InputsError("shapes: the inputs have no tensor of (examples, tokens, ...).")


def padded(args: Args, kwargs: Kwargs, given: Shape, bucket: Shape) -> tuple[Args, Kwargs]:
    """The inputs with rows and tokens added at their ends, which no loss counts."""

    def one(value: object, name: str) -> object:
        if not isinstance(value, Tensor) or not value.dim() or value.shape[0] != given[0]:
            return value
        added = [
            bucket[axis] - given[axis] if axis < value.dim() and value.shape[axis] == given[axis] else 0
            for axis in (0, 1)
        ]
        pads = [0, 0] * (value.dim() - 2) + ([0, added[1]] if value.dim() > 1 else []) + [0, added[0]]
        return nn.functional.pad(value, pads, value=_ADDED.get(name, 0))

    return tuple(one(value, "") for value in args), {name: one(value, name) for name, value in kwargs.items()}


def of_shape(args: Args, kwargs: Kwargs, shape: Shape) -> tuple[Args, Kwargs]:
    """Example inputs of another shape: those that are there, over and over."""
    given = shape_of(args, kwargs)

    def one(value: object) -> object:
        if not isinstance(value, Tensor) or not value.dim() or value.shape[0] != given[0]:
            return value
        picked = value[torch.arange(shape[0], device=value.device) % given[0]]
        if value.dim() > 1 and value.shape[1] == given[1]:
            picked = picked[:, torch.arange(shape[1], device=value.device) % given[1]]
        return picked

    return tuple(one(value) for value in args), {name: one(value) for name, value in kwargs.items()}


def exact_padding(model: nn.Module, args: Args, kwargs: Kwargs, loss: Loss | None) -> BucketPadding:
    """Which padding leaves loss and gradients as they were, found by running the model on the example inputs
    with nothing drawn.

    Much is added to little, too: what one token more does to a maximum over many may be nothing.
    """
    rows, tokens = shape_of(args, kwargs)
    whole = _learned(model, args, kwargs, loss)

    def exact(larger: Shape, smaller: Shape) -> bool:
        added = _learned(model, *padded(args, kwargs, (rows, tokens), larger), loss)
        cut_args, cut_kwargs = of_shape(args, kwargs, smaller)
        little = _learned(model, cut_args, cut_kwargs, loss)
        filled = _learned(model, *padded(cut_args, cut_kwargs, smaller, (rows, tokens)), loss)
        return _same(whole, added) and (little is None or _same(little, filled))

    fewest = min(tokens, _FEW)
    return BucketPadding(
        rows=exact((rows + 1, tokens), (1, tokens)), tokens=exact((rows, tokens + 8), (rows, fewest))
    )


def _learned(model: nn.Module, args: Args, kwargs: Kwargs, loss: Loss | None) -> _Learned | None:
    """Loss, gradients and changed buffers of the step as it trains but for what is drawn; None where it
    raises or the loss is no number.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    before = [buffer.clone() for buffer in model.buffers()]
    try:
        with restored(model), Undrawn():
            outputs = model(*args, **kwargs)
            if loss is None:
                value = outputs if isinstance(outputs, Tensor) else outputs.loss
            else:
                value = loss(outputs, (args, kwargs) if args and kwargs else args or kwargs)
            found = torch.autograd.grad(value, parameters, allow_unused=True)
            if not bool(value.isfinite()):
                return None
            buffers = [
                buffer.clone()
                for buffer, was in zip(model.buffers(), before, strict=True)
                if not torch.equal(buffer, was)
            ]
    except Exception:  # the user's model, at a length that it may not take
        return None
    return [value.detach()], [g for g in found if g is not None], buffers


def _same(before: _Learned | None, after: _Learned | None) -> bool:
    """Whether loss, whole gradient and changed buffers are the same but for the order of sums."""
    if before is None or after is None or [*map(len, before)] != [*map(len, after)]:
        return False
    return all(_relative(ours, theirs) <= _ROUNDING for ours, theirs in zip(after, before, strict=True))


def _relative(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> float:
    whole = sum(float(t.double().square().sum()) for t in theirs)
    apart = sum(float((a.double() - b.double()).square().sum()) for a, b in zip(ours, theirs, strict=True))
    return (apart / max(whole, 1e-300)) ** 0.5
