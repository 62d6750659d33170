"""From a schedule to the Plan: what was decided where, what it saves and costs, and what was declined for which reason."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

import torch
from torch import fx

from effcompile.compiler.search import versions
from effcompile.compiler.training import attend, microbatch, moved, precision
from effcompile.compiler.training.cases import Joint
from effcompile.compiler.training.fit import fit
from effcompile.compiler.training.prepare import Figures, Preparation, Prepared
from effcompile.compiler.training.solve import Schedule
from effcompile.compiler.training.states import decisions, state_notes
from effcompile.core.cost import Cost, Provenance
from effcompile.core.goal import Goal
from effcompile.core.units import format_bytes, format_seconds
from effcompile.ir.footprint import GIVEN, GRADIENTS, excess
from effcompile.ir.plan import MOST_POINTS, Certificate, Decision, Declined, MemoryTimeline, Plan, Totals
from effcompile.ir.step import Step
from effcompile.ops.fused import Fused
from effcompile.passes.training.base import Chosen
from effcompile.passes.training.checkpoint import carried_out
from effcompile.passes.training.heads import Variant
from effcompile.planner.remat import BlockOption, Group

_POINTS = MOST_POINTS - 3  # forward, backward and the optimizer's step are divided apart
KEEP = "keep everything"


def build_plan(joint: Joint, found: Preparation, figures: Figures, goal: Goal, notes: Sequence[str] = ()) -> Plan:
    """The plan of a schedule and its optimizer states. `found`: what was chosen from."""
    best = joint.schedule
    prepared = best.prepared
    given = prepared.step if joint.parts is None else joint.parts.step.whole
    timeline = _timeline(joint)
    solution = best.solution
    return Plan(
        model=prepared.step.name,
        fingerprint=fingerprint(found.captured),
        parameters=sum(_numel(node) for node in prepared.step.parameters),
        goal=goal,
        target=figures.target.name,
        target_line=figures.target.describe(),
        backend="torch",
        decisions=(
            *_checkpoints(best, figures),
            *moved.decisions(best),
            *precision.decisions(joint, found),
            *attend.decisions(found.attended, fused=prepared.variant.fused_attention),
            *microbatch.decisions(joint),
            *_head(best, found),
            *_gradients(best),
            *_chains(best),
            *_further(best, found),
            *decisions(joint.states, joint.case.given, prepared.step),
        ),
        declined=(
            *_not_taken(best),
            *_refused_heads(prepared),
            *attend.refusals(found.attended),
            *found.refused,
            *found.declined,
            *joint.declined,
        ),
        certificate=Certificate(
            status=solution.status,
            objective=joint.seconds,
            bound=joint.bound,
            gap=max(solution.gap, 1 - joint.bound / joint.seconds) if joint.seconds and (joint.states or joint.parts) else solution.gap,
            sites=len(prepared.cut.blocks) + bool(joint.states),
            alternatives=sum(len(prepared.options[stage.kind]) for stage in prepared.stages) + joint.ways,
            seconds=_solving(joint),
            solver=solution.solver,
            rounds=best.rounds,
        ),
        baseline=_baseline(joint, found),
        predicted=Totals(seconds=joint.seconds, peak_bytes=joint.peak_bytes, error=None if prepared.variant.precision else 0.0),
        inputs=describe_inputs(given),
        guards=given.guards,
        notes=(
            *given.mends,
            *_dropped(given),
            *_times(figures),
            *moved.notes(best),
            *state_notes(joint.states),
            *microbatch.notes(joint),
            *notes,
        ),
        versions=versions(),
        memory_timeline=timeline,
        fit=None if figures.here else fit(joint.peak_bytes, figures.target, timeline, goal.memory),
    )


def _solving(joint: Joint) -> float:
    """Seconds that the solver took, for all cases."""
    made = [joint] if joint.record is None else joint.record.solutions
    return sum(one.schedule.solution.solve_seconds for one in made)


def _baseline(joint: Joint, found: Preparation) -> Totals:
    """The unplanned step, with the optimizer as it was given."""
    given = joint.case.given
    if given is None:
        return Totals(seconds=found.seconds, peak_bytes=found.footprint.peak_bytes, error=0.0)
    peak = (found.footprint + given.footprint).peak_bytes
    return Totals(seconds=found.seconds + given.seconds, peak_bytes=peak, error=0.0)


def fingerprint(step: Step) -> str:
    """A short hash of the graph: operators, shapes, constants. A plan fits only the step that it was made for."""
    digest = hashlib.sha256()
    for node in step.graph.nodes:
        value = node.meta.get("val")
        shape = tuple(map(int, value.shape)) if isinstance(value, torch.Tensor) else ""
        digest.update(f"{node.op}:{node.target if node.op != 'placeholder' else ''}:{shape};".encode())
    return digest.hexdigest()[:16]


def describe_inputs(step: Step) -> tuple[str, ...]:
    """One line for each input: `input_ids [2 × 512] int64`."""
    lines = []
    for node, name in zip(step.inputs, attend.input_names(step), strict=True):
        value = node.meta["val"]
        shape = " × ".join(str(int(s)) for s in value.shape)
        gradient = ", with its gradient" if node in step.input_gradients else ""
        lines.append(f"{name} [{shape}] {str(value.dtype).removeprefix('torch.')}{gradient}")
    return tuple(lines)


# ------------------------------------------------------------------ decisions


def _checkpoints(best: Schedule, figures: Figures) -> list[Decision]:
    decisions = []
    grouped = {i: group for group in best.solution.groups for i in range(group.first, group.last + 1)}
    for i, (block, option) in enumerate(zip(best.prepared.cut.blocks, best.chosen, strict=True)):
        full = best.prepared.options[block.stage.kind][0]
        origin = _origin(best, grouped, i)
        name = option.label + (f"; input remade from block {origin}" if origin else "")
        decisions.append(
            Decision(
                site=block.name, kind="checkpoint", option=name, baseline=KEEP, by="checkpoint",
                cost=_cost(option, figures), baseline_cost=_cost(full, figures),
                why=_why(option, full),
                settings={"keep": tuple(sorted(option.kept)), "remade_from": origin},
            )
        )  # fmt: skip
    return decisions


def _origin(best: Schedule, grouped: Mapping[int, Group], i: int) -> str:
    """The block that a block's input is remade from; "" where it is kept."""
    group = grouped.get(i)
    return "" if group is None or i == group.first else best.prepared.cut.blocks[group.first].name


