"""Runs an emitted training step behind autograd: the model's own call, `loss.backward()`, and gradients in its parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from effcompile.backends.torch.boxed import boxed
from effcompile.errors import InputsError
from effcompile.remat.emit import Emitted
from effcompile.step import Step


class StepRunner:
    """The forward and the backward of one emitted step, bound to a model's parameters and buffers.

    The parameters are looked up at every call, so load_state_dict, optimizers and `requires_grad_` before planning work as
    usual. What is kept lives in the autograd node of the loss, and is freed as the backward reads it.
    """

    def __init__(self, model: nn.Module, step: Step, emitted: Emitted) -> None:
        self.model, self.step = model, step
        self.forward_graph, self.backward_graph = boxed(emitted.forward), boxed(emitted.backward)
        self._shown = step.shown
        self._updated = len(step.updated)
        holders = [node for node in step.graph.nodes if node.op == "placeholder" and node is not step.tangent]
        self._forward_inputs = holders
        handed = {node: i for i, node in enumerate(emitted.handed)}
        self._backward_inputs = [
            handed[node] if node in handed else emitted.origin.get(node) for node in emitted.backward.nodes if node.op == "placeholder"
        ]
        self._differentiated = tuple(step.gradients)

    def __call__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Loss and shown outputs, as the model returns them.

        Raises:
            InputsError: inputs that the step was not captured for.
        """
        loss, *shown = self._run(args, kwargs)
        return self.step.rebuild(loss, shown)

    def loss(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor:
        """The loss alone."""
        return self._run(args, kwargs)[0]

    def _run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[torch.Tensor, ...]:
        values = self._values(self.step.leaves(args, kwargs))
        parameters = [self.model.get_parameter(name) for name in self._differentiated]
        results: tuple[torch.Tensor, ...] = _Function.apply(self, values, *parameters)
        return results

    def _values(self, leaves: list[Any]) -> dict[Any, Any]:
        """Placeholder of the step → its value now."""
        step = self.step
        values: dict[Any, Any] = dict(zip(step.inputs, leaves, strict=True))
        values.update({node: self.model.get_parameter(name).detach() for node, name in step.parameters.items()})
        values.update({node: self.model.get_buffer(name) for node, name in step.buffers.items()})
        values.update(step.constants)
        return values

    def run_forward(self, values: Mapping[Any, Any]) -> tuple[list[Any], list[Any]]:
        """(loss and shown outputs, what is handed to the backward). New values of buffers are written."""
        results = list(self.forward_graph([values[node] for node in self._forward_inputs]))
        first = 1 + self._shown
        for name, value in zip(self.step.updated, results[first : first + self._updated], strict=True):
            self.model.get_buffer(name).copy_(value)
        return results[:first], results[first + self._updated :]

    def run_backward(self, saved: list[Any], values: Mapping[Any, Any], tangent: torch.Tensor) -> tuple[Any, ...]:
        """The gradients, in the order of `Step.gradients`. Empties `saved`."""
        inputs = [
            saved[source] if isinstance(source, int) else tangent if source is self.step.tangent else values[source]
            for source in self._backward_inputs
        ]
        saved.clear()
        return self.backward_graph(inputs)


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, runner: StepRunner, values: dict[Any, Any], *parameters: torch.Tensor) -> tuple[Any, ...]:
        results, saved = runner.run_forward(values)
        ctx.runner, ctx.values, ctx.saved = runner, values, saved
        ctx.mark_non_differentiable(*results[1:])
        return tuple(results)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, tangent: torch.Tensor, *_: Any) -> tuple[Any, ...]:
        if ctx.saved is None:
            raise InputsError(
                "The backward of this loss has run already, and what it needs was freed as it ran (retain_graph has no effect). "
                "Call the model again for a new loss."
            )
        saved, ctx.saved = ctx.saved, None
        values, ctx.values = ctx.values, None
        return (None, None, *ctx.runner.run_backward(saved, values, tangent))
