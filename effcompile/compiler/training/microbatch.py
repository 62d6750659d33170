"""A batch in micro-batches, in the same solve as all else: for every number of them the best plan, and of those the fastest.

For k micro-batches let X_k be the schedules of one of them (all its loss heads, recomputation, offload, compression, optimizer states),
t_k(x) and m_k(x) a schedule's predicted time and simulated peak, A_k the time of adding k times all gradients up, and E_k the bytes
of the summed gradients and of the inputs of the other micro-batches, which are there throughout. The plan is

    min over k of  min over x in X_k, m_k(x) + E_k ≤ budget  of  k · s_k · t_k(x) + A_k + update,

each inner problem being the one that is solved for a whole batch, with a certificate of its own; the least of their bounds bounds
them all. A k whose step without any recomputation takes as long as the best plan so far is not solved: it cannot be faster. When k
micro-batches fit with nothing recomputed, more of them are not looked at, as they only make smaller operators of the same work.

Times of a micro-batch's operators are measured at its shapes, so that what small batches lose in efficiency is in them. What they
seem to gain is not: timed alone, small operators run out of the cache, so s_k ≥ 1 makes k unplanned micro-batches no faster than the
unplanned batch (measured: GPT-2, 4 layers, d 128, b8 s128 as 4 × 2 took 7 % more CPU time; the sum of its operators said 35 % less).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from effcompile.backends.torch.microbatch import MicrobatchRunner
from effcompile.backends.torch.training import StepRunner
from effcompile.capture import capture_training
from effcompile.compiler.training.cases import Joint, StepRecord, cases, impossible, recorded
from effcompile.compiler.training.moved import RefutedError
from effcompile.compiler.training.prepare import Figures, Preparation, Prepared, simulate_unplanned
from effcompile.compiler.training.states import Parts
from effcompile.compiler.training.work import Work
from effcompile.core.cost import Cost
from effcompile.core.errors import CaptureError, FormatError, InfeasibleError, InputsError, UsageError, VerificationError
from effcompile.core.units import format_bytes
from effcompile.ir.plan import Decision, Declined
from effcompile.ir.reasons import Unsupported
from effcompile.ir.step import DividedStep, Step
from effcompile.passes.training.loss_head_match import Refusal
from effcompile.passes.training.microbatch import KIND, SITE, accumulating, batch_size, doubled, first_part, label, part_of
from effcompile.passes.training.separable import AnotherGraph, divided, divided_into_single
from effcompile.schedule.emit import Emitted

_BY = "microbatch"


@dataclass(kw_only=True)
class Divisions:
    """The ways to divide the batch of one request, each prepared once when it is first asked for.

    Attributes:
        work: the request. batch: its examples; 1 where no axis of the inputs is one of examples.
    """

    work: Work
    known: dict[int, tuple[Preparation, Parts] | str] = field(default_factory=dict)

    @property
    def dropped(self) -> str:
        """Why no division is allowed any more: one was run and did not equal the whole batch."""
        return self.work.forbidden.get((KIND, ""), "")

    @property
    def batch(self) -> int:
        leaves = pytree.tree_leaves((self.work.args, dict(self.work.kwargs)))
        return batch_size(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))

    @property
    def made(self) -> dict[int, tuple[Preparation, Parts]]:
        """What was prepared so far, by the number of micro-batches."""
        return {} if self.dropped else {count: made for count, made in self.known.items() if not isinstance(made, str)}

    def chosen_from(self, found: Preparation, joint: Joint) -> Preparation:
        """What a plan was chosen from: with micro-batches the variants of one of them, but the unplanned step of the whole batch."""
        if joint.parts is None:
            return found
        of_part = self.prepared(found, joint.parts.step.count)
        assert not isinstance(of_part, str)
        return replace(of_part[0], captured=found.captured, seconds=found.seconds, footprint=found.footprint)

    def solve(self, found: Preparation, budget: int | None) -> Joint:
        """The fastest plan within the budget, of the whole batch (`found`) or of micro-batches.

        Raises:
            InfeasibleError: nothing fits. UsageError: the wanted number does not divide the batch.
        """
        record = recorded(budget, self.work.progress)
        whole, counts = self._wanted(found)
        if whole:
            self._take_up(record, found, None)
        for count in counts:
            option = {KIND: label(count, self.batch)}
            if record.exhausted is not None and len(counts) > 1:
                fits = record.exhausted[KIND]
                record.refuse(option, Unsupported(text=f"not tried: {fits} fits with nothing recomputed"))
            elif isinstance(made := self.prepared(found, count), str):
                record.refuse(option, Unsupported(text=made))
            else:
                self._take_up(record, *made)
        if self.work.passes.microbatch is not None and self.batch == 1:
            record.refuse({KIND: KIND}, Unsupported(text="no input has an axis of more than one example"))
        return self._best(record, found)

    def _wanted(self, found: Preparation) -> tuple[bool, list[int]]:
        """Whether the whole batch is looked at, and which numbers of micro-batches."""
        microbatch = self.work.passes.microbatch
        counts = microbatch.counts(self.batch) if microbatch is not None else []
        return microbatch is None or microbatch.count in (0, 1) or bool(self.dropped) or self._refused(found, counts), counts

    def _take_up(self, record: StepRecord, found: Preparation, parts: Parts | None) -> None:
        ways, _ = self.work.ways(found.captured)
        for options, reason in impossible(found, ways, parts, self.batch):
            record.refuse(options, reason)
        record.search(cases(found, ways, self.work.passes.checkpoint, parts, self.batch))

    def _best(self, record: StepRecord, found: Preparation) -> Joint:
        ways, refused = self.work.ways(found.captured)
        try:
            best = record.best
        except InfeasibleError as error:
            raise error.with_more(*self._untried(record, refused)) from error
        return replace(best, record=record, bound=record.bound, ways=len(ways), refused=refused)

    def _untried(self, record: StepRecord, refused: Sequence[Declined]) -> Iterator[str]:
        """What else there might be, in words."""
        if refused:
            yield f"Not tried: {'; '.join(f'{d.option}: {d.reason}' for d in refused)}."
        if self.work.passes.microbatch is not None:
            divisions = "; ".join(f"{option}: {reason}" for option, reason in record.declined(KIND))
            yield f"Of the ways to divide the batch: {divisions}."
        elif self.batch > 1:
            yield f"Not tried: micro-batches of the batch of {self.batch}, with summed gradients (--pass microbatch)."

    def every(self, found: Preparation) -> Iterator[tuple[list[Prepared], Parts | None]]:
        """The variants of the whole batch, and those of all micro-batches there may be."""
        whole, counts = self._wanted(found)
        if whole:
            yield found.variants, None
        for count in counts:
            made = self.prepared(found, count)
            if not isinstance(made, str):
                yield made[0].variants, made[1]

    def restored(self, found: Preparation, count: int) -> tuple[Preparation, Parts]:
        """The micro-batch that a plan was saved with.

        Raises:
            FormatError: no number that divides this batch, or this step cannot be divided.
        """
        if count < 2 or self.batch % count:
            raise FormatError(f"The plan has {count} micro-batches: a divisor of the batch of {self.batch} is wanted. Plan again.")
        made = self.prepared(found, count)
        if isinstance(made, str):
            raise FormatError(f"The plan has {count} micro-batches, which this step cannot be divided into: {made}. Plan again.")
        return made

    def _refused(self, found: Preparation, counts: list[int]) -> bool:
        """Whether the one number that is wanted cannot be: then the whole batch is planned, and the plan says so."""
        return all(isinstance(self.prepared(found, count), str) for count in counts)

    def prepared(self, found: Preparation, count: int) -> tuple[Preparation, Parts] | str:
        """The step of one of `count` micro-batches with its options, or why there is none. `found`: that of the whole batch."""
        if self.dropped:
            return self.dropped
        if count not in self.known:
            try:
                self.known[count] = self._prepare(found, count)
            except (Refusal, CaptureError, InputsError) as refusal:
                self.known[count] = str(refusal)
        return self.known[count]

    def _prepare(self, found: Preparation, count: int) -> tuple[Preparation, Parts]:
        args, kwargs = first_part(self.work.args, self.work.kwargs, self.batch, count)
        work = replace(self.work, args=args, kwargs=kwargs)
        captured = work.capture(False)
        step = self._divided(found.captured, captured.step, count)
        of_part = work.prepare(captured, accumulating)
        return of_part, _parts(found, of_part, step, self.work.figures)

    def _divided(self, whole: Step, part: Step, count: int) -> DividedStep:
        """The division as the two graphs show it, or, where one example's graph is another, as larger batches do.

        Raises:
            Refusal: it is not known to be one. CaptureError, InputsError: larger batches cannot be captured.
        """
        examples = self.batch // count
        try:
            return divided(whole, part, count, examples)
        except AnotherGraph:
            if examples > 1:
                raise
        work = self.work
        args, kwargs = doubled(work.args, work.kwargs, self.batch)
        with work.progress.step("capture larger batches"):
            large = capture_training(work.model, args, kwargs, loss=work.loss)
            args, kwargs = first_part(args, kwargs, 2 * self.batch, count)
            pair = capture_training(work.model, args, kwargs, loss=work.loss)
        return divided_into_single(whole, part, count, large, pair)


def _parts(found: Preparation, of_part: Preparation, step: DividedStep, figures: Figures) -> Parts:
    gradients = step.part.gradients.values()
    return Parts(
        step=step, gradient_bytes=sum(map(_nbytes, gradients)),
        add_seconds=step.count * _adding(list(gradients), figures), scale=max(1.0, found.seconds / (step.count * of_part.seconds)),
        whole_seconds=found.seconds, whole_bytes=found.footprint.peak_bytes,
    )  # fmt: skip


def _nbytes(node: fx.Node) -> int:
    value = node.meta["val"]
    return int(value.numel() * value.element_size())


def _adding(gradients: list[fx.Node], figures: Figures) -> float:
    """Seconds of adding each gradient to its sum once: measured, or modelled where the machine is another."""
    graph = fx.Graph()
    adds = []
    for gradient in gradients:
        total, more = graph.placeholder("total"), graph.placeholder("gradient")
        adds.append(graph.call_function(torch.ops.aten.add_.Tensor, (total, more)))
        for node in (total, more, adds[-1]):
            node.meta["val"] = gradient.meta["val"]
    figures.measure(adds)
    return sum(map(figures.seconds, adds))


# ------------------------------------------------------------------ what the plan says


def decisions(joint: Joint) -> list[Decision]:
    """How the batch is divided; nothing where it is not."""
    parts = joint.parts
    if parts is None:
        return []
    step, prepared = parts.step, joint.schedule.prepared
    batch = step.count * step.examples
    seconds = parts.seconds(prepared.seconds)
    slower = (joint.seconds - (joint.states.seconds if joint.states else 0.0)) / parts.whole_seconds - 1
    return [
        Decision(
            site=SITE, kind=KIND, option=label(step.count, batch), baseline=label(1, batch), by=_BY,
            cost=Cost(seconds=seconds, bytes_transient=(simulate_unplanned(prepared.plain).footprint + parts.footprint).peak_bytes),
            baseline_cost=Cost(seconds=parts.whole_seconds, bytes_transient=parts.whole_bytes),
            why=f"activations of {step.examples} of {batch} examples at a time, beside {format_bytes(parts.gradient_bytes)} of summed "
            f"gradients; the step takes {slower:+.1%} against the unplanned one",
            settings={"count": step.count},
        )
    ]  # fmt: skip


def notes(joint: Joint) -> list[str]:
    """What the user must know of a divided batch."""
    if joint.parts is None:
        return []
    step = joint.parts.step
    weights = "as its labels are of all" if step.counts is not None else f"{step.factor:.4g}"
    lines = [
        f"{step.count} micro-batches, each with the weight {weights} in the loss: the effective batch, and so the learning rate, stay as "
        "they are. Times and bytes of blocks are of one micro-batch. Gradients are made with the loss; backward() hands them out"
    ]
    if step.pair is not None:
        lines.append("one example is captured as other operators than several; that examples add up was read off two at a time")
    if step.random:
        lines.append("dropout draws other numbers for micro-batches than for the whole batch: the same distribution, not the same numbers")
    return lines


def runner_of(model: torch.nn.Module, prepared: Prepared, emitted: Emitted, parts: Parts | None) -> StepRunner:
    """What runs a plan."""
    scaled = prepared.case.scaled
    if parts is None:
        return StepRunner(model, prepared.step, emitted, scaled=scaled)
    return MicrobatchRunner(model, parts.step, prepared.step, emitted, scaled=scaled)


# ------------------------------------------------------------------ is it the whole batch's?


def inseparable(message: str) -> RefutedError:
    """Micro-batches were run, and their sum is not the whole batch's loss or gradient."""
    return RefutedError(f"run, and not the whole batch's: {message}", kind=KIND, option="", said="no micro-batches")


def eager_in_parts(work: Work, runner: MicrobatchRunner) -> Callable[[], torch.Tensor]:
    """The model's own loss as the weighted sum of its micro-batches'."""
    divided_step = runner.divided
    batch, count = divided_step.count * divided_step.examples, divided_step.count
    weights = runner.weights(runner.parts(work.args, work.kwargs))

    def loss() -> torch.Tensor:
        total: Any = 0.0
        for index, weight in enumerate(weights):
            if weight:
                args, kwargs = part_of(work.args, work.kwargs, batch, count, index)
                total = total + weight * replace(work, args=args, kwargs=kwargs).eager_loss()
        assert isinstance(total, torch.Tensor)
        return total

    return loss


@contextlib.contextmanager
def without_dropout(model: torch.nn.Module) -> Iterator[None]:
    """The model in evaluation mode, its modes put back afterwards."""
    modes = {module: module.training for module in model.modules()}
    try:
        model.eval()
        yield
    except (VerificationError, UsageError):
        raise
    except Exception as error:
        raise inseparable(f"without dropout, in evaluation mode, the model raises {type(error).__name__}: {error}") from error
    finally:
        for module, mode in modes.items():
            module.training = mode
