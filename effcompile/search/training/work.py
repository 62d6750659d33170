"""One request for a training plan, and what is found out on its way: the step and its variants."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import fx, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from effcompile.backends import triton
from effcompile.backends.torch.items import with_items_as_tensor
from effcompile.capture.source import Source
from effcompile.capture.training import Loss
from effcompile.capture.training_inputs import after_pre_hooks
from effcompile.capture.training_outputs import loss_in
from effcompile.core import gpu
from effcompile.core.errors import FormatError, UsageError
from effcompile.core.goal import Goal
from effcompile.core.reasons import Because, Reason, Unsupported
from effcompile.core.trees import leaves_with_path
from effcompile.core.types import Args, Kwargs, Outputs
from effcompile.ir.plan import Decision, Declined, Plan
from effcompile.ops.frozen_codes import CodedWeight
from effcompile.ops.optimizers import check
from effcompile.passes import TRAINING_PASSES, TrainingPasses, load_training_passes, over_values, ways
from effcompile.passes.training.base import Case, StepContext
from effcompile.passes.training.forms import Forms, forms, reapplied
from effcompile.passes.training.optimizer_ways import GivenOptimizer
from effcompile.planner.batch import BY
from effcompile.planner.remat import BlockFront
from effcompile.search.machine import resolve
from effcompile.search.progress import QUIET, Progress
from effcompile.search.request import AnyOptimizer, Task
from effcompile.search.training.figures import keep_figures, known_figures
from effcompile.search.training.moved import RefutedError
from effcompile.search.training.operator_costs import OperatorCosts
from effcompile.search.training.prepare import Preparation, prepare
from effcompile.sites.attention.dropped import as_on_gpu
from effcompile.sparse.costs import per_row_of

__all__ = ["LeafInputs", "Work", "loss_of", "make_work"]

_DROPPED = "{} × attention with dropout: planned as the kernel of {name}, which keeps no scores"
#: Inputs that require a gradient, by name.
LeafInputs = Mapping[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Work:
    """One request, and what has been found out on the way.

    Attributes:
        forbidden: (kind, option) → why it is out of the question: it was run, and did not hold.
        decided: the decisions of a plan that is applied again; None where the solver decides.
        fronts: kind of block → its options, of every form that was prepared.
    """

    model: nn.Module
    args: Args
    kwargs: Kwargs
    goal: Goal
    loss: Loss | None
    passes: TrainingPasses
    optimizer: Optimizer | None
    parameters: Sequence[tuple[str, torch.Tensor]]
    figures: OperatorCosts
    forbidden: Mapping[tuple[str, str], Reason] = field(default_factory=dict)
    decided: Sequence[Decision] | None = None
    progress: Progress = QUIET
    notes: list[Reason] = field(default_factory=list)
    fronts: dict[str, BlockFront] = field(default_factory=dict)

    def capture(self, keep_outputs: bool = False, *, runs: bool = False) -> Case:
        """The joint graph of the step, which passes may have captured anew.

        `runs`: the model's own step is run beside the planned one, so that its forward need not be called
        now (`Source.wait`).

        Raises:
            CaptureError, InputsError: it cannot be captured. UsageError: the optimizer is of other
                parameters.
        """
        source = Source(
            model=self.model, args=self.args, kwargs=self.kwargs, loss=self.loss, keep_outputs=keep_outputs
        )
        if source.without_data and not self.figures.here and self.figures.target.device != "cpu":
            source = replace(source, base=self._as_on_gpu)
        if runs:
            source.wait()
        with self.progress.step("capture the step"):
            step, front = source.capture_with_front()
        self.figures.within(step)
        given, target = self.optimizer, self.figures.target
        optimizer = (
            None
            if given is None
            else GivenOptimizer.of(given, self.parameters, step, target, self.figures.here)
        )
        return Case(step=step, source=source, front=front, optimizer=optimizer)

    def _as_on_gpu(self, front: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> None:
        """Attention with dropout is the operator that the absent GPU has for it."""
        if count := as_on_gpu(front):
            note = Because(
                "{} × attention with dropout: planned as the kernel of {name}, which keeps no scores",
                (count, self.figures.target.name),
            )
            self.notes.extend([note] * (note not in self.notes))

    @property
    def context(self) -> StepContext:
        """What passes propose for."""
        return self.figures.context(self.goal, self.forbidden)

    def prepare(self, case: Case, *, reserve: bool = False) -> Preparation:
        """Its forms with the options of their blocks; what was measured for them is kept for the next plan.

        reserve: the forms that passes have in reserve.

        Raises:
            FormatError: a plan is applied again, and this step cannot be what it says. RequestError: the user
                wants what cannot be.
        """
        with self.progress.step("find the forms of the step"):
            made = self._forms(case, reserve)
        found = prepare(
            case.step, made.cases, self.passes.checkpoint, self.figures, levers=self.passes.levers,
            solved=self.fronts,
        )  # fmt: skip
        if self.figures.store is not None and (note := keep_figures(self.figures.known, self.figures.store)):
            self.notes.append(note)
        broken = [
            Declined(site="values", kind=name, option=name, by=name, reason=Unsupported("{name}", (said,)))
            for name, said in self.passes.levers.broken.items()
        ]
        return replace(found, declined=(*made.declined, *broken), refused=made.refused)

    def _forms(self, case: Case, reserve: bool) -> Forms:
        if self.decided is not None:
            return Forms(cases=[reapplied(self.passes.whole, case, self.decided)])
        return forms(self.passes.step, case, self.context, reserve=reserve)

    def without(self, error: RefutedError) -> Work:
        """The same work without a choice that was run and did not hold."""
        levers = self.passes.levers
        of_values = error.kind in levers.names
        passes = (
            replace(self.passes, levers=replace(levers, refused=levers.refused | {error.option}))
            if of_values
            else self.passes
        )
        if of_values or not error.option:
            self.notes.append(Because("{name}: {name}", (error.said, str(error))))
        return replace(
            self, passes=passes, forbidden={**self.forbidden, (error.kind, error.option): error.reason}
        )

    def forget(self, found: Preparation) -> None:
        """Have the operators of all variants timed again: their times do not agree with what the
        step takes.
        """
        graphs = (found.captured.graph, *(prepared.step.graph for prepared in found.variants))
        self.figures.doubt(node for graph in graphs for node in graph.nodes if node.op == "call_function")

    @property
    def leaves(self) -> LeafInputs:
        """The example inputs that require a gradient, by name."""
        found = leaves_with_path((self.args, dict(self.kwargs)))
        return {
            pytree.keystr(path[1:]).strip("[]'"): leaf
            for path, leaf in found
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad
        }

    def eager_loss(self) -> torch.Tensor:
        """The original's loss at the example inputs."""
        args, kwargs = self.args, dict(self.kwargs)
        if self.loss is not None:
            taken = inspect.signature(self.model.forward).parameters
            if not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in taken.values()):
                kwargs = {name: value for name, value in kwargs.items() if name in taken}
        # as captured: hooks on the outermost module run around a planned step, too
        outputs = self.model.forward(*args, **kwargs)
        whole = (
            (self.args, dict(self.kwargs)) if self.args and self.kwargs else self.args or dict(self.kwargs)
        )
        return loss_of(outputs, whole, self.loss)


