"""The stages of a pipeline, cut out of the exported forward of one micro-batch where one value crosses from layer to layer.

Every stage is a step of its own: it takes what the stage before it hands on, and the gradient that arrives at what it hands on itself.
What depends on inputs and buffers alone (positions, masks, rotary tables) is made by each stage that reads it. A parameter that several
stages read is one on each of them, and its gradient the sum of theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx, nn

from effcompile.capture.training_graph import WRAPPED, join, lift
from effcompile.core import torch_compat
from effcompile.core.errors import UsageError
from effcompile.core.torch_compat_aot import draws
from effcompile.ir.program import module_path
from effcompile.ir.step import Step
from effcompile.ir.strategy import Strategy


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineStage:
    """One stage.

    Attributes:
        step: its forward and backward; what it hands on stands in the loss's place.
        takes: which of the micro-batch's tensors are its inputs; received: whether what arrives is one more, the last of them.
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


def stages_of(front: fx.GraphModule, part: Step, model: nn.Module, tensors: Sequence[Tensor], strategy: Strategy) -> list[PipelineStage]:
    """The stages of a forward in the model's order.

    Args:
        front: the forward of one micro-batch, as it was exported.
        part: its step.
        model: whose it is.
        tensors: the micro-batch's, in the order of the forward's placeholders.
        strategy: how many stages, and the layers of each.

    Raises:
        UsageError: more stages than layers, several values cross a cut, or a stage would not be the same by itself.
    """
    if part.updated:
        raise UsageError(
            f"A pipeline stage cannot write into buffers ({part.updated[0]}): its micro-batches run out of order. Leave pp out."
        )
    if any(draws(node) for node in part.graph.nodes):
        raise UsageError(
            "The step draws random numbers (dropout), in another order by stages. Set the model's dropout to 0, or leave pp out."
        )
    results: tuple[fx.Node, ...] = front.graph.output_node().args[0]  # type: ignore[assignment]
    order = {node: at for at, node in enumerate(front.graph.nodes)}
    wanted = _before(results[0], None)
    layers = _layers([node for node in order if node in wanted])
    if len(lists := {name.rpartition(".")[0] for name in layers}) > 1:
        raise UsageError(f"The model has layers in several lists ({', '.join(sorted(lists)[:3])}): stages are of one. Leave pp out.")
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    counts, made, at = strategy.layers(len(layers)), list[PipelineStage](), 0
    received: fx.Node | None = None
    for number, count in enumerate(counts):
        names = tuple(layers)[at : at + count]
        at += count
        end = order[layers[names[-1]]]
        handed = results[0] if number == len(counts) - 1 else _crossing(wanted, order, end, names[-1], parameters)
        made.append(_stage(front, part, model, tensors, handed, received, names))
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


def _before(node: fx.Node, stop: fx.Node | None) -> set[fx.Node]:
    """What a node is computed from, itself among it, but nothing before `stop`."""
    found, waiting = {node}, [node]
    while waiting:
        here = waiting.pop()
        for operand in () if here is stop else here.all_input_nodes:
            if operand not in found:
                found.add(operand)
                waiting.append(operand)
    return found


def _crossing(wanted: set[fx.Node], order: dict[fx.Node, int], end: int, layer: str, parameters: set[str]) -> fx.Node:
    """The one value that depends on a parameter and is made up to `end` and read behind it."""
    trained: set[fx.Node] = set()
    for node in order:
        own = node.op == "get_attr" and str(node.target).rpartition(f"{WRAPPED}.")[2] in parameters
        if own or any(operand in trained for operand in node.all_input_nodes):
            trained.add(node)
    crossing = [
        node for node in order
        if node in wanted and node in trained and node.op == "call_function" and order[node] <= end
        and any(order[user] > end and user in wanted for user in node.users)
    ]  # fmt: skip
    if len(crossing) != 1 or not isinstance(crossing[0].meta.get("val"), Tensor):
        names = ", ".join(node.name for node in crossing[:4]) or "none"
        raise UsageError(
            f"The model cannot be cut behind {layer}: a pipeline stage hands on one value, and there {len(crossing)} cross ({names}). "
            "Cut elsewhere (cuts=...), or leave pp out."
        )
    return crossing[0]


def _stage(
    front: fx.GraphModule, part: Step, model: nn.Module, tensors: Sequence[Tensor], handed: fx.Node, received: fx.Node | None,
    layers: tuple[str, ...],
) -> PipelineStage:  # fmt: skip
    inside = _before(handed, received)
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    holders = [node for node in front.graph.nodes if node.op == "placeholder"]
    takes = tuple(i for i, node in enumerate(holders) if node in inside)
    for i in takes:
        copies[holders[i]] = graph.node_copy(holders[i])
    inputs = [tensors[i].detach() for i in takes]
    if received is not None:
        copies[received] = graph.placeholder("received")
        value = received.meta["val"]
        copies[received].meta = {**received.meta}
        device = tensors[0].device if tensors else value.device
        inputs.append(torch.empty(value.shape, dtype=value.dtype, device=device, requires_grad=True))
    for node in front.graph.nodes:
        if node in inside and node not in copies:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output((copies[handed],))
    with torch.enable_grad(), torch_compat.quiet_export():
        joint = join(lift(fx.GraphModule(front, graph), model, inputs), model)
    step = Step(
        name=part.name, module=joint.module, roles=joint.roles, leaves=lambda args, kwargs: list(args), rebuild=lambda loss, shown: loss,
        state=part.state, args=tuple(torch.empty(t.shape, dtype=t.dtype, device="meta") for t in inputs), resident_bytes=0,
    )  # fmt: skip
    return PipelineStage(step=step, takes=takes, received=received is not None, layers=layers)
