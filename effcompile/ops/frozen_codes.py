"""Frozen weights as codes in groups of 64: what a training step reads of a base that is not trained, and
writes out where it multiplies.

    nf4   w ≈ level · max |w|        16 levels, the quantiles of a normal distribution (Dettmers et al. 2023,
                                     arXiv 2305.14314, appendix E)
    int8  w ≈ code · max |w| / 127   codes −127 … 127

Scales are rounded to bf16 before codes are taken, so that rounding them costs next to nothing. A weight is
one tensor of bytes, the codes of all groups (for nf4 two a byte, the first in the low half) and then their
scales: 4.25 and 8.25 bits an element.

Legend: W of any shape with G · 64 elements, in the order in which they lie; packed (G · bytes + 2 G) of u8.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from effcompile.core.errors import GuardError

__all__ = [
    "FORMS",
    "GROUP",
    "CodedWeight",
    "encode",
    "expand_codes",
    "hold",
    "packed_bytes",
    "passed_bytes",
    "rounding_of",
    "workspace_bytes",
]

GROUP = 64
_SCALE_BYTES = 2
#: Elements that are written at a time, so that what they take in between stays small; on a device each piece
#: is some launches.
_PIECE, _PIECE_ON_DEVICE = 1 << 18, 1 << 24
_LEVELS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023,
    1.0,
)  # fmt: skip
#: Elements by which a weight's rounding is judged.
_SAMPLE = 1 << 16


@dataclass(frozen=True, slots=True)
class CodeForm:
    """Bits of a code, and the largest."""

    bits: int
    most: float

    @property
    def group_bytes(self) -> int:
        """Of the codes of a group."""
        return GROUP * self.bits // 8


#: The forms by name, those with the smaller error first.
FORMS = MappingProxyType({"int8": CodeForm(8, 127.0), "nf4": CodeForm(4, 1.0)})


def packed_bytes(elements: int, form: str) -> int:
    """Bytes of so many elements, a multiple of GROUP."""
    return elements // GROUP * (FORMS[form].group_bytes + _SCALE_BYTES)


def encode(weight: Tensor, form: str) -> Tensor:
    """A weight's codes and scales, on its device."""
    groups, of = weight.detach().reshape(-1, GROUP), FORMS[form]
    packed = weight.new_empty(packed_bytes(weight.numel(), form), dtype=torch.uint8)
    codes, scales = _parts(packed, form)
    for piece in _pieces(groups):
        values = groups[piece].float()
        scale = (values.abs().amax(1) / of.most).to(torch.bfloat16)
        scales[piece] = torch.where(scale > 0, scale, torch.ones_like(scale))
        values = values / scales[piece].float()[:, None]
        codes[piece] = (
            _nf4_codes(values)
            if form == "nf4"
            else values.round_().clamp_(-of.most, of.most).to(torch.int8).view(torch.uint8)
        )
    return packed


def _nf4_codes(values: Tensor) -> Tensor:
    """The nearest levels, two a byte."""
    levels = torch.tensor(_LEVELS, dtype=torch.float32, device=values.device)
    nearest = torch.bucketize(values, (levels[1:] + levels[:-1]) / 2).clamp_(max=15).to(torch.uint8)
    return nearest[:, 0::2] | nearest[:, 1::2] << 4


def _parts(packed: Tensor, form: str) -> tuple[Tensor, Tensor]:
    """(codes (G, bytes) of u8, scales (G) of bf16), which show its memory."""
    size = FORMS[form].group_bytes
    groups = packed.numel() // (size + _SCALE_BYTES)
    return packed[: groups * size].view(groups, size), packed[groups * size :].view(torch.bfloat16)


def _pieces(groups: Tensor) -> Iterator[slice]:
    count, each = len(groups), _piece(groups.device) // GROUP
    return (slice(start, min(start + each, count)) for start in range(0, count, each))


