"""A cache put together again inside a captured step, of the tensors that caches.py takes it apart into."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import cache_utils

from effcompile.capture.caches import HFCache, place_of, put
from effcompile.capture.coded_layers import HFLayer, layer_class
from effcompile.core.types import HFClass
from effcompile.ir.cache import CacheLayout, Growth


@dataclass(slots=True)
class Seen:
    """What a step finds: how many tokens are past (a size of the graph), and the leaves in the layout's
    order.
    """

    past: int
    leaves: list[torch.Tensor]


def resumed(layout: CacheLayout, seen: Seen, *, encoded: bool) -> HFCache:
    """A cache as it was after the past tokens, for one call inside a captured step."""
    parts: dict[str, dict[int, dict[str, torch.Tensor]]] = {"layers": {}, "cross": {}}
    for leaf, tensor in zip(layout, seen.leaves, strict=True):
        part, at, name = place_of(leaf.name)
        parts[part].setdefault(at, {})[name] = tensor
    windows = {leaf.layer: leaf.window for leaf in layout if leaf.growth is Growth.WINDOW}
    own = ResumedCache(
        layers=_in_order(
            {at: _resumed_layer(seen.past, rows, windows.get(at, 0)) for at, rows in parts["layers"].items()},
            layer_class("DummyLayer") if layout.states else cache_utils.DynamicLayer,
        )
    )
    if not encoded:
        return own
    cross = {at: _read(**rows) for at, rows in parts["cross"].items()}
    return cache_utils.EncoderDecoderCache(
        own, cache_utils.Cache(layers=_in_order(cross, cache_utils.DynamicLayer))
    )


def _in_order(layers: dict[int, HFLayer], empty: HFClass) -> list[HFLayer]:
    return [layers.get(at) or empty() for at in range(max(layers, default=-1) + 1)]


def _read(keys: torch.Tensor, values: torch.Tensor) -> HFLayer:
    """A layer of cross-attention."""
    layer = cache_utils.DynamicLayer()
    layer.dtype, layer.device, layer.is_initialized = keys.dtype, keys.device, True
    layer.keys, layer.values = keys, values
    return layer


def _resumed_layer(past: int, rows: dict[str, torch.Tensor], window: int) -> HFLayer:
    states = {name: tensor for name, tensor in rows.items() if "." in name}
    if not states:
        return _Resumed(past, rows["keys"], rows["values"], window=window)
    if "keys" not in rows:
        return _ResumedStates(states)
    return _ResumedBoth(past, rows["keys"], rows["values"], window, states)


class ResumedCache(cache_utils.Cache):
    """The layers, and which of them took their recurrent states up."""

    def __init__(self, layers: list[HFLayer]) -> None:
        super().__init__(layers=layers)
        self._read: tuple[int, torch.Tensor] | None = None
        self._heads: list[torch.Tensor] = []
        self._taken: set[int] = set()

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """As in transformers: a layer reads it, then runs."""
        state: torch.Tensor | None = super().get_recurrent_state(layer_idx, state_idx)
        self._read, self._heads = None if state is None else (layer_idx, state), []
        return state

    def taken(self, *, by_heads: bool) -> torch.Tensor | None:
        """The state of the layer that runs. `by_heads`: where it has heads, that of the next."""
        if self._read is None:
            return None
        layer, state = self._read
        self._taken.add(layer)
        if not by_heads or state.dim() < 4:
            return state
        self._heads = self._heads or list(state.unbind(1))
        return self._heads.pop(0)

    def convolving(self, whole: object) -> _ResumedStates | None:
        """The layer whose channels, behind those of its state, these are."""
        each = (layer for layer in self.layers if isinstance(layer, _ResumedStates) and layer.convolved)
        return next((layer for layer in each if layer.convolved[0] is whole), None)  # type: ignore[index]

    def left(self) -> list[int]:
        """Layers whose recurrent states nothing took up."""
        return [
            at
            for at, layer in enumerate(self.layers)
            if any(getattr(layer, "is_recurrent_states_initialized", {}).values()) and at not in self._taken
        ]


_Stateful: HFClass = layer_class("LinearAttentionLayer")


class _ResumedStates(_Stateful):  # type: ignore[misc]  # of no type of its own
    """A layer's states after the past tokens: each is replaced, as a graph has no places."""

    def __init__(self, states: dict[str, torch.Tensor]) -> None:
        _Stateful.__init__(self, len({name.partition(".")[2] for name in states}))
        #: What a convolution reads, of which state and new channels it is, and the state's number.
        self.convolved: tuple[torch.Tensor, torch.Tensor, torch.Tensor, int] | None = None
        for name, tensor in states.items():
            put(self, name, tensor)

    def update_conv_state(
        self, conv_states: torch.Tensor, state_idx: int = 0, *args: object, **kwargs: object
    ) -> torch.Tensor:
        before = self.conv_states[state_idx]
        assert before is not None
        whole = torch.cat([before, conv_states], dim=-1)
        # a copy: the whole of a long prompt would be kept behind a view
        self.conv_states[state_idx] = whole[..., -before.shape[-1] :].clone()
        self.convolved = (whole, before, conv_states, state_idx)
        return whole

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, state_idx: int = 0, **kwargs: object
    ) -> torch.Tensor:
        before = self.recurrent_states[state_idx]
        made = recurrent_states if before is None else recurrent_states.to(before.dtype)
        self.recurrent_states[state_idx] = made
        return made


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
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._length = self._length + key_states.shape[-2]
        self.keys = torch.cat([self.keys, key_states], dim=-2)
        self.values = torch.cat([self.values, value_states], dim=-2)
        return self.keys, self.values

    def get_mask_sizes(self, query: int | torch.Tensor) -> tuple[int, int]:
        new = query.shape[0] if isinstance(query, torch.Tensor) else query  # their positions, before 5.6
        return self._rows + new, self._length - self._rows if self.is_sliding else 0

    def get_seq_length(self) -> int:
        return self._length

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length  # its name before 5.15


class _ResumedBoth(_ResumedStates, _Resumed):
    """A layer that has both."""

    def __init__(
        self,
        past: int,
        keys: torch.Tensor,
        values: torch.Tensor,
        window: int,
        states: dict[str, torch.Tensor],
    ) -> None:
        _Resumed.__init__(self, past, keys, values, window=window)
        _ResumedStates.__init__(self, states)
