"""Latest weight averaging: the mean of the last checkpoints of a stage (Kaddour 2022, arXiv 2209.14981), by
torch.optim.swa_utils.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from effcompile.core.errors import UsageError
from effcompile.runs.carry import size_of
from effcompile.runs.fields.base import Effect, check_count
from effcompile.runs.fields.values import StageValues

#: A stage takes so many checkpoints for each one that is averaged: the paper's are the last 6 of 90 epochs.
#: With half of a run averaged the mean was behind the last weights in every seed (benchmarks/schedules.py
#: learn averages).
_OFTEN = 15


class Average(Effect):
    """`average`: how many of the last checkpoints.

    Each is a copy beside the model: on a machine with a host of its own, there.
    """

    name: ClassVar[str] = "average"

    def __post_init__(self) -> None:
        self.copies: list[dict[str, Tensor]] = []
        self.steps = 0

    @classmethod
    def check(cls, stage: StageValues) -> None:
        check_count(stage, "average")

    @property
    def every(self) -> int:
        """Steps from one checkpoint to the next."""
        return max(1, self.stage.steps // (_OFTEN * int(self.value)))

    def bytes_beside(self, model: nn.Module) -> int:
        """The copies; of a model on another device they lie on the host."""
        here = next(iter(model.parameters())).device.type in ("cpu", "meta")
        return int(self.value) * size_of(model) if here else 0

    def stepped(self, model: nn.Module) -> None:
        self.steps += 1
        if self.steps % self.every == 0:
            self.copies.append(
                {name: value.detach().to("cpu", copy=True) for name, value in model.state_dict().items()}
            )
            del self.copies[: -int(self.value)]

    def averaged(self, model: nn.Module) -> nn.Module:
        """A copy of the model with the mean of the checkpoints.

        Raises:
            UsageError: there is none yet.
        """
        if not self.copies:
            raise UsageError(
                f"There is no checkpoint to average yet: the first is taken after {self.every} steps of "
                "the stage."
            )
        scratch = copy.deepcopy(model)
        mean = AveragedModel(scratch, use_buffers=True)
        for one in self.copies:
            scratch.load_state_dict(one)
            mean.update_parameters(scratch)
        found: nn.Module = mean.module
        return found

    def state(self) -> Mapping[str, object]:
        return {"copies": self.copies, "steps": self.steps}

    def load(self, state: Mapping[str, Any]) -> None:
        self.copies, self.steps = list(state["copies"]), int(state["steps"])
