"""Linears on sparse tensor cores: `effcompile::two_of_four_linear`, on two of every four neighbours in a row
of the weight.

What torch.sparse.to_sparse_semi_structured makes of a weight is held as plain tensors, so that a graph with
such linears is exported, compiled and saved like any other. Weights are constants: there is no gradient of
them.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from effcompile.core.errors import UsageError
from effcompile.core.reasons import Unsupported
from effcompile.core.types import Shape
from effcompile.ops.devices import one_device

__all__ = [
    "COLUMNS",
    "DTYPES",
    "ROWS",
    "compress",
    "misfit",
    "no_cores",
    "stored_bytes",
    "two_of_four_linear",
]

#: What a weight (N, K) must be divisible by, and its dtypes, for both of torch's kernels: CUTLASS asks for
#: these, cuSPARSELt for 16 and 16 (torch 2.13, sparse/semi_structured.py).
ROWS, COLUMNS = 32, 64
DTYPES = (torch.float16, torch.bfloat16)


def misfit(dtype: torch.dtype, n: int, k: int) -> Unsupported | None:
    """None, or why a weight (N, K) is not taken; K of the four neighbours, N outputs."""
    if dtype not in DTYPES:
        return Unsupported.of(
            "sparse tensor cores take float16 and bfloat16 here, and its weight is {}",
            str(dtype).removeprefix("torch."),
        )
    if n % ROWS or k % COLUMNS:
        return Unsupported.of(
            "2:4 kernels need N a multiple of {} and K of {}; here N = {}, K = {}", ROWS, COLUMNS, n, k
        )
    return None


def no_cores(device: torch.device) -> str | None:
    """None, or why there are no sparse tensor cores to run on: they came with compute capability 8.0."""
    if device.type != "cuda" or torch.version.cuda is None:
        return f"sparse tensor cores are NVIDIA's, and the weight is on {device}"
    major, minor = torch.cuda.get_device_capability(device)
    if major < 8:
        return f"sparse tensor cores came with compute capability 8.0; this GPU has {major}.{minor}"
    if major > 8 and not torch.backends.cusparselt.is_available():
        return (
            f"torch's CUTLASS kernels are for compute capability 8; this GPU has {major}.{minor} and "
            "this torch no cuSPARSELt"
        )
    return None


def stored_bytes(n: int, k: int) -> int:
    """Of a 16-bit weight (N, K): half of its values, and 2 bits for the place of each."""
    return n * k + n * k // 8


def compress(weight: Tensor) -> tuple[Tensor, Tensor | None]:
    """(kept values, their places) of a weight (N, K) as torch's kernels hold it; cuSPARSELt's has both in the
    first.

    Raises:
        UsageError: four neighbours with more than two that are not 0, or a shape or dtype that is not taken.
    """
    if (reason := misfit(weight.dtype, *weight.shape)) is not None:
        raise UsageError(f"A weight cannot be held 2:4: {reason}.")
    if int((weight.reshape(-1, 4) != 0).sum(1).max()) > 2:
        raise UsageError(
            "A weight cannot be held 2:4: some four neighbours of a row have more than two that are not "
            "0. Prune it first."
        )
    cutlass = weight.is_cuda and not torch.backends.cusparselt.is_available()
    make = (
        torch.sparse.SparseSemiStructuredTensorCUTLASS.from_dense
        if cutlass
        else torch.sparse.to_sparse_semi_structured
    )
    held = make(weight.contiguous())
    assert held.packed is not None
    return held.packed, held.meta


def linear_by_torch(x: Tensor, packed: Tensor, meta: Tensor | None, bias: Tensor | None, n: int) -> Tensor:
    """x (..., K) · Wᵀ + bias (N) for the weight (N, K) held in `packed` and `meta`; without sparse tensor
    cores, by making W.

    Raises:
        UsageError: dtypes or shapes that do not fit, or cuSPARSELt's form away from a GPU.
    """
    check(x, packed, meta, bias, n)
    if meta is None:
        raise UsageError(
            "This weight is held in cuSPARSELt's form, which runs on the GPU alone: move the model there, "
            "or lower it anew."
        )
    return torch.nn.functional.linear(x, _held(x, packed, meta, n).to_dense(), bias)


def linear_on_cores(x: Tensor, packed: Tensor, meta: Tensor | None, bias: Tensor | None, n: int) -> Tensor:
    """The same on the GPU's kernels; rows are padded to a multiple of 8 and cut again by torch."""
    check(x, packed, meta, bias, n)
    return torch.nn.functional.linear(x.contiguous(), _held(x, packed, meta, n), bias)


def _held(x: Tensor, packed: Tensor, meta: Tensor | None, n: int) -> Tensor:
    """The weight as torch's own class around the tensors."""
    form = (
        torch.sparse.SparseSemiStructuredTensorCUSPARSELT
        if meta is None
        else torch.sparse.SparseSemiStructuredTensorCUTLASS
    )
    shape = torch.Size((n, x.shape[-1]))
    return form(shape, packed=packed, meta=meta, packed_t=None, meta_t=None, compressed_swizzled_bitmask=None)


def check(x: Tensor, packed: Tensor, meta: Tensor | None, bias: Tensor | None, n: int) -> None:
    """Raises UsageError for what `two_of_four_linear` does not take."""
    one_device("A 2:4 linear", x=x, packed=packed, meta=meta, bias=bias)
    k = x.shape[-1] if x.dim() else 0
    # cuSPARSELt's holds the places too
    half = packed.numel() == n * k // 2 if meta is not None else packed.numel() > n * k // 2
    fits = (
        half and x.dtype == packed.dtype and (bias is None or (bias.shape == (n,) and bias.dtype == x.dtype))
    )
    if misfit(packed.dtype, n, k) is not None or not fits:
        given = f"x {tuple(x.shape)} {x.dtype}, {packed.numel()} values of {packed.dtype}, N = {n}"
        raise UsageError(
            "A 2:4 linear takes x (..., K) and half of the values of a weight (N, K) in 16 bits; given "
            f"{given}."
        )


two_of_four_linear = torch.library.custom_op(
    "effcompile::two_of_four_linear", linear_by_torch, mutates_args=()
)
two_of_four_linear.register_kernel("cuda")(linear_on_cores)


@two_of_four_linear.register_fake
def _(x, packed, meta, bias, n):  # type: ignore[no-untyped-def]
    return x.new_empty((*x.shape[:-1], n))


@register_flop_formula(torch.ops.effcompile.two_of_four_linear)
def _flops(x_shape: Shape, *args: object, out_shape: Shape = (), **kwargs: object) -> int:
    """Of the dense product's, the half that is done."""
    rows = 1
    for size in out_shape:
        rows *= size
    return rows * int(x_shape[-1])
