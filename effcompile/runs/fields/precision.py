"""Precision by stage: which products a stage may compute in, e.g. fp8 for most of a run and bf16
at its end.
"""

from __future__ import annotations

from typing import ClassVar

from effcompile.core.errors import UsageError
from effcompile.passes.training.int8 import INT8, Int8Products
from effcompile.passes.training.precision import DTYPES
from effcompile.runs.fields.base import Effect
from effcompile.runs.fields.values import StageValues

FP32 = "fp32"


class StagePrecision(Effect):
    """`precision`: fp32, a dtype of the pass `precision`, or int8, the pass of that name, which then is taken
    whether it is faster or not.
    """

    name: ClassVar[str] = "precision"

    @classmethod
    def check(cls, stage: StageValues) -> None:
        known = (FP32, *DTYPES, INT8)
        if stage.precision not in known:
            raise UsageError(f"Stage(precision={stage.precision!r}): one of {', '.join(known)} is wanted.")

    @property
    def passes(self) -> tuple[str, ...]:
        if self.value == FP32:
            return ("no-precision",)
        if self.value == INT8:
            return (f"{Int8Products.name}.always=true",)
        return (f"precision.dtypes={self.value}", "precision.always=true")
