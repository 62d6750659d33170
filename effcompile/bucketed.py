"""A training step planned for several shapes: what fits one exactly runs as planned, what is smaller is
padded, the rest runs eagerly.

Rows that are added have labels that no loss counts (−100), tokens that are added are masked where the model
takes a mask. Whether that is exact for this model, in loss and gradients, is found by running it on padded
example inputs; where it is not, nothing is padded so.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from effcompile.compiler import Request, TrainingExecutable
from effcompile.core.errors import FormatError, InputsError, UsageError
from effcompile.core.types import Args, Kwargs, Outputs
from effcompile.core.units import format_bytes
from effcompile.estimate.optimizer import state_bytes
from effcompile.ir.plan import Plan
from effcompile.ir.saved import save_alone
from effcompile.loader.loaded import as_inputs
from effcompile.modes import carry_out
from effcompile.ops.optimizers import StatesForm
from effcompile.planner.buckets import bucket_lengths
from effcompile.proof.training.in_parts import Undrawn
from effcompile.proof.training.verify import restored
from effcompile.runtime.planned import SetOnModel

if TYPE_CHECKING:
    from rich.console import Console

#: (examples, tokens).
Shape = tuple[int, int]
Shapes = Sequence[Shape] | str
#: Where a plan of several shapes says those beside its own.
BUCKETS = "buckets"
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


class Bucketed(SetOnModel):
    """A model whose training step is planned for several shapes.

    Parameters, children and state_dict are the model's.

    Attributes:
        steps: shape → planned step, the largest first, which has the optimizer.
        padding: which was found to be exact.
    """

    def __init__(
        self, model: nn.Module, steps: Mapping[Shape, TrainingExecutable], padding: BucketPadding
    ) -> None:
        super().__init__()
        self.__dict__.update(model=model, steps=dict(steps), padding=padding, _said=set())
        self.__dict__.update(_parameters=model._parameters, _buffers=model._buffers, _modules=model._modules)
        self.training = model.training

    def forward(self, *args: object, **kwargs: object) -> Outputs:
        if not (self.training and torch.is_grad_enabled()):
            return self.model(*args, **kwargs)
        given = shape_of(args, kwargs)
        if given in self.steps:
            return self.steps[given](*args, **kwargs)
        fitting = [shape for shape in self.steps if self.padding.takes(given, shape)]
        if not fitting:
            return self._eagerly(given, args, kwargs)
        bucket = min(fitting, key=lambda shape: shape[0] * shape[1])
        padded_args, padded_kwargs = padded(args, kwargs, given, bucket)
        return self.steps[bucket](*padded_args, **padded_kwargs)

    def _eagerly(self, given: Shape, args: Args, kwargs: Kwargs) -> Outputs:
        if given not in self._said:
            self._said.add(given)
            known = ", ".join(map(str, self.steps))
            warnings.warn(
                f"effcompile runs the original {type(self.model).__name__} for a batch of shape {given}: "
                f"none of the planned shapes {known} holds it exactly or by exact padding. Its memory is "
                "not planned.",
                stacklevel=4,
            )
        return self.model(*args, **kwargs)

    @property
    def optimizer(self) -> Optimizer | None:
        return next(iter(self.steps.values())).optimizer

    @property
    def plan(self) -> Plan:
        """That of the largest shape; the others' are in its settings."""
        first, *rest = self.steps.items()
        others = {f"{rows}x{tokens}": step.plan.to_dict() for (rows, tokens), step in rest}
        plan: Plan = first[1].plan
        return plan.with_changes(
            settings={**plan.settings, BUCKETS: {"shape": list(first[0]), "others": others}}
        )

    def report(self, console: Console | None = None) -> None:
        """Print each shape's plan."""
        for step in self.steps.values():
            step.plan.report(console)

    def save(self, directory: str | os.PathLike[str]) -> Path:
        """Write one plan.json of all shapes.

        Raises:
            UsageError: the folder cannot be written.
        """
        return save_alone(self.plan, directory)

    def train(self, mode: bool = True) -> Bucketed:
        self.training = mode
        self.model.train(mode)
        for step in self.steps.values():
            step.train(mode)
        return self

    def __getattr__(self, name: str) -> Any:
        if "model" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.model, name)


