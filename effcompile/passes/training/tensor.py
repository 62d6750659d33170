"""Tensor parallelism as a form of the step: heads and neurons divided among `ranks`, each of which runs the
same examples (split.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

from effcompile.core.errors import EffcompileError, FormatError, UsageError
from effcompile.core.reasons import Because
from effcompile.ir.plan import Declined
from effcompile.ir.step import Spread, Step
from effcompile.passes.training.base import Case, RequestError, StepChoice, StepContext, StepOption
from effcompile.passes.training.split import Split

__all__ = ["KIND", "SITE", "TensorParallel"]

SITE, KIND = "heads and neurons", "tensor parallelism"
_OPTION, _WHOLE = "divided", "whole"


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorParallel:
    """Heads and neurons divided among `ranks`, each of which has all examples; nothing for one.

    `ranks`: among how many. `rank`: which of them is planned; their plans are the same, their rows are not.
    """

    ranks: int = 1
    rank: int = 0

    name: ClassVar[str] = "tensor"
    exact: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.ranks < 1 or self.rank < 0:
            raise UsageError(
                f"tensor.ranks = {self.ranks}, tensor.rank = {self.rank}: give how many ranks, at least "
                "1, and one of them."
            )

    def propose(self, case: Case, context: StepContext) -> Iterator[StepChoice | Declined]:
        """The one form; what stays whole is declined.

        Raises:
            RequestError: nothing of the model can be divided so, or a structure has another number of units.
        """
        if self.ranks == 1:
            return
        made, split = self._made(case, self.ranks)
        for site, reason in split.declined.items():
            yield Declined(site=site, kind=KIND, option=_OPTION, by=self.name, reason=reason)
        option = StepOption(name=_OPTION, settings={"ranks": self.ranks}, made=made)
        yield StepChoice(site=SITE, kind=KIND, baseline=_WHOLE, options=(option,), settled=True)

    def apply(self, case: Case, choice: StepChoice, option: StepOption) -> Case:
        """The step with this rank's part of it.

        Raises:
            FormatError: the plan's form is not known here.
        """
        ranks = option.setting("ranks", int)
        if option.name != _OPTION or ranks < 2:
            raise FormatError(
                f"The plan has {KIND} = {option.name!r} over {ranks} ranks, which is not known here. Plan "
                "again."
            )
        return self._made(case, ranks)[0]

    def _made(self, case: Case, ranks: int) -> tuple[Case, Split]:
        source = case.source
        if source is None or case.division is not None:
            why = (
                "the model behind the step is not known"
                if source is None
                else "its batch runs in micro-batches"
            )
            raise RequestError(
                f"The step cannot be divided among {ranks} tensor-parallel ranks: {why}. Leave tp out, or "
                "that."
            )
        split = Split(model=source.model, ranks=ranks, rank=self.rank)
        divided = source.edited(split.edit, partial(_noted, split))
        try:
            step, front = divided.capture_with_front()
        except EffcompileError as error:
            raise RequestError(
                f"The step cannot be captured for {ranks} tensor-parallel ranks: {error}"
            ) from error
        _check(split, step)
        note = Because(
            "{} tensor-parallel ranks: times and bytes are one rank's, and all of them have the same "
            "examples",
            (ranks,),
        )
        text = "{} fused weights, whose rows on a rank are in several places, are whole on every rank: {name}"
        whole = [Because(text, (len(split.whole), str(name))) for name in split.whole[:1]]
        notes = (note, *whole, *case.notes)
        optimizer = None if case.optimizer is None else case.optimizer.resized(step)
        return replace(case, step=step, source=divided, front=front, optimizer=optimizer, notes=notes), split


def _noted(split: Split, step: Step) -> Step:
    """The step with how its parameters lie, and what is there of them."""
    known = dict(split.model.named_parameters())
    saved = sum(
        (math.prod(part.shape) - math.prod(part.local)) * known[name].element_size()
        for name, part in split.parts.items()
    )
    resident = None if step.resident_bytes is None else step.resident_bytes - saved
    return replace(step, spread=Spread(split=split.ranks, parts=dict(split.parts)), resident_bytes=resident)


def _check(split: Split, step: Step) -> None:
    """Raises RequestError where the model has too few or too uneven units, or nothing is divided."""
    shapes = {name: tuple(map(int, node.meta["val"].shape)) for node, name in step.parameters.items()}
    if any(shapes.get(name, part.local) != part.local for name, part in split.parts.items()):
        raise RequestError(
            f"The step was captured in a way that cannot be divided: {'; '.join(map(str, step.mends))}. "
            "Leave tp out."
        )
    if split.uneven:
        site, count = next(iter(split.uneven.items()))
        fit = [
            n
            for n in range(2, count + 1)
            if all(units % n == 0 for units in (*split.uneven.values(), *split.taken.values()))
        ]
        mend = (
            f"Of tp, {', '.join(map(str, fit[:8]))} would divide."
            if fit
            else "No number of ranks but 1 divides all of them."
        )
        raise RequestError(f"{split.declined[site]} (tp), at {site}. {mend}")
    if not split.taken:
        reasons = "; ".join(f"{site}: {reason}" for site, reason in list(split.declined.items())[:3])
        why = reasons or "It has no layers."
        raise RequestError(
            f"Nothing of the model can be divided among {split.ranks} tensor-parallel ranks. {why}"
        )
