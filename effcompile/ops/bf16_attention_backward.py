"""The gradients of torch's own attention of bf16 tensors on a CPU, by AMX's tiles or AVX512-BF16.

It takes what `aten::_scaled_dot_product_flash_attention_for_cpu` has kept for its backward, and gives what
that gives: products of numbers rounded to bf16, sums and softmax in fp32, results in bf16. 24 heads of
256 × 256 × 64 take 2.1 ms of one core, 9.5 by torch (Xeon with AMX). The kernel:
`attention_backward_tiles.cpp`.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula, sdpa_backward_flop_count

from effcompile.core.types import Shape
from effcompile.machine.instructions import bf16_isas
from effcompile.machine.native import library
from effcompile.ops.cached_attention import mask_strides
from effcompile.ops.instruction_sets import ARGUMENT, LINE, POINTER, at_line, best_of, with_tiles
from effcompile.ops.tiles import once
from effcompile.ops.torch_attention import BACKWARD, FORWARD

__all__ = ["Given", "bf16_attention_backward", "time_share", "workspace_bytes"]

_SOURCE = Path(__file__).with_name("attention_backward_tiles.cpp")
_SIX, _THREE = ctypes.c_int64 * 6, ctypes.c_int64 * 3
_STRIDES = _THREE * 10
#: Calls, and queries and keys, that torch's kernel is timed with at the most.
_ROUNDS, _TIMED_ROWS = 3, 2048

_LIBRARY = torch.library.Library("effcompile", "FRAGMENT")
_LIBRARY.define(
    "bf16_attention_backward(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out, "
    "Tensor logsumexp, float dropout_p, bool is_causal, Tensor? attn_mask=None, float? scale=None) -> "
    "(Tensor, Tensor, Tensor)"
)


class Given(NamedTuple):
    """What the operator takes, real or fake: query, its result and that one's gradient (B, H, S, D), key and
    value (B, H, K, D), in bf16; the log of the softmax's sum (B, H, S); a mask (B or 1, H or 1, S, K) of
    numbers that are added.
    """

    grad_out: Tensor
    query: Tensor
    key: Tensor
    value: Tensor
    out: Tensor
    logsumexp: Tensor
    dropout_p: float
    is_causal: bool
    attn_mask: Tensor | None = None
    scale: float | None = None

    def fits(self) -> bool:
        """Whether the kernel takes these."""
        query, key, mask = self.query, self.key, self.attn_mask
        tensors = (self.grad_out, query, key, self.value, self.out)
        narrow = all(t.dtype is torch.bfloat16 and t.dim() == 4 and t.stride(3) == 1 for t in tensors)
        if not narrow or self.dropout_p or self.logsumexp.dtype is not torch.float32 or not query.is_cpu:
            return False
        if (
            key.shape != self.value.shape
            or query.shape[:2] != key.shape[:2]
            or query.shape[3] != key.shape[3]
        ):
            return False
        if mask is None:
            return True
        whole = mask.dim() == 4 and mask.stride(3) == 1 and mask.shape[2:] == (query.shape[2], key.shape[2])
        return whole and mask.is_floating_point()


@functools.cache
def kernels() -> BackwardTiles | str:
    """The kernel that this machine runs, or why there is none."""
    return best_of(BackwardTiles, isas) if (isas := bf16_isas()) else "this processor multiplies no bf16"


class BackwardTiles:
    """The compiled kernel.

    `instead`: why better sets are not used; "" where there is none.
    """

    def __init__(self, isa: str, instead: str = "") -> None:
        """Raises LoweringError when it cannot be compiled, or the system does not give the tiles."""
        self.isa, self.instead = isa, instead
        found = with_tiles(library(_SOURCE, {}, isa))
        self.floats, self.call = found.scratch_floats, found.attention_backward_tiles
        self.floats.argtypes, self.floats.restype = (_SIX,), ARGUMENT
        self.call.argtypes = (
            *(POINTER,) * 10, _SIX, _STRIDES, ARGUMENT, ctypes.c_float, POINTER, ARGUMENT,
        )  # fmt: skip
        self.call.restype = None

    def room(self, query: Tensor, key: Tensor) -> int:
        """Bytes of scratch."""
        return 4 * int(self.floats(_sizes_of(query, key))) * torch.get_num_threads() + LINE

    def gradients(self, given: Given) -> tuple[Tensor, Tensor, Tensor]:
        """See `backward_on_cpu`; of what fits."""
        query, key, value, out = given.query, given.key, given.value, given.out
        mask = None if given.attn_mask is None else once(given.attn_mask).float()
        made = (_like(query), _like(key), _like(value))
        scratch = torch.empty(self.room(query, key), dtype=torch.uint8, device="cpu")
        tensors = (query, key, value, given.grad_out, out, *made)
        strides = [tensor.stride()[:3] for tensor in (*tensors, given.logsumexp)]
        strides.append((0, 0, 0) if mask is None else mask_strides(mask))
        self.call(
            *(tensor.data_ptr() for tensor in tensors[:5]), given.logsumexp.data_ptr(),
            None if mask is None else mask.data_ptr(), *(tensor.data_ptr() for tensor in made),
            _sizes_of(query, key), _STRIDES(*(_THREE(*each) for each in strides)), given.is_causal,
            query.shape[3] ** -0.5 if given.scale is None else given.scale, at_line(scratch),
            torch.get_num_threads(),
        )  # fmt: skip
        return made

    def objection(self) -> str | None:
        """None, or that a gradient differs from torch's: whole tiles and rests, a mask, causal ones, two
        chunks of queries.
        """
        for queries, keys, width, causal in ((37, 70, 40, False), (37, 37, 64, True), (300, 33, 16, False)):
            wave = lambda step, *shape: (torch.arange(math.prod(shape)) * step).sin().view(shape).bfloat16()  # noqa: E731
            query, key = wave(0.7, 1, 2, queries, width), wave(0.3, 1, 2, keys, width)
            value, upper = wave(0.9, 1, 2, keys, width), wave(0.5, 1, 2, queries, width)
            mask = None if causal else wave(0.2, 1, 1, queries, keys).float()
            out, lse = FORWARD(query, key, value, 0.0, causal, attn_mask=mask, scale=0.3)
            given = Given(upper, query, key, value, out, lse, 0.0, causal, mask, 0.3)
            for found, wanted in zip(self.gradients(given), by_torch(given), strict=True):
                if float((found.float() - wanted.float()).norm()) > 1e-2 * float(wanted.float().norm()):
                    return f"the compiled {self.isa} kernel gave a wrong gradient of an attention"
        return None


def _sizes_of(query: Tensor, key: Tensor) -> ctypes.Array[ctypes.c_int64]:
    """As the kernel is told them: batch, heads, groups, queries, keys, width."""
    batch, heads, queries, width = map(int, query.shape)
    return _SIX(batch, heads, key.shape[1], queries, key.shape[2], width)


def _like(tensor: Tensor) -> Tensor:
    """Memory for a gradient, as torch lays it: (B, S, H, D), seen as (B, H, S, D)."""
    batch, heads, rows, width = tensor.shape
    return tensor.new_empty((batch, rows, heads, width)).transpose(1, 2)


def by_torch(given: Given) -> tuple[Tensor, Tensor, Tensor]:
    """The same by torch's kernel."""
    mask, scale = given.attn_mask, given.scale
    dq, dk, dv = BACKWARD(*given[:6], given.dropout_p, given.is_causal, attn_mask=mask, scale=scale)
    return dq, dk, dv


