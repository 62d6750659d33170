"""Operators that hold their weights, one after the other as one call (`tape.cpp`): what each kernel is told
is kept for each shape, and no Python runs between them, which takes two to three times as long behind a
product that pushed its code out of the caches.

What lies between two of them has its place in one allocation, or in a result or an input that nothing reads
any more (places.py). Where these places take over a quarter more than the tensors do one by one, they run so:
what a caller gives is there until the end.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from effcompile.core.errors import LoweringError
from effcompile.core.types import Shape
from effcompile.machine.native import library
from effcompile.ops.instruction_sets import ARGUMENT, LINE, POINTER
from effcompile.ops.places import Life, Places, dense_strides, places_for

_SOURCE = Path(__file__).with_name("tape.cpp")
#: How a kernel's arguments are typed, as tape.cpp numbers them.
LINEAR, MLP, ATTENTION, LAYER_NORM, RMS_NORM, GATE, TURN, ADD = range(8)
#: Arguments of a call at the most, and addresses among them.
_ARGUMENTS, _PATCHES = 24, 8
#: Shapes of which something is kept.
_SHAPES = 64
#: Of a shape that was not asked for.
_UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class TapeValue:
    """A tensor that need not be there yet: bytes from the beginning of a memory, and what lies there."""

    memory: int
    offset: int
    shape: Shape
    strides: Shape
    dtype: torch.dtype = torch.float32

    @property
    def dense(self) -> bool:
        """Whether it is of fp32 without gaps."""
        return self.dtype is torch.float32 and not self.has_gaps

    @property
    def has_gaps(self) -> bool:
        steps = zip(self.shape, self.strides, dense_strides(self.shape), strict=True)
        return any(step != dense and size != 1 for size, step, dense in steps)

    @property
    def nbytes(self) -> int:
        """Of one without gaps."""
        return self.dtype.itemsize * math.prod(self.shape)

    def columns(self, start: int, count: int) -> TapeValue:
        """Some of them, as a view."""
        offset = self.offset + self.dtype.itemsize * start * self.strides[-1]
        shape = (*self.shape[:-1], count)
        return TapeValue(self.memory, offset, shape, self.strides, self.dtype)


@dataclass(frozen=True, slots=True)
class Scratch:
    """An address in what a kernel works with."""

    offset: int = 0


class Made:
    """The address of what it makes."""


class Second:
    """That of the second thing that it makes; as a step, that thing."""


#: What a kernel is told: a number, an address of what stays, nothing, or an address that is there later.
Argument = int | TapeValue | Scratch | type[Made] | type[Second] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelTold:
    """A call of a kernel.

    Attributes:
        kind: of those above. function: as ctypes has it. arguments: in the order of tape.cpp.
        number: its one argument that is no integer. shape: of the result, which has no gaps. dtype: of it.
            second: shape of another one, in fp32. scratch: bytes. keeps: what lies at addresses among the
            arguments, beside weights.
    """

    kind: int
    function: Any
    arguments: tuple[Argument, ...]
    shape: Shape
    dtype: torch.dtype = torch.float32
    second: Shape | None = None
    scratch: int = 0
    number: float = 0.0
    keeps: tuple[object, ...] = ()


class HeldOperator(Protocol):
    """An operator with its weights: called as a function of tensors, some of which may be None, or told, for
    the threads and the values that it reads, what its kernel is; None where no kernel takes them.

    `pair`: it makes two things, the first of which is its own, the other a step (Second).
    """

    pair: bool

    @property
    def __call__(self) -> Callable[..., Tensor | tuple[Tensor, Tensor]]: ...

    @property
    def told(self) -> Callable[..., KernelTold | None]: ...


@dataclass(frozen=True, slots=True)
class Columns:
    """Some columns of a value, as a view."""

    start: int
    count: int


@dataclass(frozen=True, slots=True)
class TapeStep:
    """An operator, a view of one value or the second of two, and the numbers of what it reads; None where
    there is none.
    """

    does: HeldOperator | Columns | type[Second]
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


@dataclass(frozen=True, slots=True)
class _Kept:
    """For some shapes of the inputs: the calls, of each result its shape, its dtype and the input whose
    memory it gets, or None, the bytes of the workspace, and inputs that have gaps, of which a dense copy is
    made.
    """

    calls: Any
    count: int
    results: tuple[tuple[Shape, torch.dtype, int | None], ...]
    nbytes: int
    keeps: tuple[object, ...]
    copied: frozenset[int] = frozenset()


class Tape:
    """Steps over values: the inputs, then what each step makes."""

    def __init__(
        self, steps: Sequence[TapeStep], inputs: int, results: Sequence[int], given_up: Sequence[int] = ()
    ) -> None:
        """`inputs`: how many; `results`: numbers of the values that a call returns, of operators; `given_up`:
        inputs that nobody reads afterwards, and whose memory nobody else has.
        """
        self._steps, self._inputs = tuple(steps), inputs
        self._results, self._given_up = tuple(results), frozenset(given_up)
        self._memories = POINTER * (inputs + len(self._results) + 1)
        self._last = self._last_reads()
        self._whole = sum(not isinstance(step.does, Columns | type) for step in self._steps) > 1
        self._kept: dict[object, _Kept | str | None] = {}
        self._parts: dict[TapeStep, Tape] = {}
        self.__name__ = "tape"

    def __deepcopy__(self, memo: object) -> Tape:
        """Itself: nothing in it changes but what is kept."""
        return self

    def __call__(self, *inputs: Tensor) -> Sequence[Tensor]:
        """The results, of inputs that the operators take."""
        threads = torch.get_num_threads()
        key = (threads, *[(each.shape, each.stride(), each.dtype) for each in inputs])
        kept, run = self._kept.get(key, _UNKNOWN), _runner()
        if isinstance(kept, str):
            kept = self._told(key, threads, inputs)
        if kept is None or run is None:
            return self._one_by_one(inputs)
        if kept.copied:
            inputs = tuple(each.contiguous() if at in kept.copied else each for at, each in enumerate(inputs))
        made = [
            torch.empty(shape, dtype=dtype, device="cpu") if at is None else inputs[at].view(shape)
            for shape, dtype, at in kept.results
        ]
        room = torch.empty(kept.nbytes, dtype=torch.uint8, device="cpu")
        addresses = [each.data_ptr() for each in (*inputs, *made)]
        run(kept.calls, kept.count, self._memories(*addresses, -(-room.data_ptr() // LINE) * LINE))
        return made

    def _one_by_one(self, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """Each operator as a tape of its own, where there are several."""
        values: list[Tensor | None] = list(inputs)
        seconds = dict[int | None, Tensor]()
        for number, step in self._numbered():
            if step.does is Second:
                values.append(seconds.pop(step.reads[0]))
            else:
                made, *others = self._made_by(step, [values[at] for at in step.reads if at is not None])
                values.append(made)
                seconds |= dict.fromkeys([number] * len(others), *others)
            for at in {at for at in step.reads if at is not None and self._last[at] == number}:
                values[at] = None
        return [value for at in self._results if (value := values[at]) is not None]

    def _made_by(self, step: TapeStep, given: Sequence[Tensor | None]) -> Sequence[Tensor]:
        does, read = step.does, [each for each in given if each is not None]
        if isinstance(does, Columns):
            return [read[0].narrow(-1, does.start, does.count)]
        assert not isinstance(does, type), "a second thing is made with the first"
        if self._whole:
            return self._alone(step, does)(*read)
        left = iter(read)
        made = does(*(None if at is None else next(left) for at in step.reads))
        return [made] if isinstance(made, Tensor) else made

    def _alone(self, step: TapeStep, does: HeldOperator) -> Tape:
        if step not in self._parts:
            places = accumulate(at is not None for at in step.reads)
            reads = tuple(None if at is None else n - 1 for at, n in zip(step.reads, places, strict=True))
            count = len(reads) - reads.count(None)
            second = [TapeStep(Second, (count,))] * does.pair
            self._parts[step] = Tape(
                [TapeStep(does, reads), *second], count, range(count, count + 1 + does.pair)
            )
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

    def _numbered(self) -> list[tuple[int, TapeStep]]:
        return list(enumerate(self._steps, self._inputs))

    def _told(self, key: object, threads: int, inputs: Sequence[Tensor]) -> _Kept | None:
        if len(self._kept) >= _SHAPES:
            self._kept.clear()
        given = [
            TapeValue(at, 0, tuple(each.shape), each.stride(), each.dtype) for at, each in enumerate(inputs)
        ]
        gaps = frozenset(at for at in self._given_up if given[at].has_gaps)
        kept = None if any(each.is_cuda for each in inputs) else self._laid_out(threads, given)
        if kept is None and gaps:
            filled = [
                replace(each, strides=dense_strides(each.shape)) if at in gaps else each
                for at, each in enumerate(given)
            ]
            kept = self._laid_out(threads, filled)
            kept = kept and replace(kept, copied=gaps)
        self._kept[key] = kept
        return kept

    def _laid_out(self, threads: int, inputs: Sequence[TapeValue]) -> _Kept | None:
        """What the kernels are told for these; None where one of them does not take what it gets, or where
        places take more than the tensors.
        """
        values = list(inputs)
        calls = dict[int, KernelTold]()
        for number, step in self._numbered():
            read = [None if at is None else values[at] for at in step.reads]
            if isinstance(step.does, Columns):
                assert read[0] is not None, "a view is of something"
                values.append(read[0].columns(step.does.start, step.does.count))
                continue
            if isinstance(step.does, type):
                second = calls[read[0].memory].second if read[0] is not None else None
                assert second is not None, "it is of an operator that makes two"
                values.append(TapeValue(number, 0, second, dense_strides(second)))
                continue
            told = step.does.told(threads, *read)
            if told is None or 0 in told.shape:
                return None
            calls[number] = told
            # a memory of its own, by the number of the value: its place is found below
            values.append(TapeValue(number, 0, told.shape, dense_strides(told.shape), told.dtype))
        lives = self._lives(values, calls)
        fixed = self._fixed(lives, [each.dtype for each in values])
        rooms = places_for(lives, fixed, self._inputs + len(self._results))
        if rooms is None:
            return None
        places, nbytes = rooms
        seconds = self._seconds(calls)
        packed = (_Call * len(calls))(
            *(_packed(told, number, seconds.get(number, 0), places) for number, told in calls.items())
        )
        results = tuple(
            (values[at].shape, values[at].dtype, fixed[at] if fixed[at] < self._inputs else None)
            for at in self._results
        )
        keeps = tuple(kept for told in calls.values() for kept in told.keeps)
        return _Kept(packed, len(calls), results, nbytes + LINE, keeps)

    def _seconds(self, calls: dict[int, KernelTold]) -> dict[int, int]:
        """Operator that makes two things → the number of the second; one past all where no step asks for it:
        the kernel writes it all the same, and to no place that is another's.
        """
        asked = {step.reads[0]: number for number, step in self._numbered() if step.does is Second}
        return {
            at: asked.get(at, len(self._last) + at) for at, told in calls.items() if told.second is not None
        }

    def _lives(self, values: Sequence[TapeValue], calls: dict[int, KernelTold]) -> dict[int, Life]:
        """Of what operators make, of their scratch (by a number below 0), and of inputs that are given up."""
        lives = {at: Life(values[at].nbytes, at, self._last[at]) for at in calls}
        lives |= {-at: Life(told.scratch, at, at) for at, told in calls.items() if told.scratch}
        for at, second in self._seconds(calls).items():
            last = self._last[second] if second < len(self._last) else at
            lives[second] = Life(4 * math.prod(calls[at].second or ()), at, last)
        free = [at for at in self._given_up if not values[at].has_gaps]
        return lives | {at: Life(values[at].nbytes, 0, self._last[at]) for at in free}

    def _fixed(self, lives: dict[int, Life], dtypes: Sequence[torch.dtype]) -> dict[int, int]:
        """Input or result → its memory: of a result that of an input of its size and dtype that is given up
        before it is made, or one of its own.
        """
        fixed = {at: at for at in range(self._inputs)}
        free = [at for at in sorted(self._given_up) if at in lives]
        for number, at in enumerate(self._results):
            fitting = (
                each
                for each in free
                if dtypes[each] is dtypes[at]
                and lives[each].nbytes == lives[at].nbytes
                and not lives[each].meets(lives[at])
            )
            fixed[at] = next(fitting, self._inputs + number)
            free = [each for each in free if each != fixed[at]]
        return fixed


def _packed(told: KernelTold, number: int, second: int, places: Places) -> _Call:
    """As tape.cpp reads it."""
    call = _Call(function=ctypes.cast(told.function, POINTER).value, kind=told.kind, number=told.number)
    for at, argument in enumerate(told.arguments):
        if isinstance(argument, int):
            call.arguments[at] = argument
        elif argument is not None:
            memory, offset = _address(argument, number, second, places)
            call.at[call.patches], call.memory[call.patches] = at, memory
            call.offset[call.patches] = offset
            call.patches += 1
    return call


def _address(
    argument: TapeValue | Scratch | type[Made] | type[Second], number: int, second: int, places: Places
) -> tuple[int, int]:
    """Its memory, and bytes from its beginning."""
    if isinstance(argument, TapeValue | Scratch):
        memory, start = places[argument.memory if isinstance(argument, TapeValue) else -number]
        return memory, start + argument.offset
    return places[number if argument is Made else second]
