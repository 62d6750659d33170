"""What torch's operators do and OpenVINO's of the same name do not, written out in the graph."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import fx

from effcompile.ir.program import Program, dtype_of, shape_of

aten = torch.ops.aten


def attended(program: Program) -> Program:
    """The program whose queries that may see nothing, as those of padding before a text, see everything and
    then give 0, as in torch; itself where no mask hides anything.

    OpenVINO's attention gives no number for them, which the next layer or a cache then multiplies by 0.
    """
    if not any(_masked(node) for node in program.graph.nodes):
        return program
    edited = program.editable("hidden")
    known: dict[fx.Node, tuple[fx.Node, fx.Node]] = {}
    for node in list(edited.graph.nodes):
        if not _masked(node):
            continue
        mask = _mask(node)
        assert mask is not None
        if mask not in known:
            with edited.graph.inserting_after(mask):
                sees = edited.graph.call_function(aten.any.dim, (mask, -1, True))
            with edited.graph.inserting_after(sees):
                blind = edited.graph.call_function(aten.logical_not.default, (sees,))
            with edited.graph.inserting_after(blind):
                wider = edited.graph.call_function(aten.logical_or.default, (mask, blind))
            known[mask] = sees, wider
        sees, wider = known[mask]
        node.replace_input_with(mask, wider)
        with edited.graph.inserting_after(node):
            made = edited.graph.call_function(aten.mul.Tensor, (node, sees))
        node.replace_all_uses_with(made, delete_user_cb=lambda user, made=made: user is not made)
    edited.graph.lint()
    edited.module.recompile()
    return replace(edited, history=program.history)


def joined(program: Program) -> Program:
    """The program that concatenates nothing of one dimension, with which torch's caches begin."""
    found = {
        node: [each for each in node.args[0] if not _nothing(program, each)]
        for node in program.graph.find_nodes(op="call_function", target=aten.cat.default)
    }
    if all(len(parts) == len(node.args[0]) for node, parts in found.items()):
        return program
    edited = program.editable("joined")
    same = dict(zip(program.graph.nodes, edited.graph.nodes, strict=True))
    for node, parts in found.items():
        if len(parts) == 1:
            same[node].replace_all_uses_with(same[parts[0]])
        elif parts:
            same[node].args = ([same[part] for part in parts], *node.args[1:])
    edited.graph.eliminate_dead_code()
    edited.module.recompile()
    return replace(edited, history=program.history)


def _nothing(program: Program, node: fx.Node) -> bool:
    constant = program.tensor(node) if node.op == "get_attr" else None
    return constant is not None and constant.shape == (0,)


def _mask(node: fx.Node) -> fx.Node | None:
    found = node.args[3] if len(node.args) > 3 else node.kwargs.get("attn_mask")
    return found if isinstance(found, fx.Node) else None


def _masked(node: fx.Node) -> bool:
    """Whether a query may see nothing where another sees something: with one mask for all of a text, it is
    the whole text that is padding.
    """
    if node.target is not aten.scaled_dot_product_attention.default:
        return False
    mask = _mask(node)
    if mask is None or dtype_of(mask) is not torch.bool:
        return False
    while mask.target is aten.expand.default:
        mask = mask.all_input_nodes[0]
    return shape_of(mask)[-2:-1] != (1,)
