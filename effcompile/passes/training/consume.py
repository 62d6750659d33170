"""Gradients that the backward hands to the optimizer one by one, so that they are never all there (optimizer
in the backward).

Source: LOMO (Lv et al. 2023, arXiv 2306.09782); torch's register_post_accumulate_grad_hook is the same for an
eager backward.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

from torch import fx

from effcompile.core.torch_compat_aot import writes
from effcompile.ir.roles import Leaves, Leaving
from effcompile.ir.step import Step
from effcompile.ops.consume import consume
from effcompile.passes.training.step_edit import copied, viewed


def with_consumed_gradients(
    step: Step, names: Collection[str], working_bytes: Mapping[str, int], *, updates: bool = True
) -> Step:
    """A copy of the step that returns no gradient of these parameters: each is consumed as soon as it is
    complete.

    That is after the last operator that adds to it, and, where it updates the parameter, the last that reads
    that.

    Args:
        step: with or without gradients that are summed in place.
        names: parameters whose gradients are consumed.
        working_bytes: what the update of each allocates while it runs.
        updates: whether whoever consumes a gradient writes the parameter.
    """
    step, _ = copied(step)
    graph = step.graph
    order = {node: at for at, node in enumerate(graph.nodes)}
    holders = {name: node for node, name in step.parameters.items()}
    views = _views(graph)
    taken = [name for name in step.gradients if name in names]
    for name in taken:
        gradient = step.gradients[name]
        parameter = holders[name] if updates else gradient
        parts = [n for n in views.get(_made(gradient), []) if writes(n)]
        readers = [
            user
            for node in views.get(parameter, [])
            for user in node.users
            if user in order and user.op == "call_function"
        ]
        readers = readers if updates else []
        last = max([gradient, *parts, *readers], key=order.__getitem__)
        with graph.inserting_after(last):
            node = graph.call_function(
                consume, (name, working_bytes.get(name, 0), gradient, parameter, *parts)
            )
        node.meta = {
            **{k: v for k, v in gradient.meta.items() if k in ("fwd_nn_module_stack", "nn_module_stack")},
            "val": None,
        }
    gone = {Leaves(Leaving.GRADIENT, name) for name in taken}
    kept = [
        (result, node)
        for result, node in zip(step.roles.leaving, step.results, strict=True)
        if result not in gone
    ]
    graph.output_node().args = (tuple(node for _, node in kept),)
    graph.lint()
    step.module.recompile()
    return replace(
        step, roles=replace(step.roles, leaving=tuple(result for result, _ in kept)), consumed=tuple(taken)
    )


def completing(graph: fx.Graph) -> Callable[[fx.Node], tuple[fx.Node, list[fx.Node]]]:
    """Gradient → (it, [it, and what writes into it]): it is complete after the last of these."""
    views = _views(graph)
    return lambda gradient: (
        gradient,
        [gradient, *(n for n in views.get(_made(gradient), []) if writes(n) and n is not gradient)],
    )


def _made(node: fx.Node) -> fx.Node:
    """The node that made a value's memory: through views and writes in place."""
    while True:
        source: Any = viewed(node)
        if writes(source) and source.args and isinstance(source.args[0], fx.Node):
            source = source.args[0]
        if source is node:
            return node
        node = source


def _views(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """Node that made memory → all nodes that show it or write to it, itself among them."""
    found: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.nodes:
        found.setdefault(_made(node), []).append(node)
        if (
            writes(node)
            and node.args
            and isinstance(node.args[0], fx.Node)
            and _made(node.args[0]) is not _made(node)
        ):
            found.setdefault(_made(node.args[0]), []).append(node)
    return found
