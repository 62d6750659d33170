"""One strategy of one model on one cluster: its bound in closed form, and what it becomes when every rank is
solved and simulated.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from effcompile.core.errors import InfeasibleError
from effcompile.ir.strategy import Strategy
from effcompile.machine.cluster import Cluster
from effcompile.machine.target import Target
from effcompile.planner.parallel import bytes as held
from effcompile.planner.parallel import pipeline
from effcompile.planner.parallel.engines import ENGINES
from effcompile.planner.parallel.model import Model
from effcompile.planner.parallel.pipeline import TimeLine
from effcompile.planner.parallel.rank import Rank, RankChoice, RankWay, ways
from effcompile.planner.parallel.seconds import Clock

#: The parts of a step's seconds on its slowest rank, in the report's order.
COMPUTE, AGAIN, TENSOR, GATHER = (
    "compute",
    "computed again",
    "tensor and context parallel",
    "gathers not hidden",
)
BUBBLE, DATA, UPDATE = "pipeline bubble", "data parallel not hidden", "optimizer"


@dataclass(frozen=True, kw_only=True)
class DivisionProblem:
    """What is asked: a step of so many sequences of a model, on a cluster of a target.

    `scaled`, `known_cuts`: options and balanced stages, by what they depend on.
    """

    model: Model
    cluster: Cluster
    target: Target
    global_batch: int
    scaled: MutableMapping[object, tuple[RankWay, ...]] = field(
        default_factory=dict, compare=False, repr=False
    )
    known_cuts: MutableMapping[object, tuple[int, ...]] = field(
        default_factory=dict, compare=False, repr=False
    )

    @property
    def memory(self) -> int:
        return self.target.memory_bytes


@dataclass(frozen=True, kw_only=True)
class Solved:
    """A strategy with every rank's choice, simulated.

    Attributes:
        strategy: with the layers that each stage has.
        seconds: of the step; bound: no choice of its ranks takes less, but for the gap of their proofs.
        parts: of the slowest rank, they add up to `seconds`.
        ranks, chosen: of each rank of the pipeline. peaks: bytes at its highest instant.
        line: of one step.
    """

    strategy: Strategy
    seconds: float
    bound: float
    parts: dict[str, float]
    ranks: tuple[Rank, ...]
    chosen: tuple[RankChoice, ...]
    line: TimeLine

    @property
    def peak_bytes(self) -> int:
        return max(chosen.peak for chosen in self.chosen)

    @property
    def fullest(self) -> int:
        """The rank of the pipeline whose peak that is."""
        return max(range(len(self.chosen)), key=lambda r: self.chosen[r].peak)


@dataclass(frozen=True, kw_only=True)
class Division:
    """A strategy, priced."""

    problem: DivisionProblem
    strategy: Strategy
    known: MutableMapping[tuple[int, int | None], RankChoice] = field(
        default_factory=dict, compare=False, repr=False
    )

    @cached_property
    def clock(self) -> Clock:
        return Clock(
            model=self.problem.model,
            strategy=self.strategy,
            cluster=self.problem.cluster,
            target=self.problem.target,
        )

    @cached_property
    def micro_batches(self) -> int:
        return self.strategy.micro_batches(self.problem.global_batch)

    @cached_property
    def ranks(self) -> tuple[Rank, ...]:
        first, last = self._looked_at[0], self._looked_at[-1]
        return (
            (first, *(self._rank(r) for r in range(1, self.strategy.pp - 1)), last)
            if self.strategy.pp > 1
            else (first,)
        )

    def _rank(self, r: int) -> Rank:
        place = held.place(self.problem.model, self.strategy, r)
        copies = held.in_flight(self.strategy, r, self.micro_batches)
        return Rank(clock=self.clock, place=place, copies=copies, options=self._options)

    @cached_property
    def _options(self) -> dict[tuple[int, str], tuple[RankWay, ...]]:
        s = self.strategy
        rules = ("none", "full") if s.recompute == "layer" else (s.recompute,)
        found = {}
        for kind, layer in enumerate(self.problem.model.layers):
            for rule in rules:
                key = (
                    kind,
                    rule,
                    s.tp,
                    s.cp,
                    s.sp,
                    s.micro_batch,
                    s.precision,
                    s.engine,
                    s.zero if s.zero > 1 else 0,
                    s.dp,
                    s.pp == 1,
                )
                if key not in self.problem.scaled:
                    self.problem.scaled[key] = ways(self.clock, layer, rule)
                found[kind, rule] = self.problem.scaled[key]
        return found

    @cached_property
    def _layer_seconds(self) -> list[tuple[float, float]]:
        layers = self.problem.model.layers
        return [(self.clock.forward(layer).total, self.clock.backward(layer).total) for layer in layers]

    @cached_property
    def plain(self) -> tuple[list[float], list[float]]:
        """Seconds of each virtual stage's forward and backward, nothing computed again."""
        order, counts, start = self.problem.model.order, self.strategy.layers(self.problem.model.depth), 0
        forward, backward = [], []
        for count in counts:
            kinds = order[start : start + count]
            forward.append(sum(self._layer_seconds[kind][0] for kind in kinds))
            backward.append(sum(self._layer_seconds[kind][1] for kind in kinds))
            start += count
        forward[-1] += self.clock.head[0]
        backward[-1] += self.clock.head[1]
        return forward, backward

    @cached_property
    def leanest(self) -> int:
        """The peak of the fullest rank is not below this, whatever is computed again."""
        return max(rank.leanest for rank in self._looked_at)

    def tighter(self, budget: int) -> float | None:
        """The same bound with the ranks that it looks at solved exactly instead of relaxed."""
        forward, backward = self.plain
        backward = list(backward)
        for rank in self._looked_at:
            try:
                backward[rank.place.rank] += self._choice(rank, budget).bound
            except InfeasibleError:
                return None
        beside = max(self._beside(rank, backward) for rank in self._looked_at)
        return (
            pipeline.least_seconds(self.strategy, self.micro_batches, forward, backward, self.clock.hop)
            + beside
        )

    def _choice(self, rank: Rank, budget: int | None) -> RankChoice:
        key = (rank.place.rank, budget)
        if key not in self.known:
            self.known[key] = rank.choose(budget)
        return self.known[key]

    def _standing(self, r: int) -> float:
        """Bytes that no layer decides about: by far the most strategies that do not fit fail by these."""
        place = held.place(self.problem.model, self.strategy, r)
        return sum(held.standing(self.problem.model, self.strategy, place).values())

    @cached_property
    def _looked_at(self) -> tuple[Rank, ...]:
        """The ranks that a bound looks at: the first holds most micro-batches, the last has the loss."""
        return (self._rank(0), self._rank(self.strategy.pp - 1)) if self.strategy.pp > 1 else (self._rank(0),)

    def least_seconds(self, budget: int) -> float | None:
        """No choice of the ranks within the budget takes less; None: none is within it. Closed form."""
        if any(self._standing(r) > budget for r in {0, self.strategy.pp - 1}):
            return None
        forward, backward = self.plain
        backward = list(backward)
        for rank in self._looked_at:
            extra = rank.least_extra(budget)
            if extra is None:
                return None
            backward[rank.place.rank] += extra
        beside = max(self._beside(rank, backward) for rank in self._looked_at)
        return (
            pipeline.least_seconds(self.strategy, self.micro_batches, forward, backward, self.clock.hop)
            + beside
        )

    def _beside(self, rank: Rank, backward: list[float]) -> float:
        """What follows the pipeline on a rank: gradients that nothing hides, the update."""
        own = sum(backward[s] for s in range(rank.place.rank, self.strategy.stages, self.strategy.pp))
        return self.clock.exposed(rank.place, own) + self.clock.update(rank.place)

    def solve(self, budget: int | None) -> Solved:
        """Every rank solved exactly, and the step simulated.

        Ranks between two that hold as many layers of the same kinds and choose the same hold fewer
        micro-batches than the first of the two and more than the second: least seconds only fall with fewer,
        so they are between equal ones and need no solve.

        Raises:
            InfeasibleError: a rank is above the budget whatever it computes again.
        """
        return self._simulated(self._chosen(budget))

    def lean(self) -> Solved:
        """Every rank as lean as it can be, simulated."""
        return self._simulated(tuple(rank.lean() for rank in self.ranks))

    def _simulated(self, chosen: tuple[RankChoice, ...]) -> Solved:
        forward, backward = self.plain
        stages = list(backward)
        for rank, choice in zip(self.ranks, chosen, strict=True):
            at = 0
            for turn, (begin, end) in enumerate(rank.place.runs):
                mine = choice.ways[at : at + end - begin]
                at += end - begin
                stages[turn * self.strategy.pp + rank.place.rank] += sum(way.seconds for way in mine)
        line = pipeline.simulate(self.strategy, self.micro_batches, forward, stages, self.clock.hop)
        beside = max(self._beside(rank, stages) for rank in self.ranks)
        slack = sum(choice.seconds - choice.bound for choice in chosen)
        return Solved(
            strategy=replace(self.strategy, cuts=self.strategy.layers(self.problem.model.depth)),
            seconds=line.seconds + beside,
            bound=max(0.0, line.seconds + beside - self.micro_batches * slack),
            parts=self._parts(chosen, line.seconds, stages),
            ranks=self.ranks,
            chosen=chosen,
            line=line,
        )

    def _chosen(self, budget: int | None) -> tuple[RankChoice, ...]:
        found: dict[int, RankChoice] = {}
        count = len(self.ranks)

        def between(low: int, high: int) -> None:
            for i in (low, high):
                if i not in found:
                    found[i] = self._choice(self.ranks[i], budget)
            if high - low < 2:
                return
            a, b = self.ranks[low], self.ranks[high]
            same = (
                found[low].ways == found[high].ways
                and a.kinds == b.kinds
                and not a.place.first
                and not b.place.last
            )
            middle = range(low + 1, high)
            if same and all(self.ranks[i].kinds == a.kinds for i in middle):
                for i in middle:
                    again = [
                        self.ranks[i].options[kind].index(way)
                        for kind, way in zip(a.kinds, found[low].ways, strict=True)
                    ]
                    found[i] = self.ranks[i].taken(again, bound=found[high].bound)
                return
            between(low, (low + high) // 2)
            between((low + high) // 2, high)

        for i in {0, count - 1}:
            found[i] = self._choice(self.ranks[i], budget)
        if count > 2:
            between(1, count - 2)
        return tuple(found[i] for i in range(count))

    def _parts(self, chosen: tuple[RankChoice, ...], pipe: float, stages: list[float]) -> dict[str, float]:
        """The slowest rank's seconds by what they are spent on."""
        m, model, clock = self.micro_batches, self.problem.model, self.clock
        slow = max(
            range(len(self.ranks)),
            key=lambda r: sum(self.plain[0][r :: self.strategy.pp]) + sum(stages[r :: self.strategy.pp]),
        )
        rank, choice = self.ranks[slow], chosen[slow]
        layers = [model.layers[kind] for kind, _ in rank.kinds]
        times = [clock.forward(layer) + clock.backward(layer) for layer in layers]
        remade = sum(
            clock.again(layer, way.option.again) for layer, way in zip(layers, choice.ways, strict=True)
        )
        own = {
            COMPUTE: m * (sum(t.compute for t in times) + (sum(clock.head) if rank.place.last else 0.0)),
            AGAIN: m * remade,
            TENSOR: m * sum(t.tensor for t in times),
            GATHER: m * (choice.seconds - remade),
        }
        widest = max(self.ranks, key=lambda r: self._beside(r, stages))
        update = clock.update(widest.place)
        return {
            **own,
            BUBBLE: pipe - sum(own.values()),
            DATA: self._beside(widest, stages) - update,
            UPDATE: update,
        }

    @property
    def interval(self) -> float:
        """How far the true peak may be from the predicted one, as a share of it."""
        return ENGINES[self.strategy.engine].error
