"""Seconds of prompts: which are read again, and what a model itself takes for a long one, of two parts of it.
Only the comparison beside the plan hangs on the latter, and the whole takes longer than all else here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch

from effcompile.capture.caches import HFCache, fill, held, new_cache
from effcompile.core.types import Outputs
from effcompile.ir.cache import CacheLayout, Growth

#: Seconds of a prompt from which on the first call of each counts, too: two are enough.
LONG = 1.0
#: And from which on one call of each will do, where there is nothing to choose between.
_ALONE = 4.0
#: Times as long as the fastest: a call of so much more is not asked again which one it is.
_SLOW = 2.0
#: Parts of a prompt, of which the first and the last are read.
_PARTS = 4
#: Tokens of a part from which on products take as long for each of them as in the whole.
_LEAST = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """`tokens`: that were read. `cache`: as the whole prompt leaves it, but for its numbers."""

    seconds: float
    tokens: int
    cache: HFCache


def seconds_of(call: Callable[[], object]) -> float:
    """Of one call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def of_two_parts(
    read: Callable[[torch.Tensor, HFCache], Outputs], model: object, layout: CacheLayout, ids: torch.Tensor
) -> Sampled | None:
    """Of the whole prompt `ids` [rows × tokens], of what its first and its last quarter take.

    A token takes a constant and what grows with the tokens before it, so that the mean of both is that of
    all. None where the whole is read soon, or its cache does not keep all tokens.
    """
    tokens = ids.shape[1]
    part = tokens // _PARTS
    if part < _LEAST or any(leaf.growth is not Growth.FULL for leaf in layout):
        return None
    cache = new_cache(model)
    first = seconds_of(partial(read, ids[:, :part], cache))
    if first * _PARTS < LONG:
        return None
    before = tokens - part
    rows = [leaf.repeat(1, 1, _PARTS, 1)[:, :, :before] for leaf in held(cache, layout) if leaf is not None]
    fill(cache, layout, rows, before - part, range(len(layout)))
    last = seconds_of(partial(read, ids[:, before:], cache))
    return Sampled(seconds=tokens / part * (first + last) / 2, tokens=2 * part, cache=cache)


def undecided(seconds: Mapping[str, float]) -> list[str]:
    """Those whose prompts are read once more: all but long ones that take twice as long as another, and none
    where both are so long that what else the machine does is in each alike, and there is one beside the
    model.
    """
    if len(seconds) == 2 and min(seconds.values()) > _ALONE:
        return []
    return [name for name, each in seconds.items() if each < max(LONG, _SLOW * min(seconds.values()))]
