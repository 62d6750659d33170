"""Precision of each linear and embedding: fp32, bf16, 8-bit or weight-only, by price and measured sensitivity."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from effcompile.core.errors import UnknownNameError, UsageError
from effcompile.ir.plan import Plan
from effcompile.ir.program import Program
from effcompile.passes.base import Choice, Context, Declined, Option
from effcompile.passes.pricing import no_error_allowed, no_gain, no_kernel, price
from effcompile.sites.parts import EmbeddingSite, LinearSite, embeddings, linears

#: Every precision a linear can have, the baseline first.
LINEAR_OPTIONS = ("fp32", "bf16", "int8_dynamic", "int8_channel", "int8_static", "w8", "w4")
EMBEDDING_OPTIONS = ("fp32", "int8")
BASELINE = "fp32"

_GROUPED = {"w8": 8, "w4": 4}  # option → bits of a weight in groups along K


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantize:
    """`options`: precisions to consider; `group_size`: weights per scale of w8 and w4; `embeddings`: tables too.

    Each option of a site costs its kernel's time, its weight's bytes as stored, and the output error that
    `Context.sensitivity` holds. Several readers of one table (tied embeddings) are counted once; see `_Tables`.
    """

    options: tuple[str, ...] = LINEAR_OPTIONS[1:]
    group_size: int = 32
    embeddings: bool = True

    name: ClassVar[str] = "quantize"
    exact: ClassVar[bool] = False

    def __post_init__(self) -> None:
        for option in self.options:
            if option not in LINEAR_OPTIONS:
                raise UnknownNameError("precision", option, LINEAR_OPTIONS)
        if self.group_size not in (16, 32, 64, 128, 256):
            raise UsageError(f"quantize.group_size = {self.group_size} is not allowed. Choose one of: 16, 32, 64, 128, 256.")

    @property
    def precisions(self) -> tuple[str, ...]:
        """The options without the baseline."""
        return tuple(o for o in self.options if o != BASELINE)

    def measured_options(self) -> dict[str, tuple[str, ...]]:
        """kind → options whose error has to be measured, as `estimate.sensitivity.measure` takes them."""
        return {"linear": self.precisions, "embedding": EMBEDDING_OPTIONS[1:] if self.embeddings else ()}

    def propose(self, program: Program, context: Context) -> Iterable[Choice | Declined]:
        tables = _Tables(program, with_embeddings=self.embeddings)
        if context.goal.exact:
            for precision in self.precisions if tables.linears else ():
                yield no_error_allowed("linear", precision, self.name)
            if self.embeddings and tables.embeddings:
                yield no_error_allowed("embedding", "int8", self.name)
        for site in tables.linears:
            names = () if context.goal.exact else self.precisions
            yield from self._choose(context, tables, site, "linear", site.dims, names)
        for table in tables.embeddings if self.embeddings else ():
            names = () if context.goal.exact else EMBEDDING_OPTIONS[1:]
            yield from self._choose(context, tables, table, "embedding", (table.rows, table.width), names)

    def apply(self, program: Program, plan: Plan) -> Program:
        """Tags; linears that a merge made carry their members' precision already."""
        chosen = plan.options()
        found: list[LinearSite | EmbeddingSite] = [*linears(program), *(embeddings(program) if self.embeddings else ())]
        return program.tagged({s.site: chosen[s.site] for s in found if s.site in chosen}, self.name)

    def _choose(
        self, context: Context, tables: _Tables, site: LinearSite | EmbeddingSite, kind: str, dims: tuple[int, ...], names: tuple[str, ...]
    ) -> Iterator[Choice | Declined]:
        kernel = f"{kind}/{BASELINE}"
        seconds = price(context, kernel, *dims)
        if seconds is None:
            yield Declined(site=site.site, kind=kind, option=BASELINE, by=self.name, reason=no_kernel(context, kernel))
            return
        base = Option(
            name=BASELINE,
            cost=replace(seconds, weight_bytes=tables.baseline_bytes(site)),
            by=self.name,
            requires=tables.baseline_requires(site),
        )
        options = [base]
        for name in names:
            option = self._option(context, tables, site, f"{kind}/{name}", dims, base)
            if isinstance(option, Option):
                options.append(option)
            else:
                yield option
        yield Choice(site=site.site, kind=kind, baseline=BASELINE, options=tuple(options))

    def _option(
        self, context: Context, tables: _Tables, site: LinearSite | EmbeddingSite, kernel: str, dims: tuple[int, ...], base: Option
    ) -> Option | Declined:
        kind, _, name = kernel.partition("/")
        cost, reason = price(context, kernel, *dims), ""
        error = context.sensitivity.get((site.site, name))
        if isinstance(site, LinearSite) and name in _GROUPED and site.k % self.group_size:
            reason = f"K = {site.k} is not a multiple of group_size = {self.group_size}"
        elif cost is None:
            reason = no_kernel(context, kernel)
        elif error is None:
            reason = "its error at the output was not measured"
        if cost is not None:
            size = stored_bytes(site, name, self.group_size) + tables.kept_bytes(site)
            cost = replace(cost, weight_bytes=size, error_squared=error or 0.0)
            saves = size < base.cost.weight_bytes
            if not reason and not saves and cost.seconds >= base.cost.seconds:
                reason = no_gain(cost, base.cost, BASELINE)
        if reason or cost is None:
            return Declined(site=site.site, kind=kind, option=name, by=self.name, reason=reason, cost=cost)
        return Option(name=name, cost=cost, by=self.name)


