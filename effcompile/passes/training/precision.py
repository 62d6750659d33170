"""Precision: products of a training step in 16 bits, with parameters, gradients and the optimizer in fp32.

Micikevicius et al. 2018 (arXiv 1710.03740). Which operators run in 16 bits is torch.autocast's own decision, made while the step is
captured, so that every cast is an operator that the planner prices, keeps or repeats like any other; a parameter is cast once per step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import ClassVar

import torch

from effcompile.capture.float8 import unavailable
from effcompile.core.errors import UnknownNameError, UsageError
from effcompile.core.torch_compat_aot import is_random
from effcompile.estimate.halves import draws_as_fp32, product_ratio
from effcompile.ir.step import Step
from effcompile.machine.target import Target

SITE, KIND = "step", "precision"
BASELINE = "fp32"

BF16, FP16, FP8 = "bf16", "fp16", "fp8"
#: Those whose loss is scaled, so that small gradients do not vanish.
SCALED = frozenset({FP16})
#: What products may be computed in → the dtype of autocast, under which fp8 has its linears alone.
DTYPES: Mapping[str, torch.dtype] = MappingProxyType({BF16: torch.bfloat16, FP16: torch.float16, FP8: torch.bfloat16})
_NAMES = {torch.bfloat16: BF16, torch.float16: FP16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """Not exact: proposed only where the goal allows an error, which is measured against the fp32 step.

    `dtypes`: in order of preference: the first that the machine is fast in is planned, the next where its error is too large. bf16 has
    fp32's range; fp16 has three more bits, and its loss is scaled (torch.amp.GradScaler); fp8, only where it is named, is that of torchao's
    linears on GPUs that have it. `always`: also where fp32 is predicted faster.
    """

    dtypes: tuple[str, ...] = (BF16, FP16)
    always: bool = False

    name: ClassVar[str] = "precision"
    exact: ClassVar[bool] = False

    def __post_init__(self) -> None:
        for dtype in self.dtypes:
            if dtype not in DTYPES:
                raise UnknownNameError("precision", dtype, DTYPES)
        if not self.dtypes:
            raise UsageError(f"precision.dtypes is empty. Choose among {', '.join(DTYPES)}, or leave the pass out: no-precision.")

    def without(self, dtype: str) -> Precision | None:
        """The pass without one of its dtypes; None where none is left."""
        left = tuple(other for other in self.dtypes if other != dtype)
        return replace(self, dtypes=left) if left else None

    def refusal(self, dtype: str, step: Step, target: Target, *, here: bool) -> str | None:
        """Why a step in fp32 cannot, or need not, be planned in `dtype`; None where it can. `here`: the target is this machine."""
        if (own := narrow_dtype(step)) is not None:
            return f"the step computes in {own} already, as it was given"
        if dtype == FP8 and not here:
            return "its error cannot be measured from here: plan it on the machine itself"
        if not here:
            known = ", ".join(target.peak_flops)
            return None if dtype in target.peak_flops else f"{target.name} has no arithmetic in {dtype} (it has {known})"
        device = step.loss.meta["val"].device.type
        if dtype == FP8 and (reason := unavailable(device)) is not None:
            return reason
        ratio = product_ratio(DTYPES[dtype], device)
        if ratio > 1 and not self.always:
            return f"products in {dtype} take {ratio:.1f} × as long as in fp32 on this machine, measured"
        if any(is_random(node.target) for node in step.graph.nodes) and not draws_as_fp32(DTYPES[dtype], device):
            return f"its random masks would not be those of fp32 on {device}, so that the error cannot be measured"
        return None


def narrow_dtype(step: Step) -> str | None:
    """The 16-bit dtype that a step computes in, under the user's own autocast or by its parameters; None for none."""
    values = (node.meta.get("val") for node in step.graph.nodes)
    return next((_NAMES[value.dtype] for value in values if isinstance(value, torch.Tensor) and value.dtype in _NAMES), None)


def label(dtype: str) -> str:
    """In the plan's words."""
    return "fp8 linears" if dtype == FP8 else f"{dtype} autocast"
