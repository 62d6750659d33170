"""What is known of a mask in a graph: its closed forms, where padding and documents come from, and what that takes for granted."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx

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
class GraphMask:
    """Who sees whom, as an attention in a graph has it. A key is seen where every term holds.

    Attributes:
        lo, hi: the band lo ≤ j − i ≤ hi, at every size; None = open.
        chunk: i // chunk == j // chunk; 0 = none.
        valid: padding: bool [B or 1, Sk] each, all of which must hold.
        q_ids, k_ids: documents: integers [B or 1, Sq] and [B or 1, Sk] that must be equal.
        dense: what has no closed form: bool [B or 1, H or 1, Sq or 1, Sk or 1] each, all of which must hold.
        biases: nodes that are added to the scores where a key is seen, in order.
        uniform_empty: a query that sees nothing attends to all keys alike (the lowest finite number was added), not to none.
        guards: conditions on the inputs under which all of this holds. met: they hold at the example.
        reads: names of the inputs whose elements it depends on.
        counts: at the example, by tile size: (empty, full, partial) tiles.
        text: one line for a report.
        note: why the operand was left as it is, where it was; "" else.
    """

    lo: Edge | None = None
    hi: Edge | None = None
    chunk: int = 0
    valid: tuple[Expression, ...] = ()
    q_ids: Expression | None = None
    k_ids: Expression | None = None
    dense: tuple[Expression, ...] = ()
    biases: tuple[fx.Node, ...] = ()
    uniform_empty: bool = False
    guards: tuple[Guard, ...] = ()
    met: bool = True
    reads: tuple[str, ...] = ()
    counts: Mapping[int, tuple[int, int, int]]
    text: str = ""
    note: str = ""

    @property
    def static(self) -> bool:
        """It depends on sizes alone: its tiles can be listed when the plan is made."""
        return not (self.valid or self.dense or self.q_ids is not None)

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
        terms = (*self.valid, *self.dense, *(e for e in (self.q_ids, self.k_ids) if e is not None))
        return tuple(dict.fromkeys(term.node for term in terms))

    def visibility(self, values: Mapping[fx.Node, Any], q_len: int, k_len: int) -> Visibility:
        """The mask at these sizes, and at these values of `sources`."""
        return Visibility(
            lo=None if self.lo is None else self.lo.at(q_len, k_len),
            hi=None if self.hi is None else self.hi.at(q_len, k_len),
            chunk=self.chunk,
            valid=_conjunction([e.of(values[e.node]) for e in self.valid]),
            q_ids=None if self.q_ids is None else self.q_ids.of(values[self.q_ids.node]),
            k_ids=None if self.k_ids is None else self.k_ids.of(values[self.k_ids.node]),
            mask=_conjunction([e.of(values[e.node]) for e in self.dense]),
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
