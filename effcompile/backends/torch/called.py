"""A graph for a CPU as inference calls it: by functions of Python's own, with no dispatcher between."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.node import Argument

from effcompile.backends.torch.direct import direct
from effcompile.backends.torch.kept_by_sizes import kept_by_sizes
from effcompile.backends.torch.pack import attribute
from effcompile.backends.torch.plain import on_cpu, without_dispatcher
from effcompile.backends.torch.tapes import with_tapes
from effcompile.backends.torch.tidy import sizes
from effcompile.core.torch_compat_operators import operators_are_watched
from effcompile.core.types import Forward
from effcompile.ir.program import dtype_of
from effcompile.ops import rows_native
from effcompile.ops.add_norm import add_layer_norm_on_cpu
from effcompile.ops.bf16_attention import HeldTiles, bf16_attention_on_cpu
from effcompile.ops.bf16_linear import HeldHalves, bf16_linear_on_cpu
from effcompile.ops.bf16_mlp import HeldHalvesMlp, bf16_linear_residual_on_cpu, bf16_mlp_on_cpu
from effcompile.ops.fp32_attention import HeldAttention, fp32_attention_on_cpu
from effcompile.ops.fp32_linear import HeldFloats, fp32_linear_on_cpu
from effcompile.ops.int8_attention import HeldBytes, int8_attention_on_cpu
from effcompile.ops.int8_held import HeldLinear, HeldMlp, HeldWords
from effcompile.ops.int8_linear import int8_linear_on_cpu
from effcompile.ops.int8_mlp import int8_linear_residual_on_cpu, int8_mlp_on_cpu
from effcompile.ops.int13_linear import int13_linear_on_cpu
from effcompile.ops.rows_held import HeldGate, HeldNorm, HeldRmsNorm, HeldTurn
from effcompile.sites.parts import argument

aten = torch.ops.aten
_LINEARS: dict[object, type[HeldLinear | HeldWords | HeldFloats | HeldHalves]] = {
    bf16_linear_on_cpu: HeldHalves,
    int8_linear_on_cpu: HeldLinear,
    int13_linear_on_cpu: HeldWords,
    fp32_linear_on_cpu: HeldFloats,
}

#: One linear with what is behind it, and two.
_RESIDUALS: dict[object, type[HeldMlp | HeldHalvesMlp]] = {
    int8_linear_residual_on_cpu: HeldMlp,
    bf16_linear_residual_on_cpu: HeldHalvesMlp,
}
_MLPS: dict[object, type[HeldMlp | HeldHalvesMlp]] = {
    int8_mlp_on_cpu: HeldMlp,
    bf16_mlp_on_cpu: HeldHalvesMlp,
}

_ATTENTIONS: dict[object, type[HeldAttention]] = {
    fp32_attention_on_cpu: HeldAttention,
    bf16_attention_on_cpu: HeldTiles,
    int8_attention_on_cpu: HeldBytes,
}


def called(module: fx.GraphModule, keeps: int = 0) -> Forward:
    """The module; on a CPU what it computes takes less between its kernels, whose products leave Python's and
    torch's code out of the caches: 2.3 of 56 ms of BERT-base 1x128 in 8 bits.

    `keeps`: bytes of what follows from the sizes of a call alone that may be kept for the next call.
    """
    return Called(module, keeps) if on_cpu(module.graph) else module


class Called:
    """`graph`: as the dispatcher has it. That runs where a mode watches operators (counts, traces, fake
    tensors) or an input is a tensor of another class, none of which sees plain functions.
    """

    def __init__(self, module: fx.GraphModule, keeps: int = 0) -> None:
        self.graph, self._module = module.graph, module
        own = fx.GraphModule(module, copy.deepcopy(module.graph))
        # first: what follows writes into what was made within the call
        self._kept = kept_by_sizes(own, keeps) if keeps else None
        self._direct = direct(with_tapes(_held(without_dispatcher(own))))

    @property
    def kept_bytes(self) -> int:
        """Bytes that are kept from one call to the next."""
        return 0 if self._kept is None else self._kept.nbytes

    def __call__(self, *args: object, **kwargs: object) -> object:
        watched = operators_are_watched() or not all(
            type(given) is torch.Tensor or not isinstance(given, torch.Tensor)
            for given in (*args, *kwargs.values())
        )
        return (self._module if watched else self._direct)(*args, **kwargs)


def _held(module: fx.GraphModule) -> fx.GraphModule:
    """The module whose linears and norms hold their weights, where these are the module's own."""
    for node in module.graph.nodes:
        if node.target in _LINEARS and not node.kwargs:
            if _are_own(weights := node.args[1:4]):
                held: tuple[Any, ...] = (*_values(module, weights), *node.args[4:])
                node.target = _LINEARS[node.target](*held)
                node.args = node.args[:1]
        elif node.target in _RESIDUALS and not node.kwargs:
            last, (residual, *norm) = node.args[1:4], node.args[4:]
            if _are_own((*last, *norm)):
                _hold_mlp(module, node, _RESIDUALS[node.target], None, "none", last, residual, norm)
        elif node.target in _MLPS and not node.kwargs:
            first, after, (*last, residual) = node.args[1:4], node.args[4], _padded(node.args[5:9], 4)
            if _are_own((*first, *last, *node.args[9:])):
                _hold_mlp(module, node, _MLPS[node.target], first, str(after), last, residual, node.args[9:])
        elif node.target in _ATTENTIONS and not node.kwargs:
            _hold_attention(node)
        elif node.target is add_layer_norm_on_cpu and not node.kwargs and _are_own(norm := node.args[2:]):
            node.target, node.args = HeldNorm(*_values(module, norm)), node.args[:2]  # type: ignore[arg-type]
        elif node.target is aten.layer_norm.default and _is_last(node) and _are_own(norm := _norm_of(node)):
            node.target, node.args = HeldNorm(*_values(module, norm)), node.args[:1]  # type: ignore[arg-type]
            node.kwargs = {}
        elif node.target in (rows_native.rms_norm, rows_native.rms_norm_alone) and not node.kwargs:
            _hold_rms_norm(module, node)
        elif node.target is rows_native.swiglu and not node.kwargs:
            node.target = HeldGate()
    module.graph.eliminate_dead_code()
    return module


