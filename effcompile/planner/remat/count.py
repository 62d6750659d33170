"""z3's certificate for a chain: it refutes "some choice within the budget takes fewer than T ticks", or
exhibits one.

Of the chain's instants (links.py) only some are *stated*. Between two stated ones, stages with the same ways
are interchangeable: only how many of them take a way is a variable, not which. With integers n_cw ≥ 0 for
class c of such stages and way w (a stage with a stated instant is a class of its own):

    (1) one way each      Σ_w n_cw = |c|
    (2) stated instants   Σ_{c before i} Σ_w kept_w n_cw + Σ_w peak_w n_iw ≤ budget − (what is there beside)
    (3) target            Σ_c Σ_w ticks_w n_cw ≤ T − 1
    (4) surrogates        Q·(3) + p·(2) for each stated instant, integers Q, p ≥ 0
    (5) host              Σ_c Σ_w host_w n_cw ≤ H, where host bytes are scarce

(4) follows from (2) and (3) and changes no answer, but with p / Q the multiplier of the Lagrangian it is what
    refutes the linear
relaxation, which z3 takes long to find when all stages differ (as in planner/certify.py). With the least
weight of every class taken off it says Σ_c Σ_w d_w n_cw ≤ left, all d ≥ 0: a way with d_w > left is in no
choice that is asked for, and is left out (reduced-cost fixing: Nemhauser and Wolsey 1988, II.5.2). Of some 35
ways of a stage a few remain.

Instants left out only make the system weaker, so unsat is a proof for the chain, in whatever order options
stand along it. A model is spread over the stages, in a few orders (`_ORDERS`), and checked at every instant.
If none fits, an instant that was violated is stated and z3 is asked again; with all stated, every stage is
its own class and the system exact.

Why the first order is tried first (exchange argument): let a and b be options of two neighbouring stages of
one class with the same bytes beside, and d = backward − kept. In the order a, b the higher of the two
backwards is max(d_a + kept_a, d_b + kept_a + kept_b) above what was there. If d_a ≥ d_b that is at most d_a +
kept_a + kept_b, which the order b, a reaches. So among such stages those of greater d go first, and no other
order does better, as long as the forward, whose d may order them otherwise, does not bind. Nothing that is
proven rests on it.

Bytes are exact, divided by their common divisor; ticks may be divided by a grain and rounded down, which
weakens (3).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import gcd
from typing import Literal

import z3

from effcompile.planner.ask import ask
from effcompile.planner.remat.links import ChainLinks, ChainWay

_Q = 1 << 20
_MOST_STATED = 2  # violated instants that one model adds

_ORDERS: tuple[Callable[[ChainWay], int], ...] = (
    lambda w: w.kept - w.backward,
    lambda w: w.kept - w.forward,
    lambda w: w.kept - max(w.forward, w.backward),
    lambda w: w.kept,
)


@dataclass(frozen=True, slots=True)
class CountVerdict:
    """What z3 said; the choice when found."""

    answer: Literal["refuted", "found", "unknown"]
    choice: tuple[int, ...] = ()


@dataclass(slots=True)
class Certifier:
    """Asks z3 about one chain; instants once stated stay stated."""

    links: ChainLinks
    budget: int
    stated: set[tuple[int, int]] = field(default_factory=set)

    def tight(self, choice: Sequence[int]) -> None:
        """State the two highest instants of a choice, and those at its last stage."""
        loads = [
            (load, i, phase)
            for i, pair in enumerate(self.links.instants(choice))
            for phase, load in enumerate(pair)
        ]
        self.stated.update((i, phase) for _, i, phase in sorted(loads, reverse=True)[:_MOST_STATED])

    def cheaper(self, target: int, *, grain: int, deadline: float) -> CountVerdict:
        """Decide whether there is a choice within the budget of fewer than `target` ticks.

        Sound either way; "unknown" at the deadline.
        """
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                return CountVerdict("unknown")
            system = _System(self.links, self.budget, self.stated)
            answer, counts = system.solve(target - self.links.ticks, grain, left)
            if answer != z3.sat:
                return CountVerdict("refuted" if answer == z3.unsat else "unknown")
            choices = [system.spread(counts, order) for order in _ORDERS]
            fitting = [c for c in choices if self.links.fits(c, self.budget) and self.links.cost(c) < target]
            if fitting:
                return CountVerdict("found", min(fitting, key=self.links.cost))
            if not self._state(choices[0]):
                if grain == 1:
                    return CountVerdict("unknown")
                grain = 1  # the choice fits, and was not cheaper than the target only by the grain

    def _state(self, choice: Sequence[int]) -> bool:
        loads = [
            (load, i, phase)
            for i, pair in enumerate(self.links.instants(choice))
            for phase, load in enumerate(pair)
        ]
        over = sorted((x for x in loads if x[0] > self.budget), reverse=True)
        self.stated.update((i, phase) for _, i, phase in over[:_MOST_STATED])
        return bool(over)


@dataclass(frozen=True, slots=True)
class _Surrogate:
    """(4) of one instant: per class, how much more each way weighs than its least, and what all stages may
    weigh more together.
    """

    above: list[dict[int, int]]
    left: int

    def stated(self, counts: list[dict[int, z3.ArithRef]]) -> z3.BoolRef:
        """To z3."""
        return (
            _sum(
                [
                    (d, numbers[w])
                    for row, numbers in zip(self.above, counts, strict=True)
                    for w, d in row.items()
                ]
            )
            <= self.left
        )


class _System:
    """The stages in classes, and z3's question about them."""

    def __init__(self, links: ChainLinks, budget: int, stated: set[tuple[int, int]]) -> None:
        self.links, self.budget, self.stated = links, budget, stated
        self.classes = _classes(links, {i for i, _ in stated})
        self.ways = [list(enumerate(links.links[members[0]].ways)) for members in self.classes]

    def solve(
        self, target: int, grain: int, seconds: float
    ) -> tuple[z3.CheckSatResult, list[dict[int, int]]]:
        """z3's answer and, where there is one, per class the number of stages that take each of its ways."""
        surrogates = self._reduce(target)
        counts = [{w: z3.Int(f"n{c}_{w}") for w, _ in ways} for c, ways in enumerate(self.ways)]
        if any(surrogate.left < 0 for surrogate in surrogates):
            # hopeless, and z3's simplex says so at once when asked for nothing else
            alone = z3.Solver()
            alone.add(
                *(n >= 0 for numbers in counts for n in numbers.values()),
                *(s.stated(counts) for s in surrogates),
            )
            return ask(alone)[0], []
        solver = z3.SolverFor("QF_LIA")
        for members, numbers in zip(self.classes, counts, strict=True):
            solver.add(z3.Sum([*numbers.values()]) == len(members), *(n >= 0 for n in numbers.values()))
        solver.add(
            *(self._instant(i, phase, counts) for i, phase in sorted(self.stated)),
            *(s.stated(counts) for s in surrogates),
        )
        pairs = [
            (way, numbers[w]) for ways, numbers in zip(self.ways, counts, strict=True) for w, way in ways
        ]
        if self.links.host is not None:
            solver.add(_sum([(way.host, n) for way, n in pairs]) <= self.links.host)
        solver.add(_sum([(way.ticks // grain, n) for way, n in pairs]) <= (target - 1) // grain)
        solver.set("timeout", max(1, int(seconds * 1000)))
        answer, model = ask(solver)
        if model is None:
            return answer, []
        return answer, [
            {w: model.eval(n, model_completion=True).as_long() for w, n in numbers.items()}
            for numbers in counts
        ]

    def _reduce(self, target: int) -> list[_Surrogate]:
        """Leave out ways until no stated instant's surrogate leaves out more: these surrogates, or one that
        nothing satisfies.
        """
        left_out = True
        while left_out:
            before, surrogates = sum(map(len, self.ways)), []
            for i, phase in sorted(self.stated):
                surrogates.append(surrogate := self._surrogate(i, phase, target))
                if surrogate.left < 0:
                    return [surrogate]
                pairs = zip(self.ways, surrogate.above, strict=True)
                self.ways = [
                    [(w, way) for w, way in ways if above[w] <= surrogate.left] for ways, above in pairs
                ]
            left_out = sum(map(len, self.ways)) < before
        return surrogates

    def _instant(self, i: int, phase: int, counts: list[dict[int, z3.ArithRef]]) -> z3.BoolRef:
        used, room = self._row(i, phase)
        terms = [
            (a, n)
            for row, numbers in zip(used, counts, strict=True)
            for a, n in zip(row, numbers.values(), strict=True)
            if a
        ]
        unit = gcd(*(c for c, _ in terms)) or 1
        return _sum([(c // unit, n) for c, n in terms]) <= room // unit

    def _row(self, i: int, phase: int) -> tuple[list[list[int]], int]:
        """Per class and way the bytes at an instant, and the room for them."""
        used = []
        for members, ways in zip(self.classes, self.ways, strict=True):
            if members[0] == i:
                used.append([way.backward if phase else way.forward for _, way in ways])
            else:
                used.append([way.kept if members[0] < i else 0 for _, way in ways])
        return used, self.budget - (self.links.links[i].backward if phase else self.links.links[i].forward)

    def _surrogate(self, i: int, phase: int, target: int) -> _Surrogate:
        """(4) of one instant, with the least of every class taken off."""
        used, room = self._row(i, phase)
        ticks = [[way.ticks for _, way in ways] for ways in self.ways]
        sizes = [len(members) for members in self.classes]
        p = _multiplier(ticks, used, sizes, room)
        above: list[dict[int, int]] = []
        left = _Q * (target - 1) + p * room
        for size, ways, row in zip(sizes, self.ways, used, strict=True):
            weights = {w: _Q * way.ticks + p * a for (w, way), a in zip(ways, row, strict=True)}
            least = min(weights.values())
            left -= size * least
            above.append({w: weight - least for w, weight in weights.items()})
        return _Surrogate(above, left)

    def spread(self, counts: list[dict[int, int]], order: Callable[[ChainWay], int]) -> tuple[int, ...]:
        """A choice with these counts: within a class in the given order of its ways."""
        choice = [0] * len(self.links.links)
        for members, ways, numbers in zip(self.classes, self.ways, counts, strict=True):
            taken = [w for w, _ in sorted(ways, key=lambda pair: order(pair[1])) for _ in range(numbers[w])]
            for i, w in zip(members, taken, strict=True):
                choice[i] = w
        return tuple(choice)


def _classes(links: ChainLinks, alone: set[int]) -> list[list[int]]:
    """Stages with the same ways between two of the stages that stand alone; every class in chain order."""
    classes: dict[tuple[int, int], list[int]] = {}
    segment = 0
    for i, link in enumerate(links.links):
        segment += 2 * (i in alone)
        classes.setdefault((segment - (i in alone), id(link.ways)), []).append(i)
    return list(classes.values())


def _multiplier(ticks: list[list[int]], used: list[list[int]], sizes: list[int], room: int) -> int:
    """p that makes Σ_c |c| min_w (Q ticks_w + p bytes_w) − p room, which is concave in it, about greatest."""

    def dual(p: float) -> float:
        lows = (
            n * min(_Q * t + p * a for t, a in zip(ts, row, strict=True))
            for n, ts, row in zip(sizes, ticks, used, strict=True)
        )
        return sum(lows) - p * room

    low, high = -10.0, 60.0  # of log2 p
    for _ in range(40):
        third = (high - low) / 3
        if dual(2 ** (low + third)) < dual(2 ** (high - third)):
            low += third
        else:
            high -= third
    return round(2**low)


def _sum(terms: list[tuple[int, z3.ArithRef]]) -> z3.ArithRef:
    return z3.Sum([z3.IntVal(0), *(c * n for c, n in terms if c)])
