"""Precision of each linear and embedding: fp32, bf16, 8-bit or weight-only, by price and measured
sensitivity.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import ClassVar

import torch

from effcompile.core.cost import Cost
from effcompile.core.errors import UnknownNameError, UsageError
from effcompile.core.reasons import NotMeasured, Reason, Unsupported
from effcompile.ir.formats import FP32, GROUPS, LINEAR_FORMATS, TABLE_FORMATS, USUAL_GROUP, Form, WeightFormat
from effcompile.ir.plan import Plan
from effcompile.ir.program import Program
from effcompile.machine.target import KernelCall, linear_call
from effcompile.passes.base import Choice, Context, Declined, Option, Pass
from effcompile.passes.pricing import no_call, no_error_allowed, no_gain, no_kernel, price_call, price_linear
from effcompile.sites.parts import EmbeddingSite, LinearSite, embeddings, linears

BASELINE = FP32.name


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantize(Pass):
    """`options`: formats to consider, by name; `group_size`: weights per scale of w8 and w4; `embeddings`:
    tables too.

    Each option of a site costs its kernel's time, its weight's bytes as stored, and the output error that
    `Context.sensitivity` holds. Several readers of one table (tied embeddings) are counted once; see
    `Tables`.
    """

    options: tuple[str, ...] = tuple(LINEAR_FORMATS)[1:]
    group_size: int = USUAL_GROUP
    embeddings: bool = True

    name: ClassVar[str] = "quantize"
    exact: ClassVar[bool] = False

    def __post_init__(self) -> None:
        for option in self.options:
            if option not in LINEAR_FORMATS:
                raise UnknownNameError("precision", option, LINEAR_FORMATS)
        if self.group_size not in GROUPS:
            raise UsageError(
                f"quantize.group_size = {self.group_size} is not allowed. Choose one of: "
                f"{', '.join(map(str, GROUPS))}."
            )

    @property
    def formats(self) -> tuple[WeightFormat, ...]:
        """Those of a linear without the baseline, in groups of the size that is asked for."""
        return tuple(LINEAR_FORMATS[o].grouped_by(self.group_size) for o in self.options if o != BASELINE)

    @property
    def tables(self) -> tuple[WeightFormat, ...]:
        """Those of an embedding without the baseline."""
        return tuple(TABLE_FORMATS.values())[1:] if self.embeddings else ()

    def measured_options(self) -> dict[str, tuple[Form, ...]]:
        """kind → options whose error has to be measured, as `estimate.sensitivity.measure` takes them."""
        return {
            kind: tuple(Form(weights=held) for held in formats)
            for kind, formats in (("linear", self.formats), ("embedding", self.tables))
        }

    def propose(self, program: Program, context: Context) -> Iterable[Choice | Declined]:
        tables = Tables(program, with_embeddings=self.embeddings, elsewhere=context.elsewhere)
        if context.goal.exact:
            for held in self.formats if tables.linears else ():
                yield no_error_allowed("linear", held.name, self.name)
            for held in self.tables if tables.embeddings else ():
                yield no_error_allowed("embedding", held.name, self.name)
        for site in tables.linears:
            yield from self._choose(
                context, tables, site, "linear", () if context.goal.exact else self.formats
            )
        for table in tables.embeddings if self.embeddings else ():
            yield from self._choose(
                context, tables, table, "embedding", () if context.goal.exact else self.tables
            )

    def apply(self, program: Program, plan: Plan) -> Program:
        """Tags; linears that a merge made carry their members' precision already."""
        chosen = plan.forms()
        found: list[LinearSite | EmbeddingSite] = [
            *linears(program),
            *(embeddings(program) if self.embeddings else ()),
        ]
        return program.tagged({s.site: chosen[s.site] for s in found if s.site in chosen}, self.name)

    def _choose(
        self,
        context: Context,
        tables: Tables,
        site: LinearSite | EmbeddingSite,
        kind: str,
        formats: tuple[WeightFormat, ...],
    ) -> Iterator[Choice | Declined]:
        call = _call(site, FP32)
        seconds = (
            price_linear(context, FP32, site.dims)
            if isinstance(site, LinearSite)
            else price_call(context, call)
        )
        if seconds is None:
            yield Declined(
                site=site.site,
                kind=kind,
                option=BASELINE,
                by=self.name,
                reason=no_kernel(context, call.kernel),
            )
            return
        base = Option(
            form=Form(weights=FP32),
            cost=replace(seconds, weight_bytes=tables.baseline_bytes(site)),
            by=self.name,
            requires=tables.baseline_requires(site),
        )
        options = [base]
        for held in formats:
            cost, reason = self._price(context, tables, site, held, base)
            if reason is not None:
                yield Declined(
                    site=site.site, kind=kind, option=held.name, by=self.name, reason=reason, cost=cost
                )
            else:
                assert cost is not None
                options.append(Option(form=Form(weights=held), cost=cost, by=self.name))
        yield Choice(
            site=site.site,
            kind=kind,
            baseline=BASELINE,
            options=tuple(options),
            covers=frozenset([site.node]),
        )

    def _price(
        self,
        context: Context,
        tables: Tables,
        site: LinearSite | EmbeddingSite,
        held: WeightFormat,
        base: Option,
    ) -> tuple[Cost | None, Reason | None]:
        """What a format costs, None where there is no kernel; and why it is not offered, None if it is."""
        if held.group and isinstance(site, LinearSite) and site.k % held.group:
            return None, Unsupported("K = {} is not a multiple of group_size = {}", (site.k, held.group))
        call = _call(site, held)
        seconds = price_call(context, call)
        if seconds is None:
            return None, no_call(context, call)
        error = context.sensitivity.get((site.site, held.name))
        size = stored_bytes(site, held) + tables.kept_bytes(site)
        cost = replace(seconds, weight_bytes=size, error_squared=error or 0.0)
        if error is None:
            return cost, NotMeasured()
        saves = size < base.cost.weight_bytes or cost.seconds < base.cost.seconds
        return cost, None if saves else no_gain(cost, base.cost, BASELINE)


