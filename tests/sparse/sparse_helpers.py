"""A tiny transformer and its training, for the controller's tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import effcompile


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mix = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(x)
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Tiny(nn.Module):
    """Tokens (N, T) → logits (N, T, 16)."""

    def __init__(self, width: int = 16, depth: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, 16)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


LINEARS = [f"blocks.{i}.{name}" for i in range(2) for name in ("mix", "up", "down")]


def tiny(seed: int = 0, **form: int) -> Tiny:
    torch.manual_seed(seed)
    return Tiny(**form)


def loss_of(model: nn.Module, step: int) -> Tensor:
    """The loss on the batch of this step: predict the next token of a fixed rule."""
    tokens = torch.randint(16, (4, 8), generator=torch.Generator().manual_seed(1000 + step))
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), ((tokens * 3 + 1) % 16).flatten())


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, sparsity: effcompile.DynamicSparsity | None,
    steps: range, after: Callable[[], Any] = lambda: None, clip: float | None = None,
) -> list[float]:  # fmt: skip
    """Losses of these steps; `after` is called at the end of each."""
    losses = []
    for step in steps:
        optimizer.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        if sparsity is not None:
            sparsity.step()
        after()
        losses.append(loss.item())
    return losses


def elements(sparsity: effcompile.DynamicSparsity, name: str) -> Tensor:
    """The mask of a layer's elements."""
    block = sparsity.recipe.block
    return sparsity.masks()[name].repeat_interleave(block, 0).repeat_interleave(block, 1)
