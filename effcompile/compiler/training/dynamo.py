"""A graph that torch.compile cut out of a training step, planned within the budget: our partition of
AOTAutograd's joint graph.

torch.compile hands over one graph, or several where the model's code breaks it; each is planned by itself
within the whole budget, and says so. Nothing is verified here, as a graph's outputs are no loss: the
simulation of the emitted graphs is the proof. Attentions stay as they are written:
passes/training/fused_attention.py understands a mask by telling inputs from weights, which such a graph, to
which its weights are inputs, does not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from effcompile.backends.torch.boxed import boxed
from effcompile.core import gpu, torch_compat_aot
from effcompile.core.errors import UsageError
from effcompile.core.goal import Goal
from effcompile.core.types import Value
from effcompile.ir.roles import Entering, Enters, Leaves, Leaving, Roles
from effcompile.ir.step import Step
from effcompile.passes import load_training_passes
from effcompile.passes.training.base import Case
from effcompile.schedules.emit import Emitted
from effcompile.search.machine import AUTO, resolve
from effcompile.search.training.cases import fastest
from effcompile.search.training.figures import keep_figures, known_figures
from effcompile.search.training.operator_costs import OperatorCosts
from effcompile.search.training.prepare import prepare
from effcompile.search.training.solve import Schedule


def training_backend(gm: fx.GraphModule, example_inputs: Sequence[Any], goal: Goal) -> Callable[..., Any]:
    """The graph as a function whose backward is planned within `goal.memory`.

    Raises:
        UsageError: sizes are symbolic (say dynamic=False), or AOTAutograd cannot trace the graph.
        InfeasibleError: no schedule of this graph is within the budget.
    """
    if any(isinstance(value, (int, torch.SymInt)) for value in example_inputs):
        raise UsageError(
            "torch.compile made a size of this graph dynamic; a step is planned for fixed sizes. Use "
            "torch.compile(dynamic=False)."
        )
    planner = _Partition(goal)
    return torch_compat_aot.compile_with_partition(
        gm, example_inputs, planner, lambda part, _: boxed(part.graph)
    )


class _Partition:
    """AOTAutograd's `partition_fn`: forward and backward modules of a planned schedule."""

    def __init__(self, goal: Goal) -> None:
        self.goal = goal
        self.schedule: Schedule | None = None

    def __call__(
        self, joint: fx.GraphModule, joint_inputs: object, *, num_fwd_outputs: int, **_: object
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        step, outputs = _as_step(joint, num_fwd_outputs)
        checkpoint = load_training_passes(["checkpoint"]).checkpoint
        machine = resolve(AUTO, [], gpu.place_of(None, joint_inputs))
        figures = OperatorCosts(
            target=machine.target,
            here=True,
            known=known_figures(machine.calibration),
            store=machine.calibration,
            pace=machine.pace,
        )
        figures.within(step)
        found = prepare(step, [Case(step=step)], checkpoint, figures)
        keep_figures(figures.known, machine.calibration)
        self.schedule = fastest(found, self.goal.memory)
        return _modules(joint, step, self.schedule.emitted, outputs, num_fwd_outputs)


def _as_step(joint: fx.GraphModule, count: int) -> tuple[Step, list[Value]]:
    """The joint graph as a Step, and its flat outputs as they are (some may be None, or numbers)."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    output: Any = graph.graph_copy(joint.graph, copies)
    for old, new in copies.items():
        new.meta = dict(old.meta)
    outputs = list(pytree.tree_leaves(output, is_leaf=lambda leaf: leaf is None))
    first = next((n for n in outputs[:count] if isinstance(n, fx.Node)), None)
    if first is None:
        raise UsageError("The graph returns no tensor: there is nothing to differentiate.")
    forward = [n for n in outputs[:count] if isinstance(n, fx.Node)]
    gradients = [n if isinstance(n, fx.Node) else None for n in outputs[count:]]
    graph.output((*forward, *gradients))
    holders = [n for n in graph.nodes if n.op == "placeholder"]
    entering = {
        n: Enters(Entering.TANGENT if n.name.startswith("tangents") else Entering.INPUT, n.name)
        for n in holders
    }
    outputs_beside = [Leaves(Leaving.OUTPUT)] * (len(forward) - 1)
    step = Step(
        name="graph",
        module=fx.GraphModule(joint, graph),
        roles=Roles(
            entering,
            (
                Leaves(Leaving.LOSS),
                *outputs_beside,
                *(Leaves(Leaving.GRADIENT, f"{i}") for i in range(len(gradients))),
            ),
        ),
        leaves=lambda args, kwargs: list(args),
        rebuild=lambda loss, shown: (loss, *shown),
    )
    return step, outputs


def _modules(
    joint: fx.GraphModule, step: Step, emitted: Emitted, outputs: list[Value], count: int
) -> tuple[fx.GraphModule, fx.GraphModule]:  # fmt: skip
    """Modules in AOTAutograd's form: the forward returns (outputs …, saved …), the backward takes (saved …,
    tangents …).
    """
    results: Any = emitted.forward.output_node().args[0]
    shown = len(step.forward_results)
    made = iter(results[:shown])
    returned = [next(made) if isinstance(value, fx.Node) else value for value in outputs[:count]]
    originals = {
        origin: node
        for node, origin in emitted.origin.items()
        if node.graph is emitted.forward and node.op == "placeholder"
    }
    holders = [n for n in emitted.backward.nodes if n.op == "placeholder"]
    handed = dict(zip(emitted.handed, results[shown:], strict=True))
    static = [n for n in holders if n not in handed and emitted.origin.get(n) not in step.tangents]
    saved = {**handed, **{n: originals[emitted.origin[n]] for n in static}}
    emitted.forward.output_node().args = ((*returned, *saved.values()),)
    _in_order(emitted.backward, [*saved, *(n for n in holders if n not in saved)])
    made_gradients: Any = emitted.backward.output_node().args[0]
    gradients = iter(made_gradients)
    emitted.backward.output_node().args = (
        tuple(next(gradients) if isinstance(v, fx.Node) else None for v in outputs[count:]),
    )
    for node in emitted.handed:
        if "val" not in node.meta:  # a generator's state
            node.meta["val"] = saved[node].meta.setdefault("val", torch.get_rng_state())
    return fx.GraphModule(joint, emitted.forward), fx.GraphModule(joint, emitted.backward)


def _in_order(graph: fx.Graph, holders: Sequence[fx.Node]) -> None:
    """Move placeholders to the front, in this order."""
    for node in reversed(holders):
        first = next(iter(graph.nodes))
        if node is not first:
            first.prepend(node)