def backward_on_cpu(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value, in bf16, of the fields of a `Given`.

    What the kernel does not take, torch's computes.
    """
    given, found = Given(*args), kernels()
    return by_torch(given) if isinstance(found, str) or not given.fits() else found.gradients(given)


_LIBRARY.impl("bf16_attention_backward", backward_on_cpu, "CPU")
bf16_attention_backward = torch.ops.effcompile.bf16_attention_backward


@functools.cache
def time_share(queries: int, keys: int, width: int) -> float:
    """Seconds of the kernel by those of torch's, measured once in a process; inf where there is none."""
    found = kernels()
    if isinstance(found, str):
        return math.inf
    rows = (min(queries, _TIMED_ROWS), min(keys, _TIMED_ROWS))
    query, key = (torch.ones(1, 4, each, width, dtype=torch.bfloat16) for each in rows)
    out, lse = FORWARD(query, key, key)
    given = Given(out, query, key, key, out, lse, 0.0, False)
    ways: tuple[Callable[[Given], object], ...] = (found.gradients, by_torch)
    times: list[list[float]] = [[], []]
    for _ in range(1 + _ROUNDS):
        for way, taken in zip(ways, times, strict=True):
            start = perf_counter()
            way(given)
            taken.append(perf_counter() - start)
    return min(times[0]) / min(times[1])


@torch.library.register_fake("effcompile::bf16_attention_backward", lib=_LIBRARY)
def _(grad_out, query, key, value, *rest):  # type: ignore[no-untyped-def]
    return _like(query), _like(key), _like(value)


@register_flop_formula(torch.ops.effcompile.bf16_attention_backward)
def _flops(
    grad_shape: Shape,
    query_shape: Shape,
    key_shape: Shape,
    value_shape: Shape,
    *args: object,
    **kwargs: object,
) -> int:
    return int(sdpa_backward_flop_count(grad_shape, query_shape, key_shape, value_shape))


def workspace_bytes(name: str, args: object) -> int | None:
    """Bytes alive inside this operator beyond its inputs and outputs; None for other operators."""
    if name != "effcompile::bf16_attention_backward" or not isinstance(args, (list, tuple)):
        return None
    found = kernels()
    if isinstance(found, str):
        return None
    mask = args[8] if len(args) > 8 else None
    copied = isinstance(mask, Tensor) and mask.dtype is not torch.float32 and 4 * int(once(mask).numel())
    return found.room(args[1], args[2]) + copied
