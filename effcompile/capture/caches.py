"""Hugging Face's caches taken apart into flat tensors.

Layers are told apart by class: those that keep every token, those that keep a window, those of
cross-attention, and those that keep a state of one size. With coded_layers.py and resumed.py, the only file
that knows how transformers holds a cache.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformers
from transformers import cache_utils

from effcompile.capture.coded_layers import HFLayer, hold, layer_class, plain_class
from effcompile.core.errors import GuardError, UsageError
from effcompile.core.types import HFClass, HFConfig, HFModel, Kwargs
from effcompile.core.versions import released
from effcompile.ir.cache import CacheLayout, CacheLeaf, Growth

#: Any of transformers' caches, which have no type of their own.
HFCache = Any
#: (name of a leaf, its new rows) → what is kept of them.
Kept = Callable[[str, torch.Tensor], torch.Tensor]

_WINDOW = (cache_utils.DynamicSlidingWindowLayer,)
_ROWS, _STATES = (cache_utils.CacheLayerMixin,), (layer_class("LinearAttentionCacheLayerMixin"),)
#: What forwards call a cache: transformers from 5.24 on, and before.
CACHE_NAMES = ("cache", "past_key_values", "cache_params")
#: The first transformers whose states are carried.
_STATES_FROM = (5, 22)
#: Under which a cache of states alone keeps how many tokens it has seen.
_COUNT = "_effcompile_seen"
#: What a layer calls its states.
_KINDS = ("conv_states", "recurrent_states")
#: What the leaves of a layer are → its class; the first that fits.
_CLASSES = (
    ({Growth.STATE, Growth.WINDOW}, layer_class("LinearAttentionAndSlidingWindowAttentionLayer")),
    ({Growth.STATE, Growth.FULL}, layer_class("LinearAttentionAndFullAttentionLayer")),
    ({Growth.STATE}, layer_class("LinearAttentionLayer")),
    ({Growth.WINDOW}, cache_utils.DynamicSlidingWindowLayer),
    (set[Growth](), cache_utils.DynamicLayer),
)
#: Layers whose tensors are known; a DummyLayer has none.
_HOLDING = (*(kind for _, kind in _CLASSES), layer_class("DummyLayer"))


def new_cache(model: HFModel) -> HFCache:
    """An empty cache as generate() makes it for this model."""
    return new_cache_of(model.config)


def new_cache_of(config: HFConfig) -> HFCache:
    """The same for a model of this config."""
    own = cache_utils.DynamicCache(config=config.get_text_config(decoder=True))
    return (
        cache_utils.EncoderDecoderCache(own, cache_utils.DynamicCache()) if config.is_encoder_decoder else own
    )


class _Written(cache_utils.DynamicCache):
    """A cache that keeps something else than what is written to it."""

    def __init__(self, config: HFConfig, kept: Kept) -> None:
        super().__init__(config=config)
        self._kept = kept

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = (
            self._kept(f"layers.{layer_idx}.{name}", rows)
            for name, rows in (("keys", key_states), ("values", value_states))
        )
        made: tuple[torch.Tensor, torch.Tensor] = super().update(keys, values, layer_idx, *args, **kwargs)
        return made


def cache_keeping(model: HFModel, kept: Kept) -> HFCache:
    """An empty cache that keeps of keys and values of self-attention what `kept` makes of them: of a leaf's
    name and its new rows.
    """
    own = _Written(model.config.get_text_config(decoder=True), kept)
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


def cache_name(model: HFModel) -> str:
    """What the model's forward calls its cache."""
    taken = inspect.signature(model.forward).parameters
    return next((name for name in CACHE_NAMES if name in taken), "past_key_values")


def left_alone() -> str:
    """What to do with a model whose cache is not carried."""
    version = transformers.__version__
    newer = f" States are carried from transformers {'.'.join(map(str, _STATES_FROM))} on; this is {version}."
    found = released(version)
    return "Let this model generate as it is." + newer * (found is not None and found < _STATES_FROM)


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


def _leaves(part: str, at: int, layer: HFLayer) -> list[CacheLeaf]:
    """Of one layer; none of one that holds nothing."""
    if type(layer) not in _HOLDING or not isinstance(getattr(layer, _KINDS[0], {}), dict):  # before 5.15
        raise UsageError(
            f"Layer {at} of the model keeps a {type(layer).__name__}, which a captured step does not carry "
            "yet: layers that keep keys and values, all or of a window, states, and those of cross-attention "
            f"can be planned. {left_alone()}"
        )
    window = layer.sliding_window - 1 if isinstance(layer, _WINDOW) else 0
    growth = Growth.SOURCE if part == "cross" else Growth.WINDOW if window else Growth.FULL
    found = []
    for name in _names(layer):
        tensor, state = _tensor(layer, name), "." in name
        if tensor is not None:
            found.append(
                CacheLeaf(
                    name=f"{part}.{at}.{name}",
                    layer=at,
                    growth=Growth.STATE if state else growth,
                    shape=tuple(tensor.shape[1:]) if state else (tensor.shape[1], tensor.shape[3]),
                    window=0 if state else window,
                    item_bytes=tensor.element_size(),
                )
            )
    return found


def _names(layer: HFLayer) -> list[str]:
    """Of what a layer may hold: `keys`, `values`, `conv_states.0`, `recurrent_states.0`."""
    states = [] if not isinstance(layer, _STATES) else [*layer.conv_states]
    rows = ["keys", "values"] if isinstance(layer, cache_utils.CacheLayerMixin) else []
    return [*rows, *(f"{kind}.{at}" for at in states for kind in _KINDS)]