def _hold_rms_norm(module: fx.GraphModule, node: fx.Node) -> None:
    *given, weight, eps = node.args
    if None not in given and _are_own((weight, eps)):  # else its second result is x itself
        node.target = HeldRmsNorm(*_values(module, (weight, eps)), pair=len(given) > 1)  # type: ignore[arg-type]
        node.args = tuple(given)


def _is_last(norm: fx.Node) -> bool:
    """Whether a LayerNorm in fp32 is over the last axis alone."""
    return len(argument(norm, "normalized_shape")) == 1 and dtype_of(norm) == torch.float32  # type: ignore[arg-type]


def _norm_of(norm: fx.Node) -> tuple[Argument, ...]:
    weight, bias, eps = (argument(norm, name) for name in ("weight", "bias", "eps"))
    return weight, bias, eps  # type: ignore[return-value]


def _hold_mlp(
    module: fx.GraphModule,
    node: fx.Node,
    held: type[HeldMlp | HeldHalvesMlp],
    first: Sequence[Argument] | None,
    after: str,
    last: Sequence[Argument],
    residual: Argument,
    norm: Sequence[Argument],
) -> None:
    holds = None if first is None else _values(module, first)
    node.target = held(holds, after, _values(module, last), _values(module, _padded(norm, 3)))  # type: ignore[arg-type]
    node.args = (node.args[0], residual)


