"""What operators allocate on a GPU while they run, where they cannot be run to see: ours on their tiled
kernels (backends/triton).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from torch import fx

from effcompile.ops import frozen_codes
from effcompile.ops.attention_terms import Terms
from effcompile.ops.loss_head import chunk_rows
from effcompile.ops.products import OPERANDS

#: Parts that the tiled forward of a loss head splits the vocabulary into, at the most, to keep a large GPU
#: busy.
_PARTS = 264
_ROW = 4  # bytes of a number per row: they are all fp32


def workspace_on_gpu(
    target: object, args: Sequence[object], kwargs: Mapping[str, object] = MappingProxyType({})
) -> int | None:
    """Bytes alive at the highest instant inside a call of `target`, beyond its inputs and outputs; None where
    nothing is known of it.

    Tile lists of bands and chunks are kept for all calls of one shape, and are no part of it: 16 thousand
    tokens have some 0.25 MiB.
    """
    name = getattr(target, "name", lambda: "")().removesuffix(".default")
    if name in ("effcompile::attention", "effcompile::attention_backward"):
        return _attention(list(args), backward=name.endswith("backward"), kwargs=kwargs)
    if (found := frozen_codes.workspace_bytes(name, args, on_device=True)) is not None:
        return found
    kind = name.removeprefix("effcompile::loss_head_")
    return (
        _loss_head(kind, list(args))
        if kind != name and kind in ("gradients", "forward", "backward")
        else None
    )


def calls_products(node: fx.Node) -> bool:
    """Whether a node calls the vendor's library of products."""
    return node.target in OPERANDS or "effcompile::loss_head" in getattr(node.target, "name", lambda: "")()


def _attention(args: list[Any], *, backward: bool, kwargs: Mapping[str, object]) -> int:
    """Operands whose rows do not lie one after the other are copied; a backward has a number per row, and the
    bias's sums in fp32.
    """
    grad, (q, k, v) = (args[0], args[1:4]) if backward else (None, args[:3])
    copies = sum(x.numel() * x.element_size() for x in (q, k, v, grad) if x is not None and x.stride(3) != 1)
    if not backward:
        return copies
    rest = args[6:12]
    bias = Terms.of(*rest, **{key: value for key, value in kwargs.items() if key in _FORM}).bias
    summed = bias.numel() * _ROW if bias is not None and kwargs.get("bias_gradient", True) else 0
    return copies + int(q.shape[0] * q.shape[1] * q.shape[2]) * _ROW + summed


_FORM = frozenset(Terms.__dataclass_fields__)


def _loss_head(kind: str, args: list[Any]) -> int:
    """The forward keeps three numbers per row and part of the vocabulary; the others a chunk's logits, and
    some numbers per row.
    """
    x, weight = args[1:3] if kind == "backward" else args[:2]
    rows, words = int(x.shape[0]), int(weight.shape[0])
    if kind == "forward":
        parts = max(1, min(-(-words // 128), _PARTS // max(1, -(-rows // 128))))
        return 3 * parts * rows * _ROW + 4 * rows * _ROW
    chunks = args[11 if kind == "backward" else 9]
    return chunk_rows(rows, chunks) * words * x.element_size() + 4 * rows * _ROW + words * _ROW
