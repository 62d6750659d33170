"""Products of matrices as the graph has them: matmul, bmm, baddbmm, and an einsum that is one of these."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from effcompile.sites.attention.find.fx_queries import argument, aten, number, overloads
from effcompile.sites.attention.find.normal_form import AxisStep, NotThisFormError, Operand, tensor_of

_MATRIX = overloads("matmul.default", "bmm.default", "baddbmm.default")


@dataclass(frozen=True, slots=True, kw_only=True)
class MatchedProduct:
    """left · right, both with matrices in their last two axes; `right` is [rows of the contraction, columns].

    Attributes:
        left, right: values of the graph. `left_axes`, `right_axes`: the order in which their axes are to be
            read, None: as they are.
        right_rows: True: `right` so read is [columns, contraction].
        out_axes: the order of the product's axes in the graph, None: [*lead, rows, columns].
        lead: leading axes of the product.
        added: what baddbmm adds, times `beta`; the product itself is times `alpha`.
    """

    left: fx.Node
    right: fx.Node
    lead: tuple[Any, ...]
    left_axes: tuple[int, ...] | None = None
    right_axes: tuple[int, ...] | None = None
    right_rows: bool = False
    out_axes: tuple[int, ...] | None = None
    added: fx.Node | None = None
    alpha: float = 1.0
    beta: float = 1.0

    @classmethod
    def of(cls, node: fx.Node) -> MatchedProduct:
        """Read a product.

        Raises:
            NotThisFormError: an einsum that is no product of matrices, or operands without leading axes for
                their matrices.
        """
        if node.target is aten.einsum.default:
            return _einsum(node)
        at = 1 if node.target is aten.baddbmm.default else 0
        left, right = node.args[at], node.args[at + 1]
        assert isinstance(left, fx.Node) and isinstance(right, fx.Node)
        if tensor_of(left).ndim < 2 or tensor_of(right).ndim < 2:
            raise NotThisFormError("{} is a product with a vector", node.name)
        lead = tuple(tensor_of(node).shape[:-2])
        if not at:
            return cls(left=left, right=right, lead=lead)
        alpha, beta = (number(node.kwargs.get(name, 1)) for name in ("alpha", "beta"))
        added = argument(node, 0, "self")
        if alpha is None or beta is None:
            raise NotThisFormError("{} scales by what is not a number", node.name)
        return cls(left=left, right=right, lead=lead, added=added if beta else None, alpha=alpha, beta=beta)


def is_product(node: fx.Node) -> bool:
    """True for a product of two values."""
    if node.target is aten.einsum.default:
        return len(node.args[1]) == 2  # type: ignore[arg-type]
    return node.target in _MATRIX


def _einsum(node: fx.Node) -> MatchedProduct:
    """`bqhd,bkhd->bhqk`: batch axes are in all three, the contracted in both operands, one more in each."""
    equation, values = str(node.args[0]).replace(" ", ""), node.args[1]
    inputs, _, out = equation.partition("->")
    parts = inputs.split(",")
    if (
        len(parts) != 2
        or not out
        or "." in equation
        or any(len(set(part)) != len(part) for part in (*parts, out))
    ):
        raise NotThisFormError("{} is the einsum {}", node.name, equation)
    left, right = parts
    batch = [axis for axis in out if axis in left and axis in right]
    rows, columns = ([axis for axis in out if axis in part and axis not in batch] for part in parts)
    inner = [axis for axis in left if axis in right and axis not in out]
    if (
        not len(rows) == len(columns) == len(inner) == 1
        or len(left) != len(batch) + 2
        or len(right) != len(batch) + 2
    ):
        raise NotThisFormError("{} is the einsum {}, which is no product of matrices", node.name, equation)
    assert isinstance(values, (list, tuple))
    shape = tensor_of(node).shape
    return MatchedProduct(
        left=values[0],  # type: ignore[arg-type]
        right=values[1],  # type: ignore[arg-type]
        lead=tuple(shape[out.index(axis)] for axis in batch),
        left_axes=_order(left, [*batch, *rows, *inner]),
        right_axes=_order(right, [*batch, *columns, *inner]),
        right_rows=True,
        out_axes=_order("".join([*batch, *rows, *columns]), list(out)),
    )


def _order(axes: str, wanted: Sequence[str]) -> tuple[int, ...] | None:
    order = tuple(axes.index(axis) for axis in wanted)
    return None if order == tuple(range(len(order))) else order


def ordered(value: Operand, axes: tuple[int, ...] | None) -> Operand:
    """A value with its axes in another order."""
    return value if axes is None else value.then(aten.permute.default, list(axes))


def permuted(axes: tuple[int, ...] | None) -> tuple[AxisStep, ...]:
    """Steps that put axes in another order."""
    return () if axes is None else (AxisStep(aten.permute.default, (list(axes),)),)
