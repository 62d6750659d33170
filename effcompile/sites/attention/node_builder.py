"""New nodes in a graph: before a place, with shapes, and with the module names of that place."""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from effcompile.core import torch_compat
from effcompile.core.types import Args, Arguments, Value
from effcompile.ir.program import shape_of
from effcompile.sites.attention.find.fx_queries import ASSERTS, RESHAPES, VIEWS, aten
from effcompile.sites.attention.find.normal_form import (
    Fill,
    NotThisFormError,
    Operand,
    SizeOf,
    Target,
    Term,
    faking,
    tensor_of,
)

Key = tuple[Any, ...]


class Emitter:
    """Puts nodes before a place.

    What it made at an earlier place of the graph it uses again: layers share their masks.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.dynamic = any(node.target is aten.sym_size.int for node in graph.nodes) or any(
            map(_is_symbolic, graph.nodes)
        )
        self._place: fx.Node | None = None
        self._made: dict[Key, fx.Node] = {}
        self.now: dict[fx.Node, fx.Node] = {}  # what stands for a value that was replaced

    def before(self, place: fx.Node) -> Emitter:
        self._place = place
        return self

    def call(
        self, target: Target, args: Sequence[Value], kwargs: Arguments | None = None, name: str | None = None
    ) -> fx.Node:
        """A call with its shape; one made before with the same arguments, if there is one."""
        assert self._place is not None, "say where first: before(place)"
        args, kwargs = tuple(self._resolved(arg) for arg in args), kwargs or {}
        key = (target, _hashable(args), _hashable(kwargs))
        made = self._made.get(key)
        if made is not None and made < self._place:
            return made
        with self.graph.inserting_before(self._place):
            node = self.graph.create_node("call_function", target, args, kwargs, name=name)
        _copy_origin(self._place, node)
        node.meta["val"] = _value(target, args, kwargs)
        self._made[key] = node
        return node

    def inline(self, function: Callable[..., object], *nodes: fx.Node) -> fx.Node:
        """What a function made of aten operators and numbers computes of these values."""
        traced = fx.symbolic_trace(function).graph
        made: dict[fx.Node, Any] = dict(zip(traced.find_nodes(op="placeholder"), nodes, strict=True))
        for node in (n for n in traced.nodes if n.op == "call_function"):
            made[node] = self.call(node.target, fx.map_arg(node.args, made.__getitem__))
        (result,) = fx.map_arg(traced.output_node().args, made.__getitem__)
        assert isinstance(result, fx.Node), "an operator made it"
        return result

    def no_longer_than(self, node: fx.Node, axis: int, size: int) -> fx.Node:
        """Whether an axis of a value is at most so long: a bool of no axes."""
        length = self.call(aten.sym_size.int, (node, axis))
        return self.call(
            aten.le.Scalar,
            (self.call(aten.new_full.default, (node, [], length), {"dtype": torch.int64}), size),
        )

    def restride(self, node: fx.Node) -> None:
        """Follow other strides than those that the readers of `node` were traced with: shapes anew, `view` as
        `reshape`.
        """
        todo = [node]
        while todo:
            for user in todo.pop().users:
                if user.op != "call_function" or user.target in ASSERTS:
                    continue
                viewing = user.target in RESHAPES or user.target in VIEWS
                if user.target in (aten.view.default, aten._unsafe_view.default):
                    user.target = aten.reshape.default
                before = _strides(user.meta.get("val"))
                user.meta["val"] = _value(user.target, user.args, dict(user.kwargs))  # type: ignore[arg-type]
                if viewing or _strides(user.meta["val"]) != before:
                    todo.append(user)

    def put(self, value: Operand) -> fx.Node:
        """The node of an operand, its steps made."""
        node = self._own(value.node)
        for step in value.steps:
            node = self.call(step.target, (node, *step.args))
        return node

    def additive(self, edits: Sequence[Term | Fill], dtype: torch.dtype) -> fx.Node | None:
        """All edits as one value to be added to the scores; None: there are none.

        Fills that overwrite do so.
        """
        total: fx.Node | None = None
        for edit in edits:
            value = self._as(self.put(edit.value), torch.bool if isinstance(edit, Fill) else dtype)
            if isinstance(edit, Fill) and not edit.added and total is not None:
                total = self._filled(edit, value, total, dtype)
                continue
            if isinstance(edit, Fill):
                zeros = self.call(aten.zeros_like.default, (value,), {"dtype": dtype})
                value = self._filled(edit, value, zeros, dtype)
            elif edit.factor != 1.0:
                value = self.call(aten.mul.Tensor, (value, edit.factor))
            total = value if total is None else self.call(aten.add.Tensor, (total, value))
        return total

    def _own(self, node: fx.Node) -> fx.Node:
        """What stands for a value here; one of the graph that this was copied from has its name.

        Raises:
            NotThisFormError: no value of this name is left.
        """
        if node.graph is not self.graph:
            here = self._by_name.get(node.name)
            if here is None:
                raise NotThisFormError("{}, which its mask is made of, is no longer computed", node.name)
            node = here
        return self.now.get(node, node)

    @functools.cached_property
    def _by_name(self) -> dict[str, fx.Node]:
        return {node.name: node for node in self.graph.nodes}

    def _filled(self, edit: Fill, mask: fx.Node, base: fx.Node, dtype: torch.dtype) -> fx.Node:
        fill = edit.fill if edit.fill == -torch.inf else max(edit.fill, torch.finfo(dtype).min)
        hidden = mask if edit.hidden else self.call(aten.logical_not.default, (mask,))
        return self.call(aten.masked_fill.Scalar, (base, hidden, fill))

    def _as(self, node: fx.Node, dtype: torch.dtype) -> fx.Node:
        return node if tensor_of(node).dtype == dtype else self.call(aten.to.dtype, (node, dtype))

    def _resolved(self, arg: object) -> Value:
        if isinstance(arg, Operand):
            return self.put(arg)
        if isinstance(arg, fx.Node):
            return self._own(arg)
        if isinstance(arg, SizeOf):
            if not self.dynamic:
                return arg.now
            size = self.call(aten.sym_size.int, (self._own(arg.node), arg.axis))
            return size if arg.divisor == 1 else self.call(operator.floordiv, (size, arg.divisor))
        return type(arg)(self._resolved(a) for a in arg) if isinstance(arg, (list, tuple)) else arg


def _strides(val: object) -> list[Args]:
    return [leaf.stride() for leaf in pytree.tree_leaves(val) if isinstance(leaf, Tensor)]


def _is_symbolic(node: fx.Node) -> bool:
    val = node.meta.get("val")
    return (
        node.op == "placeholder"
        and isinstance(val, Tensor)
        and any(isinstance(size, torch.SymInt) for size in val.shape)
    )


def _hashable(value: object) -> Value:
    if isinstance(value, dict):
        return tuple((key, _hashable(item)) for key, item in value.items())
    return (
        tuple(_hashable(item) for item in value) if isinstance(value, (list, tuple)) else (type(value), value)
    )


def _copy_origin(place: fx.Node, node: fx.Node) -> None:
    for key in ("nn_module_stack", "stack_trace", "source_fn_stack", "torch_fn", "custom"):
        if key in place.meta:
            node.meta[key] = place.meta[key]


def repeated_heads(emit: Emitter, value: fx.Node, times: int) -> fx.Node:
    """[B, K, T, D] → [B, K·times, T, D], each head `times` in a row."""
    single = emit.call(aten.unsqueeze.default, (value, 2))
    return emit.call(
        aten.flatten.using_ints, (emit.call(aten.expand.default, (single, [-1, -1, times, -1, -1])), 1, 2)
    )


def _value(target: Target, args: Args, kwargs: Arguments) -> Value:
    """The fake result."""
    nodes: list[fx.Node] = []
    fx.map_arg((args, kwargs), nodes.append)
    tensors = [
        leaf for node in nodes for leaf in pytree.tree_leaves(node.meta["val"]) if isinstance(leaf, Tensor)
    ]
    modes = {id(getattr(tensor, "fake_mode", None)) for tensor in tensors}
    mode = (
        torch_compat.fake_mode()
        if len(modes) > 1
        else faking(tensors[0])
        if tensors
        else contextlib.nullcontext()
    )
    with mode, torch.no_grad():
        given, named = fx.map_arg(
            (args, kwargs), _at_example if len(modes) > 1 else lambda node: node.meta["val"]
        )
        return target(*given, **named)


def _at_example(node: fx.Node) -> Value:
    """A fake of its own for a value: after data-dependent operators a Program's values are symbolic, before
    them they are not.
    """
    val = node.meta["val"]
    return torch.empty(shape_of(node), dtype=val.dtype, device=val.device) if isinstance(val, Tensor) else val
