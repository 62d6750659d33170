"""One request for a training plan, and what is found out on its way: the step, its variants, the ways to hold the optimizer's states."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from effcompile.backends import triton
from effcompile.backends.torch.items import with_items_as_tensor
from effcompile.capture.source import Source
from effcompile.capture.training import Loss
from effcompile.capture.training_inputs import after_pre_hooks
from effcompile.compiler.machine import resolve
from effcompile.compiler.progress import QUIET, Progress
from effcompile.compiler.training import verify
from effcompile.compiler.training.figures import keep_figures, known_figures
from effcompile.compiler.training.moved import RefutedError
from effcompile.compiler.training.prepare import Figures, Preparation, prepare
from effcompile.compiler.training.states import as_optimizer, consumed_key
from effcompile.core.goal import Goal
from effcompile.estimate import operators
from effcompile.ir.plan import Decision, Declined
from effcompile.ir.step import Step
from effcompile.machine.target import Target
from effcompile.passes import TrainingPasses, load_training_passes
from effcompile.passes.training.base import Case, forms, reapplied
from effcompile.passes.training.states import StatesOption
from effcompile.planner.remat import BlockFront
from effcompile.sparse.costs import per_row_of

__all__ = ["Loss", "Work", "make_work"]


@dataclass(frozen=True, kw_only=True)
class Work:
    """One request, and what has been found out on the way.

    Attributes:
        forbidden: (kind, option) → why it is out of the question: it was run, and did not hold.
        decided: the decisions of a plan that is applied again; None where the solver decides.
        fronts: kind of block → its options, of every form that was prepared.
    """

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    goal: Goal
    loss: Loss | None
    passes: TrainingPasses
    optimizer: Optimizer | None
    parameters: Sequence[tuple[str, torch.Tensor]]
    figures: Figures
    forbidden: Mapping[tuple[str, str], str] = field(default_factory=dict)
    decided: Sequence[Decision] | None = None
    progress: Progress = QUIET
    notes: list[str] = field(default_factory=list)
    known_ways: list[tuple[tuple[StatesOption, ...], tuple[Declined, ...]]] = field(default_factory=list)
    fronts: dict[str, BlockFront] = field(default_factory=dict)

    def capture(self, keep_outputs: bool = False) -> Case:
        """The joint graph of the step, which passes may have captured anew."""
        source = Source(model=self.model, args=self.args, kwargs=self.kwargs, loss=self.loss, keep_outputs=keep_outputs)
        with self.progress.step("capture the step"):
            step, front = source.capture_with_front()
        return Case(step=step, source=source, front=front)

    def prepare(self, case: Case, changed: Callable[[Step], Step] | None = None) -> Preparation:
        """Its forms with the options of their blocks; what was measured for them is kept for the next plan.

        changed: a last change of every form, after which no gradients are left for an optimizer to consume.

        Raises:
            FormatError: a plan is applied again, and this step cannot be what it says.
        """
        ways, _ = self.ways(case.step)
        consumed = {consumed_key(way): way.pieces for way in ways if way.consumed and changed is None}
        made, declined = self._forms(case)
        found = prepare(
            case.step, made, self.passes.checkpoint, self.figures, levers=self.passes.levers, consumed=consumed, changed=changed,
            solved=self.fronts,
        )  # fmt: skip
        if self.figures.here and (note := keep_figures(self.figures.known)):
            self.notes.append(note)
        return replace(found, declined=tuple(declined))

    def _forms(self, case: Case) -> tuple[list[Case], list[Declined]]:
        """What passes propose; of a plan that is applied again what it says."""
        with self.progress.step("find the forms of the step"):
            if self.decided is not None:
                return [reapplied(self.passes.step, case, self.decided)], []
            return forms(self.passes.step, case, self.figures.context(self.goal, self.forbidden))

    def without(self, error: RefutedError) -> Work:
        """The same work without a choice that was run and did not hold."""
        levers = self.passes.levers
        passes = replace(self.passes, levers=levers.only([name for name in levers.names if name != error.kind]))
        if not error.option or error.kind in levers.names:
            self.notes.append(f"{error.said}: {error}")
        return replace(self, passes=passes, forbidden={**self.forbidden, (error.kind, error.option): str(error)})

    def forget(self, found: Preparation) -> None:
        """Forget what was measured of the operators of all variants: it does not agree with what the step takes."""
        graphs = (found.captured.graph, *(prepared.step.graph for prepared in found.variants))
        for node in (node for graph in graphs for node in graph.nodes if node.op == "call_function"):
            self.figures.known.pop(operators.key(node), None)

    def ways(self, step: Step) -> tuple[tuple[StatesOption, ...], tuple[Declined, ...]]:
        """The ways to hold the optimizer's states, priced; none without an optimizer."""
        if self.optimizer is None:
            return (), ()
        if not self.known_ways:
            with self.progress.step("price the optimizer"):
                figures = self.figures
                found = self.passes.states.options(step, self.optimizer, self.parameters, self.goal, figures.target, figures.here)
                self.known_ways.append(found)
        return self.known_ways[0]

    @property
    def leaves(self) -> verify.Leaves:
        """The example inputs that require a gradient, by name."""
        found, _ = pytree.tree_flatten_with_path((self.args, dict(self.kwargs)))
        return {pytree.keystr(path[1:]).strip("[]'"): leaf for path, leaf in found if isinstance(leaf, torch.Tensor) and leaf.requires_grad}

    def eager_loss(self) -> torch.Tensor:
        """The original's loss at the example inputs."""
        args, kwargs = self.args, dict(self.kwargs)
        if self.loss is not None:
            taken = inspect.signature(self.model.forward).parameters
            if not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in taken.values()):
                kwargs = {name: value for name, value in kwargs.items() if name in taken}
        outputs = self.model.forward(*args, **kwargs)  # as captured: hooks on the outermost module run around a planned step, too
        whole = (self.args, dict(self.kwargs)) if self.args and self.kwargs else self.args or dict(self.kwargs)
        return verify.loss_of(outputs, whole, self.loss)


