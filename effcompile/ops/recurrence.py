"""What recurrence_steps.py defines, as operators: one call for any number of tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from effcompile.core.types import AutogradContext, Shape
from effcompile.ops.recurrence_native import LONGEST, kernels
from effcompile.ops.recurrence_steps import delta_rule_by_torch, short_conv_by_torch, state_space_by_torch
from effcompile.ops.sums import sum_dtype

__all__ = ["RECURRENCES", "delta_rule", "short_conv", "state_space", "workspace_bytes"]

_LIBRARY = torch.library.Library("effcompile", "FRAGMENT")
_LIBRARY.define(
    "short_conv(Tensor x, Tensor weight, Tensor? bias, Tensor state, bool silu) -> (Tensor, Tensor)"
)
_LIBRARY.define(
    "state_space(Tensor x, Tensor dt, Tensor a, Tensor b, Tensor c, Tensor? d, Tensor state, bool logs=False)"
    " -> (Tensor, Tensor)"
)
_LIBRARY.define(
    "delta_rule(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor state, bool normed)"
    " -> (Tensor, Tensor)"
)


def short_conv_on_cpu(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, silu: bool
) -> tuple[Tensor, Tensor]:
    """See `short_conv_by_torch`."""
    found = kernels()
    if isinstance(found, str) or not found.takes(x, weight, bias, state) or weight.shape[1] > LONGEST:
        return short_conv_by_torch(x, weight, bias, state, silu)
    return found.short_conv(x, weight, bias, state, silu)


def state_space_on_cpu(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None,
    state: Tensor,
    logs: bool = False,
) -> tuple[Tensor, Tensor]:
    """See `state_space_by_torch`."""
    found = kernels()
    if isinstance(found, str) or not found.takes(x, dt, a, b, c, d, state):
        return state_space_by_torch(x, dt, a, b, c, d, state, logs)
    return found.state_space(x, dt, a, b, c, d, state, logs)


def delta_rule_on_cpu(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, normed: bool
) -> tuple[Tensor, Tensor]:
    """See `delta_rule_by_torch`."""
    found = kernels()
    if isinstance(found, str) or not found.takes(q, k, v, g, beta, state):
        return delta_rule_by_torch(q, k, v, g, beta, state, normed)
    return found.delta_rule(q, k, v, g, beta, state, normed)


for _key, _conv, _space, _rule in (
    ("CPU", short_conv_on_cpu, state_space_on_cpu, delta_rule_on_cpu),
    ("CUDA", short_conv_by_torch, state_space_by_torch, delta_rule_by_torch),
):
    _LIBRARY.impl("short_conv", _conv, _key)
    _LIBRARY.impl("state_space", _space, _key)
    _LIBRARY.impl("delta_rule", _rule, _key)
short_conv = torch.ops.effcompile.short_conv
state_space = torch.ops.effcompile.state_space
delta_rule = torch.ops.effcompile.delta_rule
#: What a graph has of these.
RECURRENCES = frozenset((short_conv.default, state_space.default, delta_rule.default))


@torch.library.register_fake("effcompile::short_conv", lib=_LIBRARY)
def _(x, weight, bias, state, silu):  # type: ignore[no-untyped-def]
    return x.new_empty(x.shape), state.new_empty(state.shape)


@torch.library.register_fake("effcompile::state_space", lib=_LIBRARY)
def _(x, dt, a, b, c, d, state, logs=False):  # type: ignore[no-untyped-def]
    return x.new_empty(x.shape, dtype=sum_dtype(x)), state.new_empty(state.shape)


@torch.library.register_fake("effcompile::delta_rule", lib=_LIBRARY)
def _(q, k, v, g, beta, state, normed):  # type: ignore[no-untyped-def]
    return v.new_empty(v.shape, dtype=sum_dtype(v)), state.new_empty(state.shape)


def _setup(ctx: AutogradContext, inputs: Sequence[object], output: object) -> None:
    ctx.kinds = [isinstance(each, Tensor) for each in inputs]
    ctx.others = [each for each in inputs if not isinstance(each, Tensor)]
    ctx.save_for_backward(*(each for each in inputs if isinstance(each, Tensor)))


def _backward(
    by_torch: Callable[..., tuple[Tensor, Tensor]], ctx: AutogradContext, *grads: Tensor
) -> tuple[Tensor | None, ...]:
    """What errors of options are weighed with: a few tokens, computed again by torch."""
    held, others = iter(ctx.saved_tensors), iter(ctx.others)
    inputs = [next(held).detach().requires_grad_() if tensor else next(others) for tensor in ctx.kinds]
    tensors = [each for each in inputs if isinstance(each, Tensor)]
    with torch.enable_grad():
        made = by_torch(*inputs)
    found = iter(torch.autograd.grad(made, tensors, grads, allow_unused=True))
    return tuple(next(found) if tensor else None for tensor in ctx.kinds)


for _name, _by_torch in (
    ("short_conv", short_conv_by_torch),
    ("state_space", state_space_by_torch),
    ("delta_rule", delta_rule_by_torch),
):
    torch.library.register_autograd(
        f"effcompile::{_name}", partial(_backward, _by_torch), setup_context=_setup, lib=_LIBRARY
    )


def _product(shape: Shape, *more: int) -> int:
    made = 1
    for size in (*shape, *more):
        made *= int(size)
    return made


@register_flop_formula(torch.ops.effcompile.short_conv)
def _(x_shape: Shape, weight_shape: Shape, *args: object, **kwargs: object) -> int:
    return _product(x_shape, 2, int(weight_shape[1]))


@register_flop_formula(torch.ops.effcompile.state_space)
def _(x_shape: Shape, dt: Shape, a: Shape, b_shape: Shape, *args: object, **kwargs: object) -> int:
    return _product(x_shape, 5, int(b_shape[-1]))


@register_flop_formula(torch.ops.effcompile.delta_rule)
def _(q_shape: Shape, k: Shape, v_shape: Shape, *args: object, **kwargs: object) -> int:
    return _product(v_shape, 7, int(q_shape[3]))


def workspace_bytes(name: str, args: object) -> int | None:
    """Nothing beside operands and results, where kernels are compiled; None for other operators."""
    return 0 if name in {each.name().removesuffix(".default") for each in RECURRENCES} else None
