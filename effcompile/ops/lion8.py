"""Lion with its one state in 8 bits: an optimizer on `effcompile::lion8`, 1.016 bytes per parameter where
AdamW in fp32 keeps 8.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from effcompile.core.errors import UsageError
from effcompile.ops.one_by_one import OneByOne
from effcompile.ops.states8 import BLOCK, FUSED, LEAST, lion8, lion8_by_torch

__all__ = ["Lion8bit"]


class Lion8bit(OneByOne):
    """Lion (Chen et al., arXiv 2302.06675, algorithm 2); its state in blocks of 256 codes of 8 bits (Dettmers
    et al., arXiv 2110.02861).

    Tensors of fewer than 4096 elements, or of no multiple of 256, keep theirs in fp32, as torchao's 8-bit
    optimizers do.
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        if lr < 0 or weight_decay < 0 or not all(0 <= beta < 1 for beta in betas):
            given = f"lr = {lr}, betas = {betas}, weight_decay = {weight_decay}"
            raise UsageError(
                f"Lion8bit takes lr and weight_decay of 0 or more, and betas in [0, 1); given {given}."
            )
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take up a state_dict, codes and scales in their own dtypes: torch's own method casts all states to
        the parameter's.
        """
        super().load_state_dict(dict(state_dict))
        groups = zip(self.param_groups, state_dict["param_groups"], strict=True)
        pairs = [
            pair for mine, theirs in groups for pair in zip(mine["params"], theirs["params"], strict=True)
        ]
        for p, number in pairs:
            if number in state_dict["state"]:
                found = state_dict["state"][number]
                self.state[p] = {key: value.detach().to(p.device, copy=True) for key, value in found.items()}

    def update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        p, grad, state = parameter, gradient, self.state[parameter]
        if not state:
            state.update(_zeros(p))
        rate, (beta1, beta2), decay = float(group["lr"]), group["betas"], float(group["weight_decay"])
        if "codes" not in state:
            _step32(p, grad, state["exp_avg"], rate, beta1, beta2, decay)
            return
        kernel = lion8 if p.device.type in FUSED else lion8_by_torch
        kernel(p.detach(), grad, state["codes"], state["scale"], state["qmap"], rate, beta1, beta2, decay)


def _signed_table() -> Tensor:
    """The 256 numbers that codes stand for, ascending: dynamic tree quantisation (arXiv 2110.02861, section
    1.3), as torchao makes it.

    2ᵉ numbers of either sign lie evenly in [0.1, 1] · 10^(e − 6) for e = 0 … 6, beside 0 and 1: small ones
    are as exact as large ones.
    """
    numbers = [0.0, 1.0]
    for e in range(7):
        width = 0.9 / 2**e
        middles = [(0.1 + width * (i + 0.5)) * 10.0 ** (e - 6) for i in range(2**e)]
        numbers += [*middles, *(-middle for middle in middles)]
    return torch.tensor(sorted(numbers), dtype=torch.float32, device="cpu")


#: Made once, before any step: a step's memory is counted to the byte.
_SIGNED = _signed_table()


def _zeros(p: Tensor) -> dict[str, Tensor]:
    """The state before the first step. Its table lies with it, so that a state_dict says all."""
    if p.numel() < LEAST or p.numel() % BLOCK or not p.is_contiguous():
        return {"exp_avg": torch.zeros_like(p, dtype=torch.float32)}
    table = torch.empty(BLOCK, dtype=torch.float32, device=p.device)
    return {
        "codes": torch.zeros_like(p, dtype=torch.uint8),  # of scale 0: their entry does not matter
        "scale": torch.zeros(p.numel() // BLOCK, dtype=torch.float32, device=p.device),
        "qmap": table.copy_(_SIGNED),
    }


def _step32(
    p: Tensor, grad: Tensor, m: Tensor, rate: float, beta1: float, beta2: float, decay: float
) -> None:
    """The same step where the state is in fp32."""
    wide, slopes = p.float(), grad.float()
    p.copy_(wide - rate * decay * wide - rate * m.lerp(slopes, 1 - beta1).sign())
    m.lerp_(slopes, 1 - beta2)
