"""What can win nothing is not priced, and says so; a high effort prices it all the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

import effcompile
from effcompile.backends.torch import TorchInductor
from effcompile.core.cost import Cost
from effcompile.core.effort import Effort
from effcompile.core.reasons import Unsupported
from effcompile.ir.figures import Totals
from effcompile.ir.formats import FP32, INT8_CHANNEL, INT8_TOKEN, Form, WeightFormat
from effcompile.ir.plan import Decision, Plan


def _decision(kind: str, held: WeightFormat | None, seconds: float, word: str = "") -> Decision:
    form = Form(weights=held) if held is not None else Form(word=word)
    return Decision(
        site=f"{kind} {seconds} {form.name}", kind=kind, option=form.name, baseline=form.name, by="test",
        cost=Cost(seconds=seconds), baseline_cost=Cost(seconds=seconds), form=form,
    )  # fmt: skip


@pytest.fixture(scope="module")
def plan() -> Plan:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8)).eval()
    made: Plan = effcompile.plan(model, inputs=(torch.randn(2, 8),), backend="torch-eager")
    return made


def _said(plan: Plan, decisions: Sequence[Decision], seconds: float, **goal: object) -> object:
    predicted = Totals(seconds=seconds, weight_bytes=1, peak_bytes=1, error=0.0)
    made = replace(
        plan, decisions=tuple(decisions), predicted=predicted, goal=replace(plan.goal, **goal),  # type: ignore[arg-type]
    )  # fmt: skip
    return TorchInductor().beaten_by(made)


OURS = [_decision("linear", INT8_TOKEN, 8.0), _decision("attention", None, 1.2, "sdpa_fp32")]


def test_products_by_our_kernels_leave_nothing_to_compile(plan: Plan) -> None:
    said = _said(plan, OURS, 10.0)
    assert isinstance(said, Unsupported) and "92%" in str(said)


def test_norms_in_one_pass_and_activations_between_products_leave_nothing_either(plan: Plan) -> None:
    norm, gelu = _decision("norm", None, 2.0, "fused"), _decision("gelu", None, 3.0, "erf")
    said = _said(plan, [*OURS, norm, gelu], 15.0)
    assert isinstance(said, Unsupported) and "95%" in str(said)
    assert _said(plan, [*OURS, _decision("norm", None, 2.0, "split"), gelu], 15.0) is None  # two passes


def test_what_it_may_hasten_is_priced(plan: Plan) -> None:
    assert _said(plan, OURS, 11.0) is None  # 1.8 of it in no kernel of ours
    assert _said(plan, [_decision("linear", FP32, 8.0), OURS[1]], 10.0) is None  # it packs them its own way
    assert _said(plan, [_decision("linear", INT8_CHANNEL, 8.0), OURS[1]], 10.0) is None  # its quantisers
    math = _decision("attention", None, 1.2, "math")
    assert _said(plan, [OURS[0], math], 10.0) is None


def test_neither_by_another_s_plan_nor_for_another_goal(plan: Plan) -> None:
    assert _said(plan, OURS, 10.0) is not None
    assert _said(plan, OURS, 10.0, minimize="memory") is None
    assert _said(replace(plan, backend="onnxruntime"), OURS, 10.0) is None


def test_a_high_effort_prices_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def beaten(self: TorchInductor, plan: Plan) -> Unsupported:
        asked.append(plan.backend)
        return Unsupported("it loses")

    monkeypatch.setattr(TorchInductor, "beaten_by", beaten)
    model = torch.nn.Linear(8, 8).eval()
    inputs = (torch.randn(2, 8),)
    cases: tuple[tuple[Effort, bool], ...] = (("normal", False), ("high", True))
    for effort, priced in cases:
        made = effcompile.plan(model, inputs=inputs, effort=effort)
        (of,) = (each for each in made.candidates if each.backend == "torch-inductor")
        assert (of.predicted_seconds is not None) == priced
        assert priced or str(of.note) == "it loses"
    assert asked
