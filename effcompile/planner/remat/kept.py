"""Fronts of blocks kept between plans: how each option holds its values.

Figures are computed anew when a front is read.

A block is known by the hash of its problem, figures and all: a block whose operators were measured anew is
another one.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import msgspec
import z3

from effcompile.core.errors import EffcompileError
from effcompile.core.files import cache_folder, read_kept, write_kept
from effcompile.planner.remat.problem import BlockOption, BlockProblem
from effcompile.planner.remat.simulate import option

#: Fronts in the file, bytes of it, options of one: more is none of ours.
_MOST, _MOST_BYTES, _MOST_OPTIONS = 2_000, 32 << 20, 1_000
#: More no search takes, nor is given.
_Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e6)]
#: Fronts by what they are kept under, in JSON: a plan reads a few of thousands.
Kept = dict[str, msgspec.Raw]


class KeptFront(msgspec.Struct, kw_only=True, frozen=True):
    """A front as it is kept.

    Attributes:
        given: seconds that the search had. seconds: that it took.
        found, complete, proven: as in BlockFront.
        kept: option → the values it keeps, by their number in the problem. forms: option → value → the form
            it is held in.
    """

    given: _Seconds
    seconds: _Seconds
    found: Annotated[int, msgspec.Meta(ge=1, le=1 << 40)]
    complete: bool
    proven: bool
    kept: list[list[int]]
    forms: list[dict[int, str]]

    def options(self, problem: BlockProblem) -> tuple[BlockOption, ...] | None:
        """The options, simulated; None where they are not options of this block."""
        names = list(problem.nbytes)
        if not 0 < len(self.kept) == len(self.forms) <= _MOST_OPTIONS:
            return None
        made = []
        for kept, forms in zip(self.kept, self.forms, strict=True):
            if not all(0 <= v < len(names) for v in (*kept, *forms)):
                return None
            others = {names[v]: form for v, form in forms.items()}
            if not all(
                form in {f.name for f in problem.forms.get(name, ())} for name, form in others.items()
            ):
                return None
            if not others.keys().isdisjoint({*problem.forced, *(names[v] for v in kept)}):
                return None
            made.append(option(problem, (names[v] for v in kept), others))
        return tuple(o for o in made if o is not None) if all(made) else None


def hashed(problem: BlockProblem, points: int) -> str:
    """What a front is kept under: the same in every process."""
    told = points, sorted(problem.forced), replace(problem, forced=frozenset())
    return hashlib.sha256(repr(told).encode()).hexdigest()


def values_of(
    options: tuple[BlockOption, ...], problem: BlockProblem
) -> tuple[list[list[int]], list[dict[int, str]]]:
    """(`kept`, `forms`) of options."""
    number = {name: i for i, name in enumerate(problem.nbytes)}
    kept = [sorted(number[name] for name in o.kept) for o in options]
    return kept, [{number[name]: form for name, form in o.forms.items()} for o in options]


def path() -> Path:
    """The file of this solver's fronts."""
    return cache_folder() / f"fronts-1-z3-{z3.get_version_string()}.json"


def read(file: Path) -> Kept:
    """The fronts of a file, each of them not decoded before it is asked for; none where there is none, or it
    is not ours.
    """
    try:
        return dict(msgspec.json.decode(read_kept(file, _MOST_BYTES, "the fronts of blocks"), type=Kept))
    except (EffcompileError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return {}


def decoded(front: msgspec.Raw) -> KeptFront | None:
    """A front of a file; None where it is none."""
    try:
        return msgspec.json.decode(front, type=KeptFront)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def write(file: Path, fronts: Mapping[str, KeptFront]) -> Kept:
    """Keep the fronts beside those that others kept meanwhile, and give all; where nothing can be written,
    the next plan searches again.
    """
    every = {**read(file), **{key: msgspec.Raw(msgspec.json.encode(front)) for key, front in fronts.items()}}
    every = dict(list(every.items())[-_MOST:])
    with contextlib.suppress(EffcompileError, OSError):
        write_kept(file, msgspec.json.encode(every))
    return every
