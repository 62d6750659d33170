"""A step of generation as it runs token by token: its cache grows where it stands, and is read once for all
queries of a group.

The graph's concatenations become appends (ops/append.py), its attentions those of ops/cached_attention.py,
and what lies between them one call each (regions.py).
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import fx

from effcompile.backends.torch.direct import direct
from effcompile.backends.torch.edit_attentions import share_heads
from effcompile.backends.torch.plain import without_dispatcher
from effcompile.backends.torch.regions import with_regions
from effcompile.core.errors import LoweringError
from effcompile.ops.append import append
from effcompile.ops.cached_attention import cached_attention
from effcompile.sites.parts import argument

aten = torch.ops.aten


def in_place(
    module: fx.GraphModule, capacities: Mapping[int, int], narrow: Collection[int] = ()
) -> fx.GraphModule:
    """As `appending`, with what lies between appends and attentions as few calls: for few tokens."""
    return direct(with_regions(appending(module, capacities, narrow)))


def in_place_of_many(
    module: fx.GraphModule, capacities: Mapping[int, int], narrow: Collection[int] = ()
) -> fx.GraphModule:
    """As `appending`, for many tokens: each value is freed after its last reader, which a call of many
    operators does not.
    """
    return direct(without_dispatcher(appending(module, capacities, narrow)))


def appending(
    module: fx.GraphModule, capacities: Mapping[int, int], narrow: Collection[int] = ()
) -> fx.GraphModule:
    """The module with rows of its cache appended in place.

    Args:
        module: flat tensors in, flat tensors out; concatenates new rows to an input.
        capacities: place of such an input → rows that a new buffer of it has room for.
        narrow: places of those that are held in another dtype than the graph's.

    Raises:
        LoweringError: one of these is read by something that takes no other dtype.
    """
    graph = copy.deepcopy(module.graph)
    share_heads(graph)
    graph.eliminate_dead_code()
    holders = graph.find_nodes(op="placeholder")
    for at, capacity in capacities.items():
        for node in list(holders[at].users):
            if appends(node, holders[at]):
                with graph.inserting_before(node):
                    longer = graph.call_function(append, (holders[at], node.args[0][1], capacity))
                longer.meta = dict(node.meta)
                node.replace_all_uses_with(longer)
                graph.erase_node(node)
    attend(graph)
    for holder in (holders[at] for at in narrow):
        _check_readers(holder)
    return fx.GraphModule(module, graph, class_name=type(module).__name__)


def narrowable(module: fx.GraphModule, places: Sequence[int]) -> list[int]:
    """Those of these inputs that may be held in another dtype than the graph's."""
    made = appending(module, dict.fromkeys(places, 0))
    holders = made.graph.find_nodes(op="placeholder")
    return [at for at in places if _other_reader(holders[at]) is None]


def _check_readers(holder: fx.Node) -> None:
    """Raises LoweringError where a cache is read by anything but an append and the attentions behind it."""
    if (other := _other_reader(holder)) is not None:
        raise LoweringError(
            f"A narrower cache is read by attentions alone; {other.name} takes the model's own dtype. Leave "
            "the cache as it is."
        )


def _other_reader(holder: fx.Node) -> fx.Node | None:
    """What reads a cache and is no append, and no attention behind one; the cache itself where nothing is
    appended.
    """
    appended = [user for user in holder.users if user.target is append]
    others = [user for user in holder.users if user not in appended and user.target is not aten.sym_size.int]
    others += [
        user
        for node in appended
        for user in node.users
        if user.op != "output" and not _only_attends(user, node)
    ]
    return next(iter(others), None if appended else holder)


def _only_attends(user: fx.Node, rows: fx.Node) -> bool:
    """Whether rows are keys or values of an attention, and nothing else of it."""
    return user.target is cached_attention and rows not in (user.args[0], user.args[3])


def attend(graph: fx.Graph) -> None:
    """Attentions as those over a cache, which have the same results whatever they read."""
    for node in graph.find_nodes(op="call_function", target=aten.scaled_dot_product_attention.default):
        given = {each.name: argument(node, each.name) for each in node.target._schema.arguments}
        if not given["is_causal"] and not given["dropout_p"]:
            with graph.inserting_before(node):
                names = ("query", "key", "value", "attn_mask", "scale")
                made = graph.call_function(cached_attention, tuple(given[name] for name in names))  # type: ignore[misc]
            made.meta = dict(node.meta)
            node.replace_all_uses_with(made)
            graph.erase_node(node)


def appends(node: fx.Node, holder: fx.Node) -> bool:
    """Whether it is `cat([holder, new], rows)`."""
    if node.target is not aten.cat.default:
        return False
    parts, axis = node.args[0], node.args[1] if len(node.args) > 1 else 0
    return isinstance(parts, (list, tuple)) and len(parts) == 2 and parts[0] is holder and axis in (2, -2)
