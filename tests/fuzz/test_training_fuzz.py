"""Random modules under random budgets and levers: three planned steps are eager's, and no step is over its
budget or its prediction.

The oracles share no code with the plan: eager PyTorch on a copy of the model; and bytes as the model's own
tensors, told apart by address, plus what the allocator's record says was added to them.
"""

from __future__ import annotations

import contextlib
import copy
import gc
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fuzz_settings import ASKED, fuzzed
from hypothesis import example, given, note
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from training_models import LEVERS, LOOKUPS, MODELS, RANDOM, Drawn, Levers

from effcompile.compiler import optimize_training
from effcompile.compiler.training import attempt
from effcompile.core.errors import CaptureError, InfeasibleError, InputsError
from effcompile.core.goal import Goal
from effcompile.estimate import operators
from effcompile.passes.training.base import Case
from effcompile.passes.training.optimizer_ways import GivenOptimizer
from effcompile.search.training.branches import Branches
from effcompile.search.training.work import Work

STEPS = 3
#: Once planned with its draws in another order than eager's: one module that draws stands at two places, and
#: its first part is frozen.
TWO_PLACES = Drawn(
    kinds=("group norm", "noise", "norms", "fused attention, dropout", "gated"), loss="squares", again=1,
    tied=False, unused=True, frozen=True, differentiated_input=False, batch=4, seed=300,
)  # fmt: skip
#: Once planned with dropout's mask, and a cast of it, though nothing differentiates what it falls on: 388
#: bytes above eager.
FROZEN_DROPOUT = Drawn(
    kinds=("dropout",), loss="tokens", again=-1, tied=False, unused=True, frozen=True,
    differentiated_input=False, batch=4, seed=561,
)  # fmt: skip
CHECKPOINTS = Levers(
    passes=("checkpoint", "loss_head", "pointwise"), budgets=("least",), optimizer="sgd", max_error=None
)
IN_BACKWARD = Levers(passes=("states.in_backward=true",), budgets=("least",), optimizer="sgd", max_error=None)


