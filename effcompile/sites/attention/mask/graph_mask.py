"""What is known of a mask in a graph: its closed forms, where padding and documents come from, and what that takes for granted."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, fx

from effcompile.core.types import Value
from effcompile.ops.mask import Mask
from effcompile.ops.visibility import Visibility
from effcompile.sites.attention.mask.fit_bands import Edge
from effcompile.sites.attention.mask.node_expressions import Expression
from effcompile.sites.attention.node_builder import Emitter


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Guard:
    """What a form takes for granted of the inputs: in words, and checked.

    Attributes:
        text: for a report.
        check: of the tensors in the order of `Program.inputs`.
        holds: the same as a node of the graph, a bool of no axes.
    """

    text: str
    check: Callable[[Sequence[Tensor]], bool]
    holds: Callable[[Emitter], fx.Node]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GraphMask(Mask[Expression, tuple[Expression, ...], Edge]):
    """A mask as an attention in a graph has it, at every size; `valid` and `mask` are conditions all of which must hold.

    Attributes:
        biases: nodes that are added to the scores where a key is seen, in order.
        guards: conditions on the inputs under which all of this holds. met: they hold at the example.
        reads: names of the inputs whose elements it depends on.
        counts: at the example, by tile size: (empty, full, partial) tiles.
        text: one line for a report.
        note: why the operand was left as it is, where it was; "" else.
    """

    biases: tuple[fx.Node, ...] = ()
    guards: tuple[Guard, ...] = ()
    met: bool = True
    reads: tuple[str, ...] = ()
    counts: Mapping[int, tuple[int, int, int]]
    text: str = ""
    note: str = ""

    @property
    def static(self) -> bool:
        """It depends on sizes alone: its tiles can be listed when the plan is made."""
        return not (self.valid or self.mask or self.q_ids is not None)

    @property
    def hides(self) -> bool:
        """It hides something; otherwise the operand is nothing but biases."""
        return not self.static or self.lo is not None or self.hi is not None or self.chunk > 0

    @property
    def condition(self) -> str:
        """Its guards in words."""
        return " and ".join(guard.text for guard in self.guards)

    @property
    def sources(self) -> tuple[fx.Node, ...]:
        """The nodes that its expressions are made of."""
        terms = (*(self.valid or ()), *(self.mask or ()), *(e for e in (self.q_ids, self.k_ids) if e is not None))
        return tuple(dict.fromkeys(term.node for term in terms))

    def visibility(self, values: Mapping[fx.Node, Value], q_len: int, k_len: int) -> Visibility:
        """The mask at these sizes, and at these values of `sources`."""
        return self.told(
            Visibility,
            ids=lambda e: e.of(values[e.node]),
            condition=lambda every: _conjunction([e.of(values[e.node]) for e in every]),
            limit=lambda edge: edge.at(q_len, k_len),
        )

    def unmet(self, inputs: Sequence[Tensor]) -> Guard | None:
        """The first guard that these tensors, in the order of `Program.inputs`, break; None where the form holds."""
        return next((guard for guard in self.guards if not guard.check(inputs)), None)


def _conjunction(conditions: Sequence[Tensor]) -> Tensor | None:
    """All of them, broadcast; None of none."""
    result: Tensor | None = None
    for condition in conditions:
        result = condition if result is None else result & condition
    return result
