"""What weights alone make, computed once instead of in each call (constant folding).

DeBERTa projects its table of relative positions in each layer of each call (He et al. 2021, arXiv 2006.03654,
section 3.1), Swin gathers biases of positions and makes masks of windows (Liu et al. 2021, arXiv 2103.14030,
section 3.2), Swin v2 makes its biases by an MLP of coordinates (Liu et al. 2022, arXiv 2111.09883, section
3.3), wav2vec 2.0 norms the weight of its convolution of positions (Baevski et al. 2020, arXiv 2006.11477,
section 4.2): no input is read. What they make is a constant, whose bytes are held beside the weights, or in
the place of those that nothing else reads. ONNX Runtime, OpenVINO and Inductor do so by themselves, linears
in any format included.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor, fx, nn

from effcompile.core.cost import Cost, total
from effcompile.estimate.nodes import estimate
from effcompile.ir.formats import FP32, Form
from effcompile.ir.plan import Plan
from effcompile.ir.program import Program
from effcompile.passes.base import Choice, Context, Declined, Option, Pass
from effcompile.passes.pricing import price_linear
from effcompile.passes.quantize import Tables
from effcompile.passes.same_each_call import ConstantValue, alone, held, same_each_call, value_site

KIND, COMPUTED, PRECOMPUTED = "constant", "computed", "precomputed"
#: What a linear or a value becomes.
ONCE = Form(word=PRECOMPUTED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Precompute(Pass):
    """One option more for a linear that no input reaches, and a choice for each other value that is the same
    in each call; exact, as the model's own operators compute it. What is made for such values alone is
    computed with them, and takes no byte.
    """

    name: ClassVar[str] = "precompute"
    exact: ClassVar[bool] = True

    def propose(self, program: Program, context: Context) -> Iterable[Choice | Declined]:
        if not (found := held(program, context.elsewhere)):
            return
        yield from self._linears(program, context, found)
        if context.goal.mode != "inference":
            return  # a step finds its masks again behind the passes, by the operators that make them
        costs = _costs(program, context, [node for each in found for node in each.computed])
        for each in found:
            cost = total([costs[node] for node in each.computed if node in costs])
            if cost.seconds <= 0:
                continue
            taken = 0 if each.by is not None else each.nbytes
            requires = {} if each.by is None else {each.by.site: (PRECOMPUTED,)}
            options = (
                Option(form=Form(word=COMPUTED), cost=replace(cost, weight_bytes=each.frees), by=self.name),
                Option(form=ONCE, cost=Cost(weight_bytes=taken), by=self.name, requires=requires),
            )
            covers = frozenset(each.computed)
            yield Choice(site=each.site, kind=KIND, baseline=COMPUTED, options=options, covers=covers)

    def apply(self, program: Program, plan: Plan) -> Program:
        """What the plan has computed already is a constant of the graph."""
        names = {site for site, form in plan.forms().items() if form == ONCE}
        if not names:
            return program.tagged({}, self.name)
        edited = program.editable(self.name)
        places = {value_site(node): node for node in same_each_call(edited)}
        places |= {each.by.site: each.node for each in held(edited) if each.by is not None}
        chosen = dict.fromkeys(node for name, node in places.items() if name in names)
        values = dict[fx.Node, Tensor]()
        for node in chosen:
            _value(edited, node, values)
        for node in chosen:
            _put(edited, node, values[node])
        edited.graph.eliminate_dead_code()
        edited.graph.lint()
        edited.module.recompile()
        return edited

    def _linears(self, program: Program, context: Context, found: list[ConstantValue]) -> Iterator[Choice]:
        tables = Tables(program, with_embeddings=True, elsewhere=context.elsewhere)
        made = {each.by.site: each for each in found if each.by is not None}
        readers = defaultdict[str, list[str]](list)
        for each in found:
            for made_from in each.behind:
                readers[made_from.site].append(each.site if each.by is None else each.by.site)
        for site in dict.fromkeys(site for each in found for site in (*each.behind, each.by)):
            price = None if site is None else price_linear(context, FP32, site.dims)
            if site is None or price is None:
                continue
            given = Option(
                form=Form(weights=FP32),
                cost=replace(price, weight_bytes=tables.baseline_bytes(site)),
                by=self.name,
                requires=tables.baseline_requires(site),
            )
            taken = made[site.site].nbytes if site.site in made else 0
            constant = Option(
                form=ONCE,
                cost=Cost(weight_bytes=taken + tables.kept_bytes(site)),
                by=self.name,
                requires=dict.fromkeys(readers[site.site], (PRECOMPUTED,)),
            )
            yield Choice(
                site=site.site,
                kind="linear",
                baseline=FP32.name,
                options=(given, constant),
                covers=frozenset({site.node}),
            )


def _costs(program: Program, context: Context, nodes: Iterable[fx.Node]) -> dict[fx.Node, Cost]:
    """What these nodes, which no input reaches, take in each call."""
    part, copies = alone(program, same_each_call(program))
    asked = {copies[node]: node for node in nodes}
    others = {node: 0.0 for node in part.calls() if node not in asked}
    found = estimate(part, context.target, context.backend, others)
    return {
        node: Cost(seconds=figures.seconds, provenance=figures.provenance)
        for copy, node in asked.items()
        if (figures := found.nodes.get(copy)) is not None
    }


@torch.no_grad()
def _value(program: Program, node: fx.Node, values: dict[fx.Node, Tensor]) -> Tensor:
    """What a node makes of weights alone, with what is known already."""
    if node not in values:
        made = program.tensor(node)
        if made is None:
            args, kwargs = fx.node.map_arg(
                (node.args, dict(node.kwargs)), lambda each: _value(program, each, values)
            )
            made = node.target(*args, **kwargs)  # type: ignore[operator]
        values[node] = made
    return values[node]


def _put(program: Program, node: fx.Node, value: Tensor) -> None:
    """The constant in the node's place."""
    name = f"_{PRECOMPUTED}_{node.name}"
    held_as = nn.Parameter(value.detach(), requires_grad=False)
    program.module.register_parameter(name, held_as)
    with program.graph.inserting_before(node):
        constant = program.graph.get_attr(name)
    constant.meta = dict(node.meta)
    node.replace_all_uses_with(constant)
    program.graph.erase_node(node)