def _piece(device: torch.device) -> int:
    return _PIECE if device.type == "cpu" else _PIECE_ON_DEVICE


@cache
def _pairs(device: torch.device) -> Tensor:
    """Byte → its two levels."""
    levels = torch.tensor(_LEVELS, dtype=torch.float32, device=device)
    return torch.stack([levels.repeat(16), levels.repeat_interleave(16)], 1)


@torch.library.custom_op("effcompile::expand_codes", mutates_args=())
def expand_codes(packed: Tensor, shape: Sequence[int], form: str, dtype: torch.dtype) -> Tensor:
    """The weight that codes stand for, rounded once to `dtype`."""
    out = packed.new_empty(shape, dtype=dtype)
    groups = out.view(-1, GROUP)
    codes, scales = _parts(packed, form)
    most = min(len(groups), _piece(packed.device) // GROUP)
    wide = None if dtype == torch.float32 else packed.new_empty((most, GROUP), dtype=torch.float32)
    for piece in _pieces(groups):
        into = groups[piece] if wide is None else wide[: piece.stop - piece.start]
        scale = scales[piece].float()[:, None]
        if form == "nf4":
            torch.index_select(_pairs(packed.device), 0, codes[piece].flatten().int(), out=into.view(-1, 2))
        else:
            # a product of int8 and fp32 would make a copy of its own
            into.copy_(codes[piece].view(torch.int8))
        into.mul_(scale)
        if wide is not None:
            groups[piece] = into
    return out


@expand_codes.register_fake
def _(packed, shape, form, dtype):  # type: ignore[no-untyped-def]
    return packed.new_empty(shape, dtype=dtype)


def workspace_bytes(name: str, args: Sequence[Any], *, on_device: bool = False) -> int | None:
    """Bytes alive at the highest instant inside `expand_codes`, beyond its inputs and output; None for other
    operators.

    on_device: on one that is not here, for which tensors without data stand.
    """
    if name != "effcompile::expand_codes":
        return None
    packed, shape, form, dtype = args
    piece = min(_PIECE_ON_DEVICE if on_device else _piece(packed.device), math.prod(shape))
    return (2 * piece if form == "nf4" else 0) + 4 * piece * (dtype != torch.float32) + 4 * piece // GROUP


def passed_bytes(elements: int, form: str, dtype: torch.dtype) -> int:
    """What torch's kernels read and write on the way to so many elements, beyond codes and result: indices,
    levels, scaled, rounded.
    """
    on_the_way = (12 if form == "nf4" else 8) * elements
    return on_the_way + (8 * elements if dtype != torch.float32 else 0)


def rounding_of(weights: Sequence[Tensor], form: str) -> float:
    """‖W − Ŵ‖ / ‖W‖ over the first elements of weights; of normal ones where there is none with values to
    look at.
    """
    if not weights:
        return _normal_rounding(form)
    apart = size = 0.0
    for weight in weights:
        some = weight.detach().reshape(-1)[:_SAMPLE].float()
        apart += float(
            (some - expand_codes(encode(some, form), some.shape, form, torch.float32)).square().sum()
        )
        size += float(some.square().sum())
    return math.sqrt(apart / size) if size else 0.0


@cache
def _normal_rounding(form: str) -> float:
    return rounding_of([torch.randn(_SAMPLE, generator=torch.Generator().manual_seed(0))], form)


class CodedWeight(Tensor):
    """A frozen weight that is held as codes alone.

    Whatever reads it gets it written out; nothing can be written to it.

    So a model's own forward, evaluation and generation run with what the planned step multiplies by.
    """

    packed: Tensor
    form: str

    @staticmethod
    def __new__(cls, packed: Tensor, shape: Sequence[int], form: str, dtype: torch.dtype) -> Self:
        made: Self = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=packed.device)
        return made

    def __init__(self, packed: Tensor, shape: Sequence[int], form: str, dtype: torch.dtype) -> None:
        self.packed, self.form = packed, form

    def plain(self) -> Tensor:
        """Written out."""
        made: Tensor = expand_codes(self.packed, tuple(self.shape), self.form, self.dtype)
        return made

    @property
    def data(self) -> Tensor:
        """As of any tensor."""
        found: Tensor = super().data
        return found

    @data.setter
    def data(self, value: Tensor) -> None:
        """Its own values in another dtype, as half() and to() put there.

        Raises GuardError for others: the codes would stay as they are.
        """
        if value.shape != self.shape or not torch.equal(self.plain().to(value.dtype), value):
            raise _written("data", self)
        Tensor.data.__set__(self, value)  # type: ignore[attr-defined]

    def with_codes(self, packed: Tensor) -> CodedWeight:
        """The same with other bytes."""
        return CodedWeight(packed, tuple(self.shape), self.form, self.dtype)

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Any, ...]]:
        return ["packed"], (tuple(self.shape), self.form, self.dtype)

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], meta: tuple[Any, ...], outer_size: object, outer_stride: object
    ) -> CodedWeight:
        return CodedWeight(inner["packed"], *meta)

    def __deepcopy__(self, memo: dict[int, Any]) -> CodedWeight:
        made = self.with_codes(self.packed.clone())
        memo[id(self)] = made = _as_parameter(made) if isinstance(self, nn.Parameter) else made
        return made

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"CodedWeight({tuple(self.shape)}, {self.dtype}, in {self.form})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func in _SAME:
            return args[0].with_codes(_SAME[func](args[0].packed))
        if func is torch.ops.aten.copy_.default and _alike(*args[:2]):
            args[0].packed.copy_(args[1].packed)
            return args[0]
        if func is torch.ops.aten.copy_.default and _has(*args[:2]):
            return args[0]
        _refuse_writes(func, args)
        args, kwargs = pytree.tree_map_only(CodedWeight, CodedWeight.plain, (args, kwargs or {}))
        return func(*args, **kwargs)


