"""Models on a GPU: torch's graph with our operators on their tiled kernels, replayed as one CUDA graph for
each shape that comes again.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import torch

from effcompile.backends import triton as kernels
from effcompile.backends.base import Run
from effcompile.backends.torch import TorchEager, TorchLowered
from effcompile.backends.torch.edit import edit
from effcompile.backends.torch.lowered import lower_eager
from effcompile.backends.torch.measure import copies, in_turn, measure, seconds_of
from effcompile.backends.torch.measure_linears import Body
from effcompile.backends.torch.on_gpu import on_gpu
from effcompile.backends.triton import linears, rows_bodies
from effcompile.core.errors import LoweringError
from effcompile.core.goal import Goal
from effcompile.core.reasons import Reason, Unsupported
from effcompile.ir.plan import Plan
from effcompile.ir.program import Program
from effcompile.machine.target import KernelCall


class Triton:
    """The edited graph on the device that the model lies on."""

    name: ClassVar[str] = "triton"
    conflicts: ClassVar[tuple[tuple[str, str], ...]] = ()
    slack: ClassVar[float] = 1.0
    copies: ClassVar[float] = 1.25
    of_steps: ClassVar[str] = "effcompile.backends.triton.backend:Triton"

    def unavailable(self) -> Unsupported | None:
        return kernels.unavailable()

    def refuses(self, program: Program, goal: Goal) -> Unsupported | None:
        if goal.mode == "training":
            return Unsupported(
                "it lowers forward calls only; training runs through the training backend, on the same "
                "kernels"
            )
        if kernels.unavailable() is not None:
            return None  # a plan for a machine that is not here, where the model will lie on the GPU
        found = device_types(program)
        wanted = kernels.device()
        return (
            None
            if found == {wanted}
            else Unsupported.of(
                "its kernels are for tensors on {}; the model's are on {}",
                wanted,
                " and ".join(sorted(found)),
            )
        )

    def lacks(self, call: KernelCall) -> Reason | None:
        return linears.lacks(call)

    def measure(self, call: KernelCall) -> float | None:
        """On the GPU, with the tiled kernels; None for what only a CPU has."""
        device = kernels.device()
        if kernels.register(device) is not None:
            return None
        with torch.no_grad(), torch.device(device):
            made = _bodies(call, device)
            if made is None:
                return measure(call, "stock" if call.kernel.startswith("linear/") else "eager", device=device)
            run = in_turn(made)
            return None if run is None else seconds_of(run, device)

    def lower(
        self, program: Program, plan: Plan, calibration: Sequence[Sequence[torch.Tensor]]
    ) -> TorchLowered:
        """See `backends.base.Backend.lower`; acts on `program.tags`."""
        reason = kernels.register(kernels.device())
        if reason is not None:
            raise LoweringError(
                f"The Triton kernels cannot run {program.name}: {reason}. Plan again with another backend."
            )
        lowered = lower_eager(edit(linears.emit(program), calibration))
        return on_gpu(lowered, plan, kernels=_told(lowered.program))

    def open(self, directory: Path, plan: Plan) -> Run:
        """See `backends.base.Backend.open`."""
        kernels.register(kernels.device())
        return TorchEager().open(directory, plan)


def _bodies(call: KernelCall, device: str) -> list[Body | None] | None:
    """What to run in turn for a kernel of ours, or for a product in 16 bits; None for what torch
    alone has.
    """
    if call.kernel.startswith("rows/"):
        return [rows_bodies.body(call)]
    if call.kernel in linears.HALVES and device == "cuda":
        return [linears.half_body(call) for _ in range(copies(call))]
    if call.format is not None and call.format.family in (*linears.FAMILIES, *linears.GROUPED):
        return (
            [linears.body(call.format, call.dims) for _ in range(copies(call))]
            if linears.lacks(call) is None
            else []
        )
    return None


def device_types(program: Program) -> set[str]:
    """The types of device of a program's weights and inputs."""
    tensors = [*program.module.parameters(), *program.module.buffers(), *program.flat_inputs()]
    return {t.device.type for t in tensors}


def _told(program: Program) -> str:
    """Which of our operators stand in the graph, and where their tiles come from."""
    names = [
        getattr(node.target, "_schema", None) for node in program.graph.nodes if node.op == "call_function"
    ]
    ours = [
        schema.name.partition("::")[2]
        for schema in names
        if schema is not None and schema.name.startswith("effcompile::")
    ]
    counts = {name: ours.count(name) for name in sorted(set(ours))}
    found = ", ".join(f"{name} ×{count}" for name, count in counts.items()) or "none of ours in this plan"
    if program.carried:  # which become ours when the step is put together (in_place.py)
        found += "; attention over a cache"
    return f"{found}; {kernels.origin()}"
