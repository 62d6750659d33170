"""A sentence-transformers folder without that package: the transformer, its pooling, and what follows, as its
modules.json says.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from effcompile.core.errors import UsageError
from effcompile.core.files import read_bounded
from effcompile.loader.derive import derive
from effcompile.loader.huggingface import pretrained
from effcompile.loader.loaded import Loaded
from effcompile.loader.source import ModelSource, Reading, config_of
from effcompile.loader.weights import check_safetensors

_KNOWN = ("Transformer", "Pooling", "Dense", "Normalize")
_LEAST = 1e-9


class Embedder(nn.Module):
    """Token ids and mask to one vector for each text."""

    def __init__(self, encoder: nn.Module, after: list[nn.Module]) -> None:
        super().__init__()
        self.encoder, self.after = encoder, nn.ModuleList(after)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        states: Tensor = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        for module in self.after:
            states = module(states, attention_mask) if isinstance(module, Pooling) else module(states)
        return states


class Pooling(nn.Module):
    """From the states of the tokens to one of the text; several ways stand beside each other."""

    WAYS = ("cls_token", "max_tokens", "mean_tokens", "mean_sqrt_len_tokens", "lasttoken")

    def __init__(self, ways: tuple[str, ...]) -> None:
        super().__init__()
        self.ways = ways

    def forward(self, states_BSD: Tensor, mask_BS: Tensor) -> Tensor:  # noqa: N803  shapes: batch, sequence, width
        return torch.cat([self._one(way, states_BSD, mask_BS) for way in self.ways], dim=-1)

    def _one(self, way: str, states_BSD: Tensor, mask_BS: Tensor) -> Tensor:  # noqa: N803
        mask = mask_BS.unsqueeze(-1).to(states_BSD.dtype)
        match way:
            case "cls_token":
                return states_BSD[:, 0]
            case "max_tokens":
                return states_BSD.masked_fill(mask == 0, torch.finfo(states_BSD.dtype).min).amax(dim=1)
            case "lasttoken":
                last = mask_BS.long().sum(dim=1).clamp(min=1) - 1
                return states_BSD[torch.arange(states_BSD.shape[0], device=last.device), last]
        total, count = (states_BSD * mask).sum(dim=1), mask.sum(dim=1).clamp(min=_LEAST)
        return total / (count if way == "mean_tokens" else count.sqrt())


class Normalize(nn.Module):
    """To length one."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.normalize(x, dim=-1)


def load_sentence(source: ModelSource, reading: Reading) -> Loaded:
    """The whole model of a sentence-transformers folder, with inputs derived from its config.

    Raises:
        UsageError: a module of another kind than Transformer, Pooling, Dense and Normalize; weights that
            cannot be read.
    """
    modules = _modules(source.path)
    folders = [source.path / str(module.get("path", "")) for module in modules]
    kinds = [str(module.get("type", "")).rpartition(".")[2] for module in modules]
    unknown = [kind for kind in kinds if kind not in _KNOWN]
    if unknown or not kinds or kinds[0] != "Transformer" or "Pooling" not in kinds:
        raise UsageError(
            f"{str(source.path / 'modules.json')!r} names {', '.join(unknown or kinds) or 'nothing'}; a "
            "Transformer, a Pooling, and Dense or Normalize after it are read here. Build the model in a "
            "model.py of yours."
        )
    encoder, notes = pretrained(folders[0], replace(reading, task="feature-extraction"))
    after = [_module(kind, folder) for kind, folder in zip(kinds[1:], folders[1:], strict=True)]
    made = derive(encoder, reading, str(source.path))
    kwargs = {name: made.kwargs[name] for name in ("input_ids", "attention_mask")}
    model = Embedder(encoder, after).eval()
    return Loaded(
        path=source.path,
        name="Embedder",
        model=model,
        args=(),
        kwargs=kwargs,
        notes=(*made.notes, *notes),
        told=made.told,
    )


def _modules(folder: Path) -> list[dict[str, Any]]:
    try:
        found = json.loads(read_bounded(folder / "modules.json", 1 << 20, "the list of modules"))
        return [dict(module) for module in found]
    except (ValueError, TypeError) as error:
        raise UsageError(
            f"{str(folder / 'modules.json')!r} lists no modules of sentence-transformers. Copy the folder "
            "again."
        ) from error


def _module(kind: str, folder: Path) -> nn.Module:
    match kind:
        case "Pooling":
            return Pooling(_ways(folder))
        case "Dense":
            return _dense(folder)
    return Normalize()


def _ways(folder: Path) -> tuple[str, ...]:
    config = config_of(folder)
    mode = config.get("pooling_mode")
    named = {f"pooling_mode_{way}": way for way in Pooling.WAYS} | {
        "cls": "cls_token",
        "max": "max_tokens",
        "mean": "mean_tokens",
    }
    asked = [f"pooling_mode_{way}" for way in Pooling.WAYS if config.get(f"pooling_mode_{way}")]
    asked = asked or ([mode] if isinstance(mode, str) else list(mode or ()))
    others = [
        key for key, value in config.items() if key.startswith("pooling_mode_") and value and key not in named
    ]
    if others or not asked or any(way not in named for way in asked):
        raise UsageError(
            f"{str(folder / 'config.json')!r}: pooling by "
            f"{', '.join(others or map(str, asked)) or 'nothing'} is not known."
        )
    return tuple(named[way] for way in asked)


def _dense(folder: Path) -> nn.Module:
    config = config_of(folder)
    name = str(config.get("activation_function", "torch.nn.modules.linear.Identity")).rpartition(".")[2]
    activation = {"Tanh": nn.Tanh, "Identity": nn.Identity, "ReLU": nn.ReLU, "GELU": nn.GELU}.get(name)
    if activation is None or not (folder / "model.safetensors").is_file():
        raise UsageError(
            f"The dense layer in {str(folder)!r} cannot be read: activation {name!r}, weights in "
            "model.safetensors."
        )
    check_safetensors(folder / "model.safetensors")
    from safetensors.torch import load_file

    linear = nn.Linear(
        int(config["in_features"]), int(config["out_features"]), bias=bool(config.get("bias", True))
    )
    linear.load_state_dict(
        {key.removeprefix("linear."): value for key, value in load_file(folder / "model.safetensors").items()}
    )
    return nn.Sequential(linear, activation())