def bucketed(model: nn.Module, inputs: object, shapes: Shapes, request: Request) -> Bucketed:
    """Plan a model's step for several shapes, under one goal.

    inputs: one example; with shapes="auto" a list of batches, or a loader.

    Raises:
        UsageError: shapes that are none, or a goal that is not of training. InfeasibleError: a shape does not
            fit.
    """
    if not request.training or request.batch is not None or request.mesh is not None:
        raise UsageError(
            "shapes are of a training step on one device: ask for mode='training', and leave batch and "
            "mesh out."
        )
    example, wanted = _wanted(inputs, shapes)
    args, kwargs = as_inputs(example)
    padding = exact_padding(model, args, kwargs, request)
    saved = _saved(request.plan, wanted)
    steps: dict[Shape, TrainingExecutable] = {}
    beside = _states(model, request, args)
    for shape in wanted:
        sized_args, sized_kwargs = of_shape(args, kwargs, shape)
        asked = request if not steps else replace(request, optimizer=None, goal=_less(request, beside))
        if saved is not None:
            asked = replace(asked, plan=saved[shape], goal=saved[shape].goal)
        made = carry_out(replace(asked, passes=_passes(asked)), model, sized_args, sized_kwargs)
        assert isinstance(made, TrainingExecutable)
        steps[shape] = made
    return Bucketed(model, steps, padding)


def _wanted(inputs: object, shapes: Shapes) -> tuple[Any, list[Shape]]:
    """An example, and the shapes, the largest first."""
    if shapes != "auto":
        good = not isinstance(shapes, str) and len(shapes) and all(_is_shape(shape) for shape in shapes)
        if not good:
            raise UsageError(
                f"shapes = {shapes!r}: give a list of (examples, tokens) as [(8, 128), (8, 256)], or "
                "'auto' with a loader."
            )
        listed = [(int(shape[0]), int(shape[1])) for shape in shapes]
        return inputs, sorted(set(listed), key=lambda shape: (-shape[0] * shape[1], shape))
    if isinstance(inputs, (Tensor, Mapping, tuple)) or not isinstance(inputs, Iterable):
        raise UsageError(
            "shapes='auto' looks at a loader's batches: give `inputs` as a list of them, or the loader "
            "itself."
        )
    batches = list(inputs)
    if not batches:
        raise InputsError("shapes='auto': the loader gave no batch.")
    seen = [shape_of(*as_inputs(batch)) for batch in batches]
    rows = max(shape[0] for shape in seen)
    return batches[0], [(rows, length) for length in reversed(bucket_lengths(shape[1] for shape in seen))]


def _is_shape(shape: object) -> bool:
    return (
        isinstance(shape, (tuple, list))
        and len(shape) == 2
        and all(type(size) is int and size > 0 for size in shape)
    )


def _passes(request: Request) -> list[str]:
    """One optimizer and one model serve several steps: it may not be part of one step's backward, nor may
    that hold weights as it likes.
    """
    return [*(request.passes or ()), "states.in_backward=false", "no-frozen"]


def _states(model: nn.Module, request: Request, args: Args) -> int:
    """Bytes of the optimizer's states as given, which stand beside every step."""
    if request.optimizer is None:
        return 0
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = request.optimizer if isinstance(request.optimizer, Optimizer) else request.optimizer(trained)
    pairs = [(group, p) for group in optimizer.param_groups for p in group["params"]]
    return state_bytes(StatesForm(), optimizer, pairs, trained[0].device.type).state_bytes


def _less(request: Request, beside: int) -> Any:
    """The goal with what is left of the memory."""
    goal = request.goal
    if goal.memory is None or not beside:
        return goal
    if goal.memory <= beside:
        raise UsageError(
            f"The optimizer's states take {format_bytes(beside)} of {format_bytes(goal.memory)}: no step "
            "fits beside them."
        )
    return replace(goal, memory=goal.memory - beside)


