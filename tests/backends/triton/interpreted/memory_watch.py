"""Every launch in the interpreter watched: an access beyond the tensors it was given, or two programs that
meet in one place, is an error.

Programs of a grid run in any order and at once on a GPU; here they run one after the other, so that a race
gives the right result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from triton.runtime import interpreter as stock


class OutOfBoundsError(AssertionError):
    pass


class RaceError(AssertionError):
    pass


class Launch:
    """What the programs of one launch touch: rows of (address, program), of whole accesses' first bytes."""

    def __init__(self, name: str, tensors: list[torch.Tensor]) -> None:
        self.name = name
        spans = sorted(_span(t) for t in tensors if t.numel())
        self.starts = np.array([start for start, _ in spans], dtype=np.int64)
        self.ends = (
            np.maximum.accumulate(np.array([end for _, end in spans], dtype=np.int64))
            if spans
            else np.array([], dtype=np.int64)
        )
        self.stored: list[np.ndarray] = []
        self.loaded: list[np.ndarray] = []
        self.added: list[np.ndarray] = []

    def touch(self, kept: list[np.ndarray], pointers: Any, mask: Any) -> None:
        at = np.asarray(pointers.data).astype(np.int64)
        at = (
            at[np.broadcast_to(np.asarray(mask.data, dtype=bool), at.shape)]
            if mask is not None
            else at.ravel()
        )
        if not at.size:
            return
        width = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        span = np.searchsorted(self.starts, at, side="right") - 1
        if (span < 0).any() or (at + width > self.ends[span]).any():
            outside = (span < 0).sum() + (at + width > self.ends[np.maximum(span, 0)]).sum()
            raise OutOfBoundsError(f"{self.name}: {int(outside)} accesses")
        x, y, z = stock.interpreter_builder.grid_idx
        _, ny, nz = stock.interpreter_builder.grid_dim
        kept.append(np.stack([at.ravel(), np.full(at.size, (x * ny + y) * nz + z)]))

    def check(self) -> None:
        """Each place that is stored to belongs to one program, and no other reads it or adds to it."""
        stored = _distinct(self.stored)
        if not stored.size:
            return
        if (np.diff(stored[0]) == 0).any():
            raise RaceError(f"{self.name}: two programs store to one place")
        for name, others in (("reads", _distinct(self.loaded)), ("adds to", _distinct(self.added))):
            if others.size:
                place = np.minimum(np.searchsorted(stored[0], others[0]), stored.shape[1] - 1)
                if ((stored[0][place] == others[0]) & (stored[1][place] != others[1])).any():
                    raise RaceError(f"{self.name}: a program {name} what another one stores")


def _span(t: torch.Tensor) -> tuple[int, int]:
    """Where a tensor's first byte lies, and where its last one ends."""
    last = sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))
    return t.data_ptr(), t.data_ptr() + (last + 1) * t.element_size()


def _distinct(parts: list[np.ndarray]) -> np.ndarray:
    """Each pair of address and program once, in ascending order; np.unique of columns takes five times as
    long.
    """
    if not parts:
        return np.empty((2, 0), dtype=np.int64)
    pairs = np.concatenate(parts, 1)
    pairs = pairs[:, np.lexsort((pairs[1], pairs[0]))]
    first = np.ones(pairs.shape[1], dtype=bool)
    first[1:] = (pairs[:, 1:] != pairs[:, :-1]).any(0)
    return pairs[:, first]


_now: list[Launch] = []


def watch() -> None:
    """From now on in this process."""
    if hasattr(stock, "effcompile_watched"):
        return
    stock.effcompile_watched = True
    builder: Any = stock.InterpreterBuilder
    builder.create_masked_load = _noting(builder.create_masked_load, "loaded", 1)
    builder.create_masked_store = _noting(builder.create_masked_store, "stored", 2)
    builder.create_atomic_rmw = _noting(builder.create_atomic_rmw, "added", 3, pointers=1)
    executor: Any = stock.GridExecutor
    executor.__call__ = _launching(executor.__call__)


def _noting(original: Callable[..., Any], kind: str, mask: int, *, pointers: int = 0) -> Callable[..., Any]:
    def noted(self: Any, *args: Any, **options: Any) -> Any:
        if _now:
            _now[-1].touch(getattr(_now[-1], kind), args[pointers], args[mask])
        return original(self, *args, **options)

    return noted


def _launching(original: Callable[..., Any]) -> Callable[..., Any]:
    def launched(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = [getattr(one, "base", one) for one in (*args, *kwargs.values())]
        _now.append(Launch(self.fn.__name__, [t for t in given if isinstance(t, torch.Tensor)]))
        try:
            result = original(self, *args, **kwargs)
            _now[-1].check()
            return result
        finally:
            _now.pop()

    return launched
