"""The model's own step, which the planned one is compared with."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from effcompile.machine.room import NoRoomError, Room
from effcompile.passes.training.base import Case
from effcompile.proof.spool import Spool
from effcompile.proof.training import verify
from effcompile.proof.training.exact import in_float64, rounded_otherwise
from effcompile.proof.training.lean import behind, lean
from effcompile.search.training.work import Work


@dataclass(frozen=True, kw_only=True)
class Original:
    """The model's own step: as it is, or, where that does not fit (`refusal`), leanly."""

    work: Work
    case: Case
    folder: str
    room: Room
    refusal: str | None

    def run(self, step: Callable[[], torch.Tensor], name: str = "run the original step") -> verify.Result:
        """The result, with its gradients put aside.

        Raises:
            NoRoomError: not even a lean run fits.
        """
        if self.refusal is None:
            with self.work.progress.step(name):
                return verify.run(step, self.work.model, self.work.leaves, Spool(self.folder))
        gradients = Spool(self.folder, behind=behind(self.room.left()))
        with (
            self.work.progress.step(f"{name} leanly"),
            lean(self.work.model, self.work.leaves, gradients, self.room),
        ):
            # no peak is told of it, and recording a lean run's allocations takes a second
            return verify.run(step, self.work.model, self.work.leaves, gradients, watched=False)

    def once(self, originals: dict[bool, verify.Result]) -> verify.Result:
        """The step as the model takes it, as it was run before for another plan: no plan changes it.

        Raises:
            NoRoomError: as in `run`.
        """
        leanly = self.refusal is not None
        if leanly not in originals:
            originals[leanly] = self._run_first()
        return originals[leanly]

    def _run_first(self) -> verify.Result:
        """The step as the model takes it, which tells what its forward keeps, where nobody called it before;
        if it does not, it is called alone, before anything that it kept is held against the guards.
        """
        source, step = self.case.source, self.work.eager_loss
        if source is None:
            return self.run(step)
        try:
            found = self.run(source.tells(step))
        except NoRoomError:
            source.call_alone()
            raise
        source.call_alone()
        return found

    def truth(self, wanted: verify.Result, peak_bytes: int) -> verify.Result | None:
        """What tells rounding from an error: the step in float64, or where that does not fit, in 16 bits
        rounded otherwise.
        """
        if (found := in_float64(self.work, self.room, wanted, peak_bytes)) is not None:
            return found
        with contextlib.suppress(NoRoomError), rounded_otherwise(self.work.model) as narrow:
            if narrow:
                return replace(
                    self.run(self.work.eager_loss, "run the original step rounded otherwise"),
                    named="eager's rounded otherwise",
                )
        return None