#: What makes another tensor of the same codes.
_SAME = {
    torch.ops.aten.detach.default: lambda packed: packed,
    torch.ops.aten.alias.default: lambda packed: packed,
    torch.ops.aten.clone.default: lambda packed: packed.clone(),
}


def _alike(first: object, second: object) -> bool:
    return (
        isinstance(first, CodedWeight)
        and isinstance(second, CodedWeight)
        and (first.shape, first.form) == (second.shape, second.form)
    )


def _has(weight: object, value: Tensor) -> bool:
    """Whether a weight's codes say these values: what DDP's ranks write to it that have the same base."""
    return (
        isinstance(weight, CodedWeight)
        and weight.shape == value.shape
        and torch.equal(weight.plain(), value.to(weight.dtype))
    )


def _refuse_writes(func: Any, args: Sequence[object]) -> None:
    for argument, value in zip(func._schema.arguments, args, strict=False):
        if (
            isinstance(value, CodedWeight)
            and argument.alias_info is not None
            and argument.alias_info.is_write
        ):
            raise _written(func.name(), value)


def _written(how: str, weight: CodedWeight) -> GuardError:
    return GuardError(
        f"{how} would write to a frozen weight that is held in {weight.form}, as the plan of this model "
        "says, and its values are not there to be changed. Load the model anew, and plan it again (--pass "
        "no-frozen holds its weights as given).",
        place="a frozen weight",
        of_model=True,
    )


def _as_parameter(weight: CodedWeight) -> Any:
    return nn.Parameter(weight, requires_grad=False)


def hold(model: nn.Module, name: str, packed: Tensor, form: str) -> None:
    """Put codes in the place of a model's frozen weight, in every module that has it."""
    given = model.get_parameter(name)
    made = _as_parameter(CodedWeight(packed, tuple(given.shape), form, given.dtype))
    for module in model.modules():
        for own, parameter in module._parameters.items():
            if parameter is given:
                module._parameters[own] = made
