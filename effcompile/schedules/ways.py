"""Ways to hold a value from forward to backward other than as it is: packed on the device, on the host, or
both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from effcompile.ops.workspace import workspace_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Codec:
    """Packs dense tensors on the device.

    Attributes:
        pack: the operator (x, strides) → uint8. unpack: (packed, size, strides, dtype) → the tensor.
        packed_bytes: number of elements → bytes of the packed copy.
    """

    pack: Any
    unpack: Any
    packed_bytes: Callable[[int], int]

    def pack_workspace(self, value: Tensor) -> int:
        """Most bytes that packing a tensor takes beside it and its packed copy."""
        return workspace_bytes(self.pack, [value, list(value.stride())]) or 0

    def unpack_workspace(self, value: Tensor) -> int:
        """Most bytes that unpacking it takes beside the two."""
        packed = torch.empty(self.packed_bytes(value.numel()), dtype=torch.uint8, device="meta")
        return (
            workspace_bytes(self.unpack, [packed, list(value.shape), list(value.stride()), value.dtype]) or 0
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way.

    Attributes:
        name: of the form in a plan. by: the lever that proposes it. said: where or how a value is held, in
            words.
        exact: the value comes back as it was. without: in words, what is not done without it.
        codec: what packs it on the device; None for none. on_host: whether what is handed on lies on the
            host.
        parts: the ways of which it is made up; itself alone where it is none of several.
    """

    name: str
    by: str
    said: str
    exact: bool = True
    without: str = ""
    codec: Codec | None = None
    on_host: bool = False
    parts: tuple[str, ...] = ()

    def on(self, host: Way) -> Way:
        """The way that packs like this one and puts what it packed on the host."""
        return replace(
            self,
            name=f"{self.name}+{host.name}",
            by=host.by,
            said=f"{self.said} {host.said}",
            on_host=True,
            parts=(self.name, host.name),
        )
