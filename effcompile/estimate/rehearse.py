"""A plan's error before anything is lowered: the captured graph run with what every reduced site adds, all of
them at once.

Sensitivity takes one option at a time, to first order, and adds squares as if errors were uncorrelated; here
they meet, pass through what is not linear, and come to the inputs that the result will be verified with. The
arithmetic is the same emulation of what backends compute (estimate/perturb.py), and so is no proof: that
remains to the comparison of the artifact.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cached_property

import torch
from torch import fx
from torch.utils import _pytree as pytree

from effcompile.core.types import Outputs, Value
from effcompile.estimate import fake_quant, kept
from effcompile.estimate.codings import Lenient, on_inputs
from effcompile.estimate.perturb import (
    MERGED,
    REPLACED,
    ErrorRecord,
    Site,
    Weights,
    delta_of,
    find_sites,
    is_static,
    result_of,
)
from effcompile.ir.formats import INT8_DYNAMIC, INT8_TOKEN, Form
from effcompile.ir.plan import Plan
from effcompile.ir.program import Program
from effcompile.ops.byte_codings import Coding
from effcompile.sites.parts import linears, merges

#: Flat inputs of several calls → what the model returns for each, its tensors alone.
Emulation = Callable[[Sequence[Sequence[torch.Tensor]]], Iterator[list[torch.Tensor]]]

#: Calls that are emulated together at the most, and bytes of their activations.
_MOST_AT_ONCE, _BYTES_AT_ONCE = 8, 128 << 20


class Rehearsal:
    """Runs plans of one program in emulated arithmetic.

    Args:
        program: the captured model, in fp32.
        options: kind of site → options that make an error, as sensitivity has them.
        weights: options of single linears that are another weight in the place of theirs.
        calibration: flat inputs whose ranges static quantisers take, and how linears in bytes have x.
        sums: names of backends whose products of bf16 come out in fp32; those of others are rounded.
    """

    def __init__(
        self,
        program: Program,
        options: Mapping[str, tuple[Form, ...]],
        weights: Weights,
        calibration: Sequence[Sequence[torch.Tensor]],
        sums: Collection[str] = (),
    ) -> None:
        self._program, self._calibration, self._sums = program, calibration, sums
        self._options, self._weights = options, weights
        self._ranges: dict[fx.Node, fake_quant.Range] = {}
        self._codings: dict[str, Coding | None] = {}

    @cached_property
    def known_by(self) -> str | None:
        """What kept errors of its plans are found by; None where an option is a weight that a pass makes."""
        return None if self._weights else kept.of_rehearsals(self._program, self._calibration)

    def rounds(self, plan: Plan) -> bool:
        """Whether the plan's backend rounds products of bf16."""
        return plan.backend not in self._sums

    def of(self, plan: Plan) -> Emulation | None:
        """How the model runs under this plan; None for one that reduces nothing, or what is not emulated."""
        chosen = self._chosen(plan)
        known = {site.name for site, _ in chosen} | {group.site for group in merges(self._program)}
        if not chosen or any(
            decision.cost.error_squared > 0 and decision.site not in known for decision in plan.decisions
        ):
            return None
        self._watch([site for site, form in chosen if is_static(form)])
        self._choose([site for site, form in chosen if form.weights == INT8_TOKEN])
        activations = (plan.predicted.peak_bytes or 0) - (plan.predicted.weight_bytes or 0)
        at_once = max(1, min(_MOST_AT_ONCE, _BYTES_AT_ONCE // max(activations, 1)))

        def run(cases: Sequence[Sequence[torch.Tensor]]) -> Iterator[list[torch.Tensor]]:
            for at in range(0, len(cases), at_once):
                part = cases[at : at + at_once]
                actors = [_Actor(self._program.module, chosen, self._ranges) for _ in part]
                for outputs in _in_step(actors, [self._program.leaves_with(inputs) for inputs in part]):
                    yield [value for value in pytree.tree_leaves(outputs) if isinstance(value, torch.Tensor)]

        return run

    def _chosen(self, plan: Plan) -> list[tuple[Site, Form]]:
        """The sites that the plan reduces, each with what it does there."""
        options = {decision.site: decision.option for decision in plan.decisions}
        forms = {decision.site: decision.form for decision in plan.decisions if decision.form is not None}
        merged = {
            m.site
            for g in merges(self._program)
            if (f := forms.get(g.site)) and f.word == MERGED.word
            for m in g.members
        }
        chosen = []
        for site in find_sites(self._program, self._options, self._weights, self.rounds(plan)):
            known = {form.name: form for form in site.options}
            form = known.get(options.get(site.name, ""))
            if form is not None and form.weights == INT8_DYNAMIC and site.name in merged:
                form = known.get(MERGED.name, form)
            if form is not None:
                chosen.append((site, form))
        return chosen

    def _choose(self, coded: Sequence[Site]) -> None:
        """Say of each of these sites how it has x, found once for all linears."""
        if coded and not self._codings:
            self._codings = on_inputs(self._program, linears(self._program), self._calibration)
        for site in coded:
            site.coding = self._codings.get(site.name)

    def _watch(self, static: Sequence[Site]) -> None:
        """Know the range of what enters each of these sites over the calibration inputs.

        Where one is not known yet, those of all linears are found: the next plan may make others static, and
        a call takes as long.
        """
        if all(site.x in self._ranges for site in static):
            return
        entering = {site.x for site in linears(self._program)}
        watcher = _Watcher(self._program.module, frozenset(entering), self._ranges)
        for inputs in self._calibration:
            with torch.no_grad():
                watcher.run(*self._program.leaves_with(inputs), enable_io_processing=False)


class _Watcher(Lenient):
    """Keeps the range of chosen values."""

    def __init__(
        self, module: fx.GraphModule, wanted: frozenset[fx.Node], ranges: dict[fx.Node, fake_quant.Range]
    ) -> None:
        super().__init__(module)
        self._wanted, self._ranges = wanted, ranges

    def run_node(self, n: fx.Node) -> Outputs:
        value = super().run_node(n)
        if n in self._wanted:
            low, high = fake_quant.range_of(value)
            before = self._ranges.get(n, (low, high))
            self._ranges[n] = min(low, before[0]), max(high, before[1])
        return value


class _Actor(Lenient):
    """Puts what each chosen option gives in the place of a site's result."""

    def __init__(
        self,
        module: fx.GraphModule,
        chosen: Sequence[tuple[Site, Form]],
        ranges: Mapping[fx.Node, fake_quant.Range],
    ) -> None:
        super().__init__(module)
        self._ranges = ranges
        self.chosen: dict[fx.Node, list[tuple[Site, Form]]] = {}
        for site, form in chosen:
            self.chosen.setdefault(site.node, []).append((site, form))

    def run_node(self, n: fx.Node) -> Outputs:
        replaced = next((pair for pair in self.chosen.get(n, ()) if pair[0].kind in REPLACED), None)
        value = super().run_node(n) if replaced is None else self._result(*replaced)
        for site, form in self.chosen.get(n, ()):
            if site.kind not in REPLACED:
                record = ErrorRecord(
                    inputs=[], outputs=[], results={n: value}, entering={}, biases={}, batch=1
                )
                value = value + delta_of(site, form, record, None)
        return value

    def _result(self, site: Site, form: Form) -> torch.Tensor:
        assert site.x is not None, "what replaces a result follows from what enters"
        bias = None if site.bias is None else self.env[site.bias]
        return result_of(
            site, form, self.env[site.x], bias, self._ranges.get(site.x) if is_static(form) else None
        )


@torch.no_grad()
def _in_step(actors: Sequence[_Actor], inputs: Sequence[Sequence[Value]]) -> list[Outputs]:
    """Run each with its inputs, node by node together, so that a weight is rounded once for all; what each
    returns.
    """
    for actor, given in zip(actors, inputs, strict=True):
        actor.args_iter = iter(given)
    graph = actors[0].graph
    for node in graph.nodes:
        for actor in actors:
            actor.env[node] = actor.run_node(node)
            for dead in actor.user_to_last_uses.get(node, ()):
                del actor.env[dead]
        for site, _ in actors[0].chosen.get(node, ()):
            site.cache.clear()  # a second copy of all weights is not needed
    return [actor.env[graph.output_node()] for actor in actors]
