"""Which linear layers a controller makes sparse, and what it refuses."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase

from torch import nn

from effcompile.core.errors import UnknownNameError, UsageError

__all__ = ["check_block", "choose", "inside_blocks", "is_inside"]


def inside_blocks(model: nn.Module) -> dict[str, nn.Linear]:
    """The linear layers of the repeated blocks: below a numbered child, itself no linear, of a ModuleList or
    Sequential.

    Embeddings, poolers and heads stand outside, and stay dense (Dietrich et al. 2021, sec. 2).
    """
    roots = tuple(f"{name}." for name in _repeated(model))
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and name.startswith(roots)
    }


def is_inside(model: nn.Module, name: str) -> bool:
    """Whether a module stands in a repeated block."""
    return name.startswith(tuple(f"{root}." for root in _repeated(model)))


def _repeated(model: nn.Module) -> Iterator[str]:
    for name, module in model.named_modules():
        if isinstance(module, (nn.ModuleList, nn.Sequential)):
            children = ((f"{name}.{key}" if name else key, child) for key, child in module.named_children())
            yield from (
                path
                for path, child in children
                if not isinstance(child, nn.Linear) and list(child.children())
            )


def choose(model: nn.Module, layers: Sequence[str] | None, block: int) -> dict[str, nn.Linear]:
    """The layers to make sparse, by name, in the model's order.

    Args:
        model: as the optimizer trains it.
        layers: names or patterns (`blocks.*.up`); None: all linear layers inside repeated blocks.
        block: the side of a block; it must divide all their dimensions.

    Raises:
        UnknownNameError: a pattern that names no linear layer.
        UsageError: nothing to make sparse; a frozen, tied, quantised or lazy weight; a block that does not
            divide.
    """
    known = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    if layers is None:
        chosen = inside_blocks(model)
        if not chosen:
            raise UsageError(
                f"{type(model).__name__} has no linear layers inside repeated blocks (numbered children of a "
                "ModuleList or Sequential). Name those to make sparse: layers=[...] of "
                f"{', '.join(known) or 'none, there is no nn.Linear'}."
            )
    else:
        if isinstance(layers, str):
            raise UsageError(f"layers={layers!r} is one text. Give a list: layers=[{layers!r}].")
        chosen = {
            name: known[name] for name in known if any(fnmatchcase(name, pattern) for pattern in layers)
        }
        for pattern in layers:
            if not any(fnmatchcase(name, pattern) for name in known):
                raise UnknownNameError("linear layer", pattern, known)
        if not chosen:
            raise UsageError(
                "layers=[] names no layer. Leave it out to take the linear layers inside the repeated blocks."
            )
    _refuse(model, chosen)
    for name, module in chosen.items():
        check_block(name, (module.out_features, module.in_features), block)
    return chosen


def _refuse(model: nn.Module, chosen: dict[str, nn.Linear]) -> None:
    """Raise on weights that cannot be trained as they stand, or that are not theirs alone."""
    homes: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        homes.setdefault(id(parameter), []).append(name)
    for name, module in chosen.items():
        weight = module.weight
        where = f"The weight of {name!r}"
        leave = f"Leave {name!r} out of `layers`"
        if isinstance(weight, nn.UninitializedParameter):
            raise UsageError(
                f"{where} has no shape yet (a lazy layer). Run one batch through the model first."
            )
        if (
            type(weight) is not nn.Parameter
            or type(weight.data).__name__ != "Tensor"
            or not weight.is_floating_point()
        ):
            kind = type(weight.data).__name__ if type(weight) is nn.Parameter else type(weight).__name__
            raise UsageError(
                f"{where} is quantised or otherwise packed ({kind}, {weight.dtype}). {leave}, or load it "
                "in floating point."
            )
        if not weight.requires_grad:
            raise UsageError(
                f"{where} is frozen: it gets no gradient. {leave}, or unfreeze it with requires_grad_(True)."
            )
        if len(homes[id(weight)]) > 1:
            others = ", ".join(home for home in homes[id(weight)] if home != f"{name}.weight")
            raise UsageError(
                f"{where} is tied to {others}: one pattern cannot serve both. {leave}, or untie it."
            )


def check_block(name: str, shape: tuple[int, int], block: int) -> None:
    """Raise UsageError, naming the nearest sides that do, when blocks of this side do not divide a weight (O,
    I).
    """
    common = math.gcd(*shape)
    if common % block == 0:
        return
    fits = [side for side in range(1, common + 1) if common % side == 0]
    below, above = (
        max(side for side in fits if side < block),
        min((side for side in fits if side > block), default=None),
    )
    nearest = f"{below} or {above}" if above else f"{below}"
    raise UsageError(
        f"Blocks of {block} × {block} do not divide the weight of {name!r}, {shape[0]} × {shape[1]}. "
        f"Nearest that do: {nearest}. Or leave {name!r} out of `layers`."
    )
