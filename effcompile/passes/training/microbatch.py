"""Micro-batches: a step's batch in k equal parts, one after the other, whose gradients are added up.

Same result, smaller activations.

For k micro-batches let X_k be the schedules of one of them (all its loss heads, recomputation, offload,
compression, optimizer states), t_k(x) and m_k(x) a schedule's predicted time and simulated peak, A_k the time
of adding k times all gradients up, and E_k the bytes of the summed gradients, which are there throughout. The
plan is

    min over k of  min over x in X_k, m_k(x) + E_k ≤ budget  of  k · s_k · t_k(x) + A_k + update,

each inner problem being the one that is solved for a whole batch, with a certificate of its own; the least of
their bounds bounds them all. A k whose step without any recomputation takes as long as the best plan so far
is not solved: it cannot be faster. When k micro-batches fit with nothing recomputed, more of them are not
looked at, as they only make smaller operators of the same work.

Times of a micro-batch's operators are measured at its shapes, so that what small batches lose in efficiency
is in them. What they seem to gain is not: timed alone, small operators run out of the cache, so s_k ≥ 1 makes
k unplanned micro-batches no faster than the unplanned batch (measured: GPT-2, 4 layers, d 128, b8 s128 as 4 ×
2 took 7 % more CPU time; the sum of its operators said 35 % less).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import torch
from torch import fx
from torch.utils import _pytree as pytree

from effcompile.capture.source import Source
from effcompile.core.cost import Cost
from effcompile.core.errors import CaptureError, FormatError, InputsError, UsageError
from effcompile.core.reasons import Because, Divided, Reason, Unsupported
from effcompile.core.types import Args, Inputs, Kwargs
from effcompile.ir.footprint import GIVEN, GRADIENTS, Footprint
from effcompile.ir.plan import Decision, Declined
from effcompile.ir.step import DividedStep, Step
from effcompile.passes.training.base import (
    Case,
    Prices,
    RequestError,
    StepChoice,
    StepContext,
    StepOption,
    StepOutcome,
)
from effcompile.passes.training.consume import with_consumed_gradients
from effcompile.passes.training.separable import divided, divided_into_single
from effcompile.passes.training.separation import AnotherGraph
from effcompile.passes.training.step_edit import Refusal

SITE = "batch"
KIND = "micro-batches"


@dataclass(frozen=True, slots=True, kw_only=True)
class Microbatch:
    """Gradient accumulation, decided with everything else, for batches whose loss is a weighted sum over
    their examples.

    Takes part where it is named: gradients are then made when the loss is (`loss.backward()` hands them out),
    dropout draws other numbers than for the whole batch, and planning captures the step once more for every
    number of micro-batches.

    `count`: so many micro-batches, whatever else would be faster; 0: the planner chooses among the divisors
    of the batch.
    """

    count: int = 0

    name: ClassVar[str] = "microbatch"
    exact: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.count < 0:
            raise UsageError(
                f"microbatch.count = {self.count}: give the number of micro-batches, or 0 to have it chosen."
            )

    def propose(self, case: Case, context: StepContext) -> Iterator[StepChoice | Declined]:
        """The whole batch, and each number of micro-batches, captured when it is taken up."""
        if case.source is None:
            return
        batch = examples(case.source)
        counts = self.counts(batch)
        if batch == 1:
            yield Declined(
                site=SITE,
                kind=KIND,
                option=KIND,
                by=self.name,
                reason=Unsupported("no input has an axis of more than one example"),
            )
            return
        whole = [StepOption(name=label(1, batch))] * (self.count in (0, 1))
        parts = (
            StepOption(
                name=label(k, batch),
                settings={"count": k},
                told=_told,
                make=partial(_made, case, k, batch, context.prices),
            )
            for k in counts
        )
        yield StepChoice(
            site=SITE, kind=KIND, baseline=label(1, batch), options=(*whole, *parts), settled=not whole,
            tells=True
        )  # fmt: skip

    def apply(self, case: Case, choice: StepChoice, option: StepOption) -> Case:
        """The step of one micro-batch; its times are those of the plan that it comes from.

        Raises:
            FormatError: the plan's micro-batches do not divide this batch.
        """
        count, batch = option.setting("count", int), 1 if case.source is None else examples(case.source)
        if count < 2 or batch % count:
            raise FormatError(
                f"The plan has {count} micro-batches: a divisor of the batch of {batch} is wanted. Plan "
                "again."
            )
        return _made(case, count, batch)

    def counts(self, batch: int) -> list[int]:
        """The numbers of micro-batches to choose from, 1 (the whole batch) left out, few first.

        Raises:
            RequestError: the wanted one does not divide the batch.
        """
        divisors = [k for k in range(1, batch + 1) if batch % k == 0]
        if not self.count:
            return divisors[1:]
        if self.count not in divisors:
            below, above = (
                max(k for k in divisors if k < self.count),
                min((k for k in divisors if k > self.count), default=None),
            )
            near = f"{below}" + (f" and {above}" if above else "")
            raise RequestError(
                f"microbatch.count = {self.count}: a batch of {batch} does not divide into {self.count} "
                f"equal micro-batches. The nearest that do: {near}."
            )
        return [self.count] if self.count > 1 else []


def label(count: int, batch: int) -> str:
    """In the plan's words: "4 micro-batches of 2"."""
    return f"{count} micro-batches of {batch // count}" if count > 1 else f"whole batch of {batch}"


