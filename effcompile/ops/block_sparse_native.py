"""The compiled kernels of the block-sparse linear (`block_sparse.cpp`): which there are here, their sizes,
and how they are called.

The first use of a block size and dtype compiles them and compares them once with torch: kernels that are
wrong are not used.
"""

from __future__ import annotations

import ctypes
import threading
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from effcompile.core.errors import LoweringError, UsageError
from effcompile.core.floats import in_fp32
from effcompile.machine.instructions import best_isa
from effcompile.machine.native import compiled, library
from effcompile.ops.block_sparse_dense import dense_weight, sampled_gradient
from effcompile.ops.instruction_sets import WORDS

#: Block sizes that there are kernels for.
BLOCKS = (1, 4, 8, 16, 32, 64)

_SOURCE = Path(__file__).with_name("block_sparse.cpp")
_ORT_SOURCE = Path(__file__).with_name("block_sparse_ort.cpp")
_FP32, _BF16, _PAIRS = 0, 1, 2

#: Bytes of transposed x: in the whole workspace, of the panels that one core works on at a time, and of a
#: chunk of the sampled product.
_STRIPE, _CACHE, _CHUNK = 4 << 20, 1 << 19, 1 << 20

#: Vectors of rows in a panel, however large that makes it: fewer leave the arithmetic units idle.
_NARROW = 4

_BAD = {
    1: "crow must ascend from 0 to at most the number of values",
    2: "col is out of range",
    3: "perm is out of range",
}

_found: dict[tuple[torch.dtype, int, str], Kernels | str] = {}
_building = threading.Lock()


def kernels(x: Tensor, block: int) -> Kernels | str:
    """The kernels for activations like x, or why there are none."""
    if x.device.type != "cpu":
        return f"the C++ kernels are for CPU tensors; these are on {x.device.type!r}"
    if x.dtype not in (torch.float32, torch.bfloat16):
        return (
            "the C++ kernels are for float32 and bfloat16; these tensors are "
            f"{str(x.dtype).removeprefix('torch.')}"
        )
    if block not in BLOCKS:
        return f"the C++ kernels are for blocks of {', '.join(map(str, BLOCKS))}; these are of {block}"
    isa = best_isa()
    key = (x.dtype, block, isa)
    if key not in _found:
        with _building:
            if key not in _found:
                _found[key] = _built(x.dtype, block, isa)
    return _found[key]


def onnxruntime_library() -> Path:
    """The library that gives ONNX Runtime the fp32 product in every block size (`block_sparse_ort.cpp`),
    compiled where it is not yet.

    Raises:
        LoweringError: there is no compiler, or it fails.
    """
    isa = best_isa()
    forms = [KernelForm.of(torch.float32, block, isa) for block in BLOCKS]
    defines = {
        "KIND": _FP32,
        "WIDTH": WORDS[isa],
        "CACHE_BYTES": _CACHE,
        "STRIPE_BYTES": _STRIPE,
        "NARROW": _NARROW,
    }
    defines |= {f"ROWS_{form.block}": form.rows for form in forms} | {
        f"VECS_{form.block}": form.vecs for form in forms
    }
    return compiled(_ORT_SOURCE, defines, "avx512" if isa == "avx512_bf16" else isa)


@in_fp32()
def _built(dtype: torch.dtype, block: int, isa: str) -> Kernels | str:
    try:
        made = Kernels(KernelForm.of(dtype, block, isa), isa)
    except LoweringError as error:
        return str(error)
    return made.objection() or made


