"""Top-KAST: weights of the largest magnitude in the forward, gradients for a larger set (Jayakumar et al.
2021, arXiv 2106.03517).

With A the places of the largest weights and B ⊇ A those of more of them, a layer computes with w·1_A, and the
gradient of w is that of the product at the places of B: w·1_A + (w − stop(w))·1_{B∖A} has this value and this
gradient. Places outside A are pulled towards zero so that they must earn their way in (their section 2.3: the
penalty of B∖A is divided by the density of A).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from effcompile.core.errors import UsageError
from effcompile.sparse.select import inside_blocks

_FORWARD, _BACKWARD = "top_kast_forward", "top_kast_beside"


class TopKast:
    """Keeps the linears inside a model's blocks under Top-KAST's two masks.

    Call `step` after every `optimizer.step()`.

    Raises:
        UsageError: a sparsity out of range, or the backward's is the larger one.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        sparsity: float,
        backward_sparsity: float,
        every: int = 100,
        penalty: float = 1e-4,
    ) -> None:
        if not 0 <= backward_sparsity <= sparsity < 1:
            raise UsageError(
                f"sparsity = {sparsity!r} and backward_sparsity = {backward_sparsity!r}: wanted is 0 ≤ "
                "backward_sparsity ≤ sparsity < 1."
            )
        self.sparsity, self.backward_sparsity, self.every, self.penalty = (
            sparsity,
            backward_sparsity,
            every,
            penalty,
        )
        self.layers: Mapping[str, nn.Linear] = inside_blocks(model)
        self._steps = 0
        for layer in self.layers.values():
            weight = layer.weight
            layer.register_buffer(_FORWARD, torch.zeros_like(weight, dtype=torch.bool), persistent=False)
            layer.register_buffer(_BACKWARD, torch.zeros_like(weight), persistent=False)
            layer.__dict__["forward"] = MethodType(_forward, layer)
        self._choose()

    @torch.no_grad()
    def step(self) -> None:
        """Shrink what is outside the forward's set, and choose both sets anew when that is due."""
        shrink = self.penalty / (1 - self.sparsity)
        for layer in self.layers.values():
            layer.weight.sub_(layer.weight * getattr(layer, _BACKWARD), alpha=shrink)
        self._steps += 1
        if self._steps % self.every == 0:
            self._choose()

    def masks(self) -> dict[str, Tensor]:
        """Places of the forward, layer by layer."""
        return {name: getattr(layer, _FORWARD).clone() for name, layer in self.layers.items()}

    @torch.no_grad()
    def release(self) -> None:
        """Plain linears again, with zeros where the forward had none."""
        for layer in self.layers.values():
            layer.weight.mul_(getattr(layer, _FORWARD))
            del layer.__dict__["forward"]
            delattr(layer, _FORWARD)
            delattr(layer, _BACKWARD)
        self.layers = {}

    def state_dict(self) -> dict[str, Any]:
        beside = {name: getattr(layer, _BACKWARD).clone() for name, layer in self.layers.items()}
        return {"forward": self.masks(), "beside": beside, "steps": self._steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, layer in self.layers.items():
            getattr(layer, _FORWARD).copy_(state["forward"][name])
            getattr(layer, _BACKWARD).copy_(state["beside"][name])
        self._steps = int(state["steps"])

    @torch.no_grad()
    def _choose(self) -> None:
        for layer in self.layers.values():
            if layer.weight.is_meta:
                continue
            forward, backward = (
                _largest(layer.weight, 1 - share) for share in (self.sparsity, self.backward_sparsity)
            )
            getattr(layer, _FORWARD).copy_(forward)
            getattr(layer, _BACKWARD).copy_(backward & ~forward)


def _largest(weight: Tensor, share: float) -> Tensor:
    """The places of this share of the largest magnitudes."""
    count = max(1, round(share * weight.numel()))
    places = weight.abs().flatten().topk(count).indices
    return (
        torch.zeros(weight.numel(), dtype=torch.bool, device=weight.device)
        .index_fill_(0, places, True)
        .view_as(weight)
    )


def _forward(layer: nn.Linear, x: Tensor) -> Tensor:
    weight = layer.weight
    both = weight * getattr(layer, _FORWARD) + (weight - weight.detach()) * getattr(layer, _BACKWARD)
    return nn.functional.linear(x, both, layer.bias)
