"""The report layer: formats a Plan for terminals and browsers.

It prices nothing and imports no torch; each part loads at its first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from effcompile.report.differences import diff
    from effcompile.report.explanations import explain, find_site
    from effcompile.report.findings import print_findings
    from effcompile.report.frontier import print_frontier, print_side_by_side
    from effcompile.report.html import frontier_html, html_report
    from effcompile.report.infeasible import flag, print_infeasible
    from effcompile.report.limits import print_what_if, what_if
    from effcompile.report.page import printable
    from effcompile.report.passes import print_passes
    from effcompile.report.progress import ProgressSteps, Shown
    from effcompile.report.questions import TOP, curve, print_curve, print_ranked, ranked
    from effcompile.report.sparsity import print_sparsity
    from effcompile.report.targets import targets_table
    from effcompile.report.terminal import print_plan

_HOME = {
    "diff": "differences",
    "explain": "explanations",
    "find_site": "explanations",
    "print_findings": "findings",
    "print_frontier": "frontier",
    "print_side_by_side": "frontier",
    "frontier_html": "html",
    "html_report": "html",
    "flag": "infeasible",
    "print_infeasible": "infeasible",
    "print_passes": "passes",
    "Shown": "progress",
    "ProgressSteps": "progress",
    "TOP": "questions",
    "curve": "questions",
    "print_curve": "questions",
    "print_ranked": "questions",
    "print_what_if": "limits",
    "ranked": "questions",
    "what_if": "limits",
    "print_sparsity": "sparsity",
    "targets_table": "targets",
    "print_plan": "terminal",
    "printable": "page",
}

__all__ = [
    "TOP",
    "ProgressSteps",
    "Shown",
    "curve",
    "diff",
    "explain",
    "find_site",
    "flag",
    "frontier_html",
    "html_report",
    "print_curve",
    "print_findings",
    "print_frontier",
    "print_infeasible",
    "print_passes",
    "print_plan",
    "print_ranked",
    "print_side_by_side",
    "print_sparsity",
    "print_what_if",
    "printable",
    "ranked",
    "targets_table",
    "what_if",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'effcompile.report' has no attribute {name!r}")
    value = getattr(import_module(f"effcompile.report.{_HOME[name]}"), name)
    globals()[name] = value
    return value
