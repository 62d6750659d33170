"""What is known of a mask in a graph: its closed forms, where padding and documents come from, and what that
takes for granted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor, fx

from effcompile.core.mask import Edge, Mask, MaskForm
from effcompile.core.reasons import Reason
from effcompile.core.types import Value
from effcompile.ops.visibility import Visibility
from effcompile.sites.attention.mask.node_expressions import Expression
from effcompile.sites.attention.node_builder import Emitter


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MaskGuard:
    """What a form takes for granted of the inputs: told, and checked.

    Attributes:
        said: in words.
        check: of the tensors in the order of `Program.inputs`.
        holds: the same as a node of the graph, a bool of no axes.
    """

    said: Reason
    check: Callable[[Sequence[Tensor]], bool]
    holds: Callable[[Emitter], fx.Node]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GraphMask(Mask[Expression, tuple[Expression, ...], Edge]):
    """A mask as an attention in a graph has it, at every size; `valid` and `mask` are conditions all of which
    must hold.

    Attributes:
        biases: nodes that are added to the scores where a key is seen, in order.
        guards: conditions on the inputs under which all of this holds. met: they hold at the example.
        form: what an option carries of it.
        counts: at the example, by tile size: (empty, full, partial) tiles.
        left: why the operand was left as it is, where it was.
    """

    biases: tuple[fx.Node, ...] = ()
    guards: tuple[MaskGuard, ...] = ()
    met: bool = True
    form: MaskForm = field(default_factory=MaskForm)
    counts: Mapping[int, tuple[int, int, int]]
    left: Reason | None = None

    @property
    def static(self) -> bool:
        """It depends on sizes alone: its tiles can be listed when the plan is made."""
        return not (self.valid or self.mask or self.q_ids is not None)

    @property
    def hides(self) -> bool:
        """It hides something; otherwise the operand is nothing but biases."""
        return not self.static or self.lo is not None or self.hi is not None or self.chunk > 0

    @property
    def certain(self) -> bool:
        """Its closed form holds for all inputs."""
        return self.left is None and not self.guards

    @property
    def sources(self) -> tuple[fx.Node, ...]:
        """The nodes that its expressions are made of."""
        terms = (
            *(self.valid or ()),
            *(self.mask or ()),
            *(e for e in (self.q_ids, self.k_ids) if e is not None),
        )
        return tuple(dict.fromkeys(term.node for term in terms))

    def visibility(self, values: Mapping[fx.Node, Value], q_len: int, k_len: int) -> Visibility:
        """The mask at these sizes, and at these values of `sources`."""
        return self.told(
            Visibility,
            ids=lambda e: e.of(values[e.node]),
            condition=lambda every: _conjunction([e.of(values[e.node]) for e in every]),
            limit=lambda edge: edge.at(q_len, k_len),
        )

    def unmet(self, inputs: Sequence[Tensor]) -> MaskGuard | None:
        """The first guard that these tensors, in the order of `Program.inputs`, break; None where the form
        holds.
        """
        return next((guard for guard in self.guards if not guard.check(inputs)), None)


def _conjunction(conditions: Sequence[Tensor]) -> Tensor | None:
    """All of them, broadcast; None of none."""
    result: Tensor | None = None
    for condition in conditions:
        result = condition if result is None else result & condition
    return result
