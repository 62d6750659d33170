"""Runs an emitted training step behind autograd: the model's own call, `loss.backward()`, and gradients in
its parameters.

Whatever would silently make it another step than the one that was planned is refused: other shapes, other
modes of a module, newly trainable parameters, autocast switched on or off, values changed between forward and
backward.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from effcompile.backends.torch.boxed import boxed
from effcompile.backends.torch.items import ITEMS, Items, with_items_as_tensor
from effcompile.backends.torch.loss_scale import LossScale, times, unscaled_factor
from effcompile.backends.torch.ranks import Alone, Ranks, refuse_distributed, refuse_other_inputs
from effcompile.backends.torch.refusing import cut_off_words, refuse_recording, refusing
from effcompile.backends.torch.step_inputs import (
    autocast_of,
    called,
    fitting,
    given_tensors,
    held,
    laid_out,
    refuse_inference,
    refuse_others,
)
from effcompile.core.errors import AutocastError, GuardError, InputsError
from effcompile.core.types import Args, AutogradContext, Kwargs, Outputs, Value
from effcompile.ir.step import Step
from effcompile.ops.consume import Sink, consuming
from effcompile.ops.frozen_codes import CodedWeight, encode, hold
from effcompile.schedules.emit import Emitted
from effcompile.schedules.simulate import overwritten


class StepRunner:
    """The forward and the backward of one emitted step, bound to a model's parameters and buffers.

    The parameters are looked up at every call, so load_state_dict and optimizers work as usual. What is kept
    lives in the autograd node of the loss, and is freed as the backward reads it.
    """

    def __init__(
        self,
        model: nn.Module,
        step: Step,
        emitted: Emitted,
        *,
        scaled: bool = False,
        ranks: Ranks | None = None,
    ) -> None:
        self.model, self.step, self.ranks = model, step, ranks
        self.forward_graph, self.backward_graph = boxed(emitted.forward), boxed(emitted.backward)
        self._forward_inputs = [
            n for n in step.graph.nodes if n.op == "placeholder" and n is not step.tangent
        ]
        self._overwritten = overwritten(step, emitted)
        handed = {node: i for i, node in enumerate((*emitted.handed, *self._overwritten))}
        self._backward_inputs = [
            handed.get(n, emitted.origin.get(n)) for n in emitted.backward.nodes if n.op == "placeholder"
        ]
        self._differentiated, self._wanted = tuple(step.gradients), tuple(step.input_gradients)
        self._read_again = [
            n for n in self._backward_inputs if isinstance(n, fx.Node) and n is not step.tangent
        ]
        self.loss_scale = (
            LossScale(step.loss.meta["val"].device.type) if scaled and step.tangent is not None else None
        )
        self.items: Items | None = None  # how the loss follows num_items_in_batch
        self.sink: Sink | None = None  # where gradients go that the backward hands on by itself
        self.updated: Mapping[str, torch.Tensor] = {}  # the parameters that it updates by them
        self.room: int | None = None  # of a budget, for copies of inputs
        assert step.state is not None
        self.state = step.state.bound_to(model)
        self.calls = 0  # of the user's
        self.agreement = Alone()  # of the ranks
        self.guarded = True  # but while the step is verified, which runs the model's own forward
        self._codes = {name: encode(held(model, name), form) for name, form in step.coded.items()}
        self._devices = sorted({node.meta["val"].device.type for node in self._forward_inputs})
        self._autocast = autocast_of(self._devices)

    def bound_to(self, model: nn.Module) -> StepRunner:
        """The same step for another instance of the model: a copy of it."""
        other = copy.copy(self)
        other.model, other.sink, other.updated, other.state = model, None, {}, self.state.bound_to(model)
        other._codes, other.agreement = dict(self._codes), self.agreement.bound_to(model)
        other.loss_scale = copy.deepcopy(self.loss_scale)
        return other

    @property
    def steps(self) -> tuple[Step, ...]:
        """The captured steps that it runs, or reads anything of."""
        return (self.step,)

    @property
    def codes(self) -> tuple[torch.Tensor, ...]:
        """Those of the frozen weights that the model has as they were given."""
        return tuple(self._codes.values())

    def share_codes(self, other: StepRunner) -> None:
        """Read the codes of another step of the same model: the same, held once."""
        self._codes.update({name: other._codes[name] for name in self._codes.keys() & other._codes.keys()})

    def hold_codes(self) -> None:
        """Put the codes that the step reads in the place of the model's frozen weights, whose memory is free
        then. What another step of the model put there already stays.
        """
        for name, form in self.step.coded.items():
            packed = self._codes.pop(name, None)
            if packed is not None and not isinstance(held(self.model, name), CodedWeight):
                hold(self.model, name, packed, form)
        for guards in {self.state, *(step.state for step in self.steps)}:
            if guards is not None:
                guards.settle()  # which remember the weights as they were

    @contextlib.contextmanager
    def whole(self, model: nn.Module) -> Iterator[None]:
        """The model as its own forward wants it: with its parameters gathered, where they are spread over
        ranks.
        """
        with contextlib.nullcontext() if self.ranks is None else self.ranks.whole(model):
            yield

    @property
    def takes_items(self) -> bool:
        """Whether a call may give `num_items_in_batch`."""
        return self.items is not None or ITEMS in (self.step.kwargs or {})

    @property
    def consumed(self) -> tuple[str, ...]:
        """Parameters whose gradients go to the optimizer within the backward."""
        return self.step.consumed

    def __call__(self, args: Args, kwargs: Kwargs) -> Outputs:
        """Loss and shown outputs, as the model returns them.

        Raises:
            GuardError: inputs that the step was not captured for, or a model that is not as it was then.
        """
        loss, *shown = self._results(args, kwargs)
        return self.step.rebuild(loss, shown)

    def loss(self, args: Args, kwargs: Kwargs) -> torch.Tensor:
        """The loss alone."""
        return self._results(args, kwargs)[0]

    def _results(self, args: Args, kwargs: Kwargs) -> tuple[torch.Tensor, ...]:
        """(loss, *shown), the loss as a share of `num_items_in_batch` where that is given and the step was
        captured without.

        Raises:
            InputsError: ranks that compute parts of one result were called with different inputs.
        """
        if self.guarded and self.ranks is not None:
            self.calls += 1
            if self.calls & (self.calls - 1) == 0:
                # the first of all, and ever fewer: a sampler that is wrong is wrong at once
                refuse_other_inputs(self.ranks, pytree.tree_leaves((args, dict(kwargs))))
        kwargs = with_items_as_tensor(kwargs) if ITEMS in kwargs else kwargs
        if self.items is None or ITEMS not in kwargs:
            return self._run(args, kwargs)
        own = {name: value for name, value in kwargs.items() if name != ITEMS}
        loss, *shown = self._run(args, own)
        share = loss if kwargs[ITEMS] is None else self.items.share(loss, args, own, kwargs[ITEMS])
        return (share, *shown)

    def _run(self, args: Args, kwargs: Kwargs) -> tuple[torch.Tensor, ...]:
        self._check_model()
        values = self._values(given_tensors(self.step, args, kwargs, self.room))
        parameters = [held(self.model, name) for name in self._differentiated]
        wanted = [values[node] for node in self._wanted]
        consumed = [held(self.model, name) for name in self.step.consumed]
        refuse_others(dict(zip(self.step.consumed, consumed, strict=True)), self.updated)
        results: tuple[torch.Tensor, ...] = _Function.apply(self, values, *parameters, *wanted, *consumed)
        return results

    def _check_model(self) -> None:
        """Raises GuardError when the model's own forward would now do something else than the step that was
        planned.
        """
        refuse_recording(
            f"The planned step of {self.step.name}",
            "It has one backward of its own: use loss.backward() or torch.autograd.grad(loss, ...), or the "
            "model itself there.",
        )
        if self.guarded:
            self.state.check()
        for name in self.consumed:
            if not held(self.model, name).requires_grad:
                raise GuardError(
                    f"The parameter {name!r} is frozen now, and the planned backward would update it all "
                    "the same, as it consumes its gradient (states in the backward). Call "
                    "effcompile.optimize again.",
                    place=f"model.{name}.requires_grad",
                    of_model=True,
                )
        if (now := autocast_of(self._devices)) != self._autocast:
            was, at_call = (", ".join(map(str, found)) or "off" for found in (self._autocast, now))
            raise AutocastError(
                f"autocast is {at_call} at this call and was {was} when the step was planned, whose dtypes "
                "are fixed. Plan and call within the same torch.autocast(...): with torch.autocast(...): "
                "effcompile.optimize(model, ...).",
                place="torch.is_autocast_enabled()",
            )

    def _values(self, leaves: list[Value], step: Step | None = None) -> dict[fx.Node, Value]:
        """Placeholder of the step (or another capture of it) → its value now."""
        step = step or self.step
        values: dict[fx.Node, Any] = {
            node: laid_out(node, leaf) for node, leaf in zip(step.inputs, leaves, strict=True)
        }
        for node, name in step.parameters.items():
            values[node] = fitting(node, name, self._local(name, held(self.model, name)).detach())
        for node, name in step.buffers.items():
            values[node] = fitting(node, name, held(self.model, name))
        values.update({node: self._packed(name) for node, name in step.codes.items()})
        values.update(step.constants)
        refuse_inference(step, ((node, values[node]) for node in self._read_again if node in values))
        return values

    def _packed(self, name: str) -> torch.Tensor:
        """The codes of a frozen weight: the model's, or, as long as that has the weight as it was given, the
        step's own.

        Raises:
            GuardError: the model has another weight there now.
        """
        value, form = held(self.model, name), self.step.coded[name]
        if isinstance(value, CodedWeight) and value.form == form:
            return value.packed
        if name not in self._codes:
            raise GuardError(
                f"{name} is no longer held in {form}, as this plan has it: it was replaced. Call "
                "effcompile.optimize again.",
                place=f"model.{name}",
                of_model=True,
            )
        return self._codes[name]

    def _local(self, name: str, parameter: torch.Tensor) -> torch.Tensor:
        """What the graph takes for a parameter."""
        if self.ranks is None:
            refuse_distributed(name, parameter)
            return parameter
        self.ranks.check(name, parameter)
        return self.ranks.local(name, parameter)

    def _gradients(self, found: Args) -> Args:
        """What the backward graph makes, as the user's parameters have it."""
        if self.ranks is None:
            return found
        names = (*self._differentiated, *[None] * (len(found) - len(self._differentiated)))
        return tuple(
            g if name is None else self.ranks.gradient(name, g) for name, g in zip(names, found, strict=True)
        )

    def run_forward(self, values: Mapping[fx.Node, Value]) -> tuple[list[Value], list[Value]]:
        """(loss and shown outputs, what is handed to the backward). New values of buffers are written."""
        results = list(
            self._without_autocast(self.forward_graph, [values[node] for node in self._forward_inputs])
        )
        first, last = len(self.step.outputs), len(self.step.forward_results)
        old = [values[node].clone() for node in self._overwritten.values()]
        for name, value in zip(self.step.updated, results[first:last], strict=True):
            held(self.model, name).copy_(value)
        return results[:first], [*results[last:], *old]

    def run_backward(
        self, saved: list[Value], values: Mapping[fx.Node, object], tangent: torch.Tensor
    ) -> Args:
        """The gradients, in the order of `Step.all_gradients`, then None for those that were handed to
        `sink`. Empties `saved`.

        Where the loss is scaled they are None if one of them overflowed.
        """
        scale = self.loss_scale
        if scale is None:
            gradients = self.differentiate(saved, values, tangent)
        else:
            found = self.differentiate(saved, values, scale.scaled(torch.ones_like(tangent)))
            gradients = tuple(times(scale.unscaled(found), unscaled_factor(tangent)))
        return (*self._gradients(gradients), *[None] * len(self.step.consumed))

    def differentiate(
        self, saved: list[Value], values: Mapping[fx.Node, object], tangent: torch.Tensor
    ) -> Args:
        """What the backward graph makes of a gradient at the loss; what it consumes goes to `sink`.

        Empties `saved`.
        """
        inputs = [
            saved[source]
            if isinstance(source, int)
            else tangent
            if source is None or source is self.step.tangent
            else values[source]
            for source in self._backward_inputs
        ]
        saved.clear()
        with consuming(self.sink):
            return self._without_autocast(self.backward_graph, inputs)

    def gradient_norm(self, gradients: Mapping[str, torch.Tensor], kind: float) -> torch.Tensor:
        """The norm of all gradients as of one vector: of those that ranks have parts of, on all of these
        together.
        """
        norm = nn.utils.get_total_norm(gradients.values(), kind)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def differentiated_now(self, values: Mapping[fx.Node, Value]) -> list[torch.Tensor]:
        """Parameters and inputs of a call that require a gradient."""
        parameters = (held(self.model, name) for name in (*self._differentiated, *self.step.consumed))
        given = (values[node] for node in self._wanted if node in values)
        return [tensor for tensor in (*parameters, *given) if tensor.requires_grad]

    def versions(self, values: Mapping[fx.Node, Value]) -> list[tuple[fx.Node, int]]:
        """(placeholder, autograd's count of changes in place) of what the backward reads again."""
        return [(node, values[node]._version) for node in self._read_again]

    def _without_autocast(self, graph: Any, values: list[Value]) -> Args:
        """Run a graph, in which every cast is an operator of its own: with autocast off, also where the step
        has it on.
        """
        with contextlib.ExitStack() as stack:
            if self.ranks is not None:
                stack.enter_context(self.ranks.running())
            for device in filter(torch.is_autocast_enabled, self._devices):
                stack.enter_context(torch.autocast(device, enabled=False))
            result: tuple[Any, ...] = graph(values)
        return result


