"""One request for a training plan, and what is found out on its way: the step, its variants, the ways to hold the optimizer's states."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from effcompile.backends import triton
from effcompile.backends.torch.items import with_items_as_tensor
from effcompile.capture import capture_training
from effcompile.compiler.machine import resolve
from effcompile.compiler.progress import QUIET, Progress
from effcompile.compiler.training import verify
from effcompile.compiler.training.attend import Captured, captured
from effcompile.compiler.training.figures import keep_figures, known_figures
from effcompile.compiler.training.precision import Capture, with_narrow
from effcompile.compiler.training.prepare import ALONE, Figures, Preparation, prepare
from effcompile.compiler.training.states import as_optimizer, consumed_key
from effcompile.core.errors import FormatError
from effcompile.core.goal import Goal
from effcompile.estimate import operators
from effcompile.ir.plan import Declined
from effcompile.ir.step import Step
from effcompile.machine.target import Target
from effcompile.passes import Levers, load_attention, load_levers, load_microbatch, load_precision, load_step_passes, load_training_passes
from effcompile.passes.training.base import Context, StepForm, StepPass, all_forms, keys
from effcompile.passes.training.checkpoint import Checkpoint
from effcompile.passes.training.fused_attention import FusedAttention
from effcompile.passes.training.heads import LossHeads
from effcompile.passes.training.microbatch import Microbatch
from effcompile.passes.training.pointwise import Pointwise
from effcompile.passes.training.precision import Precision
from effcompile.passes.training.states import States, StatesOption
from effcompile.sparse.costs import per_row_of

Loss = Callable[[Any, Any], torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Work:
    """One request, and what has been found out on the way."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    goal: Goal
    loss: Loss | None
    checkpoint: Checkpoint
    heads: LossHeads | None
    pointwise: Pointwise | None
    attention: FusedAttention | None
    states: States
    optimizer: Optimizer | None
    parameters: Sequence[tuple[str, torch.Tensor]]
    figures: Figures
    levers: Levers = ALONE
    microbatch: Microbatch | None = None
    precision: Precision | None = None
    further: tuple[StepPass, ...] = ()
    only: tuple[tuple[str, str, str], ...] | None = None
    progress: Progress = QUIET
    notes: list[str] = field(default_factory=list)
    known_ways: list[tuple[tuple[StatesOption, ...], tuple[Declined, ...]]] = field(default_factory=list)

    def capture(self, keep_outputs: bool, refused: tuple[Declined, ...] = ()) -> Captured:
        """The joint graph of the step, with attentions as written and fused; in 16 bits too where that is allowed."""

        def capture(by: Capture = capture_training) -> Captured:
            return captured(self.model, self.args, self.kwargs, self.loss, keep_outputs, self.attention, by)

        with self.progress.step("capture the step"):
            wide = replace(capture(), refused=refused)
            return wide if self.precision is None else with_narrow(wide, self.precision, self.figures, capture)

    def prepare(
        self, step: Captured, unfused: Collection[frozenset[str]] | None = None, changed: Callable[[Step], Step] | None = None
    ) -> Preparation:
        """Its variants with their options; what was measured for them is kept for the next plan.

        changed: a last change of every variant, after which no gradients are left for an optimizer to consume.
        """
        ways, _ = self.ways(step.step)
        consumed = {consumed_key(way): way.pieces for way in ways if way.consumed and changed is None}
        found = prepare(
            step.step, self.checkpoint, self.heads, self.pointwise, self.figures, self.progress,
            forms=step.forms(self.attention), unfused=unfused, levers=self.levers, consumed=consumed, changed=changed, more=self._further,
        )  # fmt: skip
        found = replace(found, attended=step.attended, refused=step.refused)
        if self.figures.here and (note := keep_figures(self.figures.known)):
            self.notes.append(note)
        return found

    def _further(self, step: Step) -> list[StepForm | Declined]:
        """The forms that passes of installed packages have; of a saved plan its own.

        Raises:
            FormatError: they do not have that of the saved plan.
        """
        context = Context(goal=self.goal, target=self.figures.target, here=self.figures.here)
        found = all_forms(self.further, step, context)
        if self.only is None:
            return found
        same = [item for item in found if not isinstance(item, Declined) and keys(item[1]) == self.only]
        if not same:
            listed = ", ".join(f"{kind} = {option} at {site}" for site, kind, option in self.only)
            raise FormatError(
                f"The plan has {listed}, which no pass here proposes: a package that it was made with is missing, or has changed. "
                "Install it, or plan again without --plan."
            )
        return [*same]

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
                found = self.states.options(step, self.optimizer, self.parameters, self.goal, figures.target, figures.here)
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
        outputs = self.model(*args, **kwargs)
        whole = (self.args, dict(self.kwargs)) if self.args and self.kwargs else self.args or dict(self.kwargs)
        return verify.loss_of(outputs, whole, self.loss)


def make_work(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], goal: Goal, target: str | Target,
    passes: Sequence[str] | None, loss: Loss | None, progress: Progress, optimizer: Any,
) -> Work:  # fmt: skip
    """The request, with its passes, target and optimizer looked up.

    Inputs that an upstream model made are cut from it, so that verification makes no gradients there.
    """
    kwargs = with_items_as_tensor(kwargs)
    args, kwargs = pytree.tree_map_only(torch.Tensor, lambda t: t.detach().requires_grad_() if t.requires_grad else t, (args, dict(kwargs)))
    checkpoint, heads, pointwise, states = load_training_passes(passes)
    machine = resolve(target, [])
    devices = {tensor.device.type for tensor in model.parameters()}
    notes = [*machine.keep_timings(), *(triton.use(devices) if machine.here else ())]
    if (sparse := per_row_of(model)) is not None:
        notes.append(sparse.matched_note())
    # A link is used without asking only in plans for other machines: copies beside the compute have not run on this one.
    levers = load_levers(passes, linked=not machine.here and machine.target.device != "cpu" and machine.target.link_bandwidth > 0)
    if levers.compress is not None and goal.exact:
        notes.append("compress is not proposed: it changes gradients, and the goal allows no error. Give max_error, e.g. 0.02.")
        levers = replace(levers, compress=None)
    precision = load_precision(passes, allowed=not goal.exact)
    if precision is not None and goal.exact:
        notes.append("precision is not proposed: it changes gradients, and the goal allows no error. Give max_error, e.g. 0.05.")
        precision = None
    further = load_step_passes(passes)
    notes += [
        f"{each.name} is not proposed: it changes gradients, and the goal allows no error."
        for each in further
        if not each.exact and goal.exact
    ]
    figures = Figures(target=machine.target, here=machine.here, known=known_figures() if machine.here else {})
    return Work(
        model=model, args=args, kwargs=kwargs, goal=goal, loss=loss, checkpoint=checkpoint, heads=heads, pointwise=pointwise,
        attention=load_attention(passes), states=states, optimizer=as_optimizer(optimizer, model),
        parameters=tuple(model.named_parameters()), figures=figures, levers=levers, progress=progress, notes=notes,
        microbatch=load_microbatch(passes),
        further=tuple(each for each in further if each.exact or not goal.exact),
        precision=precision,
    )  # fmt: skip
