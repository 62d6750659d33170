"""Sections of gpu.py: products with quantised operands against cuBLAS and torchao, and updates on states of 8 bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from _gpu_common import DEVICE, DRY, DTYPE, Timed, close, compare, late, make, say
from torch import Tensor, nn

from effcompile.ops.group_quant import pack_int4, quantize_groups, quantized_linear
from effcompile.ops.states8 import BLOCK, adam8

GROUP = 32 if DRY else 128


def products() -> None:
    """y = x Wᵀ with W in 4 or 8 bits: a few rows (memory bound), and many (arithmetic bound). All outputs in bf16."""
    n, k = (64, 64) if DRY else (8192, 8192)
    for rows in (16,) if DRY else (16, 512, 8192):
        if not late():
            x, weight = make(rows, k), make(n, k) * k**-0.5
            for name, contestants in (("int4 weight", int4(x, weight)), ("int8 x int8", int8(x, weight)), ("fp8 x fp8", fp8(x, weight))):
                runs = {**contestants, "cuBLAS bf16": lambda: F.linear(x, weight)}  # noqa: B023 - called at once
                close(f"gemm {name} m{rows}", runs["ours"](), runs["exact"](), 6e-3)
                del runs["exact"]
                compare(f"gemm {name} m{rows} n{n} k{k}", 2.0 * rows * n * k, runs)


def int4(x: Tensor, weight: Tensor) -> Timed:
    """Codes in groups along K, x as it is."""
    grouped = weight.float().unflatten(1, (-1, GROUP))
    scales = grouped.abs().amax(2) / 7
    codes = (grouped / scales.unsqueeze(2)).round().clamp(-8, 7).to(torch.int8)
    packed, whole = pack_int4(codes.flatten(1)), (codes.float() * scales.unsqueeze(2)).flatten(1)
    mine = lambda: quantized_linear(x, packed, scales, None, None, None, "none", DTYPE)  # noqa: E731
    return {"ours": mine, "exact": lambda: x.float() @ whole.T, **torchao("Int4WeightOnlyConfig", x, weight, group_size=GROUP)}


def int8(x: Tensor, weight: Tensor) -> Timed:
    """A scale per row of each; what is timed takes x in codes (torchao's makes them)."""
    (a, sa), (b, sb) = quantize_groups(x, x.shape[1], torch.int8), quantize_groups(weight, x.shape[1], torch.int8)
    mine = lambda: quantized_linear(a, b, sb, sa, None, None, "none", DTYPE)  # noqa: E731
    exact = lambda: (a.float() * sa) @ (b.float() * sb).T  # noqa: E731
    runs: Timed = {"ours": mine, "exact": exact, **torchao("Int8DynamicActivationInt8WeightConfig", x, weight)}
    return runs if DRY else {**runs, "cuBLAS int8, unscaled": lambda: torch._int_mm(a, b.T)}


def fp8(x: Tensor, weight: Tensor) -> Timed:
    """The same in float8_e4m3fn; cuBLAS scales its rows."""
    (a, sa), (b, sb) = (quantize_groups(t, x.shape[1], torch.float8_e4m3fn) for t in (x, weight))
    mine = lambda: quantized_linear(a, b, sb, sa, None, None, "none", DTYPE)  # noqa: E731
    exact = lambda: (a.float() * sa) @ (b.float() * sb).T  # noqa: E731
    runs: Timed = {"ours": mine, "exact": exact, **torchao("Float8DynamicActivationFloat8WeightConfig", x, weight)}
    return runs if DRY else {**runs, "cuBLAS fp8": lambda: torch._scaled_mm(a, b.T, sa, sb.T.contiguous(), out_dtype=DTYPE)}


def torchao(config: str, x: Tensor, weight: Tensor, **options: Any) -> Timed:
    """torchao's linear of this kind, compiled as its documentation says; nothing where it is not installed or does not take the shape."""
    if DRY:
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
    except Exception as error:  # not installed, no such config in this version, a kernel that is not built: whatever it raises
        say(case=f"torchao {config}", error=f"{type(error).__name__}: {str(error)[:160]}")
        return {}

    def call() -> Tensor:
        with torch.no_grad():
            return run(x)

    return {"torchao": call}


def states() -> None:
    """A step of AdamW on states of 8 bits, against torch's fused kernel on 32 bits, and torchao's compiled one."""
    n = 4 * BLOCK if DRY else 1 << 28
    p, grad = make(n), make(n)
    codes = [torch.randint(0, 256, (n,), dtype=torch.uint8, device=DEVICE) for _ in range(2)]
    scales = [torch.rand(n // BLOCK, device=DEVICE) * 1e-3 for _ in range(2)]
    tables = [torch.linspace(low, 1, 256, device=DEVICE) for low in (-1, 0)]
    arguments = (1e-3, 0.9, 0.99, 0.1, 1e-8, 3, True)

    def mine() -> Tensor:
        adam8(p, grad, codes[0], scales[0], codes[1], scales[1], *tables, *arguments)
        return p

    part = 1 << 10 if DRY else 1 << 22  # the definition takes 40 B an element
    updates = []
    for update in (adam8, adam8._init_fn):
        moved = p[:part].float().clone()
        kept = [t.clone() for code, scale in zip(codes, scales, strict=True) for t in (code[:part], scale[: part // BLOCK])]
        update(moved, grad[:part].float(), *kept, *tables, *arguments)
        updates.append(moved - p[:part].float())
    close("AdamW's update, 8-bit states", *updates, 1e-4)
    nbytes = n * (3 * p.element_size() + 4)  # p read and written, gradient read, two codes read and written
    runs: Timed = {"ours": mine, "torch fused, 32-bit": optimizer_step(torch.optim.AdamW, p, grad, fused=True)}
    if not DRY:
        try:
            from torchao.optim import AdamW8bit

            runs["torchao 8-bit"] = optimizer_step(AdamW8bit, p, grad)
        except ImportError as error:
            say(case="AdamW", name="torchao 8-bit", error=str(error))
    compare(f"AdamW of {n} parameters", 12.0 * n, runs, least_gbytes=nbytes / 1e9)


def optimizer_step(kind: Any, p: Tensor, grad: Tensor, **options: Any) -> Callable[[], Any]:
    parameter = nn.Parameter(p.clone())
    parameter.grad = grad
    return kind([parameter], lr=1e-3, **options).step
