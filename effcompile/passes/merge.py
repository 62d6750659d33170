"""Linears that read the same input computed as one: one larger GEMM, and activations quantised once instead
of thrice.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import fx, nn

from effcompile.core.cost import Cost, total
from effcompile.core.reasons import Reason, Unsupported
from effcompile.ir.formats import Form, WeightFormat
from effcompile.ir.plan import Plan
from effcompile.ir.program import Program, module_path, shape_of
from effcompile.passes.base import Choice, Context, Declined, Option, Pass
from effcompile.passes.pricing import no_linear, price, price_linear
from effcompile.sites.parts import LinearSite, MergeSite, merges

aten = torch.ops.aten

SEPARATE, MERGED = "separate", "merged"
#: Backends whose split of the merged result is a view; on the others it is a copy and is priced as one.
VIEW_SPLITS = frozenset({"torch-eager", "torch-inductor"})
#: What products make of x themselves, one panel of outputs after the other.
_CODES_ROWS = ("int8 rows", "int13 rows", "int8 groups")
#: Operators whose result is their operand's memory.
_SEEN_OTHERWISE = frozenset(
    {
        aten.expand.default,
        aten.permute.default,
        aten.reshape.default,
        aten.select.int,
        aten.slice.Tensor,
        aten.squeeze.dim,
        aten.transpose.int,
        aten.unsqueeze.default,
        aten.view.default,
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Merge(Pass):
    """What a merge saves depends on the precision of its members, which another pass chooses.

    So there is one option per format, `merged` (fp32), `merged@int8_dynamic`, ..., each requiring it of all
    members; its seconds are t(M, K, ΣN) − Σ t(M, K, Nᵢ) + the split, usually negative. Of products
    that code x themselves, and whose split is a view, they are no more than the passes over x that are saved:
    one call does nothing that several do not, and prices of 1 ms differ by more from one timing to the next.
    """

    name: ClassVar[str] = "merge"
    exact: ClassVar[bool] = True

    def propose(self, program: Program, context: Context) -> Iterable[Choice | Declined]:
        for site in merges(program):
            options = [Option(form=Form(word=SEPARATE), cost=Cost(), by=self.name)]
            for held in context.formats:
                form = Form(word=MERGED, weights=held)
                reason: Reason | None = _why_not(program, site)
                cost = merge_cost(site, held, context)
                if cost is None:
                    reason = reason or no_linear(context, held, site.members[0].dims)
                if reason is not None:
                    yield Declined(
                        site=site.site, kind="merge", option=form.name, by=self.name, reason=reason, cost=cost
                    )
                else:
                    assert cost is not None
                    requires = {member.site: (held.name,) for member in site.members}
                    options.append(Option(form=form, cost=cost, by=self.name, requires=requires))
            yield Choice(site=site.site, kind="merge", baseline=SEPARATE, options=tuple(options))

    def apply(self, program: Program, plan: Plan) -> Program:
        chosen = plan.forms()
        edited = program.editable(self.name)
        tags, made = dict(program.tags), list(program.made)
        for site in merges(edited):
            form = chosen.get(site.site)
            if form is None:
                continue
            tags[site.site] = form
            if form.word == MERGED:
                made += _merge(edited, site)
                common = {chosen[m.site] for m in site.members if m.site in chosen}
                assert len(common) <= 1, (
                    f"the plan gives the members of {site.site} several formats: "
                    f"{sorted(f.name for f in common)}"
                )
                if common:
                    tags[site.merged_site] = common.pop()
        edited.graph.lint()
        edited.module.recompile()
        return replace(edited, tags=tags, made=tuple(made))


def _why_not(program: Program, site: MergeSite) -> Unsupported | None:
    """Why the weights cannot be stacked; None if they can."""
    dtypes = {program.tensor(m.weight).dtype for m in site.members}  # type: ignore[union-attr]
    if len(dtypes) > 1:
        return Unsupported.of("its members have different dtypes: {}", ", ".join(sorted(map(str, dtypes))))
    if any(m.bias is not None and program.tensor(m.bias) is None for m in site.members):
        return Unsupported("a bias is computed, not stored")
    return None


def merge_cost(site: MergeSite, held: WeightFormat, context: Context) -> Cost | None:
    """What merging adds to the members' own costs; None where there is no such kernel."""
    m, k = site.members[0].m, site.members[0].k
    n = sum(member.n for member in site.members)
    merged = price_linear(context, held, (m, k, n))
    members = [price_linear(context, held, member.dims) for member in site.members]
    split = Cost() if context.backend in VIEW_SPLITS else price(context, "pointwise/fp32", m * n)
    priced = [cost for cost in members if cost is not None]
    if merged is None or split is None or len(priced) < len(members):
        return None
    apart = total(priced)
    seconds = merged.seconds + split.seconds - apart.seconds
    coding = price(context, "pointwise/fp32", m * k) if held.activation in _CODES_ROWS else None
    if coding is not None and context.backend in VIEW_SPLITS:
        # x is coded within each member's seconds; what was timed while the machine stood may be longer
        least = max(cost.seconds for cost in priced) - apart.seconds
        seconds = min(seconds, max((1 - len(priced)) * coding.seconds, least))
    return replace(
        merged + split,
        seconds=seconds,
        roof_seconds=merged.roof_seconds + split.roof_seconds - apart.roof_seconds,
        weight_bytes=_zero_bias_bytes(site),
        error_squared=max(
            context.sensitivity.get((site.site, Form(word=MERGED, weights=held).name), 0.0), 0.0
        ),
    )


