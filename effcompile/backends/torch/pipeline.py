"""Runs the stages of a pipeline that stand on this rank: each micro-batch's forward and backward in the
schedule's order.

torch.distributed.pipelining is not what runs them: its stages keep the outputs of all micro-batches, and what
is alive at an instant is not the plan's. All receives of a step are posted when it begins, so that whoever
sends does not wait; what arrives is there from then on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn

from effcompile.backends.torch.microbatch import MicrobatchRunner, _Accumulated
from effcompile.backends.torch.ranks import Ranks
from effcompile.backends.torch.step_inputs import held
from effcompile.backends.torch.training import StepRunner
from effcompile.core import torch_compat_ranks
from effcompile.core.errors import UsageError
from effcompile.core.types import Args, Kwargs, Value
from effcompile.ir.roles import Entering
from effcompile.ir.step import DividedStep
from effcompile.ops.messages import answered, carried, swap
from effcompile.schedules.emit import Emitted

#: ("F" or "B", stage, micro-batch).
Task = tuple[str, int, int]


class Message(NamedTuple):
    """What will arrive: where, the receive, and how many held the place before."""

    buffer: Tensor
    work: dist.Work
    before: int


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """A stage on this rank: what runs it, its schedule, and which of a micro-batch's tensors it takes."""

    runner: StepRunner
    emitted: Emitted
    takes: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Course:
    """Where a rank stands in a pipeline.

    Attributes:
        order: its tasks. stages: how many there are in all; handed: the shape and dtype of what each hands
            on.
        group: the ranks of the pipeline, in its order. data: those with the same stages and other examples,
            where the stages' graphs do not average their gradients.
        shared: parameter → the ranks of `group` that have it, where there are several.
    """

    order: Sequence[Task]
    stages: int
    handed: Mapping[int, tuple[torch.Size, torch.dtype]]
    group: dist.ProcessGroup
    data: dist.ProcessGroup | None
    shared: Mapping[str, tuple[int, ...]]

    def rank_of(self, stage: int) -> int:
        """The global number of the rank that has a stage."""
        return self.peer(stage % self.group.size())

    def peer(self, rank: int) -> int:
        return dist.get_global_rank(self.group, rank)

    def tag(self, task: Task, count: int) -> int:
        """The number of a message: that which a task waits for."""
        what, stage, i = task
        return ((what == "B") * self.stages + stage) * count + i


