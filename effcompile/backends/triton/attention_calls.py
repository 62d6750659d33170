"""Calls of the attention kernels: what those of one form have in common, what each brings, and how they are
launched.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from effcompile.backends.torch.kept import keep
from effcompile.backends.triton import tune
from effcompile.backends.triton.attention_tiles import NARROWEST, closed_form, given_lists, options
from effcompile.backends.triton.configs import KERNELS, LaunchConfig, dtype_name, head_class, using
from effcompile.backends.triton.kernels.attention_backward import (
    attention_delta,
    attention_dkdv,
    attention_dq,
)
from effcompile.backends.triton.kernels.attention_forward import attention_forward
from effcompile.backends.triton.layout import by_rows, cdiv, in_rows, next_power_of_2, row_strides
from effcompile.core.building import under_way
from effcompile.core.types import Arguments
from effcompile.ops.attention_terms import ALL_WANTED, NeededGradients, Terms, sink_rows
from effcompile.ops.mask import OPERANDS

#: Terms that are tensors, as the kernels name them, where a call has none.
_NOTHING: Arguments = {
    "bias": None, "mask": None, "q_ids": None, "k_ids": None, "valid": None, "bias_strides": (0,) * 4,
    "mask_strides": (0,) * 4, "row_strides": (0,) * 3,
}  # fmt: skip
_NO_BIAS_GRADIENT: Arguments = {
    "dbias": None,
    "dbias_strides": (0,) * 4,
    "SUM_ROWS": False,
    "SUM_COLUMNS": False,
    "ATOMIC": False,
}


@dataclass(frozen=True, slots=True)
class _Launch:
    """A kernel's launch in all calls of a form.

    config: its tiles, cut to divide the given lists'. programs: how many. fixed: arguments and options that
    are the same in all of them. lists: which of the lists of band and chunk it walks, as arguments of
    `closed_form`; None where each call brings its own.
    """

    config: LaunchConfig
    programs: int
    fixed: Arguments
    lists: tuple[Any, ...] | None


@dataclass(frozen=True, slots=True)
class AttentionForm:
    """What calls with the same shapes, strides, dtypes, device and numbers have in common.

    reason: why the kernels decline them, or None. numbers: the terms without their tensors. full: (B, H, Sq,
    Sk). heads: of k. widths: of heads, as kernels take them. dtype, device: of q. strides: of q, k and v as
    kernels read them; straight: they lie so already. lists: calls bring lists of tiles. plain: no term is a
    tensor; hides: some such term hides keys that band and chunk show.
    """

    reason: str | None
    numbers: Terms
    full: tuple[int, int, int, int]
    heads: int
    widths: dict[str, int]
    dtype: torch.dtype
    device: torch.device
    strides: dict[str, tuple[int, ...]]
    straight: bool
    lists: bool
    plain: bool
    hides: bool
    _launches: dict[str, _Launch] = field(default_factory=dict)

    @classmethod
    def of(cls, q: Tensor, k: Tensor, v: Tensor, terms: Terms, *, reason: str | None = None) -> AttentionForm:
        (b, h, sq, d), (_, heads, sk, _), dv = q.shape, k.shape, v.shape[3]
        widths = {
            "D": d, "DV": dv, "BLOCK_D": max(NARROWEST, next_power_of_2(d)),
            "BLOCK_DV": max(NARROWEST, next_power_of_2(dv)),
        }  # fmt: skip
        none: dict[str, Any] = dict.fromkeys(OPERANDS)
        return cls(
            reason=reason, numbers=replace(terms, tiles=(), **none), full=(b, h, sq, sk), heads=heads,
            widths=widths, dtype=q.dtype, device=q.device, lists=bool(terms.tiles),
            straight=all(map(in_rows, (q, k, v))),
            strides={f"{name}_strides": row_strides(t)[:3] for name, t in (("q", q), ("k", k), ("v", v))},
            plain=all(getattr(terms, name) is None for name in OPERANDS),
            hides=terms.q_ids is not None or terms.valid is not None or terms.mask is not None,
        )  # fmt: skip

    def launch(self, kernel: str) -> _Launch:
        """Of one of KERNELS."""
        found = self._launches.get(kernel)
        if found is None:
            found = self._launches[kernel] = self._made(kernel)
        return found

    def _made(self, kernel: str) -> _Launch:
        t, (b, h, sq, sk) = self.numbers, self.full
        config = _chosen(kernel, self.device, self.dtype, self.widths["D"], self.widths["DV"])
        if self.lists:
            config = replace(
                config,
                block_m=math.gcd(config.block_m, t.block_q),
                block_n=math.gcd(config.block_n, t.block_k),
            )
        m, n = config.block_m, config.block_n
        fixed: Arguments = {
            **self.strides, **self.widths, "scale": t.scale, "softcap": t.softcap or None, "lo": t.lo,
            "hi": t.hi, "chunk": t.chunk or None, "heads": h, "group": h // self.heads, "q_len": sq,
            "k_len": sk, "BLOCK_M": m, "BLOCK_N": n, "PRECISION": config.precision, **config.launch,
            **(_NOTHING if self.plain else {}),
        }  # fmt: skip
        by_keys = kernel == "dkdv"
        programs = cdiv(sk, n) * self.heads * b if by_keys else cdiv(sq, m) * h * b
        if self.lists:
            return _Launch(config, programs, fixed, None)
        fixed |= {"list_strides": (0, 0), "LIST_M": m, "LIST_N": n}
        return _Launch(
            config, programs, fixed, (t.lo, t.hi, t.chunk, sq, sk, m, n, self.device, self.hides, by_keys)
        )

    def call(self, q: Tensor, k: Tensor, v: Tensor, rest: Sequence[object]) -> AttentionCall:
        """One of this form, with the operators' other tensors."""
        if not self.straight:
            q, k, v = by_rows(q), by_rows(k), by_rows(v)
        operands: Any = {} if self.plain else dict(zip(OPERANDS, rest, strict=False))
        tiles: Any = rest[len(OPERANDS)] if self.lists else ()
        return AttentionCall(self, q, k, v, operands, tiles)


