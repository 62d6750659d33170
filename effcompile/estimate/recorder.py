"""Runs of a flat graph that keep what enters and leaves some of its nodes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from effcompile.core.types import Args, Arguments, Outputs, Value
from effcompile.estimate.inputs import Inputs
from effcompile.ir.export import LENIENT
from effcompile.ir.program import Program


def _copied(to: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """What functionalising makes of an assignment to a slice; torch has no derivative of `aten.copy`."""
    return to.clone().copy_(source)


#: What differentiates where the operator of the graph does not, or has laid its result out otherwise.
WITH_GRADIENTS: Mapping[Any, Any] = {**LENIENT, torch.ops.aten.copy.default: _copied}
#: site's node → the nodes of its input and its bias
Watched = Mapping[fx.Node, tuple[fx.Node | None, fx.Node | None]]


class Recorder(fx.Interpreter):
    """Runs the flat graph; keeps the inputs and results of sites, the latter as points to
    differentiate at.
    """

    def __init__(
        self,
        program: Program,
        watched: Watched | None = None,
        shift: Mapping[fx.Node, torch.Tensor] | None = None,
    ) -> None:
        super().__init__(program.module)
        self.watched, self.shift = watched or {}, shift or {}
        self.results: dict[fx.Node, Any] = {}
        self.entering: dict[fx.Node, Any] = {}
        self.biases: dict[fx.Node, Any] = {}

    def call_function(self, target: fx.node.Target, args: Args, kwargs: Arguments) -> Value:
        # with gradients attention is another kernel
        return super().call_function(WITH_GRADIENTS.get(target, target), args, kwargs)

    def run_node(self, n: fx.Node) -> Outputs:
        result = super().run_node(n)
        if n.op == "get_attr" and isinstance(result, torch.Tensor):
            return result.detach()
        if n in self.shift:
            return result + self.shift[n]
        if n not in self.watched:
            return result
        for place, kept in zip(self.watched[n], (self.entering, self.biases), strict=True):
            if place is not None:
                kept[n] = self.env[place].detach()
        self.results[n] = result if result.requires_grad else result.detach().requires_grad_()
        return self.results[n]


def lacks_derivative(error: Exception) -> bool:
    """Whether this is torch's error about an operator that it does not differentiate."""
    return any(word in str(error) for word in ("derivative", "autograd formula"))


def leaves_of(program: Program, inputs: Inputs) -> list[Value]:
    """Leaves of the inputs in the order of the placeholders."""
    args, kwargs = inputs
    return pytree.tree_leaves((tuple(args), {key: kwargs[key] for key in program.kwargs if key in kwargs}))


def floating(outputs: Outputs) -> list[torch.Tensor]:
    """The floating tensors among a graph's outputs."""
    return [o for o in pytree.tree_leaves(outputs) if isinstance(o, torch.Tensor) and o.is_floating_point()]
