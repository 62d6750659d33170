"""Logits only where they are read: a generator reads the last position's row of the output head."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import fx
from torch.utils import _pytree as pytree

from effcompile.core.cost import Cost
from effcompile.core.reasons import Reason
from effcompile.ir.formats import Form, WeightFormat
from effcompile.ir.plan import Plan
from effcompile.ir.program import Program, TensorSpec, shape_of
from effcompile.passes.base import Choice, Context, Declined, Option, Pass
from effcompile.passes.pricing import no_gain, no_linear, price_linear
from effcompile.sites.parts import LinearSite, logits

aten = torch.ops.aten

ALL, LAST = "all", "last"


@dataclass(frozen=True, slots=True, kw_only=True)
class Logits(Pass):
    """Offered only where `goal.reads == "last"`; exact in what is read. The output becomes (B, 1, V).

    What is saved depends on the head's format, which another pass chooses; so there is one option per format,
    `last` (fp32), `last@int8_dynamic`, ..., each requiring it of the head.
    """

    name: ClassVar[str] = "logits"
    exact: ClassVar[bool] = True

    def propose(self, program: Program, context: Context) -> Iterable[Choice | Declined]:
        head = logits(program) if context.goal.reads == "last" else None
        if head is None or shape_of(head.node)[1] == 1:
            return
        options = [Option(form=Form(word=ALL), cost=Cost(), by=self.name)]
        for option in (self._last(head, held, context) for held in context.formats):
            if isinstance(option, Declined):
                yield option
            else:
                options.append(option)
        yield Choice(site=rows_site(head), kind="logits", baseline=ALL, options=tuple(options))

    def _last(self, head: LinearSite, held: WeightFormat, context: Context) -> Option | Declined:
        form = Form(word=LAST, weights=held)
        full, last = (
            price_linear(context, held, (rows, head.k, head.n)) for rows in (head.m, shape_of(head.node)[0])
        )
        if full is None or last is None:
            reason: Reason | None = no_linear(context, held, head.dims)
            cost = None
        else:
            reason = no_gain(last, full, ALL) if last.seconds > full.seconds else None
            cost = replace(last, seconds=last.seconds - full.seconds)
        if reason is not None:
            return Declined(
                site=rows_site(head), kind="logits", option=form.name, by=self.name, reason=reason, cost=cost
            )
        assert cost is not None
        return Option(form=form, cost=cost, by=self.name, requires={head.site: (held.name,)})

    def apply(self, program: Program, plan: Plan) -> Program:
        found = logits(program)
        chosen = plan.forms().get(rows_site(found)) if found else None
        if not found or chosen is None:
            return program.tagged({}, self.name)
        site = rows_site(found)
        if chosen.word == ALL:
            return program.tagged({site: chosen}, self.name)
        edited = program.editable(self.name)
        head = logits(edited)
        assert head is not None
        _slice_input(edited, head)
        outputs = _outputs(edited, head.node)
        edited.module.graph.lint()
        edited.module.recompile()
        return replace(edited, outputs=outputs, tags={**program.tags, site: chosen})


def rows_site(head: LinearSite) -> str:
    """Name of the site at which it is decided which rows of the head are computed."""
    return f"{head.site}:rows"


def _slice_input(program: Program, head: LinearSite) -> None:
    """`x[:, -1:]` before the head, with the metadata that goes with it."""
    with program.graph.inserting_before(head.node):
        last = program.graph.call_function(aten.slice.Tensor, (head.x, 1, -1, sys.maxsize))
    last.meta = {key: head.x.meta[key] for key in ("nn_module_stack", "stack_trace") if key in head.x.meta}
    for node, source in ((last, head.x), (head.node, head.node)):
        value = source.meta.get("val")
        if isinstance(value, torch.Tensor):
            node.meta["val"] = value.new_empty((value.shape[0], 1, *value.shape[2:]))
        node.meta.pop("tensor_meta", None)
    head.node.replace_input_with(head.x, last)


def _outputs(program: Program, node: fx.Node) -> tuple[TensorSpec, ...]:
    """The output specs with one position at the head's place."""
    output = next(n for n in program.graph.nodes if n.op == "output")
    place = [leaf for leaf in pytree.tree_leaves(output.args) if isinstance(leaf, fx.Node)].index(node)
    return tuple(
        replace(s, shape=(s.shape[0], 1, *s.shape[2:])) if i == place else s
        for i, s in enumerate(program.outputs)
    )
