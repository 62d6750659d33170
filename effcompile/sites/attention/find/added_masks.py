"""Masks as graphs write them: numbers added to the scores that are 0 where a bool tells so, and finfo.min
elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from effcompile.sites.attention.find.fx_queries import (
    FILLS,
    WHERES,
    ZEROS,
    argument,
    aten,
    moves_nothing,
    number,
    source_of,
)
from effcompile.sites.attention.find.normal_form import same_shape, tensor_of

HIDING = -1e4  # a fill above this is no mask: exp(fill − maximum) is not 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AddedMask:
    """`fill` where `seen` is `hidden`; elsewhere `rest`, or 0 if that is None."""

    seen: fx.Node
    hidden: bool
    fill: float
    rest: fx.Node | None


def added_mask(node: fx.Node) -> AddedMask | None:
    """A value as such a mask; None if it is none.

    `fill` is so low that any score added to it is lost in rounding.
    """
    while moves_nothing(node) and (source := source_of(node)) is not None:
        node = source
    if node.target is aten.add.Tensor and argument(node, 2, "alpha", 1) == 1:
        return _of_sum(node)
    if node.target in FILLS:
        seen, fill, rest, hidden = node.args[1], number(node.args[2]), node.args[0], True
    elif node.target in WHERES:
        hidden = number(node.args[2]) in (None, 0.0)
        seen, fill, rest = node.args[0], number(node.args[1 if hidden else 2]), node.args[2 if hidden else 1]
    else:
        return None
    absorbs = fill is not None and fill <= torch.finfo(tensor_of(node).dtype).min / 2
    if not absorbs or not isinstance(seen, fx.Node) or fill is None:
        return None
    if number(rest) == 0.0 or (isinstance(rest, fx.Node) and rest.target in ZEROS):
        covers = same_shape(tensor_of(seen).shape, tensor_of(node).shape)
        return AddedMask(seen=seen, hidden=hidden, fill=fill, rest=None) if covers else None
    return AddedMask(seen=seen, hidden=hidden, fill=fill, rest=rest) if isinstance(rest, fx.Node) else None


def _of_sum(node: fx.Node) -> AddedMask | None:
    """mask + bias, added as one."""
    for one, other in (node.args[:2], node.args[1::-1]):
        if isinstance(one, fx.Node) and isinstance(other, fx.Node):
            mask = added_mask(one)
            if mask is not None and mask.rest is None:
                return AddedMask(seen=mask.seen, hidden=mask.hidden, fill=mask.fill, rest=other)
    return None
