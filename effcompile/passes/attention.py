"""The form of each attention: one kernel with split heads, one kernel on packed heads, separate kernels, or q and k in 8 bits."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import fx

from effcompile.cost import Provenance
from effcompile.passes.base import Choice, Context, Declined, Option
from effcompile.passes.pricing import no_error_allowed, no_gain, no_kernel, price
from effcompile.plan import Plan
from effcompile.program import Program, shape_of
from effcompile.sites import AttentionSite, attentions, linears

aten = torch.ops.aten
FORMS = ("sdpa", "packed", "math")
INT8 = "sdpa_int8"
#: Operators between a linear and the heads made of its result: they move elements and change none.
_MOVING = (
    aten.view.default, aten.reshape.default, aten.transpose.int, aten.permute.default, aten.split_with_sizes.default,
    aten.split.Tensor, operator.getitem,
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Chooses the form by price and tags; the backend emits it. `int8`: q and k in 8 bits too, where the goal allows error.

    `int8` is off: on BERT-base it saves OpenVINO about 3 % and its error adds to that of the linears.
    q and k are results of linears, whose int8 kernels write 8 bits as cheaply as 32: `sdpa_int8` requires those to be
    `int8_static`, so that it never stands in a model of fp32 or bf16 alone.
    """

    int8: bool = False

    name: ClassVar[str] = "attention"
    exact: ClassVar[bool] = True

    def measured_options(self) -> dict[str, tuple[str, ...]]:
        """kind → options whose error has to be measured, as `estimate.sensitivity.measure` takes them."""
        return {"attention": (INT8,)} if self.int8 else {}

    def propose(self, program: Program, context: Context) -> Iterable[Choice | Declined]:
        found = attentions(program)
        if found and self.int8 and context.goal.exact:
            yield no_error_allowed("attention", INT8, self.name)
        names = {site.node: site.site for site in linears(program)}
        for site in found:
            yield from self._at(site, names, context)

    def apply(self, program: Program, plan: Plan) -> Program:
        chosen = plan.options()
        return program.tagged({s.site: chosen[s.site] for s in attentions(program) if s.site in chosen}, self.name)

    def _at(self, site: AttentionSite, names: Mapping[fx.Node, str], context: Context) -> Iterator[Choice | Declined]:
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
        if self.int8 and not context.goal.exact and options:
            option = self._int8(site, names, context, options[0])
            if isinstance(option, Option):
                options.append(option)
            else:
                yield option
        if options:  # the first form that the backend has is what it makes of an unplanned model
            yield Choice(site=site.site, kind="attention", baseline=options[0].name, options=tuple(options))

    def _int8(self, site: AttentionSite, names: Mapping[fx.Node, str], context: Context, base: Option) -> Option | Declined:
        kernel = f"attention/{INT8}"
        cost, error = price(context, kernel, *site.dims), context.sensitivity.get((site.site, INT8))
        made_by = [names.get(_source(value)) for value in site.node.args[:2]]
        if cost is None or cost.provenance != Provenance.MEASURED:  # no data sheet tells which runtime has it
            reason = no_kernel(context, kernel)
        elif None in made_by:
            reason = "q or k is not a linear's result as it stands"
        elif cost.seconds > base.cost.seconds:
            reason = no_gain(cost, base.cost, base.name)
        else:
            reason = "" if error is not None else "its error at the output was not measured"
        if reason or cost is None or error is None:
            return Declined(site=site.site, kind="attention", option=INT8, by=self.name, reason=reason, cost=cost)
        requires = {linear: ("int8_static",) for linear in made_by if linear is not None}
        return Option(name=INT8, cost=replace(cost, error_squared=error), by=self.name, requires=requires)


def _source(value: object) -> fx.Node:
    """What a value was before elements were only moved."""
    assert isinstance(value, fx.Node), "an attention reads tensors"
    while value.target in _MOVING and isinstance(value.args[0], fx.Node):
        value = value.args[0]
    return value


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
