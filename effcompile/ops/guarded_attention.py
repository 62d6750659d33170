"""Attention whose mask has a closed form under a condition: both ways in one operator, which looks at the
condition in every call.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.flop_counter import register_flop_formula

from effcompile.core.errors import UsageError
from effcompile.core.types import Shape
from effcompile.ops.attention import attention
from effcompile.ops.attention_terms import Terms
from effcompile.ops.mask import BAND, OPERANDS, declared

_SCHEMA = (
    f"(Tensor q, Tensor k, Tensor v, Tensor holds, Tensor written, {declared(*OPERANDS)}, *, "
    f"{declared('scale', 'softcap', *BAND, 'uniform_empty')}) -> Tensor"
)


@torch.library.custom_op("effcompile::attention_guarded", mutates_args=(), schema=_SCHEMA)
def attention_guarded(
    q: Tensor, k: Tensor, v: Tensor, holds: Tensor, written: Tensor, *closed: object, **form: object
) -> Tensor:
    """(B, H, Sq, Dv), contiguous. Forward only.

    Where `holds`, a bool of no axes, is True: `effcompile::attention` of q, k, v, `closed` and `form`. Else
    the mask is read as the model wrote it: `written` is bool, True is seen, beside the bias of `closed`; or
    all numbers added to the scores, that bias among them. Sink, scale and softcap are the same.

    Raises:
        UsageError: `holds` is no bool of no axes, or an argument is none that `effcompile::attention` takes.
    """
    if holds.dtype != torch.bool or holds.dim():
        raise UsageError(
            f"attention_guarded takes holds as a bool of no axes; given {holds.dtype} of shape "
            f"{tuple(holds.shape)}."
        )
    if bool(holds):
        return attention(q, k, v, *closed, **form)[0]
    said = Terms.of(*closed, **form)
    if written.dtype != torch.bool:
        # with all that is added, and with numbers that say what an empty row gets
        return _dense(q, k, v, replace(said, bias=written, mask=None, uniform_empty=False))
    return _dense(q, k, v, replace(said, mask=written))


def _dense(q: Tensor, k: Tensor, v: Tensor, said: Terms) -> Tensor:
    """With bias, sink and dense mask alone; by SDPA where that can say it."""
    if (
        said.sink is not None
        or said.softcap
        or said.uniform_empty
        or (said.bias is not None and said.mask is not None)
    ):
        form = {"scale": said.scale, "softcap": said.softcap, "uniform_empty": said.uniform_empty}
        return attention(q, k, v, said.bias, said.sink, said.mask, **form)[0]
    written = said.bias if said.mask is None else said.mask
    return scaled_dot_product_attention(
        q, k, v, written, scale=said.scale, enable_gqa=q.shape[1] != k.shape[1]
    ).contiguous()


@attention_guarded.register_fake
def _(q, k, v, *_, **__):  # type: ignore[no-untyped-def]
    return q.new_empty((*q.shape[:3], v.shape[3]))


@register_flop_formula(torch.ops.effcompile.attention_guarded)
def _flops(q: Shape, k: Shape, v: Shape, *_: object, **__: object) -> int:
    """Two products over all pairs: an upper bound, for which way is taken is known in the call."""
    return int(2 * q[0] * q[1] * q[2] * k[2] * (q[3] + v[3]))
