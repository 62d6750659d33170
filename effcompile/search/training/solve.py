"""The schedule of a step within its budget: solve, emit, simulate; where the simulation is above, say so and
solve again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from effcompile.core.causes import NotReached
from effcompile.core.errors import InfeasibleError
from effcompile.ir.footprint import excess
from effcompile.passes.training.checkpoint import as_autograd_keeps, carried_out, keeping_all
from effcompile.planner import OPTIMAL, UNPROVEN
from effcompile.planner.remat import (
    BlockFront,
    BlockOption,
    ChainProblem,
    ChainSolution,
    Group,
    chain_frontier,
    smallest_budget,
    solve_chain,
)
from effcompile.schedules.emit import Emitted
from effcompile.schedules.simulate import Trace, per_stage
from effcompile.search.training.prepare import Prepared

#: Solves at the most per variant: a schedule above its budget is corrected and solved again.
MAX_ROUNDS = 8
#: Solves at the most for the leanest.
_LEAN_ROUNDS = 4
#: Emitted schedules of a variant that are kept. More than two spare nothing: of 73 schedules of a test 34 are
#: one of the last two.
KEPT = 2
#: The solver of a step whose budget leaves everything kept.
NOTHING_TO_SOLVE = "everything kept fits"


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """A variant with a choice for every block, emitted and simulated.

    Attributes:
        prepared: the variant. problem: as it was solved, corrections included. solution: the planner's.
        chosen: per block its option. fronts: kind of block → its options, where they were looked for.
        emitted, trace: what it became, and the bytes at every instant of it.
        rounds: solves that it took.
    """

    prepared: Prepared
    problem: ChainProblem
    solution: ChainSolution
    chosen: tuple[BlockOption, ...]
    emitted: Emitted
    trace: Trace
    rounds: int
    fronts: Mapping[str, BlockFront] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """Predicted time of a step."""
        return self.prepared.seconds + self.solution.seconds

    @property
    def bound(self) -> float:
        """No schedule of this variant takes less: proven."""
        return self.prepared.seconds + self.solution.bound


def schedule(prepared: Prepared, budget: int | None, *, gap: float = 0.01) -> Schedule:
    """One variant's schedule. Its simulated peak is within the budget.

    Where everything kept fits there is nothing to solve: no schedule of the variant is faster, and the
    options of its blocks are not looked for. Where the planner's model, which is a little above the
    simulation, says that nothing fits, the leanest schedule may still: it is taken then, without a proof that
    none is faster.

    Raises:
        InfeasibleError: there is none with these options.
    """
    whole = keeping_everything(prepared, budget)
    if budget is None or not excess(whole.trace.peak_bytes, budget):
        return whole
    try:
        return _solved(prepared, budget, gap)
    except InfeasibleError as error:
        least = leanest(prepared)
        if excess(least, budget):
            raise error.needing(least) from error
        lean = _as_fast(_lean(prepared), budget, gap)
        extra = lean.solution.seconds
        return replace(
            lean,
            solution=replace(
                lean.solution, status=UNPROVEN, bound=0.0, gap=extra / max(prepared.seconds, 1e-12)
            ),
        )


def keeping_everything(prepared: Prepared, budget: int | None = None) -> Schedule:
    """One variant's schedule that recomputes nothing, and holds nothing in another form."""
    start, cut = time.monotonic(), prepared.cut
    options = {kind: (made,) for kind, made in prepared.whole.items()}
    problem = replace(prepared.checkpoint.chain(cut, options, budget), groupable=())
    chosen = tuple(made for stage in problem.stages for made in options[stage.kind])
    emitted, trace = _emitted(prepared, chosen, ())
    highest = cut.blocks[trace.peak.stage].name
    solution = _solved_by_none(trace, highest, (0,) * len(chosen), time.monotonic() - start)
    return Schedule(
        prepared=prepared, problem=problem, solution=solution, chosen=chosen, emitted=emitted, trace=trace,
        rounds=1
    )  # fmt: skip


def _solved(prepared: Prepared, budget: int | None, gap: float) -> Schedule:
    """What fits, by the simulation.

    Where that is above, the options that were taken are corrected; if nothing comes of it, their instants.

    A corrected instant is so for every option of its block, also for those that are not as far above: slower
    schedules come of it.
    """
    problem = prepared.checkpoint.chain(prepared.cut, prepared.blocks, budget)
    first = _proven_once_it_fits(prepared, problem, gap, 1)
    if budget is None or not excess(first.trace.peak_bytes, budget):
        return first
    try:
        return _refined(first, budget, gap, _options_corrected)
    except InfeasibleError:
        return _refined(first, budget, gap, _corrected)


