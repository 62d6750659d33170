"""The contract of a backend: say what it cannot do, time kernels, lower a program."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch

from effcompile.core.goal import Goal
from effcompile.core.reasons import Reason
from effcompile.ir.formats import Form
from effcompile.ir.plan import Plan
from effcompile.ir.program import Program
from effcompile.machine.target import KernelCall

Run = Callable[[Mapping[str, torch.Tensor]], list[torch.Tensor]]


@runtime_checkable
class Lowered(Protocol):
    """What a backend made of a program: flat tensors in, flat tensors out, in the order of
    `program.inputs/outputs`.
    """

    #: site → form as *found in the artifact* after lowering, never copied from the plan: the compiler
    #: compares the two.
    applied: Mapping[str, Form]
    #: how it is run ("threads": 2, ...), for the plan.
    settings: Mapping[str, Any]
    #: bytes of weights in the artifact, as stored.
    weight_bytes: int

    def __call__(self, *inputs: torch.Tensor) -> list[torch.Tensor]: ...

    def save(self, directory: Path) -> tuple[Path, ...]:
        """Write the artifact's files into a folder that nobody reads yet; returns them, the one to open
        first.

        Raises:
            OSError: the folder cannot be written. LoweringError: the model cannot be saved.
        """
        ...

    def tune(self, inputs: Sequence[torch.Tensor]) -> bool:
        """Time what can be set and changes speed only, and keep what is fastest; whether anything is set
        anew.

        Asked once of a result that is within the goal: one that is thrown away is not worth the seconds.
        """
        ...

    def rest(self) -> None:
        """Let go of memory that the next call can fill again from a file: another result is built or verified
        meanwhile.
        """
        ...

    def peak_bytes(self, inputs: Sequence[torch.Tensor]) -> int | None:
        """Peak bytes of weights and activations over one call, measured; None where this backend cannot."""
        ...


@runtime_checkable
class Leaner(Protocol):
    """A lowered program that can be set to hold less, at the price of some time."""

    def leaner(self) -> bool:
        """Set it so; False where it is."""
        ...


@runtime_checkable
class Backend(Protocol):
    """One way to run a program.

    Instances are stateless; importing the module must not import heavy packages.
    """

    name: ClassVar[str]
    #: pairs of linear options that cannot stand side by side in one model; the compiler solves once without
    #: each.
    conflicts: ClassVar[tuple[tuple[str, str], ...]]
    #: how much slower than the best it may be predicted and still be worth building, beyond what all are
    #: allowed: above 1 where the backend fuses element-wise work that is priced kernel by kernel.
    slack: ClassVar[float]
    #: bytes that lowering takes at its highest beside the model, in times of the program's weights; measured.
    copies: ClassVar[float]
    # One that runs steps of generation says where the class is that does: `of_steps`, as the registry has it.
    # One that multiplies tokens in groups by expert says so: `groups_tokens = True`; no weights are then
    # copied for it. One whose products of bf16 come out in fp32 on this machine: `sums_bf16()`, a method.
    # One that can tell it beforehand says why it is not priced beside a plan of another: `beaten_by(plan)`, a
    # Reason or None. One whose kernels take long to make and contain another says which: `no_less(call)`, the
    # KernelCall that none of them takes less than, or None (search/bound.py).

    def unavailable(self) -> Reason | None:
        """None, or why this backend cannot run here, with the install line."""
        ...

    def refuses(self, program: Program, goal: Goal) -> Reason | None:
        """None, or why this program cannot be lowered."""
        ...

    def lacks(self, call: KernelCall) -> Reason | None:
        """Why there is no such kernel on any machine; None where there may be one."""
        ...

    def measure(self, call: KernelCall) -> float | None:
        """Seconds (median, warm, with this machine's thread count) of one kernel; None if there is no such
        kernel here.

        What it raises counts as None too, and is the reason that a user is told.
        """
        ...

    def lower(self, program: Program, plan: Plan, calibration: Sequence[Sequence[torch.Tensor]]) -> Lowered:
        """Build what the plan's tags say. `calibration`: flat input lists for static quantisation.

        Raises:
            LoweringError: it could not be built, loaded or run.
        """
        ...

    def open(self, directory: Path, plan: Plan) -> Run:
        """A saved artifact as a callable: named tensors in the plan's order of inputs → flat outputs.

        Raises:
            UsageError: there is no artifact in `directory`. FormatError, LoweringError: it is not one of this
                backend.
        """
        ...