@dataclass(slots=True)
class AttentionCall:
    """A checked call, prepared: q, k, v with last stride 1, tensors of its terms by name, and its lists: 8, 4
    or none.
    """

    form: AttentionForm
    q: Tensor
    k: Tensor
    v: Tensor
    operands: Mapping[str, Tensor | None]
    tiles: Sequence[Tensor]

    @classmethod
    def of(cls, q: Tensor, k: Tensor, v: Tensor, terms: Terms, tiles: Sequence[Tensor]) -> AttentionCall:
        form = AttentionForm.of(q, k, v, replace(terms, tiles=tuple(tiles[:4])))
        return form.call(q, k, v, (*(getattr(terms, name) for name in OPERANDS), tiles))

    def arguments(self, launch: _Launch, *, transposed: bool = False) -> Arguments:
        """What all kernels but delta take, by name, with the options of the launch."""
        form, more = self.form, {}
        if not form.plain:
            more = self._terms()
        if launch.lists is not None:
            # a recording of the launch does not outlive them
            lists: Sequence[Tensor] = keep(closed_form(*launch.lists))
        else:
            given = given_lists(self.tiles, form.numbers, *form.full[2:], transposed=transposed)
            lists = given.tensors
            more |= {"list_strides": given.strides, "LIST_M": given.block_m, "LIST_N": given.block_n}
        return {
            "q": self.q, "k": self.k, "v": self.v, "partial_count": lists[0], "partial_index": lists[1],
            "full_count": lists[2], "full_index": lists[3], **launch.fixed, **more,
        }  # fmt: skip

    def _terms(self) -> Arguments:
        """As _NOTHING, of the tensors that there are."""
        t, full = self.operands.get, self.form.full
        ids = [
            None if x is None else x.contiguous().expand(full[0], -1)
            for x in (t("q_ids"), t("k_ids"), t("valid"))
        ]
        bias, mask = (None if x is None else x.expand(full) for x in (t("bias"), t("mask")))
        return {
            "bias": bias, "mask": None if mask is None else mask.view(torch.uint8),
            "q_ids": ids[0], "k_ids": ids[1], "valid": None if ids[2] is None else ids[2].view(torch.uint8),
            "bias_strides": _strides(bias, 4), "mask_strides": _strides(mask, 4),
            "row_strides": tuple(0 if x is None else x.stride(0) for x in ids),
        }  # fmt: skip


