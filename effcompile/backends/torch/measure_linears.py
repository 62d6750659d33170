"""Products as each engine would run them, to be timed: on dense weights in every format, and on blocks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

from effcompile.backends.torch import numerics
from effcompile.backends.torch.packing import packed, packing, product
from effcompile.backends.torch.regions import FEW
from effcompile.core.errors import LoweringError
from effcompile.core.types import Forward
from effcompile.ir.formats import (
    FP32,
    INT8_CHANNEL,
    INT8_DYNAMIC,
    INT8_STATIC,
    INT8_TOKEN,
    INT13_TOKEN,
    W8_CHANNEL,
    WeightFormat,
)
from effcompile.machine import huge_pages
from effcompile.machine.cold import FEW_ROWS
from effcompile.machine.target import Dims
from effcompile.ops import bf16_linear, few_rows, group_codes, int8_sparse, int13_codes, row_program
from effcompile.ops.bf16_linear import HeldHalves
from effcompile.ops.block_sparse import block_sparse_linear, fallback_reason
from effcompile.ops.fp32_linear import HeldFloats
from effcompile.ops.group_linear import group_linear, group_linear_on_cpu
from effcompile.ops.int8_codes import pack
from effcompile.ops.int8_held import HeldLinear, HeldWords
from effcompile.ops.int8_linear import int8_linear_on_cpu
from effcompile.ops.int13_linear import int13_linear_on_cpu
from effcompile.ops.row_program import BYTES, GROUPS, WIDE, RowProgram, RowStep
from effcompile.ops.sparse_codes import SparseCodes
from effcompile.ops.tape import HeldOperator, Tape, TapeStep
from effcompile.sparse.pattern import BlockPattern

aten = torch.ops.aten
Body = Callable[[], Any]


@dataclass(frozen=True, slots=True)
class _OnWeights:
    """A product on weights whose form takes long to make: of copies only the bytes are other ones.

    `step`: makes what a tape (tape.py) does instead, of the weights; None where none does.
    """

    product: Forward
    weights: tuple[torch.Tensor, ...]
    step: Callable[..., HeldOperator] | None = None

    def __call__(self) -> Any:
        return self.product(*self.weights)

    def copy(self) -> _OnWeights:
        return replace(self, weights=tuple(weight.clone() for weight in self.weights))


class _Drawn:
    """A linear's operands, drawn once for all that are alike, and the codes of its weight, made once."""

    def __init__(self, m: int, k: int, n: int) -> None:
        self.x, self.weight, self.bias = torch.randn(m, k), torch.randn(n, k), torch.randn(n)
        self.coded = functools.cache(functools.partial(numerics.quantize_weight, self.weight))


def linears(held: WeightFormat, dims: Dims, engine: str, count: int) -> list[Body | None]:
    """So many of them, each on weights of its own, codes where a lowered model has them."""
    m, k, n = dims
    if numerics.why_not(held, m, k, n) is not None or (engine == "stock" and held != FP32):
        return []
    drawn = _Drawn(m, k, n)
    own = held == FP32 and engine == "eager" and not drawn.x.is_cuda
    if own and (m <= FEW or (m <= few_rows.ROWS and packing(*dims, ours=True) != "ours")):
        return _few_float(drawn, count)
    first = _linear(held, drawn, engine)
    copied = (
        first.copy() if isinstance(first, _OnWeights) else _linear(held, drawn, engine)
        for _ in range(count - 1)
    )
    made = [first, *copied]
    huge_pages.move(weight for body in made if isinstance(body, _OnWeights) for weight in body.weights)
    return made


def _few_float(drawn: _Drawn, count: int) -> list[Body | None]:
    """As a step of a generation has them: side by side, in large pages (runtime/generation/steps.py). In
    small ones, each in its own, they took 1.4 to 1.7 times as long (512 columns).
    """
    weights = drawn.weight.expand(count, -1, -1).contiguous()
    huge_pages.collapse([weights])
    return [_OnWeights(functools.partial(few_rows.linear, drawn.x), (own, drawn.bias)) for own in weights]


