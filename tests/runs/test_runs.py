"""A run of stages: the losses of a plain loop, resumed to the bit, its batch and rate by stage, and what is
refused.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import nn

from effcompile.core.errors import FormatError, UsageError
from effcompile.runs import Run, Stage, schedule

PASSES = ["no-pointwise", "no-loss_head", "states.offload=false"]
STAGES = (Stage(steps=3, sequence=8), Stage(steps=3, sequence=16))


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.mix, self.head = nn.Embedding(32, 16), nn.Linear(16, 16), nn.Linear(16, 32)
        self.drop = nn.Dropout(0.1)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        h = self.drop(torch.tanh(self.mix(self.table(ids)))) + self.table(ids)
        return nn.functional.cross_entropy(self.head(h).flatten(0, 1), labels.flatten())


def batch_at(sequence: int, seed: int = 0, examples: int = 2) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 32, (examples, sequence), generator=generator)
    return {"ids": ids, "labels": ids.roll(1, -1)}


def made(**changes: object) -> tuple[Tagger, Run]:
    torch.manual_seed(0)
    model = Tagger()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    asked = {"inputs": lambda stage: batch_at(stage.sequence), "optimizer": optimizer, "passes": PASSES}
    return model, schedule(model, STAGES, **{**asked, **changes})  # type: ignore[arg-type]


def taken(run: Run, each: Callable[[int], None] = lambda count: None) -> list[torch.Tensor]:
    losses: list[torch.Tensor] = []
    for stage in run:
        if sum(run.done) == 0:
            torch.manual_seed(7)
        while stage.left:
            losses.append(stage.step(**batch_at(stage.stage.sequence or 0, seed=sum(run.done))))
            each(sum(run.done))
    return losses


@pytest.fixture(scope="module")
def saved(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[list[torch.Tensor], Path, dict[str, torch.Tensor]]:
    """The losses of a whole run, what was saved of it after the second stage's first step, and its parameters
    at the end.
    """
    file = tmp_path_factory.mktemp("run") / "run.pt"
    model, run = made()
    losses = taken(run, lambda count: run.save(file) if count == 4 else None)
    return losses, file, {name: value.clone() for name, value in model.state_dict().items()}


def test_losses_are_those_of_a_plain_loop_through_all_stages(
    saved: tuple[list[torch.Tensor], Path, dict[str, torch.Tensor]],
) -> None:
    torch.manual_seed(0)
    model = Tagger().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    torch.manual_seed(7)
    plain = []
    for number in range(6):
        loss = model(**batch_at(8 if number < 3 else 16, seed=number))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        plain.append(loss.detach())
    torch.testing.assert_close(torch.stack(saved[0]), torch.stack(plain), rtol=1e-6, atol=0)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(saved[2][name], value, rtol=1e-5, atol=1e-7)


def test_a_run_is_resumed_to_the_bit(saved: tuple[list[torch.Tensor], Path, dict[str, torch.Tensor]]) -> None:
    losses, file, parameters = saved
    model, run = made()
    run.resume(file)
    assert run.done == [3, 1]
    rest = taken(run)
    assert torch.equal(torch.stack(rest), torch.stack(losses[4:]))
    assert all(torch.equal(value, parameters[name]) for name, value in model.state_dict().items())


def test_a_rate_that_is_set_between_steps_stays_in_later_stages_and_when_resumed(tmp_path: Path) -> None:
    """By hand, or by a scheduler on the stage's optimizer."""
    _, run = made()
    for number, stage in enumerate(run):
        group = stage.optimizer.param_groups[0]
        if number == 0:
            stage.step(**batch_at(8))
            group["lr"] = 0.003
        else:
            assert group["lr"] == 0.003
            group["lr"] = 0.002
            run.save(tmp_path / "run.pt")
        while stage.left:
            stage.step(**batch_at(stage.stage.sequence or 0))
    _, again = made()
    again.resume(tmp_path / "run.pt")
    assert [stage.optimizer.param_groups[0]["lr"] for stage in [next(iter(again))]] == [0.002]


def test_states_of_a_parameter_that_was_taken_out_are_told_of() -> None:
    torch.manual_seed(0)
    model = Tagger()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    run = schedule(
        model, STAGES, inputs=lambda stage: batch_at(stage.sequence), optimizer=optimizer, passes=PASSES
    )
    with pytest.raises(UsageError, match="in none of its groups any more"):
        taken(run, lambda count: optimizer.param_groups[0]["params"].pop() if count == 1 else None)


def test_a_saved_run_of_other_stages_is_refused_and_nothing_is_loaded(
    saved: tuple[list[torch.Tensor], Path, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    model, run = made()
    before = copy.deepcopy(model.state_dict())
    run.stages = (Stage(steps=9, sequence=8), run.stages[1])
    with pytest.raises(FormatError, match="is of other stages"):
        run.resume(saved[1])
    cut = tmp_path / "cut.pt"
    cut.write_bytes(saved[1].read_bytes()[:-100])
    with pytest.raises(FormatError, match="is not a saved run"):
        run.resume(cut)
    with pytest.raises(UsageError, match="There is no saved run"):
        run.resume(tmp_path / "none.pt")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_batch_and_learning_rate_are_decided_stage_by_stage() -> None:
    _, run = made(target="h100-sxm", memory="48KiB", batch=[2, 4, 8, 16, 32], lr=(0.01, 4))
    first, second = run.batches
    assert first > second and all((plan.peak_bytes or 0) <= 48 * 1024 for plan in run.plans)
    console = Console(width=100, record=True, file=None)
    run.report(console)
    said = console.export_text()
    assert "run of Tagger: 2 stages on h100-sxm" in said and f"{0.01 * (first / 4) ** 0.5:.3g}" in said
    assert f"{3 * first + 3 * second} examples" in said
    told = run.to_dict()
    assert told["steps"] == 6 and [stage["examples"] for stage in told["stages"]] == [first, second]


@pytest.mark.parametrize(
    "wrong", [{"steps": 0}, {"steps": 1.5}, {"steps": 3, "sequence": -1}, {"steps": True}]
)
def test_no_stage(wrong: dict[str, object]) -> None:
    with pytest.raises(UsageError, match="a number of at least 1 is wanted"):
        Stage(**wrong)  # type: ignore[arg-type]


def test_stages_are_taken_in_their_order() -> None:
    _, run = made()
    stages = iter(run)
    first = next(stages)
    first.step(**batch_at(8))
    with pytest.raises(UsageError, match="Stage 1 has 2 steps left"):
        next(stages)
    with pytest.raises(UsageError, match="This run has begun"):
        run.resume("any")
    with pytest.raises(UsageError, match="stages: give a list"):
        schedule(Tagger(), [], inputs=lambda stage: batch_at(8), optimizer=torch.optim.SGD)
