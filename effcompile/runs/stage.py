"""A stage: what holds for a while in a run."""

from __future__ import annotations

from dataclasses import dataclass

from effcompile.core.errors import UsageError
from effcompile.runs.fields import FIELDS
from effcompile.runs.fields.base import check_count
from effcompile.runs.fields.values import StageValues

PLATEAU = "plateau"


@dataclass(frozen=True, kw_only=True)
class Stage(StageValues):
    """What holds for a while.

    Attributes:
        steps: how many; with `until` at the most. name: in the report.
        sequence: tokens of an example, for `inputs`, which makes the stage's example inputs.
        image: pixels of a side, for `inputs` too; learned positions of a vision transformer are interpolated.
        depth: layers of the model; those of the first stage are its first ones. move: how it grows: "stack"
            copies the whole list, "interpolate" each layer, "identity" each layer with branches that end in
            zero, which keeps the function.
        layers: the share of the layers that a step runs on average. tokens: the share of the tokens that the
            layers run on.
        sparsity: the share of the linears' weights that is zero; backward_sparsity: of those that get no
            gradient (Top-KAST).
        precision: what products are computed in: "fp32", "bf16", "fp16", "fp8", "int8"; needs a max_error.
        average: of how many of the last checkpoints `Run.averaged` is the mean. Their bytes count.
        data: the share of the examples that `Active.examples` names, those of the highest `scores`
            (`effcompile.scores`).
        init: how the first stage begins: "fixup", "t-fixup", "rezero", "skipinit", "layerscale", "mup".
        until: "plateau" ends the stage when its loss no longer falls.
        batch: sizes of the batch to choose from, see `optimize`; None takes the run's, or that of the example
            inputs.
        max_error: of the gradient; None takes the run's. passes: which passes; None takes the run's.

    Raises:
        UsageError: a value that is none.
    """

    def __post_init__(self) -> None:
        check_count(self, "steps")
        if self.sequence is not None:
            check_count(self, "sequence")
        if self.until not in (None, PLATEAU):
            raise UsageError(f"Stage(until={self.until!r}): {PLATEAU!r} is wanted, or None for all steps.")
        for name, field in FIELDS.items():
            if getattr(self, name) is not None:
                field.check(self)

    @property
    def sizes(self) -> str:
        """What holds in it, in words."""
        said = ("sequence", *(name for name in FIELDS if name != "init"))
        return ", ".join(
            f"{name.replace('_', ' ')} {value}" for name in said if (value := getattr(self, name)) is not None
        )
