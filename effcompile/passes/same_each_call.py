"""What a graph computes of weights and constants alone, the same in each call: no input reaches it, nothing
is drawn, no size depends on an input's.

A value is worth holding where something that is not the same in each call reads it. Of a view that is what it
is a view of: a mask that is expanded to all windows and heads is held as it was before.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from effcompile.core.torch_compat_aot import writes
from effcompile.estimate.storages import storages
from effcompile.ir.program import Program, module_path, shape_of
from effcompile.passes.constants import storage_of
from effcompile.sites.parts import ROOT, LinearSite, embeddings, linears


@dataclass(frozen=True, slots=True, kw_only=True)
class ConstantValue:
    """A value that may be computed once.

    Attributes:
        by: the linear that makes it, but for views and what makes no more bytes; None of any other.
        behind: further linears that it is made from.
        computed: the operators that make it and nothing that is held later, but for linears.
        frees: bytes of weights that those alone read, without linears' and embeddings'.
    """

    node: fx.Node
    by: LinearSite | None
    behind: tuple[LinearSite, ...]
    computed: tuple[fx.Node, ...]
    frees: int

    @property
    def site(self) -> str:
        return value_site(self.node)

    @property
    def nbytes(self) -> int:
        return _bytes(self.node)


def value_site(node: fx.Node) -> str:
    """What a value that may be held is called."""
    return f"{module_path(node) or ROOT}:{node.name}"


def constant_linears(program: Program) -> list[LinearSite]:
    """Linears that read weights alone, in graph order."""
    same = same_each_call(program)
    return [site for site in linears(program) if site.node in same] if same else []


def same_each_call(program: Program) -> dict[fx.Node, None]:
    """Calls that make the same each time, in graph order; none of a graph that writes to what it holds."""
    found = dict[fx.Node, None]()
    if any(writes(node) for node in program.graph.nodes):
        return found
    for node in program.calls():
        known = all(each in found or program.tensor(each) is not None for each in node.all_input_nodes)
        if known and _is_settled(node):
            found[node] = None
    return found


def held(program: Program, elsewhere: Collection[int] = ()) -> list[ConstantValue]:
    """The values of a program that may be computed once, in graph order.

    `elsewhere`: storages that other graphs of the model read.
    """
    if not (same := same_each_call(program)):
        return []
    makers, output = _makers(program, same), program.graph.output_node()
    ends = [node for node in same if any(user not in same for user in node.users)]
    # what is returned is the caller's, who may write to it
    returned = {root for node in ends if output in node.users for root in _roots(node, makers)}
    roots = dict.fromkeys(root for node in ends for root in _roots(node, makers) if root not in returned)
    behind = {root: _behind(root, roots, same) for root in roots}
    last: dict[fx.Node, fx.Node | None] = {node: root for root, nodes in behind.items() for node in nodes}
    for node in returned:
        last |= dict.fromkeys(_behind(node, roots, same))
    known = {site.node: site for site in linears(program) if site.node in same}
    by = {root: site for site in known.values() if (root := _made_alone(site.node, roots, same)) is not None}
    owned = _owned(program, last, elsewhere)
    return [
        ConstantValue(
            node=root,
            by=by.get(root),
            behind=tuple(known[n] for n in nodes if n in known and known[n] is not by.get(root)),
            computed=tuple(n for n in nodes if last[n] is root and n in makers and n not in known),
            frees=owned[root],
        )
        for root, nodes in behind.items()
    ]


def alone(program: Program, nodes: Iterable[fx.Node]) -> tuple[Program, dict[fx.Node, fx.Node]]:
    """A program, without inputs, of nodes that no input reaches and the weights that they read; and which of
    its nodes each is.
    """
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in nodes:
        for each in (*node.all_input_nodes, node):
            if each not in copies:
                copies[each] = graph.node_copy(each, copies.__getitem__)
    graph.output(tuple(copies.values()))
    return replace(program, module=fx.GraphModule(program.module, graph), args=(), kwargs={}), copies


def _is_settled(node: fx.Node) -> bool:
    """Whether it makes tensors alone, of sizes that are numbers, and the same ones in each call."""
    made = pytree.tree_leaves(node.meta.get("val"))
    drawn = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
    fixed = all(isinstance(v, Tensor) and all(isinstance(size, int) for size in v.shape) for v in made)
    return bool(made) and fixed and not drawn


def _makers(program: Program, same: Iterable[fx.Node]) -> set[fx.Node]:
    """Of these nodes those that make something: the others are views."""
    part, copies = alone(program, same)
    seen = storages(part)
    return {node for node in same if not seen.is_free(copies[node])}


def _roots(node: fx.Node, makers: Collection[fx.Node]) -> Iterator[fx.Node]:
    """What a value is a view of. Of several results of an operator each is held by itself."""
    source = node.args[0] if node.args else None
    part = isinstance(source, fx.Node) and source in makers and not isinstance(source.meta["val"], Tensor)
    if part or node in makers:
        yield from (node,) if isinstance(node.meta["val"], Tensor) else ()
    else:
        for each in node.all_input_nodes:
            if each.op == "call_function":
                yield from _roots(each, makers)


def _behind(root: fx.Node, roots: Collection[fx.Node], same: Collection[fx.Node]) -> list[fx.Node]:
    """What a value is made from, itself included, but for other values that are held and what those are made
    from alone.
    """
    found, left = dict.fromkeys([root]), [root]
    while left:
        for each in left.pop().all_input_nodes:
            if each in same and each not in found and each not in roots:
                found[each] = None
                left.append(each)
    return list(found)


def _made_alone(node: fx.Node, roots: Collection[fx.Node], same: Collection[fx.Node]) -> fx.Node | None:
    """The last value to be held that is made of a linear and of constants that the model holds, one operator
    after the other, none of which makes more bytes: views, and a scale. None where there is none.
    """
    found = node if node in roots else None
    while len(node.users) == 1:
        [user] = node.users
        read = sum(each.op != "get_attr" for each in user.all_input_nodes)
        several = not isinstance(user.meta["val"], Tensor)
        if user not in same or read != 1 or several or _bytes(user) > _bytes(node):
            break
        node, found = user, user if user in roots else found
    return found


def _owned(
    program: Program, last: Mapping[fx.Node, fx.Node | None], elsewhere: Collection[int]
) -> Mapping[fx.Node, int]:
    """Value → bytes of weights that only what is computed for it reads; without those that linears and
    embeddings count.
    """
    readers, sizes = defaultdict[int, set[fx.Node | None]](set), dict[int, int]()
    for node in program.graph.find_nodes(op="get_attr"):
        if (tensor := program.tensor(node)) is not None:
            sizes[storage_of(tensor)] = tensor.untyped_storage().nbytes()
            readers[storage_of(tensor)] |= {last.get(user) for user in node.users}
    weights = [site.weight for site in linears(program)] + [site.weight for site in embeddings(program)]
    counted = map(program.tensor, weights)
    others = {storage_of(tensor) for tensor in counted if tensor is not None} | set(elsewhere)
    found = defaultdict[fx.Node, int](int)
    for storage, values in readers.items():
        [*one] = values
        if storage not in others and len(one) == 1 and one[0] is not None:
            found[one[0]] += sizes[storage]
    return found


def _bytes(node: fx.Node) -> int:
    return math.prod(shape_of(node)) * int(node.meta["val"].element_size())
