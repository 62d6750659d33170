"""Precision by stage: which products a stage may compute in, e.g. fp8 for most of a run and bf16
at its end.
"""

from __future__ import annotations

from typing import ClassVar

from effcompile.core.errors import UsageError
from effcompile.passes.training.precision import DTYPES
from effcompile.runs.fields.base import Effect
from effcompile.runs.fields.values import StageValues

FP32 = "fp32"


class StagePrecision(Effect):
    """`precision`: fp32, or a dtype of the pass `precision`, which then is taken whether it is
    faster or not.
    """

    name: ClassVar[str] = "precision"

    @classmethod
    def check(cls, stage: StageValues) -> None:
        if stage.precision == "int8":
            raise UsageError(
                "Stage(precision='int8'): training with products in int8 is not built: its gradients need "
                "kernels that neither torch nor torchao has on a CPU. Use 'bf16'."
            )
        if stage.precision not in (FP32, *DTYPES):
            raise UsageError(
                f"Stage(precision={stage.precision!r}): one of {', '.join((FP32, *DTYPES))} is wanted."
            )

    @property
    def passes(self) -> tuple[str, ...]:
        if self.value == FP32:
            return ("no-precision",)
        return (f"precision.dtypes={self.value}", "precision.always=true")