def _chosen(kernel: str, device: torch.device, dtype: torch.dtype, d: int, dv: int) -> LaunchConfig:
    """The fastest of them, as measured on this GPU; the likeliest elsewhere."""
    offered = options(kernel, device, dtype, d, dv)
    assert offered, "declines() was not asked"
    if device.type != "cuda" or len(offered) == 1:
        return offered[0]
    size = head_class(d, dv)
    name = f"{kernel} {dtype_name(dtype)} {size}"
    # nothing can be timed within a recording
    measure = under_way() and not torch.cuda.is_current_stream_capturing()
    with torch.cuda.device(device):
        return tune.tuner(device).choose(
            name, offered, lambda config: trial(kernel, config, device, dtype, size), measure=measure
        )


def trial(
    kernel: str,
    config: LaunchConfig,
    device: torch.device,
    dtype: torch.dtype,
    d: int,
    *,
    length: int = 8192,
    heads: tuple[int, int] = (16, 4),
) -> Callable[[], object]:
    """One call of a kernel, causal with grouped heads, to time a configuration by: long enough that launching
    it is not what is timed.

    The other kernels take their first choice meanwhile.
    """
    others = {name: options(name, device, dtype, d, d)[0] for name in KERNELS}
    own = torch.Generator(device).manual_seed(0)  # a user's draws are as they would have been
    q, grad = (
        torch.randn(1, heads[0], length, d, device=device, dtype=dtype, generator=own) for _ in range(2)
    )
    k, v = (torch.randn(1, heads[1], length, d, device=device, dtype=dtype, generator=own) for _ in range(2))
    terms = Terms(scale=d**-0.5, hi=0)
    rows = torch.zeros(1, heads[0], length, device=device)

    def run() -> object:
        with using(**{**others, kernel: config}):
            if kernel == "forward":
                return forward(q, k, v, terms)
            call = AttentionCall.of(q, k, v, terms, ())
            given = {"grad": grad, "grad_strides": grad.stride()[:3], "bottom": rows, "delta": rows}
            with _on(q):
                return _dq(call, given, wanted=False) if kernel == "dq" else _dkdv(call, given)

    return run


def forward(
    q: Tensor, k: Tensor, v: Tensor, terms: Terms, tiles: Sequence[Tensor] = ()
) -> tuple[Tensor, Tensor]:
    """(out [B, H, Sq, Dv], lse [B, H, Sq] in fp32) of checked arguments that are not declined.

    `tiles`: 8 lists, 4, or none.
    """
    return run_forward(AttentionCall.of(q, k, v, terms, tiles))


