"""What a generation step keeps between its calls, as data. Loads without torch.

A step is a graph of inference whose cache enters and leaves by flat tensors: the state that a call finds and
the state that it leaves. A leaf is one such tensor; a layout is all of them, in the order in which they stand
among the step's inputs.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

#: A window's buffer is longer than the window by this part of it.
_SLACK = 8

#: The kind of the choices of how leaves are held, and what their sites begin with.
CACHE = "cache"
#: What rows of 32 bits may be held in → bytes of an element as it is stored, and elements of a row of so many
#: numbers with its scales.
_NARROW: Mapping[str, tuple[int, Callable[[int], int]]] = {
    "bfloat16": (2, lambda width: width),
    "int8": (1, lambda width: width + 4),
    "uint8": (1, lambda width: width // 2 + 2 * math.ceil(width / 32)),
}


class Growth(enum.StrEnum):
    """How a leaf follows the tokens."""

    FULL = "full"  # one row for each token
    WINDOW = "window"  # the rows of the last tokens
    SOURCE = "source"  # one row for each position of the encoder's output; it is written once
    STATE = "state"  # of one size, replaced at each call


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheLeaf:
    """One tensor of the cache: (batch, heads, rows, width); a state is (batch, *shape).

    Attributes:
        name: where it is in the model's cache: `layers.3.keys`.
        layer: of which layer.
        shape: sizes without the batch and the rows.
        window: rows that are kept at the most; 0 where all are.
        item_bytes: of one element, in the graph's own dtype.
        held: dtype that rows are held in, where it is not the graph's own.
    """

    name: str
    layer: int
    growth: Growth
    shape: tuple[int, ...]
    window: int = 0
    item_bytes: int = 4
    held: str = ""

    @property
    def site(self) -> str:
        """Where a plan decides how it is held."""
        return f"{CACHE}.{self.name}"

    def narrowed(self, dtype: str) -> CacheLeaf:
        """In "bfloat16", in "int8" with a scale for each row, or in "uint8", two numbers of 4 bits in each,
        with a scale for each 32; where it is held in 32 bits and written token by token. "" leaves it as it
        is, and so do pairs that do not come out even.
        """
        even = dtype != "uint8" or self.shape[-1] % 2 == 0
        narrow = dtype and even and self.growth in (Growth.FULL, Growth.WINDOW) and self.item_bytes == 4
        return replace(self, held=dtype) if narrow else self

    @property
    def width(self) -> int:
        """Elements of a row as it is held, its scales among them."""
        return _NARROW[self.held][1](self.shape[-1]) if self.held else self.shape[-1]

    def rows(self, context: int, source: int = 0) -> int:
        """Rows that are kept where so many tokens were seen; 1 of a state."""
        match self.growth:
            case Growth.FULL:
                return context
            case Growth.WINDOW:
                return min(context, self.window)
            case Growth.SOURCE:
                return source
            case Growth.STATE:
                return 1

    def capacity(self, context: int, source: int = 0) -> int:
        """Rows of a buffer that never has to be replaced: of a window a few more than are kept, so that few
        appends move it.
        """
        rows = self.rows(context, source)
        return min(context, rows + 1 + rows // _SLACK) if self.growth is Growth.WINDOW else rows

    def holds(self, sizes: Sequence[int], batch: int) -> bool:
        """Whether a tensor of these sizes may be it, in its own dtype or in the graph's."""
        if self.growth is Growth.STATE:
            return sizes[0] == batch and sizes[1:] == self.shape
        return (
            len(sizes) == 4
            and sizes[0] == batch
            and sizes[1] == self.shape[0]
            and (sizes[3] == self.shape[-1] or sizes[3] == self.width)
        )

    def nbytes(self, rows: int, batch: int) -> int:
        """Bytes of so many rows."""
        item = _NARROW[self.held][0] if self.held else self.item_bytes
        return batch * rows * math.prod(self.shape[:-1]) * self.width * item


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheLayout:
    """All leaves of a step's cache."""

    leaves: tuple[CacheLeaf, ...]

    def __iter__(self) -> Iterator[CacheLeaf]:
        return iter(self.leaves)

    def __len__(self) -> int:
        return len(self.leaves)

    @property
    def states(self) -> bool:
        """Whether some of it is of one size, however many tokens were seen."""
        return any(leaf.growth is Growth.STATE for leaf in self.leaves)

    @property
    def grows(self) -> bool:
        """Whether some of it has a row for each token."""
        return any(leaf.growth in (Growth.FULL, Growth.WINDOW) for leaf in self.leaves)

    @property
    def written(self) -> tuple[int, ...]:
        """Places of the leaves that a step returns; the others stay as they are."""
        return tuple(at for at, leaf in enumerate(self.leaves) if leaf.growth is not Growth.SOURCE)

    @property
    def appended(self) -> tuple[int, ...]:
        """Of these the leaves that grow by rows; states are replaced."""
        return tuple(at for at in self.written if self.leaves[at].growth is not Growth.STATE)

    def narrowed(self, held: str | Mapping[str, str]) -> CacheLayout:
        """With all rows in one dtype of `CacheLeaf.narrowed`, or those of each leaf, by name, in its own; ""
        leaves them as the graph has them.
        """
        of = held.get if isinstance(held, Mapping) else lambda name, default: held
        return CacheLayout(leaves=tuple(leaf.narrowed(of(leaf.name, "")) for leaf in self.leaves))

    def state_bytes(self, batch: int) -> int:
        """Bytes of what is of one size."""
        return sum(leaf.nbytes(1, batch) for leaf in self.leaves if leaf.growth is Growth.STATE)

    def nbytes(self, context: int, batch: int, source: int = 0) -> int:
        """Bytes of the buffers that hold the cache of so many tokens."""
        return sum(leaf.nbytes(leaf.capacity(context, source), batch) for leaf in self.leaves)
