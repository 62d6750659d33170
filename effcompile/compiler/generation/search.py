"""What may be decided of a generation, priced over both of its regimes: a prompt once, and each new token behind a cache.

    seconds = calls of the prefill × prefill + new tokens × decode        bytes = weights once + cache of the whole context + workspace

A linear's format is one choice for both regimes; errors and limits add up as they do for a forward call (compiler/search.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from effcompile.backends.base import Backend
from effcompile.capture.generation import GenerationStep
from effcompile.compiler.generation.cases import filled
from effcompile.compiler.machine import BASELINE
from effcompile.compiler.search import Proposal, Search
from effcompile.core.cost import Cost, total
from effcompile.estimate.nodes import estimate
from effcompile.estimate.timeline import timeline
from effcompile.ir.plan import Totals
from effcompile.ir.program import Program
from effcompile.passes import Choice, Context, Declined, propose_all


@dataclass(frozen=True, kw_only=True)
class Regime:
    """One way in which a step is called: its graph at these sizes, and how often."""

    name: str
    program: Program
    calls: float


@dataclass(frozen=True, kw_only=True)
class Regimes:
    """Both of them, and what memory has to hold at the end of the context: the cache, and the activations of a chunk or of a token."""

    prefill: Regime
    decode: Regime
    cache_bytes: int
    workspace: int

    @classmethod
    def of(cls, step: GenerationStep, program: Program, tokens: tuple[int, int, int], batch: int, chunk: int) -> Regimes:
        """At these sizes; `tokens` are context, prompt and new ones."""
        context, prompt, new = tokens
        chunk = min(chunk, prompt)
        at = lambda end, count: filled(step, program, batch=batch, context=end, new=count)  # noqa: E731
        decode = at(min(context, prompt + max(1, new // 2)), 1)
        prefill = at(max(chunk, (prompt + chunk) // 2), chunk)
        ends = (at(context, chunk), at(context, 1))
        return cls(
            prefill=Regime(name="prefill", program=prefill, calls=math.ceil(prompt / chunk)),
            decode=Regime(name="decode", program=decode, calls=new),
            cache_bytes=step.layout.nbytes(context, batch),
            workspace=max(timeline(program).activation_bytes for program in ends),
        )

    def __iter__(self) -> Iterator[Regime]:
        return iter((self.prefill, self.decode))


@dataclass(frozen=True, kw_only=True)
class GenerationSearch(Search):
    """`plan_for` answers for both regimes. `program`: the captured step. `extra`: bytes that were measured and not foreseen."""

    regimes: Regimes
    extra: dict[str, int] = field(default_factory=dict)

    def baseline(self) -> Totals:
        """Predicted figures of the unplanned model in stock torch."""
        seconds = sum(r.calls * estimate(r.program, self.machine.target, BASELINE).seconds for r in self.regimes)
        weights = self.program.weight_bytes()
        peak = weights + self.regimes.cache_bytes + self.regimes.workspace
        return Totals(seconds=seconds, weight_bytes=weights, peak_bytes=peak, error=0.0)

    def _proposal(self, backend: Backend) -> Proposal:
        name = backend.name
        if name not in self._proposals:
            context = Context(
                goal=self.goal, target=self.machine.target, backend=name, sensitivity=self.sensitivity.errors,
                formats=self.formats, lacks=backend.lacks,
            )  # fmt: skip
            found = [(regime, *propose_all(self.passes, regime.program, context)) for regime in self.regimes]
            choices = tuple(_merged([(regime, made) for regime, made, _ in found]))
            declined = {(d.site, d.option): d for _, _, refused in found for d in refused if isinstance(d, Declined)}
            self._proposals[name] = Proposal(
                backend=name,
                choices=choices,
                declined=tuple(declined.values()),
                rest=self._rest_of(name, [(regime, made) for regime, made, _ in found], choices),
                provenance=total([o.cost for c in choices for o in c.options]).provenance,
            )
        return self._proposals[name]

    def _rest_of(self, backend: str, found: list[tuple[Regime, list[Choice]]], choices: tuple[Choice, ...]) -> Cost:
        """Seconds of what no choice covers, bytes of the weights that no choice stores, cache and workspace."""
        decided = {choice.site for choice in choices}
        seconds = 0.0
        for regime, made in found:
            covered = frozenset[object]().union(*(choice.covers for choice in made if choice.site in decided))
            predicted = estimate(regime.program, self.machine.target, backend, overrides=dict.fromkeys(covered, 0.0))  # type: ignore[arg-type]
            seconds += regime.calls * predicted.seconds
        stored = sum(choice.option(choice.baseline).cost.weight_bytes for choice in choices)
        grown = self.regimes.cache_bytes if backend != "torch-eager" else 0  # a runtime that concatenates holds the old and the new
        return Cost(
            seconds=seconds,
            weight_bytes=max(self.program.weight_bytes() - stored, 0),
            bytes_kept=self.regimes.cache_bytes + grown + self.regimes.workspace + self.extra.get(backend, 0),
        )


def _merged(found: list[tuple[Regime, list[Choice]]]) -> Iterator[Choice]:
    """Choices of all regimes as one: an option's seconds are those of all its calls. What one regime does not offer is offered by none."""
    first, *others = found
    by_site = [{choice.site: choice for choice in made} for _, made in others]
    for choice in first[1]:
        twins = [(regime, sites[choice.site]) for (regime, _), sites in zip(others, by_site, strict=True) if choice.site in sites]
        if len(twins) != len(others):
            continue
        options = []
        for option in choice.options:
            seconds = first[0].calls * option.cost.seconds
            same = [(regime, next((o for o in twin.options if o.name == option.name), None)) for regime, twin in twins]
            if any(o is None for _, o in same):
                continue
            seconds += sum(regime.calls * o.cost.seconds for regime, o in same if o is not None)
            options.append(replace(option, cost=replace(option.cost, seconds=seconds)))
        if any(option.name == choice.baseline for option in options):
            yield replace(choice, options=tuple(options))