def run_forward(call: AttentionCall) -> tuple[Tensor, Tensor]:
    """As `forward`, of a call that is prepared."""
    form = call.form
    b, h, sq, sk = form.full
    out = torch.empty((b, h, sq, form.widths["DV"]), dtype=form.dtype, device=form.device)
    lse = torch.empty((b, h, sq), dtype=torch.float32, device=form.device)
    launch, sink = form.launch("forward"), call.operands.get("sink")
    sink = None if sink is None else sink_rows(sink).expand(b, h, sq)
    with _on(call.q):
        attention_forward[(launch.programs,)](
            out=out, lse=lse, sink=sink, sink_strides=_strides(sink, 3), **call.arguments(launch)
        )
    if form.numbers.uniform_empty and sink is None and sk:
        mean = call.v.float().mean(2, keepdim=True).repeat_interleave(h // form.heads, 1).to(out.dtype)
        out = torch.where(lse.isneginf().unsqueeze(3), mean, out)
    return out, lse


def backward(
    call: AttentionCall, grad_out: Tensor, out: Tensor, lse: Tensor, wanted: NeededGradients = ALL_WANTED
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(dq, dk, dv, dbias, dsink) as `effcompile::attention_backward`; the last two of size (0) where not
    wanted or not there.
    """
    grad_out, lse, sink = by_rows(grad_out), lse.contiguous(), call.operands.get("sink")
    with _on(call.q):
        rows = _rows(call, out, grad_out, lse)
        dq, dbias = _dq(call, rows, wanted=wanted.bias_gradient)
        dk, dv = _dkdv(call, rows)
    if call.form.numbers.uniform_empty and sink is None:
        _add_uniform(call, grad_out, lse, rows["delta"], dq, dk, dv)
    dsink = call.q.new_empty(0)
    if sink is not None and wanted.sink_gradient:
        of_rows = sink_rows(sink)
        share = -(of_rows.float() - lse).exp() * rows["delta"]
        dsink = share.sum_to_size(of_rows.shape).reshape(sink.shape).to(sink.dtype)
    return dq, dk, dv, dbias, dsink


def _rows(call: AttentionCall, out: Tensor, grad: Tensor, lse: Tensor) -> Arguments:
    """What both kernels of the backward take besides the forward's arguments: each row's terms are made once,
    by a kernel of their own.
    """
    form = call.form
    _, h, sq, _ = form.full
    delta, bottom = torch.empty_like(lse), torch.empty_like(lse)
    launch, strides = form.launch("dq"), grad.stride()[:3]
    attention_delta[(launch.programs,)](
        out.contiguous(),
        grad,
        lse,
        delta,
        bottom,
        strides,
        h,
        sq,
        form.widths["DV"],
        form.widths["BLOCK_DV"],
        launch.config.block_m,
    )
    return {"grad": grad, "grad_strides": strides, "bottom": bottom, "delta": delta}


def _dq(call: AttentionCall, rows: Arguments, *, wanted: bool) -> tuple[Tensor, Tensor]:
    form, bias = call.form, call.operands.get("bias")
    dq, launch = torch.empty(call.q.shape, dtype=form.dtype, device=form.device), form.launch("dq")
    if bias is None or not wanted:
        attention_dq[(launch.programs,)](dq=dq, **_NO_BIAS_GRADIENT, **rows, **call.arguments(launch))
        return dq, call.q.new_empty(0)
    shared = [size < whole for size, whole in zip(bias.shape, form.full, strict=True)]
    whole = torch.are_deterministic_algorithms_enabled() or not any(shared)
    made = bias.new_zeros(
        torch.Size(form.full) if whole else bias.shape, dtype=torch.float32 if any(shared) else bias.dtype
    )
    sums = {} if whole else {"SUM_ROWS": shared[2], "SUM_COLUMNS": shared[3], "ATOMIC": True}
    given = {**_NO_BIAS_GRADIENT, "dbias": made, "dbias_strides": made.expand(form.full).stride(), **sums}
    attention_dq[(launch.programs,)](dq=dq, **given, **rows, **call.arguments(launch))
    return dq, made.sum_to_size(bias.shape).to(bias.dtype)


def _dkdv(call: AttentionCall, rows: Arguments) -> tuple[Tensor, Tensor]:
    form = call.form
    dk, dv = (torch.empty(t.shape, dtype=form.dtype, device=form.device) for t in (call.k, call.v))
    launch = form.launch("dkdv")
    if launch.programs:
        attention_dkdv[(launch.programs,)](dk=dk, dv=dv, **rows, **call.arguments(launch, transposed=True))
    return dk, dv


def _add_uniform(
    call: AttentionCall, grad: Tensor, lse: Tensor, delta: Tensor, dq: Tensor, dk: Tensor, dv: Tensor
) -> None:
    """Rows that see nothing weigh every key 1 / Sk.

    Their slopes (grad · v − delta) / Sk reach q and k where the scores were only added to.

    Summed over queries or keys first, each product is of head-size matrices: no [Sq, Sk].
    """
    (b, h, _, sk), numbers = call.form.full, call.form.numbers
    heads, empty = call.form.heads, lse.isneginf().unsqueeze(3)
    group = (b, heads, h // heads)
    grad, delta = (torch.where(empty, t.float(), 0.0) for t in (grad, delta.unsqueeze(3)))
    dv += (grad.unflatten(1, group[1:]).sum((2, 3)) / sk).unsqueeze(2).to(dv.dtype)
    if numbers.fills:
        return
    factor = numbers.scale / sk
    q, k, v = torch.where(empty, call.q.float(), 0.0), call.k.float(), call.v.float()
    mixed, summed = (t.repeat_interleave(group[2], 1) for t in (v.mT @ k, k.sum(2, keepdim=True)))
    dq += (factor * (grad @ mixed - delta * summed)).to(dq.dtype)
    pairs, own = (t.unflatten(1, group[1:]).sum(2) for t in (grad.mT @ q, (delta * q).sum(2, keepdim=True)))
    dk += (factor * (v @ pairs - own)).to(dk.dtype)


def _strides(t: Tensor | None, axes: int) -> tuple[int, ...]:
    return (0,) * axes if t is None else t.stride()


def _on(t: Tensor) -> AbstractContextManager[object]:
    """The tensor's device as the current one, where kernels are launched."""
    return torch.cuda.device_of(t)
