"""Flat lists of where a captured graph's facts stand, by which one pass in C compares all objects by
identity, in microseconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from operator import attrgetter, call, is_, itemgetter
from typing import Any

import torch
from torch import nn

from effcompile.capture import holders
from effcompile.capture.tensors import Watched

_training, _requires_grad = itemgetter("training"), attrgetter("requires_grad")


class Checklist:
    """What is noted first, and then, once it is closed, compared at each call.

    Attributes:
        sized: whose length is to stay.
        tensors: that are not to change, by id.
        memory: whose contents are to stay.
        modules: whose class is to stay.
        frozen: parameters that are not to require a gradient.
        evaluating: attributes of modules that are not to be in training mode unless the outermost one is.
    """

    def __init__(self, outermost: nn.Module) -> None:
        self._outermost = outermost
        self._getters: list[holders.Getter] = []
        self._sources: list[holders.Source] = []
        self._values: list[object] = []
        self._empty: list[Any] = []
        self.sized: list[Any] = []
        self.tensors: dict[int, torch.Tensor] = {}
        self.memory: list[holders.Memory] = []
        self.modules: list[nn.Module] = []
        self.frozen: list[torch.Tensor] = []
        self.evaluating: list[dict[str, Any]] = []

    def watch(self, getter: holders.Getter, source: holders.Source) -> None:
        """What the getter finds there is to be the same objects."""
        self._getters.append(getter)
        self._sources.append(source)
        self._values.extend(getter(source))

    def table(self, table: Mapping[Any, object]) -> None:
        """A dict whose entries are all watched; most are empty."""
        if not table:
            self._empty.append(table)
            return
        self.sized.append(table)
        self.watch(holders.mapped, table)

    def close(self) -> None:
        """Everything is noted: what it is now is what it is to be."""
        self._contents = list(map(holders.contents, self.memory))
        self._sizes = list(map(len, self.sized))
        self._types = list(map(type, self.modules))
        self._watched = Watched(list(self.tensors.values()))

    def unchanged(self) -> bool:
        """Whether every object is the one that it was, and no tensor was changed."""
        try:
            return (
                all(map(is_, chain.from_iterable(map(call, self._getters, self._sources)), self._values))
                and list(map(len, self.sized)) == self._sizes
                and not any(self._empty)
                and all(map(is_, map(type, self.modules), self._types))
                and not any(map(_requires_grad, self.frozen))
                and (self._outermost.training or not any(map(_training, self.evaluating)))
                and self._watched.unchanged()
                and list(map(holders.contents, self.memory)) == self._contents
            )
        except (KeyError, ValueError, AttributeError, RuntimeError):  # something is gone
            return False