def _call(site: LinearSite | EmbeddingSite, held: WeightFormat) -> KernelCall:
    if isinstance(site, LinearSite):
        return linear_call(held, site.dims)
    return KernelCall(f"embedding/{held.family}", (site.rows, site.width))


def stored_bytes(site: LinearSite | EmbeddingSite, held: WeightFormat) -> int:
    """Bytes of a site's weight as stored: biases stay fp32 in every format."""
    return (
        held.stored_bytes(site.n, site.k)
        if isinstance(site, LinearSite)
        else held.stored_bytes(site.count, site.width)
    )


class Tables:
    """Who reads which weight, so that bytes of shared ones are counted as they will be stored.

    The first site that reads a table *owns* it: its fp32 option carries the bytes, the others' fp32 option
    costs none and requires the owner to be fp32 (both are). A quantised reader adds its own copy. Where
    something that is no site reads the table, or another graph, or two readers have one name, the fp32 table
    stays whatever is chosen: every option of the owner carries it, once for all graphs.
    """

    def __init__(
        self, program: Program, *, with_embeddings: bool, elsewhere: Mapping[int, bool] = MappingProxyType({})
    ) -> None:
        self.linears = linears(program)
        names = {site.site for site in self.linears}
        found = embeddings(program) if with_embeddings else []
        self.embeddings = [site for site in found if site.site not in names]
        self._key: dict[str, int] = {}
        self._readers: dict[int, list[str]] = defaultdict(list)
        self._bytes: dict[int, int] = {}
        readers: list[EmbeddingSite | LinearSite] = [*self.embeddings, *self.linears]
        for site in readers:
            value = program.tensor(site.weight)
            assert value is not None
            key = _storage(value)
            self._key[site.site] = key
            self._bytes[key] = 0 if elsewhere.get(key) else value.numel() * value.element_size()
            self._readers[key].append(site.site)
        self._pinned = _read_otherwise(program, {s.node for s in readers}, self._readers) | set(elsewhere)

    def baseline_bytes(self, site: LinearSite | EmbeddingSite) -> int:
        return self._bytes[self._key[site.site]] if self._owns(site) else 0

    def baseline_requires(self, site: LinearSite | EmbeddingSite) -> Mapping[str, tuple[str, ...]]:
        key = self._key[site.site]
        return {} if self._owns(site) or key in self._pinned else {self._readers[key][0]: (BASELINE,)}

    def kept_bytes(self, site: LinearSite | EmbeddingSite) -> int:
        """Bytes of the fp32 table that stays although this site no longer reads it, counted with
        its owner.
        """
        key = self._key[site.site]
        return self._bytes[key] if key in self._pinned and self._owns(site) else 0

    def _owns(self, site: LinearSite | EmbeddingSite) -> bool:
        return self._readers[self._key[site.site]][0] == site.site


def _read_otherwise(
    program: Program, site_nodes: set[torch.fx.Node], tables: Mapping[int, list[str]]
) -> set[int]:
    """Tables with a reader that is no site."""
    pinned = set()
    for node in program.graph.nodes:
        value = program.tensor(node)
        if value is not None and (key := _storage(value)) in tables and not set(node.users) <= site_nodes:
            pinned.add(key)
    return pinned


def _storage(value: torch.Tensor) -> int:
    return value.untyped_storage()._cdata
