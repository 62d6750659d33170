"""The image encoder of a model, as generate() calls it: image by image by its graph, or as it is there."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence

import torch

from effcompile.capture import images
from effcompile.core.errors import GuardError
from effcompile.core.types import Forward, HFModel, Kwargs, Outputs
from effcompile.ir.program import TensorSpec
from effcompile.runtime.generation.steps import LoweredStep, carried_out

#: Names by which Hugging Face's image encoders take what they read (transformers 5.23, generation/utils.py).
PIXELS = ("pixel_values", "pixel_values_images", "image_patches")
#: Sizes of images in patches: a row for each.
_GRID = "image_grid_thw"
#: Which pixels of an image are shown; all where it is left out.
_MASK = "pixel_attention_mask"
#: Values that are printed.
_FEW = 6
#: What does not change rows of features.
_SILENT = ("return_dict",)


class Eye:
    """The image encoder of a model: by the graph of a step where all images of a call are of the sizes that
    it is of, else as it stands in the model.

    Of what it makes it keeps the rows of features: hidden states of all layers, which some models' have with
    them, would be held until the last token is written.

    Attributes:
        names: arguments of a forward that it reads.
    """

    def __init__(self, inner: HFModel, step: LoweredStep | None = None, *, there: bool = True) -> None:
        """`inner`: whose get_image_features it stands for. `step`: that has the graph of an image. `there`:
        the model has its weights.
        """
        self._inner, self._step, self._there = inner, step, there
        self._taken = list(inspect.signature(_own(inner)).parameters)
        self.names = frozenset(self._taken) - {"kwargs"}

    def __call__(self, given: Kwargs) -> Outputs | None:
        """What it makes of a call's images; None where there are none."""
        mine = self.of(given)
        return self.made(**mine) if any(name in mine for name in PIXELS) else None

    def of(self, given: Kwargs) -> Kwargs:
        """What it reads of a call's arguments."""
        return {name: given[name] for name in self.names if given.get(name) is not None}

    def made(self, *args: object, **kwargs: object) -> Outputs:
        """What it makes, given as it takes it.

        Raises:
            GuardError: images of other sizes than the graph's, where the model is not there.
        """
        given = {**dict(zip(self._taken, args, strict=False)), **kwargs}
        mine = {name: value for name, value in given.items() if value is not None and name not in _SILENT}
        if (found := self._planned(mine)) is not None:
            return found
        if not self._there:
            raise GuardError(self._refusal(mine), place="inputs['pixel_values']")
        with torch.no_grad():
            return images.features(_own(self._inner)(**{**given, "return_dict": True}))

    def _planned(self, given: Kwargs) -> Outputs | None:
        """By the graph, image by image; None where there is none, or one that is not of these."""
        step = self._step
        tensors = {name: value for name, value in given.items() if isinstance(value, torch.Tensor)}
        if step is None or step.eye is None or len(tensors) < len(given):
            return None
        parts = self.apart(tensors)
        if not parts or not all(fits(part, step.eye_inputs) for part in parts):
            return None
        rows = [
            carried_out(step.eye, [part[spec.name].contiguous() for spec in step.eye_inputs])
            for part in parts
        ]
        return images.made_of(list(zip(*rows, strict=True)))

    def apart(self, given: Mapping[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
        """Each image as a graph of one is given it: with a mask over its pixels where the model takes one."""
        pixels = next((given[name] for name in PIXELS if name in given), None)
        if _MASK in self.names and pixels is not None and pixels.dim() == 5:
            shape = (*pixels.shape[:2], *pixels.shape[-2:])
            mask = given.get(_MASK, pixels.new_ones(()).expand(shape))
            given = {**given, _MASK: mask.to(torch.int64)}
        return one_by_one(given)

    def _refusal(self, given: Kwargs) -> str:
        step = self._step
        beside = (
            "Encode the image with the model, mm_encoder_outputs={'image': "
            "model.base_model.get_image_features(...)}, and leave its pixels out."
        )
        if step is None or step.eye is None:
            return f"A saved generation has the step's weights alone, and no image encoder. {beside}"
        planned = ", ".join(f"{spec.name} {described(spec)}" for spec in step.eye_inputs)
        fixed = {spec.name for spec in step.eye_inputs if spec.values is not None}
        found = ", ".join(
            f"{name} = {value.tolist()}"
            if name in fixed and value.numel() <= _FEW
            else f"{name} {list(value.shape)} {str(value.dtype).removeprefix('torch.')}"
            for name, value in given.items()
            if isinstance(value, torch.Tensor)
        )
        return (
            f"The folder's image encoder takes images of the size that was planned with, each {planned}; "
            f"these are {found}. Give images of that size, or plan with one of these as an input. {beside}"
        )

    def as_method(self) -> Callable[..., Outputs]:
        """With the signature of the model's own, which generate() reads."""

        @functools.wraps(_own(self._inner))
        def seen(*args: object, **kwargs: object) -> Outputs:
            return self.made(*args, **kwargs)

        return seen


def _own(inner: HFModel) -> Forward:
    own: Forward = inner.get_image_features
    return own


def fits(given: Mapping[str, torch.Tensor], inputs: Sequence[TensorSpec]) -> bool:
    """Whether one image is of the sizes, and has the values, that a graph is of."""
    return given.keys() == {spec.name for spec in inputs} and all(_is(given[s.name], s) for s in inputs)


def _is(tensor: torch.Tensor, spec: TensorSpec) -> bool:
    return (
        tuple(tensor.shape) == spec.shape
        and str(tensor.dtype).removeprefix("torch.") == spec.dtype
        and (spec.values is None or tuple(tensor.flatten().tolist()) == spec.values)
    )


def described(spec: TensorSpec) -> str:
    """The shape of an input, or its values where these are fixed and few."""
    few = spec.values is not None and len(spec.values) <= _FEW
    return f"= {list(spec.values or ())}" if few else f"{list(spec.shape)} {spec.dtype}"


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
        shown = [at for at, each in enumerate(flat[name]) if each.any()]  # what is black all over is padding
        return [{key: value[at][None, None] for key, value in flat.items()} for at in shown]
    return [
        {name: pixels[at : at + 1], **{key: value[at : at + 1] for key, value in beside.items()}}
        for at in range(len(pixels))
    ]


def together(parts: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """What an encoder is given of these images at once."""
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
