"""A section of gpu.py: a training step of a Llama of 1B parameters, planned at half its natural peak, against
eager and checkpointing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from _gpu_common import DEVICE, DRY, DTYPE, attempt, late, missing, say
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import effcompile

#: Llama 3.2 1B: width, hidden width, layers, heads, key heads, vocabulary; then batch and length.
SHAPE = (32, 64, 1, 2, 1, 64) if DRY else (2048, 8192, 16, 32, 8, 128256)
BATCH, LENGTH = (2, 32) if DRY else (8, 2048)


class Block(nn.Module):
    def __init__(self, width: int, hidden: int, heads: int, keys: int) -> None:
        super().__init__()
        self.heads, self.keys, self.size = heads, keys, width // heads
        self.norm1, self.norm2 = nn.RMSNorm(width, eps=1e-5), nn.RMSNorm(width, eps=1e-5)
        self.qkv = nn.Linear(width, width + 2 * keys * self.size, bias=False)
        self.out, self.down = nn.Linear(width, width, bias=False), nn.Linear(hidden, width, bias=False)
        self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        b, s, _ = x.shape
        parts = (
            self.qkv(self.norm1(x))
            .view(b, s, -1, self.size)
            .transpose(1, 2)
            .split([self.heads, self.keys, self.keys], 1)
        )
        q, k = (
            t * cos + torch.cat([-t[..., self.size // 2 :], t[..., : self.size // 2]], -1) * sin
            for t in parts[:2]
        )
        y = F.scaled_dot_product_attention(q, k, parts[2], is_causal=True, enable_gqa=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, s, -1))
        z = self.norm2(x)
        return x + self.down(F.silu(self.gate(z)) * self.up(z))


class Llama(nn.Module):
    """`forward` is the loss.

    `recompute`: every block is checkpointed, as `torch.utils.checkpoint` does it.
    """

    def __init__(
        self, width: int, hidden: int, layers: int, heads: int, keys: int, words: int, length: int
    ) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(words, width), nn.RMSNorm(width, eps=1e-5)
        self.blocks = nn.ModuleList(Block(width, hidden, heads, keys) for _ in range(layers))
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.embed.weight
        nn.init.normal_(self.embed.weight, std=0.02)
        size = width // heads
        turns = torch.arange(length)[:, None] / 500000 ** (torch.arange(0, size, 2) / size)
        self.register_buffer("cos", turns.cos().repeat(1, 2))
        self.register_buffer("sin", turns.sin().repeat(1, 2))
        self.recompute = False

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = (
                checkpoint(block, x, self.cos, self.sin, use_reentrant=False)
                if self.recompute
                else block(x, self.cos, self.sin)
            )
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), labels.flatten())


def step() -> None:
    """Seconds and the allocator's peak of each, what was predicted beside what was measured."""
    if late():
        return
    torch.manual_seed(0)
    model = Llama(*SHAPE, LENGTH).to(DEVICE, DTYPE)
    ids, labels = (torch.randint(SHAPE[-1], (BATCH, LENGTH), device=DEVICE) for _ in range(2))
    count = sum(p.numel() for p in model.parameters())
    natural = None
    with attempt("step", name="eager"):
        natural = timed("eager", lambda: model(ids, labels), model, parameters=count)
    model.recompute = True
    with attempt("step", name="torch.utils.checkpoint, every block"):
        timed("torch.utils.checkpoint, every block", lambda: model(ids, labels), model)
    model.recompute = False
    model.zero_grad(set_to_none=True)
    torch.cuda.empty_cache()  # what is free is asked of the driver
    if lost("step", missing("msgspec", "z3")):
        return
    start = time.perf_counter()
    limit = natural // 2 if natural else None
    planned = effcompile.optimize(model, inputs={"ids": ids, "labels": labels}, mode="training", memory=limit)
    plan = planned.plan
    measured, predicted = plan.measured, plan.predicted
    notes = {
        "limit_gbytes": limit and limit / 1e9, "planning_s": time.perf_counter() - start,
        "predicted_gbytes": predicted.peak_bytes / 1e9, "predicted_ms": predicted.seconds * 1e3,
        "profiled_gbytes": measured and measured.peak_bytes and measured.peak_bytes / 1e9,
        "kernels": [str(note) for note in plan.notes if "Triton" in str(note)],
        "checks": [(c.name, c.error, c.passed) for c in plan.checks],
    }  # fmt: skip
    planned.train()
    timed("ours at half the peak", lambda: planned(ids=ids, labels=labels), planned, **notes)


def lost(case: str, lacking: list[str]) -> bool:
    """Whether packages are missing that plan, which is said then."""
    if lacking:
        error = f"not planned without {' and '.join(lacking)}: carry the wheels (benchmarks/README.md)"
        say(case=case, name="ours", error=error)
    return bool(lacking)


def timed(name: str, loss: Callable[[], Any], model: nn.Module, **notes: Any) -> int:
    """Three steps, forward and backward: the fastest, and the most that the allocator held."""
    taken, peak = [], 0
    for _ in range(1 if DRY else 4):
        model.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        loss().backward()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated()
        taken.append(time.perf_counter() - start)
    model.zero_grad(set_to_none=True)
    say(
        case="step",
        name=name,
        ms=min(taken) * 1e3,
        tokens_per_s=BATCH * LENGTH / min(taken),
        peak_gbytes=peak / 1e9,
        **notes,
    )
    return peak
