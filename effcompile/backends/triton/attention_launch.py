"""How a kernel of attention is launched in all calls of a form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from effcompile.backends.triton.configs import LaunchConfig
from effcompile.backends.triton.kernels.attention_backward import attention_dkdv, attention_dq
from effcompile.backends.triton.kernels.attention_forward import attention_forward
from effcompile.core.types import Arguments

__all__ = ["KINDS", "Launch", "aligned", "describable"]

#: Kernel → what it takes besides, where a call has no such term.
KINDS: dict[str, tuple[Any, Arguments]] = {
    "forward": (attention_forward, {"sink": None, "sink_strides": (0,) * 3}),
    "dq": (attention_dq, {
        "dbias": None, "dbias_strides": (0,) * 4, "SUM_ROWS": False, "SUM_COLUMNS": False, "ATOMIC": False,
    }),
    "dkdv": (attention_dkdv, {}),
}  # fmt: skip
#: Kernel → what its steps read: the tensor's name, and those of a tile's rows and columns.
STEPS = {
    "forward": {"k": ("BLOCK_N", "BLOCK_D"), "v": ("BLOCK_N", "BLOCK_DV")},
    "dq": {"k": ("BLOCK_N", "BLOCK_D"), "v": ("BLOCK_N", "BLOCK_DV")},
    "dkdv": {"q": ("BLOCK_M", "BLOCK_D"), "grad": ("BLOCK_M", "BLOCK_DV")},
}
#: Bytes that addresses and strides of what is copied in whole tiles are multiples of (CUDA driver API,
#: cuTensorMapEncodeTiled).
_EVEN = 16


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel's launch in all calls of a form.

    config: its tiles, cut to divide the given lists'. grid: how many programs. values: its arguments in their
    order, None where each call brings its own (`lacking` of them); at: where they stand. tiles: tensors that
    are copied in whole tiles, and these. lists: which of the lists of band and chunk it walks, as arguments
    of `closed_form`; None where each call brings its own.
    """

    config: LaunchConfig
    grid: tuple[int]
    kernel: Any
    values: tuple[Any, ...]
    at: Mapping[str, int]
    lacking: int
    tiles: Mapping[str, list[int]]
    options: Mapping[str, Any]
    lists: tuple[Any, ...] | None

    @classmethod
    def of(
        cls, kernel: str, config: LaunchConfig, programs: int, fixed: Arguments, lists: tuple[Any, ...] | None
    ) -> Launch:
        made, besides = KINDS[kernel]
        fixed = {**besides, **fixed}
        values = tuple(fixed.get(name) for name in made.arg_names)
        at = {name: place for place, name in enumerate(made.arg_names)}
        lacking = sum(name not in fixed for name in made.arg_names)
        steps = STEPS[kernel] if config.tma else {}
        tiles = {name: [1, 1, *(fixed[side] for side in sides)] for name, sides in steps.items()}
        return cls(config, (programs,), made, values, at, lacking, tiles, config.launch, lists)

    def __call__(self, brought: Arguments) -> None:
        """Launch it with what a call brings.

        By their places: of keywords every function on the way to the GPU makes another dictionary.
        """
        assert len(brought) >= self.lacking
        values, at = list(self.values), self.at
        for name, value in brought.items():
            values[at[name]] = value
        for name, tile in self.tiles.items():
            values[at[name]] = _descriptor(brought[name], tile)
        self.kernel[self.grid](*values, **self.options)


def describable(t: Tensor) -> bool:
    """Whether whole tiles of a tensor [B, H, S, D], from an aligned address on, can be copied."""
    return t.stride(3) == 1 and all(
        stride > 0 and stride * t.element_size() % _EVEN == 0
        for size, stride in zip(t.shape[:3], t.stride()[:3], strict=True)
        if size > 1
    )


def aligned(a: Tensor, b: Tensor) -> bool:
    """Whether both begin at such addresses."""
    return (a.data_ptr() | b.data_ptr()) % _EVEN == 0


def _descriptor(t: Tensor, tile: list[int]) -> TensorDescriptor:
    """For copies of tiles; the stride of an axis that has one place is never used, and may be uneven."""
    strides = [
        stride if size > 1 else _EVEN for size, stride in zip(t.shape[:3], t.stride()[:3], strict=True)
    ]
    return TensorDescriptor(t, list(t.shape), [*strides, 1], tile)
