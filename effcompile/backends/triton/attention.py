"""Attention on the tiled kernels: `effcompile::attention` and its backward, once `register` has made them a device's kernels.

What the kernels do not take goes to the default kernel, with a reason (`declines`): never a wrong result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from effcompile.backends.torch.kept import keep
from effcompile.backends.triton import tune
from effcompile.backends.triton.configs import (
    KERNELS,
    LaunchConfig,
    architecture,
    candidates,
    dtype_name,
    head_class,
    here,
    shared_memory,
    using,
)
from effcompile.backends.triton.kernels.attention import attention_delta, attention_dkdv, attention_dq, attention_forward
from effcompile.backends.triton.layout import WIDEST, by_rows, cdiv, next_power_of_2
from effcompile.core.building import under_way
from effcompile.core.types import Arguments
from effcompile.ops import attention_kernel
from effcompile.ops.attention import attention, attention_backward
from effcompile.ops.attention_terms import ALL_WANTED, NeededGradients, Terms, check, sink_rows
from effcompile.ops.mask import OPERANDS, TILES
from effcompile.ops.tiles import TileList
from effcompile.ops.visibility import Visibility

__all__ = ["backward", "declines", "forward", "register"]

#: The smallest side of a tile that tensor cores take.
_NARROWEST = 16


def declines(q: Tensor, k: Tensor, v: Tensor, terms: Terms, *, backward: bool = False) -> str | None:
    """None, or why these arguments are not for the tiled kernels."""
    if q.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"{q.dtype} has no tensor-core kernel"
    if not all(q.shape) or not k.shape[3] or not v.shape[3]:
        return f"an empty q {tuple(q.shape)} or width of v {v.shape[3]}"
    if not terms.scale > 0:
        return f"a scale of {terms.scale}, which is not positive"
    for name, block in (("block_q", terms.block_q), ("block_k", terms.block_k)):
        if terms.tiles and math.gcd(block, 2**20) < _NARROWEST:
            return f"{name} {block} is no multiple of {_NARROWEST}"
    if not all(_options(kernel, q.device, q.dtype, q.shape[3], v.shape[3]) for kernel in KERNELS):
        return f"no tile of head size {max(q.shape[3], v.shape[3])} in {q.dtype} fits this GPU"
    for name, term in (("bias", terms.bias), ("mask", terms.mask)):
        if term is not None and max(term.stride()[2:]) > WIDEST:
            return f"rows or columns of {name} that are more than {WIDEST} elements apart"
    if backward and terms.uniform_empty and not terms.fills and terms.sink is None and (terms.softcap or terms.bias is not None):
        return "rows that see nothing have gradients through the softcap or bias"
    return None


@dataclass(frozen=True, slots=True)
class _Lists:
    """What a kernel walks: four tensors, their strides in rows of the lists per batch and head, and the lists' tile in elements."""

    tensors: tuple[Tensor, ...]
    strides: tuple[int, int]
    block_m: int
    block_n: int


