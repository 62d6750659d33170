"""What the original step makes in float64, or rounded otherwise: tells a gradient that is wrong from one that
rounding moves.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from effcompile.machine.room import Room
from effcompile.proof.rounding import wide_copy
from effcompile.proof.training import verify
from effcompile.search.training.work import Work

#: A loss in float64 that is further from the model's own than this comes from another step: random draws, or
#: a branch, were others.
_SAME_STEP = 1e-3
#: Times the bytes of the original step's peak that a copy of the model and its step in float64 take.
_LARGER = 3


def in_float64(work: Work, room: Room, wanted: verify.Result, peak_bytes: int) -> verify.Result | None:
    """Loss and gradients of a copy of the model in float64; None where it does not run so, or
    does not fit.
    """
    if room.refusal(_LARGER * peak_bytes, _LARGER * peak_bytes) is not None:
        return None
    try:
        model = wide_copy(work.model)
        args, kwargs = pytree.tree_map_only(
            torch.Tensor,
            lambda t: t.detach().double().requires_grad_(t.requires_grad) if t.is_floating_point() else t,
            (work.args, dict(work.kwargs)),
        )
        wide = replace(work, model=model, args=args, kwargs=kwargs)
        found = verify.run(wide.eager_loss, model, wide.leaves)
    except Exception:
        # dtypes that the model fixes, or state that cannot be copied: gradients are judged by their scale
        return None
    found = replace(found, named="float64's")
    return (
        found
        if math.isclose(float(found.loss), float(wanted.loss), rel_tol=_SAME_STEP, abs_tol=_SAME_STEP)
        else None
    )


@contextlib.contextmanager
def rounded_otherwise(model: nn.Module) -> Iterator[bool]:
    """Within, what every module without children returns in 16 bits is moved by up to half a unit in its last
    place, at random.

    How far that moves a gradient is what rounding makes of it in this model: random rounding as a measure of
    it is Vignes' CESTAC method (La Porte and Vignes 1974). False where nothing is in 16 bits: in fp32 a
    gradient is judged more sharply without.
    """
    dice = torch.Generator().manual_seed(1)

    def moved(module: nn.Module, args: Any, output: Any) -> Any:
        if (
            not isinstance(output, torch.Tensor)
            or output.dtype not in verify.NARROW
            or output.device.type != "cpu"
        ):
            return output
        share = torch.rand(output.shape, generator=dice).sub_(0.5).mul_(torch.finfo(output.dtype).eps)
        return (output.float() * share.add_(1)).to(output.dtype)

    narrow = any(parameter.dtype in verify.NARROW for parameter in model.parameters())
    with contextlib.ExitStack() as stack:
        for module in model.modules() if narrow else ():
            if next(module.children(), None) is None:
                stack.callback(module.register_forward_hook(moved).remove)
        yield narrow
