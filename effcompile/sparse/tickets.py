"""Tickets: when an early-bird mask has settled, and neurons taken out of a model for good.

Early-bird tickets (You et al. 2020, 1909.11957; EarlyBERT, Chen et al. 2021, 2101.00063): the mask that
pruning would give now is compared with the last few; once they agree, training may go on with it alone.
Neurons then leave as whole rows and columns, so that the smaller model is dense and faster on any machine.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from effcompile.core.errors import UnknownNameError, UsageError
from effcompile.sparse import moments, saliency

__all__ = ["EarlyBird", "Neurons", "find_neurons", "mask_distance", "neuron_masks", "shrink"]


def mask_distance(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float:
    """The share of entries in which two sets of masks differ (normalised Hamming distance)."""
    entries = sum(mask.numel() for mask in a.values())
    return sum(int((mask != b[name]).sum()) for name, mask in a.items()) / entries


@dataclass(slots=True, kw_only=True)
class EarlyBird:
    """Watches masks settle: found once the newest is within `threshold` of each of the `window` − 1 before
    it.
    """

    threshold: float = 0.1
    window: int = 5
    seen: list[dict[str, Tensor]] = field(default_factory=list)
    distance: float = math.inf

    def observe(self, masks: Mapping[str, Tensor]) -> bool:
        """Take the masks of now; True when they have settled.

        `distance` is the greatest to those before, ∞ until there are enough.

        Masks of other things than those before (neurons instead of blocks, a shrunk model) begin anew.
        """
        newest = {name: mask.clone() for name, mask in masks.items()}
        if self.seen and _shapes(self.seen[-1]) != _shapes(newest):
            self.seen = []
        before, self.seen = self.seen, [*self.seen, newest][-self.window :]
        past = before[-(self.window - 1) :]
        self.distance = (
            max(mask_distance(newest, old) for old in past) if len(past) == self.window - 1 else math.inf
        )
        return self.distance <= self.threshold


@dataclass(frozen=True, slots=True, kw_only=True)
class Neurons:
    """One set of hidden neurons: linear layers whose rows make them (two in a gated unit), and those whose
    columns read them.

    Between the two, every operation must treat neurons one by one (activation, product of gates, dropout).
    """

    rows: tuple[str, ...]
    columns: tuple[str, ...]


def find_neurons(model: nn.Module, rows: Sequence[str], columns: Sequence[str]) -> list[Neurons]:
    """The sets of neurons that patterns name, one per block: `rows=["blocks.*.up"],
    columns=["blocks.*.down"]`.

    Layers belong together when they have the same parent.

    Raises:
        UnknownNameError: a pattern names no linear layer. UsageError: a set without rows or columns, or of
            unequal sizes.
    """
    known = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    sets: dict[str, tuple[list[str], list[str]]] = {}
    for place, patterns in enumerate((rows, columns)):
        for pattern in patterns:
            matching = [name for name in known if fnmatchcase(name, pattern)]
            if not matching:
                raise UnknownNameError("linear layer", pattern, known)
            for name in matching:
                sets.setdefault(name.rpartition(".")[0], ([], []))[place].append(name)
    found = []
    for parent, (makers, readers) in sets.items():
        sizes = {known[name].out_features for name in makers} | {known[name].in_features for name in readers}
        if not makers or not readers or len(sizes) != 1:
            raise UsageError(
                f"In {parent!r}, rows of {makers} and columns of {readers} are no one set of neurons: "
                f"sizes {sorted(sizes)}."
            )
        found.append(Neurons(rows=tuple(makers), columns=tuple(readers)))
    return found


def _shapes(masks: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(mask.shape) for name, mask in masks.items()}


def neuron_masks(model: nn.Module, sets: Sequence[Neurons], sparsity: float) -> dict[str, Tensor]:
    """The neurons to keep in each set, bool (F), by the L1 norm of their rows and columns; at least one each.

    Keyed by the first row.
    """
    kept = {}
    for group in sets:
        rows = [saliency.magnitude(_linear(model, name).weight) for name in group.rows]
        columns = [saliency.magnitude(_linear(model, name).weight) for name in group.columns]
        scores = saliency.neurons(rows, columns).cpu()
        count = max(1, round(len(scores) * (1 - sparsity)))
        kept[group.rows[0]] = saliency.top(scores.reshape(1, -1), torch.tensor([count])).squeeze(0)
    return kept


def shrink(
    model: nn.Module, optimizer: Optimizer, sets: Sequence[Neurons], masks: Mapping[str, Tensor]
) -> None:
    """Take the neurons that the masks drop out of the model and of the optimizer's state: weights become
    smaller, not zero.
    """
    for group in sets:
        kept = masks[group.rows[0]].nonzero().squeeze(1)
        for name in group.rows:
            layer = _linear(model, name)
            _select(optimizer, layer, "weight", 0, kept)
            if layer.bias is not None:
                _select(optimizer, layer, "bias", 0, kept)
            layer.out_features = len(kept)
        for name in group.columns:
            layer = _linear(model, name)
            _select(optimizer, layer, "weight", 1, kept)
            layer.in_features = len(kept)


def _select(optimizer: Optimizer, layer: nn.Linear, entry: str, dim: int, kept: Tensor) -> None:
    """Keep some rows or columns of a parameter and of its moments."""
    old: nn.Parameter = getattr(layer, entry)
    index = kept.to(old.device)
    new = nn.Parameter(old.detach().index_select(dim, index), requires_grad=old.requires_grad)
    setattr(layer, entry, new)
    if any(held is old for group in optimizer.param_groups for held in group["params"]):
        moments.replace(optimizer, old, new, lambda tensor: tensor.index_select(dim, index))


def _linear(model: nn.Module, name: str) -> nn.Linear:
    found = model.get_submodule(name)
    assert isinstance(found, nn.Linear), f"{name} is no linear layer"
    return found
