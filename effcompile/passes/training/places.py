"""Places of a model whose weights are gathered, and whose gradients are handed on, in one launch each."""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx

from effcompile.ir.program import module_path

#: So many times the bytes of a launch are at least those of what goes with it: one costs as much as some tens
#: of kilobytes.
_MUCH = 8


def place_of(node: fx.Node) -> str:
    """The repeated module that a node is of ("model.layers.3"), else its own module."""
    parts = module_path(node).split(".")
    at = next((i for i, part in enumerate(parts) if part.isdigit()), len(parts) - 1)
    return ".".join(parts[: at + 1])


def is_repeated(place: str) -> bool:
    """Whether a place is one of a list of modules."""
    return place.rpartition(".")[2].isdigit()


def neighbours(sizes: Mapping[str, int], *, waiting: bool = False) -> list[list[str]]:
    """Places with their bytes, in order → those of each launch: of two that follow each other outside of
    repeated modules the much smaller one goes with the larger; where `waiting`, the smaller may come before
    repeated modules and the larger after them.
    """
    found: list[list[str]] = []
    last: list[str] = []  # outside of repeated modules
    largest = 0
    for place, nbytes in sizes.items():
        if is_repeated(place):
            found.append([place])
            continue
        beside = bool(found) and found[-1] is last
        if (beside and _MUCH * nbytes <= largest) or ((beside or waiting) and _MUCH * largest <= nbytes):
            found = [launch for launch in found if launch is not last]
            last, largest = [*last, place], max(nbytes, largest)
        else:
            last, largest = [place], nbytes
        found.append(last)
    return found
