"""Which loss head a step has: as captured, by chunks, or by chunks and again in the backward; and tied
gradients in place.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import fx

from effcompile.core.cost import Cost
from effcompile.core.errors import FormatError
from effcompile.core.reasons import Because
from effcompile.core.torch_compat_aot import writes
from effcompile.ir.plan import Decision, Declined, Setting
from effcompile.ir.step import Step
from effcompile.passes.training.base import Case, StepChoice, StepContext, StepOption, StepOutcome
from effcompile.passes.training.loss_head import (
    LossHead,
    accumulate_embeddings,
    declined_loss_heads,
    find_loss_heads,
    with_loss_head,
)

KIND, WHOLE = "loss head", "whole"
GRADIENT, IN_PLACE, SEPARATE = "gradient", "in place", "separate"
CHUNKED, RECHUNKED = "chunked", "rechunked"

#: A chunk's logits should not be larger than this: smaller ones only cost time.
_CHUNK_BYTES = 32 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class LossHeads:
    """`chunks`: how many; 0 chooses so that one chunk's logits take at most 32 MiB.

    `in_place`: sum tied gradients in place.
    """

    chunks: int = 0
    in_place: bool = True

    name: ClassVar[str] = "loss_head"
    exact: ClassVar[bool] = True

    def propose(self, case: Case, context: StepContext) -> Iterator[StepChoice | Declined]:
        """The head whole, and what saves more and more memory; without a head gradients in place alone, where
        there are any to sum.
        """
        for left in declined_loss_heads(case.step):
            yield Declined(site=left.site, kind=KIND, option="chunks", by=self.name, reason=left.reason)
        found = find_loss_heads(case.step)
        if found:
            options = (self._option(case, found, form, wanted) for form, wanted in self._forms(found[0]))
            whole = StepOption(name=WHOLE, settings={"form": WHOLE, "chunks": 1, "in_place": False})
            yield StepChoice(site=found[0].site, kind=KIND, baseline=WHOLE, options=(whole, *options))
        elif self.in_place and not _alike(case.step, changed := accumulate_embeddings(case.step)):
            settings: dict[str, Setting] = {"form": WHOLE, "chunks": 1, "in_place": True}
            summed = StepOption(
                name="gradients in place",
                settings=settings,
                told=_gradients,
                made=replace(case, step=changed),
            )
            yield StepChoice(site="", kind=KIND, baseline=WHOLE, options=(StepOption(name=WHOLE), summed))

    def apply(self, case: Case, choice: StepChoice, option: StepOption) -> Case:
        """The step with all its heads in chunks, or with gradients summed in place.

        Raises:
            FormatError: this step cannot have the plan's head.
        """
        step = case.step
        if choice.kind == GRADIENT and KIND in case.options:
            return case  # the head's own option has summed them
        if choice.kind == KIND and (form := option.setting("form", str)) != WHOLE:
            chunks = option.setting("chunks", int)
            found = find_loss_heads(step)
            possible = {CHUNKED, RECHUNKED} & set(found[0].options) if found else ()
            if form not in possible or chunks not in found[0].chunk_counts:
                raise FormatError(
                    f"The plan has a loss head in {chunks} chunks ({form}), which this step cannot have. "
                    "Plan again."
                )
            step = _chunked(step, form, chunks)[1]
        summed = choice.kind == GRADIENT or option.setting("in_place", bool)
        return replace(case, step=accumulate_embeddings(step) if summed else step)

    def _option(self, case: Case, found: list[LossHead], form: str, wanted: int) -> StepOption:
        chunks, step = _chunked(case.step, form, wanted)
        step = accumulate_embeddings(step) if self.in_place else step
        size = max(head.logits_bytes for head in found)
        return StepOption(
            name=f"{chunks} chunks" + (", recomputed" if form == RECHUNKED else ""),
            settings={"form": form, "chunks": chunks, "in_place": self.in_place},
            why=Because("its logits, {bytes}, are never there at once", (size,)),
            told=_gradients if self.in_place else None,
            made=replace(case, step=step),
        )

    def _forms(self, head: LossHead) -> list[tuple[str, int]]:
        """(option, chunks): the fewest chunks, which cost the least time, and enough for small ones.

        "rechunked" costs a product of matrices more and needs as much memory: only where "chunked" is not
        exact.
        """
        option = next((o for o in (CHUNKED, RECHUNKED) if o in head.options), None)
        counts = (
            dict.fromkeys((min(head.chunk_counts), self._count(head)))
            if not self.chunks
            else [self._count(head)]
        )
        return [(option, count) for count in counts] if option is not None else []

    def _count(self, head: LossHead) -> int:
        if self.chunks:
            return min(head.chunk_counts, key=lambda count: abs(count - self.chunks))
        enough = [count for count in head.chunk_counts if head.logits_bytes / count <= _CHUNK_BYTES]
        return min(enough, default=max(head.chunk_counts))


def _chunked(step: Step, option: str, wanted: int) -> tuple[int, Step]:
    """The step with all its heads in chunks; the first one's number of chunks."""
    count = len(find_loss_heads(step))
    chosen = 0
    for _ in range(count):
        heads = [head for head in find_loss_heads(step) if option in head.options]
        if not heads:
            break
        chunks = min(heads[0].chunk_counts, key=lambda count: abs(count - wanted))
        chosen = chosen or chunks
        step = with_loss_head(step, heads[0], option, chunks)
    return chosen, step


def _alike(before: Step, after: Step) -> bool:
    """Whether two steps have the same operators."""
    pairs = zip(before.graph.nodes, after.graph.nodes, strict=True)
    return len(before.graph.nodes) == len(after.graph.nodes) and all(a.target == b.target for a, b in pairs)


def _gradients(outcome: StepOutcome) -> Iterator[Decision]:
    """The parameters whose gradients are summed in one tensor, with its bytes."""
    step = outcome.cut.step
    found = (_summed(step, node) for node in step.graph.nodes if writes(node) and node.args)
    for site, size in dict(each for each in found if each is not None).items():
        yield Decision(
            site=site, kind=GRADIENT, option=IN_PLACE, baseline=SEPARATE, by=LossHeads.name, cost=Cost(),
            baseline_cost=Cost(bytes_transient=size),
            why=Because("the uses of a tied parameter are summed in one tensor"),
        )  # fmt: skip


def _summed(step: Step, node: fx.Node) -> tuple[str, int] | None:
    """The parameter whose gradient a node writes into, with its bytes."""
    target: Any = node.args[0]
    for name, gradient in step.gradients.items():
        if gradient in (target, node) or target in gradient.all_input_nodes:
            value = gradient.meta["val"]
            return name, value.numel() * value.element_size()
    return None