def _cost(option: BlockOption, figures: Figures) -> Cost:
    provenance = Provenance.MEASURED if figures.here and not figures.modelled else Provenance.MODELLED
    return Cost(seconds=option.seconds, bytes_kept=option.kept_bytes, bytes_transient=option.backward_peak, provenance=provenance)


def _why(option: BlockOption, full: BlockOption) -> str:
    if not option.recomputed and not option.forms:
        return "all fits"
    return f"frees {format_bytes(full.kept_bytes - option.kept_bytes)} between forward and backward for {format_seconds(option.seconds)}"


def _head(best: Schedule, found: Preparation) -> list[Decision]:
    variant = best.prepared.variant
    if not variant.head:
        return []
    plain = next(p for p in found.variants if p.variant.precision == variant.precision)
    return [
        Decision(
            site=variant.head, kind="loss head", option=variant.choice, baseline="whole", by="loss_head",
            cost=Cost(seconds=best.prepared.seconds - plain.seconds, bytes_transient=_end_peak(best.prepared)),
            baseline_cost=Cost(bytes_transient=_end_peak(plain)),
            why="" if variant.option == "whole" else f"its logits, {format_bytes(variant.logits_bytes)}, are never there at once",
            settings={"form": variant.option, "chunks": variant.chunks},
        )
    ]  # fmt: skip


def _end_peak(prepared: Prepared) -> int:
    """The least that the last block, which holds the loss head, needs at its highest instant."""
    return min(max(o.forward_peak, o.backward_peak) for o in prepared.options[prepared.stages[-1].kind])


def _gradients(best: Schedule) -> list[Decision]:
    if not best.prepared.variant.in_place:
        return []
    return [
        Decision(
            site=site, kind="gradient", option="in place", baseline="separate", by="loss_head", cost=Cost(),
            baseline_cost=Cost(bytes_transient=size), why="the uses of a tied parameter are summed in one tensor",
        )
        for site, size in summed_in_place(best.prepared.step).items()
    ]  # fmt: skip


def summed_in_place(step: Step) -> dict[str, int]:
    """Parameters whose gradients are summed in one tensor, with its bytes."""
    return dict(found for node in step.graph.nodes if _in_place(node) and (found := _summed(step, node)) is not None)


