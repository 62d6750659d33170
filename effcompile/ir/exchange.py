"""What a little more, or less, of a limit would change: read off a saved plan, without the model and without solving.

A plan holds the cost of each option it took and of those that it declined. Taking another option at one site changes time and bytes (or
squared error) by the difference of two costs, and differences of different sites add. From the plan's options the walk takes, one after
the other, the change that gains most time for each byte (or costs least for each byte given back): the greedy solution of a knapsack
whose items are the sites' options, which is at most one change away from the best of these options. What it says is an estimate: sites
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
    """Another option at one site, and what it changes: `used` of the limit's resource, seconds, squared error."""

    site: str
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
    """The exchanges that use at most `room` more of a resource, most time for each unit first; none adds error beyond the goal's."""
    slack = _error_left(plan) if resource is not error_squared else math.inf
    found: list[Exchange] = []
    left = room
    candidates = sorted((e for e in _exchanges(plan, resource) if e.used > 0 and e.seconds < 0), key=lambda e: -e.slope)
    for exchange in candidates:
        if exchange.used <= left and exchange.error_squared <= slack and all(exchange.site != taken.site for taken in found):
            found.append(exchange)
            left, slack = left - exchange.used, slack - exchange.error_squared
    return found


def less(plan: Plan, needed: float, resource: Resource) -> list[Exchange] | None:
    """The exchanges that give back at least `needed` of a resource, least time for each unit first; None where there are not enough."""
    slack = _error_left(plan) if resource is not error_squared else math.inf
    found: list[Exchange] = []
    left = needed
    for exchange in sorted((e for e in _exchanges(plan, resource) if e.used < 0), key=lambda e: e.seconds / -e.used):
        if left <= 0:
            break
        if exchange.error_squared <= slack and all(exchange.site != taken.site for taken in found):
            found.append(exchange)
            left, slack = left + exchange.used, slack - exchange.error_squared
    return found if left <= 0 else None


def _exchanges(plan: Plan, resource: Resource) -> Iterator[Exchange]:
    """Every other option of a site whose cost the plan knows."""
    for decision in plan.decisions:
        others = {d.option: d.cost for d in plan.declined if d.site == decision.site and d.cost is not None}
        for option, cost in {decision.baseline: decision.baseline_cost, **others}.items():
            used = resource(cost) - resource(decision.cost)
            if option != decision.option and used:
                yield Exchange(
                    site=decision.site,
                    was=decision.option,
                    option=option,
                    used=used,
                    seconds=cost.seconds - decision.cost.seconds,
                    error_squared=cost.error_squared - decision.cost.error_squared,
                )


def _error_left(plan: Plan) -> float:
    """Squared error that the goal grants beyond the plan's; 0 where it grants none."""
    granted = (plan.goal.max_error or 0.0) ** 2
    return max(granted - sum(decision.cost.error_squared for decision in plan.decisions), 0.0) if granted else 0.0
