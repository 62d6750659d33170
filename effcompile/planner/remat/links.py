"""A chain in whole numbers: per stage a few options, two instants, and what was kept before.

With S_i = Σ_{j<i} kept_j(o_j), option o of stage i is possible within budget M when

    forward   S_i + forward_peak_i(o)  + base + forward_base_i  + forward_slack_i   ≤ M
    backward  S_i + backward_peak_i(o) + base + backward_base_i + backward_slack_i  ≤ M
    host      Σ_j host_j(o_j) ≤ H

The link to the host needs no constraint of its own here: within each block, prefix sums of what is copied to
the device and suffix sums of what is copied to the host are held against the block's own compute, and what
they lag behind is in the option's seconds (simulate.stall). So the link is idle at every border between two
blocks' runs, whatever options they take, by induction along the chain: what a block offloads is on the host
when its forward ends, which is before any backward asks for it, and the step's time is at most its compute
plus Σ_j seconds_j(o_j). Letting copies run on into a neighbour's compute could only save more; it is not
counted. `host` counts every stage, for all that is on the host is there when the forward ends.

A *group* of stages f … l (problem.Group) is the same chain with other numbers, so what solves chains solves
groups:

    kept_j           loses entering_kept_j(o) for f < j ≤ l; only options where that is positive, and at f
                     only those that keep the entering values whole (they are what the re-run starts from);
                     none with other forms
    backward_base_k  gains Σ_{f<j<k} entering_bytes_j: remade, and not yet done with. Stage k's own are in
                     its peak
    backward_peak_l  is at least kept_l(o) + max_{f≤j<l} ( Σ_{f<m≤j} entering_bytes_m + rerun_peak_j )
                     − Σ_{f<j<l} entering_bytes_j, the re-run itself, which counts stage j's entering
                     values twice where rerun_peak_j has them too
    seconds          gain Σ_{f≤j<l} rerun_seconds_j
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from math import gcd, lcm

from effcompile.planner.remat.problem import BlockOption, BlockStage, ChainProblem, Group

_FINE = 1 << 40  # ticks of the longest choice, where its seconds are no multiples of a coarser unit
_EVERY_SIZE = 12  # runs up to this long are grouped in every size, longer ones in sizes that grow by a half


@dataclass(frozen=True, slots=True)
class ChainWay:
    """An option of a stage: its index in the problem, bytes kept for others, highest instants, ticks, host
    bytes (0 if plenty).
    """

    index: int
    kept: int
    forward: int
    backward: int
    ticks: int
    host: int = 0


@dataclass(frozen=True, slots=True)
class Link:
    """A stage: its ways, and what is there beside S_i and the way.

    None of the ways is as good as another in everything; those that keep least come first. Equal stages share
    one tuple.
    """

    ways: tuple[ChainWay, ...]
    forward: int
    backward: int

    def reach(self, way: ChainWay, budget: int) -> int:
        """The most S_i with which the way is within the budget."""
        return budget - max(self.forward + way.forward, self.backward + way.backward)


@dataclass(frozen=True)
class ChainLinks:
    """A chain under one choice of groups. `ticks`: what the groups' re-runs take, of `tick` seconds each.

    `host`: the limit on host bytes; None where no choice reaches it.
    """

    links: tuple[Link, ...]
    groups: tuple[Group, ...]
    ticks: int
    tick: Fraction
    host: int | None = None

    @cached_property
    def possible(self) -> bool:
        """Whether every stage has an option that the groups allow."""
        return all(link.ways for link in self.links)

    @cached_property
    def fastest(self) -> tuple[int, ...]:
        """Every stage's way of the least ticks, and of those the one that keeps least."""
        best = {
            id(link.ways): min(range(len(link.ways)), key=[way.ticks for way in link.ways].__getitem__)
            for link in self.links
        }
        return tuple(best[id(link.ways)] for link in self.links)

    @cached_property
    def least(self) -> int:
        """The ticks when every stage takes its fastest way: a bound."""
        return self.cost(self.fastest)

    def instants(self, choice: Sequence[int]) -> list[tuple[int, int]]:
        """Per stage, bytes at the highest instant of its forward and of its backward.

        `choice` counts a link's ways.
        """
        kept, loads = 0, []
        for link, c in zip(self.links, choice, strict=True):
            way = link.ways[c]
            loads.append((kept + link.forward + way.forward, kept + link.backward + way.backward))
            kept += way.kept
        return loads

    def peak(self, choice: Sequence[int]) -> int:
        return max((max(pair) for pair in self.instants(choice)), default=0)

    def cost(self, choice: Sequence[int]) -> int:
        return self.ticks + sum(link.ways[c].ticks for link, c in zip(self.links, choice, strict=True))

    def hosted(self, choice: Sequence[int]) -> int:
        """Host bytes of a choice."""
        return sum(link.ways[c].host for link, c in zip(self.links, choice, strict=True))

    def fits(self, choice: Sequence[int], budget: int) -> bool:
        """Whether a choice is within the budget and the host's limit."""
        return self.peak(choice) <= budget and (self.host is None or self.hosted(choice) <= self.host)

    def lean(self, budget: int) -> tuple[int, ...] | None:
        """The choice that keeps least at every stage: feasible if any is.

        None: nothing fits, for a lower S_i never hurts.

        The host's limit is left aside: walk.feasible has it too.
        """
        kept, choice = 0, []
        for link in self.links:
            c = next((c for c, way in enumerate(link.ways) if kept <= link.reach(way, budget)), None)
            if c is None:
                return None
            kept += link.ways[c].kept
            choice.append(c)
        return tuple(choice)


