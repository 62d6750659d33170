"""Sections of gpu.py: products with quantised operands against cuBLAS and torchao, and updates on states of 8
bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from _gpu_common import DEVICE, DRY, DTYPE, Timed, attempt, close, compare, make, mine, missing, queued, say
from torch import Tensor, nn

from effcompile.ops.group_quant import pack_int4, quantize_groups, quantized_linear
from effcompile.ops.states8 import BLOCK, adam8

GROUP = 32 if DRY else 128


#: Weights that a product of a few rows takes in turn, so that none of them is found in L2, where it is not in
#: a model.
IN_TURN = 2 if DRY else 6


def products() -> None:
    """y = x Wᵀ with W in 4 or 8 bits: a few rows (memory bound), and many (arithmetic bound).

    All outputs in bf16.
    """
    n, k = (64, 64) if DRY else (8192, 8192)
    for rows in (16,) if DRY else (16, 8192, 512):
        for name, made in (("int4 weight", int4), ("int8 x int8", int8), ("fp8 x fp8", fp8)):
            if mine():
                with attempt(f"gemm {name} m{rows}"):
                    product(f"gemm {name} m{rows}", made, rows, n, k)


def product(case: str, made: Callable[[Tensor, Tensor], Timed], rows: int, n: int, k: int) -> None:
    """One kind on one shape; a small product's calls are queued in a graph, over several weights."""
    count, sets = IN_TURN if rows <= 64 else 1, []
    for _ in range(count):
        x, weight = make(rows, k), make(n, k) * k**-0.5
        sets.append({**made(x, weight), "cuBLAS bf16": lambda x=x, weight=weight: F.linear(x, weight)})
    close(case, sets[0]["ours"](), sets[0]["exact"](), 6e-3)
    runs: Timed = {}
    for name in sets[0]:
        if name != "exact":
            each = [one[name] for one in sets if name in one]
            with attempt(case, name=name):
                runs[name] = each[0] if count == 1 else queued(each)
    compare(f"{case} n{n} k{k}", 2.0 * rows * n * k, runs, calls=count)


def int4(x: Tensor, weight: Tensor) -> Timed:
    """Codes in groups along K, x as it is."""
    grouped = weight.float().unflatten(1, (-1, GROUP))
    scales = grouped.abs().amax(2) / 7
    codes = (grouped / scales.unsqueeze(2)).round().clamp(-8, 7).to(torch.int8)
    packed, whole = pack_int4(codes.flatten(1)), (codes.float() * scales.unsqueeze(2)).flatten(1)
    mine = lambda: quantized_linear(x, packed, scales, None, None, None, "none", DTYPE)  # noqa: E731
    return {
        "ours": mine,
        "exact": lambda: x.float() @ whole.T,
        **torchao("Int4WeightOnlyConfig", x, weight, group_size=GROUP),
    }


def int8(x: Tensor, weight: Tensor) -> Timed:
    """A scale per row of each; what is timed takes x in codes (torchao's makes them)."""
    (a, sa), (b, sb) = (
        quantize_groups(x, x.shape[1], torch.int8),
        quantize_groups(weight, x.shape[1], torch.int8),
    )
    mine = lambda: quantized_linear(a, b, sb, sa, None, None, "none", DTYPE)  # noqa: E731
    exact = lambda: (a.float() * sa) @ (b.float() * sb).T  # noqa: E731
    runs: Timed = {
        "ours": mine,
        "exact": exact,
        **torchao("Int8DynamicActivationInt8WeightConfig", x, weight),
    }
    return runs if DRY else {**runs, "cuBLAS int8, unscaled": lambda: torch._int_mm(a, b.T)}


