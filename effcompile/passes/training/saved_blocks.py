"""What a saved plan took in its blocks, read from its decisions: applying it again solves nothing.

Each decision carries the settings that its option stands for. They may come from a file that somebody
changed, so each is checked here, and what they ask for is checked against the step that they are applied to.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from effcompile.core.errors import FormatError
from effcompile.ir.plan import Decision, Plan, Setting
from effcompile.passes import ways
from effcompile.passes.training.base import setting_of
from effcompile.planner.remat import BlockOption, Group
from effcompile.schedules.away import movable
from effcompile.schedules.blocks import Block, Blocks

T = TypeVar("T", bound=Setting)


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedValues:
    """What one block holds from forward to backward: what is kept, what in which form, the block its input is
    remade from ("" for none).
    """

    kept: tuple[str, ...]
    remade_from: str
    forms: Mapping[str, str] = field(default_factory=dict)


def chosen(cut: Blocks, blocks: Mapping[str, SavedValues]) -> tuple[list[BlockOption], tuple[Group, ...]]:
    """The options and groups of a saved schedule, for the blocks of this step.

    Raises:
        FormatError: they do not fit these blocks.
    """
    if set(blocks) != {block.name for block in cut.blocks}:
        raise FormatError(
            "The plan's decisions name other blocks than this model has. Plan again without --plan."
        )
    options = [_option(cut, block, blocks[block.name]) for block in cut.blocks]
    return options, _groups(
        [blocks[block.name].remade_from for block in cut.blocks], [block.name for block in cut.blocks]
    )


def _option(cut: Blocks, block: Block, held: SavedValues) -> BlockOption:
    _all_known(held.kept, block.problem.nbytes, f"keeps {{!r}} in {block.name}, which it does not make")
    able = movable(cut, block) if held.forms else {}
    _all_known(held.forms, able, f"holds {{!r}} of {block.name} elsewhere, which cannot be")
    return BlockOption(
        kept=frozenset(held.kept), recomputed=(), kept_bytes=0, forward_peak=0, backward_peak=0, seconds=0.0,
        forms=dict(held.forms)
    )  # fmt: skip


def _all_known(names: Collection[str], known: Collection[str], said: str) -> None:
    unknown = [name for name in names if name not in known]
    if unknown:
        raise FormatError(f"The plan's schedule {said.format(unknown[0])}. Plan again, or restore the file.")


def _groups(origins: Sequence[str], names: Sequence[str]) -> tuple[Group, ...]:
    """Runs of blocks whose inputs are remade from one block before them."""
    found: list[Group] = []
    for i, origin in enumerate(origins):
        if not origin:
            continue
        before = found[-1] if found and found[-1].last == i - 1 and names[found[-1].first] == origin else None
        first = before.first if before else i - 1
        if first < 0 or names[first] != origin:
            raise FormatError(
                f"The plan remakes the input of {names[i]} from {origin!r}: a run of blocks before it is "
                "wanted. Plan again."
            )
        found[len(found) - bool(before) :] = [Group(first=first, last=i)]
    return tuple(found)


def held(plan: Plan) -> dict[str, SavedValues]:
    """What each block holds, from the decisions.

    Raises:
        FormatError: a decision without its settings, or with others.
    """
    by_kind: dict[str, list[Decision]] = {}
    for decision in plan.decisions:
        by_kind.setdefault(decision.kind, []).append(decision)
    forms: dict[str, dict[str, str]] = {}
    for kind in ways():
        for decision in by_kind.get(kind, ()):
            forms.setdefault(decision.site, {}).update(dict.fromkeys(_names(decision, "values"), kind))
    blocks = {
        d.site: SavedValues(
            kept=_names(d, "keep"), remade_from=_setting(d, "remade_from", str), forms=forms.pop(d.site, {})
        )
        for d in by_kind.get("checkpoint", ())
    }
    if forms:
        raise FormatError(
            f"The plan holds values of {next(iter(forms))!r} elsewhere, which is no block of it. Plan again."
        )
    return blocks


def _names(decision: Decision, name: str) -> tuple[str, ...]:
    return _setting(decision, name, tuple)


def _setting(decision: Decision, name: str, kind: type[T]) -> T:
    """One setting of a decision.

    Raises:
        FormatError: it is not there, or of another type.
    """
    return setting_of(decision.settings, f"{decision.option!r} at {decision.site!r}", name, kind)
