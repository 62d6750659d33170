"""A small copy of a model for a proof on this machine: few layers, narrow, as its own class makes it of a
smaller configuration.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from effcompile.core.types import Args, Inputs, Kwargs

#: Layers, heads, width of a head and rows of the vocabulary that are left at the most.
_LAYERS, _HEADS, _HEAD, _VOCABULARY = 2, 4, 16, 199
#: Tokens of an example that are left.
_TOKENS = 32


def shrunk(
    model: nn.Module, args: Args, kwargs: Kwargs, examples: int, *, split: int = 1, layers: int = 1
) -> tuple[nn.Module, Inputs, str]:
    """(small copy, inputs of so many examples, what it is).

    A model without a configuration that can be made smaller stays as it is.

    split: its heads are divided among so many ranks. layers: so many stages need a layer each.
    """
    for small, said in _smaller(model, split, max(_LAYERS, layers)):
        with contextlib.suppress(Exception), torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            made = type(model)(small).train()
            inputs = _inputs(args, kwargs, examples, int(getattr(small, "vocab_size", 0) or 0))
            with torch.no_grad():
                made(*inputs[0], **inputs[1])
            return made, inputs, said
    return model, _inputs(args, kwargs, examples, 0), "the model itself"


def _smaller(model: nn.Module, split: int, most: int) -> Iterator[tuple[Any, str]]:
    """Configurations like the model's, the smallest first."""
    config = getattr(model, "config", None)
    if config is None or not hasattr(config, "num_hidden_layers"):
        return
    few = copy.deepcopy(config)
    _set(few, "num_hidden_layers", min(int(config.num_hidden_layers), most))
    for name in ("num_layers", "num_decoder_layers", "encoder_layers", "decoder_layers"):
        _set(few, name, min(int(getattr(config, name, None) or most), most))
    for name in ("layer_types", "mlp_layer_types"):
        if (kinds := getattr(config, name, None)) is not None:
            _set(few, name, list(kinds)[: few.num_hidden_layers])
    narrow = copy.deepcopy(few)
    heads = int(getattr(config, "num_attention_heads", 0) or 0)
    keys = int(getattr(config, "num_key_value_heads", heads) or heads)
    if heads:
        left = min(heads, max(_HEADS, split))
        _set(narrow, "num_attention_heads", left)
        _set(narrow, "num_key_value_heads", max(split, left * keys // heads))
        _set(narrow, "head_dim", _HEAD)
        _set(narrow, "d_kv", _HEAD)
        _set(narrow, "hidden_size", left * _HEAD)
        for name in ("intermediate_size", "d_ff", "n_inner", "moe_intermediate_size", "ffn_dim"):
            _set(narrow, name, 2 * left * _HEAD)
        _set(narrow, "num_local_experts", 2)
        _set(
            narrow,
            "vocab_size",
            min(int(getattr(config, "vocab_size", _VOCABULARY) or _VOCABULARY), _VOCABULARY),
        )
        for name in ("pad_token_id", "bos_token_id", "eos_token_id", "sep_token_id", "cls_token_id"):
            if isinstance(value := getattr(narrow, name, None), int) and value >= _VOCABULARY:
                _set(narrow, name, 0)
        yield narrow, f"a copy with {narrow.num_hidden_layers} layers of width {left * _HEAD}"
    yield few, f"a copy with {few.num_hidden_layers} layers"


def _set(config: Any, name: str, value: object) -> None:
    """A field that the configuration has."""
    if getattr(config, name, None) is not None:
        with contextlib.suppress(Exception):
            setattr(config, name, value)


def _inputs(args: Args, kwargs: Kwargs, examples: int, vocabulary: int) -> Inputs:
    """The example inputs with so many examples, short, their indices within the vocabulary."""
    leaves = [
        leaf for leaf in pytree.tree_leaves((args, dict(kwargs))) if isinstance(leaf, Tensor) and leaf.dim()
    ]
    batch = max((int(leaf.shape[0]) for leaf in leaves), default=1)

    def small(tensor: Tensor) -> Tensor:
        if not tensor.dim() or tensor.shape[0] != batch:
            return tensor
        if tensor.dim() == 2 and not tensor.is_floating_point():
            tensor = tensor[:, :_TOKENS]
            if vocabulary:
                tensor = torch.where(tensor >= 0, tensor % vocabulary, tensor)
        times = -(-examples // batch)
        return (
            torch.cat([tensor] * times)[:examples].roll(1, -1).contiguous()
            if times > 1
            else tensor[:examples].contiguous()
        )

    found: Inputs = pytree.tree_map_only(Tensor, small, (args, dict(kwargs)))
    return found
