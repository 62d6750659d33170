"""What an exact plan may round, and what is done where a fused attention does not verify."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from generation_models import ids, tiny
from torch import Tensor, nn

import effcompile
from effcompile.backends.torch import TorchEager
from effcompile.capture import capture
from effcompile.compiler.settle import not_within
from effcompile.core.errors import VerificationError
from effcompile.core.goal import EXACT_TOLERANCE, Goal
from effcompile.ir.program import Program
from effcompile.machine.machines import load_target
from effcompile.proof.rounding import wide_copy
from effcompile.proof.verify import explained, references, verify


class Cancels(nn.Module):
    """Loses `digits` decimal digits in a sum that it takes back."""

    def __init__(self, digits: int) -> None:
        super().__init__()
        self.linear, self.offset = nn.Linear(8, 8), 10.0**digits

    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(x) + self.offset) - self.offset


def checks(model: nn.Module, error: float, goal: Goal) -> list[Any]:
    """Of a result that is off by so much."""
    program = capture(model, (torch.randn(4, 8),), {})

    def lowered(*inputs: Tensor) -> list[Tensor]:
        with torch.no_grad():
            y = program.module(*inputs)
        noise = torch.randn(y.shape, generator=torch.Generator().manual_seed(0))
        return [y + noise * (error * y.norm() / noise.norm())]

    return verify(lowered, program, references(program, model, goal), goal)


def test_a_model_that_loses_digits_allows_others_to_lose_them_too() -> None:
    torch.manual_seed(0)
    (check, *_) = checks(Cancels(3).eval(), 3e-5, Goal())
    assert check.passed and check.limit > EXACT_TOLERANCE and "the model's own rounding is" in str(check.note)


class Takes(nn.Module):
    """The rows of the largest scores, of which the last digits decide where `steady` is false."""

    def __init__(self, *, steady: bool) -> None:
        super().__init__()
        self.offset = 0.0 if steady else 1e7

    def forward(self, x: Tensor) -> Tensor:
        scores = (x[..., 0] + self.offset) - self.offset
        return x.gather(0, scores.topk(3, dim=0).indices.unsqueeze(-1).expand(3, x.shape[-1]))


@pytest.mark.parametrize("steady", [True, False])
def test_a_model_whose_choice_is_rounding_is_told(*, steady: bool) -> None:
    """No other arithmetic can be compared with it."""
    torch.manual_seed(0)
    model, goal = Takes(steady=steady).eval(), Goal(max_error=0.03)
    program = capture(model, (torch.randn(16, 8),), {}, dynamic=False)
    cases = references(program, model, goal)

    def lowered(*inputs: Tensor) -> list[Tensor]:
        return [inputs[0][:3]]

    found = verify(lowered, program, cases, goal)
    assert not all(check.passed for check in found)
    said = str(not_within("torch-eager", explained(found, cases)))
    assert ("off from its own result in float64: rounding decides" in said) is not steady


@pytest.mark.parametrize(("digits", "error"), [(0, 1.5e-5), (3, 1e-3), (5, 2e-3)])
def test_errors_beyond_the_models_own_rounding_fail(digits: int, error: float) -> None:
    """A model that keeps its digits; an error that rounding does not explain; rounding so large that it
    explains anything.
    """
    torch.manual_seed(0)
    found = checks(Cancels(digits).eval(), error, Goal())
    assert not any(check.passed for check in found)
    assert all(check.limit == EXACT_TOLERANCE for check in found)


@pytest.mark.parametrize(
    ("dtype", "small", "large"), [(torch.bfloat16, 2e-3, 2e-2), (torch.float16, 3e-4, 3e-3)]
)
def test_weights_in_16_bits_round_more(dtype: torch.dtype, small: float, large: float) -> None:
    """Another order of sums is no error; ten times that is."""
    torch.manual_seed(0)
    model = (
        nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8))
        .eval()
        .to(dtype)
    )
    program = capture(model, (torch.randn(4, 8, dtype=dtype),), {})
    cases = references(program, model, Goal())
    for case in cases:
        assert case.limit(Goal(), small) >= small and case.limit(Goal(), large) < large


def test_a_declared_error_is_taken_as_it_is() -> None:
    torch.manual_seed(0)
    assert {check.limit for check in checks(Cancels(3).eval(), 5e-5, Goal(max_error=2e-5))} == {2e-5}


class Centred(nn.Module):
    """What is normalised, and its mean, which is zero but for rounding; of `shift`, a mean that is not."""

    def __init__(self, shift: float) -> None:
        super().__init__()
        self.linear, self.shift = nn.Linear(8, 16), shift

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.layer_norm(self.linear(x), (16,)) + self.shift
        return h, h.mean()


@pytest.mark.parametrize(
    ("shift", "off", "passes"),
    [(0.0, 1e-7, True), (0.0, 1e-3, False), (0.05, 1e-5, False), (1e-6, 1e-7, True), (0.0, math.nan, False)],
)
@pytest.mark.parametrize("goal", [Goal(), Goal(max_error=3e-5)], ids=["exact", "declared"])
def test_a_sum_that_only_rounding_keeps_from_zero(shift: float, off: float, passes: bool, goal: Goal) -> None:
    """It is compared with the size of what it is the sum of; one that has digits is compared by itself."""
    torch.manual_seed(0)
    model = Centred(shift).eval()
    program = capture(model, (torch.randn(4, 8),), {})

    def lowered(x: Tensor) -> tuple[Tensor, Tensor]:
        h, mean = program.module(x)
        return h, mean + off

    found = verify(lowered, program, references(program, model, goal), goal)
    assert {check.passed for check in found} == {passes}
    said = "output 1 is zero but for rounding: its error is a share of the outputs' usual size"
    assert not passes or all(str(check.note) == said for check in found)


@pytest.mark.parametrize(
    ("shift", "off", "passes"), [(0.0, 1e-9, True), (0.0, 1e-3, False), (1e-6, 1e-9, False)]
)
def test_such_a_sum_in_float64(shift: float, off: float, passes: bool) -> None:
    """No finer copy of the model tells its rounding: the format does."""
    torch.manual_seed(0)
    model = Centred(shift).double().eval()
    program = capture(model, (torch.randn(4, 8, dtype=torch.float64),), {})

    def lowered(x: Tensor) -> tuple[Tensor, Tensor]:
        h, mean = program.module(x)
        return h, mean + off

    found = verify(lowered, program, references(program, model, Goal()), Goal())
    assert {check.passed for check in found} == {passes}


class Attends(nn.Module):
    """One eager attention."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x).view(*x.shape[:2], 2, 4).transpose(1, 2)
        return ((h @ h.transpose(-1, -2) * 0.5).softmax(-1) @ h).transpose(1, 2).flatten(2)


