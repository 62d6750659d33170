"""What is asked of a pipeline: its stages, their schedule, and how the batch goes through them.
search/parallel/pipelined.py makes it.

Sources: GPipe (Huang et al. 2019, arXiv 1811.06965), 1F1B (Narayanan et al. 2019, arXiv 1806.03377),
interleaved (Narayanan et al. 2021, arXiv 2104.04473, sec. 2.2).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, cast

from effcompile.core.errors import UsageError
from effcompile.ir.plan import Declined
from effcompile.ir.strategy import Schedule, Strategy
from effcompile.passes.training.base import Case, RequestError, StepChoice, StepContext, StepOption

__all__ = ["KIND", "SITE", "Pipeline"]

SITE, KIND = "layers", "pipeline"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """Layers divided among `ranks` that hand micro-batches on to each other; nothing for one.

    `ranks`: of the pipeline. `stages`: of each rank, more than one for the interleaved schedule. `schedule`:
    1f1b, interleaved or gpipe. `micro_batches`: 0 for as many as divide the batch, up to four for each rank.
    `cuts`: layers of each stage.
    """

    ranks: int = 1
    stages: int = 1
    schedule: str = "1f1b"
    micro_batches: int = 0
    cuts: tuple[int, ...] = ()

    name: ClassVar[str] = "pipeline"
    exact: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if min(self.ranks, self.stages) < 1 or self.micro_batches < 0:
            raise UsageError(
                f"pipeline.ranks = {self.ranks}, stages = {self.stages}, micro_batches = "
                f"{self.micro_batches}: give numbers."
            )
        if self.schedule == "zero-bubble":
            raise UsageError(
                "pipeline.schedule = zero-bubble keeps what is computed again until the weights' turn: it "
                "is planned, not lowered."
            )
        if self.ranks > 1:
            _ = self.strategy

    @property
    def strategy(self) -> Strategy:
        """As it is simulated.

        Raises:
            UsageError: fields that contradict each other.
        """
        return Strategy(
            pp=self.ranks, vpp=self.stages, schedule=cast("Schedule", self.schedule), cuts=self.cuts
        )

    def count(self, batch: int) -> int:
        """Micro-batches of a batch.

        Raises:
            UsageError: they do not divide it, or the schedule wants others.
        """
        turn = self.ranks if self.schedule == "interleaved" else 1
        fitting = [n for n in range(2, batch + 1) if batch % n == 0 and n % turn == 0]
        wanted = self.micro_batches or max((n for n in fitting if n <= 4 * self.ranks), default=0)
        if wanted not in fitting:
            said = f" in groups of {turn}" if turn > 1 else ""
            known = f"Possible: {', '.join(map(str, fitting[:8]))}." if fitting else "Give a larger batch."
            raise UsageError(
                f"A batch of {batch} does not divide into {wanted or 'two or more'} micro-batches{said}. "
                f"{known}"
            )
        return wanted

    def propose(self, case: Case, context: StepContext) -> Iterator[StepChoice | Declined]:
        """Nothing: the stages of a pipeline are steps of their own.

        Raises:
            RequestError: a pipeline is asked of what plans one step.
        """
        if self.ranks > 1:
            raise RequestError(
                "A pipeline is planned for the ranks of a mesh: give optimize(..., mesh=...) or --devices."
            )
        yield from ()

    def apply(self, case: Case, choice: StepChoice, option: StepOption) -> Case:
        """The step as it is: what a plan says of its stages is for the ranks."""
        return case
