"""What layers that keep a state of one size compute behind the state that they are given, by torch.

    short convolution, of each channel:      y = Σⱼ wⱼ x(t − K + 1 + j); the state is the last K of x
    state space (Gu and Dao, arXiv 2312.00752; Dao and Gu, arXiv 2405.21060), of each head:
        S ← exp(dt · a) S + (dt · x) bᵀ        y = S c + d · x
    gated delta rule (Yang et al., arXiv 2412.06464), of each head:
        S ← exp(g) S    S ← S + k (β (v − Sᵀ k))ᵀ        y = Sᵀ q

A step of generation carries these states in and out. Hugging Face's forms of several tokens loop in Python,
over tokens or chunks, or begin with an empty state. Sums are in fp32 (fp64 for fp64), and so are results of
the last two.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from effcompile.ops.sums import sum_dtype

#: Under it a row of zeros is normed.
_LEAST = 1e-6


def short_conv_by_torch(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, silu: bool
) -> tuple[Tensor, Tensor]:
    """(y, S): x, y (B, T, C), weight (C, K), bias (C), S (B, C, K). `silu` of it follows."""
    kernel, dtype = weight.shape[1], sum_dtype(x)
    whole = torch.cat([state.to(x.dtype), x.transpose(1, 2)], 2)
    read = whole[:, :, whole.shape[2] - x.shape[1] - kernel + 1 :].to(dtype)
    wide = None if bias is None else bias.to(dtype)
    made = F.conv1d(read, weight[:, None].to(dtype), wide, groups=weight.shape[0]).transpose(1, 2)
    after = whole[:, :, -kernel:].to(state.dtype, copy=True, memory_format=torch.contiguous_format)
    return (F.silu(made) if silu else made).to(x.dtype, memory_format=torch.contiguous_format), after


def state_space_by_torch(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor | None, state: Tensor, logs: bool
) -> tuple[Tensor, Tensor]:
    """(y, S): x, y (B, T, H, P), dt (B, T, H), a (H, N) or (H, 1), b and c (B, T, G, N) of groups of heads, d
    (H), S (B, H, P, N). `logs`: a is given as log(−a).

    With x (B, T, H) heads have one row: b and c (B, T, N), S (B, H, N).
    """
    if x.dim() == 3:
        made, after = state_space_by_torch(
            x[..., None], dt, a, b[:, :, None], c[:, :, None], d, state[:, :, None], logs
        )
        return made[..., 0], after[:, :, 0]
    wide = sum_dtype(x)
    x, dt, a, b, c = (each.to(wide) for each in (x, dt, a, b, c))
    a = -torch.exp(a) if logs else a
    b, c = (each.repeat_interleave(x.shape[2] // each.shape[2], 2) for each in (b, c))
    s, made = state.to(wide), torch.empty_like(x, memory_format=torch.contiguous_format)
    for at in range(x.shape[1]):
        kept = torch.exp(dt[:, at, :, None] * a)[:, :, None]
        s = s * kept + (dt[:, at, :, None] * x[:, at])[..., None] * b[:, at, :, None]
        made[:, at] = (s @ c[:, at, :, :, None])[..., 0]
    return (made if d is None else made + x * d[:, None].to(wide)), s.to(state.dtype, copy=True)


def delta_rule_by_torch(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, normed: bool
) -> tuple[Tensor, Tensor]:
    """(y, S): q and k (B, T, G, K) of groups of heads, v, y (B, T, H, V), g and beta (B, T, H), S (B, H, K,
    V).

    q is divided by √K. `normed`: q and k are rows of length 1 before.
    """
    wide = sum_dtype(v)
    q, k, v, g, beta = (each.to(wide) for each in (q, k, v, g, beta))
    if normed:
        q, k = (each * torch.rsqrt(each.square().sum(-1, keepdim=True) + _LEAST) for each in (q, k))
    q, k = (each.repeat_interleave(v.shape[2] // each.shape[2], 2) for each in (q * q.shape[-1] ** -0.5, k))
    s, made = state.to(wide), torch.empty_like(v, memory_format=torch.contiguous_format)
    for at in range(v.shape[1]):
        s = s * torch.exp(g[:, at])[..., None, None]
        known = (k[:, at, :, None] @ s)[:, :, 0]
        s = s + k[:, at, :, :, None] * ((v[:, at] - known) * beta[:, at, :, None])[:, :, None]
        made[:, at] = (q[:, at, :, None] @ s)[:, :, 0]
    return made, s.to(state.dtype, copy=True)
