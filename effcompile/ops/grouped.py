"""Products of rows in groups, one matrix for each group: what mixtures of experts compute, by aten's
operator, by HuggingFace's and by ours (`by_expert`).

Legend: S rows, sorted by group; E groups, of K by N each; offs (E) where each group ends. How many rows a
group has is known only when it runs: times are those of groups of one size, and what is allocated is that of
one group which has all rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from effcompile.ops.products import Product, Scratch, measured

__all__ = ["flops", "multiplies_runs", "with_offsets", "workspace_bytes"]

#: Operators whose operands are rows, matrices and the ends of the rows' runs.
_OF_RUNS = ("aten::_grouped_mm", "transformers::grouped_mm_fallback", "effcompile::by_expert")
#: Operator → where offs stands among its arguments.
_OFFSETS: Mapping[str, int] = dict.fromkeys((*_OF_RUNS, "transformers::grouped_mm_fallback_backward"), 2)


def _name(target: object) -> str:
    name: str = getattr(target, "name", lambda: "")()
    return name.removesuffix(".default")


def multiplies_runs(target: object) -> bool:
    """Whether an operator's operands are rows, matrices and the ends of the rows' runs."""
    return _name(target) in _OF_RUNS


def with_offsets(target: object, args: Sequence[Any]) -> Sequence[Any]:
    """The arguments with groups of one size, for whoever times a call with made-up arguments; other
    operators' as given.

    Zeros, valid offsets, are groups without a row, which take no time.
    """
    at = _OFFSETS.get(_name(target))
    if at is None or len(args) <= at or not isinstance(args[at], Tensor):
        return args
    offs, rows = args[at], _rows(args)
    ends = torch.arange(1, len(offs) + 1, device=offs.device) * rows // max(1, len(offs))
    return [*args[:at], ends.to(offs.dtype), *args[at + 1 :]]


def _rows(args: Sequence[Any]) -> int:
    """S: the first axis of the rows, but the second where both operands are matrices, and groups lie along
    what is summed over.
    """
    first, second = args[:2]
    return int(first.shape[1 if second.dim() == 2 else 0])


def flops(target: object, args: Sequence[object]) -> float | None:
    """Floating-point operations of a call; None for other operators."""
    if _name(target) not in _OFFSETS:
        return None
    return float(sum(2 * p.m * p.k * p.n for p in _products(_name(target), args)))


def workspace_bytes(name: str, args: Sequence[object], scratch: Scratch = measured) -> int | None:
    """Bytes that one of these operators allocates beside operands and results; None for others.

    `name`, `args` and `scratch` as in `effcompile.ops.loss_head_workspace.workspace_bytes`.
    """
    return max(map(scratch, _products(name, args)), default=0) if name in _OFFSETS else None


def _products(name: str, args: Sequence[Any]) -> Iterator[Product]:
    """The products of a call whose rows are all in one group."""
    first, second = args[:2]
    rows, device = _rows(args), first.device.type
    if second.dim() == 2:
        yield _product(first, second, device)
        return
    matrix = second[0]
    if not name.endswith("backward"):
        yield _product(first, matrix, device)
        return
    grad = first.new_empty((rows, matrix.shape[1]), device="meta")
    yield _product(grad, matrix.t(), device)
    yield _product(first.t(), grad, device)


def _product(a: Tensor, b: Tensor, device: str) -> Product:
    return Product.of(a, b, a.new_empty((a.shape[0], b.shape[1]), device="meta"), device=device)
