"""What a little more, or less, of a limit would change: read off a saved plan, without the model and without
solving.

A plan holds the cost of each option it took and of those that it declined. Taking another option at one site
changes time and bytes (or squared error) by the difference of two costs, and differences of different sites
add. From the plan's options the walk takes, one after the other, the change that gains most time for each
byte (or costs least for each byte given back): the greedy solution of a knapsack whose items are the sites'
options, as good as the best of them but for what one item more would take. What it says is an estimate: sites
that are decided together, and peaks that lie elsewhere when bytes move, are known to the solver alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from effcompile.core.cost import Cost
from effcompile.ir.plan import Plan

#: What a limit is of: the figure of a cost that counts against it.
Resource = Callable[[Cost], float]


def held_bytes(cost: Cost) -> float:
    """Bytes that an option holds: weights and activations."""
    return float(cost.weight_bytes + cost.bytes_kept)


def error_squared(cost: Cost) -> float:
    """Squared error, which adds over sites."""
    return cost.error_squared


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """Another option at one site, and what it changes: `used` of the limit's resource, seconds, squared
    error.
    """

    site: str
    kind: str
    was: str
    option: str
    used: float
    seconds: float
    error_squared: float

    @property
    def slope(self) -> float:
        """Seconds for each unit of the resource: gained by more of it, lost by less."""
        return abs(self.seconds / self.used)


def more(plan: Plan, room: float, resource: Resource) -> list[Exchange]:
    """The exchanges that use at most `room` more of a resource, most time for each unit first; none adds
    error beyond the goal's.
    """
    walk = _Walk(plan, resource)
    walk.gain(room)
    return walk.steps


def less(plan: Plan, needed: float, resource: Resource) -> list[Exchange] | None:
    """The exchanges that give back at least `needed` of a resource, least time for each unit first; None
    where there are not enough.
    """
    walk = _Walk(plan, resource)
    return walk.steps if walk.free(needed) else None


def settled(plan: Plan, room: float, resource: Resource) -> list[Exchange] | None:
    """What changes, one exchange a site, where there is `room` more of a resource, or less: what is freed too
    much is used again.
    """
    walk = _Walk(plan, resource)
    if room < 0 and not walk.free(-room):
        return None
    walk.gain(room - walk.used)
    return walk.changed()


class _Walk:
    """From what a plan took, one exchange after the other."""

    def __init__(self, plan: Plan, resource: Resource) -> None:
        self._resource = resource
        # a block of a step is a site of several kinds: what it keeps, its element-wise kernels
        self._options = {
            (d.site, d.kind): {d.option: d.cost, d.baseline: d.baseline_cost} for d in plan.decisions
        }
        for declined in plan.declined:
            if declined.cost is not None and (at := (declined.site, declined.kind)) in self._options:
                self._options[at].setdefault(declined.option, declined.cost)
        self._first = {(d.site, d.kind): d.option for d in plan.decisions}
        self._now = dict(self._first)
        self._slack = math.inf if resource is error_squared else _error_left(plan)
        self.used = 0.0
        self.steps: list[Exchange] = []

    def gain(self, room: float) -> None:
        """Take what saves most time for each unit, as long as it fits."""
        while room > 0:
            fitting = [e for e in self._candidates() if e.seconds < 0 and 0 < e.used <= room]
            if not fitting:
                return
            best = max(fitting, key=lambda e: e.slope)
            room -= best.used
            self._take(best)

    def free(self, needed: float) -> bool:
        """Take what costs least time for each unit that it gives back, until there is enough; whether there
        is.
        """
        while needed > 0:
            freeing = [e for e in self._candidates() if e.used < 0]
            if not freeing:
                return False
            best = min(freeing, key=lambda e: e.seconds / -e.used)
            needed += best.used
            self._take(best)
        return True

    def changed(self) -> list[Exchange]:
        """What differs from the plan in the end, in the order in which sites were first changed."""
        places = dict.fromkeys((step.site, step.kind) for step in self.steps)
        return [
            self._between(at, self._first[at], self._now[at])
            for at in places
            if self._first[at] != self._now[at]
        ]

    def _candidates(self) -> Iterator[Exchange]:
        for at, options in self._options.items():
            for option in options:
                if (
                    option != self._now[at]
                    and (found := self._between(at, self._now[at], option)).error_squared <= self._slack
                ):
                    yield found

    def _take(self, exchange: Exchange) -> None:
        self._now[exchange.site, exchange.kind] = exchange.option
        self._slack -= exchange.error_squared
        self.used += exchange.used
        self.steps.append(exchange)

    def _between(self, at: tuple[str, str], was: str, option: str) -> Exchange:
        before, after = self._options[at][was], self._options[at][option]
        return Exchange(
            site=at[0],
            kind=at[1],
            was=was,
            option=option,
            used=self._resource(after) - self._resource(before),
            seconds=after.seconds - before.seconds,
            error_squared=after.error_squared - before.error_squared,
        )


def _error_left(plan: Plan) -> float:
    """Squared error that the goal grants beyond the plan's; 0 where it grants none."""
    granted = (plan.goal.max_error or 0.0) ** 2
    return (
        max(granted - sum(decision.cost.error_squared for decision in plan.decisions), 0.0)
        if granted
        else 0.0
    )
