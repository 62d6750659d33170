"""A step of generation at the sizes that it is planned for: a prompt's tokens into an empty cache, and one
token behind a long one.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from effcompile.backends.torch.edit_attentions import share_heads
from effcompile.capture.generation import GenerationStep
from effcompile.core.types import Args, Kwargs
from effcompile.ir.cache import CacheLeaf, Growth
from effcompile.ir.export import refresh_shapes
from effcompile.ir.program import Program

aten = torch.ops.aten


def sized(
    step: GenerationStep, program: Program, *, batch: int, past: int, new: int, images: int = 0
) -> Program:
    """The program at an example of these sizes, its nodes' shapes too. Nothing is computed.

    `images`: rows of images, where it takes any.
    """
    return at_inputs(program, (), _example(step, program, batch=batch, past=past, new=new, images=images))


def at_inputs(program: Program, args: Args, kwargs: Kwargs) -> Program:
    """The program at these inputs as its example, its nodes' shapes too. Nothing is computed."""
    copy = program.editable("sized")
    refresh_shapes(copy.module, args, kwargs)
    return replace(copy, args=args, kwargs=kwargs, history=program.history)


def behind(step: GenerationStep, positions: int) -> GenerationStep:
    """The step behind an encoder's output of so many positions."""
    given = dict(step.program.kwargs)
    given["past"] = [
        leaf.new_zeros(()).expand(*leaf.shape[:2], positions, leaf.shape[3])
        if what.growth is Growth.SOURCE
        else leaf
        for leaf, what in zip(given["past"], step.layout, strict=True)
    ]
    return replace(step, program=replace(step.program, kwargs=given))


def _example(
    step: GenerationStep, program: Program, *, batch: int, past: int, new: int, images: int
) -> dict[str, Any]:
    """Inputs of these sizes; the cache as meta tensors would be, of zeros that take no memory."""
    like: Mapping[str, Any] = program.kwargs
    tokens = like["tokens"]
    source = next(
        (
            leaf.shape[2]
            for leaf, what in zip(like["past"], step.layout, strict=True)
            if what.growth is Growth.SOURCE
        ),
        0,
    )
    positions = torch.arange(past, past + new, device=tokens.device).expand(batch, new)
    given: dict[str, Any] = {
        "tokens": tokens[:1, :1].expand(batch, new),
        "mask": torch.ones((), dtype=torch.int64, device=tokens.device).expand(
            batch, new if step.boundary.local else past + new
        ),
        "positions": [positions] * step.boundary.axes or positions,
        "rows": torch.arange(new - 1, new, device=tokens.device),
        "kinds": torch.zeros((), dtype=torch.int64, device=tokens.device).expand(batch, past + new),
        "images": [
            rows.new_zeros((images, rows.shape[1])) if images else rows[:0] for rows in like.get("images", ())
        ],
        "source_mask": torch.ones((), dtype=torch.int64, device=tokens.device).expand(batch, source),
        "past": [
            _leaf(leaf, what, batch, past, source)
            for leaf, what in zip(like["past"], step.layout, strict=True)
        ],
    }
    return {name: given[name] for name in like}


def _leaf(like: torch.Tensor, what: CacheLeaf, batch: int, past: int, source: int) -> torch.Tensor:
    if what.growth is Growth.STATE:
        return like.new_zeros(()).expand(batch, *what.shape)
    return like.new_zeros(()).expand(batch, what.shape[0], what.rows(past, source), like.shape[3])


def solid(program: Program) -> Program:
    """The program with an example that has memory of its own: torch.export loses the free sizes of one that
    is expanded.
    """
    kwargs = pytree.tree_map_only(torch.Tensor, torch.Tensor.contiguous, dict(program.kwargs))
    return replace(program, kwargs=kwargs)


