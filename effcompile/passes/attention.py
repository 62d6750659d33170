"""The form of each attention: one kernel with split heads, one kernel on packed heads, or separate kernels. All exact."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from effcompile.passes.base import Choice, Context, Declined, Option
from effcompile.passes.pricing import no_gain, no_kernel, price
from effcompile.plan import Plan
from effcompile.program import Program, shape_of
from effcompile.sites import AttentionSite, attentions

aten = torch.ops.aten
FORMS = ("sdpa", "packed", "math")


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Chooses by price alone and tags; the backend emits the form."""

    name: ClassVar[str] = "attention"
    exact: ClassVar[bool] = True

    def propose(self, program: Program, context: Context) -> Iterable[Choice | Declined]:
        for site in attentions(program):
            yield from self._at(site, context)

    def apply(self, program: Program, plan: Plan) -> Program:
        chosen = plan.options()
        return program.tagged({s.site: chosen[s.site] for s in attentions(program) if s.site in chosen}, self.name)

    def _at(self, site: AttentionSite, context: Context) -> Iterator[Choice | Declined]:
        options: list[Option] = []
        for form in FORMS:
            kernel = f"attention/{form}"
            cost = price(context, kernel, *site.dims)
            reason = "" if form != "packed" else _why_not_packed(site)
            if cost is None:
                reason = no_kernel(context, kernel)
            elif options and cost.seconds > options[0].cost.seconds:
                reason = reason or no_gain(cost, options[0].cost, options[0].name)
            if reason or cost is None:
                yield Declined(site=site.site, kind="attention", option=form, by=self.name, reason=reason, cost=cost)
            else:
                options.append(Option(name=form, cost=cost, by=self.name))
        if options:  # the first form that the backend has is what it makes of an unplanned model
            yield Choice(site=site.site, kind="attention", baseline=options[0].name, options=tuple(options))


def _why_not_packed(site: AttentionSite) -> str:
    """Why the heads cannot be read packed, (B, S, H·D), as they are; "" if they can."""
    for name, value in zip("qkv", site.node.args[:3], strict=True):
        if not (isinstance(value, fx.Node) and _swaps_heads(value)):
            return f"the heads of {name} are not split right before it, so packing would add a transpose"
    if not all(_swaps_heads(user) for user in _readers(site.node)):
        return "its result is read with heads apart, so packing would add a transpose"
    return ""


def _readers(node: fx.Node) -> Iterator[fx.Node]:
    """Who reads a value, looking through views to the same shape."""
    for user in node.users:
        if user.target is aten.view.default and shape_of(user) == shape_of(node):
            yield from _readers(user)
        else:
            yield user


def _swaps_heads(node: fx.Node) -> bool:
    """True for a transpose of axes 1 and 2 of a 4-D tensor."""
    if node.target is aten.transpose.int:
        return sorted(d % 4 for d in node.args[1:3] if isinstance(d, int)) == [1, 2]
    return node.target is aten.permute.default and list(node.args[1]) == [0, 2, 1, 3]  # type: ignore[arg-type]