def in_one_call(held: WeightFormat, dims: Dims, made: Sequence[Body | None]) -> Body | None:
    """Linears as a lowered model does them, all in one call: few rows in a region (regions.py), more on a
    tape (tape.py). None where each is a call: from Python that took 12 to 20 us, which is as long as reading
    a weight of 512 x 512 in bytes.
    """
    m, k, n = dims
    on_weights = [body for body in made if isinstance(body, _OnWeights)]
    if len(on_weights) < len(made):
        return None
    if m > FEW:
        return _on_tape([body.step(*body.weights) for body in on_weights if body.step is not None], m, k)
    kind = GROUPS if held.activation == "int8 groups" else {FP32: WIDE, INT8_TOKEN: BYTES}.get(held)
    if kind is None or not row_program.has(kind):
        return None
    steps = [
        # the weight, its scales or None, the bias
        RowStep(kind=kind, a=0, out=at, k=k, n=n, constants=(weight, *(scales or (None,)), bias))
        for at, (weight, *scales, bias) in enumerate((body.weights for body in on_weights), start=1)
    ]
    program = RowProgram(steps, 1, [k, *[n] * len(steps)], range(1, len(steps) + 1))
    return functools.partial(program, torch.randn(1, m, k))


def _on_tape(operators: Sequence[HeldOperator], m: int, k: int) -> Body | None:
    steps = [TapeStep(operator, (0,)) for operator in operators]
    return functools.partial(Tape(steps, 1, [len(steps)]), torch.randn(m, k)) if steps else None


def _floats(held: torch.Tensor, bias: torch.Tensor) -> HeldFloats:
    return HeldFloats(held, len(bias), bias)


def _linear(held: WeightFormat, drawn: _Drawn, engine: str) -> Body | None:
    x, weight, bias = drawn.x, drawn.weight, drawn.bias
    if not x.is_cuda and (reason := numerics.not_here(held)) is not None:
        raise LoweringError(str(reason))
    if held == INT8_TOKEN:
        return _int8_token(x, weight, bias)
    if held == INT13_TOKEN:
        return _int13_token(x, weight, bias)
    if held.activation == "int8 groups":
        return _groups(held, x, weight, bias)
    if held.bits > 8:
        return _float(held, x, weight, bias, engine)
    if held in (INT8_DYNAMIC, INT8_CHANNEL, INT8_STATIC):
        return _int8(held, drawn, engine)
    return _weight_only(held, x, weight, bias)


