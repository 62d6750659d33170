"""Operators over rows of tokens as one call (`row_program.cpp`), for calls of few tokens: a list of steps
over values in slots.

A step is a norm, a gate, a rotation, a linear with codes or in fp32, what follows it, a sum, a product, rows
that are appended to a cache or an attention over one, each by its own kernel. What is computed is what the
kernels compute one by one, to the bit.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

from effcompile.core.errors import LoweringError
from effcompile.machine.native import library
from effcompile.ops import (
    cached_attention,
    few_rows,
    group_codes,
    group_native,
    int8_codes,
    int8_native,
    rows_native,
)
from effcompile.ops.cached_attention import FORMS, mask_strides
from effcompile.ops.instruction_sets import ARGUMENT, POINTER

_SOURCE = Path(__file__).with_name("row_program.cpp")
GROUPS, BYTES, NORM, GATE, TURN, ADD, MULTIPLY, APPEND, ATTEND = range(9)
WIDE, LAYER_NORM, FOLLOW, SCALE, SHIFT = range(9, 14)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowStep:
    """One operator. Slots are numbers of values; -1 where there is none.

    Attributes:
        kind: one of those above.
        a, b, out, more: slots: its inputs (of a rotation x and cos) and its result; the residual sum that a
            norm makes, a rotation's sin. Of an append b is its cache; of an attention b and more are those of
            its keys and values.
        k, n: columns that a linear reads and makes; columns of anything else; half of a head's width and
            heads of a rotation; a head's width and heads of an attention and an append.
        mask: of an attention, -1 where all is seen.
        constants: of a linear the weight, its scales where they stand apart and its bias; a norm's weight and
            bias, or none; what a shift adds to each row, as a bias.
        after: what follows a linear, or what a follower is. eps: of a norm; of an attention its scale; what a
            scaling multiplies with.
    """

    kind: int
    a: int
    out: int
    n: int
    b: int = -1
    more: int = -1
    k: int = 0
    constants: tuple[Tensor | None, ...] = ()
    after: str = "none"
    eps: float = 0.0
    mask: int = -1


class _Step(ctypes.Structure):
    _fields_ = (
        *((name, ARGUMENT) for name in ("kind", "a", "b", "out", "more", "k", "n", "bits", "after")),
        *((name, POINTER) for name in ("call", "weight", "scales", "bias")),
        ("eps", ctypes.c_double),
    )


class _Cache(ctypes.Structure):
    _fields_ = (
        ("at", POINTER),
        *((name, ARGUMENT) for name in ("of_batch", "of_head", "of_row", "heads", "rows", "form")),
    )


class _Mask(ctypes.Structure):
    _fields_ = (("at", POINTER), ("strides", ARGUMENT * 3), ("added", ARGUMENT))


@functools.cache
def _runner() -> Callable[..., None] | None:
    """What runs a list of steps; None where no kernels are compiled."""
    if isinstance(rows_native.kernels(), str):
        return None
    try:
        run = library(_SOURCE, {}, "generic").row_program
    except LoweringError:
        return None
    run.argtypes = (
        POINTER,
        ARGUMENT,
        POINTER,
        ARGUMENT,
        ARGUMENT,
        POINTER,
        ARGUMENT,
        ARGUMENT,
        POINTER,
        POINTER,
    )
    run.restype = None
    made: Callable[..., None] = run
    return made


def available() -> bool:
    """Whether such programs run here, of steps that they have a kernel for."""
    return _runner() is not None


#: Kind of step → where its kernels are, and which of them it calls; the others need none.
_OF_STEPS: Mapping[int, tuple[ModuleType, str]] = {
    GROUPS: (group_native, "call"), BYTES: (int8_native, "call"), WIDE: (few_rows, "call"),
    ATTEND: (cached_attention, "call"), NORM: (rows_native, "norm"), GATE: (rows_native, "gate"),
    TURN: (rows_native, "turn"), LAYER_NORM: (rows_native, "layer_norm"), FOLLOW: (rows_native, "follow"),
}  # fmt: skip


def _kernel(kind: int) -> int | str | None:
    """The address of what a step of this kind calls, None where it calls none; a sentence where that is not
    here. Each is compiled when a program first asks for it: that of one linear needs no attention.
    """
    if kind not in _OF_STEPS:
        return None
    module, name = _OF_STEPS[kind]
    found = module.kernels()
    return found if isinstance(found, str) else ctypes.cast(getattr(found, name), POINTER).value


def has(kind: int) -> bool:
    """Whether a program has a kernel for this kind of step here."""
    return available() and not isinstance(_kernel(kind), str)


class RowProgram:
    """Steps over values of which the first ones are inputs (..., width), dense and in fp32; see
    `__call__`.
    """

    def __init__(
        self, steps: Sequence[RowStep], inputs: int, widths: Sequence[int], results: Sequence[int]
    ) -> None:
        """`inputs`: how many slots are inputs, the first ones; `widths`: of each slot; `results`: slots of
        what a call returns.
        """
        self._steps = (_Step * len(steps))(*map(_packed, steps))
        # whose addresses the steps have
        self._held = [constant for step in steps for constant in step.constants]
        self._inputs, self._widths, self.results = inputs, tuple(widths), tuple(results)
        inner = [slot for slot in range(inputs, len(widths)) if slot not in set(results)]
        self._inner, at = list[tuple[int, int]](), 0
        for slot in inner:
            self._inner.append((slot, at))
            at += widths[slot]
        self._inner_columns = at
        self._scratch = max(
            (64 * math.ceil(step.k / group_codes.GROUP) for step in steps if step.kind in (GROUPS, BYTES)),
            default=0,
        )
        self._slots = POINTER * len(widths)
        self._turned = next((step.b for step in steps if step.kind == TURN), -1)
        self._attentions = {(step.n, step.k, step.b, step.more) for step in steps if step.kind == ATTEND}

    def __call__(
        self, *inputs: Tensor, caches: Sequence[Tensor] = (), masks: Sequence[Tensor] = ()
    ) -> list[Tensor]:
        """The results, (batch, rows, width) each, of inputs whose first axes are those of the first; cos and
        sin may have one batch.

        `caches` (batch, heads, rows, width), in forms of theirs, end with the rows that are appended to them.
        """
        run = _runner()
        assert run is not None
        batch, rows = inputs[0].shape[:2]
        made = [inputs[0].new_empty((batch, rows, self._widths[slot])) for slot in self.results]
        count, threads = batch * rows, torch.get_num_threads()
        attending = self._attending(caches, rows, threads)
        room = torch.empty(
            4 * count * self._inner_columns + max(count * self._scratch, 4 * attending) + 64,
            dtype=torch.uint8,
            device="cpu",
        )
        start = room.data_ptr()
        slots = self._slots(*[each.data_ptr() for each in inputs])
        for slot, at in self._inner:
            slots[slot] = start + 4 * count * at
        for slot, result in zip(self.results, made, strict=True):
            slots[slot] = result.data_ptr()
        of_cos = 0
        if self._turned >= 0:
            cos = inputs[self._turned]
            of_cos = 0 if cos.shape[0] == 1 else rows * cos.shape[2]
        scratch = start + 4 * count * self._inner_columns
        held, hidden = (_Cache * len(caches))(*map(_cache, caches)), (_Mask * len(masks))(*map(_mask, masks))
        run(self._steps, len(self._steps), slots, batch, rows, scratch, threads, of_cos, held, hidden)
        return made

    def _attending(self, caches: Sequence[Tensor], rows: int, threads: int) -> int:
        """Floats of scratch that an attention wants."""
        wanted = (
            cached_attention.scratch_floats(
                held.shape[0] * held.shape[1], heads // held.shape[1] * rows, held.shape[2], width, threads,
                narrow=any(FORMS[each.dtype] for each in (held, caches[of_values])),
            )
            for heads, width, of_keys, of_values in self._attentions
            for held in (caches[of_keys],)
        )  # fmt: skip
        return max(wanted, default=0)


def _cache(rows: Tensor) -> _Cache:
    stride = rows.stride()
    return _Cache(rows.data_ptr(), *stride[:3], rows.shape[1], rows.shape[2], FORMS[rows.dtype])


def _mask(mask: Tensor) -> _Mask:
    strides = (ARGUMENT * 3)(*mask_strides(mask))
    return _Mask(mask.data_ptr(), strides, mask.dtype is torch.float32)


def _packed(step: RowStep) -> _Step:
    """With the addresses of its kernel and constants."""
    call = _kernel(step.kind)
    assert not isinstance(call, str), call
    addresses = [
        None if constant is None else constant.data_ptr()
        for constant in (*step.constants, None, None, None)[:3]
    ]
    bits = (
        group_codes.bits_of(step.constants[0])
        if step.kind == GROUPS and step.constants[0] is not None
        else step.mask
    )
    return _Step(
        kind=step.kind, a=step.a, b=step.b, out=step.out, more=step.more, k=step.k, n=step.n, bits=bits,
        after=_following(step),
        call=call, weight=addresses[0],
        scales=addresses[1], bias=addresses[2], eps=step.eps,
    )  # fmt: skip


def _following(step: RowStep) -> int:
    """What follows, as the step's kernel is told."""
    if step.kind == BYTES:
        weight, scales, bias = step.constants
        assert weight is not None and scales is not None
        return int8_codes.following(step.after, (weight, scales, bias))
    return rows_native.FOLLOWERS.get(step.after, 0)
