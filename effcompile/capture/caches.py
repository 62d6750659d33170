"""Hugging Face's caches taken apart into flat tensors, and put together again inside a captured step.

Layers are told apart by class: those that keep every token, those that keep a window, those of
cross-attention, and those that keep a state of one size. The only file that knows how transformers holds a
cache.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import cache_utils

from effcompile.core.errors import GuardError, UsageError
from effcompile.core.types import HFModel
from effcompile.ir.cache import CacheLayout, CacheLeaf, Growth

#: Any of transformers' caches, which have no types of their own.
HFCache = Any
_WINDOW = (cache_utils.DynamicSlidingWindowLayer,)
_STATE = tuple(filter(None, [getattr(cache_utils, "LinearAttentionCacheLayerMixin", None)]))


@dataclass(slots=True)
class Seen:
    """What a step finds: how many tokens are past (a size of the graph), and the leaves in the layout's
    order.
    """

    past: int
    leaves: list[torch.Tensor]


def new_cache(model: HFModel) -> HFCache:
    """An empty cache as generate() makes it for this model."""
    return new_cache_of(model.config)


def new_cache_of(config: Any) -> HFCache:
    """The same for a model of this config."""
    own = cache_utils.DynamicCache(config=config.get_text_config(decoder=True))
    return (
        cache_utils.EncoderDecoderCache(own, cache_utils.DynamicCache()) if config.is_encoder_decoder else own
    )


class _Rounding(cache_utils.DynamicCache):
    """A cache that rounds what is written to it."""

    def __init__(self, config: Any, rounded: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__(config=config)
        self._rounded = rounded

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        made: tuple[torch.Tensor, torch.Tensor] = super().update(
            self._rounded(key_states), self._rounded(value_states), *args, **kwargs
        )
        return made


def rounding_cache(model: HFModel, rounded: Callable[[torch.Tensor], torch.Tensor]) -> HFCache:
    """An empty cache that keeps keys and values of self-attention as they are rounded."""
    own = _Rounding(model.config.get_text_config(decoder=True), rounded)
    return (
        cache_utils.EncoderDecoderCache(own, cache_utils.DynamicCache())
        if model.config.is_encoder_decoder
        else own
    )


def caches_of(cache: HFCache) -> list[tuple[str, HFCache]]:
    """(name, cache) of its parts: one, or those of self- and of cross-attention."""
    if isinstance(cache, cache_utils.EncoderDecoderCache):
        return [("layers", cache.self_attention_cache), ("cross", cache.cross_attention_cache)]
    return [("layers", cache)] if isinstance(cache, cache_utils.Cache) else []


def layout_of(cache: HFCache) -> CacheLayout:
    """The leaves of a filled cache.

    Raises:
        UsageError: a kind of layer that is not known.
    """
    leaves: list[CacheLeaf] = []
    for part, one in caches_of(cache):
        for at, layer in enumerate(one.layers):
            leaves += _leaves(part, at, layer)
    return CacheLayout(leaves=tuple(leaves))


def _leaves(part: str, at: int, layer: Any) -> list[CacheLeaf]:
    """Of one layer; none of one that holds nothing."""
    if not isinstance(layer, cache_utils.DynamicLayer) or isinstance(layer, _STATE):
        raise UsageError(
            f"Layer {at} of the model keeps a {type(layer).__name__}, which a captured step does not carry "
            "yet: layers that keep keys and values, all or of a window, and those of cross-attention can be "
            "planned. Let this model generate as it is."
        )
    if not layer.is_initialized:
        return []
    window = layer.sliding_window - 1 if isinstance(layer, _WINDOW) else 0
    growth = Growth.SOURCE if part == "cross" else Growth.WINDOW if window else Growth.FULL
    held: dict[str, Any] = {"keys": layer.keys, "values": layer.values}
    return [
        CacheLeaf(
            name=f"{part}.{at}.{name}",
            layer=at,
            growth=growth,
            shape=(tensor.shape[1], tensor.shape[3]),
            window=window,
            item_bytes=tensor.element_size(),
        )
        for name, tensor in held.items()
    ]


@functools.cache
def _place(name: str) -> tuple[str, int, str]:
    """Where a leaf is: the part of the cache, the layer, and its tensor there."""
    part, at, held = name.split(".")
    return part, int(at), held


def leaves_of(cache: HFCache, layout: CacheLayout) -> list[torch.Tensor]:
    """The tensors of a cache in the layout's order."""
    parts = dict(caches_of(cache))
    found = []
    for leaf in layout:
        part, at, name = _place(leaf.name)
        found.append(getattr(parts[part].layers[at], name))
    return found


def resumed(layout: CacheLayout, seen: Seen, *, encoded: bool) -> HFCache:
    """A cache as it was after the past tokens, for one call inside a captured step."""
    parts: dict[str, dict[int, Any]] = {"layers": {}, "cross": {}}
    pairs = zip(layout, seen.leaves, strict=True)
    for (keys, first), (_, second) in zip(pairs, pairs, strict=True):
        part = _place(keys.name)[0]
        parts[part][keys.layer] = _resumed_layer(keys, seen.past, first, second)
    own = cache_utils.Cache(layers=_in_order(parts["layers"]))
    if not encoded:
        return own
    return cache_utils.EncoderDecoderCache(own, cache_utils.Cache(layers=_in_order(parts["cross"])))


