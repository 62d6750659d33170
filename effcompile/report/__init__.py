"""The report layer: formats a Plan for terminals and browsers. It prices nothing and imports no torch."""

from __future__ import annotations

from effcompile.report.diff import diff
from effcompile.report.explain import explain, find_site
from effcompile.report.frontier import print_frontier, print_side_by_side
from effcompile.report.html import frontier_html, html_report
from effcompile.report.infeasible import flag, print_infeasible
from effcompile.report.progress import Steps
from effcompile.report.questions import TOP, curve, print_curve, print_ranked, print_what_if, ranked, what_if
from effcompile.report.sparsity import print_sparsity
from effcompile.report.targets import targets_table
from effcompile.report.terminal import print_plan

__all__ = [
    "TOP",
    "Steps",
    "curve",
    "diff",
    "explain",
    "find_site",
    "flag",
    "frontier_html",
    "html_report",
    "print_curve",
    "print_frontier",
    "print_infeasible",
    "print_plan",
    "print_ranked",
    "print_side_by_side",
    "print_sparsity",
    "print_what_if",
    "ranked",
    "targets_table",
    "what_if",
]
