"""From a schedule to the Plan: what was decided where, what it saves and costs, and what was declined for
which reason.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import fx

from effcompile.core.cost import Cost, Provenance
from effcompile.core.goal import Goal
from effcompile.core.installed import versions
from effcompile.core.reasons import Because, Faster, Reason
from effcompile.ir.figures import Certificate, Totals
from effcompile.ir.footprint import GIVEN, GRADIENTS
from effcompile.ir.plan import Decision, Plan
from effcompile.ir.step import Step
from effcompile.ir.step_figures import MOST_POINTS, MemoryTimeline
from effcompile.passes.training.base import Chosen, StepOutcome
from effcompile.passes.training.forms import told
from effcompile.passes.training.taken_blocks import TakenBlocks, notes_of_fronts
from effcompile.search.training import segments
from effcompile.search.training.cases import Joint
from effcompile.search.training.fit import fit
from effcompile.search.training.operator_costs import OperatorCosts
from effcompile.search.training.prepare import Preparation, Prepared, simulate_unplanned

_POINTS = MOST_POINTS - 3  # forward, backward and the optimizer's step are divided apart


def build_plan(
    joint: Joint, found: Preparation, figures: OperatorCosts, goal: Goal, notes: Sequence[Reason] = ()
) -> Plan:
    """The plan of a schedule and its optimizer states. `found`: what was chosen from."""
    best = joint.schedule
    prepared = best.prepared
    case = prepared.case
    given = prepared.step if case.division is None else case.division.whole
    beside = [chosen for chosen in case.taken if chosen.choice.tells and len(chosen.choice.options) > 1]
    blocks = TakenBlocks(
        cut=prepared.cut, options=best.problem.options, chosen=best.chosen, groups=best.solution.groups,
        budget=best.problem.budget
    )  # fmt: skip
    timeline = _timeline(joint)
    solution = best.solution
    provenance = Provenance.MEASURED if figures.here and not figures.modelled else Provenance.MODELLED
    return Plan(
        model=prepared.step.name,
        fingerprint=fingerprint(found.captured),
        parameters=sum(
            _numel(node) for node in (found.captured if prepared.step.coded else prepared.step).parameters
        ),
        goal=goal,
        target=figures.target.name,
        target_line=figures.target.describe(),
        backend="torch",
        decisions=(
            *blocks.decisions(provenance),
            *_whole(joint, found, provenance),
        ),
        declined=(
            *blocks.not_taken(),
            *found.declined,
            *joint.declined,
        ),
        certificate=Certificate(
            status=solution.status,
            objective=joint.seconds,
            bound=joint.bound,
            gap=max(solution.gap, 1 - joint.bound / joint.seconds)
            if joint.seconds and case.seconds_beside
            else solution.gap,
            sites=len(prepared.cut.blocks) + len(beside),
            alternatives=sum(len(best.problem.options[stage.kind]) for stage in prepared.stages)
            + sum(len(chosen.choice.options) for chosen in beside),
            seconds=_solving(joint),
            solver=solution.solver,
            rounds=best.rounds,
        ),
        baseline=_baseline(joint, found),
        predicted=Totals(
            seconds=joint.seconds, peak_bytes=joint.peak_bytes, error=0.0 if prepared.case.exact else None
        ),
        inputs=describe_inputs(given),
        guards=given.guards,
        notes=(
            *given.mends,
            *_dropped(given),
            *_times(figures),
            *segments.told(joint, figures.target),
            *notes_of_fronts(prepared.cut, best.fronts, best.trace.host_bytes),
            *_over_the_link(joint),
            *case.notes,
            *notes,
        ),
        versions=versions(),
        memory_timeline=timeline,
        fit=None if figures.here else fit(joint, figures.target, timeline, goal.memory),
    )


def _solving(joint: Joint) -> float:
    """Seconds that the solver took, for all cases."""
    made = [joint] if joint.record is None else joint.record.solutions
    return sum(one.schedule.solution.solve_seconds for one in made)


def _over_the_link(joint: Joint) -> list[Reason]:
    """What lies on the host with the optimizer's states, and the traffic of a step, as ZeRO-Offload's is told
    (Ren et al. 2021, 4.1).
    """
    states, best = joint.case.states, joint.schedule
    if states is None or not states.link_bytes:
        return []
    values = 2 * sum(option.host_bytes for option in best.chosen)  # there and back
    moved = states.link_bytes + joint.case.repeats * values
    text = "on the host {bytes} in all; {bytes} cross the link in a step of {seconds}: {} GB/s"
    return [
        Because(text, (joint.footprint.host, moved, joint.seconds, round(moved / joint.seconds / 1e9, 1)))
    ]


def _baseline(joint: Joint, found: Preparation) -> Totals:
    """The unplanned step, with the optimizer as it was given."""
    if joint.case.optimizer is None:
        return Totals(seconds=found.seconds, peak_bytes=found.footprint.peak_bytes, error=0.0)
    given = joint.case.optimizer.given
    peak = (found.footprint + given.footprint).peak_bytes
    return Totals(seconds=found.seconds + given.seconds, peak_bytes=peak, error=0.0)


def fingerprint(step: Step) -> str:
    """A short hash of the graph: operators, shapes, constants.

    A plan fits only the step that it was made for.
    """
    digest = hashlib.sha256()
    for node in step.graph.nodes:
        value = node.meta.get("val")
        shape = tuple(map(int, value.shape)) if isinstance(value, torch.Tensor) else ""
        digest.update(f"{node.op}:{node.target if node.op != 'placeholder' else ''}:{shape};".encode())
    return digest.hexdigest()[:16]


def describe_inputs(step: Step) -> tuple[str, ...]:
    """One line for each input: `input_ids [2 × 512] int64`."""
    lines = []
    for node, name in zip(step.inputs, step.input_names, strict=True):
        value = node.meta["val"]
        shape = " × ".join(str(int(s)) for s in value.shape)
        gradient = ", with its gradient" if node in step.input_gradients else ""
        lines.append(f"{name} [{shape}] {str(value.dtype).removeprefix('torch.')}{gradient}")
    return tuple(lines)


# ------------------------------------------------------------------ decisions


def _whole(joint: Joint, found: Preparation, provenance: Provenance) -> list[Decision]:
    """What passes have made of the whole step, with its unplanned time and bytes against the same without
    that one change.
    """
    best = joint.schedule.prepared
    outcome = StepOutcome(
        case=best.case, cut=best.cut, seconds=best.case.seconds_before_update(joint.schedule.seconds),
        unplanned_seconds=best.seconds, unplanned=lambda: simulate_unplanned(best.plain).footprint,
        captured=Cost(seconds=found.seconds, bytes_transient=found.footprint.peak_bytes),
    )  # fmt: skip
    made: list[Decision] = []
    for chosen in sorted(best.case.taken, key=lambda chosen: chosen.choice.tells):
        if (chosen.changes or chosen.option.settings) and not chosen.choice.tells:
            plain = _without(chosen, best, found)
            made += told(
                chosen,
                outcome,
                why=_gain(joint, chosen),
                cost=Cost(
                    seconds=best.seconds - plain.seconds,
                    bytes_kept=_kept(best),
                    bytes_transient=_end_peak(best),
                    provenance=provenance,
                ),
                baseline_cost=Cost(
                    weight_bytes=_held_less(best, plain),
                    bytes_kept=_kept(plain),
                    bytes_transient=_end_peak(plain),
                ),
            )
        elif chosen.option.told is not None:
            made += chosen.option.told(outcome)
    return made


def _without(chosen: Chosen, prepared: Prepared, found: Preparation) -> Prepared:
    """The form of the step that differs in one choice alone, which is as it was; itself where that is none to
    choose from.
    """
    wanted = {**prepared.case.options, chosen.choice.kind: chosen.choice.baseline}
    same = (p for p in found.variants if p.case.options == wanted)
    return next(same, prepared)


def _gain(joint: Joint, chosen: Chosen) -> Reason | None:
    """What an option of the whole step gains by the search's record."""
    kind, baseline = chosen.choice.kind, chosen.choice.baseline
    if joint.record is None or not chosen.changes:
        return None
    if len(chosen.choice.options) == 1:
        return Because("nothing else is asked for")
    seconds = joint.record.seconds_with(kind, baseline)
    return Faster(seconds=None if seconds is None else seconds - joint.seconds, than=baseline)


