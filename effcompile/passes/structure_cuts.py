"""The ways to shrink a structure: which of its neurons or heads stay."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from effcompile.core import torch_compat
from effcompile.core.errors import UsageError
from effcompile.ir.formats import Form
from effcompile.ir.program import Program
from effcompile.passes.prunable_groups import Structure
from effcompile.passes.weight_saliency import SaliencyScores
from effcompile.sites.parts import LinearSite, linears, weight_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """One way to shrink a structure: `kept` of its units; `given`: the others change no result, as nothing
    reads them.
    """

    share: float  # of the units, that goes
    kept: int
    given: bool
    keep: Callable[[], Tensor]

    @property
    def option(self) -> str:
        return Form(pruned=self.share).name


def worth(structure: Structure, scores: SaliencyScores) -> Tensor:
    """What each unit is worth, (U): the saliency of its rows and its columns, summed.

    Of Wanda's only the columns': they weigh what the unit puts out, whereas its rows may be large and the
    unit still never fire.
    """
    found = torch.zeros(structure.count)
    for site, units in structure.makes if scores.how != "wanda" else ():
        found.index_add_(0, units, scores.of(site).float().sum(1))
    for site, units in structure.reads:
        found.index_add_(0, units, scores.of(site).float().sum(0))
    return found


# ---------------------------------------------------------------- which units stay


def share_gone(structure: Structure, kept: int) -> float:
    """The part of the units that goes."""
    return 1 - kept / structure.count


def has_empty_columns(program: Program) -> bool:
    """Whether some linear has columns that are all 0."""
    return any(
        _has_empty_column(weight_of(program, site)) for site in linears(program) if not _fake(program, site)
    )


def _has_empty_column(weight: Tensor) -> bool:
    """Whether a column is all 0; where the first row has no 0, nothing else is read."""
    empty = weight[0] == 0
    return bool(empty.any()) and bool((weight[:, empty] == 0).all(0).any())


def _fake(program: Program, site: LinearSite) -> bool:
    return torch_compat.is_fake(weight_of(program, site))


def without_unread(program: Program, structure: Structure) -> list[Cut]:
    """Without the units that nobody reads: all their columns are 0."""
    if any(_fake(program, site) for site, _ in structure.reads):
        return []
    read = torch.zeros(structure.count, dtype=torch.bool)
    for site, units in structure.reads:
        read[units[(weight_of(program, site) != 0).any(0)]] = True
    if not read.any():
        read[0] = True
    return [
        Cut(share=share_gone(structure, int(read.sum())), kept=int(read.sum()), given=True, keep=lambda: read)
    ]


def by_mask(structure: Structure, mask: Tensor) -> Cut:
    """The units that a mask keeps.

    Raises:
        UsageError: it is of another number of units, or keeps none.
    """
    if mask.shape != (structure.count,) or not mask.any():
        raise UsageError(
            f"A mask of {tuple(mask.shape)} that keeps {int(mask.count_nonzero())} is given where "
            f"{structure.site} has {structure.count} {structure.kind}: it must be ({structure.count},) and "
            "keep one at least. A mask for another model?"
        )
    kept = int(mask.count_nonzero())
    return Cut(share=share_gone(structure, kept), kept=kept, given=False, keep=lambda: mask != 0)