def first_order(gradients: tuple[object, ...], of: Sequence[torch.Tensor]) -> Args:
    """The gradients; with create_graph=True ones that refuse to be differentiated again, for a penalty on
    them would be lost.

    of: what the loss was made of that requires a gradient.
    """
    if not torch.is_grad_enabled():
        return gradients
    return refusing(
        gradients,
        "A gradient of a planned step was differentiated again (create_graph=True, as for a gradient "
        "penalty): the plan has one backward, and the second derivative would be lost. Use the model's own "
        "forward there.",
        of,
    )


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: AutogradContext, runner: StepRunner, values: dict[fx.Node, Value], *parameters: torch.Tensor
    ) -> Args:
        results, saved = runner.run_forward(values)
        ctx.runner, ctx.values, ctx.saved, ctx.versions = runner, values, saved, runner.versions(values)
        ctx.mark_non_differentiable(
            *(value for i, value in enumerate(results[1:]) if i not in runner.step.cut_off)
        )
        ctx.set_materialize_grads(False)
        return tuple(results)

    @staticmethod
    def backward(ctx: AutogradContext, tangent: torch.Tensor | None, *shown: torch.Tensor | None) -> Args:
        for i, gradient in enumerate(shown):
            if gradient is not None:
                raise InputsError(cut_off_words(ctx.runner.step.cut_off[i]))
        if tangent is None:  # whoever reads the loss has no gradient for it
            return (None,) * len(ctx.needs_input_grad)
        if ctx.saved is None:
            raise InputsError(
                "The backward of this loss has run already, and what it needs was freed as it ran "
                "(retain_graph has no effect). Call the model again for a new loss."
            )
        for (node, before), (_, now) in zip(ctx.versions, ctx.runner.versions(ctx.values), strict=True):
            if before != now:
                raise InputsError(
                    f"{called(ctx.runner.step, node)} was changed in place between the forward and the "
                    "backward, which reads it again. Run the backward before the optimizer's step, and leave "
                    "the inputs as they are until then."
                )
        saved, ctx.saved = ctx.saved, None
        values, ctx.values = ctx.values, None
        of = ctx.runner.differentiated_now(values)
        alike = ctx.runner.agreement.begin()
        with torch.no_grad():
            gradients = ctx.runner.run_backward(saved, values, tangent)
        alike()
        return (None, None, *first_order(gradients, of))
