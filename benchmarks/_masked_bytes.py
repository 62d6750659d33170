"""A small masked language model over bytes of the standard library's sources, for trainings that are
compared.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import trained_lm

if TYPE_CHECKING:
    import torch
    from torch import nn

MASK = 256
MASKED_SHARE = 0.15


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What all runs share.

    Rates and the share of blocks exchanged: the best of a few on seeds that the table does not use.

    A model this small is trained close to what it can learn, which is where the pattern matters: with eight
    times the weights and a seventh of the steps, moves cost more than they bring, for new blocks have no time
    to learn.
    """

    width: int = 128
    depth: int = 2
    heads: int = 4
    context: int = 64
    batch: int = 16
    steps: int = 5000
    updates: int = 80
    prune_ratio: float = 0.1
    dense_rate: float = 4e-3
    sparse_rate: float = 8e-3
    judged_windows: int = 1024
    execution: str = "auto"


SHORT = Setup(width=64, depth=2, heads=2, context=32, batch=8, steps=24, updates=6, judged_windows=16)


def build(setup: Setup, width: int) -> nn.Module:
    """A bidirectional pre-norm transformer over bytes with rotary positions; its head sees the masked places
    only, as BERT's does.
    """
    from torch import nn

    cosines, sines = _rotary(setup.context, width // setup.heads)

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
            self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            normed = self.norm1(x)
            q, k, v = (
                f(normed).unflatten(-1, (setup.heads, -1)).transpose(1, 2)
                for f in (self.query, self.key, self.value)
            )
            mixed = nn.functional.scaled_dot_product_attention(
                _turned(q, cosines, sines), _turned(k, cosines, sines), v
            )
            x = x + self.out(mixed.transpose(1, 2).flatten(2))
            return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))

    class MaskedModel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bytes = nn.Embedding(257, width)
            nn.init.normal_(self.bytes.weight, std=0.02)
            self.blocks = nn.ModuleList(Block() for _ in range(setup.depth))
            self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256)

        def forward(self, tokens: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
            """tokens (N, T) and the masked places (N, M) → logits (N, M, 256)."""
            x = self.bytes(tokens)
            for block in self.blocks:
                x = block(x)
            return self.head(self.norm(x.gather(1, chosen[..., None].expand(-1, -1, width))))

    return MaskedModel()


def _rotary(length: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines (T, D) of rotary positions (Su et al., RoFormer, arXiv 2104.09864)."""
    import torch

    angles = torch.outer(torch.arange(length), 1e4 ** (-torch.arange(0, size, 2) / size)).repeat(1, 2)
    return angles.cos(), angles.sin()


def _turned(x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    import torch

    low, high = x.chunk(2, dim=-1)
    return x * cosines + torch.cat([-high, low], dim=-1) * sines


def batch_of(
    text: torch.Tensor, setup: Setup, count: int, generator: torch.Generator
) -> tuple[torch.Tensor, ...]:
    """(tokens (N, T), masked places (N, M), bytes to find (N, M)); of the masked, 80 % are hidden, 10 %
    random, 10 % as they are (BERT).
    """
    import torch

    starts = torch.randint(len(text) - setup.context, (count, 1), generator=generator)
    tokens = text[starts + torch.arange(setup.context)].long()
    chosen = (
        torch.rand(tokens.shape, generator=generator).topk(round(MASKED_SHARE * setup.context), dim=1).indices
    )
    wanted = tokens.gather(1, chosen)
    how = torch.rand(chosen.shape, generator=generator)
    other = torch.randint(256, chosen.shape, generator=generator)
    shown = torch.where(how < 0.8, MASK, torch.where(how < 0.9, other, wanted))
    return tokens.scatter(1, chosen, shown), chosen, wanted


def loss_on(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    import torch

    tokens, chosen, wanted = batch
    return torch.nn.functional.cross_entropy(model(tokens, chosen).flatten(0, 1), wanted.flatten())


def texts() -> tuple[torch.Tensor, torch.Tensor]:
    """Training and unseen bytes, divided by file."""
    import torch

    training, unseen = (
        torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in trained_lm.split_files()
    )
    return training, unseen


def seeded(seed: int) -> torch.Generator:
    import torch

    return torch.Generator().manual_seed(seed)
