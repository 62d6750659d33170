"""Norms, gates and rotations between the products as one kernel each, for where no compiler fuses
element-wise work.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import fx

from effcompile.core.cost import Cost
from effcompile.core.reasons import Because, NotAllowed, Reason, Unsupported
from effcompile.estimate.nodes import kernel_calls
from effcompile.ir.formats import Form
from effcompile.ir.plan import Plan
from effcompile.ir.program import Program, dtype_of
from effcompile.machine.target import KernelCall
from effcompile.passes.base import Choice, Context, Declined, Option, Pass
from effcompile.passes.pricing import EVERYWHERE, no_gain, no_kernel, price
from effcompile.sites.rows import NORM, ROTARY, ROW_SITE, SWIGLU, RowSite, row_sites, unmatched

KIND = "rows"
FUSED, SEPARATE = "fused", "separate"
#: What one rounding instead of several moves a result by, squared and relative: half a unit in the last place
#: of the dtype.
_ROUNDING = {torch.bfloat16: 2.0**-18, torch.float16: 2.0**-24}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows(Pass):
    """RMSNorm with its residual sum, SwiGLU and rotary positions as `effcompile::rms_norm`, `swiglu` and
    `rotary`.

    They are priced by the memory that they move: each element is read and written once, by separate operators
    many times. Inductor fuses such chains by itself; a CPU has such kernels of fp32 (ops/rows_native.py).
    In 16 bits a kernel rounds once where the model rounds several times: that is offered where the goal
    allows an error.
    """

    name: ClassVar[str] = "rows"
    exact: ClassVar[bool] = True

    def propose(self, program: Program, context: Context) -> Iterable[Choice | Declined]:
        sites = row_sites(program)
        if not sites:
            return
        if (reason := _elsewhere(context, sites[0])) is not None:
            yield Declined(site=EVERYWHERE, kind=KIND, option=FUSED, by=self.name, reason=reason)
            return
        for place, why in unmatched(program, sites):
            yield Declined(site=place, kind=KIND, option=FUSED, by=self.name, reason=why)
        calls = kernel_calls(program)
        for site in sites:
            yield from self._choose(context, site, [call for node in site.nodes for call in calls[node]])

    def apply(self, program: Program, plan: Plan) -> Program:
        """One operator in the place of each chain that the plan has fused."""
        chosen = plan.forms()
        if not any(site.site in chosen and chosen[site.site].word == FUSED for site in row_sites(program)):
            return program.tagged({}, self.name)
        edited = program.editable(self.name)
        mine = [site for site in row_sites(edited) if site.site in chosen]
        made: dict[fx.Node, fx.Node] = {}
        for site in mine:
            if chosen[site.site].word == FUSED:
                made |= _emit(
                    edited, replace(site, inputs=tuple(made.get(node, node) for node in site.inputs))
                )
        edited.graph.eliminate_dead_code()
        edited.module.recompile()
        return replace(edited, tags={**program.tags, **{site.site: chosen[site.site] for site in mine}})

    def _choose(
        self, context: Context, site: RowSite, calls: list[KernelCall]
    ) -> Iterator[Choice | Declined]:
        separate, fused = _sum_of(context, calls), price(context, *_kernel(site))
        if separate is None:
            yield self._declined(site, no_kernel(context, "pointwise/fp32"), None)
            return
        options = [Option(form=Form(word=SEPARATE), cost=separate, by=self.name)]
        rounding = 0.0 if site.exact else _ROUNDING.get(dtype_of(site.node) or torch.float32, 0.0)
        if fused is None:
            yield self._declined(site, no_kernel(context, str(_kernel(site)[0])), None)
        elif rounding and context.goal.exact:
            yield self._declined(
                site, NotAllowed(because="it rounds once where the model rounds several times"), fused
            )
        elif fused.seconds >= separate.seconds:
            yield self._declined(site, no_gain(fused, separate, SEPARATE), fused)
        else:
            note = Because(
                "one kernel for {} operators" + (", the residual sum among them" if site.total else ""),
                (len(site.nodes),),
            )
            options.append(
                Option(
                    form=Form(word=FUSED),
                    cost=replace(fused, error_squared=rounding),
                    by=self.name,
                    note=note,
                )
            )
        yield Choice(
            site=site.site, kind=KIND, baseline=SEPARATE, options=tuple(options), covers=frozenset(site.nodes)
        )

    def _declined(self, site: RowSite, reason: Reason, cost: Cost | None) -> Declined:
        return Declined(site=site.site, kind=KIND, option=FUSED, by=self.name, reason=reason, cost=cost)


def _elsewhere(context: Context, site: RowSite) -> Reason | None:
    """Why none of them is offered on a backend; None where it has the kernels."""
    if context.backend == "torch-inductor":
        return Unsupported("Inductor fuses element-wise work by itself")
    if context.backend == "torch-eager" and dtype_of(site.node) in (torch.float32, None):
        return None  # a CPU has them: ops/rows_native.py
    if context.backend != "triton":
        return no_kernel(context, str(_kernel(site)[0]), because="the triton backend has, on a GPU")
    return None


def _kernel(site: RowSite) -> tuple[str, int, int]:
    """The kernel of a site and its dimensions, as `target.KERNELS` has them."""
    return f"rows/{'add_' if site.total is not None else ''}{site.form}", *site.dims


def _sum_of(context: Context, calls: Iterable[KernelCall]) -> Cost | None:
    """Of the operators as the model has them, one kernel after another."""
    priced = [price(context, call.kernel, *call.dims) for call in calls]
    return (
        None
        if any(cost is None for cost in priced)
        else sum((cost for cost in priced if cost is not None), start=Cost())
    )


# ------------------------------------------------------------------ emission


def _emit(program: Program, site: RowSite) -> dict[fx.Node, fx.Node]:
    """One operator in the place of a chain; what it gave → what gives it now."""
    with program.graph.inserting_before(site.node):
        results = {NORM: _emit_norm, SWIGLU: _emit_swiglu, ROTARY: _emit_rotary}[site.form](
            program.graph, site
        )
    for old, new in results.items():
        old.replace_all_uses_with(new)
    for node in reversed(site.nodes):
        program.graph.erase_node(node)
    return results


def _emit_norm(graph: fx.Graph, site: RowSite) -> dict[fx.Node, fx.Node]:
    ours = torch.ops.effcompile
    if site.total is None:
        return {
            site.node: _call(
                graph, site, ours.rms_norm_alone.default, (*site.inputs, site.eps), site.node.meta["val"]
            )
        }
    value = site.node.meta["val"]
    inverse = value.new_empty(
        (*value.shape[:-1], 1), dtype=torch.float64 if value.dtype == torch.float64 else torch.float32
    )
    both = _call(
        graph, site, ours.rms_norm.default, (*site.inputs, site.eps), (value, site.total.meta["val"], inverse)
    )
    results = {}
    for index, node in enumerate((site.node, site.total)):
        results[node] = graph.call_function(operator.getitem, (both, index))
        results[node].meta = dict(node.meta)
    return results


def _emit_swiglu(graph: fx.Graph, site: RowSite) -> dict[fx.Node, fx.Node]:
    return {
        site.node: _call(graph, site, torch.ops.effcompile.swiglu.default, site.inputs, site.node.meta["val"])
    }


def _emit_rotary(graph: fx.Graph, site: RowSite) -> dict[fx.Node, fx.Node]:
    return {
        site.node: _call(
            graph, site, torch.ops.effcompile.rotary.default, (*site.inputs, False), site.node.meta["val"]
        )
    }


def _call(graph: fx.Graph, site: RowSite, target: object, args: tuple[object, ...], value: object) -> fx.Node:
    """A node of ours, with the module and the shape of the one that it stands for."""
    made = graph.call_function(target, args)  # type: ignore[arg-type]
    made.meta = {**site.node.meta, "val": value, ROW_SITE: site.site}
    return made
