"""The form of each attention: dense, causal, on the tiles it sees, packed, in separate kernels, by our kernel
for CPUs, with products of bf16, or with q and k in 8 bits.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import ClassVar

import torch
from torch import fx

from effcompile.core.cost import Cost, Provenance, total
from effcompile.core.errors import FormatError
from effcompile.core.mask import OnlyWhere, Sees, StaysDense
from effcompile.core.reasons import NotMeasured, Reason, Unsupported
from effcompile.ir.formats import INT8_STATIC, Form
from effcompile.ir.plan import Plan
from effcompile.ir.program import Program, dtype_of, shape_of
from effcompile.passes.base import Choice, Context, Declined, Option, Pass
from effcompile.passes.pricing import no_error_allowed, no_gain, no_kernel, price
from effcompile.sites.attention.closed_masks import (
    in_closed_form,
    is_causal,
    mask_of,
    set_causal,
    set_flex,
    visible_keys,
)
from effcompile.sites.attention.expand import expand
from effcompile.sites.attention.mask.graph_mask import GraphMask
from effcompile.sites.parts import AttentionSite, attentions, linears

aten = torch.ops.aten
INT8, BF16, TOKEN = "sdpa_int8", "sdpa_bf16", "sdpa_int8_token"
#: By a kernel of ours for a CPU, in fp32.
FP32, CAUSAL_FP32 = "sdpa_fp32", "causal_fp32"
#: FlexAttention takes seconds to compile a form: not worth a try on less than this many scores per head.
_LEAST_FLEX = 1 << 20
#: Operators between a linear and the heads made of its result: they move elements and change none.
_MOVING = (
    aten.view.default, aten.reshape.default, aten.transpose.int, aten.permute.default,
    aten.split_with_sizes.default, aten.split.Tensor, operator.getitem,
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention(Pass):
    """Chooses the form by price. `fp32`: our kernel for CPUs too. `bf16`, `int8`: its products of bf16, q and
    k in 8 bits too, where the goal allows error.

    `sdpa` reads a dense mask; `causal` and `tiled` know the mask in closed form (mask/recover.py) and read
    none, and `tiled` visits only what is seen; `flex` does so by FlexAttention; `packed` reads heads as the
    linears made them; `math` is separate kernels. `sdpa_fp32`, `causal_fp32`: as `sdpa` and `causal`, by the
    operator of ops/fp32_attention.py, where that was measured to be no slower.

    q and k are results of linears, whose int8 kernels write 8 bits as cheaply as 32: `sdpa_int8` requires
    those to be `int8_static`, so that it never stands in a model of fp32 or bf16 alone. `sdpa_int8_token`
    (ops/int8_attention.py) rounds what it multiplies when it is called, and requires nothing.
    """

    int8: bool = True
    bf16: bool = True
    fp32: bool = True

    name: ClassVar[str] = "attention"
    exact: ClassVar[bool] = True

    def measured_options(self) -> dict[str, tuple[Form, ...]]:
        """kind → options whose error has to be measured, as `estimate.sensitivity.measure` takes them."""
        asked = {INT8: self.int8, BF16: self.bf16, TOKEN: self.int8}
        forms = tuple(Form(word=word) for word, wanted in asked.items() if wanted)
        return {"attention": forms} if forms else {}

    def propose(self, program: Program, context: Context) -> Iterable[Choice | Declined]:
        for module, reason in program.left.items():
            yield Declined(site=module, kind="attention", option="fused", by=self.name, reason=reason)
        found = attentions(program)
        if found and self.int8 and context.goal.exact:
            yield no_error_allowed("attention", INT8, self.name)
        names = {site.node: site.site for site in linears(program)}
        for site in found:
            yield from self._at(site, mask_of(program, site.node), names, context)

    def apply(self, program: Program, plan: Plan) -> Program:
        chosen = plan.forms()
        tags = {s.site: chosen[s.site] for s in attentions(program) if s.site in chosen}
        edited = program.editable(self.name)
        by_option: dict[str, list[fx.Node]] = {}
        for site in attentions(edited):
            word = tags[site.site].word if site.site in tags else ""
            _check_mask(site, tags.get(site.site), mask_of(edited, site.node) if word in _SEEING else None)
            if site.ours or word in _SEEING:
                by_option.setdefault(word, []).append(site.node)
        if not by_option:
            return program.tagged(tags, self.name)
        expand(edited.graph, by_option.pop("math", []))
        set_causal(edited, by_option.pop("causal", []) + by_option.pop(CAUSAL_FP32, []))
        told = in_closed_form(
            edited, [node for option in ("tiled", "flex") for node in by_option.get(option, [])]
        )
        set_flex(edited, [told[node] for node in by_option.get("flex", [])])
        edited.graph.eliminate_dead_code()
        edited.module.recompile()
        return replace(edited, tags={**edited.tags, **tags})

    def _at(
        self, site: AttentionSite, mask: GraphMask | None, names: Mapping[fx.Node, str], context: Context
    ) -> Iterator[Choice | Declined]:
        options: list[Option] = []
        own = self.fp32 and context.goal.mode != "training" and dtype_of(site.node) is torch.float32
        for form in dict.fromkeys(_forms(site, mask)):
            if form in _OWN and not own:
                continue
            cost = _price(form, site, mask, context)
            if form in _OWN and cost is not None and cost.provenance != Provenance.MEASURED:
                cost = None  # no data sheet tells where the kernel runs
            reason: Reason | None = _why_not(form, site, mask)
            written = form == "math" and (site.eager or site.ours)
            if cost is None:
                reason = reason or no_kernel(context, f"attention/{form}")
            elif options and cost.seconds > options[0].cost.seconds and not written:
                reason = reason or no_gain(cost, options[0].cost, options[0].name)
            if reason is not None:
                yield Declined(
                    site=site.site, kind="attention", option=form, by=self.name, reason=reason, cost=cost
                )
            else:
                assert cost is not None
                seen = mask if form in _SEEING else None
                note = _note(seen, site) if seen is not None else None
                carried = Form(word=form, mask=seen.form if seen is not None else None)
                options.append(Option(form=carried, cost=cost, by=self.name, note=note))
        if not context.goal.exact and options and not site.ours:
            narrower = [self._int8(site, names, context, options[0])] if self.int8 else []
            if context.goal.mode != "training" and dtype_of(site.node) is torch.float32:
                wanted = {BF16: self.bf16, TOKEN: self.int8}
                narrower += [self._narrower(w, site, context, options[0]) for w in wanted if wanted[w]]
            options += [option for option in narrower if isinstance(option, Option)]
            yield from (option for option in narrower if isinstance(option, Declined))
        if options:  # the first form that the backend has is what it makes of an unplanned model
            eager = site.eager and any(option.name == "math" for option in options)
            baseline = "math" if eager else options[0].name
            yield Choice(
                site=site.site,
                kind="attention",
                baseline=baseline,
                options=tuple(options),
                covers=frozenset([site.node]),
            )

    def _int8(
        self, site: AttentionSite, names: Mapping[fx.Node, str], context: Context, base: Option
    ) -> Option | Declined:
        made_by = [names.get(_source(value)) for value in site.node.args[:2]]
        unmade = Unsupported("q or k is not a linear's result as it stands") if None in made_by else None
        requires = {linear: (INT8_STATIC.name,) for linear in made_by if linear is not None}
        return self._narrower(INT8, site, context, base, unmade, requires)

    def _narrower(
        self,
        word: str,
        site: AttentionSite,
        context: Context,
        base: Option,
        impossible: Reason | None = None,
        requires: Mapping[str, tuple[str, ...]] = MappingProxyType({}),
    ) -> Option | Declined:
        """A form that makes an error, by a price that was measured: no data sheet tells which runtime has the
        kernel, nor what its softmax takes.
        """
        kernel = f"attention/{word}"
        cost, error = price(context, kernel, *site.dims), context.sensitivity.get((site.site, word))
        reason: Reason | None
        if cost is None or cost.provenance != Provenance.MEASURED:
            reason = no_kernel(context, kernel)
        elif impossible is not None:
            reason = impossible
        elif cost.seconds > base.cost.seconds:
            reason = no_gain(cost, base.cost, base.name)
        else:
            reason = None if error is not None else NotMeasured()
        if reason is not None:
            return Declined(
                site=site.site, kind="attention", option=word, by=self.name, reason=reason, cost=cost
            )
        assert cost is not None and error is not None
        return Option(
            form=Form(word=word),
            cost=replace(cost, error_squared=error),
            by=self.name,
            requires=dict(requires),
        )


def _check_mask(site: AttentionSite, planned: Form | None, found: GraphMask | None) -> None:
    """Hold the mask that a plan was made for against that of the model it is applied to.

    Raises:
        FormatError: they differ.
    """
    if (
        planned is not None
        and planned.mask is not None
        and found is not None
        and not planned.mask.same_terms(found.form)
    ):
        was, now = Sees(form=planned.mask), Sees(form=found.form)
        raise FormatError(f"The plan was made where {site.site} {was}; in this model it {now}. Plan again.")


#: Forms that know the mask in closed form.
_SEEING = ("causal", CAUSAL_FP32, "tiled", "flex")
_CAUSAL, _OWN = ("causal", CAUSAL_FP32), (FP32, CAUSAL_FP32)


def _price(form: str, site: AttentionSite, mask: GraphMask | None, context: Context) -> Cost | None:
    """Seconds of a form; None where the backend has no kernel for it."""
    if form not in _SEEING:
        cost = price(context, f"attention/{form}", *site.dims)
        # one of SDPA stays one, eager as the model's is, where the backend has no kernel that takes it apart
        return _sum_of_parts(site, context) if cost is None and form == "math" and site.ours else cost
    b, h, sq, sk, d = site.dims
    visible = (
        sk // 2
        if form in _CAUSAL or (mask is None and site.causal)
        else sk
        if mask is None
        else visible_keys(mask, sk)
    )
    changed = form == "tiled" and (site.ours or (mask is not None and bool(mask.biases)))
    return price(
        context, "attention/tiled_scores" if changed else f"attention/{form}", b, h, sq, sk, d, visible
    )


def _note(mask: GraphMask, site: AttentionSite) -> Sees:
    """How much of the scores is seen, in whole tiles; what is seen is in the option's form."""
    return Sees(share=visible_keys(mask, site.dims[3]) / max(1, site.dims[3]))


