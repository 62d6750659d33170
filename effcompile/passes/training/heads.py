"""Which loss head a step has: as captured, by chunks, or by chunks and again in the backward; and tied gradients in place.

Each is a variant of the step that the planner prices and schedules as a whole; the fastest that fits is taken.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from effcompile.ir.step import Step
from effcompile.passes.training.base import Chosen
from effcompile.passes.training.loss_head import LossHead, accumulate_embeddings, declined_loss_heads, find_loss_heads, with_loss_head

#: A chunk's logits should not be larger than this: smaller ones only cost time.
_CHUNK_BYTES = 32 << 20


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One form of the step.

    Attributes:
        step: the graph.
        head: the loss head's module, "" where none was found. option: "whole", "chunked" or "rechunked". chunks: how many.
        logits_bytes: of the whole logits.
        in_place: whether gradients of tied parameters are summed in place.
        declined: why a loss head cannot be changed, one line each.
        fused_attention: whether attentions that the model writes as several operators, or with a dense mask, are one operator each.
        precision: what its products are computed in (passes/training/precision.py); "" as the model was given.
        consumed: how gradients are consumed in the backward (passes/training/states.py); "" where they are returned.
        taken: options of further passes (passes/training/base.py).
        unfused: element-wise chains that were measured to be as fast apart, by their nodes' names (passes/training/pointwise.py).
    """

    step: Step
    head: str = ""
    option: str = "whole"
    chunks: int = 1
    logits_bytes: int = 0
    in_place: bool = False
    declined: tuple[str, ...] = ()
    fused_attention: bool = False
    precision: str = ""
    consumed: str = ""
    taken: tuple[Chosen, ...] = ()
    unfused: tuple[tuple[str, ...], ...] = ()

    @property
    def label(self) -> str:
        """What the report calls it."""
        parts = [self._form, *["fused attention"] * self.fused_attention, *[self.precision] * bool(self.precision)]
        parts += [f"{taken.choice.kind} {taken.option.name}" for taken in self.taken]
        return ", ".join(parts)

    @property
    def _form(self) -> str:
        if self.option != "whole":
            return f"loss head in {self.choice}"
        return "tied gradients in place" if self.in_place else "as captured"

    @property
    def choice(self) -> str:
        """The option in the plan's words: "whole", "8 chunks"."""
        if self.option == "whole":
            return "whole"
        return f"{self.chunks} chunks" + (", recomputed" if self.option == "rechunked" else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class LossHeads:
    """`chunks`: how many; 0 chooses so that one chunk's logits take at most 32 MiB. `in_place`: sum tied gradients in place."""

    chunks: int = 0
    in_place: bool = True

    name: ClassVar[str] = "loss_head"
    exact: ClassVar[bool] = True

    def variants(self, step: Step) -> tuple[Variant, ...]:
        """The step as captured first, then what saves more and more memory."""
        declined = tuple(declined_loss_heads(step))
        found = find_loss_heads(step)
        variants = [Variant(step=step, declined=declined, head=found[0].site if found else "", logits_bytes=_bytes(found))]
        if not found:
            return (*variants, *self._summed(variants[0]))
        for option, count in self._forms(found[0]):
            chunks, changed = self._chunked(step, option, count)
            changed = accumulate_embeddings(changed) if self.in_place else changed
            variants.append(
                Variant(
                    step=changed, head=found[0].site, option=option, chunks=chunks, logits_bytes=_bytes(found),
                    in_place=self.in_place, declined=declined,
                )
            )  # fmt: skip
        return tuple(variants)

    def _forms(self, head: LossHead) -> list[tuple[str, int]]:
        """(option, chunks): the fewest chunks, which cost the least time, and enough for small ones.

        "rechunked" costs a product of matrices more and needs as much memory: only where "chunked" is not exact.
        """
        option = next((o for o in ("chunked", "rechunked") if o in head.options), None)
        counts = dict.fromkeys((min(head.chunk_counts), self._count(head))) if not self.chunks else [self._count(head)]
        return [(option, count) for count in counts] if option is not None else []

    def _chunked(self, step: Step, option: str, wanted: int) -> tuple[int, Step]:
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

    def _count(self, head: LossHead) -> int:
        if self.chunks:
            return min(head.chunk_counts, key=lambda count: abs(count - self.chunks))
        enough = [count for count in head.chunk_counts if head.logits_bytes / count <= _CHUNK_BYTES]
        return min(enough, default=max(head.chunk_counts))

    def _summed(self, plain: Variant) -> tuple[Variant, ...]:
        """Without a head to change: gradients in place alone, where there are any to sum."""
        if not self.in_place:
            return ()
        changed = accumulate_embeddings(plain.step)
        same = len(changed.graph.nodes) == len(plain.step.graph.nodes) and all(
            a.target == b.target for a, b in zip(changed.graph.nodes, plain.step.graph.nodes, strict=True)
        )
        return () if same else (Variant(step=changed, in_place=True, declined=plain.declined),)


def _bytes(found: list[LossHead]) -> int:
    return max((head.logits_bytes for head in found), default=0)
