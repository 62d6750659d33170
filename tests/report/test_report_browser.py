"""The HTML report in a real browser, where there is one: no horizontal scroll at 390 px, readable text,
sorting, no errors.
"""

import json
import os
import re
import shutil
import subprocess
from html import escape
from pathlib import Path

import pytest
import samples
import training_samples

from effcompile.ir.plan import Plan
from effcompile.report import html_report

BROWSER = os.environ.get("CHROMIUM") or next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
#: Headless windows are at least 500 px wide: the report stands in a frame of the width asked for, which is
#: asked when it has loaded.
PROBE = """
<body><iframe width="WIDTH" height="1200" style="border:0" srcdoc="DOCUMENT"></iframe><script>
onload = () => {
  const frame = document.querySelector("iframe"), page = frame.contentDocument, view = frame.contentWindow;
  const sizes = [];
  for (const e of page.querySelectorAll("body *")) {
    const own = [...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim());
    if (!own || ["SCRIPT", "STYLE", "TITLE"].includes(e.tagName.toUpperCase())) continue;
    if (!e.getClientRects().length) continue;  // of another width
    const drawn = e.ownerSVGElement;
    const scale = drawn ? drawn.getBoundingClientRect().width / drawn.viewBox.baseVal.width : 1;
    sizes.push(parseFloat(view.getComputedStyle(e).fontSize) * scale);
  }
  const parts = [...page.querySelectorAll(".scroll, figure")].filter(e => e.querySelector(
    ".rows, table, svg.wide"));
  const cut = parts.filter(e => e.scrollWidth > e.clientWidth).map(e => e.textContent.slice(0, 40));
  const heads = [...page.querySelectorAll(".rows .sorts")], last = heads[heads.length - 1];
  const rows = () => [...page.querySelectorAll(".rows > details")];
  const shown = () => rows().map(e => e.querySelector("summary").lastElementChild.textContent);
  last.click();
  const down = shown();
  last.click();
  document.title = JSON.stringify({
    wide: page.documentElement.scrollWidth, least: Math.min(...sizes), errors: view.errors, down, cut,
    up: shown(), copies: page.querySelectorAll("button").length});
};
</script></body>
"""


@pytest.mark.skipif(BROWSER is None, reason="no Chromium here; set CHROMIUM to one")
@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("plan", [samples.bert(), training_samples.gpt2()], ids=["inference", "training"])
def test_in_a_browser(plan: Plan, width: int, tmp_path: Path) -> None:
    heard = "<script>window.errors = []; window.onerror = said => { errors.push(said); };</script>"
    document = html_report(plan).replace("<head>", f"<head>{heard}")
    (tmp_path / "probe.html").write_text(
        PROBE.replace("WIDTH", str(width)).replace("DOCUMENT", escape(document)), encoding="utf-8"
    )
    command = [
        str(BROWSER),
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={tmp_path / 'profile'}",
    ]
    address = (tmp_path / "probe.html").as_uri()
    done = subprocess.run(
        [*command, "--window-size=1400,1200", "--virtual-time-budget=5000", "--dump-dom", address],
        check=False, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    told = re.search(r"<title>(\{.*?\})</title>", done.stdout)
    assert told, done.stderr[-2000:]
    found = json.loads(told[1])
    assert found["errors"] == []
    assert found["wide"] <= width
    assert found["least"] >= 11
    assert found["cut"] == []  # decisions, bars and reasons are there without scrolling within a part
    assert found["copies"] >= 1
    assert sorted(found["down"]) == sorted(found["up"])
    assert found["down"] != found["up"]
