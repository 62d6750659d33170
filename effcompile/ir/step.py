"""The IR of training: one step (forward, loss, backward) captured as one functional torch.fx graph."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import fx
from torch.utils import _pytree as pytree

from effcompile.ir.guards import Guard, StateGuards


@dataclass(frozen=True, kw_only=True)
class Step:
    """A captured training step: AOTAutograd's joint graph, with what its inputs and outputs are.

    The graph is functional: all state enters by placeholders, nothing is mutated, and its output is one flat tuple

        (loss, *shown, *updated buffers, *gradients of parameters, *gradients of inputs)

    with a Node (or None for a gradient that is not there) each. Shapes are static. Nodes carry `meta["val"]`, and
    `nn_module_stack` (forward) or `fwd_nn_module_stack` (backward) with the user's own module names where known.

    Attributes:
        name: the model's class.
        module: the joint graph. Random operators stand in it as they ran; a graph executed node by node draws the
            numbers that the model would have drawn.
        parameters: placeholder → qualified name in the user's model. Tied parameters are one placeholder, under the
            first of their names. Parameters that the loss does not reach are absent or have gradient None.
        buffers: placeholder → qualified name of the buffer.
        constants: placeholder → tensor, for tensors that are neither (made while capturing). get_attr nodes do not occur.
        inputs: placeholders of the user's tensors, in the order of `leaves`.
        tangent: placeholder of the gradient that arrives at the loss (a scalar), None when the graph does not read it.
        more_tangents: those of other outputs; only graphs that torch.compile cut out have any.
        shown: how many outputs beside the loss are returned (none, unless the user asked to keep them).
        cut_off: index among the shown outputs → name, for those that the model would differentiate and the plan does not.
        updated: qualified names of the buffers whose new values are returned, in output order.
        differentiated: qualified names of the parameters whose gradients are returned, in output order.
        wanted: the inputs (among `inputs`) that required a gradient at capture; theirs are returned after the parameters'.
        leaves: (args, kwargs) → the user's tensors, flat, in the order of `inputs`. Raises InputsError when the
            structure, a shape or a dtype is not what was captured.
        rebuild: (loss, shown outputs) → what the model would have returned, in its own type.
        dropped: names of the output's fields that are not returned, with their bytes: only kept when asked for.
        fixed: lists the guards of the arguments, which `leaves` checks. state: what must be so of the model at each call.
        consumed: qualified names of the parameters whose gradients the backward itself hands to the optimizer
            (ops/consume.py): they are no results.
        mends: known fixes applied at capture, in the user's words.
        args, kwargs: the example inputs.
        resident_bytes: of all that is there before the step begins: the model's storages, whether the step reads them or not,
            its inputs and constants. None where no model is known: then only what the graph reads is counted.
    """

    name: str
    module: fx.GraphModule
    parameters: Mapping[fx.Node, str]
    buffers: Mapping[fx.Node, str]
    constants: Mapping[fx.Node, Any]
    inputs: tuple[fx.Node, ...]
    tangent: fx.Node | None
    shown: int
    updated: tuple[str, ...]
    differentiated: tuple[str, ...]
    leaves: Callable[[tuple[Any, ...], Mapping[str, Any]], list[Any]]
    rebuild: Callable[[Any, list[Any]], Any]
    dropped: Mapping[str, int]
    mends: tuple[str, ...] = ()
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] | None = None
    more_tangents: tuple[fx.Node, ...] = ()
    consumed: tuple[str, ...] = ()
    resident_bytes: int | None = None
    wanted: tuple[fx.Node, ...] = ()
    cut_off: Mapping[int, str] = field(default_factory=dict)
    fixed: Callable[[], Iterable[Guard]] = tuple
    state: StateGuards | None = field(default=None, compare=False, repr=False)

    @property
    def input_names(self) -> list[str]:
        """The user's name of each of the inputs, in their order: `input_ids`, `0`."""
        given, _ = pytree.tree_flatten_with_path((self.args, dict(self.kwargs or {})))
        names: dict[int, list[str]] = {}
        for path, leaf in given:
            names.setdefault(id(leaf), []).append(pytree.keystr(path[1:]).strip("[]'"))
        leaves = self.leaves(self.args, self.kwargs or {})
        # One tensor may be given twice.
        return [(names.get(id(leaf)) or [node.name]).pop(0) for node, leaf in zip(self.inputs, leaves, strict=True)]

    @property
    def guards(self) -> tuple[Guard, ...]:
        """What was taken for granted of the arguments and of the model."""
        return (*self.fixed(), *(self.state.listed() if self.state is not None else ()))

    @property
    def tangents(self) -> tuple[fx.Node, ...]:
        """All placeholders of arriving gradients."""
        return (*((self.tangent,) if self.tangent is not None else ()), *self.more_tangents)

    @property
    def graph(self) -> fx.Graph:
        return self.module.graph

    @property
    def results(self) -> tuple[fx.Node | None, ...]:
        """The flat outputs, in order."""
        return tuple(self.graph.output_node().args[0])  # type: ignore[arg-type]

    @property
    def loss(self) -> fx.Node:
        node = self.results[0]
        assert node is not None
        return node

    @property
    def forward_results(self) -> tuple[fx.Node, ...]:
        """Loss, shown outputs and updated buffers: all that must be there when the forward returns."""
        return tuple(n for n in self.results[: 1 + self.shown + len(self.updated)] if n is not None)

    @property
    def gradients(self) -> dict[str, fx.Node]:
        """Parameter name → the node of its gradient; parameters without one are left out."""
        first = 1 + self.shown + len(self.updated)
        nodes = self.results[first : first + len(self.differentiated)]
        return {name: node for name, node in zip(self.differentiated, nodes, strict=True) if node is not None}

    @property
    def input_gradients(self) -> dict[fx.Node, fx.Node]:
        """Input → the node of its gradient, for those that want one and that the loss depends on."""
        nodes = self.results[1 + self.shown + len(self.updated) + len(self.differentiated) :]
        return {given: node for given, node in zip(self.wanted, nodes, strict=True) if node is not None}

    @property
    def all_gradients(self) -> tuple[fx.Node, ...]:
        """What the backward returns, in order: the gradients of parameters, then those of inputs."""
        return (*self.gradients.values(), *self.input_gradients.values())


@dataclass(frozen=True, kw_only=True)
class DividedStep:
    """A step over a batch as `count` equal micro-batches: whole = Σ wᵢ · part(i), for the loss and for every gradient.

    Attributes:
        whole: the step over the batch. part: the same over one micro-batch.
        count: of micro-batches. examples: in each.
        batched: for each of the step's inputs whether it is divided along its first axis; the others are given whole.
        factor: wᵢ where it is the same for all (1 / count for a mean over all elements, 1 for a sum).
        counts: where it is not: `part`'s inputs → what its mean is over (its labels, say): wᵢ is nᵢ / Σ n.
        random: whether random numbers are drawn in the forward.
        pair: where `part` has one example and is another graph, for torch specialises what has length 1: the step over two, which
            the division was read off. `counts` takes its inputs then: every example twice.
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
