"""The contract of a pass over a whole training step: every combination of its choices is a form, and a plan makes one again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
from train_helpers import context, forms_of, skips

from effcompile.capture import capture_training
from effcompile.core.cost import Cost
from effcompile.ir.step import Step
from effcompile.passes.training.base import Case, Context, Outcome, StepChoice, StepOption, forms, reapplied, told
from effcompile.passes.training.step_edit import copied


@dataclass(frozen=True, kw_only=True)
class Marks:
    """Marks the loss with a letter for each of its choices. `early`: the forms are made to be proposed."""

    letters: str = "ab"
    early: bool = True

    name: ClassVar[str] = "marks"
    exact: ClassVar[bool] = True

    def propose(self, case: Case, context: Context) -> Iterator[StepChoice]:
        for letter in self.letters:
            option = StepOption(name="on", settings={"letter": letter}, why="why not")
            if self.early:
                option = replace(option, made=self.apply(case, StepChoice(site="", kind="", baseline="", options=()), option))
            yield StepChoice(site=letter, kind=f"mark {letter}", baseline="off", options=(option, StepOption(name="off")))

    def apply(self, case: Case, choice: StepChoice, option: StepOption) -> Case:
        step, _ = copied(case.step)
        step.loss.meta["marks"] = marks(case.step) + option.setting("letter", str)
        return replace(case, step=step)


def marks(step: Step) -> str:
    return str(step.loss.meta.get("marks", ""))


@pytest.fixture(scope="module")
def step() -> Step:
    model, batch = skips()
    return capture_training(model, (), batch)


@pytest.mark.parametrize("early", [True, False])
def test_every_combination_of_two_passes_choices_is_a_form_the_step_as_it_is_first(step: Step, early: bool) -> None:
    found, declined = forms_of(step, Marks(early=early), Marks(letters="c", early=early))
    assert [marks(form.step) for form in found] == ["", "c", "b", "bc", "a", "ac", "ab", "abc"] and not declined
    for form in found:
        on = "".join(kind[-1] for kind, option in form.options.items() if option == "on")
        assert on == marks(form.step) and len(form.options) == 3
    assert found[0].step is step and found[0].label == "as captured" and found[-1].label == "mark c on, mark b on, mark a on"


def test_a_plans_decisions_make_the_form_again(step: Step) -> None:
    nothing: Outcome = None  # type: ignore[assignment]  # these options tell nothing more
    for form in forms_of(step, Marks())[0]:
        decisions = [d for chosen in form.taken for d in told(chosen, nothing, Cost(), Cost(), "")]
        assert [d.why for d in decisions if d.option == "on"] == ["why not"] * len(marks(form.step))
        again = reapplied([Marks()], Case(step=step), decisions)
        assert marks(again.step) == marks(form.step) and {k: o for k, o in form.options.items() if o == "on"} == again.options


def test_what_was_refuted_is_no_form_and_told(step: Step) -> None:
    made = forms([Marks()], Case(step=step), context(**{"mark a": "on"}))
    found, declined = made.cases, made.declined
    assert [marks(form.step) for form in found] == ["", "b"]
    assert [(d.site, d.option, d.by, d.reason) for d in declined] == [("a", "on", "marks", "it was run, and did not hold")]


def test_a_lone_option_is_taken_without_its_baseline_and_is_no_lever(step: Step) -> None:
    class Always(Marks):
        def propose(self, case: Case, context: Context) -> Iterator[StepChoice]:
            for choice in Marks.propose(self, case, context):
                yield replace(choice, options=choice.options[:1], settled=True)

    (form,), _ = forms_of(step, Always())
    assert marks(form.step) == "ab" and form.label == "as captured"
