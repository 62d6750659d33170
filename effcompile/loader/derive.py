"""Example inputs of a model that came without any: from its configuration, or from the layer that its inputs
meet first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from effcompile.core.errors import InputsError
from effcompile.core.reasons import Because, Reason
from effcompile.core.types import Args, Kwargs, Value
from effcompile.loader.beside import beside, with_end
from effcompile.loader.diffusion import diffusion
from effcompile.loader.figures import GIVE, TEXTS, ModelSizes, settings
from effcompile.loader.images_in_text import image_token, with_image
from effcompile.loader.labels import labels, left_out
from effcompile.loader.pictures import IMAGE, boxes, flattened_patches, images, masked_patches
from effcompile.loader.recordings import SAMPLES, recording
from effcompile.loader.series import series
from effcompile.loader.source import Reading

_AUDIO = ("input_values", "input_features")


@dataclass(frozen=True, slots=True)
class Derived:
    """Inputs, and what the report says of them.

    Attributes:
        told: how each was made, its sizes, type and range, and how to give others; for an error that they
            meet. '' where the user gave them.
    """

    args: Args
    kwargs: Kwargs = field(default_factory=dict)
    notes: tuple[Reason, ...] = ()
    told: str = ""


def derive(model: nn.Module, reading: Reading, where: str) -> Derived:
    """Random inputs of the model's own vocabulary and sizes; in training with labels, where the forward takes
    some.

    Raises:
        InputsError: neither a configuration nor a first layer tells what the model takes, or not all that its
            forward needs.
    """
    maker = _Maker(model, reading)
    made = diffusion(maker) or maker.by_name() or maker.by_first_layer()
    if made is None:
        raise InputsError(
            f"{where} defines no `inputs`, and neither a configuration nor the first layer of "
            f"{type(model).__name__} tells them. {GIVE}."
        )
    if not maker.by_position:
        maker.check_complete(made, where)
    tensors = dict(_tensors(made))
    shapes = ", ".join(f"{name} {_described(value)}" for name, value in tensors.items())
    text = (
        "inputs were not given, and made from the model's {name}: {name}; random values, so give yours "
        "for true errors"
    )
    notes = [Because(text, (maker.source, shapes))]
    missing = left_out(maker, made)
    if missing:
        notes.append(Because("labels were not made: {name}; give yours for a true loss", (missing,)))
    ranged = ", ".join(f"{name} {_described(value)}{_range(value)}" for name, value in tensors.items())
    told = (
        f"No inputs were given: effcompile made these from the model's {maker.source}: {ranged}."
        f"{f' Not made: {missing}, which only you can tell.' if missing else ''} {GIVE}; --shape 2x64 sets "
        "the batch and the length (or the image's side) of those that are made."
    )
    if maker.by_position:
        return Derived(tuple(made.values()), notes=tuple(notes), told=told)
    return Derived((), made, tuple(notes), told)


class _Maker(ModelSizes):
    """Makes inputs of one model."""

    def __init__(self, model: nn.Module, reading: Reading) -> None:
        super().__init__(model, reading)
        self.source, self.by_position = "configuration", False

    # ------------------------------------------------------------ by the names of the forward's arguments

    def by_name(self) -> dict[str, Value] | None:
        """Of a model with a configuration: each argument that is known by name and must be there."""
        if not self.config:
            return None
        made: dict[str, Value] = series(self)
        for name in self.parameters:
            if name not in made:
                made |= self._named(name, made)
        if {"input_ids", "pixel_values"} <= made.keys() and image_token(self.config) is not None:
            vision = settings(self.config.get("vision_config"))
            made = with_image(self.model, self.parameters, self.config, vision, made)
        if "MultipleChoice" in type(self.model).__name__:
            made = {name: torch.stack((value, value), 1) for name, value in made.items()}
        if self.training and made:
            made |= labels(self, made)
        if made and "return_loss" in self.parameters and (self.training or self.config.get("return_loss")):
            made |= {"return_loss": self.training}
        return made or None

    def check_complete(self, made: Kwargs, where: str) -> None:
        """Raises: InputsError: the forward needs another argument, which nothing tells."""
        for name, parameter in self.parameters.items():
            plain = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
            if plain and self.needs(name) and name not in made:
                described = f" ({self.documents[name]})" if name in self.documents else ""
                raise InputsError(
                    f"{where} defines no `inputs`, and the configuration of {type(self.model).__name__} does "
                    f"not tell what its forward needs as `{name}`{described}. {GIVE}."
                )

    def _named(self, name: str, made: Kwargs) -> dict[str, Value]:
        """The argument of this name, if it is known and asked for beside those that are made."""
        text, audio = bool(self.vocabulary()), not made.keys() & {"pixel_values", *_AUDIO}
        match name:
            case "input_ids" | "idx" | "tokens" if text:
                return {name: with_end(self, self._ids(name, "text"))}
            case "decoder_input_ids" if self._answers() and self.vocabulary("decoder"):
                return {name: self._ids(name, "decoder")}
            case "attention_mask" if text and not self._images_only():
                return {name: torch.ones(self.batch, self.tokens(), dtype=torch.long)}
            case "bbox" if text:
                return {name: boxes(self)}
            case "pixel_values" | "pixel_values_videos" if name == "pixel_values" or self.needs(name):
                return {name: images(self)}
            case "flattened_patches":
                found = flattened_patches(self)
                return {} if found is None else {name: found}
            case "bool_masked_pos" if self.needs(name) or self._masks_patches():
                found = masked_patches(self)
                return {} if found is None else {name: found}
            case "input_values" | "input_features" if audio and self._hears():
                return recording(self, name)
            # in training the model takes its labels, shifted
            case "decoder_input_values" if self.config.get("is_encoder_decoder") and not self.training:
                sizes = self._documented(name)
                return {} if sizes is None else {name: self.floats(*sizes)}
        return beside(self, name)

    def _answers(self) -> bool:
        """Whether a second text is given, which a decoder goes on with: of its own in the model, or a part,
        which in training takes the labels.
        """
        part = hasattr(self.model, "text_decoder") and not self.training
        return bool(self.config.get("is_encoder_decoder")) or part

    def _ids(self, name: str, kind: str) -> torch.Tensor:
        """[batch, tokens], or with the axes of codebooks that the docstring names."""
        sizes = self._documented(name)
        return self.ids(self.vocabulary(kind), sizes)

    def _documented(self, name: str) -> tuple[int, ...] | None:
        described = self.documents.get(name)
        return None if described is None else self.dimensions(described.dimensions, None)

    def _hears(self) -> bool:
        """Whether a recording belongs to the inputs: it is all there is, or has settings of its own, and no
        token of the text stands for it.
        """
        alone = not self.vocabulary() or self._images_only()
        of_text = any(name.startswith("audio_token") for name in self.config)
        beside = bool(settings(self.config.get("audio_config"))) and not of_text
        return "pixel_values" not in self.parameters and (alone or beside)

    def _masks_patches(self) -> bool:
        return self.training and "MaskedImageModeling" in type(self.model).__name__

    def _images_only(self) -> bool:
        return not set(TEXTS) & set(self.parameters)

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
        return {name: self.floats(*shape, transformer.d_model) for name in needed}

    def _met_by(self, layer: nn.Module) -> torch.Tensor | None:
        """What a layer takes; None where it has no say."""
        match layer:
            case nn.Embedding():
                self.source = "first layer, an embedding"
                return self.ids(layer.num_embeddings)
            case nn.Conv2d():
                self.source = "first layer, a convolution"
                return self.floats(
                    self.batch, layer.in_channels, *(self.sizes() or (self.length or IMAGE,) * 2)
                )
            case nn.Conv1d():
                self.source = "first layer, a convolution"
                return self.floats(self.batch, layer.in_channels, self.length or SAMPLES)
            case nn.TransformerEncoderLayer() | nn.MultiheadAttention():
                attention = layer.self_attn if isinstance(layer, nn.TransformerEncoderLayer) else layer
                self.source = "d_model"
                order = (self.batch, self.length or 32)
                return self.floats(*(order if attention.batch_first else order[::-1]), attention.embed_dim)
            case nn.Linear():
                self.source = "first layer, a linear"
                return self.floats(self.batch, *([self.length] * bool(self.length)), layer.in_features)
            case nn.LayerNorm():
                self.source = "first layer, a norm"
                return self.floats(self.batch, self.length or 32, *layer.normalized_shape)
        return None


def _tensors(made: Mapping[str, Value]) -> Iterator[tuple[str, torch.Tensor]]:
    """With the names of those that an argument holds, such as `inputs.image`."""
    for name, value in made.items():
        if isinstance(value, Mapping):
            yield from ((f"{name}.{part}", tensor) for part, tensor in _tensors(value))
        elif isinstance(value, torch.Tensor):
            yield name, value


def _described(tensor: torch.Tensor) -> str:
    return f"[{' × '.join(map(str, tensor.shape))}] {str(tensor.dtype).removeprefix('torch.')}"


def _range(tensor: torch.Tensor) -> str:
    """From its smallest to its largest value."""
    if not tensor.numel() or tensor.is_meta:
        return ""
    low, high = (bound.item() for bound in (tensor.min(), tensor.max()))
    if low == high:
        return f" (all {low:.3g})"
    return f" ({low:.3g} to {high:.3g})" if tensor.is_floating_point() else f" ({int(low)} to {int(high)})"
