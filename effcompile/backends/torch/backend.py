"""The torch backends: one set of graph edits, run operator by operator or compiled by Inductor."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import torch

from effcompile.backends.base import Run
from effcompile.backends.torch import numerics
from effcompile.backends.torch.edit import edit
from effcompile.backends.torch.lowered import ARTIFACT, TorchLowered, load_flat, lower_eager, lower_inductor
from effcompile.backends.torch.measure import measure
from effcompile.backends.torch.on_gpu import Recorded, on_gpu
from effcompile.core.goal import Goal
from effcompile.core.reasons import Reason, Unsupported
from effcompile.ir.formats import (
    BF16,
    INT4_GROUPS,
    INT8_CHANNEL,
    INT8_DYNAMIC,
    INT8_GROUPS,
    INT8_STATIC,
    INT8_TOKEN,
    INT13_TOKEN,
    W4,
    W8_CHANNEL,
)
from effcompile.ir.of_sizes import may_be_kept
from effcompile.ir.plan import Decision, Plan
from effcompile.ir.program import Program
from effcompile.machine.cold import FEW_ROWS
from effcompile.machine.target import KernelCall
from effcompile.ops import bf16_linear, row_program

#: Weights below which a linear is left as it is.
_LEAST = 1 << 16
#: Weights below which reading half of their bytes saves less than two more calls of regions take, some 70 us.
_SMALL = 1 << 20


def _breaks_regions(call: KernelCall) -> Unsupported | None:
    """Why a linear of few rows is not offered in torch's own formats of weights alone, and a small one not in
    bf16 by oneDNN: one between ours ends the region that they are in (regions.py), which no price of a linear
    tells.
    """
    if call.format is None or call.format.family not in (W4.family, W8_CHANNEL.family, BF16.family):
        return None
    weights = call.dims[1] * call.dims[2]
    if call.dims[0] > FEW_ROWS or weights < _LEAST or not row_program.available():
        return None
    if call.format.family == BF16.family:
        said = "for few rows it ends the call of all layers, which costs more than its fewer bytes save"
        return Unsupported(said) if weights < _SMALL and not bf16_linear.multiplies(call.dims[0]) else None
    return Unsupported(
        "for few rows int8_groups and int4_groups read as little, and stay in one call of all layers"
    )


#: Formats whose products are our kernels, and the share of a plan's time beside those from which on Inductor
#: may hasten it: compiled loops read and write what ours do, so that of less not half can be saved.
_OURS = frozenset(each.family for each in (INT8_TOKEN, INT13_TOKEN, INT8_GROUPS, INT4_GROUPS))
_MAY_HASTEN = 0.1


def _beside_ours(plan: Plan) -> float:
    """The share of a plan's predicted time that Inductor may hasten: beside products by our kernels,
    attentions and tables, which it calls as they are; residual norms by our kernel, one pass over what one of
    Inductor's reads and writes, too; and activations, whose neighbours are products: no loop to be one with.
    """

    def as_they_are(made: Decision) -> bool:
        if made.kind in ("linear", "merge"):
            held = made.form.weights if made.form is not None else None
            return held is not None and held.family in _OURS
        passes = {"embedding": True, "gelu": True, "norm": made.option == "fused"}
        return passes.get(made.kind, made.kind == "attention" and made.option != "math")

    ours = sum(made.cost.seconds for made in plan.decisions if as_they_are(made))
    return 1 - ours / max(plan.predicted.seconds or 0.0, ours, 1e-12)


class TorchEager:
    """Runs the edited graph as it is. Nothing is compiled: ready at once, at any shape."""

    name: ClassVar[str] = "torch-eager"
    groups_tokens: ClassVar[bool] = True
    conflicts: ClassVar[tuple[tuple[str, str], ...]] = ()
    slack: ClassVar[float] = 1.0
    copies: ClassVar[float] = 1.25
    of_steps: ClassVar[str] = "effcompile.backends.torch:TorchEager"

    def unavailable(self) -> Unsupported | None:
        return None

    def refuses(self, program: Program, goal: Goal) -> Unsupported | None:
        return _only_forward(goal)

    def lacks(self, call: KernelCall) -> Reason | None:
        return numerics.lacks(call) or _breaks_regions(call)

    def sums_bf16(self) -> bool:
        return bf16_linear.fallback_reason() is None

    def measure(self, call: KernelCall) -> float | None:
        return None if _breaks_regions(call) else measure(call, "eager")

    def lower(
        self, program: Program, plan: Plan, calibration: Sequence[Sequence[torch.Tensor]]
    ) -> TorchLowered:
        """See `backends.base.Backend.lower`; acts on `program.tags`."""
        return on_gpu(
            lower_eager(edit(program, calibration), keeps=plan is not None and may_be_kept(plan.goal)), plan
        )

    def open(self, directory: Path, plan: Plan) -> Run:
        return opened(directory, plan)


class TorchInductor:
    """Compiles the edited graph with Inductor, weights frozen: element-wise work is fused, linears stay
    oneDNN calls.
    """

    name: ClassVar[str] = "torch-inductor"
    groups_tokens: ClassVar[bool] = True
    conflicts: ClassVar[tuple[tuple[str, str], ...]] = ()
    slack: ClassVar[float] = 1.0
    copies: ClassVar[float] = 3.0

    def unavailable(self) -> Unsupported | None:
        compilers = (os.environ.get("CXX"), "g++", "clang++", "cl")
        if not any(name and shutil.which(name) for name in compilers):
            return Unsupported(
                "Inductor needs a C++ compiler and none was found. Install one with: apt-get install g++"
            )
        if importlib.util.find_spec("torch._inductor") is None:
            return Unsupported("this torch was built without Inductor. Install one with: pip install torch")
        return None

    def refuses(self, program: Program, goal: Goal) -> Unsupported | None:
        return _only_forward(goal)

    def beaten_by(self, plan: Plan) -> Reason | None:
        """Why it is not priced beside a plan of torch-eager on a processor: compiling kernels to price takes
        as long as all other prices, and building the result as long again.
        """
        elsewhere = torch.get_default_device().type != "cpu" or plan.backend != TorchEager.name
        if elsewhere or plan.goal.minimize != "time" or (beside := _beside_ours(plan)) > _MAY_HASTEN:
            return None
        return Unsupported(
            "not priced: {share} of torch-eager's plan is in kernels that it calls, too, or cannot make "
            "faster (--effort high does)",
            (1 - beside,),
        )

    def lacks(self, call: KernelCall) -> Reason | None:
        return numerics.lacks(call)

    def no_less(self, call: KernelCall) -> KernelCall | None:
        """Of a linear in 8 bits whose quantiser is compiled its product, which is not."""
        compiled = call.format in (INT8_DYNAMIC, INT8_CHANNEL, INT8_STATIC)
        return KernelCall("product/int8", call.dims[:3]) if compiled else None

    def measure(self, call: KernelCall) -> float | None:
        return None if self.unavailable() else measure(call, "inductor")

    def lower(
        self, program: Program, plan: Plan, calibration: Sequence[Sequence[torch.Tensor]]
    ) -> TorchLowered:
        """See `backends.base.Backend.lower`; acts on `program.tags`."""
        return on_gpu(lower_inductor(edit(program, calibration, compiled=True)), plan)

    def open(self, directory: Path, plan: Plan) -> Run:
        return opened(directory, plan)


def opened(directory: Path, plan: Plan) -> Run:
    """The saved artifact at work; on a GPU its calls are recorded as they were where it was made."""
    run, graph = load_flat(plan.file(directory, ARTIFACT))
    calls = Recorded(run, graph, plan)
    return lambda tensors: calls(*tensors.values())


def _only_forward(goal: Goal) -> Unsupported | None:
    return (
        None
        if goal.mode != "training"
        else Unsupported("it lowers forward calls only; training runs through the training backend")
    )
