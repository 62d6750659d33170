"""Linears in 8 bits with what lies between and behind them as one call, for a CPU with AMX or AVX512-VNNI:
nothing between leaves a core's cache.

    int8_mlp              norm(residual + W2 f(W1 x + b1) + b2)
    int8_linear_residual  norm(residual + W x + b)

Weights and codes are those of `int8_linear`; f(...) is rounded to bf16 before it becomes codes. Elsewhere,
and for few rows, the same is computed by the operators that these are made of. Defined without
torch.library.custom_op, as `int8_linear` is.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812
from torch.utils.flop_counter import register_flop_formula

from effcompile.core.types import Shape
from effcompile.machine.instructions import l2_bytes, tile_isas
from effcompile.machine.native import library
from effcompile.ops import int8_codes
from effcompile.ops.add_norm import add_layer_norm_on_cpu
from effcompile.ops.coded_rows import flat_rows
from effcompile.ops.instruction_sets import ARGUMENT, LINE, POINTER, at_line, best_of, why_torch, with_tiles
from effcompile.ops.int8_codes import Linear
from effcompile.ops.int8_linear import check, int8_linear_on_cpu
from effcompile.ops.int8_linear import workspace_bytes as linear_bytes
from effcompile.ops.int8_native import TILED, macros

__all__ = ["fallback_reason", "int8_linear_residual", "int8_mlp", "pays", "workspace_bytes"]

_SOURCE = Path(__file__).with_name("int8_mlp.cpp")
#: Instruction set → rows that one core takes at once for each MiB of its L2 cache, at most. With half as many
#: the weights come from beyond it twice as often: 768 to 3072 columns took 1.2 times as long by AMX, 1.13 by
#: VNNI, both on an Intel Xeon (2 MiB). With more there is no room in it: 1,024 rows by VNNI on an AMD EPYC
#: (Zen 4, 1 MiB) took 24.2 ms by 64, 26.6 by 256.
_ROWS = {"amx_int8": 128, "avx512_vnni": 64}
#: Rows whose sums a thread's tiles hold: CHUNK in tiled_linear.h.
_MOST = 256
#: Rows for each core, from which on this pays; a block of tiles.
_FEWEST = 32

#: Of `int8_mlp`, and of what is called alike.
ARGUMENTS = (
    POINTER, *(ARGUMENT,) * 3, *(POINTER,) * 3, ARGUMENT, ARGUMENT, *(POINTER,) * 3, ARGUMENT, POINTER,
    ARGUMENT, POINTER, POINTER, ctypes.c_double, POINTER, POINTER, ARGUMENT, ARGUMENT,
)  # fmt: skip

_LIBRARY = torch.library.Library("effcompile", "FRAGMENT")
_BEHIND = "Tensor? norm_weight=None, Tensor? norm_bias=None, float? eps=None) -> Tensor"
_LIBRARY.define(
    "int8_mlp(Tensor x, Tensor w1, Tensor s1, Tensor? b1, str after, Tensor w2, Tensor s2, Tensor? b2=None, "
    f"Tensor? residual=None, {_BEHIND}"
)
_LIBRARY.define(
    "int8_linear_residual(Tensor x, Tensor weight, Tensor scales, Tensor? bias, Tensor residual, " + _BEHIND
)

#: What is behind the last one: the residual, weight and bias of a LayerNorm, and its epsilon if there is one.
Behind = tuple[Tensor | None, Tensor | None, Tensor | None, float | None]


def has_kernel(isa: str) -> bool:
    """Whether an instruction set has one."""
    return isa in _ROWS


@functools.cache
def kernels() -> MlpKernels | str:
    """The kernel that this machine runs, or why there is none."""
    isas = [isa for isa in tile_isas() if has_kernel(isa)]
    return best_of(MlpKernels, isas) if isas else "this processor has neither AMX nor AVX512-VNNI"


def fallback_reason() -> str | None:
    """Why these are computed in parts; None where the kernel does."""
    return why_torch(kernels())


def pays(rows: int) -> bool:
    """Whether the kernel is used for so many rows of x: fewer are computed in parts."""
    return rows >= _FEWEST * torch.get_num_threads()


class MlpKernels:
    """The compiled kernel."""

    def __init__(self, isa: str, instead: str = "") -> None:
        """Raises LoweringError when it cannot be compiled, or the system does not give the tiles."""
        self.isa, self.instead = isa, instead
        found = library(_SOURCE, macros(isa), isa)
        found = with_tiles(found) if TILED.get(isa) else found
        self.bytes, self.call = found.room_bytes, found.int8_mlp
        self.bytes.argtypes, self.bytes.restype = (ARGUMENT,) * 3, ARGUMENT
        self.call.argtypes, self.call.restype = ARGUMENTS, None

    def at_once(self, rows: int, between: int) -> int:
        """Rows that one core takes at once, of so many: a multiple of 32, as many for each."""
        cache = l2_bytes()
        fits = min(_ROWS[self.isa] * cache >> 20, cache * 3 // 4 // (2 * between or 1))
        most = max(_FEWEST, min(fits, _MOST) // _FEWEST * _FEWEST)
        turns = torch.get_num_threads() * -(-rows // (torch.get_num_threads() * most))
        return -(-rows // (turns * _FEWEST)) * _FEWEST

    def room(self, rows: int, k: int, between: int) -> int:
        """Bytes of scratch for so many rows of x (..., K)."""
        return int(self.bytes(self.at_once(rows, between), k, between)) * torch.get_num_threads() + LINE

    def mlp(self, x: Tensor, first: Linear | None, after: str, last: Linear, behind: Behind) -> Tensor:
        """See `int8_mlp` and `int8_linear_residual`; x (M, K) has adjacent columns, the rest is dense."""
        (m, k), n = x.shape, last[1].shape[0]
        between = 0 if first is None else first[1].shape[0]
        made, scratch = (
            x.new_empty((m, n)),
            torch.empty(self.room(m, k, between), dtype=torch.uint8, device="cpu"),
        )
        residual, norm_weight, norm_bias, eps = behind
        self.call(
            x.data_ptr(), x.stride(0), m, k, *(map(address, first) if first else (None,) * 3), between,
            int8_codes.following(after, last, first), *map(address, last), n, address(residual),
            eps is not None, address(norm_weight), address(norm_bias), eps or 0.0, made.data_ptr(),
            at_line(scratch), self.at_once(m, between), torch.get_num_threads(),
        )  # fmt: skip
        return made

    def objection(self) -> str | None:
        """None, or that a result is further from what torch computes of the same numbers than some codes that
        are rounded the other way.
        """
        wave = lambda step, *shape: (torch.arange(shape[0] * shape[1]) * step).sin().view(shape)  # noqa: E731
        linear = lambda step, n, k, lowered: (  # noqa: E731
            int8_codes.pack(
                (wave(step, n, k) * 127).to(torch.int8), wave(0.6, 1, k)[0].exp() if lowered else None
            ),
            wave(step, 1, n)[0] / 997,
            wave(0.3, 1, n)[0],
        )
        for rows, after in ((150, "gelu"), (33, "silu"), (16, "none"), (1, "gelu_tanh"), (2, "relu")):
            first, last = linear(0.7, 150, 70, rows % 2 == 1), linear(0.9, 37, 150, rows > 16)
            x, residual = wave(0.11, rows, 70), wave(0.5, rows, 37)
            norm = (wave(0.2, 1, 37)[0], None, 1e-5)
            for behind in ((None, None, None, None), (residual, None, None, None), (residual, *norm)):
                found = self.mlp(x, first, after, last, behind)
                right = mlp_by_torch(x, first, after, last, behind)
                if not torch.allclose(found, right, rtol=0, atol=5e-3 * float(right.abs().max())):
                    return f"the compiled {self.isa} kernel gave a wrong product of bytes"
        return None


def address(tensor: Tensor | None) -> int | None:
    """Where a tensor begins, as a kernel is told; None for none."""
    return None if tensor is None else tensor.data_ptr()


def mlp_by_torch(x: Tensor, first: Linear | None, after: str, last: Linear, behind: Behind) -> Tensor:
    """What the kernel computes, slowly."""
    if first is None:
        return with_behind(int8_codes.linear_by_torch(x, *last, "none"), behind)
    between = int8_codes.linear_by_torch(x, *first, after)
    weight, scales, bias = last
    columns = int8_codes.columns_of(weight, scales.shape[0], between.shape[-1])
    rounded = (between if columns is None else between * columns).bfloat16().float()
    return with_behind(int8_codes.packed_product(rounded, weight, scales, bias, "none"), behind)


def _in_parts(x: Tensor, first: Linear | None, after: str, last: Linear, behind: Behind) -> Tensor:
    return with_behind(
        int8_linear_on_cpu(x if first is None else int8_linear_on_cpu(x, *first, after), *last), behind
    )


def with_behind(y: Tensor, behind: Behind) -> Tensor:
    """What is behind a linear, of its result."""
    residual, weight, bias, eps = behind
    if eps is None:
        return y if residual is None else y + residual
    if residual is None:
        return F.layer_norm(y, y.shape[-1:], weight, bias, eps)
    return add_layer_norm_on_cpu(y, residual, weight, bias, eps)


def run(x: Tensor, first: Linear | None, after: str, last: Linear, behind: Behind) -> Tensor:
    """As `int8_mlp_on_cpu`, of what stands together."""
    if first is not None:
        check(x, *first, after)
    check(x if first is None else x.new_empty((0, first[1].shape[0])), *last, "none")
    found, rows = kernels(), x.numel() // max(1, x.shape[-1])
    if isinstance(found, str) or not pays(rows) or not fits(x, first, last, behind):
        return _in_parts(x, first, after, last, behind)
    return found.mlp(flat_rows(x), first, after, last, behind).view(*x.shape[:-1], -1)


def fits(x: Tensor, first: Linear | None, last: Linear, behind: Behind) -> bool:
    """Whether the kernel takes them."""
    return are_dense(
        x, last[1].shape[0], [linear[2] for linear in (first, last) if linear is not None], behind
    )


def are_dense(x: Tensor, n: int, biases: Sequence[Tensor | None], behind: Behind) -> bool:
    """Whether all is dense, and what is behind n outputs in fp32 and of one shape."""
    shapes = ((*x.shape[:-1], n), (n,), (n,))
    alike = all(
        t is None or (t.shape == shape and t.dtype is torch.float32)
        for t, shape in zip(behind[:3], shapes, strict=True)
    )
    return alike and all(t is None or t.is_contiguous() for t in (*biases, *behind[:3]))


def int8_mlp_on_cpu(x: Tensor, w1: Tensor, s1: Tensor, b1: Tensor | None, after: str, *rest: Any) -> Tensor:
    """(..., N) in fp32, for x (..., K), weights as `int8_codes.pack` gives them, and of the schema's `rest`
    W2 with its scales and bias, a residual (..., N), and a LayerNorm over N where `eps` is given.
    """
    last: list[Any] = [*rest, *(None,) * (7 - len(rest))]
    w2, s2, b2, residual, weight, bias, eps = last
    return run(x, (w1, s1, b1), after, (w2, s2, b2), (residual, weight, bias, eps))


def int8_linear_residual_on_cpu(
    x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None, residual: Tensor, *norm: Any
) -> Tensor:
    """The same of one linear."""
    behind: list[Any] = [*norm, *(None,) * (3 - len(norm))]
    norm_weight, norm_bias, eps = behind
    return run(x, None, "none", (weight, scales, bias), (residual, norm_weight, norm_bias, eps))


_LIBRARY.impl("int8_mlp", int8_mlp_on_cpu, "CPU")
_LIBRARY.impl("int8_linear_residual", int8_linear_residual_on_cpu, "CPU")
int8_mlp = torch.ops.effcompile.int8_mlp
int8_linear_residual = torch.ops.effcompile.int8_linear_residual


@torch.library.register_fake("effcompile::int8_mlp", lib=_LIBRARY)
def _(x, w1, s1, b1, after, w2, s2, *behind):  # type: ignore[no-untyped-def]
    return x.new_empty((*x.shape[:-1], s2.shape[0]))


@torch.library.register_fake("effcompile::int8_linear_residual", lib=_LIBRARY)
def _(x, weight, scales, *behind):  # type: ignore[no-untyped-def]
    return x.new_empty((*x.shape[:-1], scales.shape[0]))


@register_flop_formula(torch.ops.effcompile.int8_mlp)
def _mlp_flops(x_shape: Shape, w1_shape: Shape, s1_shape: Shape, *rest: Any, **more: object) -> int:
    (n,) = rest[3]  # behind b1, after and w2
    return 2 * math.prod(x_shape[:-1]) * s1_shape[0] * (x_shape[-1] + int(n))


@register_flop_formula(torch.ops.effcompile.int8_linear_residual)
def _residual_flops(
    x_shape: Shape, weight_shape: Shape, scales_shape: Shape, *behind: object, **more: object
) -> int:
    return 2 * math.prod(x_shape) * scales_shape[0]


def workspace_bytes(name: str, args: object) -> int | None:
    """Bytes alive inside these operators beyond their inputs and outputs; None for other operators.

    In parts: what is between, with the workspace of a linear and a sum.
    """
    if not isinstance(args, (list, tuple)) or name not in (
        "effcompile::int8_mlp",
        "effcompile::int8_linear_residual",
    ):
        return None
    x, linears = args[0], (args[1:4], args[5:8]) if name == "effcompile::int8_mlp" else (args[1:4],)
    rows, k = int(x.numel()) // int(x.shape[-1]), int(x.shape[-1])
    between, n = int(linears[0][1].shape[0]) if len(linears) > 1 else 0, int(linears[-1][1].shape[0])
    found = kernels()
    if not isinstance(found, str) and pays(rows):
        return found.room(rows, k, between)
    inside = [
        linear_bytes("effcompile::int8_linear", (x.new_empty((rows, d)), None, s))
        for d, s in ((k, linears[0][1]), (between, linears[-1][1]))
        if d
    ]
    return 4 * rows * (between + n) + max(nbytes or 0 for nbytes in inside)