def sparse(dims: Dims) -> Body | None:
    """A linear of `kept` blocks at random places, one operator to every engine; None where its compiled
    kernels are lacking.
    """
    m, k, n, kept, block = dims
    x, bias = torch.randn(m, k), torch.randn(n)
    blocks = (n // block) * (k // block)
    if not 0 < kept <= blocks or fallback_reason(x, block) is not None:
        return None
    pattern = BlockPattern.from_blocks((torch.randperm(blocks) < kept).view(n // block, -1), block)
    values = torch.randn(kept, block, block)
    return lambda: block_sparse_linear(x, values, *pattern.indices, bias)


def _sparse_bytes(dims: Dims) -> Body | None:
    """The same in 8 bits."""
    m, k, n, kept, block = dims
    blocks = (n // block) * (k // block)
    if not 0 < kept <= blocks or int8_sparse.fallback_reason() is not None or torch.empty(0).is_cuda:
        return None
    grid = (torch.randperm(blocks) < kept).view(n // block, -1)
    mask = grid.repeat_interleave(block, 0).repeat_interleave(block, 1)
    codes, scales = numerics.quantize_rows(torch.randn(n, k) * mask)
    tensors = (*SparseCodes.of(codes).tensors, scales.flatten())
    x, bias = torch.randn(m, k), torch.randn(n)
    return lambda: int8_sparse.int8_sparse_linear.default(x, *tensors, block, kept, bias)


#: Kernel → what makes a body of it.
SPARSE = {"linear/sparse": sparse, "linear/sparse_int8": _sparse_bytes}


def _float(
    held: WeightFormat, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, engine: str
) -> Body:
    if held == FP32:
        return _wide(x, weight, bias, engine)
    if x.is_cuda:
        half = weight.bfloat16()
        return lambda: F.linear(x.bfloat16(), half).float() + bias
    if engine == "eager" and bf16_linear.multiplies(len(x)):
        return _OnWeights(functools.partial(_halves, x), (bf16_linear.pack(weight), bias), _held_halves)
    narrow = torch.ops.mkldnn._reorder_linear_weight(weight.bfloat16(), len(x))
    by_onednn = torch.ops.mkldnn._linear_pointwise.default
    return lambda: _widen_and_add(by_onednn(x.bfloat16(), narrow, None, "none", [], ""), bias)


def _halves(x: torch.Tensor, held: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return bf16_linear.bf16_linear_on_cpu(x, held, len(bias), bias)


def _held_halves(held: torch.Tensor, bias: torch.Tensor) -> HeldHalves:
    return HeldHalves(held, len(bias), bias)


def _wide(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, engine: str) -> Body:
    dims = len(x), x.shape[1], len(weight)
    way = "none" if engine == "stock" or x.is_cuda else packing(*dims, ours=engine == "eager")
    if way == "none":
        own, multiplied = weight.clone(), few_rows.linear if engine == "eager" else F.linear
        return lambda: multiplied(x, own, bias)
    held, run = packed(way, weight, len(x)), functools.partial(product, way, x)
    return _OnWeights(run, (held, bias), _floats) if way == "ours" else functools.partial(run, held, bias)


def _int8(held: WeightFormat, drawn: _Drawn, engine: str) -> Body:
    x, bias = drawn.x, drawn.bias
    tail = _behind_codes(*drawn.coded(per_channel=held.scale == "channel"), bias)
    qlinear = torch.ops.onednn.qlinear_pointwise
    if held == INT8_STATIC:
        quantize = as_run_by(_static_at_unit_range, engine)
        return lambda: qlinear.default(quantize(x), 8.0 / 255.0, 128, *tail)
    dynamic = as_run_by(numerics.quantize_dynamic, engine)
    return lambda: qlinear.tensor(*dynamic(x), *tail)


def _behind_codes(q: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor) -> tuple[object, ...]:
    """The operands of oneDNN's product behind the activations' codes, their scale and their zero."""
    packed = torch.ops.onednn.qlinear_prepack(q, None)
    zeros = torch.zeros(len(scale), dtype=torch.int32)
    return packed, scale, zeros, bias, 1.0, 0, torch.float32, "none", [], ""


def of_codes(dims: Dims, engine: str) -> Body | None:
    """A linear in 8 bits without its quantiser: nothing that compiles one takes less. None elsewhere."""
    if torch.get_default_device().type != "cpu" or numerics.why_not(INT8_DYNAMIC, *dims) is not None:
        return None
    drawn = _Drawn(*dims)
    codes = _static_at_unit_range(drawn.x)
    tail = _behind_codes(*drawn.coded(per_channel=False), drawn.bias)
    return lambda: torch.ops.onednn.qlinear_pointwise.default(codes, 8.0 / 255.0, 128, *tail)


def _int8_token(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> Body | None:
    """One function to every engine, without torch's dispatcher (plain.py); None on a GPU."""
    codes, scales = numerics.quantize_rows(weight)
    packed, flat = pack(codes), scales.flatten()
    product = functools.partial(int8_linear_on_cpu, x)
    return None if x.is_cuda else _OnWeights(product, (packed, flat, bias), HeldLinear)


def _int13_token(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> Body | None:
    codes, scales = int13_codes.quantize(weight)
    product = functools.partial(int13_linear_on_cpu, x)
    return None if x.is_cuda else _OnWeights(product, (int13_codes.pack(codes), scales, bias), HeldWords)


def _groups(held: WeightFormat, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> Body | None:
    """The same. Of few rows both are what a region calls, without torch's dispatcher (regions.py)."""
    product = group_linear_on_cpu if len(x) <= FEW_ROWS else group_linear.default
    packed = group_codes.pack(*group_codes.quantize(weight, held.bits), held.bits)
    return (
        None
        if x.is_cuda
        else _OnWeights(lambda held, bias: product(x, held, len(bias), bias), (packed, bias))
    )


def _weight_only(held: WeightFormat, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> Body:
    if held == W8_CHANNEL:
        q, scale = numerics.quantize_w8(weight)
        return _OnWeights(
            lambda q, scale, bias: _widen_and_add(aten._weight_int8pack_mm(x.bfloat16(), q, scale), bias),
            (q, scale, bias),
        )
    group = held.group
    by_group = lambda packed, scales, bias: _widen_and_add(  # noqa: E731
        aten._weight_int4pack_mm_for_cpu(x.bfloat16(), packed, group, scales), bias
    )
    return _OnWeights(by_group, (*numerics.quantize_w4(weight, group), bias))


def _widen_and_add(y: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return y.to(torch.float32) + bias


def _static_at_unit_range(x: torch.Tensor) -> torch.Tensor:
    return numerics.quantize_static(x, 8.0 / 255.0, 128)


def quantizers(rows: int, width: int, engine: str) -> list[Body]:
    """What the engine's linears in 8 bits do to their activations."""
    x = torch.randn(rows, width)
    return [
        functools.partial(as_run_by(function, engine), x)
        for function in (numerics.quantize_dynamic, _static_at_unit_range)
    ]


@functools.cache
def _compiled(function: Callable[..., object]) -> Forward:
    return torch.compile(function, dynamic=True)


def as_run_by(function: Callable[..., object], engine: str) -> Forward:
    """The function as the engine runs it.

    One compilation serves all shapes, 1-3 s each, kept for the process.
    """
    return _compiled(function) if engine == "inductor" else function
