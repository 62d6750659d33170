"""Values of inputs that a model's Python reads, known while it is traced: sizes of images, which tokens are
an image's.

Beside each tensor that follows from integer inputs and constants alone goes what it is at the example.
Operators are traced as ever; only where Python reads a value (`tolist`, `if`), or where a shape depends on
one (`nonzero`, `repeat_interleave`, an index by a mask), the example's takes its place, and the inputs that
it follows from are fixed: calls with other values of them are refused.
"""

from __future__ import annotations

import contextlib
import inspect
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from effcompile.capture.diagnose import depends_on_values, place_here
from effcompile.capture.mends import another_forward
from effcompile.core.errors import CaptureError
from effcompile.core.reasons import Because, Reason
from effcompile.core.torch_compat_export import outside_of_tracing, unchecked_values
from effcompile.core.types import Args, Kwargs, Outputs, Value

#: Said of an input, with the line that reads it.
VALUES_FIXED = "{name}: fixed at the example's values, which the model's Python reads ({name})"
#: The same of how often a token is in a text.
COUNT_FIXED = "{name}: holds {} exactly {} times, as at the example, for sizes follow from it ({name})"

#: Answered from what is known: their result is no tensor.
_READS = frozenset(
    (
        "__bool__",
        "__contains__",
        "__float__",
        "__index__",
        "__int__",
        "allclose",
        "equal",
        "is_nonzero",
        "item",
        "numpy",
        "tolist",
    )
)
#: Their result's shape depends on values.
_SELECTS = frozenset(
    (
        "argwhere",
        "bincount",
        "histc",
        "masked_select",
        "nonzero",
        "one_hot",
        "repeat_interleave",
        "unique",
        "unique_consecutive",
    )
)
#: Made of sizes alone, or of those of another tensor.
_MAKES = frozenset(("arange", "eye", "full", "linspace", "ones", "scalar_tensor", "tensor", "zeros"))
_MAKES_LIKE = frozenset(
    ("full_like", "new_full", "new_ones", "new_tensor", "new_zeros", "ones_like", "zeros_like")
)
#: Parts of names of functions that give something else each time, or nothing that was computed.
_DRAWS = ("rand", "normal", "bernoulli", "multinomial", "dropout", "exponential_", "uniform_", "empty")
#: `x += y` and its like.
_IN_PLACE = frozenset(
    f"__i{name}__"
    for name in (
        "add",
        "and",
        "floordiv",
        "lshift",
        "mod",
        "mul",
        "or",
        "pow",
        "rshift",
        "sub",
        "truediv",
        "xor",
    )
)
_INTEGERS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)


@dataclass(frozen=True, slots=True)
class _Known:
    """What a traced tensor is at the example, and the inputs that it follows from.

    `marks`: the input and the number whose places in it are true here, and nothing else is.
    """

    traced: torch.Tensor
    value: torch.Tensor
    sources: frozenset[str]
    marks: tuple[str, int] | None = None


class Fixed(NamedTuple):
    """What a graph holds for alone, and how it is said.

    Attributes:
        values: inputs, by name, whose values are the example's.
        counts: input → numbers, and how often each is among its values.
    """

    values: frozenset[str] = frozenset()
    counts: Mapping[str, tuple[tuple[int, int], ...]] = MappingProxyType({})
    said: tuple[Reason, ...] = ()


