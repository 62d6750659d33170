"""Adam, AdamW and Lion on states of 8 bits, in torchao's layout: exact definitions in torch, which devices
replace by kernels.

A state is a code per element and a scale per block of 256: state ≈ qmap[code] · scale, scale = max |state| of
the block, and code the nearest entry of the sorted table of 256 (Dettmers et al., 8-bit Optimizers via
Block-wise Quantization, arXiv 2110.02861, section 2). States are torchao's `OptimState8bit`, bit by bit in
meaning: state_dicts pass from one to the other.

Legend: p, grad (...) with n elements, n a multiple of 256; codes of uint8 in p's shape; scales (n / 256) in
fp32; qmap (256) in fp32, ascending. All is computed in fp32; p is rounded once, to the nearest.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from effcompile.core.errors import LoweringError, UsageError
from effcompile.core.floats import in_fp32
from effcompile.ops.devices import one_device
from effcompile.ops.states8_native import CompiledAdam8

__all__ = ["BLOCK", "adam8", "lion8", "step8"]

BLOCK = 256
#: Types of device with kernels that do a whole update at once: there `step8` is used.
FUSED: set[str] = set()
#: torchao keeps smaller tensors in 32 bits.
LEAST = 4096


def adam8_by_torch(
    p: Tensor, grad: Tensor, first: Tensor, first_scale: Tensor, second: Tensor, second_scale: Tensor,
    signed: Tensor, unsigned: Tensor, lr: float, beta1: float, beta2: float, decay: float, eps: float,
    step: int, decoupled: bool,
) -> None:  # fmt: skip
    """Step number `step` ≥ 1 of Adam, or of AdamW where the decay is `decoupled` (arXiv 1711.05101), in
    place.

    `first` and `second` are the codes of both moments, by the tables `signed` and `unsigned`.

    Raises:
        UsageError: shapes, dtypes or devices that do not fit.
    """
    check(p, grad, (first, second), (first_scale, second_scale), (signed, unsigned))
    wide, slopes = p.float(), grad.float()
    if decoupled:
        wide = wide - lr * decay * wide
    else:
        slopes = slopes + decay * wide
    m = _read(first, first_scale, signed).lerp(slopes, 1 - beta1)
    v = _read(second, second_scale, unsigned).lerp(slopes.square(), 1 - beta2)
    _write(m, first, first_scale, signed)
    _write(v, second, second_scale, unsigned)
    p.copy_(wide - lr * (m / (1 - beta1**step)) / (v.sqrt() / (1 - beta2**step) ** 0.5 + eps))


def lion8_by_torch(
    p: Tensor,
    grad: Tensor,
    first: Tensor,
    first_scale: Tensor,
    signed: Tensor,
    lr: float,
    beta1: float,
    beta2: float,
    decay: float,
) -> None:
    """A step of Lion (Chen et al., arXiv 2302.06675, algorithm 2), in place.

    Raises as `adam8_by_torch` does.
    """
    check(p, grad, (first,), (first_scale,), (signed,))
    wide, slopes, m = p.float(), grad.float(), _read(first, first_scale, signed)
    wide = wide - lr * decay * wide
    p.copy_(wide - lr * m.lerp(slopes, 1 - beta1).sign())
    _write(m.lerp(slopes, 1 - beta2), first, first_scale, signed)


adam8 = torch.library.custom_op(
    "effcompile::adam8", adam8_by_torch, mutates_args=("p", "first", "first_scale", "second", "second_scale")
)
lion8 = torch.library.custom_op(
    "effcompile::lion8", lion8_by_torch, mutates_args=("p", "first", "first_scale")
)


@adam8.register_kernel("cpu")
def adam8_on_cpu(*args: Any) -> None:
    """The update by the compiled kernel where there is one, which is compared with torch's once; else by
    torch.
    """
    kernel = compiled_adam8()
    if kernel is None or not kernel.takes(*args[:2]):
        return adam8_by_torch(*args)
    p, grad, first, first_scale, second, second_scale, signed, unsigned = args[:8]
    check(p, grad, (first, second), (first_scale, second_scale), (signed, unsigned))
    return kernel(*args)


@cache
def compiled_adam8() -> CompiledAdam8 | None:
    """The compiled kernel; None where it cannot be compiled, or is wrong."""
    try:
        kernel = CompiledAdam8()
    except LoweringError:
        return None
    return kernel if all(_agrees(kernel, dtype) for dtype in (torch.float32, torch.bfloat16)) else None


@in_fp32()
def _agrees(kernel: CompiledAdam8, dtype: torch.dtype) -> bool:
    """Whether two steps of it leave what torch's do, up to rounding: a code at a tie may be the next one."""
    table = torch.linspace(-1, 1, BLOCK).sign() * torch.linspace(-1, 1, BLOCK).square()
    numbers = (1e-2, 0.9, 0.99, 0.1, 1e-8)
    found = []
    for update in (kernel, adam8_by_torch):
        p, grad = ((torch.arange(3 * BLOCK) * pace).sin().to(dtype) for pace in (0.7, 1.3))
        codes, scales = (
            [torch.full((3 * BLOCK,), 128, dtype=torch.uint8) for _ in range(2)],
            [torch.zeros(3) for _ in range(2)],
        )
        for step in (1, 2):
            update(
                p,
                grad,
                codes[0],
                scales[0],
                codes[1],
                scales[1],
                table,
                table.abs().sort().values,
                *numbers,
                step,
                True,
            )
        found.append((p.float(), *(code.float() for code in codes), *scales))
    limits = (1e-2 if dtype == torch.bfloat16 else 1e-4, 1.0, 1.0, 1e-4, 1e-4)
    return all(bool(((a - b).abs() <= limit).all()) for a, b, limit in zip(*found, limits, strict=True))