def _proven_once_it_fits(prepared: Prepared, problem: ChainProblem, gap: float, rounds: int) -> Schedule:
    """Solved, and where that fits as simulated, proven by z3, too: what teaches more is not the last."""
    solved = partial(solve_chain, problem, reference_seconds=prepared.seconds, gap=gap)
    made = _carried_out(prepared, problem, found := solved(second=False), rounds)
    if not found.by_walk or (problem.budget is not None and excess(made.trace.peak_bytes, problem.budget)):
        return made
    return _carried_out(prepared, problem, solved(), rounds)


def _refined(
    made: Schedule, budget: int, gap: float, correct: Callable[[Schedule, int], ChainProblem]
) -> Schedule:
    """Solved again with what the simulation of the last one taught, until one fits.

    Raises:
        InfeasibleError: none of some, or what was taught leaves none.
    """
    for rounds in range(2, MAX_ROUNDS + 1):
        made = _proven_once_it_fits(made.prepared, correct(made, budget), gap, rounds)
        if not excess(made.trace.peak_bytes, budget):
            return made
    peak = made.trace.peak_bytes
    last = NotReached(rounds=MAX_ROUNDS, over=peak - budget, node=made.trace.peak.node)
    raise InfeasibleError(last, nearest={"memory": float(peak)})


def leanest(prepared: Prepared) -> int:
    """The simulated peak of a variant's leanest schedule: a budget that is known to be feasible."""
    if "leanest" not in prepared.known:
        prepared.known["leanest"] = _lean(prepared).trace.peak_bytes
    return prepared.known["leanest"]


def _lean(prepared: Prepared) -> Schedule:
    """The leanest, as simulated, of what the planner takes for that, what is fastest without a budget, and
    autograd's own schedule.

    So no step needs more than it does with all kept, the planner's numbers have not all that a group holds
    while it is run again; nor more than autograd's order needs, from which blocks depart.
    """
    free = prepared.checkpoint.chain(prepared.cut, prepared.blocks, None)
    made = (*_leaner(prepared, free), _unproven(prepared, free, 1), *as_autograd(prepared))
    return min(made, key=lambda schedule: schedule.trace.peak_bytes)


def _leaner(prepared: Prepared, problem: ChainProblem) -> Iterator[Schedule]:
    """What the planner takes for the leanest; and again, when it knows what the simulation of that found
    above its own numbers.
    """
    for rounds in range(1, _LEAN_ROUNDS + 1):
        least = smallest_budget(problem)
        made = _unproven(prepared, replace(problem, budget=least), rounds)
        yield made
        if not excess(made.trace.peak_bytes, least):
            return
        problem = _corrected(made, least)


def _unproven(prepared: Prepared, problem: ChainProblem, rounds: int) -> Schedule:
    """Any schedule that fits: no proof is wanted."""
    return _carried_out(
        prepared, problem, solve_chain(problem, reference_seconds=prepared.seconds, gap=1.0), rounds
    )


def _as_fast(lean: Schedule, budget: int, gap: float) -> Schedule:
    """The fastest that the planner takes to fill the budget, or for as lean, if it fits: any schedule was
    taken for the leanest.
    """
    prepared, least = lean.prepared, lean.problem.budget
    if least is None:
        return lean
    for more in dict.fromkeys((budget - lean.trace.peak_bytes, 0)):
        problem = replace(lean.problem, budget=least + more)
        made = _carried_out(
            prepared, problem, solve_chain(problem, reference_seconds=prepared.seconds, gap=gap), 1
        )
        if not excess(made.trace.peak_bytes, budget):
            return min(lean, made, key=lambda schedule: schedule.seconds)
    return lean


def as_autograd(prepared: Prepared) -> Iterator[Schedule]:
    """The step in autograd's own order: with all kept that the backward reads, and with what
    autograd keeps.
    """
    whole = prepared.uncut
    (block,) = whole.cut.blocks
    options = (keeping_all(block), as_autograd_keeps(block, whole.step))
    problem = replace(whole.checkpoint.chain(whole.cut, {block.stage.kind: options}, None), groupable=())
    for i, chosen in enumerate(options):
        emitted, trace = carried_out(whole.cut, (chosen,), ())
        solution = replace(
            _solved_by_none(trace, block.name, (i,)), seconds=chosen.seconds, bound=chosen.seconds
        )
        yield Schedule(
            prepared=whole,
            problem=problem,
            solution=solution,
            chosen=(chosen,),
            emitted=emitted,
            trace=trace,
            rounds=1,
        )


