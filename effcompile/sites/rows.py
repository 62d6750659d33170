"""Finds what lies between a transformer's products: RMSNorm with the residual sum before it, SwiGLU, rotary
positions.

A chain of operators is a match only if it computes what our operator does on random numbers: how a model
writes it, with or without a cast to fp32, weight left or right, does not matter. Definitions:
effcompile.ops.rows.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from effcompile.core.reasons import Reason, Unsupported
from effcompile.ir.program import Program, dtype_of, module_path, shape_of
from effcompile.ops import rows as op
from effcompile.sites.parts import ROOT

__all__ = ["ROW_SITE", "RowSite", "row_sites", "unmatched"]

aten = torch.ops.aten

#: The site that a node of ours computes, in its meta.
ROW_SITE = "effcompile_row_site"
NORM, SWIGLU, ROTARY = "rms_norm", "swiglu", "rotary"
#: Relative error up to which two orders of rounding are one computation, by dtype.
_SAME = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
_CASTS = (aten.to.dtype, aten._to_copy.default, aten.type_as.default)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSite:
    """A chain that one kernel computes.

    Attributes:
        form: NORM, SWIGLU or ROTARY. node: its result. nodes: all that the kernel takes the place of, in
            graph order, `node` last.
        inputs: x and weight; gate and up; x (B, H, S, D), cos and sin (B or 1, S, D).
        eps: of a norm. total: the residual sum that a norm is of, among `nodes`, where the kernel makes it
            too.
    """

    site: str
    form: str
    node: fx.Node
    nodes: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    eps: float = 0.0
    total: fx.Node | None = None

    @property
    def dims(self) -> tuple[int, int]:
        """(rows, columns) at the example inputs."""
        *rows, columns = shape_of(self.node)
        return math.prod(rows), columns

    @property
    def exact(self) -> bool:
        """Whether the kernel rounds where the model does: in 32 and 64 bits; narrower, it rounds once where
        the model may several times.
        """
        return dtype_of(self.node) in (torch.float32, torch.float64)


def row_sites(program: Program) -> list[RowSite]:
    """All of them in graph order, uniquely named: `model.layers.0.mlp:swiglu`. No node is in two."""
    order = {node: i for i, node in enumerate(program.graph.nodes)}
    found: list[RowSite] = []
    taken: set[fx.Node] = set()
    names: Counter[str] = Counter()
    for node in program.calls():
        match = _MATCHERS.get(node.target)
        site = match(node, order) if match else None
        if site is None or taken & set(site.nodes):
            continue
        name = f"{module_path(site.node) or ROOT}:{site.form}"
        names[name] += 1
        taken |= set(site.nodes)
        found.append(replace(site, site=name if names[name] == 1 else f"{name}#{names[name]}"))
    return found


def unmatched(program: Program, sites: Sequence[RowSite]) -> list[tuple[str, Reason]]:
    """(place, why) of the norms and gates that are none of these."""
    known = {node for site in sites for node in site.nodes}
    reasons = {
        aten.rsqrt.default: Unsupported("its 1/√ is not that of an RMSNorm with one weight per column"),
        aten.silu.default: Unsupported("its SiLU is no gate"),
    }
    return [(module_path(n) or ROOT, reasons[n.target]) for n in program.calls(*reasons) if n not in known]  # type: ignore[index]


# ------------------------------------------------------------------ the three chains

Order = Mapping[fx.Node, int]


def _norm(root: fx.Node, order: Order) -> RowSite | None:
    """From the rsqrt: backwards to x, forwards to the product with the weight."""
    shifted = _call(_argument(root, 0), aten.add.Tensor, aten.add.Scalar)
    mean = _call(_argument(shifted, 0), aten.mean.dim)
    squared = _call(_argument(mean, 0), aten.pow.Tensor_Scalar, aten.square.default, aten.mul.Tensor)
    wide = _argument(squared, 0)
    if (
        shifted is None
        or mean is None
        or squared is None
        or wide is None
        or not isinstance(shifted.args[1], float)
    ):
        return None
    x = _argument(wide, 0) if _is_cast(wide) else wide
    back = [
        node for node in (wide if wide is not x else None, squared, mean, shifted, root) if node is not None
    ]
    forth = _forward(root, shape_of(wide))
    if x is None or forth is None:
        return None
    weight, chain = forth
    return _with_total(x, weight, float(shifted.args[1]), [*back, *chain], order)


def _forward(root: fx.Node, shape: tuple[int, ...]) -> tuple[fx.Node, list[fx.Node]] | None:
    """(weight, nodes) from 1/√ to x · 1/√ · weight, with casts in between."""
    chain: list[fx.Node] = []
    node, weight = root, None
    while weight is None or (len(node.users) == 1 and _is_cast(next(iter(node.users)))):
        users = list(node.users)
        if len(users) != 1 or not (_is_cast(users[0]) or users[0].target is aten.mul.Tensor):
            return None
        if users[0].target is aten.mul.Tensor:
            other = _other(users[0], node)
            if other is None:
                return None
            weight = other if shape_of(other) == shape[-1:] else None
            if weight is None and shape_of(other) != shape:
                return None
        node = users[0]
        chain.append(node)
    return weight, chain


def _with_total(
    x: fx.Node, weight: fx.Node, eps: float, nodes: list[fx.Node], order: Order
) -> RowSite | None:
    """The norm, with the sum that it is of where that can be made beside it: nothing reads the sum before the
    norm is done.
    """
    last = nodes[-1]
    inputs, total = (x, weight), None
    if _is_sum(x) and all(user in nodes or order[user] > order[last] for user in x.users):
        a, b = x.args[:2]
        assert isinstance(a, fx.Node) and isinstance(b, fx.Node)
        inputs, total = (a, b, weight), x  # type: ignore[assignment]
    define = partial(_norm_of, eps=eps)
    return _proven(NORM, ([total] if total else []) + nodes, inputs, define, order, eps=eps, total=total)


def _norm_of(*inputs: Tensor, eps: float) -> Tensor:
    x, residual, weight = inputs if len(inputs) == 3 else (inputs[0], None, inputs[1])
    return op.rms_norm_by_torch(x, residual, weight, eps)[0]


def _gate(silu: fx.Node, order: Order) -> RowSite | None:
    """silu(gate) · up."""
    gate, users = _argument(silu, 0), list(silu.users)
    up = _other(users[0], silu) if len(users) == 1 and users[0].target is aten.mul.Tensor else None
    if gate is None or up is None or shape_of(up) != shape_of(gate) or dtype_of(up) != dtype_of(gate):
        return None
    return _proven(SWIGLU, [silu, users[0]], (gate, up), op.swiglu_by_torch, order)


def _rotation(cat: fx.Node, order: Order) -> RowSite | None:
    """x · cos + [−x₂, x₁] · sin: from the concatenation on."""
    parts = cat.args[0]
    if not isinstance(parts, (list, tuple)) or len(parts) != 2 or len(cat.users) != 1:
        return None
    negated, first = _call(parts[0], aten.neg.default), _call(parts[1], aten.slice.Tensor)
    second = _call(_argument(negated, 0), aten.slice.Tensor)
    x = _argument(first, 0)
    turned = next(iter(cat.users))
    if (
        negated is None
        or first is None
        or second is None
        or x is None
        or turned.target is not aten.mul.Tensor
        or len(turned.users) != 1
    ):
        return None
    whole = next(iter(turned.users))
    straight = _call(_other(whole, turned), aten.mul.Tensor) if whole.target is aten.add.Tensor else None
    cos, sin = _heads_apart(_other(straight, x) if straight else None), _heads_apart(_other(turned, cat))
    if straight is None or cos is None or sin is None or len(shape_of(x)) != 4:
        return None
    nodes = sorted({first, second, negated, cat, turned, straight, whole}, key=order.__getitem__)
    return _proven(ROTARY, nodes, (x, cos, sin), partial(op.rotary_by_torch, backwards=False), order)


_MATCHERS: dict[Any, Callable[[fx.Node, Order], RowSite | None]] = {
    aten.rsqrt.default: _norm,
    aten.silu.default: _gate,
    aten.cat.default: _rotation,
}


# ------------------------------------------------------------------ proof


def _proven(
    form: str,
    nodes: list[fx.Node],
    inputs: tuple[fx.Node, ...],
    define: Callable[..., Tensor],
    order: Order,
    **more: Any,
) -> RowSite | None:
    """The site, if nothing outside reads what is inside, and if the chain computes the definition on random
    numbers.
    """
    nodes = sorted(nodes, key=order.__getitem__)
    inner = set(nodes)
    shared = {more.get("total"), nodes[-1]}
    if any(not set(node.users) <= inner for node in nodes if node not in shared) or dtype_of(
        nodes[-1]
    ) != dtype_of(inputs[0]):
        return None
    if form != ROTARY and not nodes[-1].meta["val"].is_contiguous():
        # our result is, and a view that follows may rely on another order
        return None
    try:
        same = _same(nodes, inputs, define)
    except Exception:  # an argument that is a symbol, shapes that do not go together: not this chain
        return None
    return (
        RowSite(site="", form=form, node=nodes[-1], nodes=tuple(nodes), inputs=inputs, **more)
        if same
        else None
    )


def _same(nodes: Sequence[fx.Node], inputs: Sequence[fx.Node], define: Callable[..., Tensor]) -> bool:
    """Whether a chain equals its definition, on a few rows of random numbers in the model's dtypes."""
    generator = torch.Generator().manual_seed(0)
    given = [_drawn(node, generator) for node in inputs]
    values: dict[fx.Node, Any] = dict(zip(inputs, given, strict=True))
    for node in nodes:
        for source in node.all_input_nodes:
            if source not in values:  # cos and sin are read with an axis for the heads
                values[source] = values[source.args[0]].unsqueeze(1)  # type: ignore[index]
        args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
        values[node] = node.target(*args, **kwargs)  # type: ignore[operator]
    found, wanted = values[nodes[-1]], define(*given)
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        return False
    error = float((found.double() - wanted.double()).norm() / wanted.double().norm())
    return error <= _SAME.get(found.dtype, 0.0)