@adam8.register_fake
def _(*args: object) -> None:
    return None


@lion8.register_fake
def _(*args: object) -> None:
    return None


def check(
    p: Tensor, grad: Tensor, codes: tuple[Tensor, ...], scales: tuple[Tensor, ...], tables: tuple[Tensor, ...]
) -> None:
    """Raises UsageError for what the updates do not take."""
    named = {
        f"{kind}_{i}": t
        for kind, ts in (("codes", codes), ("scales", scales), ("tables", tables))
        for i, t in enumerate(ts)
    }
    one_device("An update on states of 8 bits", p=p, grad=grad, **named)
    n = p.numel()
    fits = (
        n % BLOCK == 0
        and grad.shape == p.shape
        and all(c.dtype == torch.uint8 and c.numel() == n for c in codes)
    )
    if not fits or any(s.numel() != n // BLOCK for s in scales) or any(t.shape != (BLOCK,) for t in tables):
        raise UsageError(
            f"An update on states of 8 bits takes a parameter of a multiple of {BLOCK} elements, gradient "
            f"and codes of its shape, a scale per {BLOCK} elements and tables of {BLOCK}; given p "
            f"{tuple(p.shape)}, gradient {tuple(grad.shape)}, codes {[tuple(c.shape) for c in codes]}, "
            f"scales {[tuple(s.shape) for s in scales]}, tables {[tuple(t.shape) for t in tables]}."
        )
    if not all(t.is_contiguous() for t in (p, *codes, *scales, *tables)):
        raise UsageError(
            "An update on states of 8 bits takes a contiguous parameter, codes and scales, as it writes "
            "into them."
        )


def step8(optimizer: Optimizer, device: str = "") -> bool:
    """The step of torchao's 8-bit Adam or AdamW on the operator, with torchao's own states.

    False, and nothing done, where that cannot be.

    That is: on a device without a kernel (`FUSED`; a CPU has one where it can be compiled), with amsgrad or
    stochastic rounding, or for tensors that torchao leaves in 32 bits. `device`: the type of another device
    than the tensors', which stand for some there.
    """
    made: Any = optimizer
    plain = getattr(made, "block_size", None) == BLOCK and not made.bf16_stochastic_round
    steps = [(group, p) for group in made.param_groups for p in group["params"] if p.grad is not None]
    if not plain or not all(
        not group["amsgrad"] and _takes(p, device or p.device.type) for group, p in steps
    ):
        return False
    with torch.no_grad():
        for group, p in steps:
            _step(made, group, p)
    return True


def _takes(p: Tensor, device: str) -> bool:
    grad = p.grad
    if not p.is_contiguous() or grad is None or grad.is_sparse or p.numel() < LEAST or p.numel() % BLOCK:
        return False
    return device in FUSED or (
        device == "cpu" and (kernel := compiled_adam8()) is not None and kernel.takes(p, grad)
    )


def _step(optimizer: Any, group: Any, p: Tensor) -> None:
    state = optimizer.state[p]
    if not state:
        state["step"] = torch.tensor(0.0)
        state["exp_avg"], state["exp_avg_sq"] = (
            optimizer._new_buffer(p, True),
            optimizer._new_buffer(p, False),
        )
    state["step"] += 1
    m, v = state["exp_avg"], state["exp_avg_sq"]
    adam8(
        p.detach(), p.grad, m.codes, m.scale, v.codes, v.scale, m.qmap, v.qmap, float(group["lr"]),
        *group["betas"], group["weight_decay"], group["eps"], int(state["step"]), optimizer.is_adamw,
    )  # fmt: skip


def _read(codes: Tensor, scales: Tensor, table: Tensor) -> Tensor:
    return (table[codes.int()].view(-1, BLOCK) * scales.view(-1, 1)).view(codes.shape)


def _write(state: Tensor, codes: Tensor, scales: Tensor, table: Tensor) -> None:
    blocks = state.view(-1, BLOCK)
    torch.clamp(blocks.abs().amax(1), min=1e-12, out=scales)
    scaled = blocks / scales.view(-1, 1)
    low = (torch.searchsorted(table, scaled, right=True) - 1).clamp_(0, BLOCK - 1)
    high = (low + 1).clamp_(max=BLOCK - 1)
    up = scaled - table[low] >= (table[high] - table[low]) * 0.5
    codes.copy_(torch.where(up, high, low).view(codes.shape))
