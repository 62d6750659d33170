"""Training with products in 8 bits: its error is measured, its plan carried out again, and what errs too much
is not taken.
"""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from train_helpers import gpt2

import effcompile
from effcompile.ir.plan import Plan
from effcompile.passes.training.int8 import INT8
from effcompile.report.reasons import words

pytestmark = pytest.mark.usefixtures("quick_training")
GOAL: dict[str, Any] = {"mode": "training", "max_error": 0.2}
PASSES = ["int8.always=true", "no-precision", "no-pointwise"]


def test_its_error_is_measured_and_its_plan_is_carried_out_again(tmp_path: Path) -> None:
    model, batch = gpt2(dropout=0.0)
    made = effcompile.optimize(copy.deepcopy(model), batch, passes=PASSES, **GOAL)
    assert ("int8", INT8) in {(d.by, d.option) for d in made.plan.decisions}
    assert 1e-4 < made.plan.checks[0].error <= 0.2
    assert made.plan.measured is not None
    assert made.plan.measured.peak_bytes == pytest.approx(made.plan.predicted.peak_bytes, abs=64)
    plan = Plan.load(made.save(tmp_path) / "plan.json")
    again = effcompile.optimize(copy.deepcopy(model), batch, plan=plan)
    assert torch.equal(again(**batch).loss, made(**batch).loss)


def test_where_the_error_is_too_large_the_products_stay() -> None:
    model, batch = gpt2(dropout=0.0)
    made = effcompile.optimize(model, batch, passes=PASSES, **{**GOAL, "max_error": 1e-4})
    assert made.plan.checks[0].error <= 1e-4 and not [d for d in made.plan.decisions if d.option == INT8]
    (declined,) = [d for d in made.plan.declined if d.by == "int8"]
    assert "relative error was" in words(declined.reason)
