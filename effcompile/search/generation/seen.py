"""Texts with images to measure errors on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from effcompile.capture import images
from effcompile.capture.generation import GenerationStep
from effcompile.capture.memory import as_it_was
from effcompile.capture.mends import evaluating
from effcompile.core.errors import GuardError, InputsError
from effcompile.core.types import HFModel, Inputs, Kwargs
from effcompile.runtime.generation.eye import Eye
from effcompile.runtime.generation.images import TextWithImages, between, by_axis, rows_for
from effcompile.search.generation.sight import derived
from effcompile.search.generation.text import CalibrationText, calibration_texts

#: Tokens of text behind an image that the model's settings tell the size of.
_BEHIND = 16
#: What Hugging Face's positions of a text with images are computed of (transformers 5.23, get_rope_index).
_OF_POSITIONS = ("mm_token_type_ids", "image_grid_thw", "video_grid_thw", "second_per_grid_ts")


def texts_to_measure(
    model: HFModel, step: GenerationStep, given: Sequence[Inputs] | None, context: int
) -> tuple[list[CalibrationText], str]:
    """Texts with the images that the user gives with them. See `calibration_texts`."""
    texts, source = calibration_texts(model, step, given, context)
    if step.image is None:
        return texts, source
    beside = [kwargs for _, kwargs in given] if given else [{}] * len(texts)
    pairs = enumerate(zip(texts, beside, strict=True))
    made = [_with_images(model, step, text, kwargs, at) for at, (text, kwargs) in pairs]
    if given or model.device.type == "meta" or (shown := derived(model)).get("pixel_values") is None:
        return made, source
    there = (shown[step.boundary.tokens] == step.image.id).any(dim=0).nonzero()
    end = int(there[-1]) + _BEHIND if len(there) else context + 1
    if end > context:
        return made, source
    text = CalibrationText(tokens=shown[step.boundary.tokens][:, :end])
    return [
        *made,
        _with_images(model, step, text, shown, len(made)),
    ], f"{source}, and text behind an image of noise"


def _with_images(
    model: HFModel, step: GenerationStep, text: CalibrationText, given: Kwargs, at: int
) -> CalibrationText:
    """The text with a row for each of its image tokens: of the user's images, or, where there are none, what
    such a token is as text.

    Raises:
        InputsError: images with other rows than the text has image tokens.
    """
    image, boundary, length = step.image, step.boundary, text.tokens.shape[1]
    assert image is not None
    eye = Eye(model.base_model)
    with evaluating(model), torch.no_grad():
        output = eye(given)
    whole = text.tokens if output is None else given[boundary.tokens]
    try:
        rows = rows_for(whole, image, output, boundary.images)
    except GuardError as error:
        raise InputsError(f"calibration[{at}]: {error}") from error
    text = replace(text, images=tuple(between(whole, image.id, rows, 0, length)), image_token=image.id)
    if output is None:
        return text
    extra: dict[str, Any] = {images.ENCODED: {"image": images.seen(rows, boundary.stacked)}}
    if boundary.axes:
        extra[boundary.positions] = _positions(model, whole, given, boundary.axes)
    if given.get(boundary.kinds) is not None:
        extra[boundary.kinds] = given[boundary.kinds]
    extra = TextWithImages(whole, boundary, image).part(extra, 0, length)
    pictures = eye.of(given)
    tensors = all(isinstance(value, torch.Tensor) for value in pictures.values())
    first = next(iter(eye.apart(pictures)), {}) if tensors else {}
    kinds = extra.get(boundary.kinds)
    return replace(text, extra=extra, kinds=kinds, pictures=pictures, first=first, uncut=whole)


def _positions(model: HFModel, tokens: torch.Tensor, given: Kwargs, axes: int) -> torch.Tensor:
    """Position ids (axes, rows, tokens) of a text with images, as generate() makes them."""
    if given.get("position_ids") is not None:
        return torch.stack(by_axis(given["position_ids"], axes))
    told = {name: given[name] for name in _OF_POSITIONS if given.get(name) is not None}
    with as_it_was(model), torch.no_grad():
        found: torch.Tensor = model._prepare_position_ids_for_generation(
            tokens, {"attention_mask": torch.ones_like(tokens), **told}
        )
    return found
