"""Token dropping: the layers run on a share of the tokens, drawn for each example at each step.

MAE (He et al. 2022, arXiv 2111.06377) and FLIP (Li et al. 2023, arXiv 2212.00794) encode the patches that are
visible; random token dropping (Yao et al. 2022, arXiv 2211.11586) lets the others pass by the layers. Here
the layers stand behind a gather, and the tokens that were left out come out of the stack as they went in, so
that heads and losses find as many as before. A model that masks by itself (`config.mask_ratio`) is told the
share instead.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

from torch import Tensor, nn

from effcompile.core.types import Example
from effcompile.runs.carry import Origins
from effcompile.runs.fields.base import Effect, check_share
from effcompile.runs.fields.values import StageValues
from effcompile.runs.layers import Forwards, behind_gather, drawn


class Tokens(Effect):
    """`tokens`: the share of them that the layers run on. The first token always is one of them."""

    name: ClassVar[str] = "tokens"
    _before: float | None = None
    _gather: Forwards | None = None

    @classmethod
    def check(cls, stage: StageValues) -> None:
        check_share(stage, "tokens")

    def change(self, model: nn.Module, example: Example) -> Origins:
        config: Any = getattr(model, "config", None)
        if hasattr(config, "mask_ratio"):
            self._config, self._before = config, config.mask_ratio
            config.mask_ratio = 1 - self.value
        return {}

    def end(self) -> None:
        if self._before is not None:
            self._config.mask_ratio = self._before

    def around(self, model: nn.Module) -> AbstractContextManager[None]:
        if self.value == 1 or self._before is not None:
            return nullcontext()
        if self._gather is None:
            self._gather = behind_gather(list(model.get_submodule(self.layers).children()), self._picked)
        return self._gather

    def _picked(self, hidden: Tensor) -> Tensor:
        return drawn(hidden, max(1, round(self.value * hidden.shape[1])))
