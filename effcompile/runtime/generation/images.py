"""Rows of images among the tokens of a call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from effcompile.capture import images
from effcompile.capture.generation import Boundary
from effcompile.core.errors import GuardError
from effcompile.core.types import Kwargs, Outputs


def between(
    tokens: torch.Tensor,
    token: int,
    rows: Sequence[torch.Tensor],
    start: int,
    end: int,
    texts: int | None = None,
) -> list[torch.Tensor]:
    """Of the rows of images those of the tokens from `start` to `end`, of the first `texts` or all: they
    follow each other text by text.
    """
    there = tokens == token
    within = torch.zeros_like(there)
    within[:texts, start:end] = True
    return [each[within[there]] for each in rows]


@dataclass(frozen=True)
class TextWithImages:
    """A text with images, of which parts are given to a forward."""

    tokens: torch.Tensor
    boundary: Boundary
    image: images.ImageToken

    def part(self, extra: Kwargs, start: int, end: int, texts: int | None = None) -> dict[str, Any]:
        """What a forward takes beside the tokens from `start` to `end` of the first `texts`, or all.

        `extra`: beside all of them.
        """
        made = dict(extra)
        if (output := made.pop(images.ENCODED, {}).get("image")) is not None:
            rows = between(self.tokens, self.image.id, images.rows_of(output), start, end, texts)
            if len(rows[0]):
                made[images.ENCODED] = {"image": images.seen(rows, self.boundary.stacked)}
        for name, first in ((self.boundary.positions, start), (self.boundary.kinds, 0)):
            if name in made:
                made[name] = made[name][..., :texts, first:end]
        return made


def by_axis(positions: torch.Tensor, axes: int) -> list[torch.Tensor]:
    """Position ids (rows, tokens) of each axis: of all at once, or with or without the text's own first,
    which nothing reads.
    """
    if positions.dim() != 3 or len(positions) not in (1, axes - 1, axes):
        return [positions] * axes
    return [positions[0]] * axes if len(positions) == 1 else [positions[0], *positions][-axes:]


def between_images(kinds: torch.Tensor, ends: Sequence[int]) -> list[int]:
    """Ends of chunks that leave images whole: each is moved behind the images that it would cut.

    `kinds`: 1 for images' tokens, 0 for text (rows, new tokens).
    """
    inside = ((kinds[:, :-1] != 0) & (kinds[:, 1:] != 0)).any(dim=0).tolist()  # between a token and the next
    new = kinds.shape[1]
    moved = (next(at for at in range(end, new + 1) if at == new or not inside[at - 1]) for end in ends)
    return list(dict.fromkeys(moved))


def kinds_of(given: torch.Tensor | None, mask: torch.Tensor, tokens: torch.Tensor, name: str) -> torch.Tensor:
    """Of past and new tokens whether they are images'.

    `given`: of all of them, or of the new ones; None: none is. `mask`: over past and new tokens.

    Raises:
        GuardError: it has another size.
    """
    if given is None:
        return torch.zeros_like(mask)
    if given.shape == tokens.shape:
        given = torch.nn.functional.pad(given, (mask.shape[1] - tokens.shape[1], 0))
    if given.shape != mask.shape:
        raise GuardError(
            f"{name} is {list(given.shape)}; the plan takes {list(mask.shape)}: past and new tokens.",
            place=f"inputs[{name!r}]",
        )
    return given.to(mask.dtype).contiguous()


def rows_for(
    tokens: torch.Tensor, image: images.ImageToken, output: Outputs | None, count: int
) -> list[torch.Tensor]:
    """As many tensors of rows as a step takes, a row for each image token.

    Args:
        tokens: ids (rows, tokens).
        image: what stands for a row of an image.
        output: what the image encoder made; None: there is no image, and such a token is text.
        count: of tensors.

    Raises:
        GuardError: other rows than there are image tokens, of another width, or another number of tensors.
    """
    places, unseen = int((tokens == image.id).sum()), image.row
    if output is None:
        return [unseen.expand(places, -1), *(unseen.new_zeros(places, unseen.shape[1]),) * (count - 1)]
    rows = images.rows_of(output)
    for each in rows:
        if each.shape != (places, unseen.shape[1]):
            raise GuardError(
                f"The text has {places} image tokens (id {image.id}) of {unseen.shape[1]} numbers, and the "
                f"images have {len(each)} rows of {each.shape[1]}. Give images and a text that one processor "
                "made.",
                place=f"inputs[{images.ENCODED!r}]",
            )
    if len(rows) != count:
        raise GuardError(
            f"What was made of the images has {len(rows)} tensors; the plan takes {count}.",
            place=f"inputs[{images.ENCODED!r}]",
        )
    return [each.to(unseen.dtype) for each in rows]


def encoded(given: Kwargs, eye: Callable[[Kwargs], Outputs | None] | None) -> Outputs | None:
    """What the image encoder made, of a call's arguments; None where there is no image.

    Raises:
        GuardError: videos, or images that nothing here can read.
    """
    made: dict[str, Any] = dict(given.get(images.ENCODED) or {})
    found = made.pop("image", None)
    other = next((name for name, output in made.items() if output is not None), None)
    if other is not None:
        raise GuardError(
            f"{images.ENCODED}[{other!r}] is not planned for: a step takes images and text. Let the model "
            "itself read it.",
            place=f"inputs[{images.ENCODED!r}]",
        )
    return found if found is not None or eye is None else eye(given)
