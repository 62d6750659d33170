"""Runs a step as micro-batches: forward and backward of each in turn, gradients added up; `loss.backward()`
hands them out.

Every part's gradients are added as soon as they are made, so that beside one micro-batch only the sums are
alive. In fp16 all parts have one loss scale: the sums are divided by it once, and an overflow in any part
withholds them all.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from effcompile.backends.torch.boxed import boxed
from effcompile.backends.torch.loss_scale import times, unscaled_factor
from effcompile.backends.torch.ranks import Ranks
from effcompile.backends.torch.step_inputs import given_tensors, held
from effcompile.backends.torch.training import StepRunner, first_order
from effcompile.core.errors import InputsError
from effcompile.core.types import Args, AutogradContext, Kwargs, Value
from effcompile.ir.step import DividedStep, Step
from effcompile.schedules.emit import Emitted


class MicrobatchRunner(StepRunner):
    """A divided step bound to a model. `step`: one micro-batch as planned, which hands its gradients on."""

    def __init__(
        self,
        model: nn.Module,
        divided: DividedStep,
        step: Step,
        emitted: Emitted,
        *,
        scaled: bool = False,
        ranks: Ranks | None = None,
    ) -> None:
        super().__init__(model, step, emitted, scaled=scaled, ranks=ranks)
        self.divided = divided
        self._counts = None if divided.counts is None else boxed(divided.counts)
        self._dtypes = {name: node.meta["val"].dtype for name, node in divided.part.gradients.items()}

    @property
    def consumed(self) -> tuple[str, ...]:
        """No parameter's gradient goes to the optimizer before the step is over."""
        return ()

    @property
    def steps(self) -> tuple[Step, ...]:
        divided = self.divided
        return (self.step, divided.whole, divided.part, *([divided.pair] if divided.pair is not None else ()))

    def _run(self, args: Args, kwargs: Kwargs) -> tuple[torch.Tensor, ...]:
        self._check_model()
        parameters = [held(self.model, name) for name in self.step.consumed]
        loss: torch.Tensor = _Accumulated.apply(self, self.parts(args, kwargs), *parameters)
        return (loss,)

    def parts(self, args: Args, kwargs: Kwargs) -> list[list[Value]]:
        """The tensors of every micro-batch, in the order of the step's inputs; those without a batch in each
        of them.

        Raises:
            InputsError: the batch is not the one that was planned for.
        """
        leaves = given_tensors(self.divided.whole, args, kwargs, self.room)
        size = self.divided.examples
        which = list(zip(leaves, self.divided.batched, strict=True))
        rows = [leaf.shape[0] // self.divided.count if yes else 0 for leaf, yes in which]
        assert all(n in (0, size) for n in rows), rows
        return [
            [leaf.narrow(0, i * size, size) if yes else leaf for leaf, yes in which]
            for i in range(self.divided.count)
        ]

    def weights(self, parts: list[list[Value]]) -> list[float]:
        """What each micro-batch counts in the loss.

        Where no label counts at all, the loss is not a number, as the model's own.
        """
        if self._counts is None:
            return [self.divided.factor] * len(parts)
        counts = [self._counted(leaves, self._counts) for leaves in parts]
        numbers = [float(n) for n in torch.stack([n.double() for n in counts]).tolist()]
        whole = sum(numbers)
        return [n / whole if whole else 1.0 / len(parts) for n in numbers]

    def _counted(self, leaves: list[Value], counts: Callable[[list[Value]], Args]) -> torch.Tensor:
        """What the mean of one micro-batch is over; twice that where its examples have to be given twice,
        which no ratio sees.
        """
        pair = self.divided.pair
        if pair is None:
            values = self._values(leaves)
            return counts([values[node] for node in self._forward_inputs])[0]
        twice = [
            torch.cat([leaf, leaf]) if yes else leaf
            for leaf, yes in zip(leaves, self.divided.batched, strict=True)
        ]
        values = self._values(twice, pair)
        return counts([values[node] for node in pair.graph.nodes if node in values])[0]

    def accumulate(self, parts: list[list[Value]]) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
        """(loss, gradients in the order of `step.consumed`) of the whole batch.

        A micro-batch without weight is not run.

        The gradients are None where one of them overflowed in fp16.
        """
        weights = self.weights(parts)
        names = self.step.consumed
        here = {name: self._local(name, held(self.model, name)) for name in names}
        sums = {
            name: torch.zeros_like(here[name], dtype=self._dtypes[name], requires_grad=False)
            for name in names
        }
        total: torch.Tensor | None = None

        def add(name: str, gradient: torch.Tensor) -> None:
            sums[name].add_(gradient)

        self.sink = add
        try:
            for leaves, weight in zip(parts, weights, strict=True):
                if weight == 0.0 and self.ranks is None:
                    # on ranks it may be another's turn to weigh something
                    continue
                total = self._one(leaves, weight) if total is None else total.add_(self._one(leaves, weight))
        finally:
            self.sink = None
        assert total is not None
        gradients: list[torch.Tensor | None] = list(sums.values())
        if self.ranks is not None:
            gradients = [
                self.ranks.gradient(name, gradient) for name, gradient in zip(names, gradients, strict=True)
            ]
        return total, gradients if self.loss_scale is None else self.loss_scale.unscaled(gradients)

    def _one(self, leaves: list[Value], weight: float) -> torch.Tensor:
        """Forward and backward of one micro-batch; its weighted loss."""
        values = self._values(leaves)
        results, saved = self.run_forward(values)
        loss: torch.Tensor = results[0]
        tangent = torch.full_like(loss, weight)
        self.differentiate(
            saved, values, tangent if self.loss_scale is None else self.loss_scale.scaled(tangent)
        )
        return loss * weight


class _Accumulated(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: AutogradContext, runner: MicrobatchRunner, parts: list[list[Value]], *parameters: torch.Tensor
    ) -> torch.Tensor:
        ctx.runner, alike = runner, runner.agreement.begin()
        loss, ctx.sums = runner.accumulate(parts)
        alike()
        return loss

    @staticmethod
    def backward(ctx: AutogradContext, tangent: torch.Tensor) -> Args:
        if ctx.sums is None:
            raise InputsError(
                "The backward of this loss has run already, and its gradients were handed out (retain_graph "
                "has no effect). Call the model again for a new loss."
            )
        sums, ctx.sums = ctx.sums, None
        with torch.no_grad():
            gradients = times(
                sums, float(tangent) if ctx.runner.loss_scale is None else unscaled_factor(tangent)
            )
        return (None, None, *first_order(tuple(gradients), ctx.runner.differentiated_now({})))
