"""A linear whose weight is block-sparse, y = x Wᵀ + bias, and its gradients; the weight's only at the kept
blocks.

On a CPU with a C++ compiler the kernels of `block_sparse.cpp` run (see `block_sparse_native.py`); anywhere
else, and in dtypes that they do not have, W is made dense and torch computes. `fallback_reason` tells which.

The indices are inputs: another pattern of the same sizes is another call of the same operator, and nothing is
compiled again.

Legend: x (..., K), y (..., N), M the product of the leading axes. Values (Z, b, b), crow (N/b + 1), col (Z),
and for the transposed product ccol (K/b + 1), row (Z), perm (Z): see `effcompile.sparse.BlockPattern`. Z may
exceed the number of blocks in use, crow[-1]: values beyond have no effect and get a gradient of 0, so that a
pattern may grow and shrink within a fixed capacity.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from effcompile.core.errors import UsageError
from effcompile.core.types import Args, AutogradContext, Shape
from effcompile.ops import block_sparse_native as native
from effcompile.ops.block_sparse_dense import dense_weight, sampled_gradient
from effcompile.ops.devices import one_device

__all__ = [
    "block_sparse_grad_input",
    "block_sparse_grad_values",
    "block_sparse_linear",
    "fallback_reason",
    "with_indices",
    "workspace_bytes",
]

_STRUCTURE = "Tensor crow, Tensor col, Tensor ccol, Tensor row, Tensor perm"


#: Type of device → who has kernels there: for (x, block) something with native.Kernels' three products, or
#: why there is none.
FINDERS: dict[str, Callable[[Tensor, int], Any]] = {"cpu": native.kernels}


def _kernels(x: Tensor, block: int) -> Any:
    return FINDERS.get(x.device.type, native.kernels)(x, block)


def fallback_reason(x: Tensor, block: int) -> str | None:
    """Why torch, with a dense copy of the weight, computes inputs like x in blocks of b; None where the
    kernels do.

    The first call for a block size and dtype compiles its kernels, some seconds, once per machine.
    """
    found = _kernels(x, block)
    return found if isinstance(found, str) else None


@torch.library.custom_op(
    "effcompile::block_sparse_linear",
    mutates_args=(),
    schema=f"(Tensor x, Tensor values, {_STRUCTURE}, Tensor? bias=None) -> Tensor",
)
def block_sparse_linear(
    x: Tensor,
    values: Tensor,
    crow: Tensor,
    col: Tensor,
    ccol: Tensor,
    row: Tensor,
    perm: Tensor,
    bias: Tensor | None = None,
) -> Tensor:
    """y (..., N) = x Wᵀ + bias.

    Raises:
        UsageError: shapes, dtypes or indices that do not fit.
    """
    n, k = _check(values, crow, col, ccol, row, perm, x, bias)
    if x.shape[-1] != k:
        raise UsageError(
            f"The block-sparse weight is ({n}, {k}), so that x ends in {k}; given {tuple(x.shape)}."
        )
    found = _kernels(x, values.shape[1])
    if not isinstance(found, str):
        return found.linear(x, values, crow, col, bias)
    return torch.nn.functional.linear(x, dense_weight(values, crow, col, k), bias)


@torch.library.custom_op(
    "effcompile::block_sparse_grad_input",
    mutates_args=(),
    schema=f"(Tensor grad, Tensor values, {_STRUCTURE}) -> Tensor",
)
def block_sparse_grad_input(
    grad: Tensor, values: Tensor, crow: Tensor, col: Tensor, ccol: Tensor, row: Tensor, perm: Tensor
) -> Tensor:
    """dx (..., K) = dy W, for dy (..., N).

    Raises:
        UsageError: dy does not fit the weight.
    """
    n, k = _check(values, crow, col, ccol, row, perm, grad)
    if grad.shape[-1] != n:
        raise UsageError(
            f"The block-sparse weight is ({n}, {k}), so that dy ends in {n}; given {tuple(grad.shape)}."
        )
    found = _kernels(grad, values.shape[1])
    if not isinstance(found, str):
        return found.grad_input(grad, values, ccol, row, perm)
    return grad @ dense_weight(values, crow, col, k)


@torch.library.custom_op(
    "effcompile::block_sparse_grad_values",
    mutates_args=(),
    schema="(Tensor grad, Tensor x, Tensor crow, Tensor col) -> Tensor",
)
def block_sparse_grad_values(grad: Tensor, x: Tensor, crow: Tensor, col: Tensor) -> Tensor:
    """dvalues (Z, b, b): dyᵀ x at the kept blocks, for dy (..., N) and x (..., K).

    Raises:
        UsageError: dy, x and the blocks do not fit.
    """
    b = _block_of(grad, crow)
    if grad.shape[:-1] != x.shape[:-1] or grad.dtype != x.dtype or x.shape[-1] % b:
        shapes = f"{tuple(grad.shape)} {grad.dtype}, {tuple(x.shape)} {x.dtype}"
        raise UsageError(f"dy (..., N) and x (..., K) do not fit: {shapes}, blocks of {b}.")
    found = _kernels(x, b)
    if not isinstance(found, str):
        return found.grad_values(grad, x, crow, col)
    return sampled_gradient(grad, x, crow, col, b)


@block_sparse_linear.register_fake
def _(x, values, crow, col, ccol, row, perm, bias=None):  # type: ignore[no-untyped-def]
    return x.new_empty((*x.shape[:-1], (crow.shape[0] - 1) * values.shape[1]))


@block_sparse_grad_input.register_fake
def _(grad, values, crow, col, ccol, row, perm):  # type: ignore[no-untyped-def]
    return grad.new_empty((*grad.shape[:-1], (ccol.shape[0] - 1) * values.shape[1]))


@block_sparse_grad_values.register_fake
def _(grad, x, crow, col):  # type: ignore[no-untyped-def]
    b = _block_of(grad, crow)
    return x.new_empty((col.shape[0], b, b))


def _save(ctx: AutogradContext, inputs: Args, output: Tensor) -> None:
    x, values, *structure, bias = inputs
    needs_x, needs_values = ctx.needs_input_grad[:2]
    ctx.save_for_backward(x if needs_values else None, values if needs_x else None, *structure)
    ctx.biased = bias is not None


def _backward(ctx: AutogradContext, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, values, *structure = ctx.saved_tensors
    grad_x = block_sparse_grad_input(grad, values, *structure) if ctx.needs_input_grad[0] else None
    grad_values = block_sparse_grad_values(grad, x, *structure[:2]) if ctx.needs_input_grad[1] else None
    grad_bias = grad.reshape(-1, grad.shape[-1]).sum(0) if ctx.biased and ctx.needs_input_grad[7] else None
    return grad_x, grad_values, None, None, None, None, None, grad_bias


block_sparse_linear.register_autograd(_backward, setup_context=_save)


def _flops(x: Sequence[int], stored: Sequence[int]) -> int:
    """2·M·Z·b²: all of the capacity counts, for shapes are all that is known."""
    rows = 1
    for size in x[:-1]:
        rows *= size
    return 2 * rows * stored[0] * stored[1] * stored[2]


@register_flop_formula(torch.ops.effcompile.block_sparse_linear)
def _linear_flops(
    x_shape: Shape, values_shape: Shape, *args: object, out_shape: object = None, **kwargs: object
) -> int:
    return _flops(x_shape, values_shape)


@register_flop_formula(torch.ops.effcompile.block_sparse_grad_input)
def _grad_input_flops(
    grad_shape: Shape, values_shape: Shape, *args: object, out_shape: object = None, **kwargs: object
) -> int:
    return _flops(grad_shape, values_shape)


@register_flop_formula(torch.ops.effcompile.block_sparse_grad_values)
def _grad_values_flops(
    grad_shape: Shape, x_shape: Shape, *args: object, out_shape: Shape = (), **kwargs: object
) -> int:
    return _flops(grad_shape, out_shape)


# ------------------------------------------------------------------ memory and time


def with_indices(target: object, args: Sequence[Any]) -> Sequence[Any]:
    """The arguments with indices of a pattern that uses all of the capacity, evenly: for whoever times a call
    with made-up arguments.

    Zeros, valid indices elsewhere, are a pattern without a block, which takes no time. Other operators'
    arguments come back as given.
    """
    name = getattr(target, "name", lambda: "")()
    if not name.startswith("effcompile::block_sparse_"):
        return args
    stored = args[3].shape[0]
    places = torch.arange(stored, device=args[3].device)

    def pointers(like: Tensor) -> Tensor:
        return (torch.arange(len(like), device=like.device) * stored // max(1, len(like) - 1)).int()

    block_cols = len(args[4]) - 1 if len(args) > 4 else args[1].shape[-1] // _block_of(args[0], args[2])
    scattered = [(places * 7919 % max(1, size)).int() for size in (block_cols, len(args[2]) - 1)]
    if len(args) == 4:
        return [*args[:2], pointers(args[2]), scattered[0]]
    return [
        *args[:2],
        pointers(args[2]),
        scattered[0],
        pointers(args[4]),
        scattered[1],
        places.int(),
        *args[7:],
    ]


def workspace_bytes(name: str, args: Sequence[object]) -> int | None:
    """Bytes alive at the highest instant inside one of these operators, beyond its inputs and outputs; None
    for other operators.

    `name` and `args` as in `effcompile.ops.loss_head_workspace.workspace_bytes`. Without kernels it is
    the dense weight, twice, or its gradient.
    """
    kind = name.removeprefix("effcompile::block_sparse_")
    if kind not in ("linear", "grad_input", "grad_values") or kind == name:
        return None
    first, second = args[:2]
    assert isinstance(first, Tensor) and isinstance(second, Tensor)
    if kind == "grad_values":
        crow, col = args[2:4]
        assert isinstance(crow, Tensor) and isinstance(col, Tensor)
        b = _block_of(first, crow)
        found, stored = native.kernels(first, b), int(col.shape[0]) * b * b
        if isinstance(found, str):
            return first.element_size() * int(first.shape[-1] * second.shape[-1] + stored) + 32 * int(
                col.shape[0]
            )
        return found.grad_values_bytes(first, second, stored)
    crow, ccol = args[2], args[4]
    assert isinstance(crow, Tensor) and isinstance(ccol, Tensor)
    b, stored = int(second.shape[1]), int(second.numel())
    found = native.kernels(first, b)
    if isinstance(found, str):
        return 2 * second.element_size() * (crow.shape[0] - 1) * (ccol.shape[0] - 1) * b * b + 32 * int(
            second.shape[0]
        )
    if kind == "grad_input":
        return found.grad_input_bytes(first, stored)
    bias = args[7] if len(args) > 7 else None
    return found.linear_bytes(first, stored, int(bias.numel()) if isinstance(bias, Tensor) else 0)


# ------------------------------------------------------------------ checks


def _block_of(grad: Tensor, crow: Tensor) -> int:
    rows = crow.shape[0] - 1
    if rows < 1 or grad.shape[-1] % rows or grad.shape[-1] < rows:
        raise UsageError(f"dy ends in {grad.shape[-1]}, which is no number of blocks in {rows} block rows.")
    return int(grad.shape[-1] // rows)


def _check(
    values: Tensor,
    crow: Tensor,
    col: Tensor,
    ccol: Tensor,
    row: Tensor,
    perm: Tensor,
    x: Tensor,
    bias: Tensor | None = None,
) -> tuple[int, int]:
    """(N, K)."""
    one_device(
        "A block-sparse linear",
        x=x,
        values=values,
        crow=crow,
        col=col,
        ccol=ccol,
        row=row,
        perm=perm,
        bias=bias,
    )
    if (
        values.dim() != 3
        or values.shape[1] != values.shape[2]
        or not len(values) == len(col) == len(row) == len(perm)
    ):
        sizes = (
            f"values {tuple(values.shape)}, col {tuple(col.shape)}, row {tuple(row.shape)}, perm "
            f"{tuple(perm.shape)}"
        )
        raise UsageError(
            f"A block-sparse weight has values (Z, b, b), and col, row and perm (Z); given {sizes}."
        )
    if any(index.dtype != torch.int32 or index.dim() != 1 for index in (crow, col, ccol, row, perm)):
        raise UsageError(
            "The indices of a block-sparse weight are 1-d tensors of int32, as BlockPattern makes them."
        )
    n, k = (len(crow) - 1) * values.shape[1], (len(ccol) - 1) * values.shape[1]
    if x.dtype != values.dtype or (bias is not None and (bias.dtype != values.dtype or bias.shape != (n,))):
        given = f"{x.dtype}, {values.dtype}" + (
            "" if bias is None else f" and {tuple(bias.shape)} {bias.dtype}"
        )
        raise UsageError(
            f"A block-sparse linear takes x, values and a bias ({n}) of one dtype; given {given}."
        )
    return n, k
