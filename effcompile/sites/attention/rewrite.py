"""Replaces attentions by one call each: `effcompile.attention`, or aten's SDPA, which other runtimes lower
too.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import fx

from effcompile.core.mask import Mask
from effcompile.core.reasons import Unsupported
from effcompile.ops.attention import attention
from effcompile.ops.mask import BAND, OPERANDS
from effcompile.sites.attention.find.fx_queries import ASSERTS, aten
from effcompile.sites.attention.find.match import SDPA, match
from effcompile.sites.attention.find.normal_form import (
    AttentionMatch,
    Fill,
    NotThisFormError,
    Operand,
    Term,
    Unmatched,
)
from effcompile.sites.attention.node_builder import Emitter, repeated_heads

Form = Literal["attention", "sdpa"]
_PLACES = OPERANDS[2:]  # after the bias and the sink, which are no part of a mask
OPERATOR = attention._opoverload


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Masking(Mask[Operand, Operand, int]):
    """What hides keys from queries, of values of the graph, as `effcompile::attention` takes it; see there
    for each argument.

    Attributes:
        bias: terms and fills that stay numbers added to the scores, in order.
        fills: hidden scores are overwritten, not added to.
    """

    bias: tuple[Term | Fill, ...] = ()
    fills: bool = False

    @property
    def only_bias(self) -> bool:
        """Whether numbers added to the scores say it all, but for causality."""
        return all(getattr(self, name) is None for name in _PLACES) and self.lo is None and not self.chunk

    @property
    def numbers(self) -> dict[str, int | None]:
        """The band and the chunk, as arguments."""
        return {name: getattr(self, name) for name in BAND}

    def put(self, emit: Emitter) -> list[fx.Node | None]:
        """The operands beside bias and sink as nodes, in the operator's order."""
        return [None if (value := getattr(self, name)) is None else emit.put(value) for name in _PLACES]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rewritten:
    """An attention, and the call that stands for it now."""

    match: AttentionMatch
    node: fx.Node


ABSORBING = -1e20  # added to a score in fp32, nothing of the score is left
_NOTHING = Masking()
_PLAIN = (*BAND, "uniform_empty", "fills")


def as_numbers(found: AttentionMatch) -> Masking:
    """Every mask is a number added to the scores, as in eager; SDPA's `is_causal` stays a band.

    Where finfo.min hides a whole row, outputs are eager's (the mean of v) and gradients are not: a kernel
    that keeps one logarithm per row cannot tell log(n) from 0 beside it. (PyTorch's own CPU kernel of SDPA
    has the same fault, seen in 2.13.)
    """
    return Masking(bias=found.edits, hi=0 if found.causal else None)


def as_mask(found: AttentionMatch) -> Masking:
    """The one mask of an attention as a bool mask, the rest as numbers: exact, in whole rows that are hidden
    too.

    With two, eager adds finfo.min to finfo.min in some places; only numbers repeat that.
    """
    masks = [term for term in found.terms if term.kind == "mask"]
    if not found.fills and len(masks) == 1:
        # values are not known here: what would absorb a score is left out when it runs
        value = masks[0].value.then(aten.mul.Tensor, masks[0].factor).then(aten.gt.Scalar, ABSORBING)
        return Masking(
            bias=found.edits,
            mask=value,
            hi=0 if found.causal else None,
            uniform_empty=found.empty == "uniform",
        )
    if len(found.fills) != 1 or found.edits[-1] is not found.fills[0]:
        return as_numbers(found)
    fill = found.fills[0]
    if fill.fill > ABSORBING:
        return as_numbers(found)
    seen = fill.value if fill.value.val.dtype == torch.bool else fill.value.then(aten.to.dtype, torch.bool)
    return Masking(
        bias=found.terms, mask=seen.then(aten.logical_not.default) if fill.hidden else seen,
        hi=0 if found.causal else None, uniform_empty=found.empty == "uniform" and fill.fill > -torch.inf,
        fills=not fill.added,
    )  # fmt: skip


def rewrite(
    graph: fx.Graph,
    *,
    forms: Sequence[Form] = ("attention",),
    masking: Callable[[AttentionMatch], Masking] | None = None,
    matches: Iterable[AttentionMatch | Unmatched] | None = None,
    grouped: bool = True,
    training: bool = False,
) -> list[Rewritten | Unmatched]:
    """Replace attentions in place. One outcome per match, in their order.

    Args:
        graph: nodes need `meta["val"]`; new nodes get it, and the names of their modules. Dead nodes are
            removed.
        forms: the first of these that can say it is taken: "attention": `effcompile.attention`; "sdpa":
            `aten.scaled_dot_product_attention`.
        masking: what to emit of a match's masks; `as_mask` by default, `as_numbers` with SDPA. It may raise
            NotThisFormError: then the attention stays, for that reason.
        matches: those to replace; by default all of `match(graph)`.
        grouped: SDPA may be given fewer heads of keys than of queries (`enable_gqa`); else they are repeated
            for it.
        training: gradients are wanted: refuse what would give eager's outputs but not its gradients, see
            `as_numbers`.
    """
    graph.eliminate_dead_code()
    outcomes: list[Rewritten | Unmatched] = []
    emit = Emitter(graph)
    for found in match(graph) if matches is None else matches:
        if isinstance(found, Unmatched):
            outcomes.append(found)
            continue
        for form in forms:
            chooses = masking or (as_numbers if form == "sdpa" else as_mask)
            outcome = _outcome(emit, found, form, chooses, grouped=grouped, training=training)
            if isinstance(outcome, Rewritten):
                break
        outcomes.append(outcome)
    graph.eliminate_dead_code()
    graph.lint()
    if graph.owning_module is not None:
        graph.owning_module.recompile()
    return outcomes


