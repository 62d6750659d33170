"""Progressive resolution: images of another size, with the positions of a vision transformer interpolated to
its patches.

Dosovitskiy et al. 2021 (arXiv 2010.11929, section 3.2): learned positions are interpolated in two dimensions,
the moments with them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from effcompile.core.errors import UsageError
from effcompile.core.types import Example
from effcompile.runs.carry import Origin, Origins
from effcompile.runs.fields.base import Effect, check_count
from effcompile.runs.fields.values import StageValues

_SIZES = ("image_size", "img_size")


@dataclass(frozen=True, slots=True, kw_only=True)
class Positions:
    """Learned positions of patches: (1, extra + rows · columns, width), in a module under a name."""

    name: str
    owner: nn.Module
    attribute: str
    extra: int
    grid: tuple[int, int]

    @property
    def value(self) -> nn.Parameter:
        found: nn.Parameter = getattr(self.owner, self.attribute)
        return found


class Image(Effect):
    """`image`: pixels of a side."""

    name: ClassVar[str] = "image"

    @classmethod
    def check(cls, stage: StageValues) -> None:
        check_count(stage, "image")

    def change(self, model: nn.Module, example: Example) -> Origins:
        """Interpolate the positions where the model has any, and tell every module the new size.

        Raises:
            UsageError: the model's patches do not divide the size.
        """
        patch = _patch(model)
        if patch is None:
            return {}
        if self.value % patch:
            raise UsageError(
                f"Stage(image={self.value}): {type(model).__name__} takes patches of {patch} pixels, "
                "which do not divide it."
            )
        grid = (self.value // patch, self.value // patch)
        changed = [positions for positions in _positions(model) if positions.grid != grid]
        origins = {}
        for positions in changed:
            interpolated = _Interpolated(extra=positions.extra, before=positions.grid, after=grid)
            old = positions.value
            setattr(
                positions.owner,
                positions.attribute,
                nn.Parameter(interpolated(old.detach()), requires_grad=old.requires_grad),
            )
            origins[positions.name] = Origin(source=positions.name, moved=interpolated)
            self.notes.append(
                f"image {positions.grid[0] * patch} → {self.value}: {positions.name} was interpolated, "
                "its moments too"
            )
        _say_size(model, self.value, grid)
        return origins


@dataclass(frozen=True, slots=True, kw_only=True)
class _Interpolated:
    """Values at the patches of one grid → at those of another, bicubic; the extra tokens' stay."""

    extra: int
    before: tuple[int, int]
    after: tuple[int, int]

    def __call__(self, value: Tensor) -> Tensor:
        first, patches = value[:, : self.extra], value[:, self.extra :]
        width = patches.shape[-1]
        grid = patches.reshape(1, *self.before, width).permute(0, 3, 1, 2)
        grid = nn.functional.interpolate(
            grid.float(), size=self.after, mode="bicubic", align_corners=False
        ).to(value.dtype)
        return torch.cat([first, grid.permute(0, 2, 3, 1).reshape(1, -1, width)], 1)


def _positions(model: nn.Module) -> Iterator[Positions]:
    """Parameters (1, tokens, width) with an entry for each patch, and at most two more."""
    grid = _grid(model)
    for owner_name, owner in model.named_modules():
        for attribute, value in owner.named_parameters(recurse=False):
            if (
                grid is None
                or value.dim() != 3
                or value.shape[0] != 1
                or not 0 <= value.shape[1] - grid[0] * grid[1] <= 2
            ):
                continue
            name = f"{owner_name}.{attribute}".lstrip(".")
            yield Positions(
                name=name,
                owner=owner,
                attribute=attribute,
                extra=value.shape[1] - grid[0] * grid[1],
                grid=grid,
            )


def _sized(model: nn.Module) -> Iterator[Any]:
    """Modules and configurations that know the size of images and patches."""
    seen: set[int] = set()
    for module in model.modules():
        for holder in (module, vars(module).get("config")):
            known = (
                holder is not None
                and id(holder) not in seen
                and any(vars(holder).get(name) is not None for name in _SIZES)
            )
            if known and vars(holder).get("patch_size") is not None:
                seen.add(id(holder))
                yield holder


def _side(value: Any) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (int(value[0]), int(value[1]))


def _patch(model: nn.Module) -> int | None:
    return next((_side(vars(holder)["patch_size"])[0] for holder in _sized(model)), None)


def _grid(model: nn.Module) -> tuple[int, int] | None:
    for holder in _sized(model):
        size = next(vars(holder)[name] for name in _SIZES if vars(holder).get(name) is not None)
        (height, width), (down, across) = _side(size), _side(vars(holder)["patch_size"])
        return height // down, width // across
    return None


def _say_size(model: nn.Module, side: int, grid: tuple[int, int]) -> None:
    """The new size wherever the old one was said, in the form it was said in."""
    for holder in list(_sized(model)):
        said: dict[str, Any] = dict.fromkeys(_SIZES, side) | {
            "num_patches": grid[0] * grid[1],
            "grid_size": grid[0],
        }
        for name, value in said.items():
            old = vars(holder).get(name)
            if old is not None:
                setattr(holder, name, value if isinstance(old, int) else type(old)((value, value)))
