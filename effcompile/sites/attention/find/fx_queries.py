"""Small questions about aten graphs: which operators only move or copy, who reads a value, what number a node
is.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx

from effcompile.core.types import Value
from effcompile.ir.program import ancestors
from effcompile.sites.attention.find.normal_form import same, same_shape

aten = torch.ops.aten


def overloads(*names: str) -> frozenset[Any]:
    """Operators by `name.overload`; those that this torch lacks are left out."""
    pairs = (name.split(".") for name in names)
    return frozenset(
        getattr(getattr(aten, n), o) for n, o in pairs if hasattr(aten, n) and hasattr(getattr(aten, n), o)
    )


COPIES = overloads("clone.default", "contiguous.default", "alias.default", "lift_fresh_copy.default")
CASTS = overloads(
    "to.dtype", "to.dtype_layout", "to.device", "to.other", "_to_copy.default", "type_as.default"
) | {torch.ops.prims.convert_element_type.default}
#: Keep the elements in their order.
RESHAPES = overloads(
    "view.default", "reshape.default", "_unsafe_view.default", "flatten.using_ints", "unflatten.int",
    "unsqueeze.default", "squeeze.default", "squeeze.dim", "squeeze.dims", "view_as.default",
    "reshape_as.default",
)  # fmt: skip
ASSERTS = overloads("_assert_tensor_metadata.default", "_assert_scalar.default", "_assert_async.msg")
#: Results that depend on the shape and dtype of an operand, not on its values.
SHAPE_ONLY = overloads(
    "sym_size.int", "new_ones.default", "new_zeros.default", "new_full.default", "new_empty.default",
    "zeros_like.default", "ones_like.default", "full_like.default", "empty_like.default",
)  # fmt: skip
FILLS = overloads("masked_fill.Scalar", "masked_fill_.Scalar", "masked_fill.Tensor", "masked_fill_.Tensor")
WHERES = overloads("where.self", "where.ScalarOther", "where.ScalarSelf", "where.Scalar")
ZEROS = overloads("zeros.default", "zeros_like.default", "new_zeros.default")
DROPOUTS = overloads("dropout.default", "dropout_.default")


def source_of(node: fx.Node) -> fx.Node | None:
    """The first operand, if it is a value."""
    return node.args[0] if node.args and isinstance(node.args[0], fx.Node) else None


def argument(node: fx.Node, position: int, name: str, default: object = None) -> Value:
    """An argument given by position or by name."""
    return node.args[position] if len(node.args) > position else node.kwargs.get(name, default)


def moves_nothing(node: fx.Node) -> bool:
    """True for a copy, or a view, slice or expansion to the shape it has already: the value stays
    what it is.
    """
    source = source_of(node)
    if source is None:
        return False
    mine, other = node.meta.get("val"), source.meta.get("val")
    if not isinstance(mine, Tensor) or not isinstance(other, Tensor) or mine.dtype != other.dtype:
        return False
    if node.target in COPIES | CASTS:
        return True
    kept = node.target in RESHAPES or node.target in (aten.expand.default, aten.slice.Tensor)
    return kept and same_shape(mine.shape, other.shape)


def swaps_last_two(node: fx.Node) -> bool:
    """True for a transpose of the last two axes."""
    val = node.meta.get("val")
    if not isinstance(val, Tensor) or val.ndim < 2:
        return False
    n = val.ndim
    if node.target is aten.transpose.int:
        return sorted(int(d) % n for d in node.args[1:3]) == [n - 2, n - 1]  # type: ignore[arg-type]
    if node.target is aten.permute.default:
        return [d % n for d in node.args[1]] == [*range(n - 2), n - 1, n - 2]  # type: ignore[union-attr, operator]
    return node.target is aten.mT.default or (
        n == 2 and node.target in (aten.t.default, aten.numpy_T.default)
    )


def live_nodes(graph: fx.Graph) -> set[fx.Node]:
    """What the output, or an effect, depends on. Asserts are no effect here."""
    return ancestors(
        n
        for n in graph.nodes
        if n.op == "output" or (n.op == "call_function" and n.target not in ASSERTS and n.is_impure())
    )


def tensor_behind(node: fx.Node) -> Tensor | None:
    """The parameter, buffer or constant of a get_attr node."""
    value: Any = node.graph.owning_module
    for part in str(node.target).split("."):
        value = getattr(value, part, None)
    return value if node.op == "get_attr" and isinstance(value, Tensor) else None


def number(value: object) -> float | None:
    """The value of a number, or of a one-element tensor made of numbers and buffers only; None where it is
    not known.
    """
    if isinstance(value, (int, float)):
        return float(value)
    if not isinstance(value, fx.Node):
        return None
    try:
        found = _evaluated(value, 16)
        return (
            float(found)
            if isinstance(found, (int, float))
            else float(found.item())
            if found.numel() == 1
            else None
        )
    except (_NotConstantError, RuntimeError, TypeError, ValueError):  # fake and meta tensors have no value
        return None


class _NotConstantError(Exception):
    """A value is not made of numbers and buffers alone."""


def _evaluated(node: fx.Node, depth: int) -> Value:
    val = node.meta.get("val")
    if depth == 0 or (isinstance(val, Tensor) and any(not same(size, 1) for size in val.shape)):
        raise _NotConstantError
    if node.op == "get_attr":
        tensor = tensor_behind(node)
        if tensor is None or isinstance(tensor, torch.nn.Parameter):
            raise _NotConstantError
        return tensor
    pure = (
        node.op == "call_function"
        and hasattr(node.target, "_schema")
        and (not node.is_impure() or node.target is aten.detach_.default)
    )
    if not pure and node.target is not operator.getitem:
        raise _NotConstantError
    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda n: _evaluated(n, depth - 1))
    with torch.no_grad():
        return node.target(*args, **kwargs)  # type: ignore[operator]


def root_of(node: fx.Node) -> fx.Node:
    """The value whose memory a view reads, as far as plain views tell."""
    while (source := source_of(node)) is not None and (node.target in RESHAPES or node.target in VIEWS):
        node = source
    return node


VIEWS = overloads(
    "transpose.int",
    "permute.default",
    "expand.default",
    "slice.Tensor",
    "select.int",
    "alias.default",
    "t.default",
)


def mutated(node: fx.Node) -> Iterator[fx.Node]:
    """The values that a call writes to."""
    schema = getattr(node.target, "_schema", None)
    for position, declared in enumerate(schema.arguments if schema is not None else ()):
        value = argument(node, position, declared.name)
        if declared.alias_info is not None and declared.alias_info.is_write and isinstance(value, fx.Node):
            yield value


class Learned:
    """Which values depend on parameters or activations, so that they cannot be known without running the
    model.
    """

    def __init__(self, graph: fx.Graph, activations: set[fx.Node]) -> None:
        self._of: dict[fx.Node, bool] = {}
        for node in graph.nodes:
            if node.op == "get_attr":
                self._of[node] = isinstance(tensor_behind(node), torch.nn.Parameter)
            elif node.op == "placeholder":
                self._of[node] = node in activations or bool(
                    getattr(node.meta.get("val"), "requires_grad", False)
                )
            elif node.target not in SHAPE_ONLY:
                self._of[node] = any(self._of[source] for source in node.all_input_nodes)
            else:
                self._of[node] = False
            for written in mutated(node) if node.op == "call_function" and self._of[node] else ():
                self._of[written] = self._of[root_of(written)] = True

    def kind(self, node: fx.Node) -> str:
        """Says "bias" if the value depends on them, else "mask"."""
        return "bias" if self._of[node] or self._of[root_of(node)] else "mask"


def activations(graph: fx.Graph) -> set[fx.Node]:
    """Floating inputs that linears, convolutions, norms or products read: images, features, embeddings; not
    masks.
    """
    heavy = overloads(
        "linear.default",
        "addmm.default",
        "matmul.default",
        "bmm.default",
        "layer_norm.default",
        "embedding.default",
    )
    heavy |= overloads(
        "conv1d.default",
        "conv2d.default",
        "conv2d.padding",
        "conv3d.default",
        "convolution.default",
        "mm.default",
    )
    found: set[fx.Node] = set()
    todo = [
        s for n in graph.nodes if n.target in heavy for s in (n.args[0], n.args[1]) if isinstance(s, fx.Node)
    ]
    seen: set[fx.Node] = set()
    while todo:
        node = todo.pop()
        if node in seen or node.target in SHAPE_ONLY:
            continue
        seen.add(node)
        val = node.meta.get("val")
        if node.op == "placeholder" and isinstance(val, Tensor) and val.is_floating_point():
            found.add(node)
        todo += node.all_input_nodes if not _is_softmax(node) else []
    return found


def _is_softmax(node: fx.Node) -> bool:
    return node.target in SOFTMAXES


SOFTMAXES = overloads("softmax.int", "_softmax.default", "special_softmax.int", "_safe_softmax.default")
