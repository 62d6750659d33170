"""Micro-batches: a step's batch in k equal parts, one after the other, whose gradients are added up. Same result, smaller activations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.utils import _pytree as pytree

from effcompile.core.errors import UsageError
from effcompile.ir.step import Step
from effcompile.passes.training.consume import with_consumed_gradients

SITE = "batch"
KIND = "micro-batches"


@dataclass(frozen=True, slots=True, kw_only=True)
class Microbatch:
    """Gradient accumulation, decided with everything else, for batches whose loss is a weighted sum over their examples.

    Takes part where it is named: gradients are then made when the loss is (`loss.backward()` hands them out), dropout draws
    other numbers than for the whole batch, and planning captures the step once more for every number of micro-batches.

    `count`: so many micro-batches, whatever else would be faster; 0: the planner chooses among the divisors of the batch.
    """

    count: int = 0

    name: ClassVar[str] = "microbatch"
    exact: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.count < 0:
            raise UsageError(f"microbatch.count = {self.count}: give the number of micro-batches, or 0 to have it chosen.")

    def counts(self, batch: int) -> list[int]:
        """The numbers of micro-batches to choose from, 1 (the whole batch) left out, few first.

        Raises:
            UsageError: the wanted one does not divide the batch.
        """
        divisors = [k for k in range(1, batch + 1) if batch % k == 0]
        if not self.count:
            return divisors[1:]
        if self.count not in divisors:
            below, above = max(k for k in divisors if k < self.count), min((k for k in divisors if k > self.count), default=None)
            near = f"{below}" + (f" and {above}" if above else "")
            raise UsageError(
                f"microbatch.count = {self.count}: a batch of {batch} does not divide into {self.count} equal micro-batches. "
                f"The nearest that do: {near}."
            )
        return [self.count] if self.count > 1 else []


def label(count: int, batch: int) -> str:
    """In the plan's words: "4 micro-batches of 2"."""
    return f"{count} micro-batches of {batch // count}" if count > 1 else f"whole batch of {batch}"


def batch_size(tensors: Iterable[torch.Tensor]) -> int:
    """The length of the first axis that most inputs share; 1 where none has more."""
    found = Counter(int(t.shape[0]) for t in tensors if t.dim() and t.shape[0] > 1)
    return found.most_common(1)[0][0] if found else 1


def first_part(args: tuple[Any, ...], kwargs: Mapping[str, Any], batch: int, count: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The inputs of the first of `count` micro-batches; tensors without the batch as their first axis stay whole."""
    return part_of(args, dict(kwargs), batch, count, 0)


def part_of(args: tuple[Any, ...], kwargs: Mapping[str, Any], batch: int, count: int, index: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The inputs of one micro-batch, without copying."""
    size = batch // count

    def cut(value: torch.Tensor) -> torch.Tensor:
        return value.narrow(0, index * size, size) if value.dim() and value.shape[0] == batch else value

    parts: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_map_only(torch.Tensor, cut, (args, dict(kwargs)))
    return parts


def doubled(args: tuple[Any, ...], kwargs: Mapping[str, Any], batch: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The inputs with every example given twice."""

    def twice(value: torch.Tensor) -> torch.Tensor:
        return torch.cat([value, value]) if value.dim() and value.shape[0] == batch else value

    given: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_map_only(torch.Tensor, twice, (args, dict(kwargs)))
    return given


def accumulating(step: Step) -> Step:
    """A copy of the step that hands each gradient on as soon as it is there, to be added up."""
    return with_consumed_gradients(step, step.gradients.keys(), {}, updates=False)
