"""Our linears in 8 bits and in bf16 with what lies between and behind them, as one call each: an MLP, or a
linear with its residual sum, and the LayerNorm of that. Those before an attention of bf16 give bf16.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import fx
from torch.utils import _pytree as pytree

from effcompile.backends.torch.edit_attentions import SITE
from effcompile.backends.torch.followers import FOLLOWED
from effcompile.ir.program import Program, dtype_of, shape_of
from effcompile.ops import bf16_mlp, int8_mlp
from effcompile.ops.add_norm import add_layer_norm
from effcompile.ops.bf16_attention import bf16_attention
from effcompile.ops.bf16_linear import bf16_linear
from effcompile.ops.int8_linear import int8_linear
from effcompile.sites.parts import add_norms, argument

__all__ = ["FIRST", "NORM", "fuse_chains", "narrow_projections"]

aten = torch.ops.aten
#: In the meta of a chain: the sites of its first linear, where it has two, and of its norm; in that of a
#: LayerNorm of its own: its site.
FIRST, NORM = "effcompile_first", "effcompile_norm"


@dataclass(frozen=True, slots=True)
class _Kind:
    """Linears that have chains: the names of a linear's arguments, what it is with something behind it, and
    two of them; the module that knows why there is no kernel, and whether it pays for so many rows.
    """

    names: tuple[str, ...]
    residual: Callable[..., object]
    mlp: Callable[..., object]
    kernel: ModuleType

    def arguments(self, node: fx.Node) -> tuple[fx.node.Argument, ...]:
        return tuple(argument(node, name) for name in self.names)  # type: ignore[misc]


_KINDS = {
    int8_linear.default: _Kind(
        ("x", "weight", "scales", "bias"), int8_mlp.int8_linear_residual.default, int8_mlp.int8_mlp.default,
        int8_mlp,
    ),
    bf16_linear.default: _Kind(
        ("x", "weight", "n", "bias"), bf16_mlp.bf16_linear_residual.default, bf16_mlp.bf16_mlp.default,
        bf16_mlp,
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Chain:
    """A linear, the one that alone makes its input, and what alone reads it and adds to it; one of these two
    is there.
    """

    last: fx.Node
    first: fx.Node | None
    behind: fx.Node | None

    def place(self, graph: fx.Graph) -> fx.Node:
        """The call of it, in their stead."""
        end = self.behind or self.last
        behind, kind = self._behind(), _KINDS[self.last.target]  # type: ignore[index]
        with graph.inserting_before(end):
            if self.first is None:
                node = graph.call_function(kind.residual, (*kind.arguments(self.last), *behind))
            else:
                after = str(argument(self.first, "after"))
                args = (*kind.arguments(self.first), after, *kind.arguments(self.last)[1:], *behind)
                node = graph.call_function(kind.mlp, args)
        node.meta = {**end.meta, **self._told()}
        end.replace_all_uses_with(node)
        for old in (self.behind, self.last, self.first):
            if old is not None:
                graph.erase_node(old)
        return node

    def _behind(self) -> tuple[fx.node.Argument, ...]:
        """The residual, and of a LayerNorm weight, bias and epsilon."""
        if self.behind is None:
            return ()
        left, right, *norm = self.behind.args
        return (right if left is self.last else left, *norm)

    def _told(self) -> dict[str, object]:
        """Which sites these are."""
        told = {SITE: self.last.meta[SITE]}
        if self.first is not None:
            told |= {
                key: self.first.meta[of]
                for key, of in ((FIRST, SITE), (FOLLOWED, FOLLOWED))
                if of in self.first.meta
            }
        if self.behind is not None and SITE in self.behind.meta:
            told[NORM] = self.behind.meta[SITE]
        return told


def fuse_chains(program: Program) -> None:
    """Every chain, where there is a kernel for it and rows are enough, in place."""
    there = {kind for node in program.graph.nodes if (kind := _KINDS.get(node.target)) is not None}
    kinds = {kind for kind in there if kind.kernel.fallback_reason() is None}  # which compiles them
    if not kinds:
        return
    for site in add_norms(program):  # their sums may go
        site.node.meta[NORM] = site.site
    for node in list(program.graph.nodes):
        kind = _KINDS.get(node.target)
        if kind not in kinds or argument(node, "after") != "none":
            continue
        if not _is_first(node) and kind.kernel.pays(math.prod(shape_of(node)[:-1])):
            chain = _Chain(node, _first_of(node), _behind(node))
            if chain.first is not None or chain.behind is not None:
                chain.place(program.graph)


def narrow_projections(program: Program) -> None:
    """Our linears that attentions of bf16 alone read, through views, give bf16, in place: what the
    attention would round to.
    """
    read: dict[fx.Node, list[fx.Node]] = {}
    for attention in program.calls(bf16_attention.default):
        for source in _reads(attention):
            read.setdefault(source, []).append(attention)
    fit = {node for node in read if node.target in _KINDS and _ends(node) <= set(read[node])}
    while beside := {node for node in fit if not all(_reads(attention) <= fit for attention in read[node])}:
        fit -= beside  # what an attention reads is all of one dtype
    for node in fit:
        # by its place, as torch.export writes it: what is opened again is the same call
        *others, _ = (argument(node, each.name) for each in node.target._schema.arguments)  # type: ignore[union-attr]
        node.args, node.kwargs = (*others, True), {}  # type: ignore[arg-type]
        _retype(node)


def _reads(attention: fx.Node) -> set[fx.Node]:
    """What makes the query, key and value of an attention."""
    return {_seen_through(source) for source in attention.args[:3]}


#: What only looks at a tensor in another way.
_VIEWS = (
    aten.view.default, aten.reshape.default, aten.transpose.int, aten.permute.default, aten.slice.Tensor,
    aten.split_with_sizes.default, aten.split.Tensor, aten.chunk.default, operator.getitem,
    aten.unsqueeze.default,
)  # fmt: skip


def _seen_through(node: fx.node.Argument) -> fx.Node:
    """What a chain of views looks at."""
    assert isinstance(node, fx.Node)
    return _seen_through(node.args[0]) if node.target in _VIEWS else node


def _ends(node: fx.Node) -> set[fx.Node]:
    """Who reads a node, or views of it."""
    return {end for user in node.users for end in (_ends(user) if user.target in _VIEWS else {user})}


def _retype(node: fx.Node) -> None:
    """A node and its views known as bf16."""
    node.meta = {
        **node.meta,
        "val": pytree.tree_map_only(torch.Tensor, lambda t: t.bfloat16(), node.meta["val"]),
    }
    for user in node.users:
        if user.target in _VIEWS:
            _retype(user)


def _only_user(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _first_of(node: fx.Node) -> fx.Node | None:
    """One of its kind."""
    x = node.args[0]
    return x if isinstance(x, fx.Node) and x.target is node.target and len(x.users) == 1 else None


def _is_first(node: fx.Node) -> bool:
    """Whether it is so of another one."""
    user = _only_user(node)
    return user is not None and user.target is node.target and _first_of(user) is node


def _behind(node: fx.Node) -> fx.Node | None:
    """A residual sum that alone reads a linear, with its LayerNorm where both are one; no sum that a compiler
    will fuse with a LayerNorm of its own.
    """
    user = _only_user(node)
    if user is None or user.target not in (add_layer_norm.default, aten.add.Tensor):
        return None
    others = [other for other in user.args[:2] if other is not node]
    if len(others) != 1 or not isinstance(others[0], fx.Node) or user.kwargs:
        return None
    alike = shape_of(others[0]) == shape_of(node) and dtype_of(others[0]) == dtype_of(node) == torch.float32
    reader = _only_user(user)
    split = user.target is aten.add.Tensor and reader is not None and reader.target is aten.layer_norm.default
    return user if alike and not split else None