def _zero_bias_bytes(site: MergeSite) -> int:
    """Bytes of the zeros that members without a bias get beside members with one."""
    without = [member.n for member in site.members if member.bias is None]
    return 4 * sum(without) if len(without) < len(site.members) else 0


def _merge(program: Program, site: MergeSite) -> list[str]:
    """Replace the members by one linear and a split of its result; the names of its parameters."""
    graph, first = program.graph, site.members[0]
    weight, bias = _register(program, site)
    with graph.inserting_before(min((m.node for m in site.members), key=list(graph.nodes).index)):
        w = graph.get_attr(weight)
        b = graph.get_attr(bias) if bias else None
        target, args = _call(first, w, b)
        node = graph.call_function(target, args)
        sizes = [member.n for member in site.members]
        split = graph.call_function(
            aten.split_with_sizes.default, (node, sizes, len(shape_of(first.node)) - 1)
        )
        parts = [graph.call_function(operator.getitem, (split, i)) for i in range(len(sizes))]
    _annotate(program, site, (w, b, node, split), parts)
    for member, part in zip(site.members, parts, strict=True):
        member.node.replace_all_uses_with(part)
        graph.erase_node(member.node)
        _keep_viewable(part)
        for unread in (member.weight, member.bias):
            if unread is not None:
                _remove_if_unread(program, unread)
    program.module.delete_all_unused_submodules()
    return [name for name in (weight, bias) if name is not None]


def _call(first: LinearSite, w: fx.Node, b: fx.Node | None) -> tuple[Any, tuple[Any, ...]]:
    """The merged operator: what the first member was, with a bias where any member has one."""
    # what it reads now: a merge before this one may have put another node in the place of `first.x`
    x = first.node.args[1 if first.node.target is aten.addmm.default else 0]
    if not first.transposed:
        return aten.linear.default, (x, w, *([b] if b else []))
    if b is not None:
        return aten.addmm.default, (b, x, w)
    return aten.matmul.default if len(shape_of(first.x)) > 2 else aten.mm.default, (x, w)


def _register(program: Program, site: MergeSite) -> tuple[str, str | None]:
    """Stack the members' parameters into a new submodule; the qualified names of its weight and bias."""
    holder = nn.Module()
    with torch.no_grad():
        weights = [_value(program, m.weight) for m in site.members]
        stacked = torch.cat(weights, dim=1 if site.members[0].transposed else 0)
        trained = any(w.requires_grad for w in weights)
        holder.weight = nn.Parameter(stacked, requires_grad=trained)
        if any(m.bias is not None for m in site.members):
            rows = [
                stacked.new_zeros(m.n) if m.bias is None else _value(program, m.bias).expand(m.n)
                for m in site.members
            ]
            holder.bias = nn.Parameter(torch.cat(rows), requires_grad=trained)
    if not program.module.add_submodule(site.merged_site, holder):
        raise AssertionError(f"{site.merged_site} cannot be added: a parent is no module")
    return f"{site.merged_site}.weight", f"{site.merged_site}.bias" if hasattr(holder, "bias") else None


def _value(program: Program, node: fx.Node) -> torch.Tensor:
    value = program.tensor(node)
    assert value is not None
    return value


def _annotate(
    program: Program, site: MergeSite, made: tuple[fx.Node | None, ...], parts: list[fx.Node]
) -> None:
    """Fake values and module stack, so that later passes find the merged linear under its own name."""
    first = site.members[0]
    stack = dict(first.node.meta.get("nn_module_stack") or {})
    if stack and module_path(first.node) == first.site:
        stack.popitem()
    stack[site.merged_site] = (site.merged_site, nn.Linear)
    w, b, node, split = made
    for each in (w, b, node, split, *parts):
        if each is not None:
            each.meta = {
                key: first.node.meta[key] for key in ("stack_trace", "custom") if key in first.node.meta
            }
            each.meta["nn_module_stack"] = dict(stack)
    value, sizes = first.node.meta.get("val"), [m.n for m in site.members]
    if not isinstance(value, torch.Tensor) or node is None or split is None:
        return
    for attribute in (w, b):
        like, parameter = first.weight.meta.get("val"), program.tensor(attribute)
        if attribute is not None and isinstance(like, torch.Tensor) and parameter is not None:
            attribute.meta["val"] = like.new_empty(parameter.shape)
    node.meta["val"] = value.new_empty((*value.shape[:-1], sum(sizes)))
    split.meta["val"] = torch.split_with_sizes(node.meta["val"], sizes, -1)
    for part, each_value in zip(parts, split.meta["val"], strict=True):
        part.meta["val"] = each_value


def _keep_viewable(part: fx.Node) -> None:
    """A member's result was contiguous and a part of the split is not: views that merge axes
    become reshapes, of what only sees it otherwise, too.
    """
    for user in list(part.users):
        if user.target is aten.view.default and len(shape_of(user)) <= len(shape_of(part)):
            user.target = aten.reshape.default
        if user.target in _SEEN_OTHERWISE:
            _keep_viewable(user)


def _remove_if_unread(program: Program, node: fx.Node) -> None:
    """Drop a parameter's node, and the parameter once no node reads it."""
    if node.users:
        return
    target = str(node.target)
    program.graph.erase_node(node)
    if any(other.op == "get_attr" and other.target == target for other in program.graph.nodes):
        return
    owner, _, leaf = target.rpartition(".")
    parent = program.module.get_submodule(owner)
    if hasattr(parent, leaf):
        delattr(parent, leaf)
