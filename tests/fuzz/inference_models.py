"""Random models for inference: what transformers are made of in several spellings, how they are called, and
how they are changed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

WIDTH, HEADS, WORDS = 16, 2, 40

Layer = Callable[[], nn.Module]


SPELLINGS = ("sdpa", "matmul", "einsum", "capped", "sigmoid", "grouped", "flat", "topmost", "linear")
MASKS = (
    "none", "causal", "window", "learned", "of the input", "slopes", "gates", "own gates", "blocks", "prefix"
)  # fmt: skip


class Does(nn.Module):
    """A layer without weights of its own."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class Around(nn.Module):
    """x + inner(x), where inner is given the axes that it wants."""

    def __init__(self, inner: nn.Module, *, swapped: bool = False, residual: bool = True) -> None:
        super().__init__()
        self.inner, self.swapped, self.residual = inner, swapped, residual

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x.transpose(1, 2)).transpose(1, 2) if self.swapped else self.inner(x)
        return x + y if self.residual else y


class Attention(nn.Module):
    """One of several spellings of the same thing, with one of several masks."""

    def __init__(self, spelling: str, mask: str, *, packed: bool) -> None:
        super().__init__()
        self.spelling, self.mask, self.packed = spelling, mask, packed
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=i != 1) for i in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)
        self.table = nn.Embedding(9, HEADS)
        self.slopes = nn.Parameter(torch.linspace(-0.2, 0.4, HEADS))

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        parts = self.qkv(x).chunk(3, dim=-1) if self.packed else (self.q(x), self.k(x), self.v(x))
        q, k, v = (part.view(b, t, HEADS, -1).transpose(1, 2) for part in parts)
        bias = self._bias(t, x)
        if bias is not None and bias.dtype == torch.bool and self.spelling != "sdpa":
            bias = torch.zeros((), dtype=q.dtype).masked_fill(~bias, torch.finfo(q.dtype).min)
        if bias is not None and bias.is_floating_point() and self.spelling != "sdpa":
            bias = bias.to(q.dtype)
        y = getattr(self, f"_{self.spelling}")(q, k, v, bias)
        return self.out(y.transpose(1, 2).reshape(b, t, WIDTH))

    def _bias(self, t: int, x: Tensor) -> Tensor | None:
        i = torch.arange(t)
        distance = i[:, None] - i[None]
        if self.mask == "causal":
            return torch.zeros(t, t).masked_fill(distance < 0, -math.inf)
        if self.mask == "window":
            return torch.zeros(t, t).masked_fill((distance < 0) | (distance > 3), -math.inf)
        if self.mask == "learned":
            return self.table(distance.clamp(-4, 4) + 4).permute(2, 0, 1)[None]
        if self.mask == "of the input":
            return torch.where(x[:, None, None, :, 0] > 2.5, -1e9, 0.0)
        if self.mask == "slopes":
            return -self.slopes[:, None, None] * distance.abs()
        seen = {
            "gates": lambda: (self.k(x)[:, None, None, :, 0] > 0) | (distance == 0),
            "own gates": lambda: (self.slopes[:, None, None] > 0) & (distance >= 0) | (distance == 0),
            "blocks": lambda: i[:, None] // 4 == i[None] // 4,
            "prefix": lambda: (distance >= 0) | (i[None] < 3),
        }.get(self.mask)
        return None if seen is None else seen()

    def _sdpa(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
        if self.mask == "causal":
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        if bias is not None and q.dtype == torch.float64 and bias.dtype != torch.bool:
            # torch 2.13's kernel on a CPU reads a mask in float32 wrongly beside float64: 40 % off
            bias = bias.double()
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)

    def _matmul(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        return torch.softmax(scores if bias is None else scores + bias, -1) @ v

    def _einsum(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
        scores = torch.einsum("bhid,bhjd->bhij", q * q.shape[-1] ** -0.5, k)
        scores = scores if bias is None else scores + bias
        weights = scores.float().exp() if bias is None else scores.softmax(dim=-1, dtype=torch.float32)
        weights = weights / weights.sum(-1, keepdim=True)
        return torch.einsum("bhij,bhjd->bhid", weights.to(v.dtype), v)

    def _capped(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
        scores = torch.tanh(q @ k.mT / math.sqrt(q.shape[-1]) / 5.0) * 5.0
        scores = scores if bias is None else scores + bias
        return torch.softmax(scores, -1, dtype=torch.float32).to(q.dtype) @ v

    def _sigmoid(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        return torch.sigmoid(scores if bias is None else scores + bias) @ v / q.shape[2]

    def _grouped(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
        return F.scaled_dot_product_attention(
            q, k[:, :1], v[:, :1], attn_mask=bias, scale=0.3, enable_gqa=True
        )

    def _flat(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
        b, h, t, d = q.shape
        q, k, v = (part.reshape(b * h, t, d) for part in (q, k, v))
        bias = torch.zeros((), dtype=q.dtype) if bias is None else bias
        bias = bias.expand(b, h, t, t).reshape(b * h, t, t)
        scores = torch.baddbmm(bias, q, k.transpose(1, 2), alpha=d**-0.5)
        return torch.bmm(scores.softmax(-1), v).view(b, h, t, d)

    def _topmost(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        scores = scores if bias is None else scores + bias
        least = scores.amax(-1, keepdim=True) - 1.0
        return scores.masked_fill(scores < least, -1e4).softmax(-1) @ v

    def _linear(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
        q, k = F.elu(q) + 1, F.elu(k) + 1
        return q @ (k.mT @ v) / (q @ k.sum(2, keepdim=True).mT)


class Einsum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("btd,de->bte", x, self.weight)


class Rms(nn.Module):
    def __init__(self, form: str) -> None:
        super().__init__()
        self.weight, self.form = nn.Parameter(torch.randn(WIDTH)), form

    def forward(self, x: Tensor) -> Tensor:
        if self.form == "function":
            return F.rms_norm(x, (WIDTH,), self.weight)
        square = x.pow(2).mean(-1, keepdim=True) + 1e-6
        return self.weight * (x * torch.rsqrt(square) if self.form == "rsqrt" else x / square.sqrt())


class Gated(nn.Module):
    def __init__(self, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.gate, self.up, self.down = (
            nn.Linear(WIDTH, 32, bias=False),
            nn.Linear(WIDTH, 32),
            nn.Linear(32, WIDTH),
        )
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.activation(self.gate(x)) * self.up(x))


class InPlace(nn.Module):
    """Writes into tensors that it made, through views of them too."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear, self.kind = nn.Linear(WIDTH, WIDTH), kind

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        if self.kind == "add":
            h += 1.5
            return h.mul_(0.5)
        if self.kind == "slice":
            h[:, :1] = 0.0
            return h
        if self.kind == "view":
            h.view(-1, WIDTH).clamp_(min=-1.0)
            return h
        return h.masked_fill_(h > 1, 0.25)


class Turned(nn.Module):
    """Rotary positions, in one of the ways in which they are written."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        self.register_buffer("rates", 10.0 ** -torch.linspace(0, 2, WIDTH // 2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        angles = torch.outer(torch.arange(x.shape[1]).float(), self.rates.float())
        if self.form == "complex":
            turn = torch.polar(torch.ones_like(angles), angles)
            pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)).contiguous())
            return torch.view_as_real(pairs * turn).flatten(-2).to(x.dtype)
        if self.form == "pairs":
            even, odd = x[..., 0::2], x[..., 1::2]
            cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
            return torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2)
        angles = torch.cat([angles, angles], -1)
        first, second = x.chunk(2, -1)
        half = torch.cat([-second, first], -1)
        return x * angles.cos().to(x.dtype) + half * angles.sin().to(x.dtype)


class Experts(nn.Module):
    """The two best of three experts for each token, all of them computed, or each for its tokens."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form, self.gate = form, nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x).softmax(-1).topk(2, -1)
        if self.form == "dense":
            share = torch.zeros_like(self.gate(x)).scatter(-1, chosen, weights)
            return x + sum(e(x) * share[..., i, None] for i, e in enumerate(self.experts))
        made = torch.stack([expert(x) for expert in self.experts], -2)
        taken = made.gather(-2, chosen.unsqueeze(-1).expand(*chosen.shape, WIDTH))
        return x + (taken * weights.unsqueeze(-1)).sum(-2)


class Adapted(nn.Module):
    """A linear whose weight is computed: by low rank, normalised, or a mean of two."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form, self.linear = form, nn.Linear(WIDTH, WIDTH)
        self.down, self.up = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.linear.weight
        if self.form == "low rank beside":
            return self.linear(x) + self.up(self.down(x)) * 0.5
        if self.form == "low rank within":
            return F.linear(x, weight + self.up.weight @ self.down.weight, self.linear.bias)
        if self.form == "normalised":
            return F.linear(x, F.normalize(weight, dim=1), self.linear.bias)
        return x @ (weight.t() + 0.1) + self.linear.bias


class Shared(nn.Module):
    """What stands in place of a library's layers: several of them, with states of their own."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        self.gru = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.attends = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.patches = nn.Conv2d(1, WIDTH, (1, WIDTH))
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))
        self.slope = nn.PReLU(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if self.form == "gru":
            return x + self.gru(x)[0]
        if self.form == "attends":
            future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
            return x + self.attends(x, x, x, attn_mask=future, need_weights=False)[0]
        if self.form == "attends, weights":
            y, weights = self.attends(x, x, x)
            return x + y * weights.mean()
        if self.form == "patches":
            return x + self.patches(x.unsqueeze(1)).squeeze(-1).transpose(1, 2)
        if self.form == "weight norm":
            return self.normed(x)
        return self.slope(x.transpose(1, 2)).transpose(1, 2)


def _softmax_by_hand(x: Tensor) -> Tensor:
    e = (x - x.amax(-1, keepdim=True)).exp()
    return e / e.sum(-1, keepdim=True)


LAYERS: dict[str, Layer] = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "linear, no bias": lambda: Around(nn.Linear(WIDTH, WIDTH, bias=False)),
    "gelu": lambda: nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH)),
    "tanh gelu": lambda: nn.Sequential(
        nn.Linear(WIDTH, 32), nn.GELU(approximate="tanh"), nn.Linear(32, WIDTH)
    ),
    "relu": lambda: Around(nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, WIDTH))),
    "silu gate": lambda: Around(Gated(F.silu)),
    "gelu gate": lambda: Gated(F.gelu),
    "layer norm": lambda: nn.LayerNorm(WIDTH),
    "layer norm, no weights": lambda: nn.LayerNorm(WIDTH, elementwise_affine=False),
    "add, layer norm": lambda: nn.Sequential(Around(nn.Linear(WIDTH, WIDTH)), nn.LayerNorm(WIDTH)),
    "rms": lambda: Rms("rsqrt"),
    "rms, sqrt": lambda: Rms("sqrt"),
    "rms, function": lambda: Rms("function"),
    "batch norm": lambda: Around(nn.BatchNorm1d(WIDTH), swapped=True, residual=False),
    "group norm": lambda: Around(nn.GroupNorm(4, WIDTH), swapped=True, residual=False),
    "instance norm": lambda: Around(nn.InstanceNorm1d(WIDTH), swapped=True),
    "conv": lambda: Around(nn.Conv1d(WIDTH, WIDTH, 3, padding=1), swapped=True),
    "depthwise conv": lambda: Around(nn.Conv1d(WIDTH, WIDTH, 3, padding=1, groups=WIDTH), swapped=True),
    "einsum": Einsum,
    "softmax": lambda: Does(lambda x: x + x.softmax(-1)),
    "log softmax": lambda: Does(lambda x: F.log_softmax(x, -1)),
    "softmax of 64 bits": lambda: Does(lambda x: x + x.softmax(-1, dtype=torch.float64).to(x.dtype)),
    "softmax by hand": lambda: Does(lambda x: x * _softmax_by_hand(x)),
    "softmax over the sequence": lambda: Does(lambda x: x + x.softmax(1)),
    "in place, add": lambda: InPlace("add"),
    "in place, slice": lambda: InPlace("slice"),
    "in place, view": lambda: InPlace("view"),
    "in place, mask": lambda: InPlace("mask"),
    "flip": lambda: Does(lambda x: x + x.flip(1)),
    "roll": lambda: Does(lambda x: x + x.roll(1, dims=1)),
    "sum of the past": lambda: Does(lambda x: x + x.cumsum(1) / (1 + x.shape[1])),
    "largest": lambda: Does(lambda x: x - x.amax(-1, keepdim=True)),
    "cast": lambda: Does(lambda x: (x.double() * 0.5).float() + x),
    "where": lambda: Does(lambda x: torch.where(x > 0, x, 0.1 * x)),
    "pad and cut": lambda: Does(lambda x: F.pad(x, (0, 0, 1, 0))[:, :-1] + x),
    "stack": lambda: Does(lambda x: torch.stack([x, 2 * x], -1).sum(-1)),
    "split and cat": lambda: Does(lambda x: torch.cat(x.split(WIDTH // 2, -1)[::-1], -1)),
    "heads and back": lambda: Does(lambda x: x.unflatten(-1, (4, -1)).transpose(2, 3).flatten(2)),
    "permuted": lambda: Does(lambda x: x.permute(2, 0, 1).contiguous().permute(1, 2, 0)),
    "normalised": lambda: Does(lambda x: F.normalize(x, dim=-1)),
    "statistics": lambda: Does(
        lambda x: (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True) + 1e-3).sqrt()
    ),
    "dropout": lambda: nn.Dropout(0.3),
    "tied": lambda: (lambda shared: nn.Sequential(shared, nn.GELU(), shared))(nn.Linear(WIDTH, WIDTH)),
    "looked up": lambda: Looked("table"),
    "gathered": lambda: Looked("gathered"),
    "one hot": lambda: Looked("one hot"),
    "turned, complex": lambda: Turned("complex"),
    "turned, pairs": lambda: Turned("pairs"),
    "turned, halves": lambda: Turned("halves"),
    "experts": lambda: Experts("dense"),
    "experts, gathered": lambda: Experts("gathered"),
    "low rank": lambda: Adapted("low rank beside"),
    "low rank, merged": lambda: Adapted("low rank within"),
    "weight, normalised": lambda: Adapted("normalised"),
    "weight, moved": lambda: Adapted("moved"),
    "recurrent": lambda: Shared("gru"),
    "attends": lambda: Shared("attends"),
    "attends, weights": lambda: Shared("attends, weights"),
    "patches": lambda: Shared("patches"),
    "weight norm": lambda: Shared("weight norm"),
    "slopes": lambda: Shared("slopes"),
    "squared relu": lambda: nn.Sequential(
        nn.Linear(WIDTH, 32), Does(lambda x: x.relu() ** 2), nn.Linear(32, WIDTH)
    ),
    "quick gelu": lambda: nn.Sequential(
        nn.Linear(WIDTH, 32), Does(lambda x: x * (1.702 * x).sigmoid()), nn.Linear(32, WIDTH)
    ),
    "gelu by hand": lambda: nn.Sequential(
        nn.Linear(WIDTH, 32),
        Does(lambda x: 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))),
        nn.Linear(32, WIDTH),
    ),
    "halves gate": lambda: nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GLU()),
    "soft plus": lambda: Does(lambda x: F.softplus(x) - F.mish(x) + F.hardswish(x)),
    "pooled": lambda: Does(lambda x: x + F.avg_pool1d(x.transpose(1, 2), 3, 1, 1).transpose(1, 2)),
    "resized": lambda: Does(lambda x: x + F.interpolate(x.transpose(1, 2), scale_factor=2.0).mT[:, ::2]),
    "sorted": lambda: Does(lambda x: x + x.sort(-1).values),
    "in buckets": lambda: Does(
        lambda x: x + torch.bucketize(x.float(), torch.linspace(-2, 2, 5)).to(x.dtype)
    ),
    "neighbours": lambda: Does(lambda x: x + F.pad(x, (0, 0, 2, 0)).unfold(1, 3, 1).mean(-1)),
    "distances": lambda: Does(
        lambda x: x + torch.cdist(x.float(), x.float()).mean(-1, keepdim=True).to(x.dtype)
    ),
    "of all": lambda: Does(
        lambda x: x * x.mean((1, 2), keepdim=True).sigmoid() + x.logsumexp(-1, keepdim=True)
    ),
    "repeated": lambda: Does(lambda x: x + x[:, :, :4].repeat_interleave(WIDTH // 4, -1)),
    "scattered": lambda: Does(lambda x: x + torch.zeros_like(x).scatter_add(-1, x.argsort(-1), x)),
    "last": lambda: Does(lambda x: x + x[:, -1:]),
    "first of each": lambda: Does(
        lambda x: x + x[torch.arange(x.shape[0]), x[..., 0].argmax(-1)].unsqueeze(1)
    ),
    "attention of torch": lambda: nn.TransformerEncoderLayer(WIDTH, HEADS, 32, batch_first=True),
}


class Looked(nn.Module):
    """A table at rows that are computed of the values: of unusual ones they are none."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.table, self.form = nn.Embedding(24, WIDTH), form

    def forward(self, x: Tensor) -> Tensor:
        rows = (x.detach()[..., 0].float() * 2).round().long() + 12
        if self.form == "gathered":
            return x + x.gather(-1, (rows - 4).unsqueeze(-1))
        return x + (
            self.table(rows) if self.form == "table" else F.one_hot(rows, 24).to(x.dtype) @ self.table.weight
        )


OUTPUTS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "tensor": lambda h, x: h,
    "tuple": lambda h, x: (h, h.mean(1)),
    "list": lambda h, x: [h[:, -1], h.argmax(-1)],
    "dict": lambda h, x: {"z": h, "a": h.sum((1, 2))},
    "None": lambda h, x: (h, None),
    "None in a dict": lambda h, x: {"h": h, "cache": None},
    "plain": lambda h, x: (h, 3, "text", True),
    "sizes": lambda h, x: (h, h.shape[0], h.shape[1] + 1),
    "nested": lambda h, x: {"out": (h, [h.mean(), None]), "n": 2},
    "twice": lambda h, x: (h, h),
    "view": lambda h, x: (h, h.transpose(1, 2)),
    "the input": lambda h, x: (h, x),
    "bool": lambda h, x: (h, h > 0),
}


class Model(nn.Module):
    """Layers one after the other over embedded ids or over features; what it returns is drawn, too."""

    def __init__(self, names: list[str], attentions: list[Attention], output: str, *, ids: bool) -> None:
        super().__init__()
        self.table, self.position = nn.Embedding(WORDS, WIDTH), nn.Embedding(64, WIDTH)
        self.layers = nn.ModuleList([LAYERS[name]() for name in names] + [Around(a) for a in attentions])
        self.ids, self.output = ids, output

    def forward(self, x: Tensor, scale: Tensor | None = None, mask: Tensor | None = None) -> Any:
        h = self.table(x) + self.position(torch.arange(x.shape[1])) if self.ids else x * 1.0
        if scale is not None:
            h = h * scale
        for layer in self.layers:
            h = layer(h)
        if mask is not None:
            h = h.masked_fill(mask.unsqueeze(-1) == 0, 0.0)
        return OUTPUTS[self.output](h, x)


@dataclass(frozen=True)
class Case:
    """One model, and how it is called."""

    names: list[str]
    attentions: list[tuple[str, str, bool]]
    output: str
    ids: bool
    dtype: torch.dtype
    batch: int
    length: int
    others: tuple[str, ...]  # inputs beside x
    by_name: bool
    strided: bool
    dynamic: bool | None
    seed: int

    def model(self) -> Model:
        torch.manual_seed(self.seed)
        attentions = [Attention(spelling, mask, packed=packed) for spelling, mask, packed in self.attentions]
        model = Model(self.names, attentions, self.output, ids=self.ids).eval()
        for module in model.modules():
            if isinstance(module, nn.BatchNorm1d):
                assert module.running_mean is not None and module.running_var is not None
                module.running_mean.normal_()
                module.running_var.uniform_(0.5, 2.0)
        return model.to(self.dtype)

    def inputs(self, batch: int, length: int, *, strided: bool) -> dict[str, Tensor]:
        if self.ids:
            x = torch.randint(0, WORDS, (length, batch) if strided else (batch, length))
        else:
            x = torch.randn((length, batch, WIDTH) if strided else (batch, length, WIDTH)).to(self.dtype)
        made = {"x": x.transpose(0, 1) if strided else x}
        if "scale" in self.others:
            made["scale"] = torch.rand(WIDTH).to(self.dtype) + 0.5
        if "mask" in self.others:
            mask = torch.ones(batch, length, dtype=torch.long)
            mask[0, : length // 2] = 0
            made["mask"] = mask
        return made


@dataclass(frozen=True)
class Setting:
    """What is asked of the planner for a model."""

    backend: str
    max_error: float | None
    minimize: Literal["time", "memory"] = "time"
    passes: tuple[str, ...] | None = None
    saved: bool = False


@st.composite
def drawn(
    draw: st.DrawFn, backends: tuple[str, ...], several: int, least: int = 1
) -> tuple[Case, list[Setting]]:
    """A model, and from `least` to `several` settings that are planned for it."""
    attention = st.tuples(
        st.sampled_from(SPELLINGS),
        st.sampled_from(MASKS),
        st.booleans(),
    )
    names = draw(st.lists(st.sampled_from(list(LAYERS)), min_size=1, max_size=4))
    attentions = draw(st.lists(attention, max_size=1))
    steep = bool(STEEP & set(names))
    # an error chooses a branch there
    branching = {"topmost", "gates", "in place, mask", "in buckets"}
    rough = steep or bool(branching & {*names, *(word for each in attentions for word in each[:2])})
    case = Case(
        names=names,
        attentions=attentions,
        output=draw(st.sampled_from(list(OUTPUTS))),
        ids=draw(st.booleans()),
        dtype=torch.float32
        if steep
        else draw(st.sampled_from([torch.float32] * 6 + [torch.float64, torch.bfloat16])),
        batch=draw(st.integers(1, 3)),
        length=draw(st.sampled_from([1, 2, 5, 8])),
        others=tuple(sorted(draw(st.sets(st.sampled_from(["scale", "mask"]))))),
        by_name=draw(st.booleans()),
        strided=draw(st.booleans()),
        dynamic=draw(st.sampled_from([None, None, None, False])),
        seed=draw(st.integers(0, 1000)),
    )
    setting = st.builds(
        Setting,
        backend=st.sampled_from(backends),
        max_error=st.none() if rough else st.sampled_from([None, None, 1e-3, 3e-2]),
        minimize=st.sampled_from(["time", "time", "memory"]),
        passes=st.sampled_from(
            [None, None, None, ("no-merge",), ("no-fuse", "no-rows"), ("no-attention",), ("no-quantize",)]
        ),
        saved=st.sampled_from([False] * 5 + [True]),
    )
    return case, draw(st.lists(setting, min_size=least, max_size=several, unique=True))


#: Layers in which rounding chooses a row.
STEEP = {
    "looked up", "gathered", "one hot", "experts", "experts, gathered", "scattered", "first of each"
}  # fmt: skip

Undo = Callable[[], object]


def _hooked(model: Model) -> Undo:
    return model.layers[0].register_forward_hook(lambda module, given, result: result * 2).remove


def _replaced(model: Model) -> Undo:
    before = model.layers[-1]
    model.layers[-1] = nn.Identity()
    return lambda: model.layers.__setitem__(len(model.layers) - 1, before)


def _longer(model: Model) -> Undo:
    model.layers.append(nn.Tanh())
    return lambda: model.layers.__delitem__(len(model.layers) - 1)


def _other_output(model: Model) -> Undo:
    before, model.output = model.output, "bool" if model.output != "bool" else "tensor"
    return lambda: setattr(model, "output", before)


def _one_element(model: Model) -> Undo:
    """Through .data: no version counts it. Small models are looked at whole at each call."""
    parameter = list(model.parameters())[-1]
    parameter.data.view(-1)[-1] += 3
    return lambda: None


def _all_weights(model: Model) -> Undo:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    return lambda: None


#: Those that cannot be taken back come last.
CHANGES: dict[str, Callable[[Model], Undo]] = {
    "a hook": _hooked, "a layer replaced": _replaced, "a layer more": _longer, "an attribute": _other_output,
    "one element of a weight": _one_element, "all weights": _all_weights,
}  # fmt: skip
