"""The image encoder of a model, as generate() calls it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence

import torch

from effcompile.capture import images
from effcompile.core.types import HFModel, Kwargs, Outputs

#: Names by which Hugging Face's image encoders take what they read (transformers 5.23, generation/utils.py).
PIXELS = ("pixel_values", "pixel_values_images", "image_patches")
#: Sizes of images in patches: a row for each.
_GRID = "image_grid_thw"


class Eye:
    """The image encoder of a model that is there, as it stands.

    Of what it makes it keeps the rows of features: hidden states of all layers, which some models' have with
    them, would be held until the last token is written.

    Attributes:
        names: arguments of a forward that it reads.
    """

    def __init__(self, model: HFModel) -> None:
        self._model = model
        self.names = frozenset(inspect.signature(model.base_model.get_image_features).parameters) - {"kwargs"}

    def __call__(self, given: Kwargs) -> Outputs | None:
        """What it makes of a call's images; None where there are none."""
        mine = {name: given[name] for name in self.names if given.get(name) is not None}
        return self.made(**mine) if any(name in mine for name in PIXELS) else None

    def made(self, *args: object, **kwargs: object) -> Outputs:
        """What it makes, given as it takes it."""
        with torch.no_grad():
            found = self._model.base_model.get_image_features(*args, **{**kwargs, "return_dict": True})
        return images.features(found)

    def as_method(self) -> Callable[..., Outputs]:
        """With the signature of the model's own, which generate() reads."""

        @functools.wraps(self._model.base_model.get_image_features)
        def seen(*args: object, **kwargs: object) -> Outputs:
            return self.made(*args, **kwargs)

        return seen


def one_by_one(given: Mapping[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """What an encoder is given of several images, of each apart: a row of a grid and its patches, a row of
    each tensor, or, where rows of a text have several images each, one of those.
    """
    name = next(name for name in PIXELS if name in given)
    pixels, beside = given[name], {key: value for key, value in given.items() if key != name}
    if (grid := given.get(_GRID)) is not None:
        parts: Sequence[torch.Tensor] = pixels.split(grid.prod(-1).tolist())
        return [{name: part, _GRID: row[None]} for part, row in zip(parts, grid, strict=True)]
    if pixels.dim() == 5 and "image_sizes" not in given:
        flat = {key: value.flatten(0, 1) for key, value in given.items()}
        return [{key: value[at][None, None] for key, value in flat.items()} for at in range(len(flat[name]))]
    return [
        {name: pixels[at : at + 1], **{key: value[at : at + 1] for key, value in beside.items()}}
        for at in range(len(pixels))
    ]


def together(parts: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """What an encoder is given of these images at once."""
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
