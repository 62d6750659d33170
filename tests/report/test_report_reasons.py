"""Every reason has words; those that differ in figures and names of sites only are one phrase; all of them go
through a plan.json.
"""

from __future__ import annotations

import json
from dataclasses import fields, replace

import pytest
import samples
from hypothesis import given, settings
from hypothesis import strategies as st
from reason_samples import some

from effcompile.core.errors import FormatError, UsageError
from effcompile.core.mask import Edge, MaskForm, Sees
from effcompile.core.reason_kinds import KINDS
from effcompile.core.reasons import (
    Because,
    Frees,
    NotFaster,
    OverBudget,
    Reason,
    Recall,
    Requires,
    Slower,
    Unsupported,
)
from effcompile.ir.plan import Declined, Plan
from effcompile.report.groups import refusals
from effcompile.report.reasons import alike, words

CAUSAL = MaskForm(hi=Edge(offset=0))
NAMES = st.text(st.characters(categories=["L", "N"]), min_size=1, max_size=8)
ANY = st.sampled_from(list(KINDS.values())).flatmap(lambda kind: some(kind, NAMES))


def declined(reason: Reason, site: str = "a") -> Declined:
    return Declined(site=site, kind="linear", option="w4", by="quantize", reason=reason)


def test_a_kind_is_the_default_of_its_class_and_every_class_has_one() -> None:
    for name, kind in KINDS.items():
        assert {f.name: f.default for f in fields(kind)}["kind"] == name  # type: ignore[arg-type]
    assert {kind.__name__ for kind in Reason.__subclasses__() if not kind.__name__.startswith("_")} <= {
        k.__name__ for k in KINDS.values()
    }


@given(ANY)
@settings(deadline=None)
def test_every_reason_has_words_and_survives_a_plan(reason: Reason) -> None:
    assert words(reason) == words(reason).strip(" ") or not words(reason)
    plan = samples.bert(
        declined=(declined(reason),),
        decisions=tuple(replace(d, why=reason, note=reason) for d in samples.decisions()[:1]),
    )
    read = Plan.from_dict(json.loads(json.dumps(plan.to_dict())))
    assert (
        words(read.declined[0].reason)
        == words(reason)
        == words(read.decisions[0].why)
        == words(read.decisions[0].note)
    )
    assert type(read.declined[0].reason) is type(reason)


@pytest.mark.parametrize(
    ("reasons", "said"),
    [
        (
            [Slower(seconds=1.2e-3), Slower(seconds=3.4e-3)],
            "the fastest plan with it takes 1.20–3.40 ms more a step",
        ),
        (
            [Slower(seconds=8e-4), Slower(seconds=3.4e-3)],
            "the fastest plan with it takes 800 µs–3.40 ms more a step",
        ),
        ([Sees(form=CAUSAL, share=0.12), Sees(form=CAUSAL, share=0.5)], "sees causal, 12–50% of the scores"),
        (
            [OverBudget(needed=3 << 20, budget=1 << 20)] * 2,
            "would bring the peak memory to 3.0 MiB, above 1.0 MiB",
        ),
        (
            [Requires(site=f"h.{i}.q", options=("w8", "w4"), offered=True) for i in range(12)],
            "needs h.{0–11}.q to be w8 or w4, which costs more than it gains",
        ),
        (
            [Unsupported("K = {} is no multiple of {}", (k, 32)) for k in (72, 40, 72)],
            "K = 40–72 is no multiple of 32",
        ),
        (
            [Frees(bytes=1 << n, seconds=0.0) for n in (20, 21)],
            "frees 1.0–2.0 MiB between forward and backward for no more time",
        ),
    ],
)
def test_reasons_that_differ_in_figures_are_one_row_with_ranges(reasons: list[Reason], said: str) -> None:
    (row,) = refusals(declined(reason, f"h.{i}") for i, reason in enumerate(reasons))
    assert row.reason == said and len(row.sites) == len(reasons)


def test_reasons_that_differ_in_names_or_in_nature_stay_apart() -> None:
    apart = [
        NotFaster(seconds=1.0, against=0.5, than="w8"), NotFaster(seconds=1.0, against=0.5, than="w4"),
        NotFaster(seconds=1.0, against=-0.5, than="w4"), Sees(form=CAUSAL), Sees(form=CAUSAL, share=0.5),
        Because("3 chains"), Because("4 chains"), Because("{} chains", (3,)), Unsupported("{} chains", (3,)),
        Recall(recall=0.9, share=0.1), Recall(recall=0.9, share=0.1, but=Slower(seconds=1.0)),
    ]  # fmt: skip
    assert [len(group) for group in alike(apart)] == [1] * len(apart)


@pytest.mark.parametrize(
    ("text", "figures"),
    [("{} of {}", (1,)), ("{}", (1, 2)), ("{tons}", (1,)), ("{site}", (1,)), ("{bytes}", ("h.3",)),
     ("{", (1,)), ("{0.__class__}", (1,)), ("{}", (True,))],
)  # fmt: skip
def test_a_text_whose_figures_are_not_its_holes_is_refused(text: str, figures: tuple[int | str, ...]) -> None:
    with pytest.raises(ValueError, match="reason"):
        Because(text, figures)


def test_a_sentence_is_refused_where_a_reason_is_wanted() -> None:
    with pytest.raises(
        UsageError, match=r"'too slow', a str\. Give one of effcompile\.core\.reasons.*Unsupported\(text\)"
    ):
        declined("too slow")  # type: ignore[arg-type]


def test_sentences_of_older_plans_are_read_as_they_stand() -> None:
    data = samples.bert(declined=(declined(Slower(seconds=1.0)),)).to_dict()
    data["declined"][0]["reason"] = "no gain here: {x}"
    data["decisions"][0]["why"] = ""
    plan = Plan.from_dict(data)
    assert words(plan.declined[0].reason) == "no gain here: {x}" and not words(plan.decisions[0].why)


@pytest.mark.parametrize(
    ("reason", "said"),
    [
        ({"kind": "sabotage"}, "'sabotage' is not known; there are because, unsupported, slower"),
        ({"kind": "slower", "seconds": "1"}, "Expected `float`, got `str`"),
        ({"kind": "slower"}, "missing required field `seconds`"),
        ({"kind": "slower", "seconds": 1e300}, "is larger than any machine's"),
        ({"kind": "because", "text": "{0.__class__}", "figures": [1]}, "One hole for each"),
        ({"kind": ["slower"]}, "is not known"),
        (["slower"], "is not known"),
        (None, "is not known"),
        (3, "is not known"),
    ],
)
def test_a_hostile_reason_is_refused_in_words(reason: object, said: str) -> None:
    data = samples.bert(declined=(declined(Slower(seconds=1.0)),)).to_dict()
    data["declined"][0]["reason"] = reason
    with pytest.raises(FormatError, match="is not a valid plan") as refused:
        Plan.from_dict(data)
    assert said in str(refused.value)
