"""The batch as a decision: the best of a sweep, carried out, saved and applied again, or refused in words."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import effcompile
from effcompile.compiler.training import sizes
from effcompile.core.errors import InfeasibleError, InputsError, UsageError
from effcompile.core.goal import Goal
from effcompile.ir.figures import Totals
from effcompile.planner.batch import BatchSearch, BatchTrial
from effcompile.search.request import Task
from effcompile.search.training.batch import Sized, sized
from effcompile.search.training.work import make_work

SIZES = [2, 3, 4, 6, 8, 12]


class Net(nn.Module):
    def __init__(self, width: int = 64, layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(layers)
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
    return {
        "x": torch.randn(batch, 32, 64, generator=generator),
        "y": torch.randn(batch, 32, 64, generator=generator),
    }


def test_the_batch_is_the_best_of_a_sweep(net: Net) -> None:
    memory = "1.7MiB"
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
    assert (
        chosen.decisions[0].option == f"{chosen.batch} examples"
        and chosen.decisions[0].baseline == "2 examples"
    )


def test_a_chosen_batch_is_carried_out_saved_and_applied_again(
    net: Net, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    monkeypatch.setattr(sizes, "_MOST_BAND", 100.0)
    monkeypatch.setattr(sizes, "_LEAST_BAND", 100.0)
    # whatever else this machine does
    monkeypatch.setattr(sizes, "_rates", lambda runs: {size: float(size) for size in runs})
    made = effcompile.optimize(
        net,
        inputs=inputs(2),
        mode="training",
        memory="3MiB",
        batch=[2, 4, 64],
        optimizer=optimizer,
        lr=(0.1, 2),
        passes=["no-pointwise"],
    )
    assert made.plan.batch == 4 and made.plan.met
    assert (
        "4 examples a second measured, the most of 2 sizes that were run in turn; 3 of 3 were planned"
        in str(made.plan.decisions[0].why)
    )
    assert any(
        str(note).startswith("learning rate 0.2 for 4 examples") and "linear law of SGD" in str(note)
        for note in made.plan.notes
    )
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
        effcompile.plan(
            net,
            {"x": torch.randn(1, 1, 64), "y": torch.randn(1, 1, 64)},
            mode="training",
            target="h100-sxm",
            batch=4,
        )


def foreseen(rates: dict[int, float]) -> Sized:
    """The end of a search that foresees these examples a second of these sizes."""

    def attempt(size: int) -> BatchTrial[SimpleNamespace]:
        return BatchTrial(
            batch=size,
            unlimited=1.0,
            bytes=1,
            seconds=size / rates[size],
            made=SimpleNamespace(work=None, joint=size),
        )

    search = BatchSearch(
        sizes=sorted(rates), memory=1, attempt=attempt, tried={size: attempt(size) for size in rates}
    )
    best = search.tried[max(rates, key=rates.__getitem__)]
    return Sized(task=None, best=best, search=search, failed={}, there=2)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fastest", "off", "run", "built"),
    [
        (8, 1.0, [6, 8], [8]),
        (6, 1.0, [4, 6, 8], [8, 6]),  # 4 is beside 6, and near enough
        (2, 1.0, [4, 6, 8], [8, 4]),  # of what is run: 2 is foreseen to be far behind
        (2, 2.0, [2, 4, 6, 8], [8, 2]),  # but not where times are twice what was foreseen
    ],
)
def test_sizes_next_to_the_best_are_run_in_turn_and_the_fastest_is_built(
    fastest: int, off: float, run: list[int], built: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def rates(runs: dict[int, tuple[object, object]]) -> dict[int, float]:
        return {size: 100.0 - 10 * abs(size - fastest) for size in runs}

    def build(planned: SimpleNamespace) -> tuple[object, object]:
        done.append(planned.joint)
        plan = SimpleNamespace(measured=Totals(seconds=off), predicted=Totals(seconds=1.0))
        return SimpleNamespace(work=None), SimpleNamespace(
            made=SimpleNamespace(executable=SimpleNamespace(plan=plan)), joint=planned.joint
        )

    done: list[int] = []
    monkeypatch.setattr(sizes, "_rates", rates)
    found = sizes.best_measured(foreseen({2: 60.0, 4: 85.0, 6: 95.0, 8: 100.0}), build)  # type: ignore[arg-type]
    assert done == built and found.chosen.best.batch == built[-1] and sorted(found.rates) == run


def test_a_size_that_does_not_fit_when_it_is_run_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    def build(planned: SimpleNamespace) -> tuple[object, object]:
        if planned.joint != 8:
            raise InfeasibleError("above the budget when it was run")
        plan = SimpleNamespace(measured=Totals(seconds=1.0), predicted=Totals(seconds=1.0))
        return SimpleNamespace(work=None), SimpleNamespace(
            made=SimpleNamespace(executable=SimpleNamespace(plan=plan)), joint=8
        )

    monkeypatch.setattr(sizes, "_rates", lambda runs: {size: 100.0 - size for size in runs})
    found = sizes.best_measured(foreseen({6: 95.0, 8: 100.0}), build)  # type: ignore[arg-type]
    assert found.chosen.best.batch == 8 and not found.rates


def test_rates_are_of_steps_that_are_run(net: Net) -> None:
    """Twice the examples of this step take about twice as long, and none is 16 times as fast as another."""
    asked = {"goal": Goal(mode="training", memory=8 << 20), "batch": [2, 32], "passes": ["no-pointwise"]}
    found = sized(task := Task.of(net, (), inputs(2), asked), make_work(task))  # type: ignore[arg-type]
    joints = {
        trial.batch: (trial.made.work, trial.made.joint)
        for trial in found.search.tried.values()
        if trial.made is not None
    }
    before = [p.grad for p in net.parameters()]
    rates = sizes._rates(joints)
    assert rates.keys() == joints.keys() and max(rates.values()) < 16 * min(rates.values())
    assert all(now is was for now, was in zip([p.grad for p in net.parameters()], before, strict=True))
