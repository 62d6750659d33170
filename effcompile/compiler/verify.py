"""Compares a lowered model with the original, where outputs mean something: padded positions are left out."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from effcompile.backends.base import Lowered
from effcompile.capture import variants
from effcompile.capture.mends import as_reference
from effcompile.capture.verify import relative_error
from effcompile.errors import LoweringError
from effcompile.goal import Goal
from effcompile.plan import Check
from effcompile.program import Program

Run = Callable[..., Any]


@dataclass(frozen=True, kw_only=True)
class Reference:
    """One input of the verification and what the original model returns for it."""

    name: str
    inputs: tuple[torch.Tensor, ...]
    outputs: tuple[torch.Tensor, ...]


def references(program: Program, model: nn.Module, goal: Goal, calibration: Sequence[tuple[Any, Any]] = ()) -> list[Reference]:
    """The original's outputs on the example, a second shape, a padded mask, and one calibration input.

    Computed once: a plan that is corrected and lowered again is compared with the same outputs.
    """
    cases = variants(program)
    cases += [("calibration input", args, dict(kwargs)) for args, kwargs in list(calibration)[:1]]
    found = []
    with as_reference(model):
        for name, args, kwargs in cases:
            try:
                outputs = model(*args, **kwargs)
            except Exception:  # an input of our making that the model refuses proves nothing
                continue
            inputs = program.flat_inputs(args, kwargs)
            found.append(Reference(name=name, inputs=tuple(inputs), outputs=tuple(_read(_tensors(outputs), goal))))
    return found


def verify(lowered: Lowered, program: Program, cases: Sequence[Reference], goal: Goal) -> list[Check]:
    """One check per case: relative L2 error over all outputs, against the goal's tolerance."""
    return [_check(lowered, program, case, goal) for case in cases]


def worst(checks: Sequence[Check]) -> float:
    """The largest error of all checks."""
    return max((check.error for check in checks), default=0.0)


def _check(lowered: Lowered, program: Program, case: Reference, goal: Goal) -> Check:
    try:
        found = _read(lowered(*case.inputs), goal)
    except LoweringError as failure:
        return Check(name=case.name, error=math.inf, limit=goal.tolerance, note=str(failure))
    mask = _mask(program, case.inputs)
    pairs = list(zip(found, case.outputs, strict=False))
    if len(found) != len(case.outputs):
        return Check(name=case.name, error=math.inf, limit=goal.tolerance, note=f"{len(found)} outputs instead of {len(case.outputs)}")
    error = max((relative_error(_seen(a, mask), _seen(b, mask)) for a, b in pairs), default=0.0)
    hidden = mask is not None and not bool(mask.bool().all())
    return Check(name=case.name, error=error, limit=goal.tolerance, note="padded positions left out" if hidden else "")


def _read(outputs: Sequence[torch.Tensor], goal: Goal) -> list[torch.Tensor]:
    """The positions that the goal says are read."""
    if goal.reads == "all":
        return list(outputs)
    return [output[:, -1:] if output.dim() == 3 else output for output in outputs]


def _seen(output: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """An output's rows at unpadded positions, where it has a (batch, seq) front like the mask's."""
    if mask is None or output.dim() < 3 or output.shape[:2] != mask.shape:
        return output
    return output[mask.bool()]


def _mask(program: Program, inputs: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """The padding mask among the inputs: 1 for a token, 0 for a pad."""
    for spec, tensor in zip(program.inputs, inputs, strict=True):
        if spec.name.endswith("attention_mask") and tensor.dim() == 2 and not tensor.is_floating_point():
            return tensor
    return None


def _tensors(outputs: Any) -> list[torch.Tensor]:
    return [leaf.detach() for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, torch.Tensor)]
