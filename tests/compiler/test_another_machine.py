"""A plan that is carried out on another machine than it was made for says so."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import effcompile
from effcompile.compiler.another_machine import carried_out_here
from effcompile.ir.plan import Plan
from effcompile.machine.hardware import this_hardware
from effcompile.machine.here import HERE

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def plan() -> Plan:
    return effcompile.plan(
        nn.Sequential(nn.Linear(8, 16), nn.ReLU()).eval(), (torch.randn(2, 8),), target="cpu-generic"
    )


def told(plan: Plan) -> list[str]:
    return [str(note) for note in plan.notes if "what is measured of this one" in str(note)]


def test_one_of_a_named_target_says_whose_its_predictions_are(plan: Plan, tmp_path: Path) -> None:
    assert not told(plan), "nothing is measured yet"
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 16), nn.ReLU()).eval(), torch.randn(2, 8)
    carried = effcompile.optimize(model, (x,), plan=plan)
    (said,) = told(carried.plan)
    assert said.startswith("made for cpu-generic: ") and this_hardware().cpu in said
    again = effcompile.optimize(model, (x,), plan=carried.plan)
    assert told(again.plan) == [said], "once"


def test_so_does_one_that_is_planned_and_measured_in_one_go() -> None:
    model, x = nn.Linear(8, 16).eval(), torch.randn(2, 8)
    assert told(effcompile.optimize(model, (x,), target="cpu-generic", backend="torch-eager").plan)
    assert not told(effcompile.optimize(model, (x,), backend="torch-eager").plan)


def test_this_machine_is_known_by_its_line(plan: Plan) -> None:
    here = this_hardware()
    line = f"{here.cores} cores, {here.cpu}, 99 GFLOP/s fp32, 9 GB/s (calibrated today)"
    own = replace(plan, target=HERE, target_line=line)
    assert carried_out_here(own, CPU) is own
    for other in (
        replace(own, target_line=f"1{line}"),
        replace(own, target_line=line.replace(here.cpu, "another processor")),
        replace(own, target="a-file.toml"),
    ):
        assert len(told(carried_out_here(other, CPU))) == 1
