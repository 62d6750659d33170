"""A plan's error before anything is lowered: the captured graph run with what every reduced site adds, all of them at once.

Sensitivity takes one option at a time, to first order, and adds squares as if errors were uncorrelated; here they meet, pass through
what is not linear, and come to the inputs that the result will be verified with. The arithmetic is the same emulation of what backends
compute (estimate/perturb.py), and so is no proof: that remains to the comparison of the artifact.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import fx
from torch.utils import _pytree as pytree

from effcompile.core.types import Args, Arguments, Outputs, Value
from effcompile.estimate import fake_quant
from effcompile.estimate.perturb import MERGED, ErrorRecord, Site, Weights, delta_of, find_sites
from effcompile.ir.export import LENIENT
from effcompile.ir.formats import INT8_DYNAMIC, Form
from effcompile.ir.plan import Plan
from effcompile.ir.program import Program
from effcompile.sites.parts import merges


class Rehearsal:
    """Runs plans of one program in emulated arithmetic.

    Args:
        program: the captured model, in fp32.
        options: kind of site → options that make an error, as sensitivity has them.
        weights: options of single linears that are another weight in the place of theirs.
        calibration: flat inputs whose ranges static quantisers take.
    """

    def __init__(
        self, program: Program, options: Mapping[str, tuple[Form, ...]], weights: Weights, calibration: Sequence[Sequence[torch.Tensor]]
    ) -> None:
        self._program, self._calibration = program, calibration
        self._options, self._weights = options, weights

    def of(self, plan: Plan) -> Callable[..., list[torch.Tensor]] | None:
        """Flat inputs → the tensors that the model returns, under this plan; None for one that reduces nothing, or what is not emulated."""
        chosen = self._chosen(plan)
        known = {site.name for site, _ in chosen} | {group.site for group in merges(self._program)}
        if not chosen or any(decision.cost.error_squared > 0 and decision.site not in known for decision in plan.decisions):
            return None
        ranges = self._ranges([site for site, form in chosen if form.weights is not None and form.weights.activation == "static int8"])

        def run(*inputs: torch.Tensor) -> list[torch.Tensor]:
            actor = _Actor(self._program.module, chosen, ranges)
            with torch.no_grad():
                outputs = pytree.tree_leaves(actor.run(*self._program.leaves_with(inputs), enable_io_processing=False))
            return [value for value in outputs if isinstance(value, torch.Tensor)]

        return run

    def _chosen(self, plan: Plan) -> list[tuple[Site, Form]]:
        """The sites that the plan reduces, each with what it does there."""
        options = {decision.site: decision.option for decision in plan.decisions}
        forms = {decision.site: decision.form for decision in plan.decisions if decision.form is not None}
        merged = {m.site for g in merges(self._program) if (f := forms.get(g.site)) and f.word == MERGED.word for m in g.members}
        chosen = []
        for site in find_sites(self._program, self._options, self._weights):
            known = {form.name: form for form in site.options}
            form = known.get(options.get(site.name, ""))
            if form is not None and form.weights == INT8_DYNAMIC and site.name in merged:
                form = known.get(MERGED.name, form)
            if form is not None:
                chosen.append((site, form))
        return chosen

    def _ranges(self, static: Sequence[Site]) -> dict[fx.Node, fake_quant.Range]:
        """Range of what enters each of these sites over the calibration inputs."""
        ranges: dict[fx.Node, fake_quant.Range] = {}
        entering = {site.x: site.node for site in static if site.x is not None}
        watcher = _Watcher(self._program.module, frozenset(entering), ranges)
        for inputs in self._calibration if entering else ():
            with torch.no_grad():
                watcher.run(*self._program.leaves_with(inputs), enable_io_processing=False)
        return {site.node: ranges[site.x] for site in static if site.x in ranges}


class _Interpreter(fx.Interpreter):
    def call_function(self, target: fx.node.Target, args: Args, kwargs: Arguments) -> Value:
        return super().call_function(LENIENT.get(target, target), args, kwargs)


class _Watcher(_Interpreter):
    """Keeps the range of chosen values."""

    def __init__(self, module: fx.GraphModule, wanted: frozenset[fx.Node], ranges: dict[fx.Node, fake_quant.Range]) -> None:
        super().__init__(module)
        self._wanted, self._ranges = wanted, ranges

    def run_node(self, n: fx.Node) -> Outputs:
        value = super().run_node(n)
        if n in self._wanted:
            low, high = fake_quant.range_of(value)
            before = self._ranges.get(n, (low, high))
            self._ranges[n] = min(low, before[0]), max(high, before[1])
        return value


class _Actor(_Interpreter):
    """Adds to the result of each chosen site what its option changes there."""

    def __init__(self, module: fx.GraphModule, chosen: Sequence[tuple[Site, Form]], ranges: Mapping[fx.Node, fake_quant.Range]) -> None:
        super().__init__(module)
        self._ranges = ranges
        self._chosen: dict[fx.Node, list[tuple[Site, Form]]] = {}
        for site, form in chosen:
            self._chosen.setdefault(site.node, []).append((site, form))

    def run_node(self, n: fx.Node) -> Outputs:
        value = super().run_node(n)
        for site, form in self._chosen.get(n, ()):
            entering = {n: self.env[site.x]} if site.x is not None else {}
            biases = {n: self.env[site.bias]} if site.bias is not None else {}
            record = ErrorRecord(inputs=[], outputs=[], results={n: value}, entering=entering, biases=biases, batch=1)
            value = value + delta_of(site, form, record, self._ranges.get(n))
            site.cache.clear()  # a second copy of all weights is not needed
        return value
