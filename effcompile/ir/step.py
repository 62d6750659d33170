"""The IR of training: one step (forward, loss, backward) captured as one functional torch.fx graph."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from effcompile.core.trees import leaves_with_path
from effcompile.ir.guards import Guard
from effcompile.ir.program import Traced
from effcompile.ir.roles import Entering, Leaving, Roles


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What a tensor-parallel rank has of a parameter of some whole shape: one of `count` equal runs of places
    along an axis.
    """

    axis: int
    shape: tuple[int, ...]
    count: int
    index: int

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """The rank's part of a tensor of the parameter's shape."""
        return whole.chunk(self.count, self.axis)[self.index]

    @property
    def local(self) -> tuple[int, ...]:
        """The shape of the part."""
        return (*self.shape[: self.axis], self.shape[self.axis] // self.count, *self.shape[self.axis + 1 :])


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """How the parameters of a step lie over data-parallel ranks, each of which runs it on a part of the batch
    of its own.

    Attributes:
        ranks: how many.
        shapes: qualified name → shape, of the parameters that are sharded along their first axis: the step's
            placeholder of one, and its gradient, have ⌈N / ranks⌉ rows. All others are the same on every one
            of these ranks.
        split: ranks among which structures are divided (tensor parallelism). parts: qualified name → what
            this one of them has of it; `shapes` are those of the parts.
        owned: qualified name → shape (of the parts), of the parameters that are whole on every one of these
            ranks, of which each has the optimizer's states of ⌈N / ranks⌉ rows, and updates these (ZeRO-1).
    """

    ranks: int = 1
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    split: int = 1
    parts: Mapping[str, Part] = field(default_factory=dict)
    owned: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Step(Traced):
    """A captured training step: AOTAutograd's joint graph, with the roles of its inputs and outputs.

    The graph is functional: all state enters by placeholders, nothing is mutated, and its output is one flat
    tuple

        (loss, *shown, *updated buffers, *gradients of parameters, *gradients of inputs)

    with a Node (or None for a gradient that is not there) each. Shapes are static. Nodes carry `meta["val"]`,
    and `nn_module_stack` (forward) or `fwd_nn_module_stack` (backward) with the user's own module names where
    known. Random operators stand in the graph as they ran; executed node by node it draws the numbers that
    the model would have drawn.

    Attributes:
        roles: of the placeholders: parameters (tied ones are one, under the first of their names; those that
            the loss does not reach are absent or have gradient None), buffers, constants, the user's tensors
            in the order of `leaves`, and the tangent, which is absent where the graph does not read it; only
            graphs that torch.compile cut out have several. Of the results: outputs beside the loss are there
            only when the user asked to keep them.
        cut_off: index among the shown outputs → name, for those that the model would differentiate and the
            plan does not.
        leaves: (args, kwargs) → the user's tensors, flat, in the order of `inputs`. Raises InputsError when
            the structure, a shape or a dtype is not what was captured.
        rebuild: (loss, shown outputs) → what the model would have returned, in its own type.
        dropped: names of the output's fields that are not returned, with their bytes: only kept when asked
            for.
        coded: qualified names of the frozen parameters that the graph reads as codes → their form
            (ops/frozen_codes.py).
        fixed: lists the guards of the arguments, which `leaves` checks.
        consumed: qualified names of the parameters whose gradients the backward itself hands to the optimizer
            (ops/consume.py): they are no results.
        spread: how its parameters lie over ranks; None where there is one process.
        resident_bytes: of all that is there before the step begins: the model's storages, whether the step
            reads them or not, its inputs and constants, and copied_bytes. None where no model is known: then
            only what the graph reads is counted.
        copied_bytes: of copies of the inputs that lie otherwise than in the graph.
    """

    roles: Roles
    leaves: Callable[[tuple[Any, ...], Mapping[str, Any]], list[Any]]
    rebuild: Callable[[Any, list[Any]], Any]
    dropped: Mapping[str, int] = field(default_factory=dict)
    consumed: tuple[str, ...] = ()
    spread: Spread | None = None
    resident_bytes: int | None = None
    copied_bytes: int = 0
    cut_off: Mapping[int, str] = field(default_factory=dict)
    coded: Mapping[str, str] = field(default_factory=dict)
    fixed: Callable[[], Iterable[Guard]] = tuple

    @functools.cached_property
    def parameters(self) -> dict[fx.Node, str]:
        """Placeholder → qualified name of the parameter."""
        return self.roles.named(Entering.PARAMETER)

    @functools.cached_property
    def codes(self) -> dict[fx.Node, str]:
        """Placeholder → qualified name of the frozen parameter whose codes it stands for."""
        return self.roles.named(Entering.CODES)

    @functools.cached_property
    def buffers(self) -> dict[fx.Node, str]:
        """Placeholder → qualified name of the buffer."""
        return self.roles.named(Entering.BUFFER)

    @functools.cached_property
    def constants(self) -> dict[fx.Node, torch.Tensor]:
        """Placeholder → the tensor, which is neither parameter nor buffer."""
        return {
            node: entry.value
            for node, entry in self.roles.enters(Entering.CONSTANT).items()
            if entry.value is not None
        }

    @functools.cached_property
    def inputs(self) -> tuple[fx.Node, ...]:
        """Placeholders of the user's tensors."""
        return tuple(self.roles.enters(Entering.INPUT))

    @functools.cached_property
    def tangents(self) -> tuple[fx.Node, ...]:
        """Placeholders of arriving gradients."""
        return tuple(self.roles.enters(Entering.TANGENT))

    @property
    def tangent(self) -> fx.Node | None:
        """That of the gradient that arrives at the loss, None where the graph does not read it."""
        return next(iter(self.tangents), None)

    @functools.cached_property
    def updated(self) -> tuple[str, ...]:
        """Qualified names of the buffers whose new values are returned, in output order."""
        return self.roles.leaves(Leaving.UPDATED)

    @functools.cached_property
    def differentiated(self) -> tuple[str, ...]:
        """Qualified names of the parameters that have a place for a gradient among the results, in output
        order.
        """
        return self.roles.leaves(Leaving.GRADIENT)

    @functools.cached_property
    def wanted(self) -> tuple[fx.Node, ...]:
        """The inputs that required a gradient at capture; theirs are returned after the parameters'."""
        named = {name: node for node, name in self.roles.named(Entering.INPUT).items()}
        return tuple(named[name] for name in self.roles.leaves(Leaving.INPUT_GRADIENT))

    @property
    def input_names(self) -> list[str]:
        """The user's name of each of the inputs, in their order: `input_ids`, `0`."""
        given = leaves_with_path((self.args, dict(self.kwargs or {})))
        names: dict[int, list[str]] = {}
        for path, leaf in given:
            names.setdefault(id(leaf), []).append(pytree.keystr(path[1:]).strip("[]'"))
        leaves = self.leaves(self.args, self.kwargs or {})
        # One tensor may be given twice.
        return [
            (names.get(id(leaf)) or [node.name]).pop(0)
            for node, leaf in zip(self.inputs, leaves, strict=True)
        ]

    @property
    def guards(self) -> tuple[Guard, ...]:
        """What was taken for granted of the arguments and of the model."""
        return (*self.fixed(), *(self.state.listed() if self.state is not None else ()))

    @property
    def results(self) -> tuple[fx.Node | None, ...]:
        """The flat outputs, in order."""
        return tuple(self.graph.output_node().args[0])  # type: ignore[arg-type]

    def having(self, *roles: Leaving) -> tuple[fx.Node | None, ...]:
        """The flat outputs with one of these roles, in order."""
        return tuple(
            node
            for node, result in zip(self.results, self.roles.leaving, strict=True)
            if result.role in roles
        )

    @property
    def loss(self) -> fx.Node:
        (node,) = self.having(Leaving.LOSS)
        assert node is not None
        return node

    @property
    def outputs(self) -> tuple[fx.Node, ...]:
        """The loss and the shown outputs."""
        return tuple(node for node in self.having(Leaving.LOSS, Leaving.OUTPUT) if node is not None)

    @property
    def forward_results(self) -> tuple[fx.Node, ...]:
        """Loss, shown outputs and updated buffers: all that must be there when the forward returns."""
        return tuple(
            node for node in self.having(Leaving.LOSS, Leaving.OUTPUT, Leaving.UPDATED) if node is not None
        )

    @property
    def gradients(self) -> dict[str, fx.Node]:
        """Parameter name → the node of its gradient; parameters without one are left out."""
        return {
            name: node
            for name, node in self.roles.results(Leaving.GRADIENT, self.results).items()
            if node is not None
        }

    @property
    def input_gradients(self) -> dict[fx.Node, fx.Node]:
        """Input → the node of its gradient, for those that want one and that the loss depends on."""
        nodes = self.having(Leaving.INPUT_GRADIENT)
        return {given: node for given, node in zip(self.wanted, nodes, strict=True) if node is not None}

    @property
    def all_gradients(self) -> tuple[fx.Node, ...]:
        """What the backward returns, in order: the gradients of parameters, then those of inputs."""
        return (*self.gradients.values(), *self.input_gradients.values())


@dataclass(frozen=True, kw_only=True)
class DividedStep:
    """A step over a batch as `count` equal micro-batches: whole = Σ wᵢ · part(i), for the loss and for every
    gradient.

    Attributes:
        whole: the step over the batch. part: the same over one micro-batch.
        count: of micro-batches. examples: in each.
        batched: for each of the step's inputs whether it is divided along its first axis; the others are
            given whole.
        factor: wᵢ where it is the same for all (1 / count for a mean over all elements, 1 for a sum).
        counts: where it is not: `part`'s inputs → what its mean is over (its labels, say): wᵢ is nᵢ / Σ n.
        random: whether random numbers are drawn in the forward.
        pair: where `part` has one example and is another graph, for torch specialises what has length 1: the
            step over two, which the division was read off. `counts` takes its inputs then: every example
            twice.
    """

    whole: Step
    part: Step
    count: int
    examples: int
    batched: tuple[bool, ...]
    factor: float = 1.0
    counts: fx.Graph | None = None
    random: bool = False
    pair: Step | None = None
