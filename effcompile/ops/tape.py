"""Operators that hold their weights, one after the other as one call (`tape.cpp`): what each kernel is told
is kept for each shape, and no Python runs between them, which takes two to three times as long behind a
product that pushed its code out of the caches.

What lies between two of them has its place in one allocation, or in a result or an input that nothing reads
any more, found greedily by size (Pisarchyk and Lee, "Efficient Memory Management for Deep Neural Net
Inference", 2020, section 5.2). Where these places take more than the tensors do one by one, they run so.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from effcompile.core.errors import LoweringError
from effcompile.core.types import Shape
from effcompile.machine.native import library
from effcompile.ops.instruction_sets import ARGUMENT, LINE, POINTER

_SOURCE = Path(__file__).with_name("tape.cpp")
#: How a kernel's arguments are typed, as tape.cpp numbers them.
LINEAR, MLP, ATTENTION, LAYER_NORM, RMS_NORM, GATE, TURN = range(7)
#: Arguments of a call at the most, and addresses among them.
_ARGUMENTS, _PATCHES = 24, 8
#: Shapes of which something is kept.
_SHAPES = 64


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor that need not be there yet: bytes from the beginning of a memory, and what lies there."""

    memory: int
    offset: int
    shape: Shape
    strides: Shape
    dtype: torch.dtype = torch.float32

    @property
    def dense(self) -> bool:
        """Whether it is of fp32 without gaps."""
        steps = zip(self.shape, self.strides, dense_strides(self.shape), strict=True)
        return self.dtype is torch.float32 and all(step == dense or size == 1 for size, step, dense in steps)

    @property
    def nbytes(self) -> int:
        """Of a dense one."""
        return 4 * math.prod(self.shape)

    def columns(self, start: int, count: int) -> Value:
        """Some of them, as a view."""
        shape, offset = (*self.shape[:-1], count), self.offset + 4 * start * self.strides[-1]
        return Value(self.memory, offset, shape, self.strides, self.dtype)


@dataclass(frozen=True, slots=True)
class Scratch:
    """An address in what a kernel works with."""

    offset: int = 0


class Result:
    """The address of what it makes."""


#: What a kernel is told: a number, an address of what stays, nothing, or an address that is there later.
Argument = int | Value | Scratch | type[Result] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """A call of a kernel.

    Attributes:
        kind: of those above. function: as ctypes has it. arguments: in the order of tape.cpp.
        number: its one argument that is no integer. shape: of the result, dense and in fp32.
        scratch: bytes. keeps: what lies at addresses among the arguments, beside weights.
    """

    kind: int
    function: Any
    arguments: tuple[Argument, ...]
    shape: Shape
    scratch: int = 0
    number: float = 0.0
    keeps: tuple[object, ...] = ()


class Held(Protocol):
    """An operator with its weights: called as a function of tensors, some of which may be None, or told, for
    the threads and the Values that it reads, what its kernel is; None where no kernel takes them.
    """

    @property
    def __call__(self) -> Callable[..., Tensor]: ...

    @property
    def told(self) -> Callable[..., Told | None]: ...


@dataclass(frozen=True, slots=True)
class Columns:
    """Some columns of a value, as a view."""

    start: int
    count: int


@dataclass(frozen=True, slots=True)
class Step:
    """An operator, or a view of one value, and the numbers of what it reads; None where there is none."""

    does: Held | Columns
    reads: tuple[int | None, ...]


class _Call(ctypes.Structure):
    _fields_ = (
        ("function", POINTER),
        ("kind", ARGUMENT),
        ("patches", ARGUMENT),
        *((name, ARGUMENT * _PATCHES) for name in ("at", "memory", "offset")),
        ("arguments", ARGUMENT * _ARGUMENTS),
        ("number", ctypes.c_double),
    )


@functools.cache
def _runner() -> Callable[..., None] | None:
    """What runs a list of calls; None where it cannot be compiled."""
    try:
        run = library(_SOURCE, {}, "generic").tape
    except LoweringError:
        return None
    run.argtypes, run.restype = (POINTER, ARGUMENT, POINTER), None
    made: Callable[..., None] = run
    return made


def dense_strides(shape: Shape) -> Shape:
    """Those of a tensor without gaps, as torch has them."""
    strides, step = list[int](), 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(1, size)
    return tuple(reversed(strides))


@dataclass(frozen=True, slots=True)
class _Kept:
    """For some shapes of the inputs: the calls, of each result its shape and the input whose memory it gets,
    or None, and the bytes of the workspace.
    """

    calls: Any
    count: int
    results: tuple[tuple[Shape, int | None], ...]
    nbytes: int
    keeps: tuple[object, ...]


