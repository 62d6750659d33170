"""`solve_chain`: an option for every stage and groups where they pay, for least extra seconds within the
budget.

The constraints stand in links.py. Identical stages are counted, and z3's final unsat of "cheaper than the
bound" is the certificate (count.py); a dynamic program finds the choice, and is itself a proof where nothing
had to be dropped (walk.py).

    1  groups     the chain as it is, and with its groupable runs cut into groups of one size, for each
                  size                                                                             `variants`
    2  find       the dynamic program on each of them, in less and less coarse passes              `_find`
    3  prove      z3 refutes "within the budget and fewer than best − gap ticks" on each of them. Where
                  it finds such a choice instead, the target is bisected between the proven bound and the
                  best. Where the dynamic program was exact there is a proof already: a second one has a tenth
                  of the time                                                                      `_prove`

Optimal means: among the options given, and among groupings of one size per run. A grouping whose re-runs
alone take as long as the best choice needs no proof. With gap 0, or where `walk` is exact, more budget never
takes more seconds; else two budgets may come out of order by up to the gap. `chain_frontier` puts them in
order.
"""

from __future__ import annotations

import math
import time
from dataclasses import replace
from fractions import Fraction

import z3

from effcompile.core import effort
from effcompile.core.errors import UsageError
from effcompile.planner.problem import OPTIMAL, SINGLE, UNPROVEN, rounded_down
from effcompile.planner.remat.count import Certifier
from effcompile.planner.remat.least import UNLIMITED, check_chain, highest, infeasible, leanest
from effcompile.planner.remat.links import ChainLinks, variants
from effcompile.planner.remat.problem import ChainProblem, ChainSolution
from effcompile.planner.remat.walk import feasible, walk

_COARSE, _MOST = 200, 40_000  # labels per stage in the first pass, and in any
# labels × ways × stages in the second pass, before and after z3 has tried
_QUICK, _SLOW = 4_000_000, 400_000_000
# of the time, when find, prove, find again must be done
_FIND_SHARE, _PROVE_SHARE, _DONE_SHARE = 0.4, 0.65, 0.9
_SECOND_SHARE = 0.1  # of the time, for z3's proof of what the dynamic program has proven
_GRAINS = 16  # z3's grain loses at most the gap's 16th over the whole chain


class _State:
    """The best choice so far, and per chain the ticks that no choice of it is below: proven by
    z3, or at all.
    """

    def __init__(self, chains: list[ChainLinks], links: ChainLinks, choice: tuple[int, ...]) -> None:
        self.chains, self.links, self.choice = chains, links, choice
        self.z3_lower = [c.least for c in chains]
        self.lower = list(self.z3_lower)
        self.certifiers: dict[int, Certifier] = {}

    @property
    def value(self) -> int:
        return self.links.cost(self.choice)

    @property
    def bound(self) -> int:
        return min(self.value, *self.lower)

    def take(self, links: ChainLinks, choice: tuple[int, ...]) -> None:
        if links.cost(choice) < self.value:
            self.links, self.choice = links, choice

    def raised(self, number: int, bound: int, *, by_z3: bool) -> None:
        """No choice of this chain is below `bound`."""
        self.lower[number] = max(self.lower[number], bound)
        if by_z3:
            self.z3_lower[number] = max(self.z3_lower[number], bound)


def solve_chain(
    problem: ChainProblem,
    *,
    reference_seconds: float,
    gap: float = 0.01,
    timeout: float = 5.0,
    second: bool = True,
) -> ChainSolution:
    """Choose an option per stage, and groups, for least extra seconds with every instant within the budget.

    Args:
        problem: the chain.
        reference_seconds: time of the step without anything recomputed.
        gap: proof wanted, as a share of reference_seconds. 0 asks for the optimum itself.
        timeout: seconds; then the best choice found is returned with its true gap, UNPROVEN.
        second: have z3 prove, too, what the dynamic program was exact for.

    Raises:
        UsageError: the problem, reference_seconds, gap or timeout is malformed.
        InfeasibleError: nothing is within the budget: proven. `.nearest["memory"]` is the smallest budget
            that is.
    """
    check_chain(problem)
    if not (math.isfinite(gap) and gap >= 0) or not all(
        math.isfinite(x) and x > 0 for x in (timeout, reference_seconds)
    ):
        raise UsageError(
            f"gap = {gap!r}, timeout = {timeout!r}, reference_seconds = {reference_seconds!r}: "
            "gap must be ≥ 0 (0.01 is 1 % of the reference), the others positive numbers of seconds."
        )
    start, timeout = time.monotonic(), effort.allowed(timeout)
    chains = variants(problem)
    budget = UNLIMITED if problem.budget is None else problem.budget
    possible = [(links, choice) for links in chains if (choice := feasible(links, budget)) is not None]
    if not possible:
        raise infeasible(problem, chains)
    links, choice = min(possible, key=lambda pair: pair[0].cost(pair[1]))
    state = _State([pair[0] for pair in possible], links, choice)
    for links, _ in possible:
        if links.fits(links.fastest, budget):
            state.take(links, links.fastest)
    # less what rounding loses
    slack = max(0, int(Fraction(gap) * Fraction(reference_seconds) / links.tick) - 2 * len(problem.stages))
    _find(state, budget, _QUICK, start + _FIND_SHARE * timeout)
    until = start + _PROVE_SHARE * timeout
    if proven := state.bound >= state.value - slack:
        until = min(until, time.monotonic() + _SECOND_SHARE * timeout)
    if not (proven and not second) and not _prove(state, budget, slack, until):
        _find(state, budget, _SLOW, start + _DONE_SHARE * timeout)
        _prove(state, budget, slack, start + timeout)
    return _solution(problem, state, leanest(chains)[0], reference_seconds, gap, start)


