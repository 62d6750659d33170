"""Data parallelism as a form of the step: replicated (gradients averaged), that with the optimizer's states
divided over the ranks (ZeRO-1), or with every parameter sharded (ZeRO-2, ZeRO-3).

Sources: ZeRO (Rajbhandari et al. 2020, arXiv 1910.02054), FSDP (Zhao et al. 2023, arXiv 2304.11277).

A sharded parameter enters the joint graph as a shard. Before its first reader in each repeated module it is
gathered, and its gradient is summed and scattered. The gathered weight is a value like any other, made in a
block's forward and read in its backward: whether it is kept (ZeRO-2, FSDP's reshard_after_forward=False) or
gathered again (ZeRO-3) is decided by the blocks' solver, block by block, together with the activations. A
weight that several modules read is gathered for each of them, or it would have to stay for the whole step.

Weights are gathered by block, in one launch, or one by one: more launches, and no weight is there before its
reader. What little stands outside of blocks (a norm, a table of positions) goes with its neighbour there (the
head, the tokens' table). A cast that is a parameter's reader stands before the gather, so that narrow numbers
cross the link.

The loss is that of the rank's own part of the batch, its gradients the means over ranks, as with DDP and
FSDP.
"""

from __future__ import annotations

import math
import operator
from collections import defaultdict
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import fx, nn

from effcompile.core.errors import FormatError, UsageError
from effcompile.core.reasons import Because, Unsupported
from effcompile.ir.plan import Declined
from effcompile.ir.resident import storage_bytes
from effcompile.ir.roles import Leaving
from effcompile.ir.step import Spread, Step
from effcompile.ops import collectives
from effcompile.ops.collectives import rows_of_shard
from effcompile.passes.training.base import Case, RequestError, StepChoice, StepContext, StepOption
from effcompile.passes.training.consume import completing
from effcompile.passes.training.places import neighbours, place_of
from effcompile.passes.training.step_edit import Refusal, call, copied
from effcompile.schedules.blocks import split

__all__ = [
    "AXIS",
    "BY_BLOCK",
    "BY_WEIGHT",
    "FORMS",
    "KIND",
    "REPLICATED",
    "SITE",
    "STATES_DIVIDED",
    "Shard",
    "spread_over",
]

SITE, KIND = "parameters", "data parallel"
#: The axis of the mesh along which the batch is divided.
AXIS = "dp"
REPLICATED, BY_BLOCK, BY_WEIGHT = "replicated", "sharded, gathered by block", "sharded, gathered one by one"
STATES_DIVIDED = "replicated, the optimizer's states divided"
#: Short name among the pass's settings → option.
FORMS = {"replicated": REPLICATED, "states": STATES_DIVIDED, "block": BY_BLOCK, "weight": BY_WEIGHT}