def most_hosted(problem: ChainProblem) -> int:
    """Host bytes if every stage took as many as any of its options does."""
    return sum(
        max((o.host_bytes for o in problem.options[stage.kind]), default=0) for stage in problem.stages
    )


def variants(problem: ChainProblem) -> list[ChainLinks]:
    """The chain without groups, and with every run of `groupable` in groups of one size, for each size."""
    tick = _tick(problem)
    shop = _Shop(problem, tick)
    plain = _links(problem, (), tick, shop)
    longest = max((last - first + 1 for first, last in problem.groupable), default=0)
    made = {plain.groups: plain}
    for size in _sizes(longest):
        groups = tuple(g for first, last in problem.groupable for g in _cut(first, last, size))
        if groups not in made:
            made[groups] = _links(problem, groups, tick, shop)
    return [links for links in made.values() if links.possible]


def _sizes(longest: int) -> list[int]:
    sizes = list(range(2, min(longest, _EVERY_SIZE) + 1))
    while sizes and sizes[-1] < longest:
        sizes.append(min(longest, sizes[-1] * 3 // 2))
    return sizes


def _cut(first: int, last: int, size: int) -> list[Group]:
    return [Group(first=a, last=min(a + size - 1, last)) for a in range(first, last, size)]


def _tick(problem: ChainProblem) -> Fraction:
    """The largest unit of which all seconds are multiples; a 2^40th of the longest choice where that is
    larger.
    """
    count = Counter((s.kind, s.rerun_seconds) for s in problem.stages)
    seconds = {Fraction(o.seconds) for kind, _ in count for o in problem.options[kind]} | {
        Fraction(rerun) for _, rerun in count
    }
    longest = sum(
        (
            n * (max(Fraction(o.seconds) for o in problem.options[k]) + Fraction(r))
            for (k, r), n in count.items()
        ),
        Fraction(0),
    )
    if not longest:
        return Fraction(1)
    bottom = lcm(*(s.denominator for s in seconds))
    top = gcd(*(int(s * bottom) for s in seconds))
    return max(Fraction(top, bottom), longest / _FINE)


class _Shop:
    """Makes the ways of a stage for its part in a group, each only once."""

    def __init__(self, problem: ChainProblem, tick: Fraction) -> None:
        self.problem, self.tick = problem, tick
        self.scarce = problem.host is not None and problem.host < most_hosted(problem)
        self.ways = {
            kind: tuple(self._way(i, o) for i, o in enumerate(options))
            for kind, options in problem.options.items()
        }
        self.made: dict[tuple[str, int | None, int | None], tuple[ChainWay, ...]] = {}

    def _way(self, index: int, option: BlockOption) -> ChainWay:
        """Ticks are rounded down: a bound in ticks is a bound in seconds."""
        ticks = int(Fraction(option.seconds) / self.tick)
        host = option.host_bytes if self.scarce else 0
        return ChainWay(index, option.kept_bytes, option.forward_peak, option.backward_peak, ticks, host)

    def alone(self, stage: BlockStage) -> tuple[ChainWay, ...]:
        return self._once((stage.kind, None, None), lambda way: way)

    def first(self, stage: BlockStage) -> tuple[ChainWay, ...]:
        """Those that keep the entering values whole."""
        options, whole = self.problem.options[stage.kind], stage.entering_bytes

        def whole_and_plain(way: ChainWay) -> ChainWay | None:
            option = options[way.index]
            return way if option.entering_kept == whole and not option.forms else None

        return self._once((stage.kind, whole, None), whole_and_plain)

    def member(self, stage: BlockStage, rerun: int | None) -> tuple[ChainWay, ...]:
        """Those that keep entering values, without them; at the group's last stage its backward is at least
        the re-run.
        """
        options = self.problem.options[stage.kind]

        def less(way: ChainWay) -> ChainWay | None:
            spared = 0 if options[way.index].forms else options[way.index].entering_kept
            kept = way.kept - spared
            return (
                replace(
                    way,
                    kept=kept,
                    backward=way.backward if rerun is None else max(way.backward, kept + rerun),
                )
                if spared
                else None
            )

        return self._once((stage.kind, -1, rerun), less)

    def _once(
        self, key: tuple[str, int | None, int | None], change: Callable[[ChainWay], ChainWay | None]
    ) -> tuple[ChainWay, ...]:
        if key not in self.made:
            changed = [change(way) for way in self.ways[key[0]]]
            self.made[key] = _undominated([way for way in changed if way])
        return self.made[key]


def _links(problem: ChainProblem, groups: tuple[Group, ...], tick: Fraction, shop: _Shop) -> ChainLinks:
    links = [_link(problem, stage, shop.alone(stage)) for stage in problem.stages]
    ticks = 0
    for group in groups:
        links[group.first : group.last + 1] = _grouped(
            problem, group, links[group.first : group.last + 1], shop
        )
        ticks += sum(int(Fraction(s.rerun_seconds) / tick) for s in problem.stages[group.first : group.last])
    return ChainLinks(tuple(links), groups, ticks, tick, problem.host if shop.scarce else None)


def _link(problem: ChainProblem, stage: BlockStage, ways: tuple[ChainWay, ...]) -> Link:
    forward = problem.base + stage.forward_base + problem.forward_slack.get(stage.name, 0)
    return Link(ways, forward, problem.base + stage.backward_base + problem.backward_slack.get(stage.name, 0))


def _grouped(problem: ChainProblem, group: Group, links: list[Link], shop: _Shop) -> list[Link]:
    """The group's stages: `remade` counts up the entering values of those after the first, as the re-run
    makes them.
    """
    stages = problem.stages[group.first : group.last + 1]
    changed = [replace(links[0], ways=shop.first(stages[0]))]
    remade, rerun = 0, stages[0].rerun_peak
    for stage, link in zip(stages[1:-1], links[1:-1], strict=True):
        changed.append(replace(link, ways=shop.member(stage, None), backward=link.backward + remade))
        remade += stage.entering_bytes
        rerun = max(rerun, remade + stage.rerun_peak)
    changed.append(
        replace(links[-1], ways=shop.member(stages[-1], rerun - remade), backward=links[-1].backward + remade)
    )
    return changed


def _undominated(ways: list[ChainWay]) -> tuple[ChainWay, ...]:
    left: list[ChainWay] = []
    for w in sorted(ways, key=lambda w: (w.kept, w.ticks, w.backward, w.forward, w.host, w.index)):
        if not any(
            v.ticks <= w.ticks and v.backward <= w.backward and v.forward <= w.forward and v.host <= w.host
            for v in left
        ):
            left.append(w)
    return tuple(left)
