"""Layers of Hugging Face's caches that hold rows in codes: what a planned step leaves where its cache is held
in 8 or 4 bits.

A planned step reads codes as they are, and everything that moves rows (beams, `crop`, copies) takes them as
other tensors. The model itself computes with them: such a layer gives it numbers at its first `update`, and
is from then on the layer that the model would have made, which a planned step takes, too.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import cache_utils

from effcompile.core.types import HFClass
from effcompile.ops.cache_rows import CODED, as_numbers

#: A layer of transformers, which has no type of its own.
HFLayer = Any


class MissingLayer:
    """Stands for a class of layers that an older transformers has not: no layer is one."""


def layer_class(name: str) -> HFClass:
    """Of transformers' layers with states, which came with 5.6."""
    return getattr(cache_utils, name, MissingLayer)


def _update(
    layer: HFLayer, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
) -> tuple[torch.Tensor, torch.Tensor]:
    """As the layer's own `update`, behind numbers in the place of codes."""
    layer.keys, layer.values = _plain(layer.keys, key_states), _plain(layer.values, value_states)
    layer.dtype, layer.__class__ = key_states.dtype, plain_class(layer)
    made: tuple[torch.Tensor, torch.Tensor] = layer.update(key_states, value_states, *args, **kwargs)
    return made


def _plain(held: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    return (as_numbers(held) if held.dtype in CODED else held).to(new.dtype)


class CodedLayer(cache_utils.DynamicLayer):
    """Of all tokens."""

    update = _update


class CodedWindowLayer(cache_utils.DynamicSlidingWindowLayer):
    """Of the last ones."""

    update = _update


class CodedHybridLayer(layer_class("LinearAttentionAndFullAttentionLayer")):  # type: ignore[misc]
    """Of all tokens, beside states."""

    update = _update


class CodedWindowHybridLayer(layer_class("LinearAttentionAndSlidingWindowAttentionLayer")):  # type: ignore[misc]
    """Of the last ones, beside states."""

    update = _update


#: Each with the class of which it is; one base alone, for a layer changes its class.
_PLAIN: dict[HFClass, HFClass] = {
    kind: kind.__base__ for kind in (CodedLayer, CodedWindowLayer, CodedHybridLayer, CodedWindowHybridLayer)
}
_CODED = {plain: kind for kind, plain in _PLAIN.items()}


def plain_class(layer: HFLayer) -> HFClass:
    """The class of a layer, whatever it holds its rows in."""
    return _PLAIN.get(type(layer), type(layer))


def hold(layer: HFLayer, name: str, rows: torch.Tensor) -> None:
    """Let a layer hold rows, numbers or codes, as its `keys` or its `values`."""
    setattr(layer, name, rows)
    if rows.dtype in CODED:
        layer.__class__ = _CODED.get(type(layer), type(layer))