class KnownValues(TorchFunctionMode):
    """Entered around a traced forward whose sizes are all fixed.

    The model's main input and its labels are kept free, for a plan of their values would hold for one text:
    of these how often a number is among them may be fixed, where that is enough.

    Args:
        model: what is traced.
        given: its inputs' names and values, in the order of their leaves.
    """

    def __init__(self, model: nn.Module, given: Sequence[tuple[str, torch.Tensor]]) -> None:
        super().__init__()
        self._model, self._given = type(model).__name__, given
        main = getattr(model, "main_input_name", None)
        self._free = {main if main in dict(given) else given[0][0], "labels"}
        self._read: dict[str, str] = {}
        self._counts: dict[tuple[str, int], tuple[int, str]] = {}
        self._names: dict[int, str] = {}
        self._known: dict[int, _Known] = {}

    def fixed(self) -> Fixed:
        """What the traced graph holds for.

        Raises:
            CaptureError: for one value of an input that is kept free.
        """
        for name in self._read.keys() & self._free:
            raise CaptureError(
                f"{self._model} reads the values of {name} in Python ({self._read[name]}), so that a plan "
                "would hold for these alone."
            )
        counts: dict[str, tuple[tuple[int, int], ...]] = {}
        for (name, number), (times, _) in self._counts.items():
            counts[name] = (*counts.get(name, ()), (number, times))
        said = [Because(VALUES_FIXED, (name, place)) for name, place in self._read.items()]
        said += [
            Because(COUNT_FIXED, (name, number, times, place))
            for (name, number), (times, place) in self._counts.items()
        ]
        return Fixed(frozenset(self._read), counts, tuple(said))

    def know(self, traced: Iterable[torch.Tensor]) -> None:
        """What the integers among the inputs are at the example."""
        with outside_of_tracing():
            for tensor, (name, value) in zip(traced, self._given, strict=True):
                if value.dtype in _INTEGERS:
                    self._names[id(tensor)] = name
                    self._keep(tensor, value.detach().clone(), frozenset((name,)))

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        if name in ("__getitem__", "__setitem__"):
            args = (args[0], self._without_masks(args[1]), *args[2:])
        given = pytree.tree_leaves((args, kwargs))
        tensors = [leaf for leaf in given if isinstance(leaf, torch.Tensor)]
        follows = "out" not in kwargs and self._follows(name, given, tensors)
        found = self._at_example(func, args, kwargs) if follows else None
        if found is None:
            return self._unknown(func, name, args, kwargs)
        return self._answer(partial(func, *args, **kwargs), name, args, found[0], self._sources(tensors))

    def _follows(self, name: str, given: Sequence[object], tensors: Sequence[torch.Tensor]) -> bool:
        """Whether a call's result follows from what is known."""
        if any(draw in name for draw in _DRAWS) or any(isinstance(leaf, _SYMBOLS) for leaf in given):
            return False
        if name in _MAKES_LIKE and tensors and all(type(size) is int for size in tensors[0].shape):
            return all(id(tensor) in self._known for tensor in tensors[1:])
        return all(id(tensor) in self._known for tensor in tensors) if tensors else name in _MAKES

    def _at_example(self, func: Callable[..., Value], args: Args, kwargs: Kwargs) -> tuple[Value] | None:
        """The call's result at the example; None where it cannot be had."""

        def value(leaf: object) -> object:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            known = self._known.get(id(leaf))
            return known.value if known else torch.empty(leaf.shape, dtype=leaf.dtype, device=leaf.device)

        try:
            with outside_of_tracing():
                args, kwargs = pytree.tree_map(value, (args, kwargs))
                return (func(*args, **kwargs),)
        except Exception:
            return None

    def _answer(
        self, call: Callable[[], Value], name: str, args: Args, found: Value, sources: frozenset[str]
    ) -> Value:
        """What the traced forward goes on with after a call that gives `found` at the example."""
        values = pytree.tree_leaves(found)
        if _writes(name):
            self._also_of(args[0], sources)
            return call()
        if not any(isinstance(value, torch.Tensor) for value in values):
            if name not in _READS:
                return call()
            self._note(sources)
            return found
        sized = name in _MAKES and any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(args))
        if sized or name in _SELECTS or (name == "where" and len(args) == 1):
            return self._fixed(found, sources)
        try:
            traced = call()
            fits = _same_shapes(traced, found)
        except Exception:
            fits = False
        if not fits:
            if any(_memory(value) in map(_memory, self._values()) for value in values):
                return call()  # a view, of which a constant would be none
            return self._fixed(found, sources)
        marks = self._marks(name, args)
        for tensor, value in zip(pytree.tree_leaves(traced), values, strict=True):
            if isinstance(tensor, torch.Tensor):
                self._keep(tensor, value, sources, marks)
        return traced

    def _marks(self, name: str, args: Args) -> tuple[str, int] | None:
        """See `_Known.marks`."""
        known = self._known.get(id(args[0])) if args else None
        if known is None:
            return None
        if name in ("__eq__", "eq") and type(args[1]) is int and id(args[0]) in self._names:
            return self._names[id(args[0])], args[1]
        first = name == "__getitem__" and args[1:] == ((..., 0),) and known.value.shape[-1] == 1
        return known.marks if first or name in ("contiguous", "to", "unsqueeze") else None

    def _unknown(self, func: Callable[..., Value], name: str, args: Args, kwargs: Kwargs) -> Value:
        """A call with something that is not known. Sizes that are known tensors become numbers
        (`interpolate(x, size=(height, width))`).
        """
        self._forget_written(name, args, kwargs)
        try:
            return func(*args, **kwargs)
        except Exception as error:
            sizes = [
                leaf
                for leaf in pytree.tree_leaves((args, kwargs))
                if isinstance(leaf, torch.Tensor) and leaf.dim() == 0 and id(leaf) in self._known
            ]
            if not sizes or not depends_on_values(error):
                raise
        self._note(self._sources(sizes))
        with outside_of_tracing():
            numbers = {id(leaf): self._known[id(leaf)].value.item() for leaf in sizes}
        args, kwargs = pytree.tree_map(lambda leaf: numbers.get(id(leaf), leaf), (args, kwargs))
        return func(*args, **kwargs)

    def _without_masks(self, index: object) -> object:
        """An index by masks that are known as one by positions, which has a shape."""
        found: list[object] = []
        parts = index if isinstance(index, tuple) else (index,)
        for part in parts:
            known = self._known.get(id(part))
            if known is None or known.value.dtype is not torch.bool or not known.value.dim():
                found.append(part)
                continue
            if known.marks is not None and not known.sources.isdisjoint(self._free):
                found += self._counted(known, known.marks)
                continue
            with outside_of_tracing():
                positions = known.value.nonzero(as_tuple=True)
            found += self._fixed(positions, known.sources)
        return index if all(map(operator.is_, found, parts)) else tuple(found)

    def _counted(self, known: _Known, marks: tuple[str, int]) -> list[torch.Tensor]:
        """The places where a mask is true, as many as at the example, wherever they are."""
        with outside_of_tracing():
            count = int(known.value.sum())
        self._counts.setdefault(marks, (count, place_here()))
        flat = known.traced.reshape(-1).to(torch.uint8)
        places = torch.argsort(flat, descending=True, stable=True)[:count]
        found: list[torch.Tensor] = []
        for size in reversed(known.value.shape):
            found.insert(0, places % size)
            places = places // size
        return found

    def _fixed(self, found: Value, sources: frozenset[str]) -> Value:
        """Constants in the place of what depends on values."""
        self._note(sources)

        def constant(value: object) -> object:
            if not isinstance(value, torch.Tensor):
                return value
            with outside_of_tracing():
                numbers = value.tolist()
            made = torch.tensor(numbers, dtype=value.dtype, device=value.device).reshape(value.shape)
            self._keep(made, value, sources)
            return made

        return pytree.tree_map(constant, found)

    def _values(self) -> list[torch.Tensor]:
        return [known.value for known in self._known.values()]

    def _sources(self, tensors: Iterable[torch.Tensor]) -> frozenset[str]:
        return frozenset().union(*(self._known[id(t)].sources for t in tensors if id(t) in self._known))

    def _keep(
        self, traced: torch.Tensor, value: torch.Tensor, sources: frozenset[str],
        marks: tuple[str, int] | None = None,
    ) -> None:  # fmt: skip
        self._known[id(traced)] = _Known(traced, value, sources, marks)

    def _note(self, sources: frozenset[str]) -> None:
        for source in sources - self._read.keys():
            self._read[source] = place_here()

    def _also_of(self, written: torch.Tensor, sources: frozenset[str]) -> None:
        """What was written follows from these inputs, too, and all that shares its memory."""
        memory = _memory(self._known[id(written)].value)
        self._known = {
            key: replace(each, sources=each.sources | sources, marks=None)
            if _memory(each.value) == memory
            else each
            for key, each in self._known.items()
        }

    def _forget_written(self, name: str, args: Args, kwargs: Kwargs) -> None:
        """Forget what is written with values that are not known, or seen through a view whose place is not,
        and all that shares its memory.
        """
        given = pytree.tree_leaves((args, kwargs))
        unplaced = any(isinstance(leaf, _SYMBOLS) for leaf in given)
        written = given if unplaced else [kwargs.get("out"), *(args[:1] if _writes(name) else ())]
        memory = {_memory(self._known[id(leaf)].value) for leaf in written if id(leaf) in self._known}
        if memory:
            kept = {key: each for key, each in self._known.items() if _memory(each.value) not in memory}
            self._known = kept


@contextlib.contextmanager
def around_forward(model: nn.Module, known: KnownValues | None) -> Iterator[None]:
    """Have the model's forward run with what is known of its inputs; None: as ever."""
    if known is None:
        yield
        return
    original = model.forward

    def forward(*args: object, **kwargs: object) -> Outputs:
        leaves = (leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))
        known.know(leaves)
        with known, unchecked_values():
            return original(*args, **kwargs)

    with another_forward(model, forward, inspect.signature(original)):
        yield


def _memory(value: object) -> int | None:
    return value.untyped_storage().data_ptr() if isinstance(value, torch.Tensor) else None


def _writes(name: str) -> bool:
    """Whether a function of this name changes its first argument."""
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or name in ("__set__", "__setitem__") or name in _IN_PLACE


def _same_shapes(traced: Value, found: Value) -> bool:
    """Whether the traced result has the example's sizes, and no unknown one."""
    ours, theirs = pytree.tree_leaves(traced), pytree.tree_leaves(found)
    return len(ours) == len(theirs) and all(
        not isinstance(b, torch.Tensor)
        or (all(type(size) is int for size in a.shape) and tuple(a.shape) == tuple(b.shape))
        for a, b in zip(ours, theirs, strict=True)
    )
