"""The batch as a decision: the best of a sweep, carried out, saved and applied again, or refused in words."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import effcompile
from effcompile.core.errors import InfeasibleError, InputsError, UsageError

SIZES = [2, 3, 4, 6, 8, 12]


class Net(nn.Module):
    def __init__(self, width: int = 64, layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(layers)
        )

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return (x - y).square().mean()


@pytest.fixture(scope="module")
def net() -> Net:
    torch.manual_seed(0)
    return Net().train()


def inputs(batch: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(batch)
    return {"x": torch.randn(batch, 32, 64, generator=generator), "y": torch.randn(batch, 32, 64, generator=generator)}


@pytest.mark.parametrize("memory", ["1.7MiB", "1.9MiB"])
def test_the_batch_is_the_best_of_a_sweep(net: Net, memory: str) -> None:
    rates, peaks = {}, {}
    for size in SIZES:
        try:
            plan = effcompile.plan(net, inputs(size), mode="training", memory=memory, target="h100-sxm")
        except InfeasibleError:
            continue
        assert plan.predicted.seconds and plan.predicted.peak_bytes
        rates[size], peaks[size] = size / plan.predicted.seconds, plan.predicted.peak_bytes
    assert 1 < len(rates) < len(SIZES)
    chosen = effcompile.plan(net, inputs(2), mode="training", memory=memory, target="h100-sxm", batch=SIZES)
    assert chosen.batch == max(rates, key=rates.__getitem__) and chosen.peak_bytes == peaks[chosen.batch]
    assert any(f"the step is of {chosen.batch} examples" in str(note) for note in chosen.notes)
    assert chosen.decisions[0].option == f"{chosen.batch} examples" and chosen.decisions[0].baseline == "2 examples"


def test_a_chosen_batch_is_carried_out_saved_and_applied_again(net: Net, tmp_path: Path) -> None:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    made = effcompile.optimize(
        net, inputs=inputs(2), mode="training", memory="3MiB", batch=[2, 4, 64], optimizer=optimizer, lr=(0.1, 2), passes=["no-pointwise"]
    )
    assert made.plan.batch == 4 and made.plan.met
    assert any(str(note).startswith("learning rate 0.2 for 4 examples") and "linear law of SGD" in str(note) for note in made.plan.notes)
    made.zero_grad()
    loss = made(**inputs(4))
    loss.backward()
    given = [p.grad.clone() for p in net.parameters() if p.grad is not None]
    net.zero_grad()
    expected = net(**inputs(4))
    expected.backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(given, [p.grad for p in net.parameters()])
    with pytest.raises(InputsError):
        made(**inputs(2))
    made.plan.save(tmp_path / "plan.json")
    again = effcompile.optimize(net, inputs=inputs(2), plan=tmp_path / "plan.json", optimizer=optimizer)
    assert again.plan.batch == 4 and torch.isfinite(again(**inputs(4)))


def test_no_size_fits(net: Net) -> None:
    with pytest.raises(InfeasibleError):
        effcompile.plan(net, inputs(2), mode="training", memory="1MiB", target="h100-sxm", batch=[8, 16])


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"batch": "many"}, "is no batch"),
        ({"batch": 4, "mode": "inference"}, "batch is for a training step"),
        ({"lr": (1e-3, 8)}, "give batch, too"),
        ({"batch": 4, "lr": (1e-3, 8)}, "give optimizer, too"),
    ],
)
def test_what_cannot_be_asked_for(net: Net, asked: dict[str, object], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        effcompile.plan(net, inputs(2), **{"mode": "training", "target": "h100-sxm", **asked})  # type: ignore[arg-type]


def test_inputs_without_an_axis_of_examples(net: Net) -> None:
    with pytest.raises(UsageError, match="which axis of the inputs is that of the examples"):
        effcompile.plan(net, {"x": torch.randn(1, 1, 64), "y": torch.randn(1, 1, 64)}, mode="training", target="h100-sxm", batch=4)