def _find(state: _State, budget: int, labels: int, deadline: float) -> None:
    """Improve the choice by the dynamic program, in passes of more and more labels.

    `lower` rises where one was exact.
    """
    for number, links in enumerate(state.chains):
        most = min(_MOST, max(50, labels // sum(len(link.ways) for link in links.links)))
        for room in dict.fromkeys((min(_COARSE, most), most)):
            if state.lower[number] >= state.value:
                break
            result = walk(links, budget, below=state.value, room=room, deadline=deadline)
            if result.choice is not None:
                state.take(links, result.choice)
            if result.exact:
                state.raised(number, state.value, by_z3=False)


def _prove(state: _State, budget: int, slack: int, deadline: float) -> bool:
    """z3 raises the bounds, or finds better, until they are within the slack of each other.

    False at the deadline.
    """
    target = state.value - slack
    while (low := min(state.z3_lower)) < state.value - slack:
        number = state.z3_lower.index(low)
        links = state.chains[number]
        certifier = state.certifiers.setdefault(number, Certifier(links, budget))
        if links is state.links:
            certifier.tight(state.choice)
        grain = max(1, slack // (_GRAINS * len(links.links)))
        verdict = certifier.cheaper(target, grain=grain, deadline=deadline)
        if verdict.answer == "unknown":
            return state.bound >= state.value - slack
        if verdict.answer == "found":
            state.take(links, verdict.choice)
            target = (low + state.value + 1) // 2
        else:
            state.raised(number, target, by_z3=True)
            target = max(target, state.value - slack)
    return True


def _solution(
    problem: ChainProblem, state: _State, smallest: int, reference: float, gap: float, start: float
) -> ChainSolution:
    choice = tuple(link.ways[c].index for link, c in zip(state.links.links, state.choice, strict=True))
    rerun = [s.rerun_seconds for g in state.links.groups for s in problem.stages[g.first : g.last]]
    seconds = math.fsum(
        [*(problem.options[s.kind][i].seconds for s, i in zip(problem.stages, choice, strict=True)), *rerun]
    )
    bound = min(rounded_down(state.bound * state.links.tick), seconds)
    proven = (state.value - state.bound) * state.links.tick <= Fraction(gap) * Fraction(reference)
    by_walk = proven and (state.value - min(state.z3_lower)) * state.links.tick > Fraction(gap) * Fraction(
        reference
    )
    single = len(state.chains) == 1 and all(len(problem.options[s.kind]) == 1 for s in problem.stages)
    effort.spend(took := time.monotonic() - start)
    return ChainSolution(
        choice=choice,
        groups=state.links.groups,
        seconds=seconds,
        bound=bound,
        gap=(seconds - bound) / reference,
        status=SINGLE if single else OPTIMAL if proven else UNPROVEN,
        peak=state.links.peak(state.choice),
        instant=highest(problem, state.links, state.choice)[0],
        smallest=smallest,
        solver=f"z3 {z3.get_version_string()}" + (", exact dynamic program" if by_walk else ""),
        solve_seconds=took,
        by_walk=by_walk,
        host=sum(problem.options[s.kind][i].host_bytes for s, i in zip(problem.stages, choice, strict=True)),
    )


def frontier_budgets(problem: ChainProblem, points: int = 20) -> list[int]:
    """Evenly spaced budgets from the smallest to what the least seconds take when nothing limits them.

    Raises:
        UsageError: fewer than two points, or a malformed problem.
    """
    check_chain(problem)
    if points < 2:
        raise UsageError(f"points = {points!r}: a frontier has at least 2.")
    chains = variants(problem)
    low, high = leanest(chains)[0], chains[0].peak(chains[0].fastest)
    return sorted({low + (max(high, low) - low) * i // (points - 1) for i in range(points)})


def chain_frontier(
    problem: ChainProblem, *, reference_seconds: float, points: int = 20, gap: float = 0.01
) -> list[ChainSolution]:
    """Least seconds for budgets from the smallest feasible one to the unlimited optimum's
    (`frontier_budgets`), in that order.

    Never more seconds than at a smaller budget: where the solver's gap left that open, the smaller budget's
    choice is taken over, with the larger one's bound. Three seconds at most for each point. The problem's own
    budget is left aside.
    """
    found: list[ChainSolution] = []
    for budget in frontier_budgets(problem, points):
        solution = solve_chain(
            replace(problem, budget=budget), reference_seconds=reference_seconds, gap=gap, timeout=3.0
        )
        if found and found[-1].seconds < solution.seconds:
            before, bound = found[-1], min(solution.bound, found[-1].seconds)
            left = (before.seconds - bound) / reference_seconds
            solution = replace(before, bound=bound, gap=left, status=solution.status, solver=solution.solver)
        found.append(solution)
    return found
