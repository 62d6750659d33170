from __future__ import annotations

from dataclasses import dataclass, replace
from importlib.metadata import EntryPoint
from typing import ClassVar

import pytest
from pass_helpers import context

import effcompile.passes as registry
from effcompile.core.cost import Cost
from effcompile.core.errors import UnknownNameError, UsageError
from effcompile.core.goal import Goal
from effcompile.ir.formats import Form
from effcompile.ir.program import Program
from effcompile.passes import (
    OPTIONAL,
    PASSES,
    Choice,
    Declined,
    Option,
    load_passes,
    load_training_passes,
    propose_all,
    with_gradients_consumed,
)
from effcompile.passes.base import Pass
from effcompile.passes.quantize import Quantize
from effcompile.passes.training.states import States
from effcompile.report.reasons import words


def names(*spec: str) -> list[str]:
    return [p.name for p in load_passes(spec)]


def test_all_passes_in_order_and_of_the_contract() -> None:
    assert names() == [name for name in PASSES if name not in OPTIONAL] == [
        "shrink", "merge", "logits", "attention", "fuse", "rows", "quantize", "precompute", "sparsify",
    ]  # fmt: skip
    assert all(isinstance(p, Pass) for p in load_passes(None))
    assert {p.name for p in load_passes() if not p.exact} == {"quantize", "shrink", "sparsify"}


def test_selecting_excluding_and_setting() -> None:
    assert names("quantize", "merge") == ["merge", "quantize"]
    rest = ["shrink", "logits", "attention", "rows", "quantize", "precompute", "sparsify"]
    assert names("no-merge", "no-fuse") == rest
    assert names("merge", "fuse.norms=false") == ["merge", "fuse"]
    found = load_passes(["quantize.group_size=64", "quantize.embeddings=no", "quantize.options=w8, bf16"])
    assert found[-3] == Quantize(group_size=64, embeddings=False, options=("w8", "bf16")) and len(
        found
    ) == len(names())


def test_an_optional_pass_takes_part_where_it_is_named_or_set_and_leaves_out_no_other() -> None:
    first = ["shrink", "merge", "logits", "attention", "predict"]
    everything = [*first, "fuse", "rows", "quantize", "precompute", "sparsify"]
    assert names("predict") == names("predict.method=elsa") == everything
    assert names("predict", "quantize") == ["predict", "quantize"]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("quantise", "Did you mean 'quantize'"),
        ("no-marge", "Did you mean 'merge'"),
        ("prun", "Did you mean 'shrink'"),
        ("remta", "No pass is named 'remta'. Known: "),
        ("quantize.groups=3", "quantize.options, quantize.group_size, quantize.embeddings"),
        ("quantize.group_size", "NAME.OPTION=VALUE"),
        ("quantize.group_size=many", "whole number"),
        ("fuse.norms=maybe", "true or false"),
        ("predict.method=oracle", "no attention predictor 'oracle'"),
        ("predict.mass=0", "no share of a softmax"),
        ("predict.pool=7", "do not cut a tile of 64 evenly"),
        ("quantize.options=int9", "No precision is named 'int9'"),
    ],
)
def test_a_wrong_spec_says_what_is_allowed(spec: str, message: str) -> None:
    with pytest.raises(UsageError, match=message.replace("(", r"\(")):
        load_passes([spec])


def test_unknown_is_an_unknown_name() -> None:
    with pytest.raises(UnknownNameError):
        load_passes(["nothing"])


def test_installed_passes_come_last_and_bad_ones_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def install(value: str, name: str = "theirs") -> None:
        monkeypatch.setattr(
            registry, "entry_points", lambda group: [EntryPoint(name=name, value=value, group=group)]
        )

    install("effcompile.passes.quantize:Quantize")
    assert (
        list(registry.registered()) == [*PASSES, "theirs"]
        and len(load_passes()) == len(names()) == len(PASSES) - len(OPTIONAL & set(PASSES)) + 1
    )
    install("not_installed:Pass")
    with pytest.raises(UsageError, match="theirs"):
        load_passes()
    install("effcompile.passes.quantize:Quantize", name="merge")
    with pytest.raises(UsageError, match="taken"):
        load_passes()
    install("effcompile.passes.base:Choice")
    with pytest.raises(UsageError, match=r"'theirs' .* has no name, exact, propose, apply, measured_options"):
        load_passes()


def test_proposals_name_only_what_is_offered(bert: Program) -> None:
    for spec in ([], ["no-quantize"], ["quantize.options=int8_dynamic"]):
        choices, declined = propose_all(load_passes(spec), bert, context())
        offered = {c.site: {o.name for o in c.options} for c in choices}
        for choice in choices:
            assert choice.baseline in offered[choice.site]
            for option in choice.options:
                assert all(
                    allowed and set(allowed) <= offered[site] for site, allowed in option.requires.items()
                )
        merges = [c for c in choices if c.kind == "merge"]
        kept = {o.name for c in merges for o in c.options}
        if spec:
            extra = {"merged@int8_dynamic"} if spec[0].startswith("quantize") else set()
            assert kept == {"separate", "merged"} | extra
            assert any("which is not offered" in words(d.reason) for d in declined)


def test_choices_of_one_site_are_joined_and_refusals_cascade(bert: Program) -> None:
    @dataclass(frozen=True, kw_only=True)
    class One:
        options: tuple[Option, ...]
        site: str = "a"
        name: ClassVar[str] = "one"
        exact: ClassVar[bool] = True

        def propose(self, program: Program, context: object) -> list[Choice | Declined]:
            return [Choice(site=self.site, kind="t", baseline="x", options=self.options)]

        def apply(self, program: Program, plan: object) -> Program:
            return program

    def option(name: str, **requires: tuple[str, ...]) -> Option:
        return Option(form=Form(word=name), cost=Cost(), by="one", requires=requires)

    x = option("x")
    passes = [
        One(options=(x, option("y"))),
        One(options=(x, option("z", b=("w",)))),
        One(site="b", options=(x, option("w", a=("gone",)))),
    ]
    choices, declined = propose_all(passes, bert, replace(context(), goal=Goal()))
    assert {c.site: [o.name for o in c.options] for c in choices} == {"a": ["x", "y"], "b": ["x"]}
    assert [(d.site, d.option) for d in declined] == [("b", "w"), ("a", "z")]


def test_gradients_are_consumed_on_the_compilers_word_only_where_the_request_does_not_say() -> None:
    assert with_gradients_consumed(None) == ("states.in_backward=true",)
    assert with_gradients_consumed(["checkpoint", "no-wide"]) == (
        "checkpoint",
        "no-wide",
        "states.in_backward=true",
    )
    assert (
        with_gradients_consumed(["states.in_backward = false"]) is None
        and with_gradients_consumed(["states.in_backward=true"]) is None
    )
    assert load_training_passes(with_gradients_consumed(["no-wide"])).step[-1] == States(in_backward=True)
