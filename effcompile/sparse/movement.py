"""One step of a moving pattern: which blocks go, which come. Pure functions on scores and masks.

Legend: (R, C) a layer's grid of blocks; (L, n) lines within which blocks are exchanged: one line per layer,
per row, or one for all.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from effcompile.sparse.saliency import top

__all__ = ["Movement", "cosine_ratio", "move"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Movement:
    """A layer's blocks after an update, bool (R, C) each: those that stayed, and those that came and start at
    zero.
    """

    kept: Tensor
    grown: Tensor

    @property
    def mask(self) -> Tensor:
        return self.kept | self.grown


def cosine_ratio(start: float, update: int, updates: int) -> float:
    """The share of active blocks that update number `update` (from 0) exchanges: start/2 · (1 +
    cos(π·update/updates)).

    Source: Dietrich et al. 2021 (2108.06277), sec. 2; Evci et al. 2020, eq. 1.
    """
    return start / 2 * (1 + math.cos(math.pi * update / updates))


def move(
    scores: Mapping[str, Tensor], masks: Mapping[str, Tensor], keys: Mapping[str, Tensor], ratio: float, *,
    generator: torch.Generator, regrow: bool, pooled: bool = False, balanced: bool = False,
    room: Mapping[str, int] | None = None,
) -> dict[str, Movement]:  # fmt: skip
    """Exchange about `ratio` of the active blocks: those of the least scores go, free ones of the greatest
    keys come.

    Every line keeps its number of blocks. Nothing is exchanged beyond what is free.

    Args:
        scores: (R, C) what a block is worth; only those of active ones count.
        masks: bool (R, C), the active blocks.
        keys: (R, C) how much a block should come: random numbers (SET), or the gradient's norm (RigL).
        ratio: the share to exchange.
        generator: rounds the number of a balanced row's exchanges at random, as a row of one block could
            otherwise never move.
        regrow: a block that just went may come back (RigL); otherwise only blocks that were free before.
        pooled: one line for all layers: blocks wander between layers, and every layer keeps at least its best
            one.
        balanced: a line for every block row: rows keep their numbers.
        room: with `pooled`, the most blocks that a layer can hold.
    """
    if pooled and not balanced:
        return _pooled(scores, masks, keys, ratio, regrow, room or {})
    found = {}
    for name, mask in masks.items():
        lines = mask.shape[0] if balanced else 1
        count = _exchanges(mask.reshape(lines, -1), ratio, regrow, generator if balanced else None)
        kept = _pruned(scores[name].reshape(lines, -1), mask.reshape(lines, -1), count)
        free = ~kept if regrow else ~mask.reshape(lines, -1)
        grown = _grown(keys[name].reshape(lines, -1), free, count)
        found[name] = Movement(kept=kept.reshape(mask.shape), grown=grown.reshape(mask.shape))
    return found


def _pooled(
    scores: Mapping[str, Tensor], masks: Mapping[str, Tensor], keys: Mapping[str, Tensor], ratio: float,
    regrow: bool, room: Mapping[str, int],
) -> dict[str, Movement]:  # fmt: skip
    sizes = [mask.numel() for mask in masks.values()]
    mask = _joined(masks)
    count = _exchanges(mask, ratio, regrow, None).clamp(max=int(mask.sum()) - len(masks))
    kept = _pruned(_joined({name: _best_is_safe(scores[name], m) for name, m in masks.items()}), mask, count)
    free = ~kept if regrow else ~mask
    fitting = []
    for name, kept_part, free_part in zip(
        masks, kept.split(sizes, dim=1), free.split(sizes, dim=1), strict=True
    ):
        left = room.get(name, kept_part.numel()) - int(kept_part.sum())
        fitting.append(_grown(keys[name].reshape(1, -1), free_part, torch.tensor([left])))
    wanted, eligible = mask.sum(dim=1) - kept.sum(dim=1), torch.cat(fitting, dim=1)
    if int(eligible.sum()) < int(wanted):
        # full layers: what just went may come back, so that no block is lost
        return _pooled(scores, masks, keys, ratio, True, room)
    grown = _grown(_joined(keys), eligible, wanted)
    parts = zip(masks, kept.split(sizes, dim=1), grown.split(sizes, dim=1), strict=True)
    return {
        name: Movement(kept=k.reshape(masks[name].shape), grown=g.reshape(masks[name].shape))
        for name, k, g in parts
    }


def _exchanges(mask: Tensor, ratio: float, regrow: bool, generator: torch.Generator | None) -> Tensor:
    """(L): how many blocks each line exchanges, by chance the next whole number up where a generator is
    given.
    """
    active = mask.sum(dim=1).cpu()
    wanted = active * ratio
    chance = torch.rand(len(active), generator=generator) if generator is not None else 0.5
    count = (wanted + chance).floor().long()
    return torch.minimum(count, active if regrow else mask.shape[1] - active)


def _pruned(scores: Tensor, mask: Tensor, count: Tensor) -> Tensor:
    """The active blocks less the `count` of least score in every line."""
    ranked = scores.masked_fill(~mask, -math.inf)
    return top(ranked, mask.sum(dim=1).cpu() - count) & mask


def _grown(keys: Tensor, free: Tensor, count: Tensor) -> Tensor:
    return top(keys.masked_fill(~free, -math.inf), count) & free


def _best_is_safe(scores: Tensor, mask: Tensor) -> Tensor:
    """The scores, with the best active block's raised above all, so that no layer loses its last one."""
    flat = scores.masked_fill(~mask, -math.inf).reshape(-1)
    safe = scores.reshape(-1).clone()
    safe[flat.argmax()] = math.inf
    return safe.reshape(scores.shape)


def _joined(parts: Mapping[str, Tensor]) -> Tensor:
    return torch.cat([part.reshape(1, -1) for part in parts.values()], dim=1)
