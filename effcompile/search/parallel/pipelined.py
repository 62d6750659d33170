"""A pipeline's stages, each planned by itself within what its rank has left, and the bytes of a rank task by
task.

A stage's graph is a step of its own. Where heads and neurons are divided too, so is the forward that stages
are cut out of; where parameters are sharded over data-parallel ranks, each stage gathers its own for every
micro-batch, and scatters its gradients then: what is summed are shards, and whether a gathered weight is kept
until the backward is decided with all else that a micro-batch keeps. Parameters that are replicated, which
comes first, have their gradients averaged once, at the step's end.

On a rank there are, throughout: its parameters, their summed gradients and optimizer states, the batch, and a
buffer for every message of the step. A micro-batch adds what its stage keeps between its forward and its
backward. The stages of a rank are planned for the largest part of the room with which its simulated peak is
within the budget (bisection: a larger room keeps more).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from torch import Tensor

from effcompile.core.causes import NoRoom
from effcompile.core.errors import InfeasibleError, UsageError
from effcompile.ir.footprint import excess
from effcompile.ir.plan import Declined
from effcompile.ir.resident import resident_bytes
from effcompile.ir.step import DividedStep, Spread, Step
from effcompile.passes.training.base import Case, StepChoice, StepPass
from effcompile.passes.training.forms import applied
from effcompile.passes.training.microbatch import Microbatch, examples, label
from effcompile.passes.training.optimizer_ways import StatesOption
from effcompile.passes.training.pipeline import Pipeline
from effcompile.passes.training.shard import Shard
from effcompile.passes.training.tensor import TensorParallel
from effcompile.planner.parallel.pipeline import order
from effcompile.search.parallel.stages import PipelineStage, stages_of
from effcompile.search.training.prepare import Prepared, prepare
from effcompile.search.training.solve import Schedule, keeping_everything, leanest, schedule
from effcompile.search.training.work import Work

#: Sizes of a rank's room that are tried.
_TRIED = 6
#: Of the forms of `Shard` the one in which a stage's graph knows nothing of other ranks.
_REPLICATED = "replicated"
#: That in which each rank has the states of its rows.
_STATES = "states"

#: Bytes of the loss so far, of a micro-batch's share in it and of that share's gradient, fp32 each; of the
#: share with its weight, where the loss is made.
_SCALARS, _WEIGHTED = 12, 4


@dataclass(frozen=True, kw_only=True)
class Pipelined:
    """A step in stages.

    Attributes:
        work: the request. asked: the pipeline. whole: the step of the batch, as it was captured. case: that
            of one micro-batch.
        division: how the batch is divided. stages: in the model's order. cases: their steps, as their
            parameters lie over other ranks.
        declined: what is whole on every tensor-parallel rank. shard: over how many data-parallel ranks, and
            in which forms.
        known: stages that are ready to be planned. held: rank → its optimizer states.
    """

    work: Work
    asked: Pipeline
    whole: Case
    case: Case
    division: DividedStep
    stages: tuple[PipelineStage, ...]
    cases: tuple[Case, ...]
    declined: tuple[Declined, ...] = ()
    shard: Shard = field(default_factory=Shard)
    known: dict[int, Prepared] = field(default_factory=dict)
    held: dict[int, StatesOption] = field(default_factory=dict)

    @property
    def forms(self) -> tuple[str, ...]:
        """How parameters may lie over the data-parallel ranks, what takes least time first."""
        return self.shard.forms if self.shard.ranks > 1 else (_REPLICATED,)

    def over(self, form: str) -> Pipelined:
        """The same in one of its forms."""
        if form == _REPLICATED:
            return self
        shard = replace(self.shard, forms=(form,))
        made = (_taken(shard, case, self.work)[0] for case in self.cases)
        cases = tuple(replace(case, step=replace(case.step, resident_bytes=0)) for case in made)
        return replace(self, cases=cases, known={}, held={})

    @property
    def spread(self) -> Spread:
        """How the parameters of all stages lie over the other axes of the mesh."""
        return self.cases[0].step.spread or Spread()

    @property
    def count(self) -> int:
        """Micro-batches."""
        return self.division.count

    def tasks(self, rank: int) -> list[tuple[str, int, int]]:
        """What a rank does, in order."""
        return [(what, stage, i) for what, stage, i in order(self.asked.strategy, rank, self.count)]

    def own(self, rank: int) -> tuple[int, ...]:
        """The stages of a rank."""
        return tuple(range(rank, len(self.stages), self.asked.ranks))

    def parameters(self, rank: int) -> frozenset[str]:
        """The names of those that a rank has."""
        return frozenset(name for stage in self.own(rank) for name in self.stages[stage].parameters)

    @cached_property
    def shared(self) -> Mapping[str, tuple[int, ...]]:
        """Parameter → the ranks that have it, where there are several."""
        ranks = range(self.asked.ranks)
        having = {
            name: tuple(r for r in ranks if name in self.parameters(r))
            for r in ranks
            for name in sorted(self.parameters(r))
        }
        return {name: found for name, found in having.items() if len(found) > 1}

    def prepared(self, stage: int) -> Prepared:
        """A stage, ready to be planned; it hands its gradients on to be summed."""
        if stage not in self.known:
            assert self.case.last is not None
            case, work = self.cases[stage], self.work
            case = replace(case, step=self.case.last(case.step))
            with work.progress.step(f"prepare stage {stage}"):
                made = prepare(case.step, [case], work.passes.checkpoint, work.figures, solved=work.fronts)
            self.known[stage] = made.variants[0]
        return self.known[stage]

    def states(self, rank: int) -> StatesOption | None:
        """The optimizer's, of what a rank has of the parameters, as the user gave it; None where nothing has
        any.
        """
        if (given := self.whole.optimizer) is None:
            return None
        if rank not in self.held:
            parts = {
                name: node.meta["val"] for step in self._steps(rank) for node, name in step.parameters.items()
            }
            here = given.of_parts(parts)
            self.held[rank] = here.given if here.mine else StatesOption(form=given.given.form)
        return self.held[rank]

    def message_bytes(self, stage: int) -> int:
        """Of what a stage hands on."""
        value = self.stages[stage].step.loss.meta["val"]
        return int(value.numel() * value.element_size())

    def base_bytes(self, rank: int) -> int:
        """What is on a rank throughout the step."""
        model, steps = self.work.model, self._steps(rank)
        whole = sum(_bytes(parameter) for _, parameter in model.named_parameters())
        mine = {name: _bytes(node.meta["val"]) for step in steps for node, name in step.parameters.items()}
        constants = {id(v): _bytes(v) for step in steps for v in step.constants.values()}
        messages = sum(self.message_bytes(s - 1) for s in self.own(rank) if s)
        messages += sum(self.message_bytes(s) for s in self.own(rank) if s < len(self.stages) - 1)
        here = resident_bytes(model, self.work.args, self.work.kwargs) - whole + sum(mine.values())
        alone = _WEIGHTED if len(self.stages) - 1 in self.own(rank) else 0
        summed = sum(self._summed(rank).values())
        states = self.states(rank)
        summed += 0 if states is None else states.resident_bytes
        return here + summed + sum(constants.values()) + self.count * messages + _SCALARS + alone

    def _steps(self, rank: int) -> list[Step]:
        """Of the stages of a rank."""
        return [self.cases[stage].step for stage in self.own(rank)]

    def _summed(self, rank: int) -> dict[str, int]:
        """Parameter of a rank → bytes of its summed gradient there."""
        return {
            name: _bytes(node.meta["val"])
            for step in self._steps(rank)
            for name, node in step.gradients.items()
        }

    def peak_bytes(self, rank: int, made: Mapping[int, Schedule]) -> int:
        """The most bytes alive on a rank, task by task."""
        held = {stage: _Held.of(one) for stage, one in made.items()}
        live = peak = self.base_bytes(rank)
        last = len(self.stages) - 1
        for what, stage, _ in self.tasks(rank):
            one = held[stage]
            if what == "F":
                peak, live = max(peak, live + one.forward), live + one.kept
                continue
            peak = max(peak, live - one.kept + one.backward)
            live -= (
                one.kept
                + (self.message_bytes(stage - 1) if stage else 0)
                + (self.message_bytes(stage) if stage < last else 0)
            )
        summed = self._summed(rank)
        joined = [summed[name] * len(ranks) for name, ranks in self.shared.items() if rank in ranks]
        states = self.states(rank)
        return max(
            peak, live + max(joined, default=0), live + (0 if states is None else states.working_bytes)
        )

    def planned(self, rank: int) -> dict[int, Schedule]:
        """The schedules of a rank's stages within the budget.

        Raises:
            InfeasibleError: there are none.
        """
        own, budget = self.own(rank), self.work.goal.memory
        free = {stage: keeping_everything(self.prepared(stage)) for stage in own}
        if budget is None or not excess(self.peak_bytes(rank, free), budget):
            return free
        least = max(leanest(self.prepared(stage)) for stage in own)
        most = max(one.trace.peak_bytes for one in free.values())
        best = {stage: schedule(self.prepared(stage), least) for stage in own}
        if excess(needed := self.peak_bytes(rank, best), budget):
            parts = (("what is on the rank throughout", self.base_bytes(rank)),)
            raise InfeasibleError(NoRoom(beside=parts), nearest={"memory": float(needed)})
        for _ in range(_TRIED):
            room = (least + most) // 2
            tried = {stage: schedule(self.prepared(stage), room) for stage in own}
            if excess(self.peak_bytes(rank, tried), budget):
                most = room
            else:
                best, least = tried, room
        return best


@dataclass(frozen=True, slots=True)
class _Held:
    """Of one micro-batch in a stage: bytes at the highest instant of its forward and of its backward, and
    between the two.

    What is received is not among them, nor, once its forward is over, what is handed on, unless it is kept.
    """

    forward: int
    backward: int
    kept: int

    @classmethod
    def of(cls, made: Schedule) -> _Held:
        cut, trace = made.prepared.cut, made.trace
        kept = {
            s
            for node in made.emitted.handed
            if node in made.emitted.origin
            for s in cut.held.of[made.emitted.origin[node]]
        }
        gone = sum(cut.held.nbytes[s] for s in cut.held.of[cut.step.loss] if s not in kept)
        most = {"forward": cut.base_bytes, "backward": cut.base_bytes}
        for at in trace.instants:
            most[at.phase] = max(most[at.phase], at.live)
        return cls(
            most["forward"] - cut.base_bytes,
            most["backward"] - cut.base_bytes - gone,
            trace.saved_bytes - gone,
        )


def _bytes(tensor: Tensor) -> int:
    return int(tensor.numel() * tensor.element_size())


def _taken(each: StepPass, case: Case, work: Work) -> tuple[Case, tuple[Declined, ...]]:
    """A step in the one form that a pass has of it, and what it declines.

    Raises what proposing and applying do.
    """
    told = list(each.propose(case, work.context))
    choice = next(item for item in told if isinstance(item, StepChoice))
    return applied(each, case, choice, choice.options[0]), tuple(
        item for item in told if isinstance(item, Declined)
    )


def pipelined(work: Work, asked: Pipeline, tensor: TensorParallel, shard: Shard) -> Pipelined:
    """A request's step in stages; `tensor`: its heads and neurons divided so, `shard`: its parameters, beside
    them.

    Raises:
        UsageError: it has no such stages, or its batch no such micro-batches, or a form that stages have
            not. Refusal: the batch cannot be
            divided.
    """
    if shard.ranks > 1 and _STATES in shard.forms:
        raise UsageError(
            "shard.forms=states (zero=1) is not lowered in the stages of a pipeline. Give zero=3, or zero=0 "
            "and make the optimizer yourself: torch.distributed.optim.ZeroRedundancyOptimizer around the "
            'parameters, with process_group=mesh["dp"].get_group().'
        )
    whole = work.capture()
    split, declined = _taken(tensor, whole, work) if tensor.ranks > 1 else (whole, ())
    assert split.source is not None
    count = asked.count(examples(split.source))
    micro = Microbatch(count=count)
    choice = next(found for found in micro.propose(split, work.context) if isinstance(found, StepChoice))
    case = micro.apply(split, choice, choice.option(label(count, examples(split.source))))
    division, source = case.division, case.source
    assert division is not None and source is not None
    if case.front is None:
        why = "; ".join(map(str, case.step.mends))
        raise UsageError(
            f"A pipeline is cut out of what torch.export gives, which does not take this model: {why}. "
            "Leave pp out."
        )
    tensors = division.part.leaves(source.args, dict(source.kwargs))
    stages = stages_of(case.front, division.part, work.model, tensors, asked.strategy)
    cases = tuple(
        Case(step=stage.step, source=source, taken=split.taken, notes=split.notes) for stage in stages
    )
    return Pipelined(
        work=work,
        asked=asked,
        whole=whole,
        case=case,
        division=division,
        stages=tuple(stages),
        cases=cases,
        declined=declined,
        shard=shard,
    )
