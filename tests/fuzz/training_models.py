"""Random training modules: what transformers are made of, and what makes capturing and replaying
a step hard.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import inference_models
import torch
from fuzz_settings import ASKED
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

WIDTH, TOKENS, CLASSES = 16, 6, 5


class Part(nn.Module):
    """Takes and gives (batch, tokens, width)."""


class Mlp(Part):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, h: Tensor) -> Tensor:
        out: Tensor = h + self.down(F.gelu(self.up(h)))
        return out


class Gated(Part):
    """One product, whose halves gate each other: views of one storage."""

    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, h: Tensor) -> Tensor:
        gate, value = self.both(h).chunk(2, -1)
        return F.silu(gate) * value + h


class Norms(Part):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.LayerNorm(WIDTH), nn.Parameter(torch.ones(WIDTH))

    def forward(self, h: Tensor) -> Tensor:
        rms: Tensor = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6) * self.scale
        return self.layer(rms) + h


class BatchNorm(Part):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, h: Tensor) -> Tensor:
        return self.norm(h.flatten(0, 1)).view_as(h) + h


class Attention(Part):
    def __init__(self, *, fused: bool = True, dropout: float = 0.0) -> None:
        super().__init__()
        self.qkv, self.out, self.fused, self.dropout = (
            nn.Linear(WIDTH, 3 * WIDTH),
            nn.Linear(WIDTH, WIDTH),
            fused,
            dropout,
        )
        self.register_buffer("mask", torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril(), persistent=False)
        self.mask: Tensor

    def forward(self, h: Tensor) -> Tensor:
        q, k, v = (t.view(*h.shape[:2], 2, -1).transpose(1, 2) for t in self.qkv(h).split(WIDTH, -1))
        if self.fused:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.dropout)
        else:
            scores = (q @ k.transpose(-1, -2) * 0.35).masked_fill(~self.mask, -1e9)
            mixed = F.dropout(scores.softmax(-1), self.dropout) @ v
        return h + self.out(mixed.transpose(1, 2).flatten(2))


class Noise(Part):
    """Random numbers: of the input's shape, of none of the input, and Bernoulli's."""

    def forward(self, h: Tensor) -> Tensor:
        h = h + 0.1 * torch.randn_like(h) * torch.rand(WIDTH)
        return h * torch.bernoulli(torch.full((h.shape[0], 1, 1), 0.9))


class Dropped(Part):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(WIDTH, WIDTH), kind(0.2)

    def forward(self, h: Tensor) -> Tensor:
        return self.drop(self.linear(h)) + h


class InPlace(Part):
    """Writes through views, into a part, and with an activation in place."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, h: Tensor) -> Tensor:
        x = self.linear(h)
        x[..., :4].mul_(2.0)
        y = x * 1.5
        y[:, 1:].add_(h[:, :-1])
        return y.relu_() + h


class Views(Part):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(1, TOKENS, 1) * 0.3)

    def forward(self, h: Tensor) -> Tensor:
        a, b = h.transpose(1, 2).reshape(-1, WIDTH, TOKENS).unbind(1)[:2]
        shifted = torch.cat([h[:, 1:], h[:, :1]], 1)
        return (
            shifted * self.weight.expand(h.shape[0], -1, WIDTH)
            + (a + b).unsqueeze(-1)
            + h.flip(1).contiguous()
        )


class Average(Part):
    """Buffers that the forward updates, one of which it reads after: an average, a count, one that the
    backward reads.
    """

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("scale", torch.ones(WIDTH))
        self.mean: Tensor
        self.count: Tensor
        self.scale: Tensor

    def forward(self, h: Tensor) -> Tensor:
        self.count += 1
        with torch.no_grad():
            self.mean.mul_(0.9).add_(h.mean((0, 1)), alpha=0.1)
        out = torch.tanh(h * self.scale.clone()) - self.mean
        self.scale.mul_(0.99)
        return out


class Bags(Part):
    def __init__(self, mode: str) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(20, WIDTH, mode=mode)

    def forward(self, h: Tensor) -> Tensor:
        ids = (h.detach().abs() * 7).long().sum(-1) % 20
        return h + self.bag(ids).unsqueeze(1)


class Looked(Part):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, WIDTH, padding_idx=0)

    def forward(self, h: Tensor) -> Tensor:
        return h + self.table((h.detach()[..., 0].abs() * 9).long() % 20)


class Narrow(Part):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16)

    def forward(self, h: Tensor) -> Tensor:
        return h + self.linear(h.bfloat16()).float()


class Grouped(Part):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(4, WIDTH)

    def forward(self, h: Tensor) -> Tensor:
        return self.norm(h.permute(0, 2, 1)).permute(0, 2, 1) + h


