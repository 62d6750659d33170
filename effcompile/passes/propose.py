"""All passes' proposals as one consistent problem for the planner."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from effcompile.core.reasons import Requires
from effcompile.core.stages import stage, without
from effcompile.ir.program import Program
from effcompile.passes.base import Choice, Context, Declined, Option, Pass

#: What a site may be said to have when no pass proposes there: an excluded `quantize` leaves every linear at
#: fp32, `merge` all separate.
_UNPLANNED = ("fp32", "separate")


def propose_all(
    passes: Iterable[Pass], program: Program, context: Context
) -> tuple[list[Choice], list[Declined]]:
    """The choices and refusals of all passes; choices of one site are joined, and every `requires` names
    offered options.

    An option whose requirement nobody offers becomes a Declined. A requirement on a site where no pass
    proposes is dropped when what is there without one fulfils it.
    """
    choices: dict[str, Choice] = {}
    declined: list[Declined] = []
    for each in passes:
        with stage(f"pass {each.name}", without(each.name)):
            proposed = list(each.propose(program, context))
        for item in proposed:
            if isinstance(item, Declined):
                declined.append(item)
            elif item.site in choices:
                choices[item.site] = _joined(choices[item.site], item)
            else:
                choices[item.site] = item
    while True:  # a dropped option may be what another one requires
        offered = {site: tuple(o.name for o in choice.options) for site, choice in choices.items()}
        refused = [
            d for choice in choices.values() for o in choice.options if (d := _refusal(choice, o, offered))
        ]
        if not refused:
            return [_with_offered(choice, offered) for choice in choices.values()], declined
        declined += refused
        gone = {(d.site, d.option) for d in refused}
        for site, choice in choices.items():
            choices[site] = replace(
                choice, options=tuple(o for o in choice.options if (site, o.name) not in gone)
            )


def _joined(first: Choice, second: Choice) -> Choice:
    names = {o.name for o in first.options}
    options = (*first.options, *(o for o in second.options if o.name not in names))
    return replace(first, options=options, covers=first.covers | second.covers)


def _refusal(choice: Choice, option: Option, offered: Mapping[str, tuple[str, ...]]) -> Declined | None:
    """Why an option cannot be taken, its requirements being what they are; the baseline always can."""
    if option.name == choice.baseline:
        return None
    for site, allowed in option.requires.items():
        if not set(offered.get(site, _UNPLANNED)) & set(allowed):
            reason = Requires(site=site, options=allowed, offered=False)
            return Declined(
                site=choice.site,
                kind=choice.kind,
                option=option.name,
                by=option.by,
                reason=reason,
                cost=option.cost,
            )
    return None


def _with_offered(choice: Choice, offered: Mapping[str, tuple[str, ...]]) -> Choice:
    """The choice with its requirements cut down to what is offered."""
    options = []
    for option in choice.options:
        requires = {
            site: tuple(a for a in allowed if a in offered[site])
            for site, allowed in option.requires.items()
            if site in offered
        }
        options.append(replace(option, requires=requires))
    return replace(choice, options=tuple(options))