def _sum_of_parts(site: AttentionSite, context: Context) -> Cost | None:
    """Two products and a softmax, for a backend that has no kernel of all three."""
    b, h, sq, sk, d = site.dims
    parts = [price(context, "matmul/fp32", b * h, sq, d, sk), price(context, "softmax/fp32", b * h * sq, sk),
             price(context, "matmul/fp32", b * h, sq, sk, d)]  # fmt: skip
    known = [part for part in parts if part is not None]
    if len(known) < len(parts):
        return None
    return replace(total(known), bytes_transient=known[0].bytes_transient)


def _forms(site: AttentionSite, mask: GraphMask | None) -> Iterator[str]:
    """The forms that a site can have, what its node is first."""
    yield "tiled" if site.ours else "causal" if site.causal else "sdpa"
    if not site.ours:
        yield CAUSAL_FP32 if site.causal else FP32
        yield "packed"
    if mask is not None:
        if is_causal(mask) and not site.ours:
            yield from _CAUSAL
        yield "tiled"
        large = site.dims[2] * site.dims[3] >= _LEAST_FLEX
        if large and mask.static and not mask.biases and not site.sink:
            yield "flex"
    yield "math"


def _why_not(form: str, site: AttentionSite, mask: GraphMask | None) -> Reason | None:
    """Why a form is not possible at a site, whatever it costs; None if it is."""
    if form == "packed":
        return _why_not_packed(site)
    if form not in _SEEING or mask is None:
        return None
    if mask.left is not None:
        return StaysDense(because=mask.left)
    return (
        OnlyWhere(form=mask.form, unmet=not mask.met)
        if mask.guards and not (mask.met and form == "tiled")
        else None
    )


def _source(value: object) -> fx.Node:
    """What a value was before elements were only moved."""
    assert isinstance(value, fx.Node), "an attention reads tensors"
    while value.target in _MOVING and isinstance(value.args[0], fx.Node):
        value = value.args[0]
    return value


def _why_not_packed(site: AttentionSite) -> Unsupported | None:
    """Why the heads cannot be read packed, (B, S, H·D), as they are; None if they can."""
    for name, value in zip("qkv", site.node.args[:3], strict=True):
        if not (isinstance(value, fx.Node) and _swaps_heads(value)):
            return Unsupported(
                "the heads of {name} are not split right before it, so packing would add a transpose", (name,)
            )
    if not all(_swaps_heads(user) for user in _readers(site.node)):
        return Unsupported("its result is read with heads apart, so packing would add a transpose")
    return None


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