def batch_size(tensors: Iterable[torch.Tensor]) -> int:
    """The length of the first axis that most inputs share; 1 where none has more."""
    found = Counter(int(t.shape[0]) for t in tensors if t.dim() and t.shape[0] > 1)
    return found.most_common(1)[0][0] if found else 1


def part_of(args: Args, kwargs: Kwargs, batch: int, count: int, index: int) -> Inputs:
    """The inputs of one micro-batch, without copying."""
    size = batch // count

    def cut(value: torch.Tensor) -> torch.Tensor:
        return value.narrow(0, index * size, size) if value.dim() and value.shape[0] == batch else value

    parts: Inputs = pytree.tree_map_only(torch.Tensor, cut, (args, dict(kwargs)))
    return parts


def doubled(args: Args, kwargs: Kwargs, batch: int) -> Inputs:
    """The inputs with every example given twice."""

    def twice(value: torch.Tensor) -> torch.Tensor:
        return torch.cat([value, value]) if value.dim() and value.shape[0] == batch else value

    given: Inputs = pytree.tree_map_only(torch.Tensor, twice, (args, dict(kwargs)))
    return given


def examples(source: Source) -> int:
    """The batch of a step: 1 where no axis of its inputs is one of examples."""
    return examples_in(source.args, source.kwargs)


def examples_in(args: Args, kwargs: Kwargs) -> int:
    """The examples in a step's inputs: the length of the first axis that most of its tensors share."""
    leaves = pytree.tree_leaves((tuple(args), dict(kwargs)))
    return batch_size(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))


def undivided(source: Source) -> int:
    """The examples that micro-batches might divide, where they do not take part; 0 for none."""
    batch = examples(source)
    return batch if batch > 1 else 0


def _made(case: Case, count: int, batch: int, prices: Prices | None = None) -> Case:
    """The step of one of `count` micro-batches. Without prices its times are not known.

    Raises:
        Refusal: it is not known that the micro-batches add up to the batch.
    """
    source = case.source
    assert source is not None
    args, kwargs = part_of(source.args, source.kwargs, batch, count, 0)
    narrow = replace(source, args=args, kwargs=kwargs, keep_outputs=False, made={})
    try:
        step, front = narrow.capture_with_front()
        division = _division(source, case.step, step, count, batch)
    except (CaptureError, InputsError) as error:
        raise Refusal("{}", str(error)) from error
    summed, loss = _summed_bytes(division), step.loss.meta["val"]
    made = replace(
        case,
        step=step,
        front=front,
        source=narrow,
        division=division,
        last=_accumulating,
        repeats=count,
        beside=case.beside
        + Footprint(resident={GIVEN: int(loss.numel() * loss.element_size()), GRADIENTS: summed}),
        around=((f"the summed gradients of {count} micro-batches", summed), *case.around),
        notes=(*_notes(division), *case.notes),
    )
    return made if prices is None else _priced(made, case.step, division, prices)