@dataclass(frozen=True, slots=True)
class _Call:
    """A checked call, prepared: q, k, v with last stride 1, the terms, and the lists given (4, 8 or no tensors).

    full: (B, H, Sq, Sk). widths: of heads, as kernels take them.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    terms: Terms
    tiles: tuple[Tensor, ...]
    full: tuple[int, int, int, int]
    widths: dict[str, int]

    @classmethod
    def of(cls, q: Tensor, k: Tensor, v: Tensor, terms: Terms, tiles: Sequence[Tensor]) -> _Call:
        b, h, sq, d = q.shape
        dv = v.shape[3]
        widths = {
            "D": d, "DV": dv, "BLOCK_D": max(_NARROWEST, next_power_of_2(d)), "BLOCK_DV": max(_NARROWEST, next_power_of_2(dv)),
        }  # fmt: skip
        return cls(by_rows(q), by_rows(k), by_rows(v), terms, tuple(tiles), (b, h, sq, k.shape[2]), widths)

    def config(self, kernel: str) -> LaunchConfig:
        """The kernel's tiles, cut to divide the given lists'."""
        config = _chosen(kernel, self.q.device, self.q.dtype, self.q.shape[3], self.v.shape[3])
        if not self.tiles:
            return config
        m, n = math.gcd(config.block_m, self.terms.block_q), math.gcd(config.block_n, self.terms.block_k)
        return replace(config, block_m=m, block_n=n)

    def lists(self, config: LaunchConfig, *, transposed: bool = False) -> _Lists:
        """The given lists, or those of band and chunk in the kernel's own tiles."""
        t = self.terms
        if self.tiles:
            found = _transposed(self.tiles, t, *self.full[2:]) if transposed else self.tiles[:4]
            block_m, block_n = t.block_q, t.block_k
        else:
            within = t.q_ids is not None or t.valid is not None or t.mask is not None
            block_m, block_n = config.block_m, config.block_n
            both = keep(_closed_form(t.lo, t.hi, t.chunk, *self.full[2:], block_m, block_n, self.q.device, within))
            found = both[4:] if transposed else both[:4]
        b, h, rows = found[0].shape
        strides = (h * rows if b > 1 else 0, rows if h > 1 else 0)
        return _Lists(tuple(t.contiguous() for t in found), strides, block_m, block_n)

    def arguments(self, config: LaunchConfig, lists: _Lists) -> Arguments:
        """What all kernels but delta take, by name."""
        t, (b, h, sq, sk) = self.terms, self.full
        ids = [None if x is None else _per_batch(x, b) for x in (t.q_ids, t.k_ids, t.valid)]
        bias, mask = (None if x is None else x.expand(self.full) for x in (t.bias, t.mask))
        return {
            "q": self.q, "k": self.k, "v": self.v, "bias": bias, "mask": None if mask is None else mask.view(torch.uint8),
            "q_ids": ids[0], "k_ids": ids[1], "valid": None if ids[2] is None else ids[2].view(torch.uint8),
            **dict(zip(TILES, lists.tensors, strict=True)),
            "q_strides": self.q.stride()[:3], "k_strides": self.k.stride()[:3], "v_strides": self.v.stride()[:3],
            "bias_strides": _strides(bias, 4), "mask_strides": _strides(mask, 4),
            "row_strides": tuple(0 if x is None else x.stride(0) for x in ids), "list_strides": lists.strides,
            "scale": t.scale, "softcap": t.softcap or None, "lo": t.lo, "hi": t.hi, "chunk": t.chunk or None,
            "heads": h, "group": h // self.k.shape[1], "q_len": sq, "k_len": sk, **self.widths,
            "BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "LIST_M": lists.block_m, "LIST_N": lists.block_n,
            "PRECISION": config.precision,
        }  # fmt: skip


def _options(kernel: str, device: torch.device, dtype: torch.dtype, d: int, dv: int) -> tuple[LaunchConfig, ...]:
    """What the kernel can be launched with on a device."""
    if device.type != "cuda":
        return candidates(kernel, None, dtype, d, dv)
    arch = architecture(device)
    return () if arch is None else candidates(kernel, arch, dtype, d, dv, shared_memory(device), here(device))


def _chosen(kernel: str, device: torch.device, dtype: torch.dtype, d: int, dv: int) -> LaunchConfig:
    """The fastest of them, as measured on this GPU; the likeliest elsewhere."""
    options = _options(kernel, device, dtype, d, dv)
    assert options, "declines() was not asked"
    found = tune.tuner(device) if device.type == "cuda" and len(options) > 1 else None
    if found is None:
        return options[0]
    name = f"{kernel} {dtype_name(dtype)} {head_class(d, dv)}"
    with torch.cuda.device(device):
        return found.choose(
            name, options, lambda config: trial(kernel, config, device, dtype, head_class(d, dv)), measure=under_way()
        )  # fmt: skip


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
    """One call of a kernel, causal with grouped heads, to time a configuration by: long enough that launching it is not what is timed.

    The other kernels take their first choice meanwhile.
    """
    others = {name: _options(name, device, dtype, d, d)[0] for name in KERNELS}
    own = torch.Generator(device).manual_seed(0)  # a user's draws are as they would have been
    q, grad = (torch.randn(1, heads[0], length, d, device=device, dtype=dtype, generator=own) for _ in range(2))
    k, v = (torch.randn(1, heads[1], length, d, device=device, dtype=dtype, generator=own) for _ in range(2))
    terms = Terms(scale=d**-0.5, hi=0)
    rows = torch.zeros(1, heads[0], length, device=device)

    def run() -> object:
        with using(**{**others, kernel: config}):
            if kernel == "forward":
                return forward(q, k, v, terms)
            call = _Call.of(q, k, v, terms, ())
            given = {"grad": grad, "grad_strides": grad.stride()[:3], "bottom": rows, "delta": rows}
            return _dq(call, given, wanted=False) if kernel == "dq" else _dkdv(call, given)

    return run


def register(device: str) -> None:
    """Run `effcompile::attention` and its backward on the tiled kernels on this type of device."""
    attention.register_kernel(device)(_attention)
    attention_backward.register_kernel(device)(_attention_backward)


