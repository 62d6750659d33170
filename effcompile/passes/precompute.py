"""Linears of weights alone, computed once instead of in each call (constant folding).

DeBERTa projects its table of relative positions in each layer of each call (He et al. 2021, arXiv 2006.03654,
section 3.1), Swin v2 computes its biases of positions by an MLP of coordinates (Liu et al. 2022, arXiv
2111.09883, section 3.3): no input is read. What they make is a constant, whose bytes are held in the place of
the weight's, which others may read. ONNX Runtime, OpenVINO and Inductor do so by themselves, of linears in
any format.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor, fx, nn

from effcompile.core.cost import Cost
from effcompile.core.torch_compat_aot import writes
from effcompile.ir.formats import FP32, Form
from effcompile.ir.plan import Plan
from effcompile.ir.program import Program, shape_of
from effcompile.passes.base import Choice, Context, Declined, Option, Pass
from effcompile.passes.pricing import price_linear
from effcompile.passes.quantize import Tables
from effcompile.sites.parts import LinearSite, linears

PRECOMPUTED = "precomputed"
#: What a linear becomes.
ONCE = Form(word=PRECOMPUTED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Precompute(Pass):
    """One option more for a linear that no input reaches; exact, as the same kernel computes it. One that
    such linears alone read is computed with them, and takes no byte.
    """

    name: ClassVar[str] = "precompute"
    exact: ClassVar[bool] = True

    def propose(self, program: Program, context: Context) -> Iterable[Choice | Declined]:
        if not (found := constant_linears(program)):
            return
        tables = Tables(program, with_embeddings=True, elsewhere=context.elsewhere)
        for site in found:
            if (price := price_linear(context, FP32, site.dims)) is None:
                continue
            behind = _read_by(site, found)
            made = 0 if behind else _bytes(_last(site.node))
            given = Option(
                form=Form(weights=FP32),
                cost=replace(price, weight_bytes=tables.baseline_bytes(site)),
                by=self.name,
                requires=tables.baseline_requires(site),
            )
            constant = Option(
                form=ONCE,
                cost=Cost(weight_bytes=made + tables.kept_bytes(site)),
                by=self.name,
                requires=dict.fromkeys(behind, (PRECOMPUTED,)),
            )
            yield Choice(
                site=site.site,
                kind="linear",
                baseline=FP32.name,
                options=(given, constant),
                covers=frozenset({site.node}),
            )

    def apply(self, program: Program, plan: Plan) -> Program:
        """What the plan has computed already is a constant of the graph."""
        names = {site for site, form in plan.forms().items() if form == ONCE}
        if not names:
            return program.tagged({}, self.name)
        edited = program.editable(self.name)
        found, values = constant_linears(edited), dict[fx.Node, Tensor]()
        last = [_last(site.node) for site in found if site.site in names and not _read_by(site, found)]
        for node in last:
            _put(edited, node, values)
        edited.graph.eliminate_dead_code()
        edited.graph.lint()
        edited.module.recompile()
        return edited


def constant_linears(program: Program) -> list[LinearSite]:
    """Linears that read weights alone, in graph order; none of a graph that writes to what it holds."""
    if any(writes(node) for node in program.graph.nodes):
        return []
    constants = set[fx.Node]()
    for node in program.graph.nodes:
        made = node.op == "call_function" and all(each in constants for each in node.all_input_nodes)
        if node.op == "get_attr" or (made and _is_settled(node)):
            constants.add(node)
    return [site for site in linears(program) if site.node in constants]


def _is_settled(node: fx.Node) -> bool:
    """Whether it makes one tensor, of sizes that are numbers, and the same one in each call."""
    value = node.meta.get("val")
    drawn = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
    return isinstance(value, Tensor) and all(isinstance(size, int) for size in value.shape) and not drawn


def _read_by(site: LinearSite, others: Iterable[LinearSite]) -> list[str]:
    """Those that read it where they alone do, through what reads nothing else."""
    names = {other.node: other.site for other in others}
    found, left = set[str](), list(site.node.users)
    while left:
        user = left.pop()
        if user in names:
            found.add(names[user])
        elif user.op != "call_function" or not _is_settled(user) or not _alone(user):
            return []
        else:
            left += user.users
    return sorted(found)


def _last(node: fx.Node) -> fx.Node:
    """The last of the operators behind a constant that read nothing else, one after the other, and make no
    more bytes than it: views, and a scale.
    """
    while len(node.users) == 1:
        [user] = node.users
        settled = user.op == "call_function" and _is_settled(user) and _alone(user)
        if not settled or _bytes(user) > _bytes(node):
            break
        node = user
    return node


def _alone(node: fx.Node) -> bool:
    """Whether all that it reads are one value and constants that the model holds."""
    return sum(each.op != "get_attr" for each in node.all_input_nodes) == 1


def _bytes(node: fx.Node) -> int:
    return math.prod(shape_of(node)) * node.meta["val"].element_size()


@torch.no_grad()
def _value(program: Program, node: fx.Node, values: dict[fx.Node, Tensor]) -> Tensor:
    """What a node makes of weights alone, with what is known already."""
    if node not in values:
        held = program.tensor(node)
        if held is None:
            args, kwargs = fx.node.map_arg(
                (node.args, dict(node.kwargs)), lambda each: _value(program, each, values)
            )
            held = node.target(*args, **kwargs)  # type: ignore[operator]
        values[node] = held
    return values[node]


def _put(program: Program, node: fx.Node, values: dict[fx.Node, Tensor]) -> None:
    """The constant in the node's place."""
    made = _value(program, node, values).detach()
    name = f"_{PRECOMPUTED}_{node.name}"
    program.module.register_parameter(name, nn.Parameter(made, requires_grad=False))
    with program.graph.inserting_before(node):
        constant = program.graph.get_attr(name)
    constant.meta = dict(node.meta)
    node.replace_all_uses_with(constant)
    program.graph.erase_node(node)
