"""What a recovered mask takes for granted of the inputs, each as words and a check."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, fx

from effcompile.attention.evaluate import Values, evaluate, is_binary, reads
from effcompile.attention.graph_mask import Guard
from effcompile.attention.terms import NEVER
from effcompile.program import Program


def only_zero_one(program: Program, node: fx.Node) -> Guard:
    """The node, of which 1 − node or node · fill is taken, is a flag."""
    return _on(program, node, f"{_names(node)} holds only 0 and 1", is_binary)


def fills_only(program: Program, node: fx.Node) -> Guard:
    """The node, which is added to the scores, hides or does nothing."""
    return _on(program, node, f"{_names(node)} adds 0 or at most {NEVER:g} to a score", lambda v: bool(((v == 0) | (v <= NEVER)).all()))


def every_query_sees(program: Program, node: fx.Node, visible: Callable[[Tensor], Tensor], given: Values) -> Guard:
    """No row of the mask is empty: what a softmax makes of one depends on how it was hidden."""
    return _on(program, node, "every query sees a key", lambda value: bool(visible(value).any(-1).all()), given)


def no_longer_than(program: Program, sizes: Mapping[str, int]) -> Guard:
    """The named axes are no longer than what a form was fitted to."""

    def check(inputs: Sequence[Tensor]) -> bool:
        named = ((dim, size) for spec, tensor in zip(program.inputs, inputs, strict=True) for dim, size in zip(spec.shape, tensor.shape))  # noqa: B905
        return all(size <= sizes.get(str(dim), size) for dim, size in named)

    return Guard(text=", ".join(f"{name} ≤ {size}" for name, size in sizes.items()), check=check)


def _on(program: Program, node: fx.Node, text: str, holds: Callable[[Tensor], bool], given: Values | None = None) -> Guard:
    def check(inputs: Sequence[Tensor]) -> bool:
        return holds(evaluate(program, [node], {**by_placeholder(program, inputs), **(given or {})})[node])

    return Guard(text=text, check=check)


def by_placeholder(program: Program, inputs: Sequence[Tensor]) -> dict[fx.Node, Tensor]:
    """The tensors in the order of `Program.inputs`, by their placeholders."""
    nodes = [n for n in program.graph.find_nodes(op="placeholder") if isinstance(n.meta.get("val"), torch.Tensor)]
    return dict(zip(nodes, inputs, strict=True))


def _names(node: fx.Node) -> str:
    return " and ".join(n.name for n in reads(node)) or node.name
