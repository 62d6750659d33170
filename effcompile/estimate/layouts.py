"""What operators do with memory, remembered by the layouts of their arguments: the blocks of a model are
alike, and so are its forms.

An operator's fake result (shapes, strides, which storage is whose, what is allocated meanwhile) follows from
its plain arguments and the layouts of its tensors. So each combination is run on fake tensors once in a
process; where it comes again, in the next layer or in another form of the step, it is looked up.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
from torch import fx

from effcompile.core.types import Value

#: Constants that stand for themselves in a key, with their type: 1, True and 1.0 are equal.
_CONSTANTS = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
#: Operators on layouts that are remembered: some tens of bytes a piece.
_MOST = 100_000


class StorageLayout(NamedTuple):
    """A tensor without data: a piece of a storage, which is a number."""

    storage: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True, slots=True)
class Known:
    """What an operator returned, its storages numbered from its arguments on; bytes of the new ones; most
    bytes alive at once inside.
    """

    result: object
    nbytes: tuple[int, ...]
    peak: int


class Unlike(Exception):  # noqa: N818  it ends a search, it is no fault
    """Something that no layout describes: a subclass of tensors, a symbol, a module."""


REMEMBERED: dict[object, Known] = {}


def remember(key: object, known: Known) -> None:
    """Keep it for the next time."""
    if len(REMEMBERED) >= _MOST:
        REMEMBERED.clear()
    REMEMBERED[key] = known


def layout(tensor: torch.Tensor, storage: int) -> StorageLayout:
    """Of a plain tensor. Raises Unlike."""
    if (
        tensor.layout != torch.strided
        or tensor.is_conj()
        or tensor.is_neg()
        or type(tensor).__name__ != "FakeTensor"
    ):
        raise Unlike
    shape, stride, offset = tuple(tensor.shape), tuple(tensor.stride()), tensor.storage_offset()
    if any(type(size) is not int for size in (*shape, *stride, offset)):
        raise Unlike
    return StorageLayout(storage, shape, stride, cast(int, offset), tensor.dtype, tensor.device)


def mapped(value: object, change: Callable[[object], object]) -> object:
    """The value with each part of its tuples, lists and dicts changed; named tuples become tuples, which
    getitem reads alike.
    """
    if isinstance(value, StorageLayout):
        return change(value)
    if isinstance(value, tuple):
        return tuple([mapped(part, change) for part in value])
    if isinstance(value, list):
        return [mapped(part, change) for part in value]
    if isinstance(value, dict):
        return {name: mapped(part, change) for name, part in value.items()}
    return change(value)


def settings() -> tuple[object, ...]:
    """What of PyTorch's state decides which kernels an operator is made of."""
    devices = ("cpu", "cuda")
    return (
        torch.get_num_threads(),
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        torch.backends.mkldnn.enabled,
        *((torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in devices),
        torch.backends.cuda.flash_sdp_enabled(),
        torch.backends.cuda.mem_efficient_sdp_enabled(),
        torch.backends.cuda.math_sdp_enabled(),
        torch.backends.cuda.cudnn_sdp_enabled(),
    )


def key_of(
    node: fx.Node, values: Mapping[fx.Node, Value], nbytes: Mapping[int, int], settings: tuple[object, ...]
) -> tuple[object, list[int]]:
    """What a node's result follows from, and the storages of its arguments in the order in which the key
    numbers them. Raises Unlike.
    """
    numbers: dict[int, int] = {}

    def part(value: object) -> object:
        if isinstance(value, fx.Node):
            return part(values[value])
        if isinstance(value, StorageLayout):
            number = numbers.setdefault(value.storage, len(numbers))
            return (number, nbytes[value.storage], *value[1:])
        if isinstance(value, (tuple, list)):
            return (type(value), *[part(each) for each in value])
        if isinstance(value, dict):
            return (dict, *[(name, part(each)) for name, each in value.items()])
        if isinstance(value, slice):
            return (slice, part(value.start), part(value.stop), part(value.step))
        if isinstance(value, _CONSTANTS):
            return (type(value), value)
        raise Unlike

    key = (node.target, part(node.args), part(node.kwargs), settings)
    return key, list(numbers)
