"""The table of levers: each alone, the best pair, and the plan, at one budget; true, and none better than the
plan.
"""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from rich.console import Console
from train_helpers import forms_of, gpt2

from effcompile.capture import capture_training
from effcompile.compiler import plan_training
from effcompile.core.errors import InfeasibleError
from effcompile.core.goal import Goal
from effcompile.ir.plan import Plan
from effcompile.ir.step_figures import LeverRow
from effcompile.machine.machines import load_target
from effcompile.passes import Levers
from effcompile.passes.training.base import Case
from effcompile.passes.training.checkpoint import Checkpoint, carried_out, periodic
from effcompile.passes.training.heads import LossHeads
from effcompile.passes.training.offload import Offload
from effcompile.report import print_plan
from effcompile.search.training.levers import Subsets, lever_rows
from effcompile.search.training.operator_costs import OperatorCosts
from effcompile.search.training.prepare import prepare

pytestmark = pytest.mark.usefixtures("quick_training")
PASSES = ["no-pointwise", "states.in_backward=true"]
BUDGET = 520_000  # about three times the parameters: with Adam's states on the device alone they take four


def planned(memory: int, *more: str, passes: list[str] = PASSES) -> Plan:
    model, batch = gpt2(layers=2, n_positions=64, vocab_size=512)
    goal, optimizer = Goal(mode="training", memory=memory), torch.optim.AdamW
    return plan_training(
        model, (), batch, goal=goal, target="cpu-generic", optimizer=optimizer, passes=[*passes, *more]
    )


@pytest.fixture(scope="module")
def plans() -> dict[str, Plan]:
    """Filled by the first test that asks."""
    return {}


@pytest.fixture
def plan(plans: dict[str, Plan]) -> Plan:
    if not plans:
        plans["all"] = planned(BUDGET)
    return plans["all"]


def rows(plan: Plan) -> dict[tuple[str, ...], LeverRow]:
    return {row.levers: row for row in plan.levers}


def test_each_lever_alone_is_told_and_none_is_better_than_all(plan: Plan) -> None:
    none, periodic, *alone, pair, joint = plan.levers
    assert periodic.levers == ("periodic",) and periodic.every == 1
    assert none.levers == ()
    assert none.seconds is None  # the budget binds
    assert {row.levers for row in alone} == {(name,) for name in joint.levers}
    assert {"recompute", "loss head", "optimizer states"} <= set(joint.levers)
    assert len(pair.levers) == 2
    assert (joint.seconds, joint.peak_bytes) == (plan.predicted.seconds, plan.predicted.peak_bytes)
    limit: Any = plan.goal.memory
    for row in (none, periodic, *alone, pair):
        assert row.seconds is not None or row.peak_bytes > limit
        assert row.seconds is None or (
            row.peak_bytes <= limit and joint.seconds <= row.seconds + 0.0101 * joint.seconds
        )
    assert rows(plan)[("optimizer states",)].peak_bytes < none.peak_bytes


def test_a_lever_alone_is_what_a_plan_with_it_alone_reaches(plan: Plan) -> None:
    limit: Any = plan.goal.memory
    alone = rows(plan)[("recompute",)]
    assert alone.seconds is None
    with pytest.raises(InfeasibleError) as refused:
        planned(
            limit,
            passes=[
                "no-pointwise",
                "no-loss_head",
                "no-attention",
                "states.offload=false",
                "states.in_backward=false",
            ],
        )
    assert alone.peak_bytes == refused.value.nearest["memory"]


def test_pairs_that_are_not_looked_at_are_told() -> None:
    model, batch = gpt2(layers=1, vocab_size=512)
    figures, levers = (
        OperatorCosts(target=load_target("cpu-generic"), here=False),
        Levers(values=(Offload(bandwidth="40GB"),)),
    )
    step = capture_training(model, (), batch)
    found = prepare(step, forms_of(step, LossHeads(chunks=2))[0], Checkpoint(), figures, levers=levers)
    subsets = Subsets(found=[found], levers=levers, figures=figures)
    joint = subsets.solve(subsets.names, None)
    assert subsets.names == ("recompute", "offload", "loss head")
    shown, note = lever_rows(subsets, joint, 1 << 40, seconds=0.0)
    assert [len(row.levers) for row in shown if not row.every] == [0, 1, 1, 1, 2, 3]
    assert len(note) == 1
    assert "best of 1 of 3" in str(note[0])
    assert lever_rows(subsets, joint, 1 << 40)[1] == []


def test_whole_blocks_at_a_fixed_period_cost_their_forwards_and_hold_their_inputs() -> None:
    """Against the step emitted by hand: of every k-th block all operators run again, and its input alone is
    kept.
    """
    model, batch = gpt2(layers=4)
    figures = OperatorCosts(target=load_target("cpu-generic"), here=False)
    step = capture_training(model, (), batch)
    found = prepare(step, [Case(step=step)], Checkpoint(), figures)
    cut = found.variants[0].plain
    layers = [block for block in cut.blocks if ".h." in block.name]
    free = periodic(cut, 99)  # the first layer alone
    assert free is not None
    for every, names in ((1, {0, 1, 2, 3}), (2, {0, 2}), (3, {0, 3})):
        chosen = periodic(cut, every)
        assert chosen is not None
        for block, option in zip(cut.blocks, chosen, strict=True):
            remade = block in layers and layers.index(block) in names
            assert bool(option.recomputed) == remade and (
                option.kept <= set(block.problem.entering) or not remade
            )
        again = sum(op.seconds for i in names for op in layers[i].problem.forward)
        # what only the forward reads is not made again
        assert 0.5 * again < sum(option.seconds for option in chosen) <= again
        kept = [carried_out(cut, options, ())[1].saved_bytes for options in (chosen, free)]
        assert kept[0] < kept[1]


def test_the_table_is_printed_and_saved(plan: Plan) -> None:
    stream = io.StringIO()
    print_plan(plan, Console(file=stream, width=80))
    text = stream.getvalue()
    for words in ("none: everything kept", "recompute alone", "best pair: ", "all of them: this plan"):
        assert words in text
    assert max(len(line) for line in text.splitlines()) <= 80
    assert Plan.from_dict(plan.to_dict()).levers == plan.levers


def test_a_budget_that_does_not_bind_has_no_table() -> None:
    assert planned(1 << 40, passes=["no-pointwise", "no-loss_head"]).levers == ()
