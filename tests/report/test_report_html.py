"""The HTML report: well formed, self-contained, escaped, and with the figures of the plan."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest
import samples

from effcompile.core.reasons import Because
from effcompile.ir.plan import Plan
from effcompile.report import html_report

VOID = {"meta", "line", "rect", "br"}
PLANS = {
    name: getattr(samples, name)()
    for name in ("bert", "planned_only", "exact", "exact_failed", "nothing_to_decide")
}


class Checker(HTMLParser):
    """Collects text and tags; fails on tags that do not nest."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        assert not any(name in ("src", "href") or name.startswith("on") for name, _ in attrs), (tag, attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def parse(plan: Plan) -> Checker:
    checker = Checker()
    checker.feed(html_report(plan))
    checker.close()
    assert checker.open == []
    return checker


@pytest.mark.parametrize("name", PLANS)
def test_nests_and_needs_no_network(name: str) -> None:
    checker = parse(PLANS[name])
    assert checker.tags.count("script") <= 1
    assert "link" not in checker.tags
    assert not re.search(r"https?://|@import|url\(", html_report(PLANS[name]))


def test_texts_of_the_plan_are_escaped() -> None:
    hostile = "<img src=x onerror=alert(1)>\"'&"
    plan = samples.bert(
        model=hostile,
        target_line=hostile,
        notes=(Because(hostile),),
        inputs=(hostile,),
        settings={hostile: hostile},
    )
    checker = parse(plan)
    assert "img" not in checker.tags
    assert checker.text.count(hostile) >= 3


def test_every_site_is_there_under_its_group() -> None:
    checker = parse(PLANS["bert"])
    text = set(checker.text)
    assert {d.site for d in PLANS["bert"].decisions} <= text
    assert checker.tags.count("summary") == checker.tags.count("details") > 0


def test_light_and_dark() -> None:
    assert "prefers-color-scheme:dark" in html_report(PLANS["bert"])


def test_charts_only_of_what_is_known() -> None:
    """Each is drawn twice: for a phone, and for what is wider."""
    assert parse(PLANS["bert"]).tags.count("svg") == 2 * 3
    assert parse(PLANS["exact"]).tags.count("svg") == 2 * 2  # an exact goal has no error budget
    assert parse(PLANS["nothing_to_decide"]).tags.count("svg") == 2 * 1


@pytest.mark.parametrize("width", ["wide", "narrow"])
def test_time_bars_are_as_long_as_the_totals(width: str) -> None:
    """Widths of one bar's segments sum to its total on the scale that the other bar gives."""
    figure = (
        html_report(PLANS["bert"]).split("<figure>")[1].split(f'<svg class="{width}"')[1].split("</svg>")[0]
    )
    before, after = figure.split('text-anchor="end">after')
    lengths = [
        sum(float(w) + 1.5 for w in re.findall(r'<rect[^>]* width="([\d.]+)"', part) if w != "0.5")
        for part in (before, after)
    ]
    assert lengths[1] / lengths[0] == pytest.approx(44.1 / 168, rel=0.02)


def test_a_plan_is_printed_as_its_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("FORCE_COLOR", "1")
    shown = str(samples.bert())
    assert "least time" in shown
    assert "\x1b" not in shown
    assert max(map(len, shown.splitlines())) <= 80


def test_plans_in_a_list_are_a_line_each() -> None:
    shown = repr([samples.bert(), samples.bert(measured=None)])
    first, second = shown.removeprefix("[").removesuffix("]").split(", <")
    assert first.startswith("<Plan of BertModel for inference: onnxruntime, 45.8 ms measured, peak ")
    assert "ms predicted" in second and len(shown) < 250


def test_a_notebook_shows_the_report() -> None:
    """What a cell's value is shown as: the printed report, its texts escaped."""
    shown = samples.bert(model="<b>Bert</b>")._repr_html_()
    checker = Checker()
    checker.feed(shown)
    assert checker.open == []
    assert "b" not in checker.tags
    assert "least time" in "".join(checker.text)
