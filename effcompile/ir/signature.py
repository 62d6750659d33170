"""What an artifact takes, as data in its plan: whoever opens it without the model refuses the calls that an
Executable would.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from effcompile.ir.returned import Returned
from effcompile.ir.size_guards import holds


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInput:
    """One tensor of a call.

    Attributes:
        name: of the graph's input. `place`: where it stands in a call, as its guard names it:
            `inputs['batch']['mask']`.
        sizes: of its axes, a name where the size is free; equal names are equal sizes.
        rows: its values are at least 0 and below this; 0: they are not looked up.
        values: all of them, row by row, where no others are taken.
        counts: numbers, and how often each is among them.
    """

    name: str
    place: str
    dtype: str
    device: str
    sizes: tuple[int | str, ...]
    rows: int = 0
    values: tuple[int, ...] | None = None
    counts: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """The calls that an artifact holds for.

    Attributes:
        parameters: names of the arguments that can be given by position.
        inputs: the tensors, in the order of the graph.
        fixed: place → value, as text, of what else was given when the plan was made. `left_out`: the same of
            what was not: defaults.
        bounds: name of an axis → its least and greatest size (None: any).
        not_one: sets of axes that may not all be 1.
        example: sizes of the axes when the plan was made.
        guards: what else must hold of the sizes in each call, as Python writes it, in names of axes.
        related: the sizes hang together in ways that are not told here, so that only those of the example are
            known to be right.
        returns: the structure of what a call returns; None: it is not told, and the tensors are returned as
            they come.
    """

    parameters: tuple[str, ...]
    inputs: tuple[TensorInput, ...]
    fixed: Mapping[str, str] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)
    bounds: Mapping[str, tuple[int, int | None]] = field(default_factory=dict)
    not_one: tuple[tuple[str, ...], ...] = ()
    example: Mapping[str, int] = field(default_factory=dict)
    guards: tuple[str, ...] = ()
    related: bool = False
    returns: Returned | None = None

    def sizes(self, shapes: Sequence[tuple[int, ...]]) -> dict[str, int]:
        """Sizes of the free axes of tensors of these shapes."""
        return {
            name: size
            for given, shape in zip(self.inputs, shapes, strict=True)
            for name, size in zip(given.sizes, shape, strict=True)
            if isinstance(name, str)
        }

    def refusal(self, shapes: Sequence[tuple[int, ...]]) -> str | None:
        """Why tensors of these shapes are not taken; None where they are."""
        sizes: dict[str, int] = {}
        for given, shape in zip(self.inputs, shapes, strict=True):
            fits = len(shape) == len(given.sizes)
            for wanted, size in zip(given.sizes, shape, strict=False):
                fits = fits and size == (
                    sizes.setdefault(wanted, size) if isinstance(wanted, str) else wanted
                )
            if not fits:
                return (
                    f"{given.name} is {list(shape)}; the artifact takes "
                    f"[{' × '.join(map(str, given.sizes))}]{_at(sizes)}"
                )
        for name, size in sizes.items():
            low, high = self.bounds.get(name, (1, None))
            if size < max(low, 1) or (high is not None and size > high):
                return f"{name} = {size}; the artifact takes {low} to {'any' if high is None else high}"
        if any(names and all(sizes.get(name) == 1 for name in names) for names in self.not_one):
            return f"the artifact was seen not to be the model at {_at(sizes).removeprefix(' at ')}"
        broken = next((guard for guard in self.guards if not holds(guard, sizes)), None)
        if broken is not None:
            return f"the artifact takes sizes of which {broken} is true, and it is not{_at(sizes)}"
        if self.related and any(sizes[name] != self.example.get(name) for name in sizes):
            return (
                "sizes of this model hang together, so that its artifact takes those of its example "
                f"alone:{_at(self.example)}"
            )
        return None


def _at(sizes: Mapping[str, int]) -> str:
    return f" at {', '.join(f'{name}={size}' for name, size in sizes.items())}" if sizes else ""