def stored_bytes(site: LinearSite | EmbeddingSite, option: str, group_size: int = 32) -> int:
    """Bytes of a site's weight as stored, with scales (4 B) and zero points (1 B): biases stay fp32 in every option."""
    n, k = (site.n, site.k) if isinstance(site, LinearSite) else (site.count, site.width)
    if option in _GROUPED:
        return n * k * _GROUPED[option] // 8 + 4 * n * -(-k // group_size)
    return {
        "fp32": 4 * n * k,
        "bf16": 2 * n * k,
        "int8": n * k + 5,
        "int8_dynamic": n * k + 5,
        "int8_channel": n * k + 5 * n,
        "int8_static": n * k + 5 * n + 5,
    }[option]


class _Tables:
    """Who reads which weight, so that bytes of shared ones are counted as they will be stored.

    The first site that reads a table *owns* it: its fp32 option carries the bytes, the others' fp32 option costs none and
    requires the owner to be fp32 (both are). A quantised reader adds its own copy. Where something that is no site
    reads the table, or two readers have one name, the fp32 table stays whatever is chosen: every option of the owner carries it.
    """

    def __init__(self, program: Program, *, with_embeddings: bool) -> None:
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
            self._bytes[key] = value.numel() * value.element_size()
            self._readers[key].append(site.site)
        self._pinned = _read_otherwise(program, {s.node for s in readers}, self._readers)

    def baseline_bytes(self, site: LinearSite | EmbeddingSite) -> int:
        return self._bytes[self._key[site.site]] if self._owns(site) else 0

    def baseline_requires(self, site: LinearSite | EmbeddingSite) -> Mapping[str, tuple[str, ...]]:
        key = self._key[site.site]
        return {} if self._owns(site) or key in self._pinned else {self._readers[key][0]: (BASELINE,)}

    def kept_bytes(self, site: LinearSite | EmbeddingSite) -> int:
        """Bytes of the fp32 table that stays although this site no longer reads it, counted with its owner."""
        key = self._key[site.site]
        return self._bytes[key] if key in self._pinned and self._owns(site) else 0

    def _owns(self, site: LinearSite | EmbeddingSite) -> bool:
        return self._readers[self._key[site.site]][0] == site.site


def _read_otherwise(program: Program, site_nodes: set[torch.fx.Node], tables: Mapping[int, list[str]]) -> set[int]:
    """Tables with a reader that is no site."""
    pinned = set()
    for node in program.graph.nodes:
        value = program.tensor(node)
        if value is not None and (key := _storage(value)) in tables and not set(node.users) <= site_nodes:
            pinned.add(key)
    return pinned


def _storage(value: torch.Tensor) -> int:
    return value.untyped_storage()._cdata
