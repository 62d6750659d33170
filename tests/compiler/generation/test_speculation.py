"""The pass `speculate`: drafts are measured, taken where they are faster, and leave greedy text as it is."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from generation_models import ids, tiny
from torch import nn

import effcompile
from effcompile.core.errors import FormatError, UsageError
from effcompile.core.reasons import OverBudget, Unsupported
from effcompile.ir.plan import Plan
from effcompile.passes.speculate import drafts_in
from effcompile.proof.generation import speculation
from effcompile.runtime.generation.drafts import with_drafts
from effcompile.runtime.generation.stepper import Stepper

GOAL = {"mode": "generation", "context": 64, "prompt": 8, "new": 16, "backend": "torch-eager"}
TEXT = {"input_ids": ids(1, 16)}


@pytest.fixture(scope="module")
def model() -> nn.Module:
    """Says its last token again and again, so that every draft is right."""
    made = tiny("llama", num_hidden_layers=1)
    with torch.no_grad():
        made.lm_head.weight.copy_(made.model.embed_tokens.weight)
        for name, weight in made.named_parameters():
            if "proj" in name:
                weight.mul_(0.1)
    return made


class Clock:
    """Goes by the steps of a planned generation: each takes a second, and so much for each of its tokens."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, of_a_token: float) -> None:
        self.now, step = 0.0, Stepper.__call__

        def timed(stepper: Stepper, *args: Any, **kwargs: Any) -> Any:
            self.now += 1 + of_a_token * kwargs["input_ids"].shape[1]
            return step(stepper, *args, **kwargs)

        monkeypatch.setattr(Stepper, "__call__", timed)
        monkeypatch.setattr(speculation, "perf_counter", lambda: self.now)
        monkeypatch.setattr(
            speculation, "interleaved", lambda fns, *_, **__: {n: [self.of(fns[n])] for n in fns}
        )

    def of(self, run: Callable[[], object]) -> float:
        before = self.now
        run()
        return self.now - before


def planned(model: nn.Module, **more: Any) -> Any:
    asked = {**GOAL, "passes": ["speculate.drafts=2,3"], **more}
    return effcompile.optimize(model, inputs=TEXT, **asked)


@pytest.fixture(scope="module")
def drafting(model: nn.Module) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        Clock(patch, 0.01)
        return planned(model)


def text_and_steps(executable: Any, **how: Any) -> tuple[torch.Tensor, int]:
    counted = speculation._Steps()
    found = executable.generate(
        ids(1, 6, seed=3), max_new_tokens=24, do_sample=False, streamer=counted, **how
    )
    return found, counted.count


def test_the_fastest_number_is_taken_and_the_text_is_the_models(model: nn.Module, drafting: Any) -> None:
    (decision,) = (d for d in drafting.plan.decisions if d.by == "speculate")
    assert (decision.option, decision.applied, decision.settings) == ("look-up of 3",) * 2 + ({"drafts": 3},)
    assert decision.why.figures[-1] < 0.5
    assert [d.option for d in drafting.plan.declined if d.by == "speculate"] == ["look-up of 2"]
    assert {d.by for d in drafting.plan.decisions} <= {"rows", "quantize", "speculate", "cache"}
    wanted = model.generate(ids(1, 6, seed=3), max_new_tokens=24, do_sample=False)
    text, steps = text_and_steps(drafting)
    assert torch.equal(text, wanted)
    assert steps <= 9  # the first step, and what has not been said before, draft nothing
    assert text_and_steps(drafting, prompt_lookup_num_tokens=1)[1] > steps
    assert text_and_steps(drafting, use_cache=True)[1] == steps


