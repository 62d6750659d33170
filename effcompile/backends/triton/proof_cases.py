"""Each family of kernels beside PyTorch's own arithmetic in float64, on small ragged shapes: what `proof`
runs on a device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from effcompile.backends.triton.attention_tiles import options
from effcompile.backends.triton.configs import KERNELS, using
from effcompile.capture.verify import relative_error
from effcompile.ops import (
    cache_rows,
    compress,
    group_codes,
    group_linear,
    group_quant,
    loss_head,
    rows,
    states8,
)
from effcompile.ops.append import append, buffer
from effcompile.ops.attention import attention
from effcompile.ops.block_sparse import block_sparse_linear
from effcompile.ops.block_sparse_dense import dense_weight
from effcompile.ops.cached_attention import cached_attention
from effcompile.sparse.pattern import BlockPattern

#: dtype → the largest relative error of a right kernel: some rounding of operands and results, and sums in
#: float32.
LIMITS: Mapping[torch.dtype, float] = {torch.bfloat16: 1.2e-2, torch.float16: 2e-3, torch.float32: 1e-4}
#: What some codes that lie between two, and are taken for the other one, add to it.
_A_CODE = 4e-3


@dataclass(frozen=True, slots=True)
class Compared:
    """One result: what the device gave, and what is right.

    `codes`: a value between two codes may take either.
    """

    name: str
    found: Tensor
    wanted: Tensor
    codes: bool = False

    @property
    def error(self) -> float:
        """Relative, in the Euclidean norm; inf where the device's result has a NaN."""
        return relative_error(*(t.detach().double().cpu() for t in (self.found, self.wanted)))

    def limit(self, dtype: torch.dtype) -> float:
        """The largest error of a right kernel."""
        return LIMITS[dtype] + (_A_CODE if self.codes else 0.0)


@dataclass(frozen=True, slots=True)
class Maker:
    """Tensors on a device, from a generator of their own."""

    device: str
    dtype: torch.dtype
    generator: torch.Generator

    def __call__(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator).to(self.dtype).to(self.device)


Case = Callable[[Maker], Iterator[Compared]]


def _both(name: str, run: Callable[..., Tensor], *given: Tensor | None) -> Iterator[Compared]:
    """A function's result and gradients on the device, and of the same numbers in float64 on the CPU, which
    no kernel of ours takes.
    """
    near = [None if t is None else t.detach().requires_grad_() for t in given]
    wide = [None if t is None else t.detach().double().cpu().requires_grad_() for t in given]
    found, wanted = run(*near), run(*wide)
    slope = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(1)).to(found.dtype)
    leaves, exact = [t for t in near if t is not None], [t for t in wide if t is not None]
    yield Compared(name, found, wanted)
    gradients = torch.autograd.grad(found, leaves, slope.to(found.device))
    pairs = zip(gradients, torch.autograd.grad(wanted, exact, slope.double()), strict=True)
    yield from (Compared(f"{name}, gradient {i}", *pair) for i, pair in enumerate(pairs))