def spoil(monkeypatch: pytest.MonkeyPatch, by_operator: str) -> None:
    """Programs with such an operator come out wrong by a thousandth."""
    lower = TorchEager.lower

    def wrong(self: TorchEager, program: Program, *rest: Any) -> Any:
        lowered = lower(self, program, *rest)
        if not any(by_operator in str(node.target) for node in program.graph.nodes):
            return lowered
        return replace(lowered, run=lambda *inputs: [1.001 * y for y in lowered.run(*inputs)])

    monkeypatch.setattr(TorchEager, "lower", wrong)


def test_attention_that_does_not_verify_is_left_as_written(monkeypatch: pytest.MonkeyPatch) -> None:
    spoil(monkeypatch, "scaled_dot_product_attention")
    torch.manual_seed(0)
    model, inputs = Attends().eval(), {"x": torch.randn(2, 6, 8)}
    executable = effcompile.optimize(model, inputs=inputs, backend="torch-eager", passes=["no-merge"])
    assert all(check.passed for check in executable.plan.checks)
    assert any(
        str(note).startswith("attention is left as written: The torch-eager result is not")
        for note in executable.plan.notes
    )
    assert any(d.kind == "attention" and d.option == "fused" for d in executable.plan.declined)
    again = effcompile.optimize(model, inputs=inputs, plan=executable.plan)
    torch.testing.assert_close(again(**inputs), model(**inputs))


def test_what_fails_as_written_too_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    spoil(monkeypatch, "")
    with pytest.raises(VerificationError, match=r"1\.0000?e-03|9\.99\de-04"):
        effcompile.optimize(Attends().eval(), inputs={"x": torch.randn(2, 6, 8)}, backend="torch-eager")


class Silent(nn.Module):
    """Shows nothing of what a linear makes of the first token, so that inputs of one token are no
    calibration.
    """

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * (torch.arange(x.shape[1]) > 0).unsqueeze(-1)


def test_what_calibration_did_not_show_is_corrected_by_what_verification_measures() -> None:
    torch.manual_seed(0)
    model, inputs = Silent().eval(), {"x": torch.randn(2, 1, 16)}
    target = load_target("cpu-generic")  # where int8 is worth its while at any size
    executable = effcompile.optimize(
        model, inputs=inputs, backend="torch-eager", target=target, max_error=1e-3, calibration=[inputs]
    )
    assert any("solved again" in str(note) for note in executable.plan.notes)
    longer = torch.randn(2, 5, 16)
    torch.testing.assert_close(executable(x=longer), model(x=longer))


class WithMean(nn.Module):
    """A model of Hugging Face's within another module."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.model(input_ids=ids).logits
        return logits.square().mean()


def test_experts_have_a_copy_that_runs_in_float64() -> None:
    """Products of tokens in groups take no float64; the oracle is the model itself in fp32."""
    model = WithMean(tiny("mixtral").train())
    held = model.model.config._experts_implementation  # type: ignore[union-attr]
    assert held == "grouped_mm"
    wide, text = wide_copy(model), ids(2, 9)
    found, wanted = wide(text), model(text)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found.float(), wanted)
    found.backward()
    wanted.backward()
    pairs = list(zip(wide.parameters(), model.parameters(), strict=True))
    assert all(a.grad is not None and a.grad.dtype == torch.float64 for a, _ in pairs)
    for a, b in pairs:
        torch.testing.assert_close(a.grad.float(), b.grad, rtol=1e-3, atol=1e-5)  # type: ignore[union-attr]
    assert model.model.config._experts_implementation == held  # type: ignore[union-attr]