aten = torch.ops.aten
_GATHER, _SCATTERED, _AVERAGED = collectives.GATHER, collectives.SCATTER_MEAN, collectives.MEAN


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """How parameters lie over `ranks` data-parallel ranks; nothing for one.

    Attributes:
        ranks: each runs the step on a part of the batch of its own.
        forms: those to choose from: "replicated", "block" (sharded, gathered by block), "weight" (sharded,
            gathered one by one); "states" (replicated, each rank updates its rows) only where it is asked
            for.
    """

    ranks: int = 1
    forms: tuple[str, ...] = ("replicated", "block", "weight")

    name: ClassVar[str] = "shard"
    exact: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.ranks < 1:
            raise UsageError(
                f"shard.ranks = {self.ranks}: give the number of data-parallel ranks, at least 1."
            )
        if unknown := [form for form in self.forms if form not in FORMS]:
            raise UsageError(f"shard.forms = {unknown[0]!r} is not known. Choose among: {', '.join(FORMS)}.")
        if not self.forms:
            raise UsageError(f"shard.forms is empty. Choose among: {', '.join(FORMS)}.")

    def propose(self, case: Case, context: StepContext) -> Iterator[StepChoice | Declined]:
        """Each form; none of a step on one rank.

        Raises:
            RequestError: states are to be divided, and there are none.
        """
        if self.ranks == 1:
            return
        if STATES_DIVIDED in (FORMS[form] for form in self.forms):
            _with_states(case)
        if case.source is None:
            yield Declined(
                site=SITE,
                kind=KIND,
                option=KIND,
                by=self.name,
                reason=Unsupported("the model behind the step is not known"),
            )
            return
        names = [FORMS[form] for form in self.forms]
        options = (
            StepOption(name=n, settings={"ranks": self.ranks}, make=partial(self._made, case, n, self.ranks))
            for n in names
        )
        yield StepChoice(
            site=SITE,
            kind=KIND,
            baseline=REPLICATED if REPLICATED in names else names[0],
            options=tuple(options),
            settled=True,
        )

    def apply(self, case: Case, choice: StepChoice, option: StepOption) -> Case:
        """The step in this form.

        Raises:
            FormatError: the plan's form is not known here. RequestError: it divides states, and there are
                none.
        """
        ranks = option.setting("ranks", int)
        if option.name not in FORMS.values() or ranks < 2 or case.source is None:
            raise FormatError(
                f"The plan has {KIND} = {option.name!r} on {ranks} ranks, which is not known here. Plan "
                "again."
            )
        if option.name == STATES_DIVIDED:
            _with_states(case)
        return self._made(case, option.name, ranks)

    def _made(self, case: Case, form: str, ranks: int) -> Case:
        assert case.source is not None
        if case.scaled:
            raise Refusal(
                "the loss is scaled, and an overflow is seen on the rank that holds the gradient alone"
            )
        step = spread_over(case.step, case.source.model, ranks, form)
        note = Because(
            "{} data-parallel ranks: times, bytes and the batch are one rank's; gradients are the means "
            "over ranks",
            (ranks,),
        )
        optimizer = None if case.optimizer is None else case.optimizer.resized(step)
        if optimizer is not None and step.spread is not None and step.spread.owned:
            optimizer = optimizer.of_parts(_owned_rows(step, step.spread))
        return replace(case, step=step, optimizer=optimizer, notes=(note, *case.notes))


def _with_states(case: Case) -> None:
    """Raises RequestError for a step without an optimizer, which has no states to divide."""
    if case.optimizer is None:
        raise RequestError(
            "shard.forms=states (zero=1) divides an optimizer's states, and no optimizer is planned. Give "
            "optimizer= (for the command line: a function optimizer(parameters) in the model's file), or "
            "leave it out."
        )


def _owned_rows(step: Step, spread: Spread) -> dict[str, torch.Tensor]:
    """Parameter → what the first rank updates of it."""
    values = {name: node.meta["val"] for node, name in step.parameters.items()}
    return {
        name: value[: rows_of_shard(value.shape[0], spread.ranks)] if name in spread.owned else value
        for name, value in values.items()
    }


def _contiguous(model: nn.Module) -> set[str]:
    """Parameters whose rows follow each other in memory."""
    return {name for name, p in model.named_parameters() if p.is_contiguous()}


def _shapes(model: nn.Module, before: Spread) -> dict[str, tuple[int, ...]]:
    """The parameters that can be sharded, all with an axis; of those that are divided already the part."""
    parts = before.parts
    return {
        n: parts[n].local if n in parts else tuple(map(int, p.shape))
        for n, p in model.named_parameters()
        if p.dim()
    }


def _bytes_saved(model: nn.Module, shapes: Mapping[str, tuple[int, ...]], before: Spread, ranks: int) -> int:
    """Of the parameters as they were less those of the padded shards."""
    whole = [p for n, p in model.named_parameters() if n in shapes and n not in before.parts]
    sizes = {n: p.element_size() for n, p in model.named_parameters()}
    parts = sum(math.prod(shapes[n]) * sizes[n] for n in before.parts)
    padded = sum(
        rows_of_shard(shape[0], ranks) * math.prod(shape[1:]) * sizes[n] for n, shape in shapes.items()
    )
    return storage_bytes(whole) + parts - padded


