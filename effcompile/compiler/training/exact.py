"""What the original step makes in float64: tells a gradient that is wrong from one that is zero but for rounding."""

from __future__ import annotations

import copy
import math
from dataclasses import replace

import torch
from torch.utils import _pytree as pytree

from effcompile.compiler.room import Room
from effcompile.compiler.training import verify
from effcompile.compiler.training.work import Work

#: A loss in float64 that is further from the model's own than this comes from another step: random draws, or a branch, were others.
_SAME_STEP = 1e-3
#: Times the bytes of the original step's peak that a copy of the model and its step in float64 take.
_LARGER = 3


def in_float64(work: Work, room: Room, wanted: verify.Result, peak_bytes: int) -> verify.Result | None:
    """Loss and gradients of a copy of the model in float64; None where it does not run so, or does not fit."""
    if room.refusal(_LARGER * peak_bytes, _LARGER * peak_bytes) is not None:
        return None
    try:
        model = copy.deepcopy(work.model).double()
        args, kwargs = pytree.tree_map_only(
            torch.Tensor,
            lambda t: t.detach().double().requires_grad_(t.requires_grad) if t.is_floating_point() else t,
            (work.args, dict(work.kwargs)),
        )
        wide = replace(work, model=model, args=args, kwargs=kwargs)
        found = verify.run(wide.eager_loss, model, wide.leaves)
    except Exception:  # dtypes that the model fixes, or state that cannot be copied: gradients are judged by their scale
        return None
    return found if math.isclose(float(found.loss), float(wanted.loss), rel_tol=_SAME_STEP, abs_tol=_SAME_STEP) else None
