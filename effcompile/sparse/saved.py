"""What a sparse training comes back to: a step that was remembered, a checkpoint of the same recipe and
model.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from effcompile.core.errors import UsageError
from effcompile.sparse.recipe import Recipe

_MUST_AGREE = ("sparsity", "block", "growth", "updates", "steps", "prune_ratio", "distribution", "balanced")


def check_state(state: Mapping[str, Any], recipe: Recipe, masks: Mapping[str, Tensor]) -> None:
    """Refuse a controller's state that this recipe and these masks do not go on from.

    Raises:
        UsageError: it is of another recipe or another model.
    """
    mine = asdict(recipe)
    for entry in _MUST_AGREE:
        if mine[entry] != state["recipe"][entry]:
            saved = state["recipe"][entry]
            raise UsageError(
                f"The checkpoint was trained with {entry}={saved!r}, this controller has {mine[entry]!r}. "
                f"Make it with {saved!r}."
            )
    shapes = {name: tuple(mask.shape) for name, mask in state["masks"].items()}
    here = {name: tuple(mask.shape) for name, mask in masks.items()}
    if shapes != here:
        differ = sorted(name for name in shapes.keys() | here.keys() if shapes.get(name) != here.get(name))
        raise UsageError(
            f"The checkpoint's masks are of another model: {', '.join(differ[:4])} differ in name or shape."
        )


def remembered(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Copies of weights, buffers and the optimizer's state."""
    return copy.deepcopy({"model": model.state_dict(), "state": optimizer.state_dict()["state"]})


def put_back(found: Mapping[str, Any], model: nn.Module, optimizer: Optimizer) -> None:
    """Make them what they were when they were remembered.

    Raises:
        UsageError: layers changed their form since.
    """
    kept = copy.deepcopy(found)
    try:
        model.load_state_dict(kept["model"])
    except RuntimeError as error:
        raise UsageError(
            "Layers changed their form since remember(): a shrunk or compacted model has no way back."
        ) from error
    optimizer.load_state_dict(
        {"state": kept["state"], "param_groups": optimizer.state_dict()["param_groups"]}
    )