def filled(
    step: GenerationStep, program: Program, *, batch: int, context: int, new: int, lean: bool = False,
    images: int = 0,
) -> Program:  # fmt: skip
    """The program as it runs in place at the end of a context: its cache enters with the new rows in it, and
    only those leave.

    It has the operators and the memory of the step whose concatenations are appends; only what it computes is
    another thing. `lean`: it keeps no new row beside the cache where that has room, and repeats none for the
    queries of a group: so steps run in place. `images`: as `sized` has it.
    """
    example = _example(step, program, batch=batch, past=context - new, new=new, images=images)
    edited = program.editable("filled")  # its nodes' shapes are those of another size until the end
    if lean:
        share_heads(edited.graph)
    holders = [node for node in edited.graph.nodes if node.op == "placeholder"]
    names = [spec.name for spec in program.inputs]
    tokens = holders[names.index("tokens")]
    caches = [node for node, name in zip(holders, names, strict=True) if name.startswith("past")]
    rows: dict[fx.Node, fx.Node] = {}
    places = [
        at for at in step.layout.appended if not lean or _has_room(step.layout.leaves[at], context, new)
    ]
    for at in places:
        rows |= _filled(edited.graph, caches[at], tokens)
    if lean:
        rows = {appended: _read_here(edited.graph, appended, new_rows) for appended, new_rows in rows.items()}
    results = pytree.tree_map_only(
        fx.Node, lambda node: rows.get(node, node), edited.graph.output_node().args[0]
    )
    for at in places:
        for appended in [node for node in caches[at].users if node in rows]:
            appended.replace_all_uses_with(caches[at], delete_user_cb=lambda user: user.op != "output")
    edited.graph.output_node().args = (results,)
    edited.graph.eliminate_dead_code()
    example["past"] = [
        leaf.new_zeros(()).expand(*leaf.shape[:2], leaf.shape[2] + new, leaf.shape[3])
        if at in places
        else leaf
        for at, leaf in enumerate(example["past"])
    ]
    refresh_shapes(edited.module, (), example)
    edited.module.recompile()
    return replace(edited, args=(), kwargs=example, history=program.history)


def _has_room(leaf: CacheLeaf, context: int, new: int) -> bool:
    """Whether new rows stand in the buffer of a leaf: a window's is left for a larger one by a long chunk."""
    return leaf.rows(context - new) + new <= leaf.capacity(context)


def _read_here(graph: fx.Graph, at: fx.Node, rows: fx.Node) -> fx.Node:
    """A size of the rows, read where they are appended: they are held until then."""
    with graph.inserting_before(at):
        return graph.call_function(aten.sym_size.int, (rows, 2))


def _filled(graph: fx.Graph, holder: fx.Node, tokens: fx.Node) -> dict[fx.Node, fx.Node]:
    """A leaf's concatenation → its new rows; sizes that are read of the leaf are those without them."""
    found: dict[fx.Node, fx.Node] = {}
    for user in list(holder.users):
        parts: Any = user.args[0]
        if user.target is aten.cat.default and parts[0] is holder:
            found[user] = parts[1]
        elif user.target is aten.sym_size.int and user.args[1] == 2:
            with graph.inserting_after(user):
                new = graph.call_function(aten.sym_size.int, (tokens, 1))
            with graph.inserting_after(new):
                less = graph.call_function(operator.sub, (user, new))
            user.replace_all_uses_with(less, delete_user_cb=partial(operator.is_not, less))
    return found


def scored(program: Program) -> Program:
    """The program with logits as its only result: the error that is limited is theirs."""
    edited = program.editable("scored")
    edited.graph.output_node().args = ((edited.tensor_results()[0],),)
    codegen: Any = edited.graph._codegen
    spec = pytree.tree_structure({"logits": 0})
    codegen.pytree_info = codegen.pytree_info._replace(out_spec=spec)
    edited.graph.eliminate_dead_code()
    edited.module.recompile()
    return replace(edited, outputs=program.outputs[:1], carried={}, history=program.history)