def _hold_attention(node: fx.Node) -> None:
    """An attention of heads that are views of what linears made, and whose result is seen as they make it."""
    query, key, value, mask, causal, scale = _padded(node.args, 6)
    if query is key:  # one rotation cannot become two
        return
    sources = [_side_by_side(each) for each in (_unturned(query), _unturned(key), value)]
    same = _only_user(node, aten.reshape.default)
    result = node if same is None or sizes(same) != sizes(node) else same
    turned = _only_user(result, aten.transpose.int)
    copied = None if turned is None else _only_user(turned, aten.clone.default) or turned
    joined = None if copied is None or turned.args[1:] != (1, 2) else _only_user(copied, aten.reshape.default)  # type: ignore[union-attr]
    found = [each for each in sources if each is not None]
    if joined is None or len(found) < len(sources):
        return
    (q, heads, width), (k, groups, _), (v, _, wide) = found
    batch, _, rows, _ = sizes(node)
    if sizes(joined) == (batch, rows, str(heads * wide)):
        q, factor = _unscaled(q) if query is _unturned(query) else (q, 1.0)
        q, k = _turned(query, q, heads, width), _turned(key, k, groups, width)
        whole = factor * (width**-0.5 if scale is None else scale)  # type: ignore[operator]
        joined.target = _ATTENTIONS[node.target](heads, groups, width, wide, bool(causal), whole)  # type: ignore[arg-type]
        joined.args, joined.kwargs = (q, k, v, mask), {}


def _unturned(heads: Argument) -> Argument:
    """Heads before a rotation that one attention alone reads."""
    turns = isinstance(heads, fx.Node) and heads.target is rows_native.rotary and len(heads.users) == 1
    return heads.args[0] if turns and not any(heads.args[3:]) and not heads.kwargs else heads  # type: ignore[union-attr]


def _turned(rotation: Argument, source: fx.Node, heads: int, width: int) -> fx.Node:
    """A rotation of heads as they lie in a value; the value where there is none."""
    if _unturned(rotation) is rotation:
        return source
    assert isinstance(rotation, fx.Node)
    rotation.target, rotation.args = HeldTurn(heads, width), (source, *rotation.args[1:3])
    rotation.meta = {**rotation.meta, "val": source.meta["val"]}
    return rotation


def _unscaled(query: fx.Node) -> tuple[fx.Node, float]:
    """A value before a model multiplies it with a number, and that number."""
    source, *factor = query.args
    scaled = (
        query.target is aten.mul.Tensor and isinstance(source, fx.Node) and dtype_of(source) == torch.float32
    )
    return (source, factor[0]) if scaled and isinstance(factor[0], float) else (query, 1.0)  # type: ignore[return-value]


def _side_by_side(heads: Argument) -> tuple[fx.Node, int, int] | None:
    """(B, S, H·D), H and D of heads (B, H, S, D) that are a view of it."""
    if not isinstance(heads, fx.Node) or heads.target is not aten.transpose.int or heads.args[1:] != (1, 2):
        return None
    apart = heads.args[0]
    if not isinstance(apart, fx.Node) or apart.target is not aten.reshape.default or len(sizes(apart)) != 4:
        return None
    source, (*outer, count, width) = apart.args[0], sizes(apart)
    if not isinstance(source, fx.Node) or not (count.isdecimal() and width.isdecimal()):
        return None
    joined = (*outer, str(int(count) * int(width)))
    return (source, int(count), int(width)) if sizes(source) == joined else None


def _only_user(node: fx.Node, target: object) -> fx.Node | None:
    user, *others = node.users
    return user if not others and user.target is target else None


def _padded(given: Sequence[Argument], count: int) -> tuple[Argument, ...]:
    return *given, *(None,) * (count - len(given))


def _are_own(given: Sequence[Argument]) -> bool:
    """Whether they are numbers, absent or the module's own tensors."""
    return all(each.op == "get_attr" for each in given if isinstance(each, fx.Node))


def _values(module: fx.GraphModule, given: Sequence[Argument]) -> tuple[object, ...]:
    """What they are; tensors as others of the same memory, whose addresses hold while these are held."""
    found = (attribute(module, str(each.target)) if isinstance(each, fx.Node) else each for each in given)
    return tuple(each.detach() if isinstance(each, torch.Tensor) else each for each in found)
