"""Example images, videos, and what a model takes beside them: masked patches, boxes of words."""

from __future__ import annotations

import math

import torch

from effcompile.loader.beside import images_of_each
from effcompile.loader.figures import ModelSizes

IMAGE = 224
_PAGE = 1000  # boxes of words are in thousandths of a page
_PATCHES = 128  # of an image that comes as its patches, at most


def images(figures: ModelSizes) -> torch.Tensor:
    """[batch, channels, height, width], of a video or several images with their number behind the batch."""
    still = (figures.channels(), *(figures.sizes() or (IMAGE, IMAGE)))
    frames = images_of_each(figures) or figures.frames()
    return figures.floats(figures.batch, *([frames] * bool(frames)), *still)


def masked_patches(figures: ModelSizes) -> torch.Tensor | None:
    """Which patches are hidden, [batch, patches]: as many of each example, the first half; None where the
    settings do not tell how many there are.
    """
    vision, sizes = figures.part("vision"), figures.sizes()
    if vision.get("use_mask_token") is False:  # of BEiT: there is nothing to hide one with
        return None
    patch = vision.get("patch_size")
    sides = tuple(patch) if isinstance(patch, (list, tuple)) else (patch, patch)
    if sizes is None or not all(isinstance(side, int) and side > 0 for side in sides):
        return None
    deep = figures.number(("tubelet_size",), "vision") or 1
    count = math.prod(size // side for size, side in zip(sizes, sides[-2:], strict=True))
    count *= max(figures.frames() // deep, 1)
    return (torch.arange(count) < count // 2).expand(figures.batch, count).contiguous()


def boxes(figures: ModelSizes) -> torch.Tensor:
    """Left, top, right and bottom of each token's box, [batch, tokens, 4]: whole thousandths of the page, or
    shares of it where the docstring asks for no integers.
    """
    described = figures.documents.get("bbox")
    whole = described is None or described.whole
    edge = min(figures.number(("max_2d_position_embeddings",)) or _PAGE + 1, _PAGE + 1)
    corners = figures.ids(edge, (2, figures.batch, figures.tokens(), 2)).sort(dim=0).values
    found = torch.cat((corners[0], corners[1]), dim=-1)
    return found if whole else (found / edge).to(figures.dtype)


def flattened_patches(figures: ModelSizes) -> torch.Tensor | None:
    """Patches of an image with their row and column, counted from 1, before their pixels; None where the
    settings do not tell how long one is.
    """
    width = figures.number(("patch_embed_hidden_size",), "vision")
    rows = figures.number(("seq_len",), "vision")
    if not width or not rows:
        return None
    count = min(rows, figures.length or _PATCHES)
    wide = max(math.isqrt(count), 1)
    at = torch.arange(count)
    places = torch.stack((at // wide + 1, at % wide + 1), 1).to(figures.dtype)
    pixels = figures.floats(figures.batch, count, width)
    return torch.cat((places.expand(figures.batch, -1, -1), pixels), dim=-1)
