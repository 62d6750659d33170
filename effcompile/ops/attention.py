"""Attention as one operator that knows what may be seen: its schema, fake kernels, gradients, FLOPs and the
checks of its arguments.

    scores = softcap(q kᵀ · scale) + bias        softcap_c(x) = c · tanh(x / c) for c > 0, else x
    out    = softmax over the visible keys, and the sink, of scores · v

Legend: B batch, H query heads, K key heads (H a multiple of K; query head h reads key head h // (H / K)), Sq
and Sk lengths, D and Dv widths. Query i sees key j iff all of these hold:

- `lo` ≤ j − i ≤ `hi` (None is open), and i // `chunk` == j // `chunk` where chunk > 0;
- `q_ids[b, i] == k_ids[b, j]`, and `valid[b, j]`;
- `mask[b, h, i, j]`, each axis full or 1;
- with `tiles` (`effcompile.ops.tiles.TileList.tensors()`; only the first four are read here): the tile of (i,
  j) is listed. In a tile listed as full, every key is seen whatever the other terms say.

What is not visible is left out of the softmax: it is never added as a number. `sink`, (H) or broadcastable to
(B, H, Sq), is one more logit of each row, without a value. A row that sees nothing and has no sink gives 0
and lse −inf; with `uniform_empty` it gives the mean of v over all Sk keys, which is what adding `finfo.min`
to its scores does in eager PyTorch. Its gradient is then eager's too: with `fills` that of scores overwritten
by `finfo.min` (v's only), without it that of scores to which it was added.

All dtypes but fp64 are summed and exponentiated in fp32. lse, (B, H, Sq), is the natural logarithm of the
softmax's denominator, in fp32 (fp64 for fp64); no gradient flows through it. Anything PyTorch runs on can run
the default kernel; a device registers a better one with `attention.register_kernel(device)`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from effcompile.core.types import Args, AutogradContext, Kwargs
from effcompile.ops import attention_flash, attention_kernel
from effcompile.ops.attention_terms import NeededGradients, Terms, check, visible_pairs
from effcompile.ops.mask import FORM, OPERANDS, declared
from effcompile.ops.sums import sum_dtype

__all__ = ["attention", "attention_backward"]

_INPUTS, _FORM = declared(*OPERANDS, "tiles"), declared(*FORM)


@torch.library.custom_op(
    "effcompile::attention",
    mutates_args=(),
    schema=f"(Tensor q, Tensor k, Tensor v, {_INPUTS}, *, {_FORM}) -> (Tensor out, Tensor lse)",
)
def attention(q: Tensor, k: Tensor, v: Tensor, *rest: object, **form: object) -> tuple[Tensor, Tensor]:
    """(out (B, H, Sq, Dv) in q's dtype and contiguous, lse (B, H, Sq)), see the module.

    q, k, v are (B, H, Sq, D), (B, K, Sk, D) and (B, K, Sk, Dv), of one dtype, in any strides; `rest` and
    `form` as in the schema.

    Raises:
        UsageError: a shape, dtype or value that it does not take; the message names the argument.
    """
    terms = Terms.of(*rest, **form)
    check(q, k, v, terms)
    return attention_kernel.forward(q, k, v, terms)


@torch.library.custom_op(
    "effcompile::attention_backward",
    mutates_args=(),
    schema=f"(Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, {_INPUTS}, *, {_FORM}, "
    "bool bias_gradient=True, bool sink_gradient=True) -> (Tensor dq, Tensor dk, Tensor dv, Tensor "
    "dbias, Tensor dsink)",
)
def attention_backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *rest: object, **form: object
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients in their inputs' shapes and dtypes, contiguous; dbias and dsink are of size (0) where not
    wanted or not there.

    grad_out has any strides; out and lse are what `attention` returned for the same arguments.
    `bias_gradient` and `sink_gradient`: whether those are wanted, as a bias that is only added costs less.
    """
    wanted, form = NeededGradients.taken_from(form)
    terms = Terms.of(*rest, **form)
    check(q, k, v, terms)
    return attention_kernel.backward(grad_out, q, k, v, out, lse, terms, wanted)


@attention.register_kernel("cpu")
def _(q: Tensor, k: Tensor, v: Tensor, *rest: object, **form: object) -> tuple[Tensor, Tensor]:
    terms = Terms.of(*rest, **form)
    check(q, k, v, terms)
    return attention_flash.forward(q, k, v, terms)


@attention_backward.register_kernel("cpu")
def _(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *rest: object, **form: object
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    wanted, form = NeededGradients.taken_from(form)
    terms = Terms.of(*rest, **form)
    check(q, k, v, terms)
    return attention_flash.backward(grad_out, q, k, v, out, lse, terms, wanted)


@attention.register_fake
def _(q, k, v, *rest, **form):  # type: ignore[no-untyped-def]
    check(q, k, v, Terms.of(*rest, **form))
    b, h, sq, _ = q.shape
    return q.new_empty((b, h, sq, v.shape[3])), q.new_empty((b, h, sq), dtype=sum_dtype(q))


@attention_backward.register_fake
def _(grad_out, q, k, v, out, lse, *rest, **form):  # type: ignore[no-untyped-def]
    wanted, form = NeededGradients.taken_from(form)
    terms = Terms.of(*rest, **form)
    optional = ((terms.bias, wanted.bias_gradient), (terms.sink, wanted.sink_gradient))
    return *(t.new_empty(t.shape) for t in (q, k, v)), *(
        q.new_empty(0) if t is None or not wanted else t.new_empty(t.shape) for t, wanted in optional
    )


def _keep(
    ctx: AutogradContext, inputs: Args, keyword_only_inputs: Kwargs, output: tuple[Tensor, Tensor]
) -> None:
    *tensors, tiles = inputs
    ctx.save_for_backward(*tensors, *output, *(tiles or ()))
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.form, ctx.has_tiles = keyword_only_inputs, tiles is not None


def _gradients(ctx: AutogradContext, grad_out: Tensor | None, _: Tensor | None) -> Args:
    q, k, v, *rest = ctx.saved_tensors
    operands, (out, lse, *tiles) = rest[: len(OPERANDS)], rest[len(OPERANDS) :]
    given = len(ctx.needs_input_grad)  # arguments left at their defaults are not among them
    needs = (*ctx.needs_input_grad[:given], False, False)
    if grad_out is None:
        found: tuple[Tensor | None, ...] = (None,) * 5
    else:
        dq, dk, dv, dbias, dsink = attention_backward(
            grad_out,
            q,
            k,
            v,
            out,
            lse,
            *operands,
            tiles,
            **ctx.form,
            bias_gradient=needs[3],
            sink_gradient=needs[4],
        )
        found = dq, dk, dv, dbias if needs[3] else None, dsink if needs[4] else None
    return (*found, *((None,) * 4), [None] * len(tiles) if ctx.has_tiles else None)[:given]


attention.register_autograd(_gradients, setup_context=_keep)


def _score_flops(q: Tensor, k: Tensor, rest: Sequence[object], form: Mapping[str, object]) -> int:
    """Visible pairs over all heads, times two: one multiplication and one addition per pair and unit of
    width.
    """
    return 2 * visible_pairs(
        q, k, Terms.of(*rest, **{name: form[name] for name in form if name != "out_val"})
    )


@register_flop_formula(torch.ops.effcompile.attention, get_raw=True)
def _attention_flops(q: Tensor, k: Tensor, v: Tensor, *rest: object, **form: object) -> int:
    """Two products over the visible part: scores, and weights times values."""
    return _score_flops(q, k, rest, form) * (q.shape[3] + v.shape[3])


@register_flop_formula(torch.ops.effcompile.attention_backward, get_raw=True)
def _attention_backward_flops(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *rest: object, **form: object
) -> int:
    """Five: scores again, dq and dk over D; the gradient of the weights and dv over Dv."""
    return _score_flops(q, k, rest, NeededGradients.taken_from(form)[1]) * (3 * q.shape[3] + 2 * v.shape[3])
