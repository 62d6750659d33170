"""One thing that a captured graph took for granted of its model, and torch's settings among them."""

from __future__ import annotations

import enum
from dataclasses import dataclass

import torch
from torch import nn

from effcompile.core import torch_compat
from effcompile.ir.guards import Kind, described, same


@dataclass(frozen=True, slots=True)
class Fact:
    """What stood at a place. `state`: of a tensor, what tells whether it was changed."""

    kind: Kind
    value: object
    state: tuple[object, ...] = ()

    def equals(self, other: Fact) -> bool:
        if self.state != other.state:
            return False
        return self.value is other.value or (is_plain(self.value) and same(self.value, other.value))

    @property
    def is_kept(self) -> bool:
        """Whether it is an attribute where a forward might keep what it computed."""
        return self.kind in ("attribute", "tensor") and (
            self.value is None or isinstance(self.value, torch.Tensor)
        )

    @property
    def text(self) -> str:
        if isinstance(self.value, torch.Tensor):
            shape = "×".join(map(str, self.value.shape)) or "scalar"
            return f"{str(self.value.dtype).removeprefix('torch.')} {shape}"
        return type(self.value).__name__ if isinstance(self.value, nn.Module) else described(self.value)


#: Told apart by what they are, not by which object they are.
PLAIN = bool | int | float | complex | str | bytes | None | torch.dtype | torch.device | enum.Enum


def is_plain(value: object) -> bool:
    """Whether a value is told apart by what it is."""
    return isinstance(value, PLAIN)


#: Of torch, that change what operators are run; a planned step minds autocast itself.
SETTINGS = (
    "torch.get_default_dtype()",
    "function mode",
    "torch.is_autocast_enabled('cpu')",
    "torch.is_autocast_enabled('cuda')",
)


def settings(_: object) -> tuple[object, ...]:
    """The first of SETTINGS as they are now."""
    return torch.get_default_dtype(), torch_compat.function_mode()


def settings_and_autocast(_: object) -> tuple[object, ...]:
    """All of SETTINGS as they are now."""
    return *settings(None), torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")
