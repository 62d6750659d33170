"""Fusions that backends offer ready-made: the residual add with its LayerNorm, and GELU's tanh form."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from effcompile.core.reasons import NotMeasured, Reason, Unsupported
from effcompile.ir.formats import Form
from effcompile.ir.plan import Plan
from effcompile.ir.program import Program
from effcompile.passes.base import Choice, Context, Declined, Option, Pass
from effcompile.passes.pricing import no_error_allowed, no_gain, no_kernel, price
from effcompile.sites.parts import AddNormSite, add_norms, gelus


@dataclass(frozen=True, slots=True, kw_only=True)
class Fuse(Pass):
    """`norms`: add + LayerNorm as one kernel (exact).

    `gelu`: the tanh form, only where the goal allows error.
    """

    norms: bool = True
    gelu: bool = True

    name: ClassVar[str] = "fuse"
    exact: ClassVar[bool] = True

    def measured_options(self) -> dict[str, tuple[Form, ...]]:
        """kind → options whose error has to be measured, as `estimate.sensitivity.measure` takes them."""
        return {"gelu": (Form(word="tanh"),)} if self.gelu else {}

    def propose(self, program: Program, context: Context) -> Iterable[Choice | Declined]:
        if self.norms:
            for norm in add_norms(program):
                empty = Choice(
                    site=norm.site,
                    kind="norm",
                    baseline="split",
                    options=(),
                    covers=frozenset([norm.node, norm.add]),
                )
                twice = _computed_twice(context, norm)
                forms = ("split",) if twice else ("split", "fused")
                if twice:
                    yield Declined(site=norm.site, kind="norm", option="fused", by=self.name, reason=twice)
                yield from self._pair(context, empty, "add_norm", forms, (norm.rows, norm.cols))
        if not self.gelu:
            return
        found = gelus(program)
        if found and context.goal.exact:
            yield no_error_allowed("gelu", "tanh", self.name)
        for gelu in found:
            forms = ("erf",) if context.goal.exact else ("erf", "tanh")
            empty = Choice(
                site=gelu.site, kind="gelu", baseline="erf", options=(), covers=frozenset([gelu.node])
            )
            yield from self._pair(context, empty, "gelu", forms, (gelu.elements,))

    def apply(self, program: Program, plan: Plan) -> Program:
        chosen = plan.forms()
        edited = program.editable(self.name)
        tags = {site.site: chosen[site.site] for site in add_norms(edited) if site.site in chosen}
        for gelu in gelus(edited):
            if gelu.site in chosen:
                tags[gelu.site] = chosen[gelu.site]
                if chosen[gelu.site].word == "tanh":
                    gelu.node.kwargs = {**gelu.node.kwargs, "approximate": "tanh"}
        edited.module.recompile()
        return replace(edited, tags={**program.tags, **tags})

    def _pair(
        self, context: Context, empty: Choice, kernel: str, names: tuple[str, ...], dims: tuple[int, ...]
    ) -> Iterator[Choice | Declined]:
        """The choice with the baseline form and, where it pays, the other one."""
        options: list[Option] = []
        for name in names:
            cost = price(context, f"{kernel}/{name}", *dims)
            reason: Reason | None = None
            if cost is None:
                reason = no_kernel(context, f"{kernel}/{name}")
            elif options and cost.seconds > options[0].cost.seconds:
                reason = no_gain(cost, options[0].cost, options[0].name)
            elif name == "tanh":
                error = context.sensitivity.get((empty.site, name))
                reason = None if error is not None else NotMeasured()
                cost = replace(cost, error_squared=error or 0.0)
            if reason is not None:
                yield Declined(
                    site=empty.site, kind=empty.kind, option=name, by=self.name, reason=reason, cost=cost
                )
            else:
                assert cost is not None
                options.append(Option(form=Form(word=name), cost=cost, by=self.name))
        if options:
            yield replace(empty, baseline=options[0].name, options=tuple(options))


def _computed_twice(context: Context, norm: AddNormSite) -> Unsupported | None:
    """Why the sum would be computed twice, once for its other readers; None where it would not."""
    if len(norm.add.users) == 1 or not context.backend.startswith("torch"):
        return None
    return Unsupported("others read the residual sum too, and torch's kernel of both gives the norm alone")
