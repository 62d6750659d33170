"""What one rank keeps and computes again: its layers' options scaled to it, a bound in closed form, and the
exact solve.

A rank of a pipeline holds the kept values of k micro-batches at once (bytes.in_flight): those of k − 1 whole,
and the one in hand. With K = Σ kept, S_i the kept bytes before layer i and B the budget less what stands, an
instant of layer i asks

    (k − 1) · K + S_i + peak_i(o_i) ≤ B        for the highest instant of its forward and of its backward

so under 1F1B only kept bytes have a multiplier. The bound relaxes that to k · K + min_o (peak − kept) ≤ B
with options mixed freely: a fractional knapsack over the lower hull of (kept, seconds). Like layers are
solved by labels (allot.py). Otherwise the exact solve gives the chain solver (planner/remat/chain.py) what it
knows, a budget and a cap on K: for an interval [a, c] of K

    relax    S_i + peak_i ≤ B − (k − 1) · a,   K ≤ c          no choice with K in [a, c] is faster: a bound
    it holds where the choice found satisfies the instants above; else the interval is halved

until the best choice is within the gap of the least bound: branch and bound over one number, with the
solver's certificates as bounds.

Where ZeRO-3 shards the weights and there is no pipeline, each option comes twice: gathered weights kept from
forward to backward (its bytes more), or gathered again (the seconds more that the backward does not hide). So
keeping and gathering compete with activations for the same bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

from effcompile.core.errors import InfeasibleError
from effcompile.planner.parallel import bytes as held
from effcompile.planner.parallel.allot import allot
from effcompile.planner.parallel.bytes import RankPlace
from effcompile.planner.parallel.engines import ENGINES
from effcompile.planner.parallel.model import Layer, StrategyOption
from effcompile.planner.parallel.seconds import Clock
from effcompile.planner.remat import BlockOption, BlockStage, ChainProblem, solve_chain

#: The proof wanted of a rank, as a share of its seconds.
GAP = 0.005
_MOST_SOLVES, _SOLVE_SECONDS = 24, 2.0
_EVERY = 2  # recompute = layer: every second one


@dataclass(frozen=True, slots=True, kw_only=True)
class RankWay:
    """An option of a layer on one rank and for one micro-batch. `gathered`: its weights are kept gathered."""

    kept: int
    forward: int
    backward: int
    seconds: float
    option: StrategyOption
    gathered: bool = False

    @property
    def peak(self) -> int:
        return max(self.forward, self.backward)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankChoice:
    """What a rank does.

    Attributes:
        ways: of each of its layers. seconds: extra ones of a micro-batch.
        kept: bytes of one micro-batch. peak: its highest instant, all that stands included; instant: which
            one.
        bound: no choice within the budget takes fewer extra seconds.
    """

    ways: tuple[RankWay, ...]
    seconds: float
    kept: int
    peak: int
    instant: str
    bound: float


def ways(clock: Clock, layer: Layer, rule: str) -> tuple[RankWay, ...]:
    """The options of a layer on a rank, least seconds first. `rule`: "planned", or one of the usual rules."""
    s = clock.strategy
    scale = s.micro_batch / s.cp * (2 if s.precision == "fp32" and clock.model.width == 2 else 1)
    forward, again, kept = clock.gathering(layer)
    options = layer.options if rule == "planned" else (layer.rules[rule],)
    if rule == "full" and ENGINES[s.engine].whole_again:
        options = tuple(replace(option, again=layer.forward) for option in options)
    always = forward + (again if not _both(clock, rule) else kept)
    found = [_way(clock, layer, option, scale, always) for option in options]
    if _both(clock, rule):
        weights = int(held.number_bytes(s) * layer.parameters / s.tp)
        remade = [replace(way, seconds=way.seconds + again - kept) for way in found]
        found = remade + [
            replace(
                way,
                kept=way.kept + weights,
                forward=way.forward + weights,
                backward=way.backward + weights,
                gathered=True,
            )
            for way in found
        ]
    return tuple(sorted(found, key=lambda way: (way.seconds, way.kept)))


def _both(clock: Clock, rule: str) -> bool:
    s = clock.strategy
    return s.zero == 3 and s.pp == 1 and s.shards > 1 and s.engine == "ours" and rule == "planned"


def _way(clock: Clock, layer: Layer, option: StrategyOption, scale: float, always: float) -> RankWay:
    s = clock.strategy
    kept, forward, backward = (
        int(scale * part.on_rank(s.tp, s.sp)) for part in (option.kept, option.forward, option.backward)
    )
    return RankWay(
        kept=kept,
        forward=forward,
        backward=backward,
        seconds=clock.again(layer, option.again) + always,
        option=option,
    )


@dataclass(frozen=True, kw_only=True)
class Rank:
    """A rank of the pipeline.

    `copies`: micro-batches that it holds at once. `options`: of each kind of layer and rule.
    """

    clock: Clock
    place: RankPlace
    copies: float
    options: Mapping[tuple[int, str], tuple[RankWay, ...]]

    @cached_property
    def kinds(self) -> tuple[tuple[int, str], ...]:
        """(kind, rule) of each of its layers."""
        rule, order = self.clock.strategy.recompute, self.clock.model.order
        if rule != "layer":
            return tuple((order[i], rule) for i in self.place.layers)
        return tuple((order[i], "none" if i % _EVERY else "full") for i in self.place.layers)

    @cached_property
    def standing(self) -> dict[str, float]:
        """Bytes at every instant: what no layer decides, and the stream on its way between stages."""
        found = held.standing(self.clock.model, self.clock.strategy, self.place)
        passing = 2 * self.stream if self.clock.strategy.pp > 1 else self.stream
        return {**found, held.BUFFERS: found[held.BUFFERS] + passing}

    @cached_property
    def base(self) -> int:
        return int(sum(self.standing.values()))

    @cached_property
    def stream(self) -> int:
        """Bytes of the residual stream of one micro-batch here."""
        s = self.clock.strategy
        return int(self.clock.stream / (s.tp if s.sp else 1))

    @cached_property
    def head(self) -> int:
        """Bytes at the loss."""
        return int(held.logits(self.clock.model, self.clock.strategy, self.place)) + (
            2 * self.stream if self.place.last else 0
        )

    @cached_property
    def leanest(self) -> int:
        """A lower bound of its highest instant with every layer as lean as it can be."""
        least = sum(
            count * min(way.kept for way in self.options[kind]) for kind, count in self.counts.items()
        )
        return self.base + int(self.copies * least) + self.working

    @cached_property
    def counts(self) -> Mapping[tuple[int, str], int]:
        """How many of its layers are of each kind and rule."""
        return Counter(self.kinds)

    @cached_property
    def working(self) -> int:
        """The least that an instant has beside what is kept."""
        return max(
            self.head, *(min(way.peak - way.kept for way in self.options[kind]) for kind in self.counts), 0
        )

    def least_extra(self, budget: int) -> float | None:
        """No choice within the budget takes fewer extra seconds of a micro-batch; None: none is within it.

        Closed form.
        """
        if self.leanest > budget:
            return None
        room = (budget - self.base - self.working) / self.copies
        seconds, segments = 0.0, []
        for kind, count in self.counts.items():
            hull = lower_hull(self.options[kind])
            seconds += count * hull[0][1]
            room -= count * hull[0][0]
            segments += [((b[1] - a[1]) / (b[0] - a[0]), count * (b[0] - a[0])) for a, b in pairwise(hull)]
        for slope, size in sorted(segments):
            take = min(size, max(room, 0.0))
            seconds, room = seconds + slope * take, room - take
        return max(seconds, 0.0)

    @property
    def seconds(self) -> float:
        """Forward and backward of a micro-batch, nothing computed again; the proof's reference."""
        clock, model = self.clock, self.clock.model
        inside = sum(
            sum(t.total for t in (clock.forward(model.layers[k]), clock.backward(model.layers[k])))
            for k, _ in self.kinds
        )
        return inside + (sum(clock.head) if self.place.last else 0.0)

    def choose(self, budget: int | None) -> RankChoice:
        """The best choice within the budget: exact within GAP; without a budget the fastest.

        Raises:
            InfeasibleError: nothing is within the budget.
        """
        fastest = self.taken([0] * len(self.kinds), bound=0.0)
        fastest = replace(fastest, bound=fastest.seconds)
        if budget is None or fastest.peak <= budget:
            return fastest
        if self.leanest > budget:
            raise InfeasibleError(nearest={"memory": float(self.leanest)})
        if self.copies > 1 and len(self.counts) == 1:
            return self._allotted(budget)
        return self._solved(budget)

    def _allotted(self, budget: int) -> RankChoice:
        """Like layers, several micro-batches at once: solved by labels (allot.py)."""
        (kind,), n = self.counts, len(self.kinds)
        room = budget - self.base
        options = [
            (way.kept, max(way.peak, way.kept + (self.head if n == 1 else 0)), way.seconds)
            for way in self.options[kind]
        ]
        found = allot(options, n, self.copies, room)
        best = None if found is None else self.taken(found.choice, bound=0.0)
        if best is None or best.peak > budget:  # the loss, with all that is kept, is above
            return self._solved(budget)
        assert found is not None
        return replace(best, bound=best.seconds if found.complete else self.least_extra(budget) or 0.0)

    def lean(self) -> RankChoice:
        """The leaner of: every layer keeps the least; every layer works in the least."""
        by = (lambda way: (way.kept, way.peak), lambda way: (way.peak, way.kept))
        found = [
            self.taken(
                [min(range(len(self.options[k])), key=lambda i: key(self.options[k][i])) for k in self.kinds],
                bound=0.0,
            )
            for key in by
        ]
        best = min(found, key=lambda chosen: chosen.peak)
        return replace(best, bound=best.seconds)

    def _solved(self, budget: int) -> RankChoice:
        k, best, bound, solves = self.copies, None, float("inf"), 0
        intervals = [(0.0, 0, self._most)]
        while intervals and solves < _MOST_SOLVES:
            intervals.sort()
            lower, low, high = intervals.pop(0)
            if best is not None and lower >= best.seconds - GAP * self.seconds:
                bound = min(bound, lower)
                break
            solves += 1
            try:
                solution = solve_chain(
                    self._problem(budget - int((k - 1) * low), high),
                    reference_seconds=self.seconds,
                    gap=GAP,
                    timeout=_SOLVE_SECONDS,
                )
            except InfeasibleError:
                continue
            found = self.taken(list(solution.choice[:-2]), bound=solution.bound)
            if found.peak <= budget:
                bound = min(bound, solution.bound)
                best = found if best is None or found.seconds < best.seconds else best
            elif high - low > 1:
                middle = min(max((low + found.kept) // 2, low + 1), high - 1)
                intervals += [(solution.bound, low, middle), (solution.bound, middle, high)]
        if best is None:
            raise InfeasibleError(nearest={"memory": float(self.leanest)})
        return replace(best, bound=min([bound, best.seconds, *(lower for lower, _, _ in intervals)]))

    @cached_property
    def _most(self) -> int:
        return sum(max(way.kept for way in self.options[kind]) for kind in self.kinds)

    def _problem(self, budget: int, most: int) -> ChainProblem:
        """The rank's chain: its layers, the loss, and a last stage whose forward is within the budget where K
        ≤ most.
        """
        options = {
            f"{kind}": tuple(_block_option(way) for way in self.options[kind]) for kind in set(self.kinds)
        }
        nothing = BlockOption(
            kept=frozenset(), recomputed=(), kept_bytes=0, forward_peak=0, backward_peak=0, seconds=0.0
        )
        stages = [
            BlockStage(name=f"layer {i}", kind=f"{kind}", forward_base=0, backward_base=0)
            for i, kind in zip(self.place.layers, self.kinds, strict=True)
        ]
        ends = [("loss", self.head), ("cap", max(0, budget - self.base - most))]
        stages += [
            BlockStage(name=name, kind="end", forward_base=size, backward_base=size if name == "loss" else 0)
            for name, size in ends
        ]
        return ChainProblem(
            base=self.base,
            budget=max(budget, 1),
            options={**options, "end": (nothing,)},
            stages=tuple(stages),
        )

    def taken(self, choice: Sequence[int], bound: float) -> RankChoice:
        """What these options become: the instants of the module's docstring."""
        taken = [self.options[kind][i] for kind, i in zip(self.kinds, choice, strict=True)]
        total = sum(way.kept for way in taken)
        others = self.base + int((self.copies - 1) * total)
        instants, before = (
            [(others + total + self.head, "loss" if self.place.last else "end of the forward")],
            0,
        )
        for i, way in zip(self.place.layers, taken, strict=True):
            phase = "backward" if way.backward >= way.forward else "forward"
            instants.append((others + before + way.peak, f"{phase} of layer {i}"))
            before += way.kept
        peak, instant = max(instants)
        return RankChoice(
            ways=tuple(taken), seconds=sum(way.seconds for way in taken), kept=total, peak=peak,
            instant=instant, bound=bound
        )  # fmt: skip


def _block_option(way: RankWay) -> BlockOption:
    return BlockOption(
        kept=frozenset(), recomputed=(), kept_bytes=way.kept, forward_peak=way.forward,
        backward_peak=way.backward, seconds=way.seconds
    )  # fmt: skip


def lower_hull(options: Sequence[RankWay]) -> list[tuple[int, float]]:
    """(kept, seconds) of the options on the lower convex hull, from the one that keeps least to
    the fastest.
    """
    points: list[tuple[int, float]] = []
    for kept, seconds in sorted((way.kept, way.seconds) for way in options):
        if points and seconds >= points[-1][1]:
            continue
        if points and kept == points[-1][0]:
            points.pop()
        while len(points) > 1 and _above(points[-2], points[-1], (kept, seconds)):
            points.pop()
        points.append((kept, seconds))
    return points


def _above(a: tuple[int, float], b: tuple[int, float], c: tuple[int, float]) -> bool:
    """Whether b lies on or above the line from a to c."""
    return (b[1] - a[1]) * (c[0] - a[0]) >= (c[1] - a[1]) * (b[0] - a[0])
