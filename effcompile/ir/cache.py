"""What a generation step keeps between its calls, as data. Loads without torch.

A step is a graph of inference whose cache enters and leaves by flat tensors: the state that a call finds and
the state that it leaves. A leaf is one such tensor; a layout is all of them, in the order in which they stand
among the step's inputs.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

#: A window's buffer is longer than the window by this part of it.
_SLACK = 8

#: What rows of 32 bits may be held in: bytes of an element, and of a row's scale.
_NARROW = {"bfloat16": (2, 0), "int8": (1, 4)}


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
        item_bytes: of one element.
        row_bytes: that stand behind the elements of a row: its scale.
        held: dtype that rows are held in, where it is not the graph's own.
    """

    name: str
    layer: int
    growth: Growth
    shape: tuple[int, ...]
    window: int = 0
    item_bytes: int = 4
    row_bytes: int = 0
    held: str = ""

    def narrowed(self, dtype: str) -> CacheLeaf:
        """In "bfloat16", or in "int8" with a scale for each row; where it is held in 32 bits and written
        token by token.
        """
        narrow = self.growth in (Growth.FULL, Growth.WINDOW) and self.item_bytes == 4
        item, scale = _NARROW[dtype]
        return replace(self, item_bytes=item, row_bytes=scale, held=dtype) if narrow else self

    @property
    def width(self) -> int:
        """Elements of a row as it is held, its scale among them."""
        return self.shape[-1] + self.row_bytes // self.item_bytes

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
        per_row = math.prod(self.shape) * self.item_bytes + self.row_bytes * math.prod(self.shape[:-1])
        return batch * rows * per_row


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

    def narrowed(self, dtype: str) -> CacheLayout:
        """With its rows in "bfloat16" or "int8"; "" leaves them as the graph has them."""
        return CacheLayout(leaves=tuple(leaf.narrowed(dtype) for leaf in self.leaves)) if dtype else self

    @property
    def narrow(self) -> str:
        """The dtype that rows are held in where it is not the graph's; "" where it is."""
        return next((leaf.held for leaf in self.leaves if leaf.held), "")

    def state_bytes(self, batch: int) -> int:
        """Bytes of what is of one size."""
        return sum(leaf.nbytes(1, batch) for leaf in self.leaves if leaf.growth is Growth.STATE)

    def nbytes(self, context: int, batch: int, source: int = 0) -> int:
        """Bytes of the buffers that hold the cache of so many tokens."""
        return sum(leaf.nbytes(leaf.capacity(context, source), batch) for leaf in self.leaves)
