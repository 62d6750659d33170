"""Depth grows: which layers are copied, their moments with them, the function kept or its change said, and
what is refused.
"""

from __future__ import annotations

import pytest
import torch
from stage_models import Stack, batch_at, made, taken

from effcompile.core.errors import UsageError
from effcompile.runs import Run, Stage
from effcompile.runs.fields.depth import sources_of


def test_which_layer_each_is_a_copy_of() -> None:
    assert sources_of(2, 6, "stack") == [0, 1, 0, 1, 0, 1]
    assert sources_of(2, 6, "interpolate") == sources_of(2, 6, "identity") == [0, 0, 0, 1, 1, 1]


@pytest.fixture(scope="module")
def grown() -> tuple[Run, dict[str, torch.Tensor], dict[str, torch.Tensor], Run]:
    """A run that stacked 2 layers to 4 here; weights and first moments after its first stage; the run once
    its second has begun.
    """
    run = made(Stage(steps=2, depth=2), Stage(steps=1, depth=4), model=Stack(depth=4), target="auto")
    planned = [plan.peak_bytes or 0 for plan in run.plans]
    assert planned[0] < planned[1] and len(run.model.blocks) == 4  # planning changes nothing
    stages = iter(run)
    first = next(stages)
    assert len(run.model.blocks) == 2
    for number in range(2):
        first.step(**batch_at(seed=number))
    weights = {name: value.detach().clone() for name, value in run.model.named_parameters()}
    moments = {name: first.optimizer.state[p]["exp_avg"].clone() for name, p in run.model.named_parameters()}
    next(stages)
    return run, weights, moments, run


def test_weights_and_moments_are_those_of_the_layer_that_was_copied(
    grown: tuple[Run, dict, dict, Run],
) -> None:
    run, weights, moments, _ = grown
    assert run.active is not None and len(run.model.blocks) == 4
    for name, value in run.model.named_parameters():
        source = name.replace("blocks.2.", "blocks.0.").replace("blocks.3.", "blocks.1.")
        assert torch.equal(value, weights[source])
        assert torch.equal(run.active.optimizer.state[value]["exp_avg"], moments[source])
    copies = {id(p) for p in run.model.blocks[2].parameters()} & {
        id(p) for p in run.model.blocks[0].parameters()
    }
    assert not copies


def test_the_change_of_the_function_is_measured_and_said(grown: tuple[Run, dict, dict, Run]) -> None:
    run, weights, _, _ = grown
    with torch.no_grad():
        after = run.model(**batch_at())
        before_model = Stack(depth=2)
        before_model.load_state_dict(weights)
        before = before_model(**batch_at())
    change = float((after - before).abs() / before.abs())
    assert f"the outputs change by {change:.2g}, measured" in run.notes[1][0]


def test_the_step_after_growth_is_that_of_a_plain_loop(grown: tuple[Run, dict, dict, Run]) -> None:
    run, _, _, _ = grown
    assert run.active is not None
    plain = Stack(depth=4)
    plain.load_state_dict(run.model.state_dict())
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01)
    held = run.active.optimizer
    for mine, theirs in zip(plain.parameters(), run.model.parameters(), strict=True):
        optimizer.state[mine] = {key: value.clone() for key, value in held.state[theirs].items()}
    run.active.step(**batch_at(seed=9))
    plain(**batch_at(seed=9)).backward()
    optimizer.step()
    for name, value in run.model.named_parameters():
        torch.testing.assert_close(value, plain.get_parameter(name), rtol=1e-5, atol=1e-7)


def test_a_move_by_identity_keeps_the_function() -> None:
    run = made(Stage(steps=1, depth=2), Stage(steps=1, depth=4, move="identity"))
    assert "outputs change by 0, measured" in run.notes[1][0]


@pytest.mark.parametrize(
    ("stages", "words"),
    [
        ((Stage(steps=1, depth=4), Stage(steps=1, depth=2)), "can grow, not shrink"),
        ((Stage(steps=1, depth=2), Stage(steps=1, depth=3)), "does not divide it.*Take 2 or 4"),
        ((Stage(steps=1), Stage(steps=1, depth=4)), "later than in the first stage"),
        ((Stage(steps=1, depth=9),), "has 4 layers"),
    ],
)
def test_depths_that_cannot_be(stages: tuple[Stage, ...], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        made(*stages)


def test_a_model_without_layers_and_a_move_that_is_none() -> None:
    with pytest.raises(UsageError, match="has no list of layers"):
        made(Stage(steps=1, depth=2), model=torch.nn.Linear(2, 2))
    with pytest.raises(UsageError, match="Stage\\(move='double'\\)"):
        Stage(steps=1, depth=2, move="double")


def test_a_run_that_grew_is_resumed_to_the_bit(tmp_path) -> None:
    stages = (Stage(steps=2, depth=2), Stage(steps=2, depth=4))
    run = made(*stages, target="auto")
    losses = taken(run, lambda count: run.save(tmp_path / f"{count}.pt"))
    for count in (2, 3):
        again = made(*stages, target="auto")
        again.resume(tmp_path / f"{count}.pt")
        assert len(again.model.blocks) == (2 if count == 2 else 4)
        assert torch.equal(torch.stack(taken(again)), torch.stack(losses[count:]))
        assert all(
            torch.equal(value, run.model.state_dict()[name])
            for name, value in again.model.state_dict().items()
        )


def test_a_base_is_not_held_as_codes_in_a_run() -> None:
    """It was left out without a word."""
    with pytest.raises(UsageError, match=r"passes = \['frozen.as_given=false'\]: a run carries its weights"):
        made(Stage(steps=1, passes=["offload", "frozen.as_given=false"]))
    made(Stage(steps=1, passes=["no-frozen"]))
