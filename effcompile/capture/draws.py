"""Random numbers that a training graph draws as the model does: each to the element that it goes to in eager
mode.
"""

from __future__ import annotations

import contextlib
import operator
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import torch
from torch import fx

from effcompile.core.errors import CaptureError
from effcompile.core.types import Args
from effcompile.ops import dropped as _registers  # noqa: F401 - the operator

aten, dropped = torch.ops.aten, torch.ops.effcompile.dropped


@contextlib.contextmanager
def no_python_randomness() -> Iterator[None]:
    """Refuse a forward that draws from Python's or NumPy's generator: every step would repeat what it drew at
    capture.
    """
    states = random.getstate(), numpy.random.get_state()
    try:
        yield
        python = random.getstate() != states[0]
        if python or not all(
            numpy.array_equal(a, b) for a, b in zip(numpy.random.get_state(), states[1], strict=True)
        ):
            raise CaptureError(
                f"The forward draws random numbers from {'Python' if python else 'NumPy'}'s generator, which "
                "a graph cannot repeat anew at each step. Draw them with torch (torch.rand, dropout), or "
                "before the forward and give them as an input. (SpecAugment: set the configuration's "
                "mask_time_prob and mask_feature_prob to 0.)"
            )
    finally:
        random.setstate(states[0])
        numpy.random.set_state(states[1])


def separate_draws(front: fx.Graph) -> None:
    """Give every Bernoulli draw that is out of place in the forward a contiguous tensor to take its shape
    from.

    Its result is contiguous whatever that is. So after functionalisation, which makes both kinds one
    operator, a draw that takes its shape from a tensor that is not contiguous was one in place.
    """
    for node in list(front.nodes):
        if (
            node.op == "call_function"
            and node.target in (aten.bernoulli.p, torch.bernoulli)
            and len(node.args) + len(node.kwargs) > 1
        ):
            source = node.args[0]
            with front.inserting_before(node):
                copy = front.call_function(torch.clone, (source,), {"memory_format": torch.contiguous_format})
            copy.meta = dict(source.meta) if isinstance(source, fx.Node) else {}
            node.args = (copy, *node.args[1:])


def draw_in_memory_order(graph: fx.Graph) -> None:
    """Draws that were in place (AlphaDropout's noise) give their numbers in the order in which the tensor
    lies in memory.

    Functionalised they would give them in the order of the axes, which is another one where the tensor is a
    permuted view.
    """
    for node in graph.find_nodes(op="call_function", target=aten.bernoulli.p):
        source: Any = node.args[0]
        value = source.meta["val"]
        if value.is_contiguous():
            continue
        # stable, as TensorIterator's own order
        order = sorted(range(value.dim()), key=lambda axis: -value.stride(axis))
        with graph.inserting_before(node):
            laid_out = _call(graph, node, aten.permute.default, (source, order), value.permute(order))
        drawn = torch.empty_like(laid_out.meta["val"], memory_format=torch.contiguous_format)
        with graph.inserting_after(node):
            back = [order.index(axis) for axis in range(value.dim())]
            result = _call(graph, node, aten.permute.default, (node, back), drawn.permute(back))
        node.replace_all_uses_with(result, delete_user_cb=lambda user, kept=result: user is not kept)
        node.args, node.meta["val"] = (laid_out, *node.args[1:]), drawn


def without_masks(graph: fx.Graph) -> None:
    """Dropout whose mask no gradient reads, as eager carries it out: in place, where the traced operator has
    a mask and a cast of it.
    """
    for node in graph.find_nodes(op="call_function", target=aten.native_dropout.default):
        source, chance, training = node.args
        kept = [user for user in node.users if user.target is operator.getitem and user.args[1] == 0]
        if not kept or len(kept) != len(node.users) or source.meta["val"].device.type != "cpu":
            continue
        if training is not True or not 0 < chance < 1:
            continue
        with graph.inserting_before(node):
            result = _call(graph, node, dropped.default, (source, chance), node.meta["val"][0])
        for user in kept:
            user.replace_all_uses_with(result)
            graph.erase_node(user)
        graph.erase_node(node)


def _call(
    graph: fx.Graph, like: fx.Node, target: Callable[..., object], args: Args, value: torch.Tensor
) -> fx.Node:
    call = graph.call_function(target, args)
    call.meta = {**like.meta, "val": value}
    return call
