"""Graphs of small modules, and a match computed from its own words: no kernel of ours takes part."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from effcompile.sites.attention.find.match import match
from effcompile.sites.attention.find.normal_form import (
    AttentionMatch,
    AxisStep,
    Operand,
    SizeOf,
    Term,
    Unmatched,
)

B, H, S, D = 2, 4, 6, 8
MIN = torch.finfo(torch.float32).min
Attend = Callable[..., Tensor]


def exported(
    module: nn.Module, *args: Tensor, dynamic: Any = None, functional: bool = False
) -> fx.GraphModule:
    """The forward as torch.export gives it, operators that write in place included; `functional`: as a
    Program has it.
    """
    program = torch.export.export(module, args, dynamic_shapes=dynamic, strict=False)
    found = (program.run_decompositions({}) if functional else program).module(check_guards=False)
    assert isinstance(found, fx.GraphModule)
    return found


def only(graph: fx.GraphModule) -> AttentionMatch:
    """The one match of a graph in which nothing is left unmatched."""
    (found,) = match(graph.graph)
    assert isinstance(found, AttentionMatch), found.reason
    return found


def refused(graph: fx.GraphModule) -> str:
    """The reason of the one softmax that is no match."""
    (found,) = match(graph.graph)
    assert isinstance(found, Unmatched), "it was matched"
    return str(found.reason)


class _Recorder(fx.Interpreter):
    """Runs a graph and keeps a copy of every value as it was when it was made."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.values: dict[fx.Node, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        self.values[n] = pytree.tree_map_only(Tensor, Tensor.clone, result)
        return result


def recorded(graph: fx.GraphModule, *args: Tensor) -> dict[fx.Node, Any]:
    """node → value when it was made, before anybody wrote to it."""
    recorder = _Recorder(copy.copy(graph))
    recorder.run(*args)
    return recorder.values


def check_words(graph: fx.GraphModule, found: AttentionMatch, *args: Tensor) -> None:
    """The match, computed as `forms.AttentionMatch` says, is the output that the graph computes."""
    values = recorded(graph, *args)
    torch.testing.assert_close(spoken(found, values), values[found.output], rtol=1e-5, atol=1e-5)


def spoken(found: AttentionMatch, values: dict[fx.Node, Any]) -> Tensor:
    q, k, v = (_value(operand, values).double() for operand in (found.q, found.k, found.v))
    times = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(times, 1), v.repeat_interleave(times, 1)
    scores = q @ k.transpose(-1, -2) * found.scale
    if found.softcap:
        scores = found.softcap * torch.tanh(scores / found.softcap)
    for edit in found.edits:
        value = _value(edit.value, values)
        if isinstance(edit, Term):
            scores = scores + edit.factor * value
        else:
            hidden = value.bool() if edit.hidden else ~value.bool()
            scores = scores.masked_fill(hidden, edit.fill)
    if found.causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    if found.sink is not None:
        sink = _value(found.sink, values)
        sink = sink[None, :, None] if sink.ndim == 1 else sink
        scores = torch.cat([scores, sink[..., None].expand(*scores.shape[:3], 1)], -1)
    weights = torch.softmax(scores, -1)[..., : v.shape[2]]
    weights = weights.nan_to_num(0.0) if found.empty == "zero" else weights
    out = (weights @ v).to(_value(found.v, values).dtype)
    return _stepped(out, found.restore, values)


def _value(operand: Operand, values: dict[fx.Node, Any]) -> Tensor:
    return _stepped(values[operand.node], operand.steps, values)


def _stepped(value: Tensor, steps: tuple[AxisStep, ...], values: dict[fx.Node, Any]) -> Tensor:
    for step in steps:
        value = step.target(value, *(_argument(arg, values) for arg in step.args))
    return value


def _argument(arg: Any, values: dict[fx.Node, Any]) -> Any:
    if isinstance(arg, SizeOf):
        return values[arg.node].shape[arg.axis] // arg.divisor
    if isinstance(arg, Operand):
        return _value(arg, values)
    if isinstance(arg, fx.Node):
        return values[arg]
    return type(arg)(_argument(a, values) for a in arg) if isinstance(arg, (list, tuple)) else arg


class Model(nn.Module):
    """q, k, v of linears, heads split, then `attend(self, q, k, v, hidden)`; `hidden` is bool [B, 1, S, S],
    True: not seen.
    """

    def __init__(self, attend: Attend, kv_heads: int = H, value: int = D) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attend, self.kv_heads = attend, kv_heads
        self.q, self.k, self.v = (
            nn.Linear(D, H * D),
            nn.Linear(D, kv_heads * D),
            nn.Linear(D, kv_heads * value),
        )
        self.table = nn.Parameter(torch.randn(H, 2 * S))
        self.sinks = nn.Parameter(torch.randn(H))
        self.row_scale = nn.Parameter(torch.rand(H, 1, 1) + 0.5)
        self.register_buffer("slopes", 0.5 ** torch.arange(1.0, H + 1))

    def forward(self, x: Tensor, hidden: Tensor) -> Tensor:
        b, s, _ = x.shape
        q = self.q(x).view(b, s, H, -1).transpose(1, 2)
        k, v = (linear(x).view(b, s, self.kv_heads, -1).transpose(1, 2) for linear in (self.k, self.v))
        return self.attend(self, q, k, v, hidden).sum(-1)


def inputs(batch: int = B, length: int = S) -> tuple[Tensor, Tensor]:
    """Causal, and the first two tokens of all but the first row are padding: whole rows see nothing there."""
    torch.manual_seed(1)
    hidden = torch.ones(length, length, dtype=torch.bool).triu(1).expand(batch, 1, length, length).clone()
    hidden[1:, ..., :2] = True
    return torch.randn(batch, length, D), hidden


def close(scores: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(scores, -1) @ v
