"""Masks whose closed form holds under a condition: the condition is looked at in every call, and the dense
mask read where it fails.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

import effcompile
from effcompile.backends.torch import TorchEager, TorchInductor
from effcompile.core.errors import UsageError
from effcompile.machine.target import KernelCall
from effcompile.ops import guarded_attention as module
from effcompile.ops.attention import attention
from effcompile.report.reasons import words

guarded = torch.ops.effcompile.attention_guarded
HEADS, WIDTH, LENGTH = 2, 16, 24


def heads(batch: int = 2, length: int = 9) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    q = torch.randn(batch, 4, length, 8)
    return q, torch.randn(batch, 2, length, 8), torch.randn(batch, 2, length, 8)


def test_the_condition_chooses() -> None:
    q, k, v = heads()
    written = torch.randn(2, 1, 9, 9) > 0
    dense = scaled_dot_product_attention(q, k, v, written, scale=0.3, enable_gqa=True)
    torch.testing.assert_close(guarded(q, k, v, torch.tensor(False), written, scale=0.3, hi=0), dense)
    torch.testing.assert_close(
        guarded(q, k, v, torch.tensor(True), written, scale=0.3, hi=0), attention(q, k, v, scale=0.3, hi=0)[0]
    )


@pytest.mark.parametrize("kind", ["numbers", "bool"])
def test_softcap_and_sinks_are_those_of_both_ways(kind: str) -> None:
    q, k, v = heads()
    written = torch.randn(2, 1, 9, 9) if kind == "numbers" else torch.eye(9, dtype=torch.bool)[None, None]
    sink, form = torch.randn(4), {"scale": 0.3, "softcap": 2.0}
    wanted = attention(
        q, k, v, sink=sink, **({"bias": written} if kind == "numbers" else {"mask": written}), **form
    )[0]
    torch.testing.assert_close(
        guarded(q, k, v, torch.tensor(False), written, None, sink, hi=0, **form), wanted
    )


@pytest.mark.parametrize("uniform", [False, True])
def test_a_bias_beside_a_bool_mask_stays(uniform: bool) -> None:
    q, k, v = heads()
    written, bias = torch.rand(2, 1, 9, 9) > 0.6, torch.randn(1, 4, 9, 9)
    written[0, 0, 3] = False
    wanted = attention(q, k, v, bias, None, written, scale=0.3, uniform_empty=uniform)[0]
    torch.testing.assert_close(
        guarded(q, k, v, torch.tensor(False), written, bias, scale=0.3, hi=0, uniform_empty=uniform), wanted
    )


def test_the_operator_is_sound() -> None:
    q, k, v = heads()
    torch.library.opcheck(
        guarded.default, (q, k, v, torch.tensor(True), torch.zeros(9, 9)[None, None]), {"scale": 0.3, "hi": 0}
    )
    with pytest.raises(UsageError, match=r"holds as a bool of no axes; given torch.int64 of shape \(1,\)"):
        guarded(q, k, v, torch.tensor([1]), torch.zeros(1, 1, 9, 9), scale=0.3)


class Attends(nn.Module):
    """Causal and padded eager attention.

    `how`: "weak" hides with −1e9, "product" by (1 − mask) · lowest, "buffer" cuts a triangle to length; so
    does "capped", after a softcap and a bias.
    """

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.project = how, nn.Linear(WIDTH, 3 * WIDTH)
        self.slopes = nn.Parameter(torch.tensor([0.1, 0.3]))
        self.register_buffer("triangle", torch.ones(64, 64, dtype=torch.bool).tril())

    def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
        b, s, _ = x.shape
        q, k, v = (t.view(b, s, HEADS, -1).transpose(1, 2) for t in self.project(x).split(WIDTH, -1))
        scores = q @ k.transpose(-1, -2) * (WIDTH // HEADS) ** -0.5
        lowest = torch.finfo(scores.dtype).min
        causal = torch.arange(s)[:, None] >= torch.arange(s)
        if self.how == "weak":
            scores = scores + torch.where(causal & (attention_mask[:, None, None, :] > 0), 0.0, -1e9)
        elif self.how == "product":
            scores = scores + (1.0 - attention_mask[:, None, None, :].float()) * lowest
        else:
            if self.how == "capped":
                scores = torch.tanh(scores / 2.0) * 2.0 + self.slopes[:, None, None] * torch.arange(s)
            scores = scores.masked_fill(~self.triangle[:s, :s], lowest)
        return (scores.softmax(-1) @ v).transpose(1, 2).reshape(b, s, WIDTH)


def inputs(padded: int = 0, s: int = LENGTH, b: int = 2) -> dict[str, Tensor]:
    torch.manual_seed(1)
    mask = torch.ones(b, s, dtype=torch.long)
    mask[1, :padded] = 0
    return {"x": torch.randn(b, s, WIDTH), "attention_mask": mask}


def in_halves() -> dict[str, Tensor]:
    """A mask that is neither 0 nor 1 where it hides."""
    return {**inputs(), "attention_mask": inputs(padded=5)["attention_mask"].float() / 2 + 0.5}


#: How the model hides, the guard, inputs at which it holds, and inputs at which it does not.
CASES: list[tuple[str, str, dict[str, Tensor], dict[str, Tensor]]] = [
    ("weak", "every query sees a key", inputs(), inputs(padded=5)),
    (
        "product",
        "attention_mask holds only 0 and 1",
        {**inputs(), "attention_mask": torch.ones(2, LENGTH)},
        in_halves(),
    ),
    ("buffer", "≤ ", inputs(), inputs(s=60)),
    ("capped", "≤ ", inputs(), inputs(s=60)),
]
cases = pytest.mark.parametrize(
    ("how", "guard", "holding", "failing"), CASES, ids=[case[0] for case in CASES]
)


def optimized(
    how: str,
    monkeypatch: pytest.MonkeyPatch,
    backend: Any = TorchEager,
    given: dict[str, Tensor] | None = None,
) -> Any:
    """The model with its attention in closed form, which is made to seem free."""

    def measure(_: Any, call: KernelCall) -> float | None:
        return 1e-9 if call.kernel.startswith("attention/tiled") else 1e-2

    monkeypatch.setattr(backend, "measure", measure)
    torch.manual_seed(0)
    model = Attends(how).eval()
    return model, effcompile.optimize(model, inputs=given or inputs(), backend=backend.name)


def agrees(run: Any, model: nn.Module, given: dict[str, Tensor]) -> None:
    with torch.no_grad():
        wanted = model(**given)
    found = run(**given)
    torch.testing.assert_close(found[0] if isinstance(found, list) else found, wanted, rtol=1e-5, atol=1e-5)


@cases
def test_what_is_not_as_guarded_is_as_written(
    how: str,
    guard: str,
    holding: dict[str, Tensor],
    failing: dict[str, Tensor],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    model, executable = optimized(how, monkeypatch, given=holding)
    (decision,) = (d for d in executable.plan.decisions if d.kind == "attention")
    assert (decision.option, decision.applied) == ("tiled", "tiled")
    assert (
        "every call checks that" in words(decision.known)
        and guard in words(decision.known)
        and words(decision.known).endswith("else the dense mask is read")
    )
    dense: list[Any] = []
    original = module._dense
    monkeypatch.setattr(
        module, "_dense", lambda *args, **form: (dense.append(args), original(*args, **form))[1]
    )
    agrees(executable, model, holding)
    assert not dense, "the closed form was used"
    agrees(executable, model, failing)
    assert len(dense) == 1, "the mask as written was used"
    executable.save(tmp_path)
    opened = TorchEager().open(tmp_path, executable.plan)
    agrees(lambda **given: opened(given), model, failing)
    agrees(lambda **given: opened(given), model, holding)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "guard", "holding", "failing"), [case for case in CASES if case[0] == "product"]
)
def test_compiled_too(
    how: str,
    guard: str,
    holding: dict[str, Tensor],
    failing: dict[str, Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, executable = optimized(how, monkeypatch, TorchInductor, holding)
    (decision,) = (d for d in executable.plan.decisions if d.kind == "attention")
    assert (decision.option, decision.applied) == ("tiled", "tiled") and guard in words(decision.known)
    agrees(executable, model, holding)
    agrees(executable, model, failing)


def test_an_example_that_fails_the_guard_is_no_closed_form(monkeypatch: pytest.MonkeyPatch) -> None:
    model, executable = optimized("weak", monkeypatch, given=inputs(padded=5))
    (declined,) = (d for d in executable.plan.declined if d.kind == "attention" and d.option == "tiled")
    assert "only where every query sees a key, which the example inputs are not" in words(declined.reason)
    agrees(executable, model, inputs(padded=5))
    agrees(executable, model, inputs())


def test_a_saved_plan_is_carried_out_with_its_guard(monkeypatch: pytest.MonkeyPatch) -> None:
    model, executable = optimized("weak", monkeypatch)
    again = effcompile.optimize(model, inputs=inputs(), plan=executable.plan)
    assert [d.applied for d in again.plan.decisions if d.kind == "attention"] == ["tiled"]
    agrees(again, model, inputs(padded=5))