def _priced(made: Case, whole: Step, division: DividedStep, prices: Prices) -> Case:
    """With the times of its parts, and of adding up."""
    (seconds, _), (of_one, _) = prices.unplanned(whole, made.step)
    scale = max(1.0, seconds / (division.count * of_one))
    adding = division.count * sum(prices.priced(_additions(division.part.gradients.values())))
    return replace(made, repeats=division.count * scale, seconds_beside=made.seconds_beside + adding)


def _division(source: Source, whole: Step, part: Step, count: int, batch: int) -> DividedStep:
    """The division as the two graphs show it, or, where one example's graph is another, as larger batches do.

    Raises:
        Refusal: it is not known to be one. CaptureError, InputsError: larger batches cannot be captured.
    """
    try:
        return divided(whole, part, count, batch // count)
    except AnotherGraph:
        if batch > count:
            raise
    args, kwargs = doubled(source.args, source.kwargs, batch)
    large = replace(source, args=args, kwargs=kwargs, keep_outputs=False).capture()
    args, kwargs = part_of(args, kwargs, 2 * batch, count, 0)
    pair = replace(source, args=args, kwargs=kwargs, keep_outputs=False).capture()
    return divided_into_single(whole, part, count, large, pair)


def _accumulating(step: Step) -> Step:
    """A copy of the step that hands each gradient on as soon as it is there, to be added up."""
    return with_consumed_gradients(step, step.gradients.keys(), {}, updates=False)


def _summed_bytes(division: DividedStep) -> int:
    """Bytes of the summed gradients, there at every instant.

    A part's inputs are views of the batch, which the step counts.
    """
    values = [gradient.meta["val"] for gradient in division.part.gradients.values()]
    return sum(int(value.numel() * value.element_size()) for value in values)


def _additions(gradients: Collection[fx.Node]) -> list[fx.Node]:
    """Adding each gradient to its sum once, as operators."""
    graph = fx.Graph()
    adds = []
    for gradient in gradients:
        total, more = graph.placeholder("total"), graph.placeholder("gradient")
        adds.append(graph.call_function(torch.ops.aten.add_.Tensor, (total, more)))
        for node in (total, more, adds[-1]):
            node.meta["val"] = gradient.meta["val"]
    return adds


# ------------------------------------------------------------------ what the plan says


def _told(outcome: StepOutcome) -> Iterator[Decision]:
    """How the batch is divided."""
    division, case = outcome.case.division, outcome.case
    assert division is not None
    batch, summed = division.count * division.examples, _summed_bytes(division)
    resident = {kind: case.beside.resident[kind] for kind in (GIVEN, GRADIENTS)}
    slower = outcome.seconds / outcome.captured.seconds - 1
    yield Decision(
        site=SITE,
        kind=KIND,
        option=label(division.count, batch),
        baseline=label(1, batch),
        by=Microbatch.name,
        cost=Cost(
            seconds=case.seconds_before_update(outcome.unplanned_seconds),
            bytes_transient=(outcome.unplanned() + Footprint(resident=resident)).peak_bytes,
        ),
        baseline_cost=outcome.captured,
        why=Divided(examples=division.examples, batch=batch, gradient_bytes=summed, slower=slower),
        settings={"count": division.count},
    )


def _notes(division: DividedStep) -> list[Reason]:
    """What the user must know of a divided batch."""
    weights = "as its labels are of all" if division.counts is not None else f"{division.factor:.4g}"
    text = (
        "{} micro-batches, each with the weight {name} in the loss: the effective batch, and so the "
        "learning rate, stay as they are. Times and bytes of blocks are of one micro-batch. Gradients are "
        "made with the loss; backward() hands them out"
    )
    lines: list[Reason] = [Because(text, (division.count, weights))]
    if division.pair is not None:
        lines.append(
            Because(
                "one example is captured as other operators than several; that examples add up was read "
                "off two at a time"
            )
        )
    if division.random:
        text = (
            "dropout draws other numbers for micro-batches than for the whole batch: the same "
            "distribution, not the same numbers"
        )
        lines.append(Because(text))
    return lines