def _attention(q: Tensor, k: Tensor, v: Tensor, *rest: object, **form: object) -> tuple[Tensor, Tensor]:
    terms = Terms.of(*rest, **form)
    check(q, k, v, terms)
    if declines(q, k, v, terms) is not None:
        return attention_kernel.forward(q, k, v, terms)
    return forward(q, k, v, terms, _tiles(rest))


def _attention_backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *rest: object, **form: object
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    wanted, form = NeededGradients.taken_from(form)
    terms = Terms.of(*rest, **form)
    check(q, k, v, terms)
    if declines(q, k, v, terms, backward=True) is not None:
        return attention_kernel.backward(grad_out, q, k, v, out, lse, terms, wanted)
    return backward(_Call.of(q, k, v, terms, _tiles(rest)), grad_out, out, lse, wanted)


def _tiles(rest: Sequence[object]) -> Sequence[Tensor]:
    """The lists among the operators' optional arguments."""
    given = rest[len(OPERANDS)] if len(rest) > len(OPERANDS) else None
    return given if isinstance(given, (list, tuple)) else ()


def forward(q: Tensor, k: Tensor, v: Tensor, terms: Terms, tiles: Sequence[Tensor] = ()) -> tuple[Tensor, Tensor]:
    """(out [B, H, Sq, Dv], lse [B, H, Sq] in fp32) of checked arguments that are not declined. `tiles`: 8 lists, 4, or none."""
    call = _Call.of(q, k, v, terms, tiles)
    b, h, sq, _ = call.full
    out, lse = q.new_empty((b, h, sq, v.shape[3])), q.new_empty((b, h, sq), dtype=torch.float32)
    config = call.config("forward")
    sink = None if terms.sink is None else sink_rows(terms.sink).expand(b, h, sq)
    arguments = call.arguments(config, call.lists(config))
    with _on(q):
        attention_forward[(cdiv(sq, config.block_m) * h * b,)](
            out=out, lse=lse, sink=sink, sink_strides=_strides(sink, 3), **arguments, **config.launch
        )
    if terms.uniform_empty and sink is None and k.shape[2]:
        mean = v.float().mean(2, keepdim=True).repeat_interleave(h // k.shape[1], 1).to(out.dtype)
        out = torch.where(lse.isneginf().unsqueeze(3), mean, out)
    return out, lse


def backward(
    call: _Call, grad_out: Tensor, out: Tensor, lse: Tensor, wanted: NeededGradients = ALL_WANTED
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(dq, dk, dv, dbias, dsink) as `effcompile::attention_backward`; the last two of size (0) where not wanted or not there."""
    grad_out, terms = by_rows(grad_out), call.terms
    given = _prepared(call, out, grad_out, lse)
    dq, dbias = _dq(call, given, wanted=wanted.bias_gradient)
    dk, dv = _dkdv(call, given)
    if terms.uniform_empty and terms.sink is None:
        _add_uniform(call, grad_out, lse, given["delta"], dq, dk, dv)
    dsink = call.q.new_empty(0)
    if terms.sink is not None and wanted.sink_gradient:
        rows = sink_rows(terms.sink)
        share = -(rows.float() - lse).exp() * given["delta"]
        dsink = share.sum_to_size(rows.shape).reshape(terms.sink.shape).to(terms.sink.dtype)
    return dq, dk, dv, dbias, dsink


def _prepared(call: _Call, out: Tensor, grad: Tensor, lse: Tensor) -> Arguments:
    """What both kernels of the backward take besides the forward's arguments: each row's terms are made once, by a kernel of their own."""
    b, h, sq, _ = call.full
    delta, bottom = (call.q.new_empty((b, h, sq), dtype=torch.float32) for _ in range(2))
    config = call.config("dq")
    with _on(out):
        attention_delta[(cdiv(sq, config.block_m) * h * b,)](
            out.contiguous(), grad, lse.contiguous(), delta, bottom, grad.stride()[:3], h, sq, call.widths["DV"], call.widths["BLOCK_DV"],
            config.block_m,
        )  # fmt: skip
    return {"grad": grad, "grad_strides": grad.stride()[:3], "bottom": bottom, "delta": delta}


def _dq(call: _Call, given: Arguments, *, wanted: bool) -> tuple[Tensor, Tensor]:
    b, h, sq, _ = call.full
    config = call.config("dq")
    dq, bias, buffer = torch.empty(call.q.shape, dtype=call.q.dtype, device=call.q.device), call.terms.bias, None
    sums: dict[str, Any] = {"SUM_ROWS": False, "SUM_COLUMNS": False, "ATOMIC": False}
    if bias is not None and wanted:
        shared = [size < whole for size, whole in zip(bias.shape, call.full, strict=True)]
        whole = torch.are_deterministic_algorithms_enabled() or not any(shared)
        shape = torch.Size(call.full) if whole else bias.shape
        buffer = bias.new_zeros(shape, dtype=bias.dtype if not any(shared) else torch.float32)
        if not whole:
            sums = {"SUM_ROWS": shared[2], "SUM_COLUMNS": shared[3], "ATOMIC": True}
    with _on(dq):
        attention_dq[(cdiv(sq, config.block_m) * h * b,)](
            dq=dq, dbias=buffer, dbias_strides=_strides(None if buffer is None else buffer.expand(call.full), 4), **given,
            **call.arguments(config, call.lists(config)), **sums, **config.launch
        )  # fmt: skip
    dbias = call.q.new_empty(0) if buffer is None or bias is None else buffer.sum_to_size(bias.shape).to(bias.dtype)
    return dq, dbias


def _dkdv(call: _Call, given: Arguments) -> tuple[Tensor, Tensor]:
    dk, dv = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (call.k, call.v))
    config = call.config("dkdv")
    programs = cdiv(call.k.shape[2], config.block_n) * call.k.shape[1] * call.k.shape[0]
    if programs:
        with _on(dk):
            attention_dkdv[(programs,)](
                dk=dk, dv=dv, **given, **call.arguments(config, call.lists(config, transposed=True)), **config.launch
            )  # fmt: skip
    return dk, dv


def _add_uniform(call: _Call, grad: Tensor, lse: Tensor, delta: Tensor, dq: Tensor, dk: Tensor, dv: Tensor) -> None:
    """Rows that see nothing weigh every key 1 / Sk. Their slopes (grad · v − delta) / Sk reach q and k where the scores were only added to.

    Summed over queries or keys first, each product is of head-size matrices: no [Sq, Sk].
    """
    b, h, _, sk = call.full
    heads, empty = call.k.shape[1], lse.isneginf().unsqueeze(3)
    group = (b, heads, h // heads)
    grad, delta = (torch.where(empty, t.float(), 0.0) for t in (grad, delta.unsqueeze(3)))
    dv += (grad.unflatten(1, group[1:]).sum((2, 3)) / sk).unsqueeze(2).to(dv.dtype)
    if call.terms.fills:
        return
    factor = call.terms.scale / sk
    q, k, v = torch.where(empty, call.q.float(), 0.0), call.k.float(), call.v.float()
    mixed, summed = (t.repeat_interleave(group[2], 1) for t in (v.mT @ k, k.sum(2, keepdim=True)))
    dq += (factor * (grad @ mixed - delta * summed)).to(dq.dtype)
    pairs, own = (t.unflatten(1, group[1:]).sum(2) for t in (grad.mT @ q, (delta * q).sum(2, keepdim=True)))
    dk += (factor * (v @ pairs - own)).to(dk.dtype)


def _strides(t: Tensor | None, axes: int) -> tuple[int, ...]:
    return (0,) * axes if t is None else t.stride()


def _per_batch(t: Tensor, batch: int) -> Tensor:
    return t.contiguous().expand(batch, -1)


def _on(t: Tensor) -> AbstractContextManager[object]:
    """The tensor's device as the current one, where kernels are launched."""
    return torch.cuda.device_of(t)


def _transposed(tiles: tuple[Tensor, ...], terms: Terms, q_len: int, k_len: int) -> tuple[Tensor, ...]:
    if len(tiles) == 8:
        return tiles[4:]
    given = TileList(q_len=q_len, k_len=k_len, block_q=terms.block_q, block_k=terms.block_k, **dict(zip(TILES, tiles, strict=True)))
    return tuple(given.tensors()[4:])


@lru_cache(maxsize=256)
def _closed_form(
    lo: int | None, hi: int | None, chunk: int, q_len: int, k_len: int, block_q: int, block_k: int, device: torch.device, within: bool
) -> tuple[Tensor, ...]:
    """The 8 lists of band and chunk. `within`: there are other terms, which every tile must ask."""
    tiles = Visibility(lo=lo, hi=hi, chunk=chunk).tiles(block_q, block_k, q_len=q_len, k_len=k_len)
    if within:
        both = tiles.partial | tiles.full
        tiles = TileList.from_grids(both, torch.zeros_like(both), q_len=q_len, k_len=k_len, block_q=block_q, block_k=block_k)
    return tuple(t.to(device) for t in tiles.tensors())
