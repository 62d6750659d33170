"""Times single kernels as each engine would run them.

Results are for this machine and torch's current thread count.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F  # noqa: N812

from effcompile.backends.torch import numerics
from effcompile.backends.torch.measure_attentions import ATTENTIONS, is_on_tapes
from effcompile.backends.torch.measure_linears import (
    SPARSE,
    Body,
    as_run_by,
    in_one_call,
    linears,
    of_codes,
    quantizers,
)
from effcompile.core import gpu
from effcompile.core.floats import in_fp32
from effcompile.core.timing import SETTLED, median_seconds
from effcompile.core.torch_compat_inductor import compiling
from effcompile.core.torch_compat_kernels import built_later
from effcompile.ir.formats import FP32, INT8_CHANNEL, INT8_DYNAMIC, INT8_STATIC
from effcompile.machine.cold import FEW_ROWS, MANY_ROWS, cold_copies, evict, reads_weights
from effcompile.machine.target import Dims, KernelCall
from effcompile.ops import few_rows, group_codes, row_program, rows_native
from effcompile.ops.add_norm import add_layer_norm

_CACHE_BYTES = 48 * 2**20  # more than the last-level cache share of the machines we saw
_MOST_COPIES = 8
#: Times the few rows of a region's operator that are timed in one call: the call itself is none there.
_AT_ONCE = 64


def measure(call: KernelCall, engine: str, *, device: str | None = None) -> float | None:
    """Seconds of one warm call, or None where torch has no such kernel on this type of device.

    `engine`: "eager" and "inductor" as lowered by us, "stock" for the original model's own operators.
    `device`: if None torch's default.
    """
    device = device or torch.get_default_device().type
    if device == "cpu" and (times := _at_once(call)) > 1:
        many = measure(KernelCall(call.kernel, (call.dims[0] * times, *call.dims[1:])), engine, device=device)
        return None if many is None else many / times
    held, make = call.format, _KERNELS.get(call.kernel)
    inductor = compiling() if engine == "inductor" else contextlib.nullcontext()
    with torch.no_grad(), torch.device(device), inductor, in_fp32():
        if engine == "inductor" and device == "cpu":
            _build_ahead(_built_with(call), torch.get_num_threads())
        if call.kernel in SPARSE:
            body = in_turn([SPARSE[call.kernel](call.dims) for _ in range(copies(call))])
        elif make is not None:
            body = make(call.dims, engine)
        elif held is None or not is_linear(call):
            return None  # what is neither there nor a linear is nowhere
        elif device == "cpu" and reads_weights(call):
            made = linears(held, call.dims[:3], engine, 1 + cold_copies(_stored(call)))
            present = [each for each in made if each is not None]
            regions = functools.partial(in_one_call, held, call.dims[:3]) if engine == "eager" else None
            return _on_cold_weights(present, regions) if present else None
        else:
            made = linears(held, call.dims[:3], engine, copies(call))
            if engine == "eager" and len(made) > 1 and (together := in_one_call(held, call.dims[:3], made)):
                return seconds_of(together, device) / len(made)
            body = in_turn(made)
        return None if body is None else seconds_of(body, device)


#: Sizes that Inductor shares loops among threads for: code is the same for all, chosen at the first.
_USUAL = (128, 768)


_WIDE = (_USUAL[0] * 4 * _USUAL[1],)
#: Kernels that are built together: those that a plan's bound asks for need not wait for the others.
_TOGETHER = (
    (("add_norm/split", _USUAL), ("gelu/erf", _WIDE), ("gelu/tanh", _WIDE)),
    (("pointwise/fp32", (256,)), ("pointwise/fp32", (1,))),
)
_IN_BYTES = "linear"


def _built_with(call: KernelCall) -> str:
    """What names the kernels that are built together with a call's; "" where it has none or is alone."""
    if call.format in (INT8_DYNAMIC, INT8_CHANNEL, INT8_STATIC):
        return _IN_BYTES
    return next((some[0][0] for some in _TOGETHER if call.kernel in dict(some)), "")