def test_where_tokens_take_as_long_together_nothing_is_drafted(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    Clock(monkeypatch, 100.0)
    executable = planned(model)
    assert drafts_in(executable.plan) == 0
    declined = {d.option: d.reason for d in executable.plan.declined if d.by == "speculate"}
    assert set(declined) == {"look-up of 2", "look-up of 3"}
    assert "of the time of one a step" in declined["look-up of 3"].text
    assert text_and_steps(executable)[1] == 24


def test_saved_opened_and_carried_out_again(
    model: nn.Module, drafting: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = drafting.save(tmp_path / "out")
    opened = effcompile.load(folder)
    text, steps = text_and_steps(drafting)
    found, again = text_and_steps(opened)
    assert torch.equal(found, text) and again == steps
    Clock(monkeypatch, 100.0)  # slower here: the plan says so all the same, and what it takes here
    carried_out = effcompile.optimize(model, inputs=TEXT, plan=Plan.load(folder / "plan.json"))
    (decision,) = (d for d in carried_out.plan.decisions if d.by == "speculate")
    assert decision.settings == {"drafts": 3}
    assert decision.why.figures[-1] > 1
    assert text_and_steps(carried_out)[1] == steps


@pytest.mark.parametrize("drafts", [0, -1, 65, 2, True, "3"])
def test_a_plan_that_says_another_number_is_refused(drafting: Any, tmp_path: Path, drafts: object) -> None:
    told = drafting.plan.to_dict()
    (decision,) = (d for d in told["decisions"] if d["by"] == "speculate")
    decision["settings"]["drafts"] = drafts
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(told))
    with pytest.raises(FormatError, match=r"drafts = .*Plan again, or restore the file"):
        drafts_in(Plan.load(file))


@pytest.mark.parametrize(
    "how",
    [
        {"do_sample": True}, {"num_beams": 2}, {"num_return_sequences": 2, "do_sample": True},
        {"prompt_lookup_num_tokens": 5}, {"assistant_model": nn.Identity()}, {"use_cache": False},
        {"past_key_values": transformers.DynamicCache()}, {"cache_implementation": "static"},
        {"generation_config": transformers.GenerationConfig(do_sample=True)},
        {"input_ids": ids(2, 4)}, {"input_ids": None}, {"max_time": 9.0}, {"stop_strings": ["."]},
        {"stopping_criteria": transformers.StoppingCriteriaList()}, {"logits_processor": [nn.Identity()]},
    ],
    ids=lambda how: "+".join(how),
)  # fmt: skip
def test_calls_that_take_none(how: dict[str, Any]) -> None:
    given = {"input_ids": ids(1, 4), **how}
    assert with_drafts(3, transformers.GenerationConfig(), (), given) == given


def test_a_criterion_stops_at_its_token(model: nn.Module, drafting: Any) -> None:
    """Hugging Face's generate() asks criteria once a step: with drafts it would go on behind the token."""
    stop = transformers.StoppingCriteriaList(
        [lambda tokens, scores, **_: torch.full((tokens.shape[0],), tokens.shape[1] >= 11)]
    )
    found = drafting.generate(ids(1, 6, seed=3), max_new_tokens=24, do_sample=False, stopping_criteria=stop)
    assert found.shape == (1, 11)


def test_calls_that_take_some() -> None:
    sampling = transformers.GenerationConfig(do_sample=True)
    for how in ({}, {"max_new_tokens": 4}, {"repetition_penalty": 1.2}):
        assert with_drafts(3, transformers.GenerationConfig(), (ids(1, 4),), how) == {
            **how,
            "prompt_lookup_num_tokens": 3,
        }
    assert with_drafts(3, sampling, (ids(1, 4),), {"do_sample": False})["prompt_lookup_num_tokens"] == 3
    assert sampling.do_sample


def test_what_it_holds_counts(drafting: Any) -> None:
    goal = drafting.plan.goal
    over = speculation._over(drafting, replace(goal, memory=1000), 3)
    assert isinstance(over, OverBudget) and over.needed > sum(p.nbytes for p in drafting.parameters())
    assert speculation._over(drafting, replace(goal, memory=over.needed), 3) is None


def test_where_there_is_nothing_to_draft_it_is_told(drafting: Any) -> None:
    rows = speculation.speculated(drafting, [], replace(drafting.plan.goal, batch=2), (2,), keep=False)
    assert rows.decision is None and "one row" in rows.declined[0].reason.text
    plan = effcompile.plan(
        nn.Linear(4, 4).eval(), torch.ones(1, 4), passes=["speculate"], target="cpu-generic"
    )
    (declined,) = (d for d in plan.declined if d.by == "speculate")
    assert isinstance(declined.reason, Unsupported)


@pytest.mark.parametrize("drafts", ["0", "2,65", ",", "two"])
def test_numbers_that_are_none(model: nn.Module, drafts: str) -> None:
    with pytest.raises(UsageError, match="drafts"):
        planned(model, passes=[f"speculate.drafts={drafts}"])
