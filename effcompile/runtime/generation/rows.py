"""Rows of several requests in one batch over one cache: they join and leave between tokens.

All rows end at the cache's last place, as left-padded rows do, and a mask hides what stands before a row's
first token. So the cache is as long as the longest row, and a row that joins or leaves costs one copy of it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from effcompile.capture.caches import HFCache, fill, held, new_cache_of, seen_by
from effcompile.core.errors import UsageError
from effcompile.ir.cache import Growth
from effcompile.ops.append import append, buffer
from effcompile.runtime.generation.stepper import Stepper


class SharedRows:
    """The batch. `lengths`: tokens of each row that the cache holds, in order.

    What is computed for a row is what it is alone, but for rounding: nothing of one row enters another.
    """

    def __init__(self, stepper: Stepper) -> None:
        """Raises UsageError for a model whose cache holds another's output, too."""
        if stepper.config.is_encoder_decoder:
            raise UsageError(
                "Requests of one batch share a cache of what each has seen itself; an encoder-decoder's "
                "holds the output of its encoder, too."
            )
        self._stepper, self._layout = stepper, stepper.step.layout
        self._cache: HFCache = self.opened()
        self.lengths: list[int] = []

    @property
    def context(self) -> int:
        """Tokens that a row may have."""
        return self._stepper.step.room.context

    def opened(self) -> HFCache:
        """An empty cache of one row that is to join."""
        return new_cache_of(self._stepper.config)

    def read(self, cache: HFCache, tokens: Sequence[int]) -> torch.Tensor:
        """Put more tokens into the cache of one row that is to join; returns the logits (vocabulary) behind
        the last of them.
        """
        past, after = seen_by(cache), seen_by(cache) + len(tokens)
        mask, positions = torch.ones((1, after), dtype=torch.int64), torch.arange(past, after)[None]
        return self._called(torch.tensor([list(tokens)]), mask, positions, cache)[0]

    def begun(self, cache: HFCache, tokens: int) -> HFCache | None:
        """A cache of one row that begins with so many tokens of another's; None of a model that keeps
        windows or states, which forget beginnings.
        """
        if any(leaf.growth is not Growth.FULL for leaf in self._layout):
            return None
        made, room = self.opened(), self._stepper.step.room
        for place, rows in zip(self._layout.written, held(cache, self._layout), strict=True):
            assert rows is not None
            kept, capacity = rows[:, :, :tokens], room.capacity(self._layout.leaves[place])
            fill(
                made,
                self._layout,
                [append(buffer(kept, max(tokens, capacity)), kept, capacity)],
                tokens,
                [place],
            )
        return made

    def clear(self) -> None:
        """No rows, whatever state an error left them in."""
        self._cache, self.lengths = self.opened(), []

    def change(self, keep: Sequence[int], joining: Sequence[HFCache]) -> None:
        """Rows at `keep` stay, in that order; behind them come copies of those of the caches."""
        lengths = [self.lengths[at] for at in keep] + [seen_by(cache) for cache in joining]
        old, new, longest = (
            held(self._cache, self._layout),
            [held(cache, self._layout) for cache in joining],
            max(lengths, default=0),
        )
        self._cache, self.lengths = self.opened(), lengths
        for place in self._layout.written if lengths else ():
            parts = [old[place][at : at + 1] for at in keep] + [each[place] for each in new]  # type: ignore[index]
            fill(self._cache, self._layout, [self._together(place, parts, longest)], longest, [place])
            old[place] = None  # its memory is the next leaf's

    def _together(self, place: int, parts: Sequence[torch.Tensor], longest: int) -> torch.Tensor:
        """A leaf of one row each as one of all, all rows at the end."""
        leaf, first = self._layout.leaves[place], parts[0]
        if leaf.growth is Growth.STATE:
            return torch.cat(list(parts))
        rows = leaf.rows(longest)
        made = first.new_zeros((len(parts), first.shape[1], rows, first.shape[3]))
        for at, part in enumerate(parts):
            count = min(rows, part.shape[2])
            made[at, :, rows - count :] = part[0, :, part.shape[2] - count :]
        capacity = max(rows, self._stepper.step.room.capacity(leaf))
        return append(buffer(made, capacity), made, capacity)

    def next(self, tokens: Sequence[int]) -> torch.Tensor:
        """One more token of each row; returns the logits (rows, vocabulary) behind it."""
        lengths = torch.tensor(self.lengths)[:, None]
        longest = max(self.lengths)
        mask = (torch.arange(longest + 1)[None] >= longest - lengths).to(torch.int64)
        logits = self._called(torch.tensor(tokens)[:, None], mask, lengths, self._cache)
        self.lengths = [length + 1 for length in self.lengths]
        return logits

    def _called(
        self, tokens: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor, cache: HFCache
    ) -> torch.Tensor:
        boundary, place = self._stepper.step.boundary, self._stepper.step.device
        given = {boundary.tokens: tokens, boundary.mask: mask}
        given |= {boundary.positions: positions} if boundary.positions else {}
        given = {name: tensor.to(place) for name, tensor in given.items()}
        logits: torch.Tensor = self._stepper(**given, **{boundary.cache: cache}, logits_to_keep=1).logits
        return logits[:, -1].cpu()  # where tokens are drawn: of all rows at once
