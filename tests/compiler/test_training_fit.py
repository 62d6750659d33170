"""The verdict for machines that are not here: FITS, MARGINAL, DOES NOT FIT, on models without data."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from train_helpers import Batch, gpt2

import effcompile
from effcompile.core.errors import InfeasibleError
from effcompile.ir.plan import Plan
from effcompile.machine.machines import load_target
from effcompile.machine.target import Target
from effcompile.search.training.fit import model_error

pytestmark = pytest.mark.usefixtures("quick_training")
PASSES = ["no-pointwise", "no-loss_head", "states.offload=false", "states.in_backward=false"]


@pytest.fixture(autouse=True)
def _no_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """These machines are smaller than one segment of torch's allocator."""
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "backend:cudaMallocAsync")


def shape() -> tuple[nn.Module, Batch]:
    with torch.device("meta"):
        return gpt2(layers=1)


def machine(memory: float) -> Target:
    return replace(load_target("rtx4090"), name="small", memory_bytes=int(memory))


def planned(memory: float) -> Plan:
    model, batch = shape()
    return effcompile.plan(
        model, batch, mode="training", target=machine(memory), optimizer=torch.optim.AdamW, passes=PASSES
    )


def test_verdicts_follow_from_the_interval_and_name_the_instant() -> None:
    roomy = planned(1e9)
    assert (
        roomy.fit is not None
        and roomy.fit.verdict == "FITS"
        and roomy.fit.instant.startswith(("forward", "backward", "optimizer"))
    )
    error = model_error(machine(1))
    assert roomy.fit.low_bytes < (roomy.peak_bytes or 0) < roomy.fit.high_bytes <= roomy.fit.limit_bytes
    with pytest.raises(InfeasibleError, match=r"DOES NOT FIT: small has") as caught:
        planned(1000)
    least = caught.value.nearest["memory"]
    tight = planned(least * (1 + error) + 2)
    assert (
        tight.fit is not None
        and tight.fit.verdict == "FITS"
        and tight.fit.high_bytes <= tight.fit.limit_bytes
    )
    marginal = planned(least)
    assert (
        marginal.fit is not None
        and marginal.fit.verdict == "MARGINAL"
        and (marginal.peak_bytes or 0) <= least
    )
    with pytest.raises(InfeasibleError, match="MARGINAL: small has"):
        planned(least * (1 - error / 2))


def test_what_the_allocator_finds_no_segments_for_does_not_simply_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its bytes are there, with a tenth to spare; segments of 2 and 20 MiB for them are not."""
    peak = planned(1e9).peak_bytes or 0
    assert peak < 15e6
    roomy = planned(2 * peak)
    assert roomy.fit is not None and roomy.fit.verdict == "FITS"
    monkeypatch.delenv("PYTORCH_ALLOC_CONF")
    scattered = planned(2 * peak)
    assert scattered.fit is not None and scattered.fit.verdict == "MARGINAL"
    assert any("does not find them" in str(note) for note in scattered.notes)
    assert any("backend:cudaMallocAsync" in str(note) for note in roomy.notes), "nothing is said of that one"


def test_the_verdict_is_saved_and_printed(capsys: pytest.CaptureFixture[str]) -> None:
    plan = planned(1e9)
    assert Plan.from_dict(plan.to_dict()).fit == plan.fit
    plan.report()
    assert "FITS in" in capsys.readouterr().out


def test_a_users_limit_counts_where_it_is_less() -> None:
    model, batch = shape()
    plan = effcompile.plan(model, batch, mode="training", target=machine(1e9), memory=10**8, passes=PASSES)
    assert plan.fit is not None and plan.fit.limit_bytes == 10**8


def test_gradients_that_do_not_fit_together_are_consumed_in_the_backward() -> None:
    """What is asked of a machine that is not here is answered with every exact lever, and the
    plan says so.
    """
    model, batch = shape()
    asked = {"mode": "training", "optimizer": torch.optim.AdamW}
    passes = ["no-pointwise", "no-loss_head", "no-attention", "no-offload"]
    with pytest.raises(InfeasibleError) as caught:
        effcompile.plan(
            model, batch, target=machine(1000), passes=[*passes, "states.in_backward=false"], **asked
        )
    plan = effcompile.plan(model, batch, target=machine(0.96 * caught.value.needed), passes=passes, **asked)
    assert any(d.kind == "gradient" and d.option == "consumed in the backward" for d in plan.decisions)
    assert any("planned with --pass states.in_backward=true" in str(note) for note in plan.notes)
    assert plan.fit is not None and (plan.peak_bytes or 0) <= plan.fit.limit_bytes