def _drawn(node: fx.Node, generator: torch.Generator) -> Tensor:
    """Random numbers of an input's dtype and width, with at most 3 of each leading axis."""
    shape = shape_of(node)
    few = tuple(min(size, 3) for size in shape[:-1])
    return (torch.randn(*few, shape[-1], generator=generator) + 0.5).to(dtype_of(node))


# ------------------------------------------------------------------ nodes


def _call(value: object, *targets: object) -> fx.Node | None:
    return (
        value
        if isinstance(value, fx.Node) and value.op == "call_function" and value.target in targets
        else None
    )


def _argument(node: fx.Node | None, position: int) -> fx.Node | None:
    value = (
        node.args[position]
        if node is not None and node.op == "call_function" and len(node.args) > position
        else None
    )
    return value if isinstance(value, fx.Node) else None


def _is_cast(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target in _CASTS


def _is_sum(node: fx.Node) -> bool:
    """Of two tensors of one shape and dtype."""
    if node.target is not aten.add.Tensor or node.kwargs or len(node.args) != 2:
        return False
    a, b = node.args
    return (
        isinstance(a, fx.Node)
        and isinstance(b, fx.Node)
        and a is not b
        and shape_of(a) == shape_of(b)
        and dtype_of(a) == dtype_of(b)
    )


def _other(product: fx.Node, node: fx.Node) -> fx.Node | None:
    """The other operand of a sum or product."""
    rest = [a for a in product.args[:2] if a is not node]
    return rest[0] if len(rest) == 1 and isinstance(rest[0], fx.Node) and not product.kwargs else None


def _heads_apart(node: fx.Node | None) -> fx.Node | None:
    """cos or sin (B or 1, S, D) behind its view (B or 1, 1, S, D)."""
    view = _call(node, aten.unsqueeze.default)
    source = _argument(view, 0)
    fits = view is not None and source is not None and view.args[1] in (1, -3) and len(shape_of(source)) == 3
    return source if fits else None