@pytest.fixture(scope="module", autouse=True)
def _quick(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with quick(tmp_path_factory.mktemp("cache")):
        yield


@contextlib.contextmanager
def quick(cache: Path) -> Iterator[None]:
    """Operators are timed once and blocks searched briefly: plans of another quality, of the same
    correctness.

    What does not depend on what is asked is made once for all that is asked of a model: its capture, and for
    one list of passes and one kind of optimizer the forms of its step with their blocks' options. That is
    honest, for the compiler never edits them: a frontier and a plan that is solved again, too, take many
    budgets from the same ones. Weights are read at each step, so that those of an earlier plan's steps do no
    harm.
    """
    measured = operators._seconds
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EFFCOMPILE_CACHE", str(cache))
        patch.setattr(operators, "_seconds", lambda call, budget, *others: measured(call, 0.0, *others))
        patch.setattr("effcompile.passes.training.checkpoint.SECONDS_PER_BLOCK", 0.1)
        patch.setattr("effcompile.proof.training.timed._TIMING_SECONDS", 0.0)
        patch.setattr(Work, "capture", captured_once(Work.capture))
        patch.setattr(attempt, "Branches", prepared_once())
        yield


def captured_once(capture: Callable[[Work], Case]) -> Callable[..., Case]:
    """The latest model's step, captured once; the optimizer beside it is each request's own."""
    latest: list[tuple[nn.Module, Case]] = []

    def once(self: Work, keep_outputs: bool = False, *, runs: bool = False) -> Case:
        if not latest or latest[0][0] is not self.model:
            latest[:] = [(self.model, capture(replace(self, optimizer=None)))]
        case, figures = latest[0][1], self.figures
        if self.optimizer is None:
            return case
        return replace(
            case,
            optimizer=GivenOptimizer.of(
                self.optimizer, self.parameters, case.step, figures.target, figures.here
            ),
        )

    return once


def prepared_once() -> Callable[..., Branches]:
    """The forms of the latest request's step, for all budgets; anew where something that was run did not
    hold.
    """
    latest: list[tuple[object, Branches]] = []

    def branches(*, work: Work, case: Case) -> Branches:
        key = (id(case.step), work.passes, type(work.optimizer))
        if work.forbidden:
            return Branches(work=work, case=case)
        if not latest or latest[0][0] != key:
            latest[:] = [(key, Branches(work=work, case=case))]
        shared = latest[0][1]
        return Branches(
            work=work, case=shared.case, declined=shared.declined, cases=shared.cases, known=shared.known
        )

    return branches


@fuzzed(8, share=1 / 5)  # five budgets of one model in the mean
@given(model=MODELS, several=st.lists(LEVERS, min_size=1, max_size=3 if ASKED else 1))
@example(model=TWO_PLACES, several=[IN_BACKWARD])
@example(model=FROZEN_DROPOUT, several=[CHECKPOINTS])
def test_planned_steps_are_eagers_within_the_budget(
    model: Drawn, several: list[Levers], tally: Counter[str]
) -> None:
    check(model, several, tally)


def check(drawn: Drawn, several: Sequence[Levers], tally: Counter[str]) -> None:
    """One model under all that is asked of it."""
    tally["training: models"] += 1
    if not runs(drawn):
        tally["training: models that eager does not take"] += 1
        return
    model = drawn.model()
    for levers in several:
        note(repr(levers))
        for trial in trials(drawn, model, levers, tally):
            trial.run()


def trials(drawn: Drawn, model: nn.Module, levers: Levers, tally: Counter[str]) -> Iterator[Trial]:
    """A plan for each budget; none where the step is refused in words."""
    least = 0
    for budget in levers.budgets:
        tally["training: cases"] += 1
        # as it was: tens of steps of one after the other diverge
        model.load_state_dict(drawn.model().state_dict())
        inputs, twin = drawn.inputs(), copy.deepcopy(model)
        try:
            if budget != "none" and not least:
                least = least_budget(model, inputs, levers)
            memory = (
                None
                if budget == "none"
                else least
                if budget == "least"
                else int(least * (1 + 0.5 * float(budget)))
            )
            planned = plan(model, inputs, levers, memory)
        except (CaptureError, InputsError) as refused:  # in words: counted, and shown if anything fails
            tally["training: refused at capture"] += 1
            note(str(refused))
            return
        tally["training: planned"] += 1
        yield Trial(drawn, levers, model, twin, inputs, planned, least, tally)


@dataclass(frozen=True)
class Trial:
    """A planned model beside a copy of the model; `least`: the least budget that the planner named, 0 where
    it was not asked.
    """

    drawn: Drawn
    levers: Levers
    model: nn.Module
    twin: nn.Module
    inputs: dict[str, Tensor]
    planned: Any
    least: int
    tally: Counter[str]

    @property
    def exact(self) -> bool:
        """Whether the same random numbers are drawn: micro-batches draw others."""
        divided = any(d.kind == "micro-batches" for d in self.planned.plan.decisions)
        return not (divided and (RANDOM & set(self.drawn.kinds)))

    def run(self) -> None:
        """Three steps of each, from the same seeds."""
        ours = self.planned.optimizer or self.levers.made(self.model.parameters())
        theirs, given = self.levers.made(self.twin.parameters()), self.drawn.inputs()
        for number in range(STEPS):
            seed = self.drawn.seed + number
            found = step(self.planned, self.inputs, ours, seed, self.model, self.levers, measured=number < 2)
            before = {name: buffer.clone() for name, buffer in self.twin.named_buffers()}
            wanted = step(self.twin, given, theirs, seed, self.twin, self.levers, measured=number == 1)
            self.check_least(
                wanted,
                sum(b.nbytes for name, b in self.twin.named_buffers() if not torch.equal(b, before[name])),
            )
            if not wanted.finite:
                assert bool(found.loss.isfinite()) == bool(wanted.loss.isfinite()), (
                    "eager's step diverges, and ours does not"
                )
                self.tally["training: steps that diverge in eager"] += 1
                return
            if self.exact:
                self.check_values(found, wanted)
            self.check_peak(found)
            if "bf16" in self.drawn.kinds and LOOKUPS & set(self.drawn.kinds):
                self.level()

    def level(self) -> None:
        """The twin's parameters: a rounding of theirs in bf16 may look up another row, after which no two
        steps are alike.
        """
        with torch.no_grad():
            for mine, other in zip(self.model.parameters(), self.twin.parameters(), strict=True):
                mine.copy_(other)

    def check_values(self, found: Stepped, wanted: Stepped) -> None:
        """Loss, gradients, generator, buffers, and with them the parameters after the update."""
        # from the second step on parameters differ by a rounding of theirs
        rough = "bf16" in self.drawn.kinds
        same(found.loss, wanted.loss, "loss", 3e-2 if rough else 3e-5)
        compare(found.gradients, wanted.gradients, self.planned.plan.decisions, 5e-2 if rough else 5e-5)
        assert torch.equal(found.state, wanted.state), "the generator is in another state"
        for (name, a), (_, b) in zip(self.model.named_buffers(), self.twin.named_buffers(), strict=True):
            same(a, b, name, 3e-2 if rough else 3e-5)
        if self.levers.optimizer == "sgd":  # gradients that the backward consumed are seen here alone
            for (name, a), (_, b) in zip(
                self.model.named_parameters(), self.twin.named_parameters(), strict=True
            ):
                same(a.detach(), b.detach(), name, 5e-2 if rough else 5e-5)
        self.tally["training: steps compared"] += 1

    def check_peak(self, found: Stepped) -> None:
        """Within the budget, and not above what was predicted."""
        if found.nbytes is None:
            return
        plan, taken = self.planned.plan, found.nbytes
        limit, predicted = plan.goal.memory, plan.predicted.peak_bytes
        assert limit is None or taken <= limit, f"{taken} bytes over a budget of {limit}: {taken - limit}"
        assert predicted is not None and taken <= predicted, (
            f"predicted {predicted}, {taken - predicted} too low"
        )
        self.tally["training: peaks measured"] += 1

    def check_least(self, wanted: Stepped, renewed: int) -> None:
        """What eager takes is feasible, beside what the contract of a planned step takes.

        renewed: bytes of buffers that the step has written into. Their new values stand beside the old ones
        until the forward has ended, so that a forward which raises leaves the model as it was, where eager's
        has written some.
        """
        if not self.least or wanted.nbytes is None:
            return
        over = self.least - wanted.nbytes
        assert over <= renewed + SCALARS, (
            f"the least budget is {self.least}, {over} more than eager's step takes"
        )
        self.tally[
            f"training: least budgets {'within' if over <= 0 else 'new buffers or a scalar above'} "
            "eager's peak"
        ] += 1


#: Bytes of single numbers: the gradient that arrives at the loss, which whoever calls a
#: torch.autograd.Function holds until its backward has returned, and numbers that operators make tensors of.
#: AlphaDropout's 16: its noise times a number is a new tensor in the graph, beside that number's, and eager's
#: mul_ is not.
SCALARS = 64


def runs(case: Drawn) -> bool:
    """Whether eager PyTorch takes the module, and a gradient is more than rounding."""
    try:
        model, inputs = case.model(), case.inputs()
        loss = model(**inputs)
        loss.backward()
    except RuntimeError:
        return False
    return bool(loss.isfinite()) and all(
        bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None
    )


def plan(model: nn.Module, inputs: dict[str, Tensor], levers: Levers, memory: int | None) -> Any:
    """The planned model."""
    passes = None if levers.passes is None else list(levers.passes)
    optimizer = levers.made(model.parameters()) if levers.optimizer else None
    goal = Goal(mode="training", memory=memory, max_error=levers.max_error)
    return optimize_training(model, (), inputs, goal=goal, passes=passes, optimizer=optimizer)


def least_budget(model: nn.Module, inputs: dict[str, Tensor], levers: Levers) -> int:
    """The least budget that the planner names, which must be feasible."""
    with pytest.raises(InfeasibleError) as refused:
        plan(model, inputs, levers, 1)
    return int(refused.value.nearest["memory"])


class Stepped:
    """What a step made."""

    def __init__(
        self, loss: Tensor, gradients: dict[str, Tensor | None], state: Tensor, nbytes: int | None
    ) -> None:
        self.loss, self.gradients, self.state, self.nbytes = loss, gradients, state, nbytes

    @property
    def finite(self) -> bool:
        """Whether the loss and all gradients are numbers."""
        return all(
            bool(t.isfinite().all()) for t in (self.loss, *self.gradients.values()) if type(t) is Tensor
        )


def step(
    planned: Any,
    inputs: dict[str, Tensor],
    optimizer: Any,
    seed: int,
    model: nn.Module,
    levers: Levers,
    *,
    measured: bool,
) -> Stepped:
    """One step with its update; bytes where no optimizer's own states of before would be missed."""
    there = sum(
        {
            t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
            for t in alive(model, inputs, optimizer)
        }.values()
    )
    torch.manual_seed(seed)
    with collector_at_rest(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        loss = planned(**inputs)
        loss.backward()
        gradients = {name: t.grad for name, t in differentiated(model, inputs)}
        if levers.optimizer:
            optimizer.step()
    nbytes = there + highest(record) if measured else None
    state = torch.get_rng_state()
    if not levers.optimizer:
        optimizer.step()
    clear(model, inputs)
    return Stepped(loss.detach(), gradients, state, nbytes)


@contextlib.contextmanager
def collector_at_rest() -> Iterator[None]:
    """What it freed would be of before a step, and taken off the step's bytes."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def differentiated(model: nn.Module, inputs: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from ((f"input {name}", t) for name, t in inputs.items() if t.requires_grad)


def clear(model: nn.Module, inputs: dict[str, Tensor]) -> None:
    for _, t in differentiated(model, inputs):
        t.grad = None


def alive(model: nn.Module, inputs: dict[str, Tensor], optimizer: Any) -> Iterator[Tensor]:
    yield from model.parameters()
    yield from model.buffers()
    yield from inputs.values()
    if not getattr(optimizer, "on_host", False):
        for state in optimizer.state.values():
            yield from (t for t in state.values() if isinstance(t, Tensor))


def highest(record: Any) -> int:
    """The highest running sum of what the allocator gave out and took back."""
    live = top = 0
    for event in record.profiler.kineto_results.events():
        if event.name() == "[memory]" and event.device_type().name == "CPU":
            live += event.nbytes()
            top = max(top, live)
    return top


def same(a: Tensor, b: Tensor, what: str, limit: float) -> None:
    if a.is_floating_point():
        apart, size = float((a.double() - b.double()).norm()), float(b.double().norm())
        assert apart <= limit * max(size, 1e-4), f"{what}: off by {apart / max(size, 1e-4):.2e}"
    else:
        assert torch.equal(a, b), what


def compare(
    ours: dict[str, Tensor | None], theirs: dict[str, Tensor | None], decisions: Any, limit: float
) -> None:
    """Every gradient; those that the backward handed to the optimizer are seen in the parameters of the next
    steps.
    """
    consumed = any(d.kind == "gradient" and d.option == "consumed in the backward" for d in decisions)
    whole = max((float(g.norm()) for g in theirs.values() if g is not None), default=0.0)
    for name, wanted in theirs.items():
        found = ours[name]
        if consumed and (found is None or type(found) is not Tensor):  # what stands there refuses to be read
            continue
        if wanted is None or found is None:
            assert wanted is found or not float((wanted if found is None else found).norm()), (
                f"{name}: no gradient"
            )
            continue
        apart = float((found.double() - wanted.double()).norm())
        assert apart <= limit * max(float(wanted.double().norm()), 1e-3 * whole), (
            f"gradient of {name}: off by {apart:.2e}"
        )