def _attention(times: int, name: str, make: Maker) -> Iterator[Compared]:
    """`times`: heads of 64, or 128. "all terms": a window, documents, a softcap and a bias."""
    # the interpreter is slow
    queries, keys, width = (200, 331, 64 * times) if make.device != "cpu" else (40, 51, 16 * times)
    past, every = keys - queries, name == "all terms"
    form: dict[str, object] = (
        {"lo": past - queries // 2, "hi": past, "softcap": 3.0} if every else {"hi": past}
    )
    ids = torch.arange(keys).expand(2, -1) // (keys // 3)
    q, k, v, bias = (
        make(2, 4, queries, width),
        make(2, 2, keys, width),
        make(2, 2, keys, width),
        make(1, 4, queries, keys),
    )
    documents = (ids[:, past:], ids) if every else None
    yield from _both(
        f"{name}, heads of {width}", partial(_attended, form, documents), q, k, v, bias if every else None
    )


def _in_tiles(make: Maker) -> Iterator[Compared]:
    """The kernels that copy whole tiles, where there are some for the device."""
    device, width = torch.device(make.device), 16 if make.device == "cpu" else 128
    offered = {kernel: options(kernel, device, make.dtype, width, width) for kernel in KERNELS}
    if make.device == "cpu":  # the interpreter's
        offered = {kernel: (replace(found[0], tma=True),) for kernel, found in offered.items()}
    tried = {kernel: [one for one in found if one.tma] for kernel, found in offered.items()}
    for turn in range(max(map(len, tried.values()))):
        with using(**{kernel: found[turn % len(found)] for kernel, found in tried.items() if found}):
            yield from _attention(2 if make.device != "cpu" else 1, "causal", make)
            yield from _attention(2 if make.device != "cpu" else 1, "all terms", make)


def _attended(
    form: Mapping[str, object],
    documents: tuple[Tensor, Tensor] | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
) -> Tensor:
    q_ids, k_ids = (None, None) if documents is None else [t.to(q.device) for t in documents]
    out: Tensor = attention(
        q, k, v, bias, None, None, q_ids, k_ids, None, None, scale=q.shape[3] ** -0.5, **form
    )[0]
    return out


def _cached(make: Maker) -> Iterator[Compared]:
    """A token behind a cache that is held in its dtype and in 8 bits; what is hidden is NaN."""
    keys = 700 if make.device != "cpu" else 70
    query, rows = make(2, 4, 1, 64), make(2, 2, keys, 64)
    seen = torch.arange(keys).expand(2, 1, 1, -1) >= torch.tensor([0, keys // 2])[:, None, None, None]
    for kind in (make.dtype, torch.int8):
        held = append(buffer(cache_rows.into(rows, kind).to(kind), keys), rows, keys)
        wide = (cache_rows.as_numbers(held) if kind is torch.int8 else held).double().cpu()
        hidden = ~seen[:, 0, 0, :, None].unsqueeze(1).to(held.device)
        if kind is not torch.int8:
            held = held.masked_fill(hidden, torch.nan)
        found = cached_attention(query, held, held, seen.to(held.device), None)
        wanted = functional.scaled_dot_product_attention(
            query.double().cpu(), *(wide.repeat_interleave(2, 1),) * 2, seen
        )
        yield Compared(f"over a cache of {kind}", found, wanted)


def _grouped(make: Maker) -> Iterator[Compared]:
    """Linears in groups, whose x is rounded to codes by both."""
    for bits, count in ((8, 1), (4, 1), (4, 37)):
        x, weight, bias = make(count, 200).float(), make(70, 200).float().cpu(), make(70).float()
        packed = group_codes.pack(*group_codes.quantize(weight, bits), bits)
        found = group_linear.group_linear(x, packed.to(x.device), 70, bias, "silu")
        wanted = group_codes.linear_by_torch(x.cpu(), packed, 70, bias.cpu(), "silu")
        yield Compared(f"linear of {bits} bits, {count} rows", found, wanted, codes=True)


def _loss_head(make: Maker) -> Iterator[Compared]:
    target, form = torch.arange(45) * 7 % 150, (loss_head.MEAN, -100, 0.5, 1.0, False, 3)
    target[::5] = -100
    near = (make(45, 40), make(150, 40), None, target.to(make.device))
    wide = (near[0].double().cpu(), near[1].double().cpu(), None, target)
    for name, run in (("in one pass", partial(_at_once, form)), ("in two passes", partial(_in_two, form))):
        yield from (
            Compared(f"{name}, {i}", *pair) for i, pair in enumerate(zip(run(*near), run(*wide), strict=True))
        )


def _at_once(
    form: tuple[object, ...], x: Tensor, weight: Tensor, bias: None, target: Tensor
) -> Sequence[Tensor]:
    found: Sequence[Tensor] = loss_head.loss_head_gradients(
        x, weight, bias, target, *form, [True, True, False]
    )
    return found[:3]


def _in_two(
    form: tuple[object, ...], x: Tensor, weight: Tensor, bias: None, target: Tensor
) -> Sequence[Tensor]:
    loss, lse = loss_head.loss_head_forward(x, weight, bias, target, *form)
    found = loss_head.loss_head_backward(
        torch.ones_like(loss), x, weight, bias, target, lse, *form, [True, True, False]
    )
    return [loss, lse, *found[:2]]


def _rows(make: Maker) -> Iterator[Compared]:
    for width in (40, 4096):
        x, other, weight = make(3, 7, width), make(3, 7, width), make(width)
        near = [t.detach().requires_grad_() for t in (x, other, weight)]
        y, total, _ = rows.rms_norm(*near, 1e-5)
        wide = [t.detach().double().cpu().requires_grad_() for t in near]
        rounded = wide[0] + wide[1]
        # the sum is rounded before it is normed
        rounded = rounded + (total.detach().double().cpu() - rounded).detach()
        wanted = rounded * torch.rsqrt(rounded.square().mean(-1, keepdim=True) + 1e-5) * wide[2]
        slope = make(3, 7, width)
        yield Compared(f"norm of {width}", y, wanted)
        gradients = (
            torch.autograd.grad(y, near, slope),
            torch.autograd.grad(wanted, wide, slope.double().cpu()),
        )
        yield from (
            Compared(f"norm of {width}, gradient {i}", *pair)
            for i, pair in enumerate(zip(*gradients, strict=True))
        )
        with torch.no_grad():
            yield Compared(
                f"norm of {width} alone",
                rows.rms_norm_alone(x, weight, 1e-5),
                rows.rms_norm_alone_by_torch(x.double().cpu(), weight.double().cpu(), 1e-5),
            )
        yield from _both(f"gate of {width}", rows.swiglu, x, other)
    x, cos, sin = make(2, 3, 10, 64), make(1, 10, 64), make(1, 10, 64)
    for backwards in (False, True):
        wanted = rows.rotary_by_torch(x.double().cpu(), cos.double().cpu(), sin.double().cpu(), backwards)
        yield Compared(f"rotation, {backwards=}", rows.rotary(x, cos, sin, backwards), wanted)


def _block_sparse(make: Maker) -> Iterator[Compared]:
    for block in (16, 32, 64):
        pattern = BlockPattern.random(4 * block, 6 * block, block, 0.5, torch.Generator().manual_seed(0))
        given = make(70, 6 * block), make(len(pattern.col), block, block), make(4 * block)
        yield from _both(f"blocks of {block}", partial(_product, pattern), *given)


def _product(pattern: BlockPattern, x: Tensor, values: Tensor, bias: Tensor) -> Tensor:
    if x.dtype == torch.float64:
        return functional.linear(x, dense_weight(values, *pattern.indices[:2], x.shape[1]), bias)
    product: Tensor = block_sparse_linear(x, values, *(t.to(x.device) for t in pattern.indices), bias)
    return product


def _codes(make: Maker) -> Iterator[Compared]:
    narrow = make.device == "cpu" or torch.cuda.get_device_capability() >= (8, 9)
    for kind in (torch.int8, torch.float8_e4m3fn)[: 1 + narrow]:
        x = make(37, 192)
        found = group_quant.dequantize_groups(*group_quant.quantize_groups(x, 64, kind), torch.float32)
        right = group_quant.quantize_by_torch(x.cpu(), 64, kind)
        yield Compared(
            f"codes in {kind}", found, group_quant.dequantize_by_torch(*right, torch.float32), codes=True
        )
    for bits, rows_of in ((8, 37), (4, 37), (8, 16), (4, 16)):
        top = 2 ** (bits - 1)
        codes = torch.randint(
            1 - top, top, (45, 192), generator=torch.Generator().manual_seed(3), dtype=torch.int8
        )
        scales = (make(45, 3).float().abs() / top).cpu()
        stored = group_quant.pack_int4(codes) if bits == 4 else codes
        x, bias = make(rows_of, 192), make(45)
        found = group_quant.quantized_linear(
            x, stored.to(x.device), scales.to(x.device), None, bias, None, "gelu", x.dtype
        )
        weight = (codes.double().unflatten(1, (3, -1)) * scales.double().unsqueeze(2)).flatten(1)
        wanted = functional.gelu(functional.linear(x.double().cpu(), weight, bias.double().cpu()))
        yield Compared(f"linear of int{bits}, {rows_of} rows", found, wanted)


def _kept(make: Maker) -> Iterator[Compared]:
    x = make(4, compress.GROUP)
    packed = compress.compress(x, list(x.stride()))
    low, high = x.double().cpu().aminmax(dim=1, keepdim=True)
    step = (high - low) / 255
    wanted = low + step * ((x.double().cpu() - low) / step).round()
    yield Compared(
        "8 bits", compress.decompress(packed, list(x.shape), list(x.stride()), x.dtype), wanted, codes=True
    )


def _states(make: Maker) -> Iterator[Compared]:
    count, draw = 5 * states8.BLOCK, make.generator
    signed, unsigned = torch.linspace(-1, 1, 256), torch.linspace(0, 1, 256)
    moments = [
        (torch.randint(100, 256, (count,), generator=draw, dtype=torch.uint8), torch.rand(5, generator=draw))
        for _ in range(2)
    ]
    p, grad = make(count), make(count)
    adam = (*moments[0], *moments[1], signed, unsigned), (1.0, 0.9, 0.99, 0.1, 1e-8, 3, True)
    lion = (*moments[0], signed), (1.0, 0.9, 0.99, 0.1)
    for name, operator, (states, numbers) in (("Adam", states8.adam8, adam), ("Lion", states8.lion8, lion)):
        near = [t.clone().to(make.device) for t in (p, grad, *states)]
        wide = [t.clone().cpu() for t in (p.double(), grad.double(), *states)]
        operator(*near, *numbers)
        operator(*wide, *numbers)
        yield Compared(f"{name}, parameters", near[0], wide[0])
        found, wanted = (
            signed[t[2].cpu().int()] * t[3].cpu().repeat_interleave(states8.BLOCK) for t in (near, wide)
        )
        yield Compared(f"{name}, state", found, wanted, codes=True)


#: Family, as `effcompile.backends.triton` names its modules (`_in_…`: a form of one of them) → its cases, in
#: parts that may be run side by side.
CASES: Mapping[str, tuple[Case, ...]] = {
    "attention": (partial(_attention, 1, "causal"), partial(_attention, 2, "all terms")),
    "attention_in_tiles": (_in_tiles,),
    "block_sparse": (_block_sparse,),
    "cached_attention": (_cached,),
    "compress": (_kept,),
    "group_linear": (_grouped,),
    "group_quant": (_codes,),
    "loss_head": (_loss_head,),
    "states8": (_states,),
    "rows": (_rows,),
}
