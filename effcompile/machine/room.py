"""How much memory planning and verifying may take: a quarter and 1 GiB above the larger of the model and the
budget.

What else the process held before planning began (the user's data, other models) is the user's and does not
count.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch import nn

from effcompile.core.errors import EffcompileError, OutOfMemoryError
from effcompile.core.stages import first_line, is_no_memory
from effcompile.core.units import format_bytes
from effcompile.machine import memory

_BEYOND = 1 << 30
#: Resident bytes of an interpreter that has loaded torch and this package: a part of the 1 GiB.
_LIBRARIES = 1 << 29
#: Resident bytes when planning began.
_BEFORE: ContextVar[int] = ContextVar("resident before planning", default=0)
#: Share of what is free that a step may take: others allocate too.
_SHARE = 0.9


@contextlib.contextmanager
def planning() -> Iterator[None]:
    """One request.

    Memory that runs out within is an error in words, wherever the system refuses it instead of ending the
    process.

    Raises:
        OutOfMemoryError: the system, a limit of it, or a GPU gave no more.
    """
    before = _BEFORE.set(_BEFORE.get() or memory.resident_bytes())  # of the outermost request
    try:
        yield
    except EffcompileError:
        raise
    except (MemoryError, RuntimeError, OSError) as error:
        if not is_no_memory(error):
            raise
        free = memory.free_bytes()
        there = "" if free is None else f", {format_bytes(free)} free"
        raise OutOfMemoryError(
            "Memory ran out while the model was planned or verified "
            f"({format_bytes(memory.resident_bytes())} resident{there}): {first_line(error)}. Raise the "
            "limit (ulimit -v, the control group's memory), close what else holds memory, or use `plan`, "
            "which runs nothing of the model."
        ) from error
    finally:
        _BEFORE.reset(before)
        memory.give_back()  # what planning took and freed is no more resident when the user goes on


def device_of(model: nn.Module) -> str:
    """The type of device that a model's calls and steps run on: that of its first parameter."""
    return next((p.device.type for p in model.parameters()), "cpu")


class NoRoomError(EffcompileError):
    """Something that was tried needs more memory than it may take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """A limit of what is resident while a model is planned and verified.

    Attributes:
        device: type of the model's. allowed: bytes that may be resident there in all; infinite without a
            budget.
    """

    device: str
    allowed: float

    @classmethod
    def of(cls, device: str, model_bytes: int, budget: int | None) -> Room:
        """For a model of so many bytes. Without a budget only what is free counts."""
        others = 0 if device == "cuda" else max(0, _BEFORE.get() - model_bytes - _LIBRARIES)
        return cls(
            device=device,
            allowed=math.inf if budget is None else 1.25 * max(model_bytes, budget) + _BEYOND + others,
        )

    def left(self) -> float:
        """Bytes that may still be allocated."""
        free = memory.free_bytes(self.device)
        taken = torch.cuda.memory_allocated() if self.device == "cuda" else memory.resident_bytes()
        return min(self.allowed - taken, math.inf if free is None else _SHARE * free)

    def tidy(self) -> None:
        """Return what was freed to the system, once half of what is allowed is resident."""
        if memory.resident_bytes() > 0.5 * self.allowed:
            memory.give_back()

    def refusal(self, more: int, whole: int) -> str | None:
        """None, or why what allocates `more` bytes, `whole` of them with what is there, is not run."""
        free = memory.free_bytes(self.device)
        if free is not None and more > _SHARE * free:
            return f"needs {format_bytes(whole)}, and {format_bytes(free)} are free"
        if more > (left := self.left()):
            return (
                f"needs {format_bytes(whole)}, about {format_bytes(more)} of it beside what is resident, "
                f"where planning within this budget may take {format_bytes(max(0, int(left)))} more "
                f"({format_bytes(int(self.allowed))} in all)"
            )
        return None

    def check(self) -> None:
        """Raises NoRoomError when the limit is reached."""
        if self.left() <= 0:
            raise NoRoomError(
                f"reached the {format_bytes(int(min(self.allowed, 1 << 60)))} that may be taken, or what "
                "is free"
            )
