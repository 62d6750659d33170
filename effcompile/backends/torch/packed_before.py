"""Weights as the last lowering packed them: a plan that is solved again changes few linears, and packing all
of a model anew takes longer than all else that lowering does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar

import torch

from effcompile.ir.formats import Form, WeightFormat

#: (site, format) → the weight that was packed, and what became of it.
Packed = dict[tuple[str, WeightFormat], tuple[torch.Tensor, tuple[torch.Tensor, ...]]]

_KEPT: ContextVar[Packed | None] = ContextVar("packed before", default=None)


@contextlib.contextmanager
def keeping(packed: Packed, forms: Mapping[str, Form]) -> Iterator[None]:
    """What is lowered within takes from `packed` what stands there, and adds what it packs. What `forms` (by
    site) no longer take is let go of first, so that both lowerings never lie in memory.
    """
    for site, held in [*packed]:
        if site not in forms or forms[site].weights != held:
            del packed[site, held]
    token = _KEPT.set(packed)
    try:
        yield
    finally:
        _KEPT.reset(token)


def packed_as(
    site: str, held: WeightFormat, weight: torch.Tensor, pack: Callable[[], tuple[torch.Tensor, ...]]
) -> tuple[torch.Tensor, ...]:
    """What `pack` makes of a site's weight, or has made of this very one before."""
    kept = _KEPT.get()
    if kept is None:
        return pack()
    before = kept.get((site, held))
    if before is None or not _same(before[0], weight):
        before = kept[site, held] = weight, pack()
    return before[1]


def _same(held: torch.Tensor, weight: torch.Tensor) -> bool:
    """Both are one memory: as long as it is held, it is nobody else's."""
    return (
        held.data_ptr() == weight.data_ptr()
        and held.shape == weight.shape
        and held.stride() == weight.stride()
        and held.dtype == weight.dtype
    )