def _tensor(layer: HFLayer, name: str) -> torch.Tensor | None:
    """What a layer holds under this name; None where that is nothing yet."""
    kind, _, at = name.partition(".")
    if not at:
        return getattr(layer, kind) if layer.is_initialized else None
    begun: bool = getattr(layer, f"is_{kind}_initialized")[int(at)] and layer.has_previous_state[int(at)]
    return getattr(layer, kind)[int(at)] if begun else None


def put(layer: HFLayer, name: str, tensor: torch.Tensor) -> None:
    """Let a layer hold it."""
    kind, _, at = name.partition(".")
    if getattr(layer, "device", None) is None:
        layer.dtype, layer.device = tensor.dtype, tensor.device
    if not at:
        layer.is_initialized = True
        hold(layer, kind, tensor)
        return
    getattr(layer, kind)[int(at)] = tensor
    getattr(layer, f"is_{kind}_initialized")[int(at)] = layer.has_previous_state[int(at)] = True
    if kind == _KINDS[0]:
        layer.conv_kernel_size[int(at)] = tensor.shape[-1]


@functools.cache
def place_of(name: str) -> tuple[str, int, str]:
    """Where a leaf is: the part of the cache, the layer, and its tensor there."""
    part, at, held = name.split(".", 2)
    return part, int(at), held


def leaves_of(cache: HFCache, layout: CacheLayout) -> list[torch.Tensor]:
    """The tensors of a cache in the layout's order."""
    found = held(cache, layout)
    assert not any(tensor is None for tensor in found)
    return [tensor for tensor in found if tensor is not None]


def check_cache(cache: HFCache, layout: CacheLayout, name: str) -> None:
    """Make sure that a cache can hold a step's leaves. `name`: what the forward calls it.

    Raises:
        GuardError: it is of another kind: static, quantised, offloaded, or of another model.
    """
    parts, place = dict(caches_of(cache)), f"inputs[{name!r}]"
    if any(getattr(part, "offloading", False) for part in parts.values()):
        raise GuardError(
            f"{name} is a {type(cache).__name__} that moves its layers to the host between calls "
            "(offloading); the plan's cache stays where the model is, and was counted there. Leave out "
            f"{name} and cache_implementation, or plan less context.",
            place=place,
        )
    for (part, at), wanted in _kinds(layout).items():
        layers = parts[part].layers if part in parts else None
        found = None if layers is None else layers[at] if at < len(layers) else cache_utils.DynamicLayer()
        if plain_class(found) is not wanted:
            raise GuardError(
                f"{name} is a {type(cache).__name__} whose layer {at} is a {type(found).__name__}; "
                "the plan takes a DynamicCache made with the model's config, which generate() makes by "
                f"itself. Leave out {name} and cache_implementation: the plan's cache has its room "
                "from the start as it is.",
                place=place,
            )
        if isinstance(found, _STATES) and found.record_past:
            raise GuardError(
                f"Layer {at} of {name} records its past, to take tokens back (assisted generation); "
                "a planned step leaves the state behind its last token alone. Generate without an assistant.",
                place=place,
            )


@functools.cache
def _kinds(layout: CacheLayout) -> dict[tuple[str, int], HFClass]:
    """(part, layer) → its class in a cache that generate() makes."""
    grown = dict[tuple[str, int], set[Growth]]()
    for leaf in layout:
        grown.setdefault(place_of(leaf.name)[:2], set()).add(leaf.growth)
    return {
        place: next(kind for needed, kind in _CLASSES if needed <= growths)
        for place, growths in grown.items()
    }


def records(cache: HFCache) -> bool:
    """Whether windows keep what they would drop, until they are told how many of the new tokens stay."""
    return any(getattr(layer, "record_past", False) for _, part in caches_of(cache) for layer in part.layers)


def seen_by(cache: HFCache) -> int:
    """Tokens that a cache has seen; of one that holds states alone, which count none, those of our steps."""
    own = dict(caches_of(cache)).get("layers")
    if own is not None and own.layers and not any(isinstance(each, _ROWS) for each in own.layers):
        begun = any(
            isinstance(each, _STATES) and any(each.has_previous_state.values()) for each in own.layers
        )
        return int(getattr(cache, _COUNT, 0)) if begun else 0
    return int(cache.get_seq_length())


def as_now(cache: HFCache) -> Callable[[], None]:
    """What lets a cache hold the tensors again that it holds now, whatever was written into them since."""
    parts = [each for _, part in caches_of(cache) for each in (part, *part.layers)]
    found = [(each, _copied(vars(each))) for each in parts]

    def again() -> None:
        for each, values in found:
            vars(each).update(_copied(values))

    return again


def _copied(values: Kwargs) -> Kwargs:
    """Attributes, with tables of states as they are now."""
    return {name: dict(value) if type(value) is dict else value for name, value in values.items()}


def held(cache: HFCache, layout: CacheLayout) -> list[torch.Tensor | None]:
    """The tensors of a cache in the layout's order; None where nothing is held yet."""
    parts, found = dict(caches_of(cache)), []
    for leaf in layout:
        part, at, name = place_of(leaf.name)
        layers = parts[part].layers
        found.append(_tensor(layers[at], name) if at < len(layers) else None)
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
    if not layout.grows and new and layout.written[0] in (layout.written if places is None else places):
        setattr(cache, _COUNT, seen_by(cache) + new)
    for place, tensor in zip(layout.written if places is None else places, tensors, strict=True):
        part, at, name = place_of(layout.leaves[place].name)
        layers = parts[part].layers
        while len(layers) <= at:
            layers.append(cache_utils.DynamicLayer())
        layer = layers[at]
        put(layer, name, tensor)
        if isinstance(layer, _WINDOW) and name == "values":
            layer.cumulative_length += new
        if part == "cross":
            cache.is_updated[at] = True
