"""The commands that read what was saved: `explain`, `diff`, and `targets`. They need no torch."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Annotated, Any

import typer

from effcompile import console, report
from effcompile.cli.options import AsJson, PlanFile, Verbose
from effcompile.ir.plan import Plan

if TYPE_CHECKING:
    from effcompile.machine.target import Target


def explain(
    plan: PlanFile,
    site: Annotated[str | None, typer.Argument(metavar="[SITE]", help="A site, or a part of its name; without it, all sites.")] = None,
    as_json: AsJson = False,
) -> None:
    """Why this choice, and why not another."""
    loaded = Plan.load(plan)
    if not as_json:
        report.explain(loaded, site)
        return
    name = None if site is None else report.find_site(loaded, site)
    data = loaded.to_dict()
    console.emit({part: [entry for entry in data[part] if name in (None, entry["site"])] for part in ("decisions", "declined")})


def diff(a: PlanFile, b: PlanFile, as_json: AsJson = False) -> None:
    """How two plans differ: goals, totals, decisions."""
    left, right = Plan.load(a), Plan.load(b)
    if not as_json:
        report.diff(left, right)
        return
    was, now = left.options(), right.options()
    sites = [site for site in {**was, **now} if was.get(site) != now.get(site)]
    sides = {name: {key: plan.to_dict()[key] for key in _COMPARED} for name, plan in (("a", left), ("b", right))}
    console.emit({**sides, "decisions": [{"site": site, "a": was.get(site), "b": now.get(site)} for site in sites]})


_COMPARED = ("model", "fingerprint", "goal", "target", "backend", "predicted", "measured")


def targets(verbose: Verbose = False, as_json: AsJson = False) -> None:
    """The machines that effcompile has figures of."""
    from effcompile.machine.machines import known_targets, load_target

    known = [load_target(name) for name in known_targets()]
    if as_json:
        console.emit([_target_data(target) for target in known])
    else:
        report.targets_table(known, verbose=verbose)


def _target_data(target: Target) -> dict[str, Any]:
    """A target's figures; measured laws and the probe are not for reading."""
    return {f.name: getattr(target, f.name) for f in fields(target) if f.name not in ("laws", "probe")}
