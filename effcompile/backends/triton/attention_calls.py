"""Calls of the attention kernels: what those of one form have in common, what each brings, and how they are
launched.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from effcompile.backends.torch.kept import keep
from effcompile.backends.triton import tune
from effcompile.backends.triton.attention_launch import Launch, aligned, describable
from effcompile.backends.triton.attention_tiles import NARROWEST, closed_form, given_lists, options
from effcompile.backends.triton.configs import KERNELS, LaunchConfig, dtype_name, head_class, using
from effcompile.backends.triton.kernels.attention_backward import attention_delta
from effcompile.backends.triton.layout import by_rows, cdiv, in_rows, next_power_of_2, on, row_strides
from effcompile.core.building import under_way
from effcompile.core.types import Arguments
from effcompile.ops.attention_terms import ALL_WANTED, NeededGradients, Terms, sink_rows
from effcompile.ops.mask import OPERANDS

#: Terms that are tensors, as the kernels name them, where a call has none.
_NOTHING: Arguments = {
    "bias": None, "mask": None, "q_ids": None, "k_ids": None, "valid": None, "bias_strides": (0,) * 4,
    "mask_strides": (0,) * 4, "row_strides": (0,) * 3,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class AttentionForm:
    """What calls with the same shapes, strides, dtypes, device and numbers have in common.

    reason: why the kernels decline them, or None. even: some kernel may copy whole tiles of their tensors,
    where these begin at even addresses. numbers: the terms without their tensors. full: (B, H, Sq,
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
    even: bool
    lists: bool
    plain: bool
    hides: bool
    _launches: dict[str, Launch] = field(default_factory=dict)

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
            straight=all(map(in_rows, (q, k, v))), even=_in_tiles(q, k, v),
            strides={f"{name}_strides": row_strides(t)[:3] for name, t in (("q", q), ("k", k), ("v", v))},
            plain=all(getattr(terms, name) is None for name in OPERANDS),
            hides=terms.q_ids is not None or terms.valid is not None or terms.mask is not None,
        )  # fmt: skip

    def launch(self, kernel: str, *, even: bool = False) -> Launch:
        """Of one of KERNELS; `even`: what it reads may be copied in whole tiles."""
        name = f"{kernel} in tiles" if even and self.even else kernel
        found = self._launches.get(name)
        if found is None:
            found = self._launches[name] = self._made(kernel, tma=even and self.even)
        return found

    def _made(self, kernel: str, *, tma: bool) -> Launch:
        t, (b, h, sq, sk) = self.numbers, self.full
        widths = self.widths
        config = _chosen(kernel, self.device, self.dtype, widths["D"], widths["DV"], tma=tma)
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
            "k_len": sk, "BLOCK_M": m, "BLOCK_N": n, "PRECISION": config.precision, "TMA": config.tma,
            **(_NOTHING if self.plain else {}),
        }  # fmt: skip
        by_keys = kernel == "dkdv"
        programs = cdiv(sk, n) * self.heads * b if by_keys else cdiv(sq, m) * h * b
        if self.lists:
            return Launch.of(kernel, config, programs, fixed, None)
        fixed |= {"list_strides": (0, 0), "LIST_M": m, "LIST_N": n}
        lists = (t.lo, t.hi, t.chunk, sq, sk, m, n, self.device, self.hides, by_keys)
        return Launch.of(kernel, config, programs, fixed, lists)

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

    def brought(self, launch: Launch, *, transposed: bool = False) -> Arguments:
        """What it brings to all kernels but delta, by name."""
        form = self.form
        given: Arguments = {} if form.plain else self._terms()
        given["q"], given["k"], given["v"] = self.q, self.k, self.v
        if launch.lists is not None:
            # a recording of the launch does not outlive them
            lists: Sequence[Tensor] = keep(closed_form(*launch.lists))
        else:
            walked = given_lists(self.tiles, form.numbers, *form.full[2:], transposed=transposed)
            lists = walked.tensors
            given |= {"list_strides": walked.strides, "LIST_M": walked.block_m, "LIST_N": walked.block_n}
        (given["partial_count"], given["partial_index"], given["full_count"], given["full_index"]) = lists
        return given

    def even(self) -> bool:
        """Whether its keys and values can be copied in whole tiles."""
        return self.form.even and aligned(self.k, self.v)

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