def _saved(plan: Plan | None, wanted: Sequence[Shape]) -> dict[Shape, Plan] | None:
    """The plans of a saved plan.json, shape by shape.

    Raises:
        FormatError: it is of other shapes.
    """
    if plan is None:
        return None
    held = plan.settings.get(BUCKETS)
    if (
        not isinstance(held, Mapping)
        or not _is_shape(held.get("shape"))
        or not isinstance(held.get("others"), Mapping)
    ):
        raise FormatError("The plan is of one shape. Leave shapes out, or plan again with them.")
    found = {
        tuple(held["shape"]): plan.with_changes(
            settings={k: v for k, v in plan.settings.items() if k != BUCKETS}
        )
    }
    for name, data in held["others"].items():
        rows, _, tokens = str(name).partition("x")
        found[int(rows), int(tokens)] = Plan.from_dict(data)
    if set(found) != set(wanted):
        raise FormatError(
            f"The plan is of the shapes {sorted(found)}, and {sorted(wanted)} are asked for. Plan again, "
            "or ask for those."
        )
    return found


# ------------------------------------------------------------ shapes and padding


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


def exact_padding(model: nn.Module, args: Args, kwargs: Kwargs, request: Request) -> BucketPadding:
    """Which padding leaves loss and gradients as they were, found by running the model on the example inputs
    with nothing drawn.

    Much is added to little, too: what one token more does to a maximum over many may be nothing.
    """
    rows, tokens = shape_of(args, kwargs)
    whole = _learned(model, args, kwargs, request)

    def exact(larger: Shape, smaller: Shape) -> bool:
        added = _learned(model, *padded(args, kwargs, (rows, tokens), larger), request)
        cut_args, cut_kwargs = of_shape(args, kwargs, smaller)
        little = _learned(model, cut_args, cut_kwargs, request)
        filled = _learned(model, *padded(cut_args, cut_kwargs, smaller, (rows, tokens)), request)
        return _same(whole, added) and (little is None or _same(little, filled))

    fewest = min(tokens, _FEW)
    return BucketPadding(
        rows=exact((rows + 1, tokens), (1, tokens)), tokens=exact((rows, tokens + 8), (rows, fewest))
    )


def _learned(model: nn.Module, args: Args, kwargs: Kwargs, request: Request) -> _Learned | None:
    """Loss, gradients and changed buffers of the step as it trains but for what is drawn; None where it
    raises or the loss is no number.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    before = [buffer.clone() for buffer in model.buffers()]
    try:
        with restored(model), Undrawn():
            outputs = model(*args, **kwargs)
            own = outputs if isinstance(outputs, Tensor) or request.loss is not None else outputs.loss
            loss = (
                own
                if request.loss is None
                else request.loss(outputs, (args, kwargs) if args and kwargs else args or kwargs)
            )
            found = torch.autograd.grad(loss, parameters, allow_unused=True)
            if not bool(loss.isfinite()):
                return None
            buffers = [
                buffer.clone()
                for buffer, was in zip(model.buffers(), before, strict=True)
                if not torch.equal(buffer, was)
            ]
    except Exception:  # the user's model, at a length that it may not take
        return None
    return [loss.detach()], [g for g in found if g is not None], buffers


def _same(before: _Learned | None, after: _Learned | None) -> bool:
    """Whether loss, whole gradient and changed buffers are the same but for the order of sums."""
    if before is None or after is None or [*map(len, before)] != [*map(len, after)]:
        return False
    return all(_relative(ours, theirs) <= _ROUNDING for ours, theirs in zip(after, before, strict=True))


def _relative(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> float:
    whole = sum(float(t.double().square().sum()) for t in theirs)
    apart = sum(float((a.double() - b.double()).square().sum()) for a, b in zip(ours, theirs, strict=True))
    return (apart / max(whole, 1e-300)) ** 0.5