def fp8(x: Tensor, weight: Tensor) -> Timed:
    """The same in float8_e4m3fn; cuBLAS scales its rows."""
    (a, sa), (b, sb) = (quantize_groups(t, x.shape[1], torch.float8_e4m3fn) for t in (x, weight))
    mine = lambda: quantized_linear(a, b, sb, sa, None, None, "none", DTYPE)  # noqa: E731
    exact = lambda: (a.float() * sa) @ (b.float() * sb).T  # noqa: E731
    runs: Timed = {
        "ours": mine,
        "exact": exact,
        **torchao("Float8DynamicActivationFloat8WeightConfig", x, weight),
    }
    cublas = lambda: torch._scaled_mm(a, b.T, sa, sb.T.contiguous(), out_dtype=DTYPE)  # noqa: E731
    return {**runs, "cuBLAS fp8": cublas}


def torchao(config: str, x: Tensor, weight: Tensor, **options: Any) -> Timed:
    """torchao's linear of this kind, compiled as its documentation says; nothing where it is not installed or
    does not take the shape.
    """
    if missing("torchao"):
        return {}
    try:
        from torchao import quantization
        from torchao.quantization import quantize_

        linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device=DEVICE, dtype=DTYPE)
        linear.weight.data.copy_(weight)
        quantize_(linear, getattr(quantization, config)(**options))
        run = torch.compile(linear)
        with torch.no_grad():
            run(x)
    except Exception as error:
        # not installed, no such config in this version, a kernel that is not built: whatever it raises
        say(case=f"torchao {config}", error=f"{type(error).__name__}: {str(error)[:160]}")
        return {}

    def call() -> Tensor:
        with torch.no_grad():
            return run(x)

    return {"torchao": call}


def states() -> None:
    """A step of AdamW on states of 8 bits, against torch's fused kernel on states of the parameters' own
    width, and torchao's.
    """
    for dtype in (torch.float32,) if DRY else (torch.float32, DTYPE):
        if mine():
            with attempt(f"AdamW {dtype}"):
                one_width(dtype, 4 * BLOCK if DRY else 1 << 27)


def one_width(dtype: torch.dtype, n: int) -> None:
    """Parameters, gradients, and torch's states of this type."""
    p, grad = make(n, dtype=dtype), make(n, dtype=dtype)
    codes = [torch.randint(0, 256, (n,), dtype=torch.uint8, device=DEVICE) for _ in range(2)]
    scales = [torch.rand(n // BLOCK, device=DEVICE) * 1e-3 for _ in range(2)]
    tables = [torch.linspace(low, 1, 256, device=DEVICE) for low in (-1, 0)]
    arguments = (1e-3, 0.9, 0.99, 0.1, 1e-8, 3, True)

    def ours() -> Tensor:
        adam8(p, grad, codes[0], scales[0], codes[1], scales[1], *tables, *arguments)
        return p

    part = 1 << 10 if DRY else 1 << 22  # the definition takes 40 B an element
    updates = []
    for update in (adam8, adam8._init_fn):
        moved = p[:part].float().clone()
        kept = [
            t.clone()
            for code, scale in zip(codes, scales, strict=True)
            for t in (code[:part], scale[: part // BLOCK])
        ]
        update(moved, grad[:part].float(), *kept, *tables, *arguments)
        updates.append(moved - p[:part].float())
    close(f"AdamW's update of {dtype}, 8-bit states", *updates, 1e-4)
    width = p.element_size()
    case = f"AdamW of {n} {str(dtype).rpartition('.')[2]} parameters"
    # p, both states read and written, the gradient read
    least = {"ours": n * (3 * width + 4), "torch fused": n * 7 * width}
    runs: Timed = {"ours": ours, "torch fused": optimizer_step(torch.optim.AdamW, p, grad, fused=True)}
    with attempt(case, name="torchao 8-bit"):
        from torchao.optim import AdamW8bit

        runs["torchao 8-bit"] = optimizer_step(AdamW8bit, p, grad)
    compare(case, 12.0 * n, runs, gbytes=least["ours"] / 1e9, torch_moves_gbytes=least["torch fused"] / 1e9)


def optimizer_step(kind: Any, p: Tensor, grad: Tensor, **options: Any) -> Callable[[], Any]:
    parameter = nn.Parameter(p.clone())
    parameter.grad = grad
    return kind([parameter], lr=1e-3, **options).step
