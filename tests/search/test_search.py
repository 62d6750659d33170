"""Options that exclude each other in one model, and why an option lost."""

from types import SimpleNamespace

import pytest
from form_names import form
from torch import nn, randn

from effcompile.capture import capture
from effcompile.core.cost import Cost, Provenance
from effcompile.core.goal import Goal
from effcompile.passes import Choice, Option
from effcompile.planner import solve
from effcompile.search import pricing
from effcompile.search.progress import QUIET
from effcompile.search.proposal import Proposal
from effcompile.search.search import _without_conflicts


def option(name, seconds, error=0.0, **requires):
    return Option(
        form=form(name), cost=Cost(seconds=seconds, error_squared=error**2), by="quantize", requires=requires
    )


def linear(site, *options):
    return Choice(site=site, kind="linear", baseline="fp32", options=options)


def proposal(*choices):
    return Proposal(backend="b", choices=choices, declined=(), rest=Cost(), provenance=Provenance.MEASURED)


def test_each_part_lacks_one_side():
    whole = proposal(
        linear("a", option("fp32", 4), option("bf16", 2, 0.01), option("int8", 1, 0.04)),
        linear("b", option("fp32", 4), option("bf16", 2, 0.01)),
        Choice(
            site="m",
            kind="merge",
            baseline="separate",
            options=(option("separate", 0), option("merged", -1, a=("fp32",))),
        ),
    )
    no_fp32, no_bf16 = _without_conflicts(whole, [("fp32", "bf16")])
    assert [o.name for o in no_fp32.choices[0].options] == ["bf16", "int8"]
    assert [o.name for o in no_fp32.choices[2].options] == ["separate"]  # merged needs fp32
    assert [o.name for o in no_bf16.choices[1].options] == ["fp32"]
    assert any(d.option == "bf16" for d in no_bf16.declined)


def test_a_site_that_offers_nothing_else_keeps_its_option():
    part, _ = _without_conflicts(proposal(linear("a", option("fp32", 4))), [("fp32", "bf16")])
    assert [o.name for o in part.choices[0].options] == ["fp32"]


def test_the_best_part_never_mixes():
    whole = proposal(
        *(linear(s, option("fp32", 4), option("bf16", 2, 0.01 if s == "a" else 0.2)) for s in "ab")
    )
    goal = Goal(max_error=0.1)
    solved = [solve(part.problem(goal)).choice for part in _without_conflicts(whole, [("fp32", "bf16")])[1:]]
    assert solved == [{"a": "fp32", "b": "fp32"}]


def test_options_of_several_passes_at_one_kind_are_all_measured(monkeypatch: pytest.MonkeyPatch):
    wanted = {}
    result = SimpleNamespace(method="none")
    monkeypatch.setattr(
        pricing.kept, "measured", lambda program, inputs, options, **_: wanted.update(options) or result
    )
    monkeypatch.setattr(pricing.sensitivity, "generate_inputs", lambda program, count: [])
    bf16, w8, tanh, mine, int8 = map(form, ("bf16", "w8g64", "tanh", "mine", "sdpa_int8"))
    passes = tuple(
        SimpleNamespace(measured_options=lambda given=given: given, replaced_weights=lambda program: {})
        for given in (
            {"linear": (bf16, w8), "gelu": (tanh,)},
            {"linear": (w8, mine)},
            {"attention": (int8,)},
        )
    )
    program = capture(nn.Linear(2, 2).eval(), (randn(1, 2),))
    search = pricing.search_for(
        program, Goal(max_error=0.1), SimpleNamespace(notes=(), here=True), passes, QUIET
    )
    assert wanted == {"linear": (bf16, w8, mine), "gelu": (tanh,), "attention": (int8,)}
    assert [held.name for held in search.formats] == ["fp32", "bf16", "w8g64"]
