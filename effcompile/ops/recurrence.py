"""The recurrences of recurrence_steps.py as operators: one call for any number of tokens."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from effcompile.core.types import Shape
from effcompile.ops.recurrence_native import kernels
from effcompile.ops.recurrence_steps import delta_rule_by_torch, state_space_by_torch
from effcompile.ops.sums import sum_dtype

__all__ = ["delta_rule", "state_space"]

_LIBRARY = torch.library.Library("effcompile", "FRAGMENT")
_LIBRARY.define(
    "state_space(Tensor x, Tensor dt, Tensor a, Tensor b, Tensor c, Tensor? d, Tensor state)"
    " -> (Tensor, Tensor)"
)
_LIBRARY.define(
    "delta_rule(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor state, bool normed)"
    " -> (Tensor, Tensor)"
)


def state_space_on_cpu(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor | None, state: Tensor
) -> tuple[Tensor, Tensor]:
    """See `state_space_by_torch`: compiled where these are fp32."""
    found = kernels()
    if isinstance(found, str) or not found.takes(x, dt, a, b, c, d, state):
        return state_space_by_torch(x, dt, a, b, c, d, state)
    return found.state_space(x, dt, a, b, c, d, state)


def delta_rule_on_cpu(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, normed: bool
) -> tuple[Tensor, Tensor]:
    """See `delta_rule_by_torch`: compiled where these are fp32."""
    found = kernels()
    if isinstance(found, str) or not found.takes(q, k, v, g, beta, state):
        return delta_rule_by_torch(q, k, v, g, beta, state, normed)
    return found.delta_rule(q, k, v, g, beta, state, normed)


for _key, _space, _rule in (
    ("CPU", state_space_on_cpu, delta_rule_on_cpu),
    ("CUDA", state_space_by_torch, delta_rule_by_torch),
):
    _LIBRARY.impl("state_space", _space, _key)
    _LIBRARY.impl("delta_rule", _rule, _key)
state_space = torch.ops.effcompile.state_space
delta_rule = torch.ops.effcompile.delta_rule


@torch.library.register_fake("effcompile::state_space", lib=_LIBRARY)
def _(x, dt, a, b, c, d, state):  # type: ignore[no-untyped-def]
    return x.new_empty(x.shape, dtype=sum_dtype(x)), state.new_empty(state.shape)


@torch.library.register_fake("effcompile::delta_rule", lib=_LIBRARY)
def _(q, k, v, g, beta, state, normed):  # type: ignore[no-untyped-def]
    return v.new_empty(v.shape, dtype=sum_dtype(v)), state.new_empty(state.shape)


def _of_states(shape: Shape, width: int, each: int) -> int:
    """Operations of so many for each element of each token's state."""
    batch, tokens, heads, rows = shape
    return int(each * batch * tokens * heads * rows * width)


@register_flop_formula(torch.ops.effcompile.state_space)
def _(x_shape: Shape, dt: Shape, a: Shape, b_shape: Shape, *args: object, **kwargs: object) -> int:
    return _of_states(x_shape, int(b_shape[3]), 5)


@register_flop_formula(torch.ops.effcompile.delta_rule)
def _(q_shape: Shape, k: Shape, v_shape: Shape, *args: object, **kwargs: object) -> int:
    return _of_states(v_shape, int(q_shape[3]), 7)