def make_work(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], goal: Goal, target: str | Target,
    passes: Sequence[str] | None, loss: Loss | None, progress: Progress, optimizer: Any,
) -> Work:  # fmt: skip
    """The request, with its passes, target and optimizer looked up.

    Inputs that an upstream model made are cut from it, so that verification makes no gradients there.
    """
    args, kwargs = after_pre_hooks(model, args, with_items_as_tensor(kwargs))
    args, kwargs = pytree.tree_map_only(torch.Tensor, lambda t: t.detach().requires_grad_() if t.requires_grad else t, (args, dict(kwargs)))
    machine = resolve(target, [])
    devices = {tensor.device.type for tensor in model.parameters()}
    notes = [*machine.keep_timings(), *(triton.use(devices) if machine.here else ())]
    if (sparse := per_row_of(model)) is not None:
        notes.append(sparse.matched_note())
    # A link is used without asking only in plans for other machines: copies beside the compute have not run on this one.
    linked = not machine.here and machine.target.device != "cpu" and machine.target.link_bandwidth > 0
    loaded = load_training_passes(passes, inexact=not goal.exact, linked=linked)
    if goal.exact:
        loaded, refused = loaded.exact
        notes += [
            f"{name} is not proposed: it changes gradients, and the goal allows no error. Give max_error, e.g. 0.02." for name in refused
        ]
    known = known_figures() if machine.here else {}
    return Work(
        model=model, args=args, kwargs=kwargs, goal=goal, loss=loss, passes=loaded, optimizer=as_optimizer(optimizer, model),
        parameters=tuple(model.named_parameters()), progress=progress, notes=notes,
        figures=Figures(target=machine.target, here=machine.here, known=known, progress=progress),
    )  # fmt: skip
