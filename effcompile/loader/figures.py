"""Sizes of a model's inputs, as its configuration has them under the names of many families, and random
tensors of such sizes.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from effcompile.core.errors import InputsError
from effcompile.core.types import Kwargs, Value
from effcompile.loader.documented import Documented, documented
from effcompile.loader.source import Reading

_TOKENS = 128
#: What ids of a text are called.
TEXTS = ("input_ids", "idx", "tokens")
#: Names under which configurations of different families have the same figure.
_LENGTHS = (
    "max_position_embeddings", "n_positions", "block_size", "max_seq_len", "max_seq_length", "context_length",
    "max_target_positions",
)  # fmt: skip
_CHANNELS = ("num_channels", "in_channels", "in_chans", "channels")
_SIZES = ("image_size", "img_size", "sample_size", "input_size", "crop_size")
_FRAMES = ("num_frames", "frames_per_clip")
#: The configuration of a part, by what it reads: the last that is there counts.
PARTS = {
    "text": ("text_encoder", "encoder", "text_config"),
    "decoder": ("text_config", "decoder"),
    "vision": ("encoder", "backbone_config", "image_config", "vision_config"),
    "audio": ("encoder", "audio_encoder", "encoder_config", "audio_config"),
}
#: What dimensions are called in the docstrings of forwards.
_BATCH = ("batch_size", "bs", "batch")
_SEQUENCE = (
    "sequence_length", "seq_length", "seq_len", "target_sequence_length", "text_sequence_length",
    "text_seq_len", "input_ids_length", "target_length",
)  # fmt: skip
GIVE = (
    "Define `inputs` beside `model` in a model.py: a dict of keyword arguments, a tuple of positional ones, "
    "or one tensor"
)


class ModelSizes:
    """What one model's configuration says of its inputs, for a batch and a length as they were asked.

    Attributes:
        parameters: what the forward takes; `documents`: what its docstring says of them.
        length: tokens, samples or pixels of a side; 0: the model's own.
        known: dimensions of docstrings that inputs which are made have.
    """

    def __init__(self, model: nn.Module, reading: Reading) -> None:
        self.model, self.training = model, reading.training
        self.config = settings(getattr(model, "config", None))
        self._of_checkpoint = not self.config and hasattr(model, "pretrained_cfg")  # a model of timm
        self.config = self.config or settings(getattr(model, "pretrained_cfg", None))
        if wrapped := settings(self.config.get("vlm_config")):  # retrieval by a model of text and images
            self.config = wrapped | self.config
        self.known: dict[str, int] = {}
        self.parameters = inspect.signature(model.forward).parameters
        self.documents: Mapping[str, Documented] = documented(model)
        # one row is no contrast: the loss between pairs would be 0, and so would its gradients
        contrast = "return_loss" in self.parameters
        # nor has it a variance, where an image is a number a channel
        compared = contrast or any(
            isinstance(part, nn.modules.batchnorm._BatchNorm) for part in model.modules()
        )
        self.batch, self.length = reading.shape or (2 if reading.training and compared else 1, 0)
        self.generator = torch.Generator().manual_seed(0)
        self.dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)

    def needs(self, name: str) -> bool:
        """Whether the forward takes an argument of this name and has no value of its own for it."""
        found = self.parameters.get(name)
        return found is not None and found.default is found.empty

    # ------------------------------------------------------------ figures

    def part(self, kind: str) -> dict[str, Value]:
        """The settings of one part of the model, and where it has no such those of the whole."""
        found = dict(self.config)
        for name in PARTS[kind]:
            found |= settings(self.config.get(name))
        former = settings(self.config.get("qformer_config"))
        if kind == "text" and former.get("use_qformer_text_input"):  # what joins image and text reads it
            found |= former
        return found

    def number(self, names: Sequence[str], kind: str = "") -> int:
        """The first of some settings that is a number above 0; 0 for none."""
        had = self.part(kind) if kind else self.config
        return next((had[each] for each in names if isinstance(had.get(each), int) and had[each] > 0), 0)

    def classes(self) -> int:
        """Of a classifier."""
        found = self.config.get("num_labels") or getattr(self._configuration, "num_labels", 0)
        return int(found or 0)

    @property
    def _configuration(self) -> object:
        return getattr(self.model, "config", None)

    def vocabulary(self, kind: str = "text") -> int:
        """Rows of the table of tokens."""
        names = ("decoder_vocab_size", "vocab_size") if kind == "decoder" else ("vocab_size",)
        return self.number((*names, "input_vocab_size", "num_hash_buckets"), kind)

    def tokens(self) -> int:
        """Of a text."""
        if self.length:
            return self.length
        had = [{**self.part(kind)} for kind in ("text", "decoder")]
        known = [part[name] for part in had for name in _LENGTHS if isinstance(part.get(name), int)]
        return min([_TOKENS, *(each for each in known if each > 0), *self._places()])

    def _places(self) -> list[int]:
        """Rows of tables of positions that are counted from behind the padding's, as RoBERTa does."""
        return [
            max(part.num_embeddings - part.padding_idx - 1, 1)
            for name, part in self.model.named_modules()
            if name.endswith("position_embeddings")
            and isinstance(part, nn.Embedding)
            and part.padding_idx is not None
        ]

    def channels(self) -> int:
        """Of an image."""
        size = self.part("vision").get("input_size")
        if isinstance(size, (tuple, list)) and len(size) == 3:
            return int(size[0])
        return self.number(_CHANNELS, "vision") or 3

    def frames(self) -> int:
        """Images of a video; 0 where the model takes single ones."""
        still = "Image" in type(self.model).__name__  # of a family that has heads for videos, too
        return 0 if still else self.number(_FRAMES, "vision")

    def sizes(self) -> tuple[int, int] | None:
        """Height and width of an image."""
        if self.length:
            return self.length, self.length
        vision = self.part("vision")
        # a checkpoint's settings say what that was trained on, the layer that cuts patches what this takes
        cut = (
            [getattr(part, "img_size", None) for part in self.model.modules()] if self._of_checkpoint else []
        )
        owned = [vars(self.model).get(name) for name in _SIZES]
        for size in (*cut, *(vision.get(name) for name in _SIZES), *owned):
            if isinstance(size, int):
                return size, size
            if isinstance(size, (tuple, list)) and size and all(isinstance(s, int) for s in size):
                return int(size[-2 % len(size)]), int(size[-1])
        return None

    def dimensions(self, names: Sequence[str], images: tuple[int, int] | None) -> tuple[int, ...] | None:
        """Numbers of the dimensions that a docstring names; None where one is not known.

        Args:
            names: such as `batch_size * num_codebooks`, `sequence_length` and `config.num_mel_bins`.
            images: height and width of the images among the inputs.
        """
        found = [
            math.prod(self._dimension(each.strip(), images) for each in name.split("*")) for name in names
        ]
        return tuple(found) if found and all(found) else None

    def _dimension(self, name: str, images: tuple[int, int] | None) -> int:
        name = name.removeprefix("config.")
        if name.isdecimal():
            return int(name)
        if name in _BATCH or name in _SEQUENCE:
            return self.batch if name in _BATCH else self.tokens()
        if name in ("height", "width"):
            return images[name == "width"] if images else 0
        if name == "num_labels":
            return self.classes()
        if name in self.known:
            return self.known[name]
        return self.number((name,), "decoder") or self.number((name,), "audio")

    # ------------------------------------------------------------ random values

    def ids(self, rows: int, shape: Sequence[int] | None = None) -> torch.Tensor:
        """Of a table of `rows`, [batch, tokens] unless another shape is given."""
        if rows < 1:
            raise InputsError(
                f"{type(self.model).__name__} has a table of {rows} rows to look up in. {GIVE}."
            )
        return torch.randint(rows, tuple(shape or (self.batch, self.tokens())), generator=self.generator)

    def floats(self, *sizes: int) -> torch.Tensor:
        """Normal ones, of the model's type."""
        if math.prod(sizes) > 1 << 31:
            raise InputsError(
                f"The model's settings make an input of {' × '.join(map(str, sizes))} numbers. {GIVE}."
            )
        return torch.randn(sizes, generator=self.generator).to(self.dtype)


def settings(value: object) -> dict[str, Value]:
    """A configuration as a mapping, whatever object a library makes of it; {} for none."""
    if isinstance(value, Mapping):
        return dict(value)
    made = getattr(value, "to_dict", None)
    found: Kwargs | object = made() if callable(made) else getattr(value, "__dict__", {})
    return dict(found) if isinstance(found, Mapping) else {}
