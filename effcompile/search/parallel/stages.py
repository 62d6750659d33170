"""The stages of a pipeline, cut out of the exported forward of one micro-batch between its layers.

Every stage is a step of its own: it takes what the stage before it hands on, and the gradient that arrives at
what it hands on itself. That is one tensor: where several values cross (an encoder's output and a table of
positions go through all layers of T5's decoder), they are handed on end to end in one, and a stage that only
passes a value on adds its own part to its gradient, for autograd sees both readers. What depends on inputs
and buffers alone (positions, masks, rotary tables) is made by each stage that reads it. A parameter that
several stages read is one on each of them, and its gradient the sum of theirs.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx, nn

from effcompile.capture.training_graph import WRAPPED, join, lift
from effcompile.core import torch_compat
from effcompile.core.errors import UsageError
from effcompile.core.torch_compat_aot import draws, writes
from effcompile.ir.program import module_path
from effcompile.ir.step import Step
from effcompile.ir.strategy import Strategy

aten = torch.ops.aten


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineStage:
    """One stage.

    Attributes:
        step: its forward and backward; what it hands on stands in the loss's place.
        takes: which of the micro-batch's tensors are its inputs; received: whether what arrives is one more,
            the last of them.
        layers: the names of its layers.
    """

    step: Step
    takes: tuple[int, ...]
    received: bool
    layers: tuple[str, ...]

    @property
    def parameters(self) -> frozenset[str]:
        """The qualified names of those that it reads."""
        return frozenset(self.step.parameters.values())


def stages_of(
    front: fx.GraphModule, part: Step, model: nn.Module, tensors: Sequence[Tensor], strategy: Strategy
) -> list[PipelineStage]:
    """The stages of a forward in the model's order.

    Args:
        front: the forward of one micro-batch, as it was exported.
        part: its step.
        model: whose it is.
        tensors: the micro-batch's, in the order of the forward's placeholders.
        strategy: how many stages, and the layers of each.

    Raises:
        UsageError: more stages than layers, no tensor crosses a cut, or a stage would not be the same by
            itself.
    """
    if part.updated:
        raise UsageError(
            f"A pipeline stage cannot write into buffers ({part.updated[0]}): its micro-batches run out "
            "of order. Leave pp out."
        )
    results: tuple[fx.Node, ...] = front.graph.output_node().args[0]  # type: ignore[assignment]
    reads = _reads(front.graph)
    wanted = _before(results[:1], reads)
    layers = _layers([node for node in reads if node in wanted])
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    counts, made, at = strategy.layers(len(layers)), list[PipelineStage](), 0
    received: tuple[fx.Node, ...] = ()
    for number, count in enumerate(counts):
        names = tuple(layers)[at : at + count]
        at += count
        end = layers[names[-1]]
        handed = (
            results[:1] if number == len(counts) - 1 else _crossing(wanted, reads, end, names[-1], parameters)
        )
        made.append(
            _stage(front, part, model, tensors, _before(handed, reads, received), handed, received, names)
        )
        received = handed
    return made


def _layers(nodes: Sequence[fx.Node]) -> dict[str, fx.Node]:
    """The repeated modules, in the order in which they run → the last node of each."""
    found: dict[str, fx.Node] = {}
    for node in nodes:
        parts = module_path(node).rpartition(f"{WRAPPED}.")[2].split(".")
        at = next((i for i, part in enumerate(parts) if part.isdigit()), None)
        if at is not None and node.op == "call_function":
            found[".".join(parts[: at + 1])] = node
    return found


def _reads(graph: fx.Graph) -> dict[fx.Node, tuple[fx.Node, ...]]:
    """Node, in the graph's order → what must have run before it: its operands, and what wrote into their
    storages until then.

    An exported forward has the model's writes as they are: T5 copies the labels into a slice of its decoder's
    inputs.
    """
    owner: dict[fx.Node, fx.Node] = {}
    writers: dict[fx.Node, list[fx.Node]] = {}
    found: dict[fx.Node, tuple[fx.Node, ...]] = {}
    for node in graph.nodes:
        storages = {owner.get(operand, operand) for operand in node.all_input_nodes}
        found[node] = (
            *node.all_input_nodes,
            *(writer for storage in storages for writer in writers.get(storage, ())),
        )
        schema = getattr(node.target, "_schema", None)
        if schema is None:
            shared = node.all_input_nodes[:1] if node.target is operator.getitem else []
        else:
            given = {
                **dict(zip((argument.name for argument in schema.arguments), node.args, strict=False)),
                **node.kwargs,
            }
            shared = [
                given.get(argument.name) for argument in schema.arguments if argument.alias_info is not None
            ]
        for operand in shared:
            if isinstance(operand, fx.Node):
                owner[node] = owner.get(operand, operand)
                if writes(node):
                    writers.setdefault(owner[node], []).append(node)
    return found


def _before(
    nodes: Sequence[fx.Node], reads: Mapping[fx.Node, tuple[fx.Node, ...]], stop: Collection[fx.Node] = ()
) -> set[fx.Node]:  # fmt: skip
    """What nodes are computed from, themselves among it, but nothing before those of `stop`."""
    found, waiting = set(nodes), list(nodes)
    while waiting:
        here = waiting.pop()
        for operand in () if here in stop else reads[here]:
            if operand not in found:
                found.add(operand)
                waiting.append(operand)
    return found


def _crossing(
    wanted: set[fx.Node], reads: Mapping[fx.Node, tuple[fx.Node, ...]], end: fx.Node, layer: str,
    parameters: set[str]
) -> tuple[fx.Node, ...]:  # fmt: skip
    """The values that depend on a parameter, or on chance, and are made up to `end` and read behind it."""
    trained, ahead, crossing = set[fx.Node](), set[fx.Node](), dict[fx.Node, None]()
    for node, operands in reads.items():
        own = node.op == "get_attr" and str(node.target).rpartition(f"{WRAPPED}.")[2] in parameters
        if own or draws(node) or any(operand in trained for operand in operands):
            trained.add(node)
        if end not in ahead:
            ahead.add(node)
        elif node in wanted:
            crossing |= dict.fromkeys(
                each for each in operands if each in ahead & trained and each.op == "call_function"
            )
    values = [node.meta.get("val") for node in crossing]
    kinds = {
        str(value.dtype).removeprefix("torch.") if isinstance(value, Tensor) else type(value).__name__
        for value in values
    }
    fine = all(isinstance(value, Tensor) and value.is_floating_point() for value in values)
    if len(kinds) != 1 or not fine or any(map(writes, crossing)):
        names = ", ".join(node.name for node in list(crossing)[:4]) or "none"
        raise UsageError(
            f"The model cannot be cut behind {layer}: a pipeline stage hands on numbers of one type that it "
            f"does not write into, and there {len(crossing)} values cross ({names}) of "
            f"{', '.join(sorted(kinds)) or 'no type'}. Cut elsewhere (cuts=...), or leave pp out."
        )
    return tuple(crossing)


def _stage(
    front: fx.GraphModule, part: Step, model: nn.Module, tensors: Sequence[Tensor], inside: set[fx.Node],
    handed: Sequence[fx.Node], received: Sequence[fx.Node], layers: tuple[str, ...],
) -> PipelineStage:  # fmt: skip
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    holders = [node for node in front.graph.nodes if node.op == "placeholder"]
    takes = tuple(i for i, node in enumerate(holders) if node in inside)
    for i in takes:
        copies[holders[i]] = graph.node_copy(holders[i])
    inputs = [tensors[i].detach() for i in takes]
    if received:
        arrives = graph.placeholder("received")
        copies.update(zip(received, _taken_apart(graph, arrives, received), strict=True))
        value = received[0].meta["val"]
        device = tensors[0].device if tensors else value.device
        shape = value.shape if len(received) == 1 else (sum(node.meta["val"].numel() for node in received),)
        inputs.append(torch.empty(shape, dtype=value.dtype, device=device, requires_grad=True))
    for node in front.graph.nodes:
        if node in inside and node not in copies:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output((_put_together(graph, [copies[node] for node in handed]),))
    own = fx.GraphModule(front, graph)
    own.meta = dict(front.meta)
    with torch.enable_grad(), torch_compat.quiet_export():
        joint = join(lift(own, model, inputs), model)
    step = Step(
        name=part.name, module=joint.module, roles=joint.roles, leaves=lambda args, kwargs: list(args),
        rebuild=part.rebuild, state=part.state,
        args=tuple(torch.empty(t.shape, dtype=t.dtype, device="meta") for t in inputs), resident_bytes=0,
        spread=part.spread,
    )  # fmt: skip
    return PipelineStage(step=step, takes=takes, received=bool(received), layers=layers)


def _put_together(graph: fx.Graph, values: Sequence[fx.Node]) -> fx.Node:
    """One tensor of all: end to end where they are several."""
    if len(values) == 1:
        return values[0]
    return graph.call_function(
        aten.cat.default, ([graph.call_function(aten.reshape.default, (value, [-1])) for value in values],)
    )


def _taken_apart(graph: fx.Graph, arrives: fx.Node, values: Sequence[fx.Node]) -> list[fx.Node]:
    """What `_put_together` made of such values, as they were."""
    shapes = [list(node.meta["val"].shape) for node in values]
    if len(values) == 1:
        arrives.meta = {**values[0].meta}
        return [arrives]
    parts, at = list[fx.Node](), 0
    for node, shape in zip(values, shapes, strict=True):
        size = node.meta["val"].numel()
        piece = graph.call_function(aten.slice.Tensor, (arrives, 0, at, at + size))
        parts.append(graph.call_function(aten.view.default, (piece, shape)))
        at += size
    return parts