def _outcome(
    emit: Emitter,
    found: AttentionMatch,
    form: Form,
    masking: Callable[[AttentionMatch], Masking],
    *,
    grouped: bool,
    training: bool,
) -> Rewritten | Unmatched:
    try:
        chosen = masking(found)
        if training and any(
            isinstance(edit, Fill) and -torch.inf < edit.fill <= ABSORBING for edit in chosen.bias
        ):
            raise NotThisFormError(
                "where its masks together hide a whole row, no kernel repeats eager's gradient"
            )
        return Rewritten(match=found, node=_replace(emit.before(found.output), found, form, chosen, grouped))
    except NotThisFormError as error:
        return Unmatched(node=found.anchor, site=found.site, reason=error.reason)


def _replace(emit: Emitter, found: AttentionMatch, form: Form, masking: Masking, grouped: bool) -> fx.Node:
    if reason := _refusal(found, form, masking):
        raise NotThisFormError(reason)
    result = node = (
        _sdpa(emit, found, masking, grouped) if form == "sdpa" else _attention(emit, found, masking)
    )
    for step in found.restore:
        result = emit.call(step.target, (result, *step.args))
    found.output.replace_all_uses_with(result)
    emit.now[found.output] = result
    emit.restride(result)
    for inner in sorted(dict.fromkeys(found.inner), reverse=True):
        # readers first; what writes in place is no dead code to fx
        for user in [user for user in inner.users if user.target in ASSERTS]:
            emit.graph.erase_node(user)
        if not inner.users:
            emit.graph.erase_node(inner)
    return node.all_input_nodes[0] if node.target is operator.getitem else node


def why_not(found: AttentionMatch) -> Unsupported | None:
    """Why a match is left as it is, whatever might stand for it; None if it is not.

    A kernel that computes weights tile by tile, and again in the backward, would have to draw the mask of
    dropout by place. PyTorch's generator draws in the order of one pass over all of it, so that no such
    kernel repeats what the model draws.
    """
    if found.dropout > 0:
        return Unsupported(
            "it drops {} of its weights at random, and no other kernel would draw the same", (found.dropout,)
        )
    if found.weights is not None:
        return Unsupported(
            "its weights ({name}) are returned or read again, so that they have to be computed",
            (found.weights.name,),
        )
    if found.softcap < 0:
        return Unsupported("its softcap is {}", (found.softcap,))
    return None


def _refusal(found: AttentionMatch, form: Form, masking: Masking) -> Unsupported | None:
    """Why a match is not replaced by this form; None if it is."""
    if reason := why_not(found):
        return reason
    if form == "sdpa":
        if found.softcap or found.sink is not None:
            return Unsupported("SDPA has no {name}", ("softcap" if found.softcap else "sinks",))
        if not masking.only_bias or masking.hi not in (None, 0) or (masking.hi == 0 and masking.bias):
            return Unsupported("SDPA takes one mask, or causality, and no more")
    return None


def _attention(emit: Emitter, found: AttentionMatch, masking: Masking) -> fx.Node:
    """softmax(softcap(q·kᵀ·scale) + bias)·v by effcompile's own operator; its first result."""
    q, k, v = (emit.put(value) for value in (found.q, found.k, found.v))
    bias = emit.additive(masking.bias, found.q.val.dtype)
    sink = None if found.sink is None else emit.put(found.sink)
    plain = {
        name: getattr(masking, name) for name in _PLAIN if getattr(masking, name) != getattr(_NOTHING, name)
    }
    kwargs = {"scale": found.scale, **({"softcap": found.softcap} if found.softcap else {}), **plain}
    call = emit.call(OPERATOR, (q, k, v, bias, sink, *masking.put(emit), None), kwargs, name=_name(found))
    return emit.call(operator.getitem, (call, 0))


def _sdpa(emit: Emitter, found: AttentionMatch, masking: Masking, grouped: bool) -> fx.Node:
    q, k, v = (emit.put(value) for value in (found.q, found.k, found.v))
    kwargs: dict[str, Any] = {"scale": found.scale}
    if found.grouped and grouped:
        kwargs["enable_gqa"] = True
    elif found.grouped:
        times = found.q.shape[1] // found.k.shape[1]
        k, v = (repeated_heads(emit, side, times) for side in (k, v))
    mask = _sdpa_mask(emit, found, masking)
    args = (q, k, v) if mask is None else (q, k, v, mask)
    args = (*args, None, 0.0, True) if masking.hi == 0 else args
    return emit.call(SDPA, args, kwargs, name=_name(found))


def _sdpa_mask(emit: Emitter, found: AttentionMatch, masking: Masking) -> fx.Node | None:
    """SDPA's bool mask as it was, anything else as numbers."""
    edit = masking.bias[0] if len(masking.bias) == 1 else None
    if found.empty == "zero" and isinstance(edit, Fill) and not edit.hidden:
        return emit.put(edit.value)
    return emit.additive(masking.bias, found.q.val.dtype)


def _name(found: AttentionMatch) -> str:
    return f"{found.site}_attention".replace(".", "_").lstrip("_") or "attention"
