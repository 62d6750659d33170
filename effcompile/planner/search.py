"""One search over what is decided for a whole program, and the record from which every reason is written.

A *case* is a program with all such choices made (how its batch is divided, what its products are computed in,
which loss head it has, how optimizer states are held); what is left to decide in it are its parts, which an
exact solver does. Cases are taken in the order of the least seconds that they may take. One whose least is no
better than the best solution so far is not solved: branch and bound, with a bound that each case gives.

What became of each case is kept. Of an option that was not taken it then follows why: the fastest solution
with it takes so much longer, or would at the least; none with it is within the budget, and the nearest takes
so many bytes; or it could not be had at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from effcompile.core.errors import InfeasibleError
from effcompile.core.reasons import OverBudget, Reason, Slower, Unsupported

Options = Mapping[str, str]


class SearchSolution(Protocol):
    """What a case became: its seconds, and a bound that no solution of it is below."""

    @property
    def seconds(self) -> float: ...
    @property
    def bound(self) -> float: ...


class SearchCase(Protocol):
    """A program with its whole choices made.

    Attributes:
        options: what is decided → the option that it has.
        least_seconds: no solution of it takes less.
    """

    @property
    def options(self) -> Options: ...
    @property
    def least_seconds(self) -> float: ...


C = TypeVar("C", bound=SearchCase)
S = TypeVar("S", bound=SearchSolution)


@dataclass(frozen=True, slots=True, kw_only=True)
class Node(Generic[S]):
    """One case of the record: its options, and what became of it.

    `least`: its bound, where it was not solved for that.
    """

    options: Options
    solution: S | None = None
    error: InfeasibleError | None = None
    least: float | None = None
    refusal: Reason | None = None


@dataclass(kw_only=True)
class Record(Generic[C, S]):
    """The search within one budget. `solve`: a case → its best solution; raises InfeasibleError."""

    solve: Callable[[C], S]
    nodes: list[Node[S]] = field(default_factory=list)
    exhausted: Options | None = None

    def search(self, cases: Iterable[C]) -> None:
        """Take up more cases."""
        for case in sorted(cases, key=lambda case: case.least_seconds):
            if self.nodes and (best := self._fastest) is not None and case.least_seconds >= best.seconds:
                self.nodes.append(Node(options=case.options, least=case.least_seconds))
                continue
            try:
                found = self.solve(case)
            except InfeasibleError as error:
                self.nodes.append(Node(options=case.options, error=error))
                continue
            self.nodes.append(Node(options=case.options, solution=found))
            if found.seconds <= case.least_seconds:
                self.exhausted = case.options

    def refuse(self, options: Options, reason: Reason) -> None:
        """Note that there is no case with these options."""
        self.nodes.append(Node(options=options, refusal=reason))

    @property
    def _fastest(self) -> S | None:
        return min(self.solutions, key=lambda found: found.seconds, default=None)

    @property
    def solutions(self) -> list[S]:
        return [node.solution for node in self.nodes if node.solution is not None]

    @property
    def bound(self) -> float:
        """No solution of any case is below."""
        return min(
            [found.bound for found in self.solutions]
            + [node.least for node in self.nodes if node.least is not None]
        )

    @property
    def best(self) -> S:
        """The fastest solution.

        Raises:
            InfeasibleError: there is none; that of the case that comes nearest.
        """
        fastest = self._fastest
        if fastest is None:
            raise self.nearest
        return fastest

    @property
    def nearest(self) -> InfeasibleError:
        """Why the case that comes nearest to the budget is above it."""
        return min(
            (node.error for node in self.nodes if node.error is not None), key=lambda error: error.needed
        )

    def seconds_with(self, kind: str, option: str) -> float | None:
        """The seconds of the fastest solution with an option, or their bound; None where nothing with it is
        within the budget.
        """
        known = [s for node in self._with(kind, option) if (s := _seconds(node)) is not None]
        return min(known, default=None)

    def declined(self, kind: str) -> Iterator[tuple[str, Reason]]:
        """The options that were not taken, with the reasons."""
        fastest = self._fastest
        taken = next(
            (node.options for node in self.nodes if fastest is not None and node.solution is fastest), {}
        )
        for option in dict.fromkeys(node.options[kind] for node in self.nodes if kind in node.options):
            if option != taken.get(kind):
                yield option, self._reason(kind, option, taken)

    def _reason(self, kind: str, option: str, taken: Options) -> Reason:
        nodes = list(self._with(kind, option))
        timed = [node for node in nodes if _seconds(node) is not None]
        if timed and self._fastest is not None:
            first = min(timed, key=lambda node: _seconds(node) or 0.0)
            return Slower(
                seconds=(_seconds(first) or 0.0) - self._fastest.seconds, at_least=first.solution is None
            )
        refused = [node for node in nodes if node.refusal is not None]
        beside = [
            node for node in refused if all(taken.get(k) == v for k, v in node.options.items() if k != kind)
        ]
        over = [node.error.needed for node in nodes if node.error is not None]
        for node in beside or ([] if over else refused):
            assert node.refusal is not None
            return node.refusal
        return OverBudget(needed=min(over)) if over else Unsupported("")

    def _with(self, kind: str, option: str) -> Iterator[Node[S]]:
        return (node for node in self.nodes if node.options.get(kind) == option)


def _seconds(node: Node[S]) -> float | None:
    """Of a node's solution, or at the least."""
    return node.solution.seconds if node.solution is not None else node.least
