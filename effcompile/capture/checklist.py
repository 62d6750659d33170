"""Flat lists of where a captured graph's facts stand, by which one pass in C compares all objects by
identity, in microseconds.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from itertools import chain, compress, repeat
from operator import attrgetter, call, is_, itemgetter
from typing import Any

import torch
from torch import nn

from effcompile.capture import holders
from effcompile.capture.tensors import Watched
from effcompile.core import torch_compat

#: What tells by a number that it was written to; another class's may answer as it likes.
_TABLES = (dict, OrderedDict)
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
        held = [*self._sources, *self.sized, *self.evaluating]
        self._tables = list({id(table): table for table in held if type(table) in _TABLES}.values())
        others = [type(source) not in _TABLES for source in self._sources]
        self._others = tuple(compress(self._getters, others)), tuple(compress(self._sources, others))
        sizes = map(len, map(call, self._getters, self._sources))
        taken = chain.from_iterable(map(repeat, others, sizes))
        self._of_others = list(compress(self._values, taken))
        self._other_sized = [each for each in self.sized if type(each) not in _TABLES]
        self._other_sizes = list(map(len, self._other_sized))
        self._seen: tuple[bool, list[int]] | None = None

    def unchanged(self) -> bool:
        """Whether every object is the one that it was, and no tensor was changed.

        Tables that were not written to since they were last looked at are not looked into: after a call of
        the model they lie in no cache, and thousands of objects take half a millisecond.
        """
        try:
            seen = self._stamp()
            if seen is None or seen != self._seen:
                if not self._all_hold():
                    return False
                self._seen = seen
            elif not self._others_hold():
                return False
            return (
                not any(self._empty)
                and all(map(is_, map(type, self.modules), self._types))
                and not any(map(_requires_grad, self.frozen))
                and self._watched.unchanged()
                and list(map(holders.contents, self.memory)) == self._contents
            )
        except (KeyError, ValueError, AttributeError, RuntimeError):  # something is gone
            return False

    def _stamp(self) -> tuple[bool, list[int]] | None:
        """What is another one once a table was written to, or the outermost module's mode was; taken before
        they are looked into, as another thread may write meanwhile.
        """
        versions = torch_compat.dict_versions(self._tables)
        return None if versions is None else (self._outermost.training, versions)

    def _others_hold(self) -> bool:
        """Whether what is in no table is the same: items of lists, variables of functions."""
        return (
            all(map(is_, chain.from_iterable(map(call, *self._others)), self._of_others))
            and list(map(len, self._other_sized)) == self._other_sizes
        )

    def _all_hold(self) -> bool:
        return (
            all(map(is_, chain.from_iterable(map(call, self._getters, self._sources)), self._values))
            and list(map(len, self.sized)) == self._sizes
            and (self._outermost.training or not any(map(_training, self.evaluating)))
        )
