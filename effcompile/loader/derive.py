"""Example inputs of a model that came without any: from its configuration, or from the layer that its inputs
meet first.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from effcompile.core.errors import InputsError
from effcompile.core.reasons import Because, Reason
from effcompile.core.types import Args, Kwargs
from effcompile.loader.images_in_text import image_token, with_image
from effcompile.loader.source import Reading

_TOKENS, _IMAGE, _SAMPLES = 128, 224, 16000
#: Names under which configurations of different families have the same figure.
_LENGTHS = (
    "max_position_embeddings", "n_positions", "block_size", "max_seq_len", "max_seq_length", "context_length",
    "max_target_positions",
)  # fmt: skip
_CHANNELS = ("num_channels", "in_channels", "in_chans", "channels")
_SIZES = ("image_size", "img_size", "sample_size", "input_size")
_CHARACTERS, _FRAMES = 4, 200
#: Features of a frame, where frames come before features.
_SPECTRA = ("input_feat_per_channel", "feature_projection_input_dim")
#: Models with tokens whose labels are one class an example.
_OF_EXAMPLES = ("SequenceClassification", "ImageClassification", "MultipleChoice", "NextSentencePrediction")
#: Models whose labels are boxes, frames or depths: given by nobody but the user.
_OTHER_LABELS = ("ObjectDetection", "AudioFrameClassification", "DepthEstimation")
_GIVE = (
    "Define `inputs` beside `model`: a dict of keyword arguments, a tuple of positional ones, or one tensor"
)


@dataclass(frozen=True, slots=True)
class Derived:
    """Inputs, and what the report says of them."""

    args: Args
    kwargs: Kwargs = field(default_factory=dict)
    notes: tuple[Reason, ...] = ()


def derive(model: nn.Module, reading: Reading, where: str) -> Derived:
    """Random inputs of the model's own vocabulary and sizes; in training with labels, where the forward takes
    some.

    Raises:
        InputsError: neither a configuration nor a first layer tells what the model takes.
    """
    maker = _Maker(model, reading)
    made = maker.diffusion() or maker.by_name() or maker.by_first_layer()
    if made is None:
        raise InputsError(
            f"{where} defines no `inputs`, and neither a configuration nor the first layer of "
            f"{type(model).__name__} tells them. {_GIVE}."
        )
    shapes = ", ".join(
        f"{name} {_described(value)}" for name, value in made.items() if isinstance(value, torch.Tensor)
    )
    text = (
        "inputs were not given, and made from the model's {name}: {name}; random values, so give yours "
        "for true errors"
    )
    note = Because(text, (maker.source, shapes))
    if maker.by_position:
        return Derived(tuple(made.values()), notes=(note,))
    return Derived((), made, (note,))


class _Maker:
    """Makes inputs of one model."""

    def __init__(self, model: nn.Module, reading: Reading) -> None:
        self.model, self.training = model, reading.training
        self.config = _settings(getattr(model, "config", None)) or _settings(
            getattr(model, "pretrained_cfg", None)
        )
        self.parameters = inspect.signature(model.forward).parameters
        self.batch, self.length = reading.shape or (1, 0)
        self.generator = torch.Generator().manual_seed(0)
        self.dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
        self.source, self.by_position = "configuration", False

    # ------------------------------------------------------------ by the names of the forward's arguments

    def by_name(self) -> dict[str, torch.Tensor] | None:
        """Of a model with a configuration: each argument that is known by name and must be there."""
        if not self.config:
            return None
        made: dict[str, torch.Tensor] = {}
        for name in self.parameters:
            value = self._named(name)
            if value is not None:
                made[name] = value
        if {"input_ids", "pixel_values"} <= made.keys() and image_token(self.config) is not None:
            vision = _settings(self.config.get("vision_config"))
            made = with_image(self.model, self.parameters, self.config, vision, made)
        if "MultipleChoice" in type(self.model).__name__:
            made = {name: torch.stack((value, value), 1) for name, value in made.items()}
        if self.training and made:
            made |= self._labels(made)
            made |= self._of_pairs()
        return made or None

    def _named(self, name: str) -> torch.Tensor | None:
        match name:
            case "input_ids" | "idx" | "tokens" if self._vocabulary():
                return self._ids(self._vocabulary())
            case "decoder_input_ids" if self.config.get("is_encoder_decoder"):
                return self._ids(self._vocabulary())
            case "attention_mask" if self._vocabulary() and not self._images_only():
                return torch.ones(self.batch, self._tokens(), dtype=torch.long)
            case "pixel_values":
                return self._images()
            case "input_values" | "input_features" if "pixel_values" not in self.parameters:
                sizes = self._recording(name)
                return None if sizes is None else self._floats(self.batch, *sizes)
        return None

    def _recording(self, name: str) -> tuple[int, ...] | None:
        """Sizes of one recording: samples, those of each channel, or frames of a spectrum."""
        config, samples = self.config, self.length or _SAMPLES
        frames = min(self.length or _FRAMES, config.get("max_source_positions", _FRAMES))
        match name:
            case "input_values" if "frequency_stride" in config:  # a spectrogram cut into patches
                return config["max_length"], config["num_mel_bins"]
            case "input_values" if "audio_channels" in config or "downsampling_ratios" in config:  # codecs
                return config.get("audio_channels", 1), samples
            case "input_values":
                return (samples,)
            case "input_features" if "num_mel_bins" in config:
                return config["num_mel_bins"], 2 * config.get("max_source_positions", 1500)
        width = next((config[each] for each in _SPECTRA if isinstance(config.get(each), int)), None)
        return None if width is None else (frames, width)

    def _labels(self, made: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """What the loss is computed from: token ids of a language model, classes of a classifier."""
        ids = made.get(
            "decoder_input_ids",
            next((made[name] for name in ("input_ids", "idx", "tokens") if name in made), None),
        )
        name = next((name for name in ("labels", "targets", "target") if name in self.parameters), None)
        if name is None:
            spans = [each for each in ("start_positions", "end_positions") if each in self.parameters]
            return dict.fromkeys(spans, torch.arange(self.batch) % self._tokens())
        classes = int(
            self.config.get("num_labels", 0)
            or getattr(getattr(self.model, "config", None), "num_labels", 0)
            or 0
        )
        kind = type(self.model).__name__
        if ids is not None and not any(task in kind for task in _OF_EXAMPLES):
            return {name: ids % classes if "TokenClassification" in kind and classes else ids.clone()}
        shape: tuple[int, ...] = (self.batch,)
        if kind.endswith("ForCTC"):  # a text beside each recording; 0 is the blank
            classes, shape = self._vocabulary() - 1, (self.batch, _CHARACTERS)
        elif "SemanticSegmentation" in kind and "pixel_values" in made:
            shape = (self.batch, *made["pixel_values"].shape[-2:])
        if classes < 1 or kind.endswith(_OTHER_LABELS):
            return {}
        drawn = torch.randint(classes, shape, generator=self.generator)
        return {name: drawn + 1 if kind.endswith("ForCTC") else drawn}

    def _of_pairs(self) -> dict[str, torch.Tensor]:
        """Whether a text's second sentence follows the first: of heads that are trained on that, too."""
        named = [each for each in ("next_sentence_label", "sentence_order_label") if each in self.parameters]
        return {name: torch.randint(2, (self.batch,), generator=self.generator) for name in named}

    # ------------------------------------------------------------ diffusers

    def diffusion(self) -> dict[str, torch.Tensor] | None:
        """Of a UNet or diffusion transformer of diffusers: a noisy sample, its time step, and the text's
        states.
        """
        sample = next((name for name in ("sample", "hidden_states") if name in self.parameters), None)
        if not type(self.model).__module__.startswith("diffusers.") or sample is None:
            return None
        size = self._sizes() or (64, 64)
        made = {sample: self._floats(self.batch, self._channels(), *size)}
        if "timestep" in self.parameters:
            made["timestep"] = torch.full((self.batch,), 500)
        width = self.config.get("cross_attention_dim") or self.config.get("joint_attention_dim")
        if "encoder_hidden_states" in self.parameters and isinstance(width, int):
            made["encoder_hidden_states"] = self._floats(self.batch, 77, width)
        if "class_labels" in self.parameters and isinstance(self.config.get("num_embeds_ada_norm"), int):
            made["class_labels"] = torch.randint(
                self.config["num_embeds_ada_norm"], (self.batch,), generator=self.generator
            )
        return made

    # ------------------------------------------------------------ by the layer that the inputs meet first

    def by_first_layer(self) -> dict[str, torch.Tensor] | None:
        """Of any other model whose forward needs one argument: what its first layer with weights takes."""
        needed = [
            p.name
            for p in self.parameters.values()
            if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        ]
        attention = next((m for m in self.model.modules() if isinstance(m, nn.Transformer)), None)
        if isinstance(self.model, nn.Transformer) or (attention is not None and len(needed) == 2):
            return self._of_transformer(needed)
        if len(needed) > 1 or not (needed or self.parameters):
            return None
        self.by_position = True
        name = needed[0] if needed else next(iter(self.parameters))
        found = next(
            (made for layer in self.model.modules() if (made := self._met_by(layer)) is not None), None
        )
        return None if found is None else {name: found}

    def _of_transformer(self, needed: Sequence[str]) -> dict[str, torch.Tensor] | None:
        transformer = next(m for m in self.model.modules() if isinstance(m, nn.Transformer))
        if not isinstance(self.model, nn.Transformer) or len(needed) != 2:
            return None
        self.source, length = "d_model", self.length or 32
        shape = (self.batch, length) if transformer.batch_first else (length, self.batch)
        return {name: self._floats(*shape, transformer.d_model) for name in needed}

    def _met_by(self, layer: nn.Module) -> torch.Tensor | None:
        """What a layer takes; None where it has no say."""
        match layer:
            case nn.Embedding():
                self.source = "first layer, an embedding"
                return self._ids(layer.num_embeddings)
            case nn.Conv2d():
                self.source = "first layer, a convolution"
                return self._floats(
                    self.batch, layer.in_channels, *(self._sizes() or (self.length or _IMAGE,) * 2)
                )
            case nn.Conv1d():
                self.source = "first layer, a convolution"
                return self._floats(self.batch, layer.in_channels, self.length or _SAMPLES)
            case nn.TransformerEncoderLayer() | nn.MultiheadAttention():
                attention = layer.self_attn if isinstance(layer, nn.TransformerEncoderLayer) else layer
                self.source = "d_model"
                order = (self.batch, self.length or 32)
                return self._floats(*(order if attention.batch_first else order[::-1]), attention.embed_dim)
            case nn.Linear():
                self.source = "first layer, a linear"
                return self._floats(self.batch, *([self.length] * bool(self.length)), layer.in_features)
            case nn.LayerNorm():
                self.source = "first layer, a norm"
                return self._floats(self.batch, self.length or 32, *layer.normalized_shape)
        return None

    # ------------------------------------------------------------ figures

    def _vocabulary(self) -> int:
        found = _settings(self.config.get("text_config")).get("vocab_size") or self.config.get("vocab_size")
        return found if isinstance(found, int) else 0

    def _images_only(self) -> bool:
        return not {"input_ids", "idx", "tokens"} & set(self.parameters)

    def _tokens(self) -> int:
        text = {**self.config, **_settings(self.config.get("text_config"))}
        known = [text[name] for name in _LENGTHS if isinstance(text.get(name), int) and text[name] > 0]
        return self.length or min([_TOKENS, *known])

    def _channels(self) -> int:
        vision = {**self.config, **_settings(self.config.get("vision_config"))}
        size = vision.get("input_size")
        named = next((vision[name] for name in _CHANNELS if isinstance(vision.get(name), int)), 3)
        return int(size[0]) if isinstance(size, (tuple, list)) and len(size) == 3 else named

    def _sizes(self) -> tuple[int, int] | None:
        """Height and width of an image."""
        if self.length:
            return self.length, self.length
        vision = {**self.config, **_settings(self.config.get("vision_config"))}
        owned = {name: getattr(self.model, name, None) for name in _SIZES}
        for size in (*(vision.get(name) for name in _SIZES), *owned.values()):
            if isinstance(size, int):
                return size, size
            if isinstance(size, (tuple, list)) and size and all(isinstance(s, int) for s in size):
                return int(size[-2 % len(size)]), int(size[-1])
        return None

    def _images(self) -> torch.Tensor:
        return self._floats(self.batch, self._channels(), *(self._sizes() or (_IMAGE, _IMAGE)))

    def _ids(self, rows: int) -> torch.Tensor:
        if rows < 1:
            raise InputsError(
                f"{type(self.model).__name__} has a table of {rows} rows to look up in. {_GIVE}."
            )
        return torch.randint(rows, (self.batch, self._tokens()), generator=self.generator)

    def _floats(self, *sizes: int) -> torch.Tensor:
        if math.prod(sizes) > 1 << 31:
            raise InputsError(
                f"The model's settings make an input of {' × '.join(map(str, sizes))} numbers. {_GIVE}."
            )
        return torch.randn(sizes, generator=self.generator).to(self.dtype)


def _settings(value: object) -> dict[str, Any]:
    """A configuration as a mapping, whatever object a library makes of it; {} for none."""
    if isinstance(value, Mapping):
        return dict(value)
    made = getattr(value, "to_dict", None)
    found = made() if callable(made) else getattr(value, "__dict__", {})
    return dict(found) if isinstance(found, Mapping) else {}


def _described(tensor: torch.Tensor) -> str:
    return f"[{' × '.join(map(str, tensor.shape))}] {str(tensor.dtype).removeprefix('torch.')}"