def _in_order(layers: dict[int, Any]) -> list[Any]:
    return [layers.get(at) or cache_utils.DynamicLayer() for at in range(max(layers, default=-1) + 1)]


def _resumed_layer(leaf: CacheLeaf, past: int, keys: torch.Tensor, values: torch.Tensor) -> Any:
    if leaf.growth is Growth.SOURCE:
        layer = cache_utils.DynamicLayer()
        layer.dtype, layer.device, layer.is_initialized = keys.dtype, keys.device, True
        layer.keys, layer.values = keys, values
        return layer
    return _Resumed(past, keys, values, window=leaf.window)


class _Resumed(cache_utils.CacheLayerMixin):
    """A layer's rows after the past tokens.

    What it is given is appended, and nothing is cut: the caller keeps what it wants of it.
    """

    def __init__(self, past: int, keys: torch.Tensor, values: torch.Tensor, *, window: int) -> None:
        super().__init__()
        self.keys: torch.Tensor = keys
        self.values: torch.Tensor = values
        self.is_initialized = True
        self.is_sliding = bool(window)
        self._length, self._rows = past, keys.shape[2]

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing: it is filled from the start."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._length = self._length + key_states.shape[-2]
        self.keys = torch.cat([self.keys, key_states], dim=-2)
        self.values = torch.cat([self.values, value_states], dim=-2)
        return self.keys, self.values

    def get_mask_sizes(self, query: int | torch.Tensor) -> tuple[int, int]:
        new = query if isinstance(query, int | torch.SymInt) else query.shape[0]  # positions, before 5.6
        return self._rows + new, self._length - self._rows if self.is_sliding else 0

    def get_seq_length(self) -> int:
        return self._length

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length  # its name before transformers 5.15


def check_cache(cache: HFCache, layout: CacheLayout) -> None:
    """Make sure that a cache can hold a step's leaves.

    Raises:
        GuardError: it is of another kind: static, quantised, offloaded, or of another model.
    """
    parts = dict(caches_of(cache))
    if any(getattr(part, "offloading", False) for part in parts.values()):
        raise GuardError(
            f"past_key_values is a {type(cache).__name__} that moves its layers to the host between calls "
            "(offloading); the plan's cache stays where the model is, and was counted there. Leave out "
            "past_key_values and cache_implementation, or plan less context.",
            place="inputs['past_key_values']",
        )
    for leaf in layout:
        part, at, _ = _place(leaf.name)
        layers = parts[part].layers if part in parts else None
        found = None if layers is None else layers[at] if at < len(layers) else cache_utils.DynamicLayer()
        wanted = (
            cache_utils.DynamicSlidingWindowLayer
            if leaf.growth is Growth.WINDOW
            else cache_utils.DynamicLayer
        )
        if type(found) is not wanted:
            raise GuardError(
                f"past_key_values is a {type(cache).__name__} whose layer {at} is a {type(found).__name__}; "
                "the plan takes a DynamicCache made with the model's config, which generate() makes by "
                "itself. Leave out past_key_values and cache_implementation: the plan's cache has its room "
                "from the start as it is.",
                place="inputs['past_key_values']",
            )


def records(cache: HFCache) -> bool:
    """Whether windows keep what they would drop, until they are told how many of the new tokens stay."""
    return any(getattr(layer, "record_past", False) for _, part in caches_of(cache) for layer in part.layers)


def seen_by(cache: HFCache) -> int:
    """Tokens that a cache has seen."""
    return int(cache.get_seq_length())


def held(cache: HFCache, layout: CacheLayout) -> list[torch.Tensor | None]:
    """The tensors of a cache in the layout's order; None where nothing is held yet."""
    parts, found = dict(caches_of(cache)), []
    for leaf in layout:
        part, at, name = _place(leaf.name)
        layers = parts[part].layers
        layer = layers[at] if at < len(layers) else None
        found.append(getattr(layer, name) if layer is not None and layer.is_initialized else None)
    return found


def fill(
    cache: HFCache,
    layout: CacheLayout,
    tensors: Sequence[torch.Tensor],
    new: int,
    places: Sequence[int] | None = None,
) -> None:
    """Put leaves (those that are written, or those at `places`) into a cache, which has seen so many more
    tokens.
    """
    parts = dict(caches_of(cache))
    for place, tensor in zip(layout.written if places is None else places, tensors, strict=True):
        part, at, name = _place(layout.leaves[place].name)
        layers = parts[part].layers
        while len(layers) <= at:
            layers.append(cache_utils.DynamicLayer())
        layer = layers[at]
        if not layer.is_initialized:
            layer.dtype, layer.device, layer.is_initialized = tensor.dtype, tensor.device, True
        setattr(layer, name, tensor)
        if isinstance(layer, _WINDOW) and name == "values":
            layer.cumulative_length += new
        if part == "cross":
            cache.is_updated[at] = True