def _chosen(
    kernel: str, device: torch.device, dtype: torch.dtype, d: int, dv: int, *, tma: bool = False
) -> LaunchConfig:
    """The fastest of them, as measured on this GPU; the likeliest elsewhere. `tma`: also of those that copy
    whole tiles.
    """
    every = options(kernel, device, dtype, d, dv)
    assert every, "declines() was not asked"
    offered = tuple(one for one in every if tma or not one.tma) or (replace(every[0], tma=False),)
    if device.type != "cuda" or len(offered) == 1:
        return offered[0]
    size = head_class(d, dv)
    name = f"{kernel} {dtype_name(dtype)} {size}{' in tiles' if tma else ''}"
    # nothing can be timed within a recording
    measure = under_way() and not torch.cuda.is_current_stream_capturing()
    if measure and any(one.tma for one in offered) and _refuted_in_tiles(device):
        offered = tuple(one for one in offered if not one.tma)
    with torch.cuda.device(device):
        return tune.tuner(device).choose(
            name, offered, lambda config: trial(kernel, config, device, dtype, size), measure=measure
        )


def _in_tiles(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether what copies whole tiles can be offered these, and a contiguous gradient of the output."""
    d, dv = q.shape[3], v.shape[3]
    return (
        all(in_rows(t) and describable(t) for t in (q, k, v))
        and describable(v.new_empty((1, 1, 2, dv), device="meta"))
        and any(one.tma for kernel in KERNELS for one in options(kernel, q.device, q.dtype, d, dv))
    )


def _refuted_in_tiles(device: torch.device) -> bool:
    """Whether what copies whole tiles was seen to be wrong on a GPU, or to end its process; or nothing can be
    compared here: the kernels need torch and triton alone, and what compares them msgspec.
    """
    try:
        proof = import_module("effcompile.backends.triton.proof")
    except ImportError:
        return True
    found = proof.proven(("attention_in_tiles",), device.type, ("bfloat16",))
    return found["attention_in_tiles"] is not None


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
    others = {name: options(name, device, dtype, d, d)[0] for name in KERNELS}  # of no whole tiles
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
            with on(q):
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
    launch, sink = form.launch("forward", even=call.even()), call.operands.get("sink")
    given = call.brought(launch)
    given["out"], given["lse"] = out, lse
    if sink is not None:
        rows = sink_rows(sink).expand(b, h, sq)
        given["sink"], given["sink_strides"] = rows, rows.stride()
    with on(call.q):
        launch(given)
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
    with on(call.q):
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
    dv, block = form.widths["DV"], form.widths["BLOCK_DV"]
    attention_delta[launch.grid](
        out.contiguous(), grad, lse, delta, bottom, strides, h, sq, dv, block, launch.config.block_m
    )
    return {"grad": grad, "grad_strides": strides, "bottom": bottom, "delta": delta}


def _dq(call: AttentionCall, rows: Arguments, *, wanted: bool) -> tuple[Tensor, Tensor]:
    form, bias = call.form, call.operands.get("bias")
    dq = torch.empty(call.q.shape, dtype=form.dtype, device=form.device)
    launch = form.launch("dq", even=call.even())
    given = call.brought(launch)
    given.update(rows)
    given["dq"] = dq
    if bias is None or not wanted:
        launch(given)
        return dq, call.q.new_empty(0)
    shared = [size < whole for size, whole in zip(bias.shape, form.full, strict=True)]
    whole = torch.are_deterministic_algorithms_enabled() or not any(shared)
    made = bias.new_zeros(
        torch.Size(form.full) if whole else bias.shape, dtype=torch.float32 if any(shared) else bias.dtype
    )
    sums = {} if whole else {"SUM_ROWS": shared[2], "SUM_COLUMNS": shared[3], "ATOMIC": True}
    launch({**given, "dbias": made, "dbias_strides": made.expand(form.full).stride(), **sums})
    return dq, made.sum_to_size(bias.shape).to(bias.dtype)


def _dkdv(call: AttentionCall, rows: Arguments) -> tuple[Tensor, Tensor]:
    form, grad = call.form, rows["grad"]
    launch = form.launch("dkdv", even=form.even and grad.is_contiguous() and aligned(call.q, grad))
    dk = torch.empty(call.k.shape, dtype=form.dtype, device=form.device)
    dv = torch.empty(call.v.shape, dtype=form.dtype, device=form.device)
    if launch.grid[0]:
        given = call.brought(launch, transposed=True)
        given.update(rows)
        given["dk"], given["dv"] = dk, dv
        launch(given)
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
