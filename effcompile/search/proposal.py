"""What may be decided for one backend, as plain numbers for the planner."""

from __future__ import annotations

from dataclasses import dataclass, replace

from effcompile import planner
from effcompile.core.cost import Cost, Provenance
from effcompile.core.goal import Goal
from effcompile.ir.cache import CACHE
from effcompile.passes import Choice, Declined, Option
from effcompile.search.told import objective


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """Everything that may be decided for one backend, and what no choice changes."""

    backend: str
    choices: tuple[Choice, ...]
    declined: tuple[Declined, ...]
    rest: Cost  # nodes that no choice covers; parameters that no choice stores; peak activations
    provenance: Provenance

    def at_most_bytes(self) -> int:
        """Bytes with the largest option everywhere."""
        largest = (max(option.cost.peak_bytes for option in choice.options) for choice in self.choices)
        return self.rest.weight_bytes + self.rest.bytes_kept + sum(largest)

    def _widened(self) -> int:
        """What one leaf of a cache takes for an instant, whichever and however many are held narrower."""
        leaves = [choice for choice in self.choices if choice.kind == CACHE]
        return max((option.cost.bytes_transient for leaf in leaves for option in leaf.options), default=0)

    def problem(self, goal: Goal) -> planner.Problem:
        """As plain numbers for the planner."""
        limits: dict[str, float] = {"error_squared": (goal.max_error or 0.0) ** 2}
        if goal.memory is not None:
            limits["memory"] = float(goal.memory)
        return planner.Problem(
            sites={
                choice.site: tuple(_alternative(_apart(choice, option), goal) for option in choice.options)
                for choice in self.choices
            },
            limits=limits,
            base={"memory": float(self.rest.weight_bytes + self.rest.bytes_kept + self._widened())},
            base_objective=objective(replace(self.rest, bytes_kept=0), goal),
        )


def _apart(choice: Choice, option: Option) -> Option:
    """The option without what `Proposal._widened` has of all."""
    return replace(option, cost=replace(option.cost, bytes_transient=0)) if choice.kind == CACHE else option


def _alternative(option: Option, goal: Goal) -> planner.Alternative:
    cost = option.cost
    return planner.Alternative(
        name=option.name,
        objective=objective(cost, goal),
        resources={"error_squared": cost.error_squared, "memory": float(cost.peak_bytes)},
        requires=option.requires,
    )
