"""What the planner is asked and what it answers: sites, alternatives and limits as plain numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from types import MappingProxyType

from effcompile.core.errors import UnknownNameError, UsageError

OPTIMAL = "optimal within gap"
UNPROVEN = "feasible, bound not proven"
SINGLE = "only one alternative"

_LARGEST = 1e300  # sums of larger floats would overflow
_NOTHING: Mapping[str, float] = MappingProxyType({})
_FREE: Mapping[str, tuple[str, ...]] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """One way to do a site.

    Attributes:
        name: unique among the site's alternatives.
        objective: what it adds to the objective; negative where it modifies others (a fusion).
        resources: what it adds to each resource; a resource left out is 0.
        requires: site → the options of which that site must take one for this alternative to be possible.
    """

    name: str
    objective: float
    resources: Mapping[str, float] = field(default_factory=lambda: _NOTHING)
    requires: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: _FREE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Choose exactly one alternative per site, minimising the objective within all limits.

    Attributes:
        sites: site → its alternatives.
        limits: resource → the most that base and the chosen alternatives may use together.
        base: resource use that no choice changes. `base_objective`: the same for the objective.
    """

    sites: Mapping[str, tuple[Alternative, ...]]
    limits: Mapping[str, float]
    base: Mapping[str, float] = field(default_factory=lambda: _NOTHING)
    base_objective: float = 0.0

    def alternative(self, site: str, option: str) -> Alternative:
        """The alternative of that name.

        Raises:
            UnknownNameError: no such site, or no such option at it.
        """
        if site not in self.sites:
            raise UnknownNameError("site", site, self.sites)
        for alternative in self.sites[site]:
            if alternative.name == option:
                return alternative
        raise UnknownNameError(f"option of {site}", option, [a.name for a in self.sites[site]])

    def resource_names(self) -> list[str]:
        """Every resource that a limit, the base or an alternative names, limits first."""
        names = dict.fromkeys([*self.limits, *self.base])
        for alternatives in self.sites.values():
            for alternative in alternatives:
                names.update(dict.fromkeys(alternative.resources))
        return list(names)

    def used(self, choice: Mapping[str, str], resource: str) -> Fraction:
        """Exact use of a resource (the floats taken at face value) under a choice."""
        total = Fraction(self.base.get(resource, 0))
        return total + sum(
            (Fraction(self.alternative(s, o).resources.get(resource, 0)) for s, o in choice.items()),
            Fraction(0),
        )

    def cost(self, choice: Mapping[str, str]) -> Fraction:
        """Exact objective under a choice."""
        return Fraction(self.base_objective) + sum(
            (Fraction(self.alternative(s, o).objective) for s, o in choice.items()), Fraction(0)
        )

    def violations(self, choice: Mapping[str, str]) -> list[str]:
        """What a complete choice breaks, one line each, in exact arithmetic; empty when it is feasible."""
        broken = [
            f"{r} exceeds its limit"
            for r, limit in self.limits.items()
            if self.used(choice, r) > Fraction(limit)
        ]
        for site, option in choice.items():
            for other, allowed in self.alternative(site, option).requires.items():
                if choice[other] not in allowed:
                    broken.append(f"{site} = {option} requires {other} to be one of {', '.join(allowed)}")
        return broken


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """A feasible choice and what is proven about it.

    Attributes:
        choice: site → option, in the problem's order of sites.
        objective: of the choice, base included. `bound`: no feasible choice is below it (proven).
        gap: (objective − bound) / |objective|; 0 when the two are equal.
        status: OPTIMAL, UNPROVEN or SINGLE.
        sites, alternatives: size of the problem as it was given.
        seconds: wall time of the solve. `solver`: name and version.
        resources: use of every resource named in the problem, base included.
    """

    choice: Mapping[str, str]
    objective: float
    bound: float
    gap: float
    status: str
    sites: int
    alternatives: int
    seconds: float
    solver: str
    resources: Mapping[str, float]


def check(problem: Problem) -> None:
    """Refuse what cannot be solved as written.

    Raises:
        UsageError: a site without alternatives, two alternatives of one name, or a number that is NaN or
            infinite.
        UnknownNameError: `requires` names a site or an option that does not exist.
    """
    _finite("base_objective", problem.base_objective)
    for title, table in (("limit", problem.limits), ("base", problem.base)):
        for resource, value in table.items():
            _finite(f"{title} of {resource}", value)
    for site, alternatives in problem.sites.items():
        _check_site(problem, site, alternatives)


def _check_site(problem: Problem, site: str, alternatives: tuple[Alternative, ...]) -> None:
    names = [a.name for a in alternatives]
    if not names:
        raise UsageError(
            f"Site {site!r} has no alternatives. Give at least its baseline, or leave the site out."
        )
    if len(set(names)) < len(names):
        twice = next(n for n in names if names.count(n) > 1)
        raise UsageError(
            f"Site {site!r} has two alternatives named {twice!r}. Names must differ within a site."
        )
    for alternative in alternatives:
        _finite(f"objective of {site} = {alternative.name}", alternative.objective)
        for resource, value in alternative.resources.items():
            _finite(f"{resource} of {site} = {alternative.name}", value)
        for other, options in alternative.requires.items():
            if isinstance(options, str):
                raise UsageError(
                    f"{site} = {alternative.name} requires {other}: give a tuple of options, ({options!r},)."
                )
            for option in options:
                problem.alternative(other, option)
            if other not in problem.sites:
                raise UnknownNameError("site", other, problem.sites)


def _finite(what: str, value: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= _LARGEST:
        raise UsageError(
            f"The {what} is {value!r}; it must be a finite number, at most 1e300. Leave out a limit that "
            "does not bind."
        )


def rounded_down(value: Fraction) -> float:
    """The largest float that is not above the value."""
    near = float(value)
    return math.nextafter(near, -math.inf) if Fraction(near) > value else near
