"""Models as they are shipped, in bfloat16: an exact goal is held to what tells two roundings of one value
apart, no closer.
"""

from collections.abc import Iterator

import pytest
import torch
from captured_once import steps_once
from generation_models import ids, tiny
from torch import nn

import effcompile
from effcompile import LoweringError, VerificationError
from effcompile.proof.generation import check as checking


@pytest.fixture(scope="module", autouse=True)
def _shared_steps() -> Iterator[None]:
    with steps_once():
        yield


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return tiny("llama").to(torch.bfloat16)


def test_it_is_planned_and_generates_what_the_model_does(model: nn.Module) -> None:
    planned = effcompile.optimize(model, mode="generation", context=64)
    told = {candidate.backend: str(candidate.note) for candidate in planned.plan.candidates}
    assert "bfloat16" in told["onnxruntime"]
    assert all(check.passed and check.error < 2e-2 for check in planned.plan.checks)
    assert (planned._shell.device, planned._shell.dtype) == (model.device, torch.bfloat16), (
        "generate() puts tokens elsewhere"
    )
    text = ids(1, 9)
    found = planned.generate(text, max_new_tokens=8, do_sample=False)
    with torch.no_grad():
        wide = model.double()(found).logits[0, 8:-1]  # every token is the best one but for rounding
        model.to(torch.bfloat16)
    chosen = wide.gather(1, found[0, 9:, None])[:, 0]
    assert bool((wide.max(1).values - chosen <= 2e-2 * wide.abs().max()).all())


def test_what_rounding_does_not_explain_is_refused(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    right = checking.forced

    def wrong(*args: object) -> torch.Tensor:
        logits = right(*args)  # type: ignore[arg-type]
        return logits + 0.04 * logits.norm() * torch.nn.functional.normalize(
            torch.randn(logits.shape), dim=None
        )

    monkeypatch.setattr(checking, "forced", wrong)
    with pytest.raises((LoweringError, VerificationError), match="not within the declared error"):
        effcompile.optimize(model, mode="generation", context=64)