@dataclass(frozen=True, slots=True)
class KernelForm:
    """How one kernel is cut: see the macros in `block_sparse.cpp`."""

    block: int
    kind: int
    width: int
    rows: int
    vecs: int

    @classmethod
    def of(cls, dtype: torch.dtype, block: int, isa: str) -> KernelForm:
        """The register tile that was fastest: as many accumulators as there are registers for."""
        pairs = isa == "avx512_bf16" and block > 1
        kind = _FP32 if dtype == torch.float32 else _PAIRS if pairs else _BF16
        width = WORDS[isa]
        many = width == 16 or isa == "neon"  # 32 registers, not 16
        if block == 1:
            return cls(block, kind, width, 1, 8)
        if block == 4:
            return cls(block, kind, width, 4, 6 if many else 3)
        return cls(block, kind, width, 8 if many else 4, 3)

    @property
    def per_word(self) -> int:
        """Elements of the summed axis in one 32-bit word."""
        return 2 if self.kind == _PAIRS else 1

    def panels(self, rows: int, summed: int) -> tuple[int, int, int]:
        """(vectors of the widest panel, panels transposed at a time, of these in one core's cache at a time)
        for x (rows, summed).
        """
        vector_bytes = summed // self.per_word * self.width * 4
        vecs = min(self.vecs, max(_NARROW, _CACHE // vector_bytes), max(1, -(-rows // self.width)))
        panels = -(-rows // (self.width * vecs))
        return (
            vecs,
            max(1, min(panels, _STRIPE // (vecs * vector_bytes))),
            max(1, _CACHE // (vecs * vector_bytes)),
        )

    def panel_floats(self, rows: int, summed: int) -> int:
        """Floats of transposed x that `linear` holds."""
        vecs, stripe, _ = self.panels(rows, summed)
        return stripe * summed // self.per_word * vecs * self.width

    def chunk(self, rows: int, cols: int) -> int:
        """Vectors of rows that the sampled product takes at a time, for x (rows, cols)."""
        return max(
            1,
            min(
                -(-rows // (self.width * self.per_word)),
                max(128 // self.width, _CHUNK // (cols * self.width * 4)),
            ),
        )

    def sampled_floats(self, rows: int, cols: int, threads: int) -> int:
        """Floats of transposed x and dy that `grad_values` holds."""
        return (cols + threads * max(self.block, self.width)) * self.chunk(rows, cols) * self.width


class Kernels:
    """The compiled kernels of one block size and dtype."""

    def __init__(self, form: KernelForm, isa: str) -> None:
        """Raises LoweringError when they cannot be compiled."""
        self.form, self.isa = form, isa
        names = {
            "BLOCK": form.block,
            "KIND": form.kind,
            "WIDTH": form.width,
            "ROWS": form.rows,
            "VECS": form.vecs,
        }
        plain = "avx512" if isa == "avx512_bf16" and form.kind != _PAIRS else isa
        self._library = library(_SOURCE, names, plain)

    def linear(self, x: Tensor, values: Tensor, crow: Tensor, col: Tensor, bias: Tensor | None) -> Tensor:
        """y (..., N) = x Wᵀ + bias. Tensors fit each other; indices are checked here.

        Raises:
            UsageError: an index is out of range.
        """
        return self._product(x, self._weights(values), crow, col, bias)

    def grad_input(self, grad: Tensor, values: Tensor, ccol: Tensor, row: Tensor, perm: Tensor) -> Tensor:
        """dx (..., K) = dy W."""
        used = min(int(ccol[-1]), len(values))
        values = self._weights(values)
        turned, perm = torch.empty_like(values), perm.contiguous()
        _check(
            self._library.transpose_values(
                _at(values), _at(perm), _int(used), _int(len(values)), _at(turned), _threads()
            )
        )
        return self._product(grad, turned, ccol, row, None)

    def grad_values(self, grad: Tensor, x: Tensor, crow: Tensor, col: Tensor) -> Tensor:
        """dvalues (Z, b, b) = dyᵀ x at the kept blocks."""
        grad, x, crow, col = _flat(grad), _flat(x), crow.contiguous(), col.contiguous()
        (m, n), k, b = grad.shape, x.shape[1], self.form.block
        found = x.new_empty((len(col), b, b), dtype=torch.float32)
        threads = torch.get_num_threads()
        workspace = found.new_empty(self.form.sampled_floats(m, k, threads))
        _check(self._library.grad_values(
            _at(grad), _int(grad.stride(0)), _at(x), _int(x.stride(0)), _int(m), _int(n // b), _int(k // b),
            _at(crow), _at(col), _int(len(col)), _at(found), _at(workspace), _int(self.form.chunk(m, k)),
            _int(threads),
        ))  # fmt: skip
        return found.to(x.dtype)

    def _weights(self, values: Tensor) -> Tensor:
        return (values.float() if self.form.kind == _BF16 else values).contiguous()

    def _product(self, x: Tensor, values: Tensor, crow: Tensor, col: Tensor, bias: Tensor | None) -> Tensor:
        b, n = self.form.block, (len(crow) - 1) * self.form.block
        result = x.new_empty((*x.shape[:-1], n))
        x, crow, col = _flat(x), crow.contiguous(), col.contiguous()
        m, k = x.shape
        vecs, stripe, cached = self.form.panels(m, k)
        workspace = x.new_empty(self.form.panel_floats(m, k), dtype=torch.float32)
        bias = None if bias is None else bias.float().contiguous()
        _check(self._library.linear(
            _at(x), _int(x.stride(0)), _int(m), _int(k // b), _at(values), _at(crow), _at(col), _int(n // b),
            _int(len(col)), _at(bias), _at(result), _int(n), _at(workspace), _int(vecs), _int(stripe),
            _int(cached), _threads(),
        ))  # fmt: skip
        return result

    def objection(self) -> str | None:
        """What is wrong with their results on a small example; None when they are right.

        A weight of 3 x 2 blocks, the second block row empty; the numbers are fixed, so that no random
        generator moves on.
        """
        b, m, dtype = self.form.block, 19, torch.float32 if self.form.kind == _FP32 else torch.bfloat16
        crow, col = torch.tensor([0, 2, 2, 3], dtype=torch.int32), torch.tensor([0, 1, 1], dtype=torch.int32)
        ccol, row, perm = (
            torch.tensor([0, 1, 3]).int(),
            torch.tensor([0, 0, 2]).int(),
            torch.tensor([0, 1, 2]).int(),
        )
        numbers = torch.arange(b * max(3 * m, 3 * b), dtype=torch.float64)
        x, grad = (
            (numbers * 0.7).sin()[: m * 2 * b].view(m, -1).to(dtype),
            numbers.cos()[: m * 3 * b].view(m, -1).to(dtype),
        )
        values, bias = (
            (numbers * 1.3).cos()[: 3 * b * b].view(3, b, b).to(dtype),
            numbers.sin()[: 3 * b].to(dtype),
        )
        weight = dense_weight(values.double(), crow, col, 2 * b)
        pairs = (
            ("product", self.linear(x, values, crow, col, bias), x.double() @ weight.T + bias.double()),
            ("input gradient", self.grad_input(grad, values, ccol, row, perm), grad.double() @ weight),
            (
                "weight gradient",
                self.grad_values(grad, x, crow, col),
                sampled_gradient(grad.double(), x.double(), crow, col, b),
            ),
        )
        limit = 1e-5 if dtype == torch.float32 else 2e-2
        wrong = [
            what for what, ours, right in pairs if not (ours.double() - right).norm() <= limit * right.norm()
        ]
        return f"the compiled {self.isa} kernels gave a wrong {' and '.join(wrong)}" if wrong else None

    def linear_bytes(self, x: Tensor, stored: int, biases: int) -> int:
        """Bytes that `linear` holds at most beyond its arguments and result, for `stored` values."""
        narrow = self.form.kind != _FP32
        values = 4 * stored if self.form.kind == _BF16 else 0
        return (
            _copy_bytes(x) + values + (4 * biases if narrow else 0) + 4 * self.form.panel_floats(*_sizes(x))
        )

    def grad_input_bytes(self, grad: Tensor, stored: int) -> int:
        """The same of `grad_input`: the values are turned."""
        turned = stored * (2 if self.form.kind == _PAIRS else 4)
        return turned + self.linear_bytes(grad, stored, 0)

    def grad_values_bytes(self, grad: Tensor, x: Tensor, stored: int) -> int:
        """The same of `grad_values`."""
        wide = 0 if self.form.kind == _FP32 else 4 * stored
        return (
            _copy_bytes(grad)
            + _copy_bytes(x)
            + wide
            + 4 * self.form.sampled_floats(*_sizes(x), torch.get_num_threads())
        )


def _flat(x: Tensor) -> Tensor:
    """(M, K) with adjacent columns, copied only where that is needed."""
    x = x.reshape(-1, x.shape[-1])
    return x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()


def _sizes(x: Tensor) -> tuple[int, int]:
    """(M, K)."""
    columns = int(x.shape[-1])
    return (int(x.numel()) // columns if columns else 0), columns


def _copy_bytes(x: Tensor) -> int:
    """Bytes of the copy that `_flat` makes; 0 where it makes none."""
    try:
        flat = x.view(-1, x.shape[-1])
    except RuntimeError:  # its leading axes are no one axis
        return int(x.numel()) * x.element_size()
    return 0 if flat.stride(1) == 1 or flat.shape[1] == 1 else int(x.numel()) * x.element_size()


def _int(value: int) -> ctypes.c_int64:
    return ctypes.c_int64(value)


def _at(tensor: Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())


def _threads() -> ctypes.c_int64:
    return ctypes.c_int64(torch.get_num_threads())


def _check(verdict: int) -> None:
    if verdict:
        raise UsageError(
            f"The pattern of a block-sparse weight is broken: {_BAD[verdict]}. Make it with "
            "effcompile.sparse.BlockPattern."
        )