@functools.cache
def _build_ahead(first: str, threads: int) -> None:
    """Have what Inductor compiles for its kernels, the same code for all shapes, generated one after the
    other and built side by side: of 15 s of a BERT's prices half was a compiler that ran alone.

    `first`: as `_built_with` has it.
    """
    rows, width = _USUAL
    asked = next((some for some in _TOGETHER if some[0][0] == first), ())
    made = [_KERNELS[kernel](dims, "inductor") for kernel, dims in asked]
    bodies = (
        [body for m in (rows, 1) for body in quantizers(m, width, "inductor")] if first == _IN_BYTES else []
    )
    with built_later() as waits:
        for body in (*bodies, *made):
            with contextlib.suppress(Exception):  # not built yet; what cannot be is told where it is timed
                if body is not None:
                    body()
    for wait in waits:
        with contextlib.suppress(Exception):
            wait()


def _at_once(call: KernelCall) -> int:
    """How many of an operator on few rows are timed as one, which a region (regions.py) or a tape (tape.py)
    does within its one call; of an attention batches.
    """
    if is_on_tapes(call.kernel):
        batch, _, queries = call.dims[:3]
        return max(1, MANY_ROWS // (batch * queries))
    few = call.kernel.startswith("rows/") and call.dims[0] <= FEW_ROWS
    return _AT_ONCE if few and row_program.available() else 1


def priced_as(backend: str, call: KernelCall) -> str:
    """Whose time of a kernel a backend's is: eager's, where Inductor has no part in it, or none that shows.

    Around a product of float weights, or of codes that are widened, it has a cast and a sum; compiled they
    took what torch's own take (BERT's shapes, one thread of an AMX Xeon), and each a second of a compiler.
    """
    return "torch-eager" if backend == "torch-inductor" and _one_operator(call) else backend


def _one_operator(call: KernelCall) -> bool:
    """Whether Inductor calls the operator as eager does."""
    held = call.format
    if held is not None and is_linear(call):
        ours = held == FP32 and call.dims[0] <= few_rows.ROWS  # eager's own
        return held not in (INT8_DYNAMIC, INT8_CHANNEL, INT8_STATIC) and not ours
    alone = ("attention/", "predict/", "rows/", "embedding/", "product/")
    return call.kernel.startswith(alone) or call.kernel in SPARSE


def _on_cold_weights(
    bodies: Sequence[Body], regions: Callable[[Sequence[Body]], Body | None] | None
) -> float:
    """Of each but the last, one after the other as in a model: before them the caches are emptied, and the
    last brings back what is no weight, the program's code and what it works with, some 300 µs.

    `regions`: makes one call of several, where it can.
    """
    *timed, other = bodies
    if regions is not None and (alone := regions([other])) is not None:
        other = alone

    def emptied() -> None:
        evict()
        other()

    def one_by_one() -> None:
        for body in timed:
            body()

    all_of_them = (regions and regions(timed)) or one_by_one
    return median_seconds(all_of_them, settled=SETTLED, before=emptied) / len(timed)


def seconds_of(body: Body, device: str) -> float:
    """Of one call, by the clock of the device that it runs on."""
    return median_seconds(body, settled=SETTLED) if device == "cpu" else gpu.seconds(body)


def copies(call: KernelCall) -> int:
    """Linears with weights of their own that together exceed the last-level cache, as the layers of a model
    do.
    """
    if call.kernel in SPARSE:
        kept, block = call.dims[3:]
        return max(1, min(_MOST_COPIES, _CACHE_BYTES // (4 * kept * block**2)))
    many = call.dims[0] >= MANY_ROWS
    return 1 if many else max(1, min(_MOST_COPIES, _CACHE_BYTES // _stored(call)))


def _stored(call: KernelCall) -> int:
    """Bytes of a linear's weight."""
    _, k, n = call.dims[:3]
    return call.format.stored_bytes(n, k) if call.format is not None else 2 * n * k


def in_turn(bodies: list[Body | None]) -> Body | None:
    """One callable that runs the next of them at each call."""
    present = [body for body in bodies if body is not None]
    following = itertools.cycle(present)
    return (lambda: next(following)()) if present else None


def is_linear(call: KernelCall) -> bool:
    """Whether it is a product with a dense weight."""
    return call.kernel.startswith("linear/") and call.format is not None


def _on_random(
    function: Callable[..., object], shapes: Callable[[Dims], list[tuple[int, ...]]]
) -> Callable[[Dims, str], Body]:
    def make(dims: Dims, engine: str) -> Body:
        inputs = [torch.randn(shape) for shape in shapes(dims)]
        run = as_run_by(function, engine)
        return lambda: run(*inputs)

    return make


def _norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, (x.shape[-1],), weight, bias)


def _rms(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight)


def _add_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor
) -> torch.Tensor:
    return F.layer_norm(x + residual, (x.shape[-1],), weight, bias)


def _add_norm_of_ours(dims: Dims, engine: str) -> Body | None:
    """Compiled, for eager execution; Inductor fuses the two by itself."""
    on_cpu = torch.get_default_device().type == "cpu"
    if engine != "eager" or isinstance(rows_native.kernels(), str) or not on_cpu:
        return None
    x, residual = torch.randn(dims), torch.randn(dims)
    weight, bias = torch.randn(dims[1]), torch.randn(dims[1])
    return lambda: add_layer_norm.default(x, residual, weight, bias, 1e-5)


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate="tanh")


def _softmax(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x, -1)


def _pointwise(x: torch.Tensor) -> torch.Tensor:
    return x + 1.0


#: A table for timing lookups: larger than a vocabulary's cached part, small enough to allocate at once. What
#: stands in it changes nothing, and drawing it took longer than all lookups.
_TABLE_ROWS = 30_000


def _embedding(dims: Dims, engine: str) -> Body:
    rows, cols = dims
    table, ids = torch.ones(_TABLE_ROWS, cols), torch.randint(0, _TABLE_ROWS, (rows,))
    return lambda: F.embedding(ids, table)


def _embedding_int8(dims: Dims, engine: str) -> Body:
    rows, cols = dims
    table, scale = numerics.quantize_rows(torch.ones(_TABLE_ROWS, cols))
    ids = torch.randint(0, _TABLE_ROWS, (rows,))
    return lambda: numerics.lookup_int8(table, scale, ids)


def _embedding_groups(dims: Dims, engine: str) -> Body:
    rows, cols = dims
    table, scales = group_codes.quantize(torch.ones(_TABLE_ROWS, cols), 8)
    ids = torch.randint(0, _TABLE_ROWS, (rows,))
    look_up = numerics.lookup_groups(cols)
    return lambda: look_up(table, scales, ids)


def _rows(kernel: str, dims: Dims, engine: str) -> Body | None:
    """What lies between products, by the compiled kernels of a CPU; None elsewhere."""
    x, other, weight = torch.randn(dims), torch.randn(dims), torch.randn(dims[1])
    if isinstance(rows_native.kernels(), str) or x.is_cuda:
        return None
    heads, turn = x[None, None], other[None]
    bodies: dict[str, Body] = {
        "rms_norm": lambda: rows_native.rms_norm_alone(x, weight, 1e-6),
        "add_rms_norm": lambda: rows_native.rms_norm(x, other, weight, 1e-6),
        "swiglu": lambda: rows_native.swiglu(x, other),
        "rotary": lambda: rows_native.rotary(heads, turn, turn),
    }
    return None if kernel == "rotary" and dims[1] % 2 else bodies[kernel]


_KERNELS: dict[str, Callable[[Dims, str], Body | None]] = {
    "product/int8": of_codes,
    "matmul/fp32": _on_random(torch.matmul, lambda d: [(d[0], d[1], d[2]), (d[0], d[2], d[3])]),
    **ATTENTIONS,
    "norm/layer": _on_random(_norm, lambda d: [d, d[1:], d[1:]]),
    "norm/rms": _on_random(_rms, lambda d: [d, d[1:]]),
    "add_norm/split": _on_random(_add_norm, lambda d: [d, d, d[1:], d[1:]]),
    "add_norm/fused": _add_norm_of_ours,
    **{
        f"rows/{kernel}": functools.partial(_rows, kernel)
        for kernel in ("rms_norm", "add_rms_norm", "swiglu", "rotary")
    },
    "gelu/erf": _on_random(F.gelu, lambda d: [d]),
    "gelu/tanh": _on_random(_gelu_tanh, lambda d: [d]),
    "embedding/fp32": _embedding,
    "embedding/int8_rows": _embedding_int8,
    "embedding/int8_row_groups": _embedding_groups,
    "pointwise/fp32": _on_random(_pointwise, lambda d: [d]),
    "softmax/fp32": _on_random(_softmax, lambda d: [d]),
}
