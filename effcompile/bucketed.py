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
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

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
from effcompile.passes.training.frozen import form_in
from effcompile.planner.buckets import bucket_lengths
from effcompile.proof.training.padding import BucketPadding, Shape, exact_padding, of_shape, padded, shape_of
from effcompile.runtime.planned import SetOnModel

if TYPE_CHECKING:
    from rich.console import Console

Shapes = Sequence[Shape] | str
#: Where a plan of several shapes says those beside its own.
BUCKETS = "buckets"


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
    padding = exact_padding(model, args, kwargs, request.loss)
    saved = _saved(request.plan, wanted)
    steps: dict[Shape, TrainingExecutable] = {}
    beside = _states(model, request, args)
    for shape in wanted:
        sized_args, sized_kwargs = of_shape(args, kwargs, shape)
        asked = request if not steps else replace(request, optimizer=None, goal=_less(request, beside))
        if saved is not None:
            asked = replace(asked, plan=saved[shape], goal=saved[shape].goal)
        first = next(iter(steps.values()), None)
        asked = replace(asked, passes=_passes(asked, first))
        made = carry_out(asked, model, sized_args, sized_kwargs, hold=False)
        assert isinstance(made, TrainingExecutable)
        if first is not None:
            if form_in(made.plan) != form_in(first.plan):  # too large an error, as running this shape showed
                as_given = [*(request.passes or ()), "no-frozen"]
                return bucketed(model, example, wanted, replace(request, passes=as_given))
            made.runner.share_codes(first.runner)
        steps[shape] = made
    for step in steps.values():
        step.runner.hold_codes()
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


def _passes(request: Request, first: TrainingExecutable | None) -> list[str]:
    """One optimizer and one model serve several steps: it may not be part of one step's backward, and frozen
    weights are held as the first step has them.
    """
    passes = [*(request.passes or ()), "states.in_backward=false"]
    if first is None:
        return passes
    form = form_in(first.plan)
    others = [name for name in passes if name.partition(".")[0] not in ("frozen", "no-frozen")]
    return [*others, *(["no-frozen"] if form is None else [f"frozen.forms={form}", "frozen.as_given=false"])]


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
    if len(forms := {form_in(each) for each in found.values()}) > 1:
        raise FormatError(
            f"The plan's shapes hold frozen weights as {', '.join(sorted(map(str, forms)))}; one model has "
            "them in one form. Plan again, or restore the file."
        )
    if set(found) != set(wanted):
        raise FormatError(
            f"The plan is of the shapes {sorted(found)}, and {sorted(wanted)} are asked for. Plan again, "
            "or ask for those."
        )
    return found