def _in_place(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return node.op == "call_function" and schema is not None and schema.is_mutable and bool(node.args)


def _summed(step: Step, node: fx.Node) -> tuple[str, int] | None:
    """The parameter whose gradient a node writes into, with its bytes."""
    target: Any = node.args[0]
    for name, gradient in step.gradients.items():
        if gradient in (target, node) or target in gradient.all_input_nodes:
            value = gradient.meta["val"]
            return name, value.numel() * value.element_size()
    return None


def _chains(best: Schedule) -> list[Decision]:
    """One decision for the element-wise chains of every block that has any."""
    found = []
    for block in best.prepared.cut.blocks:
        kernels = [n for n in (*block.forward, *block.backward) if isinstance(n.target, Fused)]
        if kernels:
            option = f"{len(kernels)} kernels"
            found.append(
                Decision(
                    site=block.name, kind="element-wise", option=option, baseline="one by one", by="pointwise", cost=Cost(),
                    baseline_cost=Cost(), why="chains measured to be faster as one kernel each",
                )
            )  # fmt: skip
    return found + _apart(best)


def _further(best: Schedule, found: Preparation) -> list[Decision]:
    """What passes of installed packages decided, with the step's time against the same step as it was."""
    variant = best.prepared.variant
    return [
        Decision(
            site=chosen.choice.site, kind=chosen.choice.kind, option=chosen.option.name, baseline=chosen.choice.baseline, by=chosen.by,
            cost=Cost(seconds=best.prepared.seconds), baseline_cost=Cost(seconds=_as_it_was(found, variant, chosen)),
            why=chosen.option.why, settings=chosen.option.settings,
        )
        for chosen in variant.taken
    ]  # fmt: skip


def _as_it_was(found: Preparation, variant: Variant, chosen: Chosen) -> float:
    """Seconds of the variant that differs in one choice alone."""
    other = replace(chosen, option=chosen.choice.option(chosen.choice.baseline))
    wanted = replace(variant, step=variant.step, unfused=(), taken=tuple(other if c is chosen else c for c in variant.taken))
    same = [p for p in found.variants if replace(p.variant, step=variant.step, unfused=()) == wanted]
    return same[0].seconds if same else found.seconds


def _apart(best: Schedule) -> list[Decision]:
    """The chains that are no kernel."""
    apart = best.prepared.variant.unfused
    if not apart:
        return []
    return [
        Decision(
            site="element-wise", kind="element-wise", option=f"{len(apart)} chains one by one", baseline="one by one", by="pointwise",
            cost=Cost(), baseline_cost=Cost(), why="measured to be no slower apart",
            settings={str(number): names for number, names in enumerate(apart)},
        )
    ]  # fmt: skip


# ------------------------------------------------------------------ what was declined


def _not_taken(best: Schedule) -> list[Declined]:
    """Per class of equal blocks with equal choices: the next faster option, with what the step would then need."""
    found = []
    budget = best.problem.budget
    pairs = list(enumerate(zip(best.prepared.cut.blocks, best.chosen, strict=True)))
    key = lambda pair: (pair[1][0].stage.kind, pair[1][1].label)  # noqa: E731
    for _, run in groupby(sorted(pairs, key=lambda p: (*key(p), p[0])), key=key):
        i, (block, option) = next(run)
        faster = [o for o in best.prepared.options[block.stage.kind] if o.seconds < option.seconds]
        if faster and budget is not None:
            found.append(_declined(best, i, faster[-1], budget))
    return found


def _declined(best: Schedule, i: int, other: BlockOption, budget: int) -> Declined:
    cut = best.prepared.cut
    chosen = [*best.chosen[:i], other, *best.chosen[i + 1 :]]
    peak = carried_out(cut, chosen, best.solution.groups)[1].peak_bytes
    saves = format_seconds(best.chosen[i].seconds - other.seconds)
    if over := excess(peak, budget):
        reason = f"saves {saves}, but its peak is {format_bytes(over)} above the budget"
    else:
        reason = f"would fit and save {saves}: within the proof's gap"
    cost = Cost(seconds=other.seconds, bytes_kept=other.kept_bytes, bytes_transient=other.backward_peak)
    return Declined(site=cut.blocks[i].name, kind="checkpoint", option=other.label, by="checkpoint", reason=reason, cost=cost)


def _refused_heads(prepared: Prepared) -> list[Declined]:
    return [
        Declined(site=line.partition(":")[0], kind="loss head", option="chunks", by="loss_head", reason=line.partition(": ")[2] or line)
        for line in prepared.variant.declined
    ]


# ------------------------------------------------------------------ notes and the timeline


def _dropped(step: Step) -> list[str]:
    size = sum(step.dropped.values())
    if not size:
        return []
    names = ", ".join(step.dropped)
    return [f"not returned beside the loss: {names} ({format_bytes(size)}); --keep-outputs returns them and counts their bytes"]


def _times(figures: Figures) -> list[str]:
    if figures.here and not figures.modelled:
        return [f"operator times were measured on this machine, {len(figures.known)} different ones, each alone"]
    names = ", ".join(sorted(figures.modelled)[:3])
    rest = f" (among them {names})" if figures.here else ""
    return [f"{'some ' if figures.here else ''}operator times are modelled from the target's peaks{rest}"]


def _timeline(joint: Joint) -> MemoryTimeline:
    trace, blocks, whole = joint.schedule.trace, joint.schedule.prepared.cut.blocks, joint.footprint
    live = [instant.live + whole.resident_bytes for instant in trace.instants]
    forward = sum(instant.phase == "forward" for instant in trace.instants)
    size = max(1, -(-len(live) // _POINTS))
    first = [max(live[i : min(i + size, forward)]) for i in range(0, forward, size)]
    second = [max(live[i : i + size]) for i in range(forward, len(live), size)]
    updating = whole.updating
    return MemoryTimeline(
        points=(*first, *second, *([whole.at_update] if joint.states else [])),
        forward_points=len(first),
        parameter_bytes=trace.parts[GIVEN] + whole.resident_bytes - whole.resident.get(GRADIENTS, 0),
        peak_phase="optimizer's step" if updating else trace.peak.phase,
        peak_site="" if updating else blocks[trace.peak.stage].name,
        peak_node="" if updating else trace.peak.node,
        parts=whole.parts,
    )


def _numel(node: fx.Node) -> int:
    return int(node.meta["val"].numel())
