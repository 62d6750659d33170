"""Methods by type take the nearest class, and keep no object whose method they were."""

from __future__ import annotations

import gc
import weakref

from effcompile.core.dispatch import method_by_type


class Reader:
    seen = "any"

    @method_by_type
    def read(self, value: object, more: str = "") -> str:
        return f"{self.seen}{more}"

    @read.register
    def _(self, value: int, more: str = "") -> str:
        return f"int{more}"

    @read.register
    def _(self, value: list | tuple, more: str = "") -> str:  # type: ignore[type-arg] # dispatches on it
        return f"{len(value)} {self.read(value[0], more=more)}"


def test_the_nearest_class_reads() -> None:
    reader = Reader()
    assert reader.read(2.0) == "any"
    assert reader.read(True, more="!") == "int!"
    assert reader.read(([1],), more="?") == "1 1 int?"


def test_no_object_is_kept() -> None:
    reader = Reader()
    assert reader.read([1]) == "1 int"
    gone = weakref.ref(reader)
    del reader
    gc.collect()
    assert gone() is None