class Layer(Part):
    """One of the layers that inference is asked about."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, h: Tensor) -> Tensor:
        out: Tensor = 0.5 * h + self.inner(h)
        return out


def _of_inference() -> dict[str, Callable[[], Part]]:
    # rows that are computed of the values are none of the table once weights were updated
    rows = {"looked up", "gathered", "one hot"}
    layers = {
        f"{name} (inference)": partial(_layer, made)
        for name, made in inference_models.LAYERS.items()
        if name not in rows
    }
    spelled = {
        f"{spelling}, {mask}": partial(_attention, spelling, mask)
        for spelling in inference_models.SPELLINGS
        for mask in ("gates", "slopes", "learned")
    }
    return layers | spelled


def _layer(made: Callable[[], nn.Module]) -> Part:
    return Layer(made())


def _attention(spelling: str, mask: str) -> Part:
    return Layer(inference_models.Attention(spelling, mask, packed=spelling != "sdpa"))


KINDS: Mapping[str, Callable[[], Part]] = _of_inference() | {
    "mlp": Mlp, "gated": Gated, "norms": Norms, "batch norm": BatchNorm, "fused attention": Attention,
    "attention, dropout": lambda: Attention(fused=False, dropout=0.1),
    "fused attention, dropout": lambda: Attention(dropout=0.1), "noise": Noise,
    "dropout": lambda: Dropped(nn.Dropout), "alpha dropout": lambda: Dropped(nn.AlphaDropout),
    "in place": InPlace, "views": Views, "buffers": Average, "bag": lambda: Bags("sum"),
    "mean bag": lambda: Bags("mean"), "max bag": lambda: Bags("max"), "embedding": Looked, "bf16": Narrow,
    "group norm": Grouped,
}  # fmt: skip
#: Rows of a table, chosen by values.
LOOKUPS = {"bag", "mean bag", "max bag", "embedding", "in buckets (inference)"} | {
    f"{name} (inference)" for name in inference_models.STEEP
}
RANDOM = {
    "noise", "dropout", "alpha dropout", "attention, dropout", "fused attention, dropout",
    "dropout (inference)", "attention of torch (inference)",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """One model and batch.

    `again`: an earlier part that runs once more at the end, or −1; `tied`: two MLPs share a weight.
    """

    kinds: tuple[str, ...]
    loss: str
    again: int
    tied: bool
    unused: bool
    frozen: bool
    differentiated_input: bool
    batch: int
    seed: int

    def model(self) -> nn.Module:
        torch.manual_seed(self.seed)
        return Model(self).train()

    def inputs(self) -> dict[str, Tensor]:
        torch.manual_seed(self.seed + 1)
        x = torch.randn(self.batch, TOKENS, WIDTH)
        return {
            "x": x.requires_grad_(self.differentiated_input),
            "y": torch.randint(0, CLASSES, (self.batch, TOKENS)),
        }


class Model(nn.Module):
    def __init__(self, case: Drawn) -> None:
        super().__init__()
        self.case = case
        self.parts = nn.ModuleList(KINDS[kind]() for kind in case.kinds)
        self.head = nn.Linear(WIDTH, CLASSES)
        mlps = [part for part in self.parts if isinstance(part, Mlp)]
        if case.tied and len(mlps) > 1:
            mlps[-1].up.weight = mlps[0].up.weight
        if case.unused:
            self.tower = nn.Sequential(nn.Linear(33, 31), nn.BatchNorm1d(31))
        if case.frozen and any(True for _ in self.parts[0].parameters()):
            self.parts[0].requires_grad_(False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = x
        for part in self.parts:
            h = part(h)
        if 0 <= self.case.again < len(self.parts):
            h = self.parts[self.case.again](h)
        logits = self.head(h)
        if self.case.loss == "tokens":
            y = torch.where(y == 0, -100, y)
            return F.cross_entropy(logits.flatten(0, 1), y.flatten())
        if self.case.loss == "pooled":
            return F.cross_entropy(logits.mean(1), y[:, 0])
        return F.mse_loss(logits, F.one_hot(y, CLASSES).float()) + 0.01 * h.pow(2).mean()


MODELS: st.SearchStrategy[Drawn] = st.builds(
    Drawn,
    kinds=st.lists(st.sampled_from(sorted(KINDS)), min_size=1, max_size=5).map(tuple),
    loss=st.sampled_from(["tokens", "pooled", "squares"]),
    again=st.integers(-1, 4),
    tied=st.booleans(),
    unused=st.booleans(),
    frozen=st.booleans(),
    differentiated_input=st.booleans(),
    batch=st.sampled_from([2, 4]),
    seed=st.integers(0, 1000),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Levers:
    """What is asked of the planner.

    A budget: "none", "least" or a share between the least and half as much again.
    """

    passes: tuple[str, ...] | None
    budgets: tuple[str | float, ...]
    optimizer: str
    max_error: float | None

    def made(self, parameters: Any) -> torch.optim.Optimizer:
        kind = {"": torch.optim.SGD, "sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[self.optimizer]
        return kind([p for p in parameters if p.requires_grad], lr=0.01)


LEVERS: st.SearchStrategy[Levers] = st.builds(
    Levers,
    passes=st.sampled_from(
        [
            None,
            ("checkpoint",),
            ("offload",),
            ("checkpoint", "loss_head", "pointwise"),
            ("microbatch",),
            ("states.in_backward=true",),
            ("compress",),
            ("bitmask.share=0.0",),
            ("checkpoint.groups=false",),
            ("states.offload=false", "offload"),
        ]
    ),
    budgets=st.lists(
        st.sampled_from(["none", "least", 0.1, 0.25, 0.5, 0.75]),
        min_size=1,
        max_size=5 if ASKED else 2,
        unique=True,
    ).map(tuple),
    optimizer=st.sampled_from(["", "sgd", "adamw"]),
    max_error=st.just(None),
)
