"""What a plan says of the axes of a mesh, and what planning is asked for them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from effcompile.core.errors import FormatError
from effcompile.ir.plan import Plan
from effcompile.passes import TrainingPasses
from effcompile.passes.training import pipeline, shard, tensor
from effcompile.passes.training.pipeline import Pipeline
from effcompile.passes.training.shard import Shard
from effcompile.passes.training.tensor import TensorParallel

_WORDS = {option: word for word, option in shard.FORMS.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class AlongAxes:
    """How a step in stages is divided along each axis."""

    pipeline: Pipeline
    tensor: TensorParallel
    shard: Shard

    @classmethod
    def asked(cls, passes: TrainingPasses) -> AlongAxes:
        """What is asked for."""
        return cls(pipeline=passes.pipeline, tensor=passes.tensor, shard=passes.shard)

    @classmethod
    def decided(cls, plan: Plan, rank: int) -> AlongAxes:
        """What a plan decided, for a rank along "tp".

        Raises:
            FormatError: its settings are not known here.
        """
        axes, form = axes_of(plan), form_of(plan)
        if form not in _WORDS:
            raise FormatError(f"The plan has {shard.KIND} = {form!r}, which is not known here. Plan again.")
        return cls(
            pipeline=pipeline_of(plan),
            tensor=TensorParallel(ranks=axes["tp"], rank=rank),
            shard=Shard(ranks=axes["dp"], forms=(_WORDS[form],)),
        )


def axes_of(plan: Plan) -> dict[str, int]:
    """Axis of the mesh → the ranks along it that a plan is for."""
    kinds = {shard.KIND: "dp", tensor.KIND: "tp", pipeline.KIND: "pp"}
    found = {kinds[d.kind]: d.settings.get("ranks") for d in plan.decisions if d.kind in kinds}
    along = {"dp": found.get("dp"), "tp": found.get("tp"), "pp": found.get("pp")}
    return {axis: ranks if isinstance(ranks, int) else 1 for axis, ranks in along.items()}


def ranks_of(plan: Plan) -> int:
    """The ranks that a plan is for; 1 for none."""
    return math.prod(axes_of(plan).values())


def form_of(plan: Plan) -> str:
    """How parameters lie along "dp"."""
    return next((d.option for d in plan.decisions if d.kind == shard.KIND), shard.REPLICATED)


def beside_any(plan: Plan) -> bool:
    """Whether it is in stages that know of no data-parallel ranks, and so can stand beside any number of
    them.
    """
    return axes_of(plan)["pp"] > 1 and form_of(plan) == shard.REPLICATED


def passes_for(dp: int, tp: int) -> tuple[str, ...]:
    """What planning is asked for so many ranks along each axis."""
    return f"{Shard.name}.ranks={dp}", f"{TensorParallel.name}.ranks={tp}"


def form_pass(plan: Plan) -> str:
    """What planning is asked for a plan's form."""
    return f"{Shard.name}.forms={_WORDS[form_of(plan)]}"


def pipeline_of(plan: Plan) -> Pipeline:
    """The pipeline that a plan decided on.

    Raises:
        FormatError: its settings are not known here.
    """
    settings = next(d.settings for d in plan.decisions if d.kind == pipeline.KIND)
    numbers = {name: settings.get(name) for name in ("ranks", "stages", "micro_batches")}
    cuts, schedule = settings.get("cuts"), settings.get("schedule")
    if (
        not all(isinstance(value, int) for value in numbers.values())
        or not isinstance(cuts, tuple)
        or not isinstance(schedule, str)
    ):
        raise FormatError(
            f"The plan's decision {pipeline.KIND} has settings that are not known here: {dict(settings)}. "
            "Plan again."
        )
    return Pipeline(**numbers, cuts=tuple(map(int, cuts)), schedule=schedule)  # type: ignore[arg-type]
