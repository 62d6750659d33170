"""Reduce a Problem to groups of configurations in exact integers.

Floats are dyadic rationals, so each dimension (objective, each limit) times one power of two is an integer:
sums and comparisons below are exact and nothing is ever rounded here.

    scale      c_a = objective_a · 2^k,  u_ra = resource_ra · 2^k_r,  slack_r = (limit_r − base_r) · 2^k_r
               (`_scale`)
    contract   sites tied by `requires` become one group whose configurations are the combinations that
               respect the ties inside it; exact, and its convex hull is tighter than implications in an LP
               (`_contract`)
    dominate   configuration q goes when p ≤ q in the objective and in every limited resource and both take
               the same options at sites that other groups' `requires` look at: swapping q for p keeps
               feasibility (`_dominate`)

A tie that would make a group larger than GROUP_LIMIT stays outside, as a Link between two groups.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from operator import le

from effcompile.planner.problem import Alternative, Problem

#: Most configurations in one group; beyond it ties between sites remain as links that z3 branches on.
GROUP_LIMIT = 1000


@dataclass(frozen=True, slots=True)
class Config:
    """One combination of options at a group's sites.

    `vector` is (objective, *limited resources), exact integers.
    """

    vector: tuple[int, ...]
    picks: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Implication:
    """If group `left` takes a configuration in `when`, group `right` must take one in `then` (indices)."""

    left: int
    when: frozenset[int]
    right: int
    then: frozenset[int]


@dataclass(frozen=True, slots=True)
class Reduced:
    """One configuration per group, Σ vector[1 + r] ≤ slack[r], links hold; minimise Σ vector[0]."""

    groups: tuple[tuple[Config, ...], ...]
    links: tuple[Implication, ...]
    slack: tuple[int, ...]
    scale: int  # of the objective

    def sums(self, picked: Sequence[int]) -> tuple[int, ...]:
        """Exact totals of a choice of one configuration index per group."""
        totals = [0] * (1 + len(self.slack))
        for group, index in zip(self.groups, picked, strict=True):
            for d, value in enumerate(group[index].vector):
                totals[d] += value
        return tuple(totals)

    def linked(self, picked: Sequence[int]) -> bool:
        """True when every link holds."""
        return all(picked[k.left] not in k.when or picked[k.right] in k.then for k in self.links)

    def feasible(self, picked: Sequence[int]) -> bool:
        """True when the links and every limit hold."""
        return self.linked(picked) and all(
            use <= room for use, room in zip(self.sums(picked)[1:], self.slack, strict=True)
        )

    def choice(self, picked: Sequence[int]) -> dict[str, str]:
        """Site → option."""
        return {
            s: o
            for group, index in zip(self.groups, picked, strict=True)
            for s, o in group[index].picks.items()
        }


@dataclass(frozen=True, slots=True)
class _Tie:
    site: str
    option: str
    other: str
    allowed: frozenset[str]

    def holds(self, picks: Mapping[str, str]) -> bool:
        return picks[self.site] != self.option or picks[self.other] in self.allowed


def reduce_problem(problem: Problem) -> Reduced:
    """The same problem as groups; a group may be empty when `requires` alone contradict each
    other inside it.
    """
    limits = list(problem.limits)
    values = [problem.base_objective, *(a.objective for alts in problem.sites.values() for a in alts)]
    scales = [_scale(values)]
    for r in limits:
        used = [a.resources.get(r, 0) for alts in problem.sites.values() for a in alts]
        scales.append(_scale([problem.limits[r], problem.base.get(r, 0), *used]))
    clusters = {
        site: [_config(site, a, limits, scales) for a in alternatives]
        for site, alternatives in problem.sites.items()
    }
    ties = [
        _Tie(site, a.name, other, frozenset(allowed))
        for site, alts in problem.sites.items()
        for a in alts
        for other, allowed in a.requires.items()
    ]
    groups, outside = _contract(clusters, ties)
    slack = tuple(
        int((Fraction(problem.limits[r]) - Fraction(problem.base.get(r, 0))) * k)
        for r, k in zip(limits, scales[1:], strict=True)
    )
    return Reduced(tuple(tuple(g) for g in groups), _links(groups, outside), slack, scales[0])


def _config(site: str, alternative: Alternative, limits: list[str], scales: list[int]) -> Config:
    values = (alternative.objective, *(alternative.resources.get(r, 0) for r in limits))
    return Config(
        tuple(int(Fraction(v) * k) for v, k in zip(values, scales, strict=True)), {site: alternative.name}
    )


def _scale(values: Iterable[float]) -> int:
    return max((Fraction(v).denominator for v in values), default=1)


def _contract(clusters: dict[str, list[Config]], ties: list[_Tie]) -> tuple[list[list[Config]], list[_Tie]]:
    """Merge tied clusters while they stay small; returns the groups and the ties that remain
    between groups.
    """
    home = {site: site for site in clusters}
    members = {site: {site} for site in clusters}
    for site, configs in clusters.items():
        inside = [t for t in ties if t.site == t.other == site]
        possible = [c for c in configs if all(t.holds(c.picks) for t in inside)]
        clusters[site] = _dominate(possible, _watched({site}, ties))
    for tie in ties:
        a, b = home[tie.site], home[tie.other]
        if a == b or len(clusters[a]) * len(clusters[b]) > 20 * GROUP_LIMIT:
            continue
        together = members[a] | members[b]
        across = [
            t
            for t in ties
            if {t.site, t.other} <= together and (t.site in members[a]) != (t.other in members[a])
        ]
        merged = _product(clusters[a], clusters[b], across)
        merged = _dominate(merged, _watched(together, ties))
        if len(merged) <= GROUP_LIMIT:
            clusters[a], members[a] = merged, together
            del clusters[b], members[b]
            home.update(dict.fromkeys(together, a))
    return list(clusters.values()), [t for t in ties if home[t.site] != home[t.other]]


def _product(left: list[Config], right: list[Config], across: list[_Tie]) -> list[Config]:
    merged = []
    for p in left:
        for q in right:
            picks = {**p.picks, **q.picks}
            if all(t.holds(picks) for t in across):
                merged.append(Config(tuple(x + y for x, y in zip(p.vector, q.vector, strict=True)), picks))
    return merged


def _watched(members: set[str], ties: list[_Tie]) -> list[str]:
    """The members that a tie with a site outside looks at."""
    watched = {t.site for t in ties if t.site in members and t.other not in members}
    return sorted(watched | {t.other for t in ties if t.other in members and t.site not in members})


def _dominate(configs: list[Config], watched: list[str]) -> list[Config]:
    """Keep the Pareto set of each combination of options at the watched sites."""
    kept: dict[tuple[str, ...], list[Config]] = {}
    tails: dict[tuple[str, ...], list[tuple[int, ...]]] = {}
    for config in sorted(configs, key=lambda c: c.vector):
        # a dominating vector sorts first, so only its tail is compared
        key, tail = tuple(config.picks[s] for s in watched), config.vector[1:]
        if not _beaten(tail, tails.setdefault(key, [])):
            tails[key].append(tail)
            kept.setdefault(key, []).append(config)
    return [c for rivals in kept.values() for c in rivals]


def _beaten(tail: tuple[int, ...], rivals: list[tuple[int, ...]]) -> bool:
    for rival in rivals:  # noqa: SIM110 — any() is slower, and this is the hot spot of the reduction
        if all(map(le, rival, tail)):
            return True
    return False


def _links(groups: list[list[Config]], ties: list[_Tie]) -> tuple[Implication, ...]:
    where = {site: i for i, group in enumerate(groups) if group for site in group[0].picks}
    links = []
    for tie in ties:
        if tie.site in where and tie.other in where:
            left, right = where[tie.site], where[tie.other]
            when = frozenset(i for i, c in enumerate(groups[left]) if c.picks[tie.site] == tie.option)
            then = frozenset(i for i, c in enumerate(groups[right]) if c.picks[tie.other] in tie.allowed)
            links.append(Implication(left, when, right, then))
    return tuple(links)
