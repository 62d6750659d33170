"""Example inputs of a vision-language model: text in which tokens stand for what it makes of an image."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from torch.utils import _pytree as pytree

from effcompile.capture.mends import evaluating
from effcompile.core.types import Kwargs, Value

_IMAGE_TOKENS = ("image_token_id", "image_token_index")
#: Around an image, where a configuration names them.
_BEFORE, _AFTER = ("vision_start_token_id", "boi_token_id"), ("vision_end_token_id", "eoi_token_id")
_SIDE = 16  # of an image, in patches: 224 pixels of 14
_TEXT = 8  # tokens at the least beside an image


def image_token(config: Kwargs) -> int | None:
    """The token that stands for a piece of an image; None where the model has none."""
    return next((config[name] for name in _IMAGE_TOKENS if isinstance(config.get(name), int)), None)


def with_image(
    model: nn.Module,
    parameters: Mapping[str, object],
    config: Kwargs,
    vision: Kwargs,
    made: Mapping[str, torch.Tensor],
) -> dict[str, torch.Tensor]:
    """Inputs with one image a row at the place of its tokens, in the text's beginning.

    Where the model does not say how many tokens an image has, the text alone.

    Args:
        model: run on an image.
        parameters: what its forward takes.
        config: its settings.
        vision: those of its vision part.
        made: `input_ids` [batch, tokens], `pixel_values` and what else was made of the settings.
    """
    token, ids = image_token(config), made["input_ids"].clone()
    assert token is not None
    special = [value for name, value in config.items() if _is_token(name) and isinstance(value, int)]
    ids[torch.isin(ids, torch.tensor(special))] = next(i for i in range(len(special) + 1) if i not in special)
    given = {**made, "input_ids": ids}
    images = _patches(vision, made["pixel_values"]) if "image_grid_thw" in parameters else _seen(model, made)
    count = images.pop("tokens", None)
    if count is None:
        del given["pixel_values"]
        return given
    around = [_named(config, _BEFORE), *[token] * int(count), _named(config, _AFTER)]
    run = torch.tensor([each for each in around if each is not None])
    start, length = 1, max(ids.shape[1], len(run) + _TEXT)
    ids = torch.cat([ids, ids.roll(1, 1).repeat(1, -(-length // ids.shape[1]))], dim=1)[:, :length]
    ids[:, start : start + len(run)] = run
    given |= {"input_ids": ids, **images}
    if "attention_mask" in given:
        given["attention_mask"] = torch.ones_like(ids)
    of_image = (ids == token).long()
    return given | {name: of_image for name in ("mm_token_type_ids", "token_type_ids") if name in parameters}


def _is_token(name: str) -> bool:
    return name.endswith(("_token_id", "_token_index"))


def _named(config: Kwargs, names: tuple[str, ...]) -> int | None:
    return next((config[name] for name in names if isinstance(config.get(name), int)), None)


def _patches(vision: Kwargs, like: torch.Tensor) -> dict[str, Value]:
    """Images as Qwen2-VL and its kin take them: a row of pixels for each patch, and the grid of patches."""
    try:
        patch, merged, frames = (
            int(vision[name]) for name in ("patch_size", "spatial_merge_size", "temporal_patch_size")
        )
        channels = int(vision.get("in_channels") or vision["in_chans"])
    except (KeyError, TypeError, ValueError):
        return {}
    side, rows = max(_SIDE // merged, 1) * merged, len(like)
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randn(rows * side**2, channels * frames * patch**2, generator=generator)
    return {
        "pixel_values": pixels.to(like.dtype),
        "image_grid_thw": torch.tensor([[1, side, side]] * rows),
        "tokens": (side // merged) ** 2,
    }


def _seen(model: nn.Module, made: Mapping[str, torch.Tensor]) -> dict[str, Value]:
    """How many tokens the model makes of each image, and the images as it takes them."""
    inner = next(
        (part for part in (model, getattr(model, "model", None)) if hasattr(part, "get_image_features")), None
    )
    if inner is None:
        return {}
    with evaluating(model), torch.no_grad():
        # one image a row, or a list of one
        for pixels in (made["pixel_values"], made["pixel_values"][:, None]):
            try:
                found = inner.get_image_features(pixel_values=pixels)  # type: ignore[operator]
            except Exception:
                continue
            rows = pytree.tree_leaves(getattr(found, "pooler_output", found))
            tokens = sum(row.numel() // row.shape[-1] for row in rows if isinstance(row, torch.Tensor))
            return {"pixel_values": pixels, "tokens": tokens // len(pixels)}
    return {}