def _kept(prepared: Prepared) -> int:
    """Bytes between forward and backward where all is kept."""
    return sum(prepared.whole[stage.kind].kept_bytes for stage in prepared.stages)


def _held_less(best: Prepared, plain: Prepared) -> int:
    """Bytes that are there before a step and are not with this one: of weights that it holds in
    another form.
    """
    return (plain.step.resident_bytes or 0) - (best.step.resident_bytes or 0)


def _end_peak(prepared: Prepared) -> int:
    """What the last block, which holds the loss head, needs at its highest instant where
    everything is kept.
    """
    last = prepared.whole[prepared.stages[-1].kind]
    return max(last.forward_peak, last.backward_peak)


# ------------------------------------------------------------------ notes and the timeline


def _dropped(step: Step) -> list[Reason]:
    size = sum(step.dropped.values())
    if not size:
        return []
    names = ", ".join(step.dropped)
    return [
        Because(
            "not returned beside the loss: {name} ({bytes}); --keep-outputs returns them and counts their "
            "bytes",
            (names, size),
        )
    ]


def _times(figures: OperatorCosts) -> list[Reason]:
    if figures.here and not figures.modelled and any(found.busy for found in figures.known.values()):
        return [
            Because(
                "operator times were measured on this machine, {} different ones, each alone, but some while "
                "others used it: these are measured again when it is idle",
                (len(figures.known),),
            )
        ]
    if figures.here and not figures.modelled:
        return [
            Because(
                "operator times were measured on this machine, {} different ones, each alone",
                (len(figures.known),),
            )
        ]
    if not figures.here:
        return [Because("operator times are modelled from the target's peaks")]
    names = ", ".join(sorted(figures.modelled)[:3])
    return [Because("some operator times are modelled from the target's peaks (among them {name})", (names,))]


def _timeline(joint: Joint) -> MemoryTimeline:
    trace, blocks, whole = joint.schedule.trace, joint.schedule.prepared.cut.blocks, joint.footprint
    live = [instant.live + whole.resident_bytes for instant in trace.instants]
    forward = sum(instant.phase == "forward" for instant in trace.instants)
    size = max(1, -(-len(live) // _POINTS))
    first = [max(live[i : min(i + size, forward)]) for i in range(0, forward, size)]
    second = [max(live[i : i + size]) for i in range(forward, len(live), size)]
    updating = whole.updating
    return MemoryTimeline(
        points=(*first, *second, *([whole.at_update] if joint.case.states is not None else [])),
        forward_points=len(first),
        parameter_bytes=trace.parts[GIVEN] + whole.resident_bytes - whole.resident.get(GRADIENTS, 0),
        peak_phase="optimizer's step" if updating else trace.peak.phase,
        peak_site="" if updating else blocks[trace.peak.stage].name,
        peak_node="" if updating else trace.peak.node,
        parts=whole.parts,
    )


def _numel(node: fx.Node) -> int:
    return int(node.meta["val"].numel())