def make_work(task: Task) -> Work:
    """The request, with its passes, target and optimizer looked up.

    Inputs that an upstream model made are cut from it, so that verification makes no gradients there.

    Raises:
        UsageError: frozen weights of the model are held as codes already.
    """
    model, asked, goal = task.model, task.request, task.request.goal
    _refuse_codes(model)
    args, kwargs = after_pre_hooks(model, task.args, with_items_as_tensor(task.kwargs))
    args, kwargs = pytree.tree_map_only(
        torch.Tensor, lambda t: t.detach().requires_grad_() if t.requires_grad else t, (args, dict(kwargs))
    )
    machine = resolve(asked.target, [], gpu.place_of(model, args, kwargs))
    devices = {tensor.device.type for tensor in model.parameters()}
    notes: list[Reason] = [*machine.keep_timings(), *(triton.use(devices) if machine.here else ())]
    if (sparse := per_row_of(model)) is not None:
        notes.append(sparse.matched_note())
    # a processor's is its disk: only on demand
    linked = machine.target.device != "cpu" and machine.target.link_bandwidth > 0
    loaded = load_training_passes(asked.passes, inexact=not goal.exact, linked=linked)
    if goal.exact:
        loaded, refused = loaded.exact
        notes += [
            Because(
                "{name} is not proposed: it changes gradients, and the goal allows no error. Give "
                "max_error, e.g. 0.02.",
                (name,),
            )
            for name in refused
        ]
    known = known_figures(machine.calibration) if machine.calibration is not None else {}
    return Work(
        model=model,
        args=args,
        kwargs=kwargs,
        goal=goal,
        loss=asked.loss,
        passes=loaded,
        optimizer=as_optimizer(asked.optimizer, model),
        parameters=tuple(model.named_parameters()),
        progress=asked.progress,
        notes=notes,
        figures=OperatorCosts(
            target=machine.target,
            here=machine.here,
            known=known,
            store=machine.calibration,
            progress=asked.progress,
            pace=machine.pace,
        ),
    )


def _refuse_codes(model: nn.Module) -> None:
    """Raises UsageError for a model that another plan was carried out on, and that no longer has all of its
    weights.
    """
    if form := next((p.form for p in model.parameters() if isinstance(p, CodedWeight)), None):
        raise UsageError(
            f"The frozen weights of this model are held in {form}, as an earlier plan has it: what they were "
            "is not there to be planned with. Load its base anew (adapters are kept by their own state), or "
            "plan with --pass no-frozen what is planned again."
        )


def as_optimizer(given: AnyOptimizer, model: nn.Module) -> Optimizer | None:
    """The optimizer that was given, or that the given function makes of the model's trainable parameters.

    Raises:
        UsageError: no optimizer, one that cannot be planned, or the function raises.
    """
    if given is None:
        return None
    if not isinstance(given, Optimizer) and callable(given):
        try:
            given = given([p for p in model.parameters() if p.requires_grad])
        except Exception as error:
            raise UsageError(f"optimizer(parameters) raises: {type(error).__name__}: {error}") from error
    return check(given)


def as_planned(work: Work, plan: Plan) -> Work:
    """The request with the plan's decisions, and passes that allow them.

    Raises:
        FormatError: a pass that the plan was made with is missing.
    """
    values, held = over_values(), ways()
    known = {*TRAINING_PASSES, *values, *(each.name for each in work.passes.whole)}
    decided = tuple(d for d in plan.decisions if d.by != BY)  # of which the inputs are
    missing = [
        d
        for d in decided
        if d.option != d.baseline and (d.by not in known or (d.by in values and d.kind not in held))
    ]
    if missing:
        listed = ", ".join(sorted(f"{d.kind} = {d.option} at {d.site}" for d in missing))
        raise FormatError(
            f"The plan has {listed}, which no pass here proposes: a package that it was made with is "
            "missing, or has changed. Install it, or plan again without --plan."
        )
    return replace(work, decided=decided, passes=work.passes.carrying_out({d.by for d in decided}))


def loss_of(outputs: Outputs, inputs: object, loss: Loss | None) -> torch.Tensor:
    """The scalar of what a model returned, as capture found it."""
    if loss is not None:
        return loss(outputs, inputs)
    return loss_in(outputs)
