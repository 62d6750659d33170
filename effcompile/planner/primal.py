"""Good feasible choices fast: repair and improve what the Lagrangian pricing chose. Proves nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from effcompile.planner.dual import Scaled, reduced_costs
from effcompile.planner.reduce import Reduced

_PASSES = 60
_Wanted = Callable[[list[float], list[float]], bool]  # (room, change of (objective, *resources))


def polish(
    reduced: Reduced, problem: Scaled, picks: Sequence[int], multipliers: Sequence[float], weight: float = 1.0
) -> list[int] | None:
    """A feasible choice near `picks` that no single move improves, or None where repair fails.

    Repairs at prices weight · objective + multipliers · resources.
    """
    search = _Search(reduced, problem, reduced_costs(problem, multipliers, weight))
    current = search.mend_links(list(picks))
    if current is None or not search.repair(current):
        return None
    search.improve(current)
    # floats decided so far; exact integers have the last word
    return current if reduced.feasible(current) else None


class _Search:
    """Moves change one group's configuration; totals are kept in Scaled's units."""

    def __init__(self, reduced: Reduced, problem: Scaled, prices: list[list[float]]) -> None:
        self.reduced, self.problem, self.prices = reduced, problem, prices
        self.links: dict[int, list[int]] = {}
        for number, link in enumerate(reduced.links):
            self.links.setdefault(link.left, []).append(number)
            self.links.setdefault(link.right, []).append(number)

    def mend_links(self, picks: list[int]) -> list[int] | None:
        """Switch the cheaper side of each broken link until none is broken."""
        for _ in range(4 * len(self.reduced.links) + 1):
            broken = next(
                (k for k in self.reduced.links if picks[k.left] in k.when and picks[k.right] not in k.then),
                None,
            )
            if broken is None:
                return picks
            ways = [(broken.left, i) for i in range(len(self.prices[broken.left])) if i not in broken.when]
            ways += [(broken.right, i) for i in broken.then]
            if not ways:
                return None
            group, index = min(ways, key=lambda w: self.prices[w[0]][w[1]] - self.prices[w[0]][picks[w[0]]])
            picks[group] = index
        return None

    def repair(self, picks: list[int]) -> bool:
        """While a limit is exceeded, take the moves that buy most relief per priced cost."""
        for _ in range(_PASSES):
            room = self._room(picks)
            if min(room, default=0.0) >= 0:
                return True
            scored = []
            for group, index, delta in self._moves(picks):
                relief = _relief(room, delta)
                if relief > 1e-12:
                    price = self.prices[group][index] - self.prices[group][picks[group]]
                    scored.append(((price + 1e-9) / relief, group, index))
            if not self._take(
                picks, room, sorted(scored), lambda now, delta: min(now) < 0 and _relief(now, delta) > 1e-12
            ):
                return False
        return False

    def improve(self, picks: list[int]) -> None:
        """Take savings that keep every limit, largest first, until there is none."""
        for _ in range(_PASSES):
            room = self._room(picks)
            scored = [
                (delta[0], group, index)
                for group, index, delta in self._moves(picks)
                if delta[0] < 0 and _fits(room, delta)
            ]
            if not self._take(picks, room, sorted(scored), _fits):
                return

    def _take(
        self, picks: list[int], room: list[float], scored: list[tuple[float, int, int]], wanted: _Wanted
    ) -> int:
        """Take moves in order, at most one per group, while `wanted` still holds; returns how many."""
        moved: set[int] = set()
        for _, group, index in scored:
            configs = self.problem.groups[group]
            delta = [a - b for a, b in zip(configs[index], configs[picks[group]], strict=True)]
            if group not in moved and wanted(room, delta) and self._keeps_links(picks, group, index):
                picks[group] = index
                room[:] = [r - d for r, d in zip(room, delta[1:], strict=True)]
                moved.add(group)
        return len(moved)

    def _room(self, picks: list[int]) -> list[float]:
        """Exact totals, then divided: floats summed in another order could drift over a limit."""
        sums = self.reduced.sums(picks)[1:]
        return [
            min(s - u, size << 20) / size
            for s, u, size in zip(self.reduced.slack, sums, self.problem.sizes[1:], strict=True)
        ]

    def _moves(self, picks: list[int]) -> Iterator[tuple[int, int, list[float]]]:
        """Every change of one group that keeps the links, with its change of (objective, *resources)."""
        for group, configs in enumerate(self.problem.groups):
            now = configs[picks[group]]
            for index, config in enumerate(configs):
                if index != picks[group] and self._keeps_links(picks, group, index):
                    yield group, index, [a - b for a, b in zip(config, now, strict=True)]

    def _keeps_links(self, picks: list[int], group: int, index: int) -> bool:
        for number in self.links.get(group, ()):
            link = self.reduced.links[number]
            left = index if link.left == group else picks[link.left]
            right = index if link.right == group else picks[link.right]
            if left in link.when and right not in link.then:
                return False
        return True


def _relief(room: list[float], delta: list[float]) -> float:
    """By how much a move lowers the total excess over the limits."""
    return sum(max(-r, 0.0) - max(d - r, 0.0) for r, d in zip(room, delta[1:], strict=True))


def _fits(room: list[float], delta: list[float]) -> bool:
    """With a margin for the rounding of floats; a move that frees a resource always fits it."""
    return all(d <= 0 or d <= r - 1e-12 for r, d in zip(room, delta[1:], strict=True))
