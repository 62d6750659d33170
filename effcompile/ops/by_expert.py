"""Products of tokens in groups by expert as an operator of ours, in the place of Hugging Face's: an artifact
with that one opens only where transformers was imported before.

Legend: S rows, sorted by group; E groups, of K by N each; ends (E) where each group ends.
Defined without torch.library.custom_op, as `int8_linear` is.
"""

from __future__ import annotations

import torch
from torch import Tensor, fx

from effcompile.core.types import AutogradContext
from effcompile.ops import few_rows

__all__ = ["as_ours", "by_expert", "is_by_expert"]

#: As transformers names it: (S, K), (E, K, N), (E); what it gives is (S, N), with zeros behind the last end.
_THEIRS = "transformers.grouped_mm_fallback.default"

_LIBRARY = torch.library.Library("effcompile", "FRAGMENT")
_LIBRARY.define("by_expert(Tensor rows, Tensor matrices, Tensor ends) -> Tensor")


def by_expert(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """Each group's rows times its matrix, which is read at memory's speed where few rows are its own."""
    held = matrices.transpose(1, 2)  # (E, N, K), as the model holds it
    made, start, dense = rows.new_zeros((len(rows), matrices.shape[2])), 0, few_rows.takes(held)
    for expert, end in enumerate(ends.tolist()):
        if start < end and dense:
            made[start:end] = few_rows.linear(rows[start:end], held[expert])
        elif start < end:
            torch.mm(rows[start:end], matrices[expert], out=made[start:end])
        start = end
    return made


_LIBRARY.impl("by_expert", by_expert, "CompositeExplicitAutograd")
_OURS = torch.ops.effcompile.by_expert.default


@torch.library.register_fake("effcompile::by_expert", lib=_LIBRARY)
def _(rows, matrices, ends):  # type: ignore[no-untyped-def]
    return rows.new_empty((rows.shape[0], matrices.shape[2]))


def _remember(ctx: AutogradContext, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _gradients(ctx: AutogradContext, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    """What rows and matrices have of it: errors of a cache are followed through experts, too."""
    rows, matrices, ends = ctx.saved_tensors
    of_rows = _OURS(grad, matrices.transpose(1, 2), ends) if ctx.needs_input_grad[0] else None
    if not ctx.needs_input_grad[1]:
        return of_rows, None, None
    of_matrices, start = torch.zeros_like(matrices), 0
    for expert, end in enumerate(ends.tolist()):
        of_matrices[expert] = rows[start:end].t() @ grad[start:end]
        start = end
    return of_rows, of_matrices, None


torch.library.register_autograd("effcompile::by_expert", _gradients, setup_context=_remember, lib=_LIBRARY)


def is_by_expert(target: object) -> bool:
    """Whether an operator is such a product, theirs or ours."""
    return target is _OURS or str(target) == _THEIRS


def as_ours(graph: fx.Graph) -> None:
    """Each of theirs as one of ours, which says the same of the same operands."""
    for node in graph.nodes:
        if node.op == "call_function" and str(node.target) == _THEIRS:
            node.target = _OURS