class PipelineRunner(MicrobatchRunner):
    """The step of a rank's stages. Gradients are made when the loss is; `loss.backward()` hands them out."""

    def __init__(
        self,
        model: nn.Module,
        divided: DividedStep,
        chunks: Mapping[int, Chunk],
        course: Course,
        ranks: Ranks,
    ) -> None:
        first = next(iter(chunks.values()))
        super().__init__(model, divided, first.runner.step, first.emitted, ranks=ranks)
        self.chunks, self.course = chunks, course
        names = {name for chunk in chunks.values() for name in chunk.runner.step.consumed}
        self.names = [name for name, _ in model.named_parameters() if name in names]

    def bound_to(self, model: nn.Module) -> StepRunner:
        """The same for a copy of the model, whose parameters its stages read then."""
        other = super().bound_to(model)
        assert isinstance(other, PipelineRunner)
        other.chunks = {
            stage: replace(chunk, runner=chunk.runner.bound_to(model)) for stage, chunk in self.chunks.items()
        }
        return other

    @contextmanager
    def whole(self, model: nn.Module) -> Iterator[None]:
        """Raises UsageError: a rank has its own stages alone."""
        raise UsageError(
            "The layers of a pipelined model stand on several ranks. Evaluate the whole model, with the "
            "checkpoint of all ranks."
        )
        yield

    def gradient_norm(self, gradients: Mapping[str, Tensor], kind: float) -> Tensor:
        """That of all stages, on all ranks together; what several ranks of the pipeline have counts once."""
        group = self.course.group
        me = group.rank()
        own = {
            name: value for name, value in gradients.items() if self.course.shared.get(name, (me,))[0] == me
        }
        norm = super().gradient_norm(own, kind).float().to(next(self.model.parameters()).device)
        norms = [torch.empty_like(norm) for _ in range(group.size())]
        with answered(group):
            dist.all_gather(norms, norm, group=group)
        return torch.linalg.vector_norm(torch.stack(norms), kind)

    def _run(self, args: Args, kwargs: Kwargs) -> tuple[Tensor, ...]:
        self._check_model()
        parameters = [held(self.model, name) for name in self.names]
        loss: Tensor = _Accumulated.apply(self, self.parts(args, kwargs), *parameters)
        return (loss,)

    def _counted(self, leaves: list[Value], counts: Callable[[list[Value]], Args]) -> Tensor:
        """What the mean of one micro-batch is over; no parameter is looked at."""
        division = self.divided
        step = division.pair or division.part
        if division.pair is not None:
            leaves = [
                torch.cat([leaf, leaf]) if yes else leaf
                for leaf, yes in zip(leaves, division.batched, strict=True)
            ]
        given = dict(zip(step.inputs, leaves, strict=True))
        holders = [
            n
            for n in step.graph.nodes
            if n.op == "placeholder" and step.roles.entering[n].role is not Entering.TANGENT
        ]
        found: Tensor = counts([given.get(node, step.constants.get(node)) for node in holders])[0]
        return found

    def accumulate(self, parts: list[list[Value]]) -> tuple[Tensor, list[Tensor | None]]:
        """(loss of the whole batch, gradients in the order of `names`): all tasks of this rank, in their
        order.
        """
        with _own_numbers(self.divided.random) as seed:
            return self._accumulated(parts, seed)

    def _accumulated(self, parts: list[list[Value]], seed: int | None) -> tuple[Tensor, list[Tensor | None]]:
        """The same; `seed`: of the random numbers of all forwards."""
        weights, course, count = self.weights(parts), self.course, len(parts)
        sums = {name: self._zeros(name) for name in self.names}
        inbox = self._listening(count)
        alive: dict[tuple[int, int], tuple[dict[fx.Node, Value], list[Value]]] = {}
        total = torch.zeros((), dtype=torch.float32, device=parts[0][0].device)

        def add(name: str, gradient: Tensor) -> None:
            sums[name].add_(gradient)

        for task in course.order:
            what, stage, i = task
            runner = self.chunks[stage].runner
            if what == "F":
                leaves = [parts[i][k] for k in self.chunks[stage].takes]
                if stage:
                    leaves.append(self._arrived(inbox, task))
                values = runner._values(leaves)
                del leaves
                if seed is not None:  # whichever rank runs it when
                    torch.manual_seed(seed + i * course.stages + stage)
                results, saved = runner.run_forward(values)
                alive[stage, i] = values, saved
                if stage < course.stages - 1:
                    self._send(results.pop(0), ("F", stage + 1, i), count)
                else:
                    total += weights[i] * results.pop(0)
                continue
            values, saved = alive.pop((stage, i))
            runner.sink = add
            tangent = (
                self._arrived(inbox, task)
                if stage < course.stages - 1
                else torch.full_like(total, weights[i])
            )
            found = list(runner.differentiate(saved, values, tangent))
            runner.sink = None  # it holds the sums
            del values, tangent
            if stage:
                self._send(found.pop(), ("B", stage - 1, i), count)
        self._joined(sums)
        with answered(course.group):
            dist.broadcast(total, course.rank_of(course.stages - 1), group=course.group)
        assert self.ranks is not None
        return total, [self.ranks.gradient(name, sums[name]) for name in self.names]

    def _zeros(self, name: str) -> Tensor:
        """Of what this rank has of a parameter's gradient."""
        return torch.zeros_like(
            self._local(name, held(self.model, name)), dtype=self._dtypes[name], requires_grad=False
        )

    def _listening(self, count: int) -> dict[Task, Message]:
        """All that will arrive at this rank, asked for."""
        course = self.course
        device = next(self.model.parameters()).device
        rooms: dict[Task, Tensor] = {}
        for task in course.order:
            what, stage, _ = task
            if 0 <= (stage - 1 if what == "F" else stage + 1) < course.stages:
                shape, dtype = course.handed[stage - 1 if what == "F" else stage]
                rooms[task] = torch.empty(shape, dtype=dtype, device=device)
        before = {task: torch_compat_ranks.holders(room) for task, room in rooms.items()}

        def ask(task: Task) -> dist.Work:
            source = course.rank_of(task[1] - 1 if task[0] == "F" else task[1] + 1)
            work = dist.irecv(rooms[task], source, group=course.group, tag=course.tag(task, count))
            assert work is not None
            return work

        works = carried(lambda: {task: ask(task) for task in rooms}, course.group)
        return {task: Message(room, works[task], before[task]) for task, room in rooms.items()}

    def _arrived(self, inbox: dict[Task, Message], task: Task) -> Tensor:
        buffer, work, before = inbox.pop(task)
        with answered(self.course.group):
            work.wait()
        del work
        torch_compat_ranks.let_go(buffer, before)
        return buffer

    def _send(self, value: Tensor, task: Task, count: int) -> None:
        """Hand on what a task of another rank waits for."""
        course, value = self.course, value.contiguous()

        def send() -> None:
            work = dist.isend(value, course.rank_of(task[1]), group=course.group, tag=course.tag(task, count))
            assert work is not None
            work.wait()

        with torch_compat_ranks.lent([value]), answered(course.group):
            carried(send, course.group)

    def _joined(self, sums: dict[str, Tensor]) -> None:
        """The gradients of parameters that several stages have, summed in the pipeline's order; all of them
        averaged over `data`.
        """
        course, me = self.course, self.course.group.rank()
        for name, ranks in course.shared.items():
            if me not in ranks:
                continue
            others = {rank: torch.empty_like(sums[name]) for rank in ranks if rank != me}
            swap(
                {r: [sums[name]] for r in others},
                {r: [buffer] for r, buffer in others.items()},
                course.group,
            )
            total = torch.zeros_like(sums[name])
            for rank in ranks:
                total += sums[name] if rank == me else others[rank]
            sums[name] = total
        if course.data is not None:
            with answered(course.data):
                for name in self.names:
                    with torch_compat_ranks.lent([sums[name]]):
                        dist.all_reduce(sums[name], group=course.data)
                    sums[name].div_(course.data.size())


@contextmanager
def _own_numbers(random: bool) -> Iterator[int | None]:
    """A seed of the step's own, drawn from the user's generator, which goes on from there; None where nothing
    is drawn.
    """
    if not random:
        yield None
        return
    seed = int(torch.randint(2**62, ()))
    # in NumPy's memory: it would be alive at the highest instant
    state = torch.get_rng_state().numpy().copy()
    try:
        with torch.random.fork_rng() if torch.cuda.is_initialized() else nullcontext():
            yield seed
    finally:
        torch.set_rng_state(torch.from_numpy(state))
