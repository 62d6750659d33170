"""How much each low-precision option at each site changes the model's output, without running the model once
per option.

An option replaces a site's result f(x) by f(x) + δ(x). To first order the output moves by J·δ, J being the
    Jacobian of the outputs with respect to the site's result, and for v of independent random signs
    E (vᵀ J δ)² = ‖J δ‖²    (Hutchinson 1990, "A stochastic estimator of the trace of the influence matrix")
where vᵀJ is one backward pass from v, the same for every site and option. So one forward pass and a few
backward passes per input price all of them; each then costs only its own δ (computed with the backend's
rounding) and dot products. Samples that do not influence each other are draws of their own; few are taken
together with those of like sites (pooled.py). Squares of different sites add because their errors are nearly
uncorrelated (HAWQ-V2, Dong et al. 2020, §3).
"""

from __future__ import annotations

import itertools
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import fx
from torch.utils import _pytree as pytree

from effcompile.core.stages import first_line
from effcompile.estimate.inputs import Inputs, describe_generated, generate_inputs
from effcompile.estimate.perturb import (
    MERGED,
    ErrorRecord,
    Site,
    Weights,
    choose_codings,
    delta_of,
    find_sites,
    is_static,
    static_range,
)
from effcompile.estimate.pooled import Drawn, Found, errors_of
from effcompile.estimate.recorder import Recorder, floating, lacks_derivative, leaves_of
from effcompile.ir.formats import INT8_DYNAMIC, Form
from effcompile.ir.program import Program
from effcompile.sites.parts import linears, merges

__all__ = ["Inputs", "Sensitivity", "describe_generated", "generate_inputs", "measure"]

#: Rows (batch × sequence) of all calibration inputs together that δ and gradients are computed for.
MAX_ROWS = 256
#: Bytes of gradients kept for the dot products.
MAX_GRADIENT_BYTES = 768 * 2**20
#: Share of the time budget after which no further probe is started (the rest is for the options).
_PROBE_SHARE = 0.5
#: Draws that are made however long they take: what is planned does not hang on who else uses the machine.
_FEWEST = 2

#: Squared error of an option that rounds and of which the inputs show nothing (their outputs are zeros, say):
#: one unit of fp32 in the last place. Were it 0, no correction by what verification measures at other inputs
#: could ever rule the option out.
_UNSEEN = 2.0**-48