def spread_over(step: Step, model: nn.Module, ranks: int, form: str) -> Step:
    """A copy of the step for one of `ranks` ranks.

    `model`: whose step it is. `form`: one of those of this pass.
    """
    before = step.spread or Spread()
    able = _shapes(model, before)
    shapes = able if form in (BY_BLOCK, BY_WEIGHT) else {}
    owned = {n: able[n] for n in able.keys() & _contiguous(model)} if form == STATES_DIVIDED else {}
    step, _ = copied(step)
    edit = _Edit(step, ranks, form != BY_WEIGHT)
    for node, name in step.parameters.items():
        if name in shapes:
            edit.shard(node)
    edit.gather_all()
    edit.average(shapes)
    step.graph.lint()
    step.module.recompile()
    resident = step.resident_bytes
    if resident is not None and shapes:
        resident -= _bytes_saved(model, shapes, before, ranks)
    return replace(
        step, spread=replace(before, ranks=ranks, shapes=shapes, owned=owned), resident_bytes=resident
    )


@dataclass(slots=True)
class _Reads:
    """A shard (a placeholder, or its cast) and who reads it whole in one place."""

    shard: fx.Node
    rows: int
    shape: torch.Size
    readers: list[fx.Node]


#: A gradient, and the nodes that it is complete behind.
_Ended = tuple[fx.Node, Sequence[fx.Node]]


