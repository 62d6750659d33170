"""The contract of a pass over a whole training step: every combination of its choices is a form, and a plan
makes one again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
from train_helpers import context, forms_of, skips

from effcompile.capture import capture_training
from effcompile.core.cost import Cost
from effcompile.core.errors import FormatError
from effcompile.core.reasons import Because, Unsupported
from effcompile.ir.footprint import WORKING, Footprint
from effcompile.ir.step import Step
from effcompile.passes.training.base import (
    Case,
    RequestError,
    StepChoice,
    StepContext,
    StepOption,
    StepOutcome,
)
from effcompile.passes.training.forms import forms, reapplied, told
from effcompile.passes.training.step_edit import Refusal, copied
from effcompile.report.reasons import words


@dataclass(frozen=True, kw_only=True)
class Marks:
    """Marks the loss with a letter for each of its choices. `early`: the forms are made to be proposed."""

    letters: str = "ab"
    early: bool = True

    name: ClassVar[str] = "marks"
    exact: ClassVar[bool] = True

    def propose(self, case: Case, context: StepContext) -> Iterator[StepChoice]:
        for letter in self.letters:
            option = StepOption(name="on", settings={"letter": letter}, why=Because("why not"))
            if self.early:
                option = replace(
                    option,
                    made=self.apply(case, StepChoice(site="", kind="", baseline="", options=()), option),
                )
            yield StepChoice(
                site=letter, kind=f"mark {letter}", baseline="off", options=(option, StepOption(name="off"))
            )

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
def test_every_combination_of_two_passes_choices_is_a_form_the_step_as_it_is_first(
    step: Step, early: bool
) -> None:
    found, declined = forms_of(step, Marks(early=early), Marks(letters="c", early=early))
    assert [marks(form.step) for form in found] == [
        "",
        "c",
        "b",
        "bc",
        "a",
        "ac",
        "ab",
        "abc",
    ] and not declined
    for form in found:
        on = "".join(kind[-1] for kind, option in form.options.items() if option == "on")
        assert on == marks(form.step) and len(form.options) == 3
    assert (
        found[0].step is step
        and found[0].label == "as captured"
        and found[-1].label == "mark c on, mark b on, mark a on"
    )


def test_what_one_pass_has_decided_another_does_not_decide_again(step: Step) -> None:
    class Others(Marks):
        name: ClassVar[str] = "others"

    found, declined = forms_of(step, Marks(letters="a"), Others(letters="ba"))
    assert [marks(form.step) for form in found] == ["", "a"]
    assert {(d.by, words(d.reason)) for d in declined} == {
        ("others", "it could not be asked: ValueError: it decides about 'mark a', which is decided already")
    }


def test_a_plans_decisions_make_the_form_again(step: Step) -> None:
    nothing: StepOutcome = None  # type: ignore[assignment]  # these options tell nothing more
    for form in forms_of(step, Marks())[0]:
        decisions = [d for chosen in form.taken for d in told(chosen, nothing, Cost(), Cost(), None)]
        assert [d.why for d in decisions if d.option == "on"] == [Because("why not")] * len(marks(form.step))
        again = reapplied([Marks()], Case(step=step), decisions)
        assert (
            marks(again.step) == marks(form.step)
            and {k: o for k, o in form.options.items() if o == "on"} == again.options
        )


def test_what_was_refuted_is_no_form_and_told(step: Step) -> None:
    made = forms([Marks()], Case(step=step), context(**{"mark a": "on"}))
    found, declined = made.cases, made.declined
    assert [marks(form.step) for form in found] == ["", "b"]
    assert [(d.site, d.option, d.by, words(d.reason)) for d in declined] == [
        ("a", "on", "marks", "it was run, and did not hold")
    ]


def test_a_lone_option_is_taken_without_its_baseline_and_is_no_lever(step: Step) -> None:
    class Always(Marks):
        def propose(self, case: Case, context: StepContext) -> Iterator[StepChoice]:
            for choice in Marks.propose(self, case, context):
                yield replace(choice, options=choice.options[:1], settled=True)

    (form,), _ = forms_of(step, Always())
    assert marks(form.step) == "ab" and form.label == "as captured"


def test_what_is_in_reserve_takes_the_place_of_the_others_where_it_is_asked_for(step: Step) -> None:
    class Spare(Marks):
        def propose(self, case: Case, context: StepContext) -> Iterator[StepChoice]:
            for choice in Marks.propose(self, case, context):
                yield replace(choice, options=choice.options[:1], reserve=choice.options[1:])

    def found(*, reserve: bool, **refuted: str) -> list[str]:
        passes = [Marks(letters="a"), Spare(letters="b", early=False)]
        made = forms(passes, Case(step=step), context(**refuted), reserve=reserve).cases
        assert not any("mark b" in case.label for case in made)
        return [marks(case.step) for case in made]

    assert found(reserve=False) == ["b", "ab"] and found(reserve=True) == ["", "a"]
    assert found(reserve=True, **{"mark b": "off"}) == ["b", "ab"]  # none is left: the others stand


def test_an_option_that_cannot_be_had_is_refused_beside_what_it_was_wanted_with(step: Step) -> None:
    class Picky(Marks):
        def apply(self, case: Case, choice: StepChoice, option: StepOption) -> Case:
            if "a" in marks(case.step):
                raise Refusal("there is an a")
            return Marks.apply(self, case, choice, option)

    made = forms([Marks(letters="a"), Picky(letters="b", early=False)], Case(step=step), context())
    assert [marks(form.step) for form in made.cases] == ["", "b", "a"] and not made.declined
    assert made.refused == [({"mark a": "on", "mark b": "on"}, Unsupported("there is an a"))]


def test_what_the_user_asked_wrongly_is_raised_and_any_other_error_declines_the_pass(step: Step) -> None:
    class Wrong(Marks):
        error: ClassVar[type[Exception]]

        def propose(self, case: Case, context: StepContext) -> Iterator[StepChoice]:
            raise self.error("no such mark")

    Wrong.error = RequestError
    with pytest.raises(RequestError, match="no such mark"):
        forms([Wrong()], Case(step=step), context())
    Wrong.error = FormatError
    made = forms([Wrong()], Case(step=step), context())
    assert [form.step for form in made.cases] == [step]
    assert [words(d.reason) for d in made.declined] == ["it could not be asked: FormatError: no such mark"]


def test_a_baseline_with_settings_is_made_and_one_step_stays_one_with_what_stands_beside_it(
    step: Step,
) -> None:
    class Beside(Marks):
        def propose(self, case: Case, context: StepContext) -> Iterator[StepChoice]:
            options = tuple(StepOption(name=size, settings={"letter": size}) for size in ("1", "20"))
            yield StepChoice(site="beside", kind="beside", baseline="1", options=options)

        def apply(self, case: Case, choice: StepChoice, option: StepOption) -> Case:
            more = Footprint(resident={WORKING: int(option.setting("letter", str))})
            return replace(
                case, beside=case.beside + more, seconds_beside=case.seconds_beside + 0.5, last=copied_alone
            )

    def copied_alone(step: Step) -> Step:
        return copied(step)[0]

    found = forms([Marks(letters="a"), Beside()], Case(step=step), context()).cases
    assert [(marks(c.step), c.beside.resident_bytes) for c in found] == [
        ("", 1),
        ("", 20),
        ("a", 1),
        ("a", 20),
    ]
    assert found[0].step is found[1].step is not step and found[2].step is found[3].step
    assert all(case.seconds(2.0) == 2.5 and case.last is None for case in found)