def _solved_by_none(
    trace: Trace, highest: str, choice: tuple[int, ...], seconds: float = 0.0
) -> ChainSolution:
    """What nothing had to be solved for.

    `highest`: the block of its highest instant; `seconds`: spent on it.
    """
    return ChainSolution(
        choice=choice, groups=(), seconds=0.0, bound=0.0, gap=0.0, status=OPTIMAL, peak=trace.peak_bytes,
        instant=f"{trace.peak.phase} {highest}", smallest=trace.peak_bytes, host=0, solver=NOTHING_TO_SOLVE,
        solve_seconds=seconds,
    )  # fmt: skip


def frontier(prepared: Prepared, points: int) -> list[Schedule]:
    """Schedules of one variant from the least budget to the unlimited one."""
    problem = prepared.checkpoint.chain(prepared.cut, prepared.blocks, None)
    found = chain_frontier(problem, reference_seconds=prepared.seconds, points=points)
    return [_carried_out(prepared, problem, solution, 1) for solution in found]


def _carried_out(prepared: Prepared, problem: ChainProblem, solution: ChainSolution, rounds: int) -> Schedule:
    chosen = tuple(
        problem.options[stage.kind][i] for stage, i in zip(problem.stages, solution.choice, strict=True)
    )
    emitted, trace = _emitted(prepared, chosen, solution.groups)
    return Schedule(
        prepared=prepared, problem=problem, solution=solution, chosen=chosen, emitted=emitted, trace=trace,
        rounds=rounds, fronts=prepared.fronts,
    )  # fmt: skip


def _emitted(
    prepared: Prepared, chosen: Sequence[BlockOption], groups: Sequence[Group]
) -> tuple[Emitted, Trace]:
    """What a choice becomes.

    Budgets near each other, and the leanest schedule, ask for the same ones again and again.
    """
    key = tuple((option.kept, frozenset(option.forms.items())) for option in chosen), tuple(groups)
    found = prepared.made.pop(key, None) or carried_out(prepared.cut, chosen, groups)
    prepared.made[key] = found
    if len(prepared.made) > KEPT:
        del prepared.made[next(iter(prepared.made))]
    return found


def _corrected(made: Schedule, budget: int) -> ChainProblem:
    """The problem with what the simulation found above the budget added to those instants."""
    slack = {"forward": dict(made.problem.forward_slack), "backward": dict(made.problem.backward_slack)}
    for phase, stage, more in _above(made, budget):
        name = made.problem.stages[stage].name
        slack[phase][name] = slack[phase].get(name, 0) + more
    return replace(made.problem, forward_slack=slack["forward"], backward_slack=slack["backward"])


def _options_corrected(made: Schedule, budget: int) -> ChainProblem:
    """The problem with it added to the options that were taken there: of all blocks of their kind."""
    options = {kind: list(those) for kind, those in made.problem.options.items()}
    most: dict[tuple[str, str, int], int] = {}
    for phase, stage, more in _above(made, budget):
        place = phase, made.problem.stages[stage].kind, made.solution.choice[stage]
        most[place] = max(more, most.get(place, 0))
    for (phase, kind, i), more in most.items():
        option, ahead = options[kind][i], phase == "forward"
        forward, backward = option.forward_peak + more * ahead, option.backward_peak + more * (not ahead)
        options[kind][i] = replace(option, forward_peak=forward, backward_peak=backward)
    return replace(made.problem, options={kind: tuple(those) for kind, those in options.items()})


def _above(made: Schedule, budget: int) -> Iterator[tuple[str, int, int]]:
    """(phase, stage, bytes that the planner's model lacks there) of the instants that are above
    the budget.
    """
    for phase, stage, live in per_stage(made.trace):
        if excess(live, budget):
            yield phase, stage, live - min(_expected(made, phase, stage), budget)


def _expected(made: Schedule, phase: str, i: int) -> int:
    """What the planner's model has at an instant, its slack included; groups, which only lower
    it, left out.
    """
    problem, stage, option = made.problem, made.problem.stages[i], made.chosen[i]
    before = problem.base + sum(o.kept_bytes for o in made.chosen[:i])
    if phase == "forward":
        return before + stage.forward_base + option.forward_peak + problem.forward_slack.get(stage.name, 0)
    return before + stage.backward_base + option.backward_peak + problem.backward_slack.get(stage.name, 0)
