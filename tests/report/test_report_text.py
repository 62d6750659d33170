"""What the terminal shows of any plan, also of one with hostile names; what it shows of real ones is in
test_golden.py.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import samples
from hypothesis import given, settings
from hypothesis import strategies as st
from reason_samples import some
from rich.cells import cell_len
from rich.console import Console

from effcompile.core.cost import Cost
from effcompile.core.errors import UnknownNameError, UsageError
from effcompile.core.goal import Goal
from effcompile.core.mask import Edge, MaskForm, Sees
from effcompile.core.reason_kinds import KINDS
from effcompile.core.reasons import Because
from effcompile.core.units import parse_bytes
from effcompile.ir.figures import Candidate, Check, Totals
from effcompile.ir.plan import Decision, Declined, Plan
from effcompile.report import (
    diff,
    explain,
    find_site,
    flag,
    html_report,
    print_infeasible,
    print_plan,
    targets_table,
)
from effcompile.report.reasons import words

PAGES: dict[str, Callable[[Console], None]] = {
    "bert": lambda c: print_plan(samples.bert(), c, directory="out"),
    "bert_verbose": lambda c: print_plan(samples.bert(), c, verbose=True),
    "planned_only": lambda c: print_plan(samples.planned_only(), c, directory="out"),
    "exact": lambda c: print_plan(samples.exact(), c, directory="out"),
    "exact_failed": lambda c: print_plan(samples.exact_failed(), c, directory="/tmp/some where"),
    "nothing_to_decide": lambda c: print_plan(samples.nothing_to_decide(), c),
    "infeasible": lambda c: print_infeasible(*samples.infeasible(), c),
    "explain": lambda c: explain(samples.bert(), "encoder.layer.11.intermediate.dense", c),
    "explain_list": lambda c: explain(samples.bert(), None, c),
    "diff": lambda c: diff(samples.bert(), samples.exact(), c),
    "targets": lambda c: targets_table(samples.targets(), c, verbose=True),
}


GOLDEN = Path(__file__).parent.parent / "golden"
ROUNDED = Check(name="prefill in chunks", error=1.7e-3, limit=8.9e-3)


def render(page: Callable[[Console], None], width: int, encoding: str = "utf-8", **options: object) -> str:
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding, write_through=True)
    page(Console(file=stream, width=width, **options))  # type: ignore[arg-type]
    assert isinstance(stream.buffer, io.BytesIO)
    return stream.buffer.getvalue().decode(encoding)


def assert_golden(name: str, text: str) -> None:
    """The text is what tests/golden has under this name; UPDATE_GOLDEN=1 writes it there."""
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8"), (
        "the report changed: run with UPDATE_GOLDEN=1 and read the diff"
    )


def plan_text(plan: Plan, width: int = 80, **options: object) -> str:
    return render(lambda console: print_plan(plan, console, **options), width)  # type: ignore[arg-type]


@pytest.mark.parametrize("width", [44, 60, 72, 80, 100, 120, 150, 300])
@pytest.mark.parametrize("name", PAGES)
def test_no_line_is_wider_than_the_console_except_commands(name: str, width: int) -> None:
    lines = render(PAGES[name], width).splitlines()
    commands = ("effcompile ", "InferenceSession(", "plan.save(", "effcompile.optimize(")
    wide = [
        line for line in lines if cell_len(line) > width and not any(command in line for command in commands)
    ]
    assert wide == []
    assert all(line == line.rstrip() for line in lines)


@pytest.mark.parametrize("name", PAGES)
def test_ascii_where_the_encoding_has_nothing_else(name: str) -> None:
    text = render(PAGES[name], 80, encoding="ascii")
    assert text.isascii()
    assert "?" not in text.replace("? predicted", "").replace("? not verified", ""), (
        "a glyph of ours has no ASCII form"
    )


def test_colour_only_on_terminals(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    piped = render(PAGES["bert"], 80)
    coloured = render(PAGES["bert"], 80, force_terminal=True, color_system="standard")
    monkeypatch.setenv("NO_COLOR", "1")
    plain = render(PAGES["bert"], 80, force_terminal=True)
    assert "\x1b" not in piped
    assert "\x1b[32m" in coloured  # green: met
    assert "\x1b[32m" not in plain
    assert "✔ met" in piped


def test_escape_codes_and_markup_in_names_are_shown_not_obeyed() -> None:
    text = plan_text(samples.exact_failed(), width=100)
    assert "\x1b" not in text
    assert "[bold]not markup[/bold]" in text


@pytest.mark.parametrize(
    ("plan", "verdict"),
    [
        (samples.bert(), "✔ met"),
        (samples.planned_only(), "◌ predicted"),
        (samples.exact_failed(), "✘ not met"),
        (samples.bert(checks=(), measured=Totals(seconds=1.0)), "? not verified"),
        (samples.bert(checks=(), measured=Totals(seconds=1.0, error=0.5)), "✘ not met"),
        (replace(samples.planned_only(), goal=Goal(memory=samples.MIB)), "✘ not met"),
        # an exact goal of a 16-bit model: as much as the model itself rounds
        (samples.bert(goal=Goal(), checks=(ROUNDED,), measured=Totals(error=ROUNDED.error)), "✔ met"),
    ],
)
def test_verdict(plan: Plan, verdict: str) -> None:
    goal_line = next(line for line in plan_text(plan).splitlines() if line.startswith(" goal"))
    assert goal_line.endswith(verdict)


def test_totals_show_given_figures_and_their_ratios() -> None:
    text = plan_text(samples.bert())
    time = next(line for line in text.splitlines() if line.startswith(" time "))
    assert time.split() == ["time", "168", "ms", "175", "ms", "44.1", "ms", "45.8", "ms", "0.26×", "0.96×"]


def test_predicted_ratio_where_nothing_was_measured() -> None:
    time = next(line for line in plan_text(samples.planned_only()).splitlines() if line.startswith(" time "))
    assert time.split() == ["time", "168", "ms", "44.1", "ms", "0.26×"]


@pytest.mark.parametrize(
    ("roof", "said"),
    [
        (40e-3, "linear 50.0 ms (80 % of peak) · the rest 50.0 ms · whole 100 ms (40 %)"),
        (54e-3, "linear 50.0 ms (100 % of peak) · the rest 50.0 ms · whole 100 ms (54 %)"),
        (60e-3, "linear 50.0 ms · the rest 50.0 ms"),
    ],
    ids=["a part", "noise above the peak", "the peak was not one"],
)
def test_work_is_told_with_its_part_of_the_peak(roof: float, said: str) -> None:
    plan = samples.planned_only()
    linear = Cost(seconds=50e-3, roof_seconds=roof)
    decided = replace(next(d for d in plan.decisions if d.kind == "linear"), cost=linear)
    told = replace(
        plan, decisions=(decided,), predicted=replace(plan.predicted, seconds=0.1, roof_seconds=roof)
    )
    assert f" time {said} " in " ".join(plan_text(told).split())


def test_proof_claims_no_more_than_the_certificate() -> None:
    flat = " ".join(plan_text(samples.bert()).split())
    assert (
        "no plan is more than 1.0 % faster within this budget (z3 4.15.3, 0.3 s, 133 sites, 412 alternatives)"
        in flat
    )
    assert "solved 2×" in flat
    unproven = " ".join(plan_text(samples.planned_only()).split())
    assert "bound not proven" in unproven
    assert "no plan is" not in unproven
    assert "up to 7.0 % faster is not ruled out" in unproven


def test_a_slower_plan_is_called_slower() -> None:
    plan = samples.bert(measured=Totals(seconds=0.3504, error=1e-3))
    assert "2.00× slower: 175 ms → 350 ms" in plan_text(plan)


def test_a_decision_that_the_artifact_lacks_is_told() -> None:
    assert "⚠ 3 not applied: the artifact holds fp32" in plan_text(samples.exact_failed())
    assert "not applied" not in plan_text(samples.bert())


def test_what_is_known_of_places_stands_under_them_with_its_count() -> None:
    plan = samples.bert()
    attention = [d for d in plan.decisions if d.kind == "attention"]
    notes = {
        d.site: Sees(form=MaskForm(lo=None if i else Edge(offset=-7), hi=Edge(offset=0)))
        for i, d in enumerate(attention)
    }
    noted = replace(plan, decisions=tuple(replace(d, note=notes.get(d.site)) for d in plan.decisions))
    text = plan_text(noted)
    assert "sees causal ∧ window 8 (1)" in text and f"sees causal ({len(attention) - 1})" in text
    assert "sees" not in plan_text(plan)
    assert "known     sees causal ∧ window 8" in render(lambda c: explain(noted, attention[0].site, c), 80)


def test_verbose_lists_every_site() -> None:
    text = plan_text(samples.bert(), verbose=True)
    short = plan_text(samples.bert())
    for decision in samples.decisions():
        assert decision.site in text
    assert "encoder.layer.5.attention.self.key" not in short


def test_candidates_tell_why_they_were_not_tried() -> None:
    text = plan_text(
        samples.bert(
            candidates=(Candidate(backend="torch", predicted_seconds=1.0), Candidate(backend="onnxruntime"))
        ),
        120,
    )
    assert "not measured" in text
    assert "● onnxruntime" in text


def test_commands_are_never_cut_and_quote_the_folder() -> None:
    folder = "/a folder with/" + "long/" * 30
    text = plan_text(samples.bert(), directory=folder)
    assert f"effcompile run '{folder.rstrip('/')}'" in text


@pytest.mark.parametrize(
    ("limit", "value", "typed"),
    [
        ("memory", 0.98 * 2**30, "--memory 0.98GiB"),
        ("memory", 0.3312 * 2**30, "--memory 0.34GiB"),
        ("memory", 5_000_001, "--memory 4.77MiB"),
        ("max_error", 0.01171, "--max-error 1.2e-2"),
        ("max_error", 0.012, "--max-error 1.2e-2"),
        ("max_error", 0.0996, "--max-error 1.0e-1"),
        ("max_error", 1.0, "--max-error 1.0e+0"),
    ],
)
def test_nearest_flags_are_feasible_as_typed(limit: str, value: float, typed: str) -> None:
    assert flag(limit, value) == typed
    number = typed.split()[1]
    parsed = parse_bytes(number) if limit == "memory" else float(number)
    assert int(value) <= parsed <= 1.1 * value


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=24)
costs = st.builds(
    Cost,
    seconds=st.floats(-1e3, 1e3),
    weight_bytes=st.integers(-(2**40), 2**40),
    error_squared=st.floats(0, 1e3),
)
reasons = st.sampled_from(list(KINDS.values())).flatmap(lambda kind: some(kind, texts))
made = st.builds(
    Decision,
    site=texts,
    kind=texts,
    option=texts,
    baseline=texts,
    by=texts,
    cost=costs,
    baseline_cost=costs,
    why=st.none() | reasons,
    note=st.none() | reasons,
    applied=texts,
)
refused = st.builds(
    Declined, site=texts, kind=texts, option=texts, by=texts, reason=reasons, cost=st.none() | costs
)


@given(st.lists(made, max_size=6), st.lists(refused, max_size=14), texts, st.integers(40, 160))
@settings(max_examples=60, deadline=None)
def test_any_plan_prints_within_the_width(
    decisions: list[Decision], declined: list[Declined], text: str, width: int
) -> None:
    plan = samples.bert(
        decisions=tuple(decisions),
        declined=tuple(declined),
        model=text,
        notes=(Because(text),),
        inputs=(text,),
        target_line=text,
    )
    for verbose in (False, True):
        printed = plan_text(plan, width, verbose=verbose)
        body = printed.split("\n next ")[0]
        assert max(map(cell_len, body.split("\n"))) <= width
        assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", printed)
    assert html_report(plan).endswith("</html>\n")


def test_explain_shows_each_alternative_with_its_reason() -> None:
    site = "encoder.layer.11.intermediate.dense"
    text = " ".join(render(lambda c: explain(samples.bert(), site, c), 120).split())
    for declined in samples.declined():
        if declined.site == site:
            assert " ".join(words(declined.reason).split()) in text
    assert "the artifact holds fp32" in text


def test_explain_of_a_site_where_nothing_was_possible() -> None:
    plan = samples.bert(decisions=())
    text = render(lambda c: explain(plan, "encoder.layer.3.output.dense", c), 80)
    assert "no option was possible" in text


@pytest.mark.parametrize(
    ("part", "site"),
    [
        ("encoder.layer.3.output.dense", "encoder.layer.3.output.dense"),
        ("word_emb", "embeddings.word_embeddings"),
        ("embeddings", "embeddings.word_embeddings"),
        ("layer.7.attention.self:merge", "encoder.layer.7.attention.self:merge"),
    ],
)
def test_a_part_of_a_site_that_fits_one_is_enough(part: str, site: str) -> None:
    assert find_site(samples.bert(), part) == site


def test_an_ambiguous_part_lists_what_it_fits() -> None:
    with pytest.raises(UsageError, match=r"fits 12 sites.*\{0–11\}\.attention\.self\.query\."):
        find_site(samples.bert(), "self.query")


@pytest.mark.parametrize("name", ["encoder.layer.3.output.dens3", ""])
def test_an_unknown_site_is_an_error(name: str) -> None:
    with pytest.raises(UsageError):
        find_site(samples.bert(), name)
    with pytest.raises(UnknownNameError, match=r"Did you mean 'encoder.layer.3.output.dense'"):
        find_site(samples.bert(), "encoder.layer.3.output.dens3")


def test_diff_of_a_plan_with_itself() -> None:
    text = render(lambda c: diff(samples.bert(), samples.bert(), c), 80)
    assert "the same at all 133 sites" in text
    assert "the same goal, model, target and backend" in text


def test_diff_lists_sites_that_only_one_plan_has() -> None:
    extra = Decision(
        site="extra", kind="linear", option="w4", baseline="fp32", by="q", cost=Cost(), baseline_cost=Cost()
    )
    text = render(
        lambda c: diff(samples.bert(), samples.bert(decisions=(*samples.decisions(), extra)), c), 80
    )
    assert "only in b" in text
    assert "only in a" not in text
    assert "the same at 133 other sites" in text


def test_diff_never_compares_measured_with_predicted() -> None:
    text = render(lambda c: diff(samples.bert(), samples.planned_only(), c), 80)
    time = next(line for line in text.splitlines() if line.startswith(" time"))
    assert time.split() == ["time", "44.1", "ms", "44.1", "ms", "1.00×", "predicted"]
