"""The commands that read what was saved: `explain`, `diff`, and `targets`. They need no torch."""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Annotated

import typer

from effcompile import console, report
from effcompile.cli.options import AsJson, PlanFile, Verbose
from effcompile.core.errors import UsageError
from effcompile.ir.plan import Plan

if TYPE_CHECKING:
    from effcompile.machine.target import Target


def explain(
    plan: PlanFile,
    site: Annotated[
        str | None,
        typer.Argument(metavar="[SITE]", help="A site, or a part of its name; without it, all sites."),
    ] = None,
    by: Annotated[
        str | None, typer.Option(metavar="time|error|memory", help="The sites that take most of it, first.")
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="How many rows of --by.")] = 12,
    what_if: Annotated[
        str | None,
        typer.Option(
            "--if", metavar="LIMIT=CHANGE", help="What another limit would change: memory=+10%, error=-20%."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Why this choice, and why not another; where time, error and memory go; what another limit
    would change.
    """
    if sum(given is not None for given in (site, by, what_if)) > 1:
        raise UsageError("SITE, --by and --if are one question each: give one of them.")
    loaded = Plan.load(plan)
    if by is not None:
        console.emit(
            [asdict(item) for item in report.ranked(loaded, by)[:top]]
        ) if as_json else report.print_ranked(loaded, by, top)
        return
    if what_if is not None:
        console.emit(report.what_if(loaded, what_if).data()) if as_json else report.print_what_if(
            loaded, what_if
        )
        return
    if not as_json:
        report.explain(loaded, site)
        return
    name = None if site is None else report.find_site(loaded, site)
    data = loaded.to_dict()
    console.emit(
        {
            part: [entry for entry in data[part] if name in (None, entry["site"])]
            for part in ("decisions", "declined")
        }
    )


def diff(a: PlanFile, b: PlanFile, as_json: AsJson = False) -> None:
    """How two plans differ: goals, totals, decisions."""
    left, right = Plan.load(a), Plan.load(b)
    if not as_json:
        report.diff(left, right)
        return
    was, now = left.options(), right.options()
    sites = [site for site in {**was, **now} if was.get(site) != now.get(site)]
    sides = {
        name: {key: plan.to_dict()[key] for key in _COMPARED} for name, plan in (("a", left), ("b", right))
    }
    console.emit(
        {**sides, "decisions": [{"site": site, "a": was.get(site), "b": now.get(site)} for site in sites]}
    )


_COMPARED = ("model", "fingerprint", "goal", "target", "backend", "predicted", "measured")


def targets(verbose: Verbose = False, as_json: AsJson = False) -> None:
    """The machines that effcompile has figures of."""
    from effcompile.machine.machines import known_targets, load_target

    known = [load_target(name) for name in known_targets()]
    if as_json:
        console.emit([_target_data(target) for target in known])
    else:
        report.targets_table(known, verbose=verbose)


def _target_data(target: Target) -> dict[str, object]:
    """A target's figures; measured laws and the probe are not for reading."""
    return {f.name: getattr(target, f.name) for f in fields(target) if f.name not in ("laws", "probe")}
