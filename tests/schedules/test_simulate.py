"""The simulation against a hand count, and what it says of the peak."""

import pytest
import torch
from torch import nn
from train_helpers import MODELS, cut_model, cut_step, everything

from effcompile.capture import capture_training
from effcompile.schedules.emit import emit
from effcompile.schedules.simulate import per_stage, simulate


class Product(nn.Module):
    """loss = Σ exp(w · x), by hand: w and x of 256 bytes each."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.w * x).exp().sum()


def test_bytes_by_hand() -> None:
    """256 bytes each: w, x; forward a = w·x, e = exp(a), loss (4); backward de = expand (a view), da = de·e,
    dw = da·x.
    """
    cut = cut_step(capture_training(Product(), (torch.ones(64),), {}))
    whole = simulate(cut, emit(cut, everything(cut)))
    assert cut.base_bytes == 512 + 4 and cut.given_bytes == 512
    live = [
        (i.phase, i.live - cut.base_bytes)
        for i in whole.instants
        if i.node.split("_")[0] in ("mul", "exp", "sum")
    ]
    assert live == [
        ("forward", 256),
        ("forward", 512),
        ("forward", 260),
        ("backward", 516),
        ("backward", 516),
    ]
    assert whole.saved_bytes == 256 + 4 and whole.end_bytes - cut.base_bytes == 256 + 4
    bare = simulate(cut, emit(cut, frozenset()))
    again = [
        (i.node.split("_")[0], i.live - cut.base_bytes)
        for i in bare.instants
        if i.phase == "backward" and i.again
    ]
    assert again == [("mul", 260), ("exp", 516)] and bare.saved_bytes == 4


@pytest.mark.parametrize("name", MODELS)
def test_the_parts_add_up_to_the_peak(name: str) -> None:
    cut = cut_model(name)[2]
    for kept in (everything(cut), frozenset(), frozenset(sorted(everything(cut))[::2])):
        trace = simulate(cut, emit(cut, kept))
        assert (
            sum(trace.parts.values())
            == trace.peak_bytes
            == trace.peak.live
            == max(i.live for i in trace.instants)
        )
        assert (
            all(nbytes >= 0 for nbytes in trace.parts.values())
            and trace.parts["parameters, buffers, inputs"] == cut.base_bytes
        )
        gradients = sum(
            cut.held.nbytes[s] for s in {s for n in cut.step.gradients.values() for s in cut.held.of[n]}
        )
        results = sum(
            cut.held.nbytes[s] for s in {s for n in cut.step.forward_results for s in cut.held.of[n]}
        )
        assert trace.end_bytes == cut.base_bytes + gradients + results


@pytest.mark.parametrize("name", MODELS)
def test_the_instants_run_through_the_blocks_forth_and_back(name: str) -> None:
    cut = cut_model(name)[2]
    emitted = emit(cut, everything(cut))
    trace = simulate(cut, emitted)
    stages = [(phase, stage) for phase, stage, _ in per_stage(trace)]
    forth = [stage for phase, stage in stages if phase == "forward"]
    back = [stage for phase, stage in stages if phase == "backward"]
    assert stages == [*(("forward", s) for s in forth), *(("backward", s) for s in back)]
    assert forth == sorted(forth) == list(range(len(cut.blocks))) and back == sorted(back, reverse=True)
    nodes = {node.name: node for node in emitted.backward.nodes}
    again = [emitted.origin[nodes[i.node]] for i in trace.instants if i.again]
    assert not any(cut.held.made[node] for node in again), "only views of parameters are looked at again"
    assert max(live for *_, live in per_stage(trace)) == trace.peak_bytes
