"""Linears in bf16 with what lies between and behind them as one call, for a CPU with AMX: nothing between
leaves a core's cache.

    bf16_mlp              norm(residual + W2 bf16(f(W1 x + b1)) + b2)
    bf16_linear_residual  norm(residual + W x + b)

The counterpart of int8_mlp.py; weights are those of `bf16_linear`. Elsewhere, and for few rows, the same is
computed by the operators that these are made of.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from effcompile.core.types import Shape
from effcompile.machine.instructions import l2_bytes
from effcompile.ops import bf16_linear as halves
from effcompile.ops import int8_codes
from effcompile.ops.bf16_linear import HalvesKernels, bf16_linear_on_cpu, check, fits
from effcompile.ops.coded_rows import flat_rows
from effcompile.ops.held_mlp import HeldMlpOf, MlpCall, is_plain
from effcompile.ops.instruction_sets import LINE, at_line
from effcompile.ops.int8_mlp import Behind, address, are_dense, with_behind
from effcompile.ops.tape import Argument

__all__ = ["HeldHalvesMlp", "bf16_linear_residual", "bf16_mlp", "fallback_reason", "pays", "workspace_bytes"]

#: Rows that one core takes at once: CHUNK in tiled_linear.h, and a block of tiles.
_MOST, _BLOCK = 256, 32

_LIBRARY = torch.library.Library("effcompile", "FRAGMENT")
_BEHIND = "Tensor? norm_weight=None, Tensor? norm_bias=None, float? eps=None) -> Tensor"
_LIBRARY.define(
    "bf16_mlp(Tensor x, Tensor w1, int between, Tensor? b1, str after, Tensor w2, int n, Tensor? b2=None, "
    f"Tensor? residual=None, {_BEHIND}"
)
_LIBRARY.define(
    "bf16_linear_residual(Tensor x, Tensor weight, int n, Tensor? bias, Tensor residual, " + _BEHIND
)

#: A linear: packed weight, outputs, bias.
Linear = tuple[Tensor, int, Tensor | None]


fallback_reason = halves.fallback_reason


def pays(rows: int) -> bool:
    """Whether the kernel is used for so many rows of x: fewer are computed in parts."""
    return rows >= _BLOCK * torch.get_num_threads()


def _at_once(found: HalvesKernels, rows: int, k: int, between: int, n: int) -> int:
    """Rows that one core takes at once, of so many: as many as its cache holds with their results, one part
    of what is between, and an eighth for weights, which are read once for all of them. On an Intel Xeon
    (2 MiB) an MLP of 768 and 3,072 columns in three parts took 7.6 ms of 1,024 rows by 256, 8.1 by 192; with
    all that is between at once 9.2 and 8.7.
    """
    threads, part = torch.get_num_threads(), int(found.part_of(between or k))
    room = l2_bytes() * 7 // 8 // (2 * ((k if between else 0) + part) + 4 * n)
    most = max(_BLOCK, min(room, _MOST) // _BLOCK * _BLOCK)
    turns = threads * -(-rows // (threads * most))
    return -(-rows // (turns * _BLOCK)) * _BLOCK


def _room(found: HalvesKernels, rows: int, k: int, between: int, n: int) -> int:
    """Bytes of scratch for so many rows of x (..., K)."""
    at_once = _at_once(found, rows, k, between, n)
    return int(found.mlp_bytes(at_once, k, between)) * torch.get_num_threads() + LINE


def run(x: Tensor, first: Linear | None, after: str, last: Linear, behind: Behind) -> Tensor:
    """As `bf16_mlp_on_cpu`, of what stands together."""
    if first is not None:
        check(x, *first, after)
    check(x if first is None else x.new_empty((0, first[1])), *last, "none")
    found, rows = halves.kernels(), x.numel() // max(1, x.shape[-1])
    biases = [linear[2] for linear in (first, last) if linear is not None]
    if isinstance(found, str) or not pays(rows) or not are_dense(x, last[1], biases, behind):
        inner = x if first is None else bf16_linear_on_cpu(x, *first, after)
        return with_behind(bf16_linear_on_cpu(inner, *last), behind)
    return _called(found, flat_rows(x), first, after, last, behind).view(*x.shape[:-1], -1)


def _called(
    found: HalvesKernels, x: Tensor, first: Linear | None, after: str, last: Linear, behind: Behind
) -> Tensor:
    (m, k), between = x.shape, 0 if first is None else first[1]
    made = x.new_empty((m, last[1]))
    scratch = torch.empty(_room(found, m, k, between, last[1]), dtype=torch.uint8, device="cpu")
    residual, norm_weight, norm_bias, eps = behind
    found.mlp(
        x.data_ptr(), x.stride(0), m, k, *_addresses(first), between, int8_codes.AFTER.index(after),
        *_addresses(last), last[1], address(residual), eps is not None, address(norm_weight),
        address(norm_bias), eps or 0.0, made.data_ptr(), at_line(scratch),
        _at_once(found, m, k, between, last[1]), torch.get_num_threads(),
    )  # fmt: skip
    return made


def _addresses(linear: Linear | None) -> tuple[int | None, None, int | None]:
    """Of the weight, of scales, which there are none of, and of the bias."""
    return (None, None, None) if linear is None else (linear[0].data_ptr(), None, address(linear[2]))


def bf16_mlp_on_cpu(
    x: Tensor, w1: Tensor, between: int, b1: Tensor | None, after: str, *rest: object
) -> Tensor:
    """(..., N) in fp32, for x (..., K), weights as `bf16_linear.pack` gives them, and of the schema's `rest`
    W2 with its outputs and bias, a residual (..., N), and a LayerNorm over N where `eps` is given.
    """
    last = [*rest, *(None,) * (7 - len(rest))]
    (w2, n, b2), behind = last[:3], last[3:]
    return run(x, (w1, between, b1), after, (w2, n, b2), tuple(behind))  # type: ignore[arg-type]


def bf16_linear_residual_on_cpu(
    x: Tensor, weight: Tensor, n: int, bias: Tensor | None, residual: Tensor, *norm: object
) -> Tensor:
    """The same of one linear."""
    behind = (residual, *norm, *(None,) * (3 - len(norm)))
    return run(x, None, "none", (weight, n, bias), behind)  # type: ignore[arg-type]


_LIBRARY.impl("bf16_mlp", bf16_mlp_on_cpu, "CPU")
_LIBRARY.impl("bf16_linear_residual", bf16_linear_residual_on_cpu, "CPU")
bf16_mlp = torch.ops.effcompile.bf16_mlp
bf16_linear_residual = torch.ops.effcompile.bf16_linear_residual


@torch.library.register_fake("effcompile::bf16_mlp", lib=_LIBRARY)
def _(x, w1, between, b1, after, w2, n, *behind):  # type: ignore[no-untyped-def]
    return x.new_empty((*x.shape[:-1], n))


@torch.library.register_fake("effcompile::bf16_linear_residual", lib=_LIBRARY)
def _(x, weight, n, *behind):  # type: ignore[no-untyped-def]
    return x.new_empty((*x.shape[:-1], n))


@register_flop_formula(torch.ops.effcompile.bf16_mlp)
def _mlp_flops(x_shape: Shape, w1_shape: Shape, between: int, *rest: object, **more: object) -> int:
    n: int = rest[3]  # type: ignore[assignment]  # behind b1, after and w2
    return 2 * math.prod(x_shape[:-1]) * between * (x_shape[-1] + n)


@register_flop_formula(torch.ops.effcompile.bf16_linear_residual)
def _residual_flops(x_shape: Shape, weight_shape: Shape, n: int, *behind: object, **more: object) -> int:
    return 2 * math.prod(x_shape) * n


def workspace_bytes(name: str, args: object) -> int | None:
    """Bytes alive inside these operators beyond their inputs and outputs; None for other operators.

    In parts: what is between, with the workspace of a linear and a sum.
    """
    if not isinstance(args, (list, tuple)) or name not in (
        "effcompile::bf16_mlp",
        "effcompile::bf16_linear_residual",
    ):
        return None
    x, whole = args[0], name == "effcompile::bf16_mlp"
    rows, k = int(x.numel()) // int(x.shape[-1]), int(x.shape[-1])
    between, n = (int(args[2]), int(args[6])) if whole else (0, int(args[2]))
    found = halves.kernels()
    if not isinstance(found, str) and pays(rows):
        return _room(found, rows, k, between, n)
    inside = [
        halves.workspace_bytes("effcompile::bf16_linear", (x.new_empty((rows, d)), None, columns)) or 0
        for d, columns in ((k, between or n), (between, n))
        if d
    ]
    return 4 * rows * (between + n) + max(inside)


class HeldHalvesMlp(HeldMlpOf[Linear]):
    """`bf16_mlp`, and without a first linear `bf16_linear_residual`, of weights that stay, as a step of a
    tape (tape.py).
    """

    __name__ = "bf16_mlp"

    def _run(self, x: Tensor, behind: Behind) -> Tensor:
        return run(x, self._first, self._after, self._last, behind)

    def _called(self, rows: int, k: int, between: int, n: int) -> MlpCall | None:
        found = halves.kernels()
        if isinstance(found, str) or not pays(rows):
            return None
        return MlpCall(found.mlp, _at_once(found, rows, k, between, n), _room(found, rows, k, between, n))

    def _outputs(self, linear: Linear) -> int:
        return linear[1]

    def _takes(self, k: int, linear: Linear) -> bool:
        return fits(k, *linear) and (linear[2] is None or is_plain(linear[2]))

    def _addresses(self, linear: Linear | None) -> tuple[Argument, Argument, Argument]:
        return _addresses(linear)
