"""Attention of a captured program in one form, however the model writes it: one node each, for which kernels
are then chosen.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import fx

from effcompile.core.reasons import Reason
from effcompile.ir.program import Program
from effcompile.ops import attention as _attention  # noqa: F401 - the same
from effcompile.ops import flex_attention as _flex  # noqa: F401 - registers its operator
from effcompile.ops import guarded_attention as _guarded  # noqa: F401 - the same
from effcompile.sites.attention import predictor as _predicted  # noqa: F401 - the same
from effcompile.sites.attention.find.match import SDPA, match
from effcompile.sites.attention.find.normal_form import AttentionMatch, Unmatched
from effcompile.sites.attention.rewrite import Form, Rewritten, rewrite, why_not

#: In the meta of an attention's node: the model writes it as separate operators.
EAGER = "effcompile_eager"
#: Our own operators for an attention.
OUR_ATTENTIONS = (
    torch.ops.effcompile.attention.default, torch.ops.effcompile.attention_flex.default,
    torch.ops.effcompile.attention_guarded.default,
)  # fmt: skip


def normalised(program: Program) -> Program:
    """The program with every attention as `scaled_dot_product_attention`, or as `effcompile::attention` where
    that cannot say it.

    What has to stay as it is, with the reason, is in `Program.left`.
    """
    edited = program.editable("")
    found = match(edited.graph)
    if not _eager(found):
        left = refused(found)
        return replace(program, left=left) if left else program
    return replace(
        edited, left=_normalised(edited.graph, found, ("sdpa", "attention")), history=program.history
    )


def normalise(graph: fx.Graph, *, training: bool = False) -> dict[str, Reason]:
    """The same of a graph, in place; returns the attention → reason of what is left.

    With `training`, all become `effcompile::attention`: SDPA's gradients are wrong where numbers hide a whole
    row (torch 2.13, CPU).
    """
    return _normalised(graph, match(graph), ("attention",) if training else ("sdpa", "attention"))


def _normalised(
    graph: fx.Graph, found: Sequence[AttentionMatch | Unmatched], forms: Sequence[Form]
) -> dict[str, Reason]:
    """Each in the first of these forms that can say it."""
    left = refused(found)
    for outcome in rewrite(
        graph, forms=forms, matches=_eager(found), grouped=False, training="sdpa" not in forms
    ):
        if isinstance(outcome, Rewritten):
            outcome.node.meta[EAGER] = True
        else:
            left[outcome.site or outcome.node.name] = outcome.reason
    return left


def refused(found: Iterable[AttentionMatch | Unmatched]) -> dict[str, Reason]:
    """Attention → why it is left as it is, of those that can be nothing else: no attention by its form, or
    one with dropout.
    """
    left: dict[str, Reason] = {}
    for each in found:
        if isinstance(each, Unmatched):
            left[each.site or each.node.name] = each.reason
        elif reason := why_not(each):
            left[each.site or each.anchor.name] = reason
    return left


def _eager(found: Iterable[AttentionMatch | Unmatched]) -> list[AttentionMatch]:
    return [m for m in found if isinstance(m, AttentionMatch) and m.anchor.target is not SDPA]