class Tape:
    """Steps over values: the inputs, then what each step makes."""

    def __init__(
        self, steps: Sequence[Step], inputs: int, results: Sequence[int], given_up: Sequence[int] = ()
    ) -> None:
        """`inputs`: how many; `results`: numbers of the values that a call returns, of operators; `given_up`:
        inputs that nobody reads afterwards, and whose memory nobody else has.
        """
        self._steps, self._inputs = tuple(steps), inputs
        self._results, self._given_up = tuple(results), frozenset(given_up)
        self._memories = POINTER * (inputs + len(self._results) + 1)
        self._last = self._last_reads()
        self._kept: dict[object, _Kept | None] = {}
        self._parts: dict[Step, Tape] = {}
        self.__name__ = "tape"

    def __deepcopy__(self, memo: object) -> Tape:
        """Itself: nothing in it changes but what is kept."""
        return self

    def __call__(self, *inputs: Tensor) -> Sequence[Tensor]:
        """The results, of inputs that the operators take."""
        threads = torch.get_num_threads()
        key = (threads, *[(each.shape, each.stride(), each.dtype) for each in inputs])
        kept = self._kept[key] if key in self._kept else self._told(key, threads, inputs)
        run = _runner()
        if kept is None or run is None:
            return self._one_by_one(inputs)
        made = [torch.empty(shape) if at is None else inputs[at].view(shape) for shape, at in kept.results]
        room = torch.empty(kept.nbytes, dtype=torch.uint8)
        addresses = [each.data_ptr() for each in (*inputs, *made)]
        run(kept.calls, kept.count, self._memories(*addresses, -(-room.data_ptr() // LINE) * LINE))
        return made

    def _one_by_one(self, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """Each operator as a tape of its own, where there are several."""
        values: list[Tensor | None] = list(inputs)
        for number, step in self._numbered():
            values.append(self._made_by(step, [values[at] for at in step.reads if at is not None]))
            for at in {at for at in step.reads if at is not None and self._last[at] == number}:
                values[at] = None
        return [value for at in self._results if (value := values[at]) is not None]

    def _made_by(self, step: Step, read: Sequence[Tensor | None]) -> Tensor:
        given = [each for each in read if each is not None]
        if isinstance(step.does, Columns):
            return given[0].narrow(-1, step.does.start, step.does.count)
        if len(self._steps) > 1:
            return self._alone(step)(*given)[0]
        left = iter(given)
        return step.does(*(None if at is None else next(left) for at in step.reads))

    def _alone(self, step: Step) -> Tape:
        if step not in self._parts:
            places = accumulate(at is not None for at in step.reads)
            reads = tuple(None if at is None else n - 1 for at, n in zip(step.reads, places, strict=True))
            inputs = len(reads) - reads.count(None)
            self._parts[step] = Tape([Step(step.does, reads)], inputs, [inputs])
        return self._parts[step]

    def _last_reads(self) -> list[int]:
        """Of each value the step, by the number of what it makes, that reads it last; results never end."""
        numbers = range(self._inputs + len(self._steps))
        last = [max((n for n, step in self._numbered() if at in step.reads), default=at) for at in numbers]
        for number, step in reversed(self._numbered()):  # a view's source lives as long as the view
            if isinstance(step.does, Columns) and step.reads[0] is not None:
                last[step.reads[0]] = max(last[step.reads[0]], last[number])
        for at in self._results:
            last[at] = len(numbers)
        return last

    def _numbered(self) -> list[tuple[int, Step]]:
        return list(enumerate(self._steps, self._inputs))

    def _told(self, key: object, threads: int, inputs: Sequence[Tensor]) -> _Kept | None:
        if len(self._kept) >= _SHAPES:
            self._kept.clear()
        self._kept[key] = kept = self._laid_out(threads, inputs)
        return kept

    def _laid_out(self, threads: int, inputs: Sequence[Tensor]) -> _Kept | None:
        """What the kernels are told for these; None where one of them does not take what it gets, or where
        places take more than the tensors.
        """
        if any(each.is_cuda for each in inputs):
            return None
        values = [
            Value(at, 0, tuple(each.shape), each.stride(), each.dtype) for at, each in enumerate(inputs)
        ]
        calls = dict[int, Told]()
        for number, step in self._numbered():
            read = [None if at is None else values[at] for at in step.reads]
            if isinstance(step.does, Columns):
                assert read[0] is not None, "a view is of something"
                values.append(read[0].columns(step.does.start, step.does.count))
                continue
            told = step.does.told(threads, *read)
            if told is None or 0 in told.shape:
                return None
            calls[number] = told
            # a memory of its own, by the number of the value: its place is found below
            values.append(Value(number, 0, told.shape, dense_strides(told.shape)))
        lives = self._lives(values, calls)
        fixed = self._fixed(lives)
        rooms = _places(lives, fixed, self._inputs + len(self._results))
        if rooms is None:
            return None
        places, nbytes = rooms
        packed = (_Call * len(calls))(*(_packed(told, number, places) for number, told in calls.items()))
        results = tuple(
            (values[at].shape, fixed[at] if fixed[at] < self._inputs else None) for at in self._results
        )
        keeps = tuple(kept for told in calls.values() for kept in told.keeps)
        return _Kept(packed, len(calls), results, nbytes + LINE, keeps)

    def _lives(self, values: Sequence[Value], calls: dict[int, Told]) -> dict[int, _Life]:
        """Of what operators make, of their scratch (by a number below 0), and of inputs that are given up."""
        lives = {at: _Life(values[at].nbytes, at, self._last[at]) for at in calls}
        lives |= {-at: _Life(told.scratch, at, at) for at, told in calls.items() if told.scratch}
        free = [at for at in self._given_up if values[at].dense]
        return lives | {at: _Life(values[at].nbytes, 0, self._last[at]) for at in free}

    def _fixed(self, lives: dict[int, _Life]) -> dict[int, int]:
        """Input or result → its memory: of a result that of an input of its size that is given up before it
        is made, or one of its own.
        """
        fixed = {at: at for at in range(self._inputs)}
        free = [at for at in sorted(self._given_up) if at in lives]
        for number, at in enumerate(self._results):
            fitting = (
                each
                for each in free
                if lives[each].nbytes == lives[at].nbytes and not lives[each].meets(lives[at])
            )
            fixed[at] = next(fitting, self._inputs + number)
            free = [each for each in free if each != fixed[at]]
        return fixed


@dataclass(frozen=True, slots=True)
class _Life:
    """Bytes that are held from one step to another, both included."""

    nbytes: int
    first: int
    last: int

    @property
    def room(self) -> int:
        return -(-self.nbytes // LINE) * LINE

    def meets(self, other: _Life) -> bool:
        return self.first <= other.last and other.first <= self.last


#: Value, or scratch → its memory, and bytes from its beginning.
_Places = dict[int, tuple[int, int]]


def _places(lives: dict[int, _Life], fixed: dict[int, int], workspace: int) -> tuple[_Places, int] | None:
    """A place for each, and the bytes of the workspace, the memory of that number; None where that takes more
    than the most that lives at a time. The best of what some orders give: the largest first, what is made
    before scratch, as they come.
    """
    own = {fixed[at]: lives[at].nbytes for at in fixed if at in lives}
    others = [at for at in lives if at not in fixed]
    orders = (
        lambda at: -lives[at].nbytes,
        lambda at: (at < 0, -lives[at].nbytes),
        lambda at: lives[at].first,
    )
    found = (_placed(sorted(others, key=order), lives, fixed, own, workspace) for order in orders)
    places, nbytes = min(found, key=lambda each: each[1])
    return (places, nbytes) if nbytes + sum(own.values()) <= _most_at_once(lives.values()) + LINE else None


def _placed(
    order: Sequence[int], lives: dict[int, _Life], fixed: dict[int, int], own: dict[int, int], workspace: int
) -> tuple[_Places, int]:
    """Each in the first memory, the lowest place of it that has room; the workspace, the last, always has."""
    places: _Places = {at: (memory, 0) for at, memory in fixed.items()}
    there: dict[int, list[tuple[int, _Life]]] = {memory: [] for memory in (*own, workspace)}
    for at in fixed.keys() & lives.keys():
        there[fixed[at]].append((0, lives[at]))
    nbytes = 0
    for at in order:
        life = lives[at]
        for memory in there:
            offset = _lowest(life, there[memory])
            if memory == workspace or offset + life.nbytes <= own[memory]:
                break
        places[at] = memory, offset
        there[memory].append((offset, life))
        nbytes = max(nbytes, offset + life.room) if memory == workspace else nbytes
    return places, nbytes


def _lowest(life: _Life, there: Iterable[tuple[int, _Life]]) -> int:
    """The first gap beside those that live at the same time."""
    at = 0
    for offset, other in sorted((each for each in there if each[1].meets(life)), key=lambda each: each[0]):
        if at + life.nbytes <= offset:
            break
        at = max(at, offset + other.room)
    return at


def _most_at_once(lives: Iterable[_Life]) -> int:
    lives = list(lives)
    return max(
        sum(other.nbytes for other in lives if other.first <= life.first <= other.last) for life in lives
    )


def _packed(told: Told, number: int, places: _Places) -> _Call:
    """As tape.cpp reads it."""
    call = _Call(function=ctypes.cast(told.function, POINTER).value, kind=told.kind, number=told.number)
    for at, argument in enumerate(told.arguments):
        if isinstance(argument, int):
            call.arguments[at] = argument
        elif argument is not None:
            if isinstance(argument, Value):
                memory, offset = places[argument.memory]
                offset += argument.offset
            else:
                memory, offset = places[-number if isinstance(argument, Scratch) else number]
                offset += argument.offset if isinstance(argument, Scratch) else 0
            call.at[call.patches], call.memory[call.patches] = at, memory
            call.offset[call.patches] = offset
            call.patches += 1
    return call