#: (what is being done, share done in [0, 1])
Progress = Callable[[str, float], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sensitivity:
    """`errors`: (site, option) → squared relative L2 error at the output, the largest over the floating
    outputs.

    Entries (merge site, "merged@int8_dynamic") hold what the members' common weight scale adds to their own
    errors.
    """

    errors: Mapping[tuple[str, str], float]
    method: str
    draws: int = 0
    seconds: float = 0.0


def measure(
    program: Program,
    inputs: Sequence[Inputs],
    options: Mapping[str, tuple[Form, ...]],
    *,
    weights: Weights | None = None,
    rounds: bool = True,
    probes: int = 8,
    budget_seconds: float = 20.0,
    progress: Progress | None = None,
) -> Sensitivity:
    """Squared relative output error of every option at every site, each as if taken alone.

    Args:
        program: the captured model, in fp32.
        inputs: calibration inputs as (args, kwargs); cut along the batch, then in number, to about MAX_ROWS
            rows.
        options: kind ("linear", "embedding", "gelu", "attention") → options to price there, without the
            baseline. Linears whose K is no multiple of a format's group are not priced for that.
        weights: options of single linears that are another weight in the place of theirs.
        rounds: whether products of bf16 are rounded (perturb.Site).
        probes: backward passes per input and output group (three quarters of it where there are several
            outputs).
        budget_seconds: half of it bounds the probing beyond the fewest draws. Sites whose turn comes late are
            priced on one input instead of all; the method says so.
        progress: told what is done and the share done.
    """
    clock = _Clock(budget=budget_seconds, tell=progress or (lambda what, share: None))
    sites = find_sites(program, options, weights, rounds)
    if not sites or not inputs:
        return Sensitivity(
            errors={}, method="nothing to measure: no site with an option that makes an error, or no inputs"
        )
    clock.tell("forward passes", 0.0)
    records = [_forward(program, sites, given) for given in _capped(program, inputs)]
    choose_codings(sites, records)
    task = _Task(program=program, sites=sites, records=records, scales=_output_scales(records))
    count, emulated = f"{len(records)} calibration inputs", "δ from the emulated quantisers"
    try:
        drawn = _probe(task, probes, torch.Generator().manual_seed(0), clock)
        backward = f"{drawn} random-sign backward passes on each of {count} (Hutchinson 1990)"
        method = f"‖Jδ‖² at the output by {backward}, {emulated}"
    except (RuntimeError, NotImplementedError) as error:
        if not lacks_derivative(error):
            raise
        drawn = _without_gradients(task)
        method = f"by running {count} with {emulated}, as torch says: {first_line(error)}"
    errors, late = _price(task, sites, clock)
    _fold_merged(program, errors)
    if late:
        method += f"; {late} of {len(sites)} sites on one input only, as the time was up"
    return Sensitivity(
        errors=errors, method=method, draws=drawn * sum(r.batch for r in records), seconds=clock.elapsed
    )


@dataclass(slots=True, kw_only=True)
class _Clock:
    """The time budget and who is told."""

    budget: float
    tell: Progress
    started: float = field(default_factory=time.perf_counter)
    priced: Iterator[int] = field(default_factory=itertools.count)

    @property
    def elapsed(self) -> float:
        return time.perf_counter() - self.started

    def next_of(self, sites: int) -> float:
        """The share that is done when the next site's turn comes."""
        return _PROBE_SHARE + (1 - _PROBE_SHARE) * next(self.priced) / sites

    def late(self, share: float) -> bool:
        """True when more than this share of the budget is used up."""
        return self.elapsed > share * self.budget


@dataclass(slots=True, kw_only=True)
class _Task:
    """What all sites are priced with."""

    program: Program
    sites: Sequence[Site]
    records: list[ErrorRecord]
    scales: list[list[float]]


def _forward(program: Program, sites: list[Site], inputs: Inputs) -> ErrorRecord:
    """One recorded forward pass, with the autograd graph behind its floating outputs."""
    flat = leaves_of(program, inputs)
    recorder = Recorder(program, {s.node: (s.x, s.bias) for s in sites})
    with torch.enable_grad():
        outputs = floating(recorder.run(*flat, enable_io_processing=False))
    sizes = [t.shape[0] for t in flat if isinstance(t, torch.Tensor) and t.dim()]
    batch = sizes[0] if sizes and outputs and all(o.dim() and o.shape[0] == sizes[0] for o in outputs) else 1
    return ErrorRecord(
        inputs=flat,
        outputs=outputs,
        results=recorder.results,
        entering=recorder.entering,
        biases=recorder.biases,
        batch=batch,
    )


def _capped(program: Program, inputs: Sequence[Inputs]) -> list[Inputs]:
    """Inputs cut along a dynamic batch axis, then in number (at least two), to about MAX_ROWS rows."""
    rows = max((s.m for s in linears(program)), default=1)
    first = program.inputs[0].shape[0] if program.inputs and program.inputs[0].shape else None
    axes = {spec.shape[0] for spec in program.inputs if spec.shape}
    leading = {t.shape[0] for t in program.flat_inputs() if t.dim()}
    if isinstance(first, str) and axes == {first} and len(leading) == 1:
        batch = leading.pop()
        keep = max(1, min(batch, MAX_ROWS * batch // (2 * rows)))
        inputs = [
            pytree.tree_map_only(torch.Tensor, lambda t: t[:keep] if t.dim() else t, tuple(given))
            for given in inputs
        ]
        rows = max(1, rows * keep // batch)
    return list(inputs[: max(2, MAX_ROWS // rows)])


def _output_scales(records: list[ErrorRecord]) -> list[list[float]]:
    """Groups of outputs probed together, each as one weight per output: the first output, then all others (an
    upper bound).

    Weights are 1 / ‖y‖ over all inputs, 0 for an output outside the group, so that ‖Jδ‖² comes out relative.
    """
    if not records or not records[0].outputs:
        return []
    norm = lambda o: sum(float(r.outputs[o].detach().double().square().sum()) for r in records) ** 0.5  # noqa: E731
    norms = [norm(o) for o in range(len(records[0].outputs))]
    weights = [1 / n if 0 < n < math.inf else 0.0 for n in norms]
    groups = [
        [w if o == 0 else 0.0 for o, w in enumerate(weights)],
        [w if o else 0.0 for o, w in enumerate(weights)],
    ]
    return [group for group in groups if any(group)]


def _probe(task: _Task, probes: int, generator: torch.Generator, clock: _Clock) -> int:
    """Draw the gradients; the rounds done within their share of the time, or for the fewest draws."""
    for record in task.records:
        record.gradients = [{} for _ in task.scales]
        if record.batch > 1:
            record.separate = _separate(record, generator)
    rounds, samples = _rounds(task, probes), sum(record.batch for record in task.records)
    for done in range(rounds):
        if done * samples >= _FEWEST and clock.late(_PROBE_SHARE):
            return done
        clock.tell("backward passes", _PROBE_SHARE * done / rounds)
        for record, group in itertools.product(task.records, range(len(task.scales))):
            for node, gradient in _backward(record, _signs(record, task.scales[group], generator)).items():
                record.gradients[group].setdefault(node, []).append(gradient.to(torch.bfloat16))
    return rounds


def _without_gradients(task: _Task) -> int:
    """No rounds: a site's gradient that reaches the outputs beside an operator that has none would be a part
    of it.
    """
    for record in task.records:
        record.gradients, record.separate = [], set()
    return 0


def _rounds(task: _Task, probes: int) -> int:
    """Backward passes per input and output group that are wanted and that the gradients' memory allows."""
    groups = len(task.scales)
    per_round = 2 * groups * sum(t.numel() for record in task.records for t in record.results.values())
    wanted = probes if groups == 1 else math.ceil(0.75 * probes)
    return max(1, min(wanted, MAX_GRADIENT_BYTES // max(per_round, 1)))


def _signs(record: ErrorRecord, weights: list[float], generator: torch.Generator) -> list[torch.Tensor]:
    """Random signs of each output's shape, times its weight."""
    draws = (torch.randint(0, 2, o.shape, generator=generator, dtype=torch.int8) for o in record.outputs)
    return [(d.to(o) * 2 - 1) * w for d, o, w in zip(draws, record.outputs, weights, strict=True)]


def _backward(record: ErrorRecord, v: list[torch.Tensor]) -> dict[fx.Node, torch.Tensor]:
    """VᵀJ at every site that the outputs with a non-zero v depend on differentiably."""
    pairs = [(o, w) for o, w in zip(record.outputs, v, strict=True) if o.requires_grad and bool(w.any())]
    if not pairs:
        return {}
    nodes = list(record.results)
    points = [record.results[n] for n in nodes]
    found = torch.autograd.grad(
        [o for o, _ in pairs], points, [w for _, w in pairs], retain_graph=True, allow_unused=True
    )
    return {n: g for n, g in zip(nodes, found, strict=True) if g is not None}


def _separate(record: ErrorRecord, generator: torch.Generator) -> set[fx.Node]:
    """Sites whose result is cut by sample: the gradient of the first sample's outputs is zero in all other
    samples' rows.
    """
    signs = _signs(record, [1.0] * len(record.outputs), generator)
    for v in signs:
        v[1:] = 0
    return {
        node
        for node, g in _backward(record, signs).items()
        if g.dim() and g.shape[0] % record.batch == 0 and not bool(g.reshape(record.batch, -1)[1:].any())
    }


def _price(task: _Task, sites: list[Site], clock: _Clock) -> tuple[dict[tuple[str, str], float], int]:
    """Errors of all options, and the number of sites that came so late that one input had to do.

    Sites are independent of each other: on a processor each of torch's threads takes some of its own, one
    after the other. Operators that all threads share wait for the last of them thousands of times, and where
    others use the machine each wait is one of the scheduler's turns.
    """
    threads = torch.get_num_threads() if all(_on_cpu(record) for record in task.records) else 1
    if threads == 1 or len(sites) < 2 * threads:
        parts = [_price_some(task, sites, clock)]
    else:
        # neighbours, which read the same, stay together
        size = -(-len(sites) // (4 * threads))
        some = [sites[at : at + size] for at in range(0, len(sites), size)]
        alone = partial(torch.set_num_threads, 1)
        try:
            with ThreadPoolExecutor(threads, initializer=alone) as pool:
                parts = list(pool.map(partial(_price_some, task, clock=clock), some))
        finally:
            torch.set_num_threads(threads)  # MKL has one number for all
    errors = errors_of([each for found, _ in parts for each in found])
    return {key: max(e, _UNSEEN) for key, e in errors.items()}, sum(late for _, late in parts)


def _on_cpu(record: ErrorRecord) -> bool:
    return all(output.device.type == "cpu" for output in record.outputs)


def _price_some(task: _Task, sites: Sequence[Site], clock: _Clock) -> tuple[list[Found], int]:
    """What was found at each place of every site, and how many were late."""
    found: list[Found] = []
    # what is rounded of a value for its readers is known to one thread
    records = [replace(record, rounded={}) for record in task.records]
    late = 0
    for site in sites:
        share = clock.next_of(len(task.sites))
        clock.tell(f"precisions of {site.name}", share)
        behind = len(records) > 1 and clock.late(max(share, 0.6))
        late += behind
        used = records[:1] if behind else records
        reached = any(site.node in group for record in records for group in record.gradients)
        # those that hold the weight alike beside each other: it is rounded once for all of them
        for option in sorted(site.options, key=_holding):
            deltas = _deltas(task, site, option, used)
            drawn = _from_gradients(task, site, deltas) if reached else [_by_running(task, site, deltas)]
            found.append(((site.name, option.name), drawn))
        site.cache.clear()
    return found, late


def _holding(option: Form) -> str:
    held = option.weights
    return "" if held is None or held.scale != "channel" else f"{held.bits} {held.scale}"


def _deltas(
    task: _Task, site: Site, option: Form, used: list[ErrorRecord]
) -> Iterator[tuple[ErrorRecord, torch.Tensor]]:
    """δ on each input, one at a time."""
    limits = static_range(site, task.records) if is_static(option) else None
    for record in used:
        yield record, delta_of(site, option, record, limits)


def _from_gradients(
    task: _Task, site: Site, deltas: Iterator[tuple[ErrorRecord, torch.Tensor]]
) -> list[Drawn]:
    """Of each output group Σ_inputs mean_draws Σ_samples (vᵀJδ)², of the whole and row by row."""
    squares, rows, draws, seen = ([0.0] * len(task.scales) for _ in range(4))
    for record, delta in deltas:
        samples = record.batch if site.node in record.separate else 1
        for group, gradients in enumerate(record.gradients):
            drawn = gradients.get(site.node, [])
            for g in drawn:
                moved = g.to(delta.dtype, copy=True).mul_(delta)  # torch multiplies two dtypes slowly
                of_rows = moved.reshape(samples, -1, delta.shape[-1]).sum(dim=2)
                squares[group] += float(of_rows.sum(dim=1).square().sum()) / len(drawn)
                rows[group] += float(of_rows.square().sum()) / len(drawn)
            draws[group] += samples * len(drawn)
            seen[group] += 1
    # scales are relative to the norm over all inputs
    whole = [len(task.records) / max(each, 1) for each in seen]
    return [Drawn(s * w, r * w, d) for s, r, d, w in zip(squares, rows, draws, whole, strict=True)]


def _by_running(task: _Task, site: Site, deltas: Iterator[tuple[ErrorRecord, torch.Tensor]]) -> Drawn:
    """The error by running the model with δ added, for sites behind which nothing can be differentiated."""
    moved, norms = defaultdict[int, float](float), defaultdict[int, float](float)
    for record, delta in deltas:
        with torch.no_grad():
            outputs = floating(
                Recorder(task.program, shift={site.node: delta}).run(
                    *record.inputs, enable_io_processing=False
                )
            )
        for o, (y, z) in enumerate(zip(record.outputs, outputs, strict=True)):
            moved[o] += float((z - y.detach()).square().sum())
            norms[o] += float(y.detach().square().sum())
    error = max((moved[o] / norms[o] for o in norms if norms[o] > 0), default=0.0)
    return Drawn(error, error, math.inf)


def _fold_merged(program: Program, errors: dict[tuple[str, str], float]) -> None:
    """Turn the members' errors under a common weight scale into what the merge itself adds."""
    for merge in merges(program):
        extra = 0.0
        for member in merge.members:
            shared = errors.pop((member.site, MERGED.name), None)
            if shared is not None:
                extra += shared - errors[member.site, INT8_DYNAMIC.name]
        if extra > 0:
            errors[merge.site, MERGED.name] = extra