class _Edit:
    """Puts collectives into the graph of a step that is this edit's own."""

    def __init__(self, step: Step, ranks: int, by_block: bool) -> None:
        self.step, self.graph, self.ranks, self.by_block = step, step.graph, ranks, by_block
        self.order: dict[fx.Node, float] = {node: at for at, node in enumerate(self.graph.nodes)}
        self.forward = set(split(step)[0])
        self.places: dict[str, list[_Reads]] = defaultdict(list)

    def shard(self, parameter: fx.Node) -> None:
        """Make a placeholder, and its casts, shards; note who reads them where."""
        whole = parameter.meta["val"]
        casts = [user for user in parameter.users if _is_cast(user)]
        sources = {
            parameter: [user for user in parameter.users if user not in casts],
            **{cast: list(cast.users) for cast in casts},
        }
        for source in sources:
            value = source.meta["val"]
            source.meta["val"] = value.new_empty(
                (rows_of_shard(value.shape[0], self.ranks), *value.shape[1:])
            )
        for source, readers in sources.items():
            for place, here in self._by_place([r for r in readers if r.op != "output"]).items():
                self.places[place].append(
                    _Reads(shard=source, rows=int(whole.shape[0]), shape=whole.shape, readers=here)
                )

    def _by_place(self, readers: Sequence[fx.Node]) -> dict[str, list[fx.Node]]:
        """Readers by repeated module; those in the backward go with the forward's of their module, or the
        last.
        """
        found: dict[str, list[fx.Node]] = defaultdict(list)
        ordered = sorted(readers, key=self.order.__getitem__)
        for node in (n for n in ordered if n in self.forward):
            found[place_of(node)].append(node)
        last = next(reversed(found), "")
        for node in (n for n in ordered if n not in self.forward):
            found[place_of(node) if place_of(node) in found else last].append(node)
        return found

    def gather_all(self) -> None:
        """A gather before the first reader: one in each place, or one for each weight there."""
        by_place = sorted(self.places.items(), key=lambda place: self.order[_first(place[1], self.order)])
        sizes = {place: sum(each.shard.meta["val"].nbytes for each in reads) for place, reads in by_place}
        for reads in ([each for place in near for each in self.places[place]] for near in neighbours(sizes)):
            for bucket in [reads] if self.by_block else [[each] for each in reads]:
                for dtype in dict.fromkeys(each.shard.meta["val"].dtype for each in bucket):
                    self._gather([each for each in bucket if each.shard.meta["val"].dtype == dtype])

    def _gather(self, bucket: Sequence[_Reads]) -> None:
        first = _first(bucket, self.order)
        for cast in (
            each.shard for each in bucket if each.shard in self.order and each.shard.op == "call_function"
        ):
            if self.order[cast] > self.order[first]:
                first.prepend(cast)
                self.order[cast] = self.order[first] - 0.5
        with self.graph.inserting_before(first):
            shards, rows = [each.shard for each in bucket], [each.rows for each in bucket]
            wholes = call(self.graph, first, _GATHER, shards, rows, AXIS, self.ranks)
            for number, each in enumerate(bucket):
                whole = call(self.graph, each.readers[0], operator.getitem, wholes, number)
                for reader in each.readers:
                    reader.replace_input_with(each.shard, whole)

    def average(self, sharded: Container[str]) -> None:
        """Gradients as means over ranks, scattered where the parameter is sharded: a launch in each place, or
        for each of them.
        """
        results: list[Any] = list(self.step.results)
        alike: dict[tuple[bool, torch.dtype], list[int]] = defaultdict(list)
        for i, leaves in enumerate(self.step.roles.leaving):
            if leaves.role is Leaving.GRADIENT and (gradient := results[i]) is not None:
                alike[leaves.name in sharded, gradient.meta["val"].dtype].append(i)
        complete = completing(self.graph)
        ends = {i: complete(results[i]) for places in alike.values() for i in places}
        for (scattered, _), places in [(k, b) for k, of in alike.items() for b in self._launches(of, ends)]:
            gradients = [ends[i] for i in places]
            last = self._last(gradients)
            with self.graph.inserting_before(last.next):
                ready = self._after(gradients)
                target = _SCATTERED if scattered else _AVERAGED
                made = call(self.graph, last, target, ready, AXIS, self.ranks)
                for number, i in enumerate(places):
                    results[i] = call(self.graph, last, operator.getitem, made, number)
        self.graph.output_node().args = (tuple(results),)

    def _launches(self, results: Sequence[int], ends: Mapping[int, _Ended]) -> list[list[int]]:
        """Which of these gradients are handed on together."""
        if not self.by_block:
            return [[i] for i in results]
        found: dict[str, list[int]] = defaultdict(list)
        for i in sorted(results, key=lambda i: self.order[self._last([ends[i]])]):
            found[place_of(ends[i][0])].append(i)
        sizes = {place: sum(ends[i][0].meta["val"].nbytes for i in of) for place, of in found.items()}
        return [[i for place in near for i in found[place]] for near in neighbours(sizes, waiting=True)]

    def _last(self, gradients: Sequence[_Ended]) -> fx.Node:
        return max((node for _, ends in gradients for node in ends), key=self.order.__getitem__)

    def _after(self, gradients: Sequence[_Ended]) -> list[fx.Node]:
        """The gradients, each behind what writes into it."""
        return [
            node if len(ends) == 1 else call(self.graph, node, written, node, *ends[1:])
            for node, ends in gradients
        ]


def written(gradient: torch.Tensor, *by: object) -> torch.Tensor:
    """The gradient once these have written into it: they have returned when this is called."""
    return gradient


def _is_cast(node: fx.Node) -> bool:
    """A copy in another floating dtype, and nothing else."""
    return (
        node.target is aten._to_copy.default
        and set(node.kwargs) == {"dtype"}
        and node.meta["val"].dtype.is_floating_point
    )


def _first(bucket: Sequence[_Reads], order: Mapping[fx.Node, float]) -> fx.Node:
    """Who reads any of these first."""
    return min((reader for each in bucket for reader in each.readers), key=order.__getitem__)
