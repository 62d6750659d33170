"""Products of a 16-bit step in float32: proposed where they are faster, the same step, and its original is
compared likewise.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from step_helpers import assert_equal, eager, joint_step, run
from torch import Tensor, nn
from train_helpers import context

from effcompile.core.goal import Goal
from effcompile.estimate import operators
from effcompile.machine.room import Room
from effcompile.passes.training import wide
from effcompile.passes.training.base import Case, Chosen, StepChoice, StepOption
from effcompile.passes.training.wide import KIND, WIDE, WideProducts
from effcompile.proof.spool import Spool
from effcompile.proof.training import lean as lean_module
from effcompile.proof.training.lean import lean
from effcompile.proof.training.verify import compare
from effcompile.proof.training.verify import run as run_step

ops = torch.ops.effcompile


class Net(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(24, 40, dtype=dtype), nn.Linear(40, 24, bias=False, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.gelu(self.up(x))).float().square().mean()


def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(**batch)


@pytest.fixture(params=[30.0, 1.0])
def ratio(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> float:
    monkeypatch.setattr("effcompile.ops.wide.product_ratio", lambda dtype, device: request.param)
    monkeypatch.setattr(wide, "product_ratio", lambda dtype, device: request.param)
    return request.param


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("here", [True, False])
def test_all_products_are_wide_where_narrow_ones_are_slow(
    ratio: float, dtype: torch.dtype, here: bool
) -> None:
    torch.manual_seed(0)
    model, batch = Net(dtype), {"x": torch.randn(7, 24, dtype=dtype)}
    step = joint_step(model, batch, loss_of)
    choices = list(WideProducts().propose(Case(step=step), context(here=here)))
    if ratio < 2 or dtype == torch.float32 or not here:
        assert not choices
        return
    (choice,) = choices
    made = WideProducts().apply(Case(step=step), choice, choice.option(WIDE)).step
    targets = [node.target for node in made.graph.nodes]
    assert (
        choice.kind == KIND
        and torch.ops.aten.mm.default not in targets
        and torch.ops.aten.addmm.default not in targets
    )
    assert targets.count(ops.wide_mm.default) + targets.count(ops.wide_addmm.default) == 5
    assert_equal(run(made, model, batch), eager(model, batch, loss=loss_of), 1e-2)
    assert not list(WideProducts(enabled=False).propose(Case(step=step), context(here=True)))
    narrow = StepOption(name="bf16 autocast")
    taken = Chosen(
        choice=StepChoice(site="step", kind="precision", baseline="fp32", options=(narrow,)),
        option=narrow,
        by="precision",
        exact=False,
    )
    assert not list(WideProducts().propose(Case(step=step, taken=(taken,)), context(here=True)))


def test_a_slow_product_is_timed_on_some_of_its_rows(ratio: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operators, "_TIMED", 24 * 40 * 3)
    model, batch = Net(torch.bfloat16), {"x": torch.randn(12, 24, dtype=torch.bfloat16)}
    step = joint_step(model, batch, loss_of)
    rows: list[int] = []
    real = torch.ops.aten.addmm.default
    node = next(n for n in step.graph.nodes if n.target is real)
    args, times = operators._of_fewer_rows(
        real, (torch.zeros(40), torch.zeros(12, 24, dtype=torch.bfloat16), torch.zeros(24, 40))
    )
    rows.append(len(args[1]))
    assert (rows, times) == (([3], 4) if ratio > 2 else ([12], 1))
    known: dict[str, operators.Measured] = {}
    operators.measure([node], known)
    assert known[operators.key(node)].seconds > 0


def test_the_original_run_leanly_is_compared_with_its_products_in_fp32(
    ratio: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model, x = Net(torch.bfloat16), torch.randn(7, 24, dtype=torch.bfloat16)
    seen: list[torch.dtype] = []
    real = lean_module._Wide.__torch_dispatch__

    def watched(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        seen.extend(arg.dtype for arg in args if func in lean_module._PRODUCTS)
        return real(self, func, types, args, kwargs)

    monkeypatch.setattr(lean_module._Wide, "__torch_dispatch__", watched)
    gradients = Spool(str(tmp_path))
    with lean(model, {}, gradients, Room.of("cpu", 0, None)):
        leanly = run_step(lambda: model(x), model, {}, gradients)
    assert bool(seen) is (ratio > 2)
    assert compare(leanly, replace(run_step(lambda: model(x), model)), Goal().max_error).passed
