"""Fewer hidden neurons and fewer attention heads: whole structures pruned, so that every backend runs smaller
dense layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from effcompile.core.cost import Cost, total
from effcompile.core.errors import LoweringError, UnknownNameError, UsageError
from effcompile.core.reasons import Because, NotMeasured, Reason, Unsupported
from effcompile.ir.formats import FP32, Form, WeightFormat
from effcompile.ir.plan import Plan
from effcompile.ir.program import Program
from effcompile.passes.base import Choice, Context, Declined, Option, Pass
from effcompile.passes.merge import MERGED, SEPARATE, merge_cost
from effcompile.passes.pricing import EVERYWHERE, no_error_allowed, no_kernel, price_linear
from effcompile.passes.prunable_groups import Structure, cut, structures
from effcompile.passes.quantize import stored_bytes
from effcompile.passes.structure_cuts import (
    Cut,
    by_mask,
    has_empty_columns,
    share_gone,
    without_unread,
    worth,
)
from effcompile.passes.weight_saliency import SALIENCIES, SaliencyScores, check_shares, load_masks
from effcompile.sites.parts import LinearSite, MergeSite, merges, weight_of

BASELINE = "all"
#: Neurons are kept in multiples of this, for vector units, and as w4 and w8 have groups along them; of few
#: neurons in an eighth of them.
_STEP = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Shrink(Pass):
    """Options `-25%`: that share of the hidden neurons of a feed-forward (kind "neurons"), or of the heads of
    an attention ("heads"), goes.

    Rows of the linears that make a neuron and columns of those that read it go together (prunable_groups.py);
    of grouped-query attention whole groups go. What is left is dense and smaller: no kernel of its own is
    needed. The price depends on the members' precision and on whether they are merged, which other passes
    choose, so there is an option for each, which requires it of them all (`-25% merged@int8_dynamic`); what
    attention and element-wise operators save is not counted. Units whose columns are all 0 are offered to go
    exactly. All else changes results: it is asked for, and its error is measured with the columns at 0.

    Attributes:
        neurons: shares of the hidden neurons to remove, each in [0, 1); the solve chooses one at each place,
            or none.
        heads: the same for attention heads.
        saliency: "magnitude", "wanda" or "snip" (weight_saliency.py), summed over a unit; or "given": only by
            `masks`.
        sites: patterns of structures, or of their linears; none: all inside repeated blocks.
        masks: file of `torch.save({structure: mask (units)})` that says which units to keep.
    """

    neurons: tuple[float, ...] = ()
    heads: tuple[float, ...] = ()
    saliency: str = "magnitude"
    sites: tuple[str, ...] = ()
    masks: str = ""

    name: ClassVar[str] = "shrink"
    exact: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_shares(self.neurons, "shrink.neurons", "hidden neurons")
        check_shares(self.heads, "shrink.heads", "attention heads")
        if self.saliency not in SALIENCIES:
            raise UnknownNameError("saliency", self.saliency, SALIENCIES)
        if (self.saliency == "given") != bool(self.masks) or (self.masks and (self.neurons or self.heads)):
            raise UsageError(
                "shrink.masks says which units to keep: it goes with saliency=given and without neurons "
                "or heads."
            )

    def propose(self, program: Program, context: Context) -> Iterable[Choice | Declined]:
        found = self._cuts(program)
        asked = [
            (kind, share)
            for kind, shares in (("neurons", self.neurons), ("heads", self.heads))
            for share in shares
            if share
        ]
        for kind, share in asked:
            if context.goal.exact:
                yield no_error_allowed(kind, Form(pruned=share).name, self.name)
            elif not any(structure.kind == kind for structure, _ in found):
                yield Declined(
                    site=EVERYWHERE,
                    kind=kind,
                    option=Form(pruned=share).name,
                    by=self.name,
                    reason=Unsupported(_NOTHING[kind]),
                )
        merged = merges(program)
        for structure, cuts in found:
            possible = [each for each in cuts if each.given or not context.goal.exact]
            if structure.refused:
                yield from (_declined(structure, each.option, structure.refused) for each in possible)
                continue
            options = [Option(form=Form(word=BASELINE), cost=Cost(), by=self.name)]
            for each in possible:
                for item in self._options(context, structure, each, _inside(structure, merged)):
                    if isinstance(item, Option):
                        options.append(item)
                    else:
                        yield item
            if len(options) > 1:
                yield Choice(
                    site=structure.site, kind=structure.kind, baseline=BASELINE, options=tuple(options)
                )

    def replaced_weights(self, program: Program) -> dict[tuple[str, str], Callable[[], Tensor]]:
        """(linear that reads, option) → its weight with the removed columns at 0, for those whose error has
        to be measured.
        """
        return {
            (site.site, _measured(structure, each)): _without(program, site, units, each)
            for structure, cuts in self._cuts(program)
            if not structure.refused
            for each in cuts
            if not each.given
            for site, units in structure.reads
        }

    def apply(self, program: Program, plan: Plan) -> Program:
        """Smaller weights and sizes, and tags.

        Raises:
            LoweringError: a structure that this model does not have, or cannot be cut so with these settings.
        """
        chosen = {site: form for site, form in plan.forms().items() if form.pruned}
        if not chosen:
            return program.tagged({}, self.name)
        edited = program.editable(self.name)
        left = dict(chosen)
        for structure, cuts in self._cuts(edited):
            wanted = left.pop(structure.site, None)
            each = next((each for each in cuts if wanted is not None and each.share == wanted.pruned), None)
            if wanted is not None and (each is None or structure.refused):
                raise _not_there(structure.site, wanted.name)
            if each is not None:
                cut(edited, structure, each.keep())
        for site, wanted in left.items():
            raise _not_there(site, wanted.name)
        edited.graph.lint()
        edited.module.recompile()
        return replace(edited, tags={**program.tags, **chosen})

    # ------------------------------------------------------------------ what is possible

    def _cuts(self, program: Program) -> list[tuple[Structure, list[Cut]]]:
        """Every structure with ways to shrink it, those that change no result first."""
        if not (self.neurons or self.heads or self.masks) and not has_empty_columns(program):
            return []
        known = structures(program)
        asked = {structure.site for structure in self._asked(known)}
        masks = load_masks(Path(self.masks), "shrink.masks") if self.masks else {}
        if unknown := sorted(set(masks) - {structure.site for structure in known}):
            raise UnknownNameError("structure", unknown[0], [structure.site for structure in known])
        result = []
        for structure in known:
            found = [] if structure.refused else without_unread(program, structure)
            if structure.site in masks:
                found.append(by_mask(structure, masks[structure.site]))
            elif structure.site in asked and not self.masks:
                found += self._pruned(program, structure)
            unique = {each.option: each for each in reversed(found) if each.kept < structure.count}
            if unique or structure.site in asked:
                result.append((structure, list(reversed(unique.values()))))
        return result

    def _asked(self, known: Sequence[Structure]) -> list[Structure]:
        """The structures that patterns name, else all below a numbered module."""

        def names(structure: Structure) -> list[str]:
            return [structure.site, *(member.site for member in structure.members)]

        for pattern in self.sites:
            if not any(fnmatchcase(name, pattern) for structure in known for name in names(structure)):
                raise UnknownNameError("structure", pattern, [structure.site for structure in known])
        if self.sites:
            return [
                s
                for s in known
                if any(fnmatchcase(name, pattern) for name in names(s) for pattern in self.sites)
            ]
        return [s for s in known if any(part.isdigit() for part in s.site.partition(":")[0].split("."))]

    def _pruned(self, program: Program, structure: Structure) -> Iterator[Cut]:
        """The best units by their saliency; it is measured when the first is asked for."""
        step = (
            math.gcd(structure.count, _STEP, max(1, structure.count // 8))
            if structure.kind == "neurons"
            else 1
        )
        scores = SaliencyScores(program, self.saliency, structure.members)
        for share in self.neurons if structure.kind == "neurons" else self.heads:
            kept = max(step, round(structure.count * (1 - share) / step) * step)

            def keep(kept: int = kept) -> Tensor:
                mask = torch.zeros(structure.count, dtype=torch.bool)
                mask[worth(structure, scores).topk(kept).indices] = True
                return mask

            yield Cut(share=share_gone(structure, kept), kept=kept, given=False, keep=keep)

    # ------------------------------------------------------------------ what it costs

    def _options(
        self, context: Context, structure: Structure, each: Cut, merged: Sequence[MergeSite]
    ) -> Iterator[Option | Declined]:
        """One for each precision of its linears, separate and merged."""
        errors = [
            0.0 if each.given else context.sensitivity.get((site.site, _measured(structure, each)))
            for site, _ in structure.reads
        ]
        known = [error for error in errors if error is not None]
        if len(known) < len(errors):
            yield _declined(structure, each.option, NotMeasured())
            return
        for held in context.formats:
            if held != FP32 and any(
                context.sensitivity.get((site.site, held.name)) is None for site in structure.members
            ):
                continue  # nobody offers it
            for groups in ((), merged) if merged else ((),):
                form = Form(word=MERGED if groups else "", weights=held, pruned=each.share)
                cost = _cost(context, structure, each.kept, held, groups)
                if cost is None:
                    if held == FP32:
                        yield _declined(structure, form.name, no_kernel(context, "linear/fp32"))
                    continue
                cost = replace(cost, error_squared=sum(known))
                wanted = context.goal.minimize == "memory" or context.goal.memory is not None
                if cost.seconds >= 0 and not wanted:
                    yield _declined(
                        structure,
                        form.name,
                        Unsupported("no gain here: the smaller layers are not faster"),
                        cost,
                    )
                else:
                    together = Form(word=MERGED, weights=held) if groups else Form(word=SEPARATE)
                    requires = {site.site: (held.name,) for site in structure.members}
                    requires |= {group.site: (together.name,) for group in merged}
                    note = Because("{} of {} stay", (each.kept, structure.count))
                    yield Option(form=form, cost=cost, by=self.name, note=note, requires=requires)


#: kind → what is said where there is none.
_NOTHING = {
    "neurons": "no linears were found with nothing but element-wise operators between them",
    "heads": "no attention was found that reads linears and is read by one, with nothing between that "
    "mixes heads",
}


def _cost(
    context: Context, structure: Structure, kept: int, held: WeightFormat, groups: Sequence[MergeSite]
) -> Cost | None:
    """What shrinking adds to the linears' own costs, negative; None where there is no such kernel, or the
    rest cannot be grouped.
    """
    before, after = structure.members, structure.shrunk(kept)
    if held.group and any(new.k % held.group for new in after):
        return None
    smaller = {site.site: site for site in after}
    costs: list[Cost | None] = []
    for old, new in zip(before, after, strict=True):
        costs += [price_linear(context, held, new.dims), _negative(price_linear(context, held, old.dims))]
    for group in groups:
        shrunk = replace(group, members=tuple(smaller[member.site] for member in group.members))
        costs += [merge_cost(shrunk, held, context), _negative(merge_cost(group, held, context))]
    known = [cost for cost in costs if cost is not None]
    if len(known) < len(costs):
        return None
    size = sum(_bytes(new, held) - _bytes(old, held) for old, new in zip(before, after, strict=True))
    return replace(total(known), weight_bytes=size, error_squared=0.0)


def _negative(cost: Cost | None) -> Cost | None:
    return None if cost is None else replace(cost, seconds=-cost.seconds, roof_seconds=-cost.roof_seconds)


def _bytes(site: LinearSite, held: WeightFormat) -> int:
    """Of the weight as stored and the bias."""
    return stored_bytes(site, held) + (4 * site.n if site.bias is not None else 0)


def _inside(structure: Structure, groups: Sequence[MergeSite]) -> list[MergeSite]:
    """The merges of a structure's linears, all or none: where one has other members too, only separate
    linears are priced.
    """
    names = {site.site for site in structure.members}
    touching = [group for group in groups if names & {member.site for member in group.members}]
    return touching if all(names >= {member.site for member in group.members} for group in touching) else []


def _measured(structure: Structure, each: Cut) -> str:
    """What an option is called among the sensitivities of a linear, which may be read by one structure and
    make another.
    """
    return f"{structure.site} {each.option}"


def _without(program: Program, site: LinearSite, units: Tensor, each: Cut) -> Callable[[], Tensor]:
    return lambda: weight_of(program, site) * each.keep()[units]


def _declined(structure: Structure, option: str, reason: Reason, cost: Cost | None = None) -> Declined:
    return Declined(
        site=structure.site, kind=structure.kind, option=option, by=Shrink.name, reason=reason, cost=cost
    )


def _not_there(site: str, option: str) -> LoweringError:
    return LoweringError(
        f"The plan has {site} as {option}, which this model and these settings do not make. "
        "Give the weights and the --pass shrink settings that the plan was made with."
    )
