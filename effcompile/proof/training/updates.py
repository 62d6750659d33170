"""The optimizer's part of verification: a whole step's peak with its update, and the planned update against
the given one's.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from time import perf_counter

import torch
from torch import nn
from torch.optim import Optimizer

from effcompile.backends.torch.optimizer import PlannedOptimizer, Worker
from effcompile.backends.torch.training import StepRunner
from effcompile.capture.diagnose import place_of
from effcompile.core import torch_compat_memory
from effcompile.core.errors import EffcompileError, InputsError
from effcompile.core.goal import EXACT_TOLERANCE
from effcompile.core.reasons import Because, Reason
from effcompile.core.stages import first_line, is_no_memory
from effcompile.ir.figures import Check
from effcompile.machine.memory import give_back
from effcompile.machine.room import device_of
from effcompile.ops.consume import Sink
from effcompile.ops.optimizers import EIGHT_BIT, GIVEN, StatesForm, one_by_one
from effcompile.passes.training.optimizer_ways import StatesOption
from effcompile.proof.spool import Spool
from effcompile.proof.training import verify
from effcompile.search.training.work import LeafInputs

#: Optimizers whose update of an element depends on no other one's gradient.
_ELEMENTWISE = (
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.SGD,
    torch.optim.Adagrad,
    torch.optim.RMSprop,
    torch.optim.NAdam,
)
#: Elements of a parameter whose update is compared, a multiple of a block of 8-bit states and of those that
#: have one.
_SAMPLE = 1 << 16
#: By name; None for a parameter that has none.
Gradients = Mapping[str, torch.Tensor | None]


@dataclass(frozen=True, kw_only=True)
class Steps:
    """Two whole steps or more: bytes allocated at the highest instant, and on a GPU reserved; of the second
    the seconds.

    These are of forward and backward, and of the updates.
    """

    peak_bytes: int
    reserved: int
    step_seconds: float
    update_seconds: float


def run(
    step: Callable[[], torch.Tensor],
    model: nn.Module,
    optimizer: Optimizer,
    runner: StepRunner | None,
    inputs: LeafInputs,
    gradients: Gradients | None = None,
    *,
    steps: int = 2,
) -> Steps:
    """So many updates, all but the first one after a forward and a backward; all is put back afterwards but
    the optimizer's states.

    `runner` is of a planned step, whose backward may update parameters itself, None of the original one;
    `inputs` are those that get gradients. With `gradients`, of a step at these parameters, the first update
    makes the states; without them it has a forward and a backward of its own.

    Raises:
        InputsError: the original step itself raises behind an update.
    """
    clock, step = _Clock(), step if runner is not None else _told(step, model)
    libraries = verify.held_by_libraries(model)
    with (
        verify.restored(model, inputs),
        _parameters_restored(model),
        torch_compat_memory.watched_memory(device_of(model)) as peak,
    ):
        if gradients is None:
            _bind(runner, optimizer, lambda consume: consume)
            _step(step, optimizer.step, optimizer, inputs)
        else:
            _update(model, optimizer, runner, gradients)
        give_back()
        _bind(runner, optimizer, clock.around)
        start = perf_counter()
        _step(step, clock.around(optimizer.step), optimizer, inputs)
        spent, updating = perf_counter() - start, clock.seconds
        for _ in range(steps - 2):
            _step(step, optimizer.step, optimizer, inputs)
    return Steps(
        peak_bytes=libraries + peak(),
        reserved=verify.reserved(),
        step_seconds=spent - updating,
        update_seconds=updating,
    )


def _told(step: Callable[[], torch.Tensor], model: nn.Module) -> Callable[[], torch.Tensor]:
    """The model's own step, whose errors are no bugs of ours."""

    def told() -> torch.Tensor:
        try:
            return step()
        except EffcompileError:
            raise
        except (RuntimeError, ValueError, IndexError, TypeError) as error:
            if is_no_memory(error):
                raise
            raise InputsError(
                f"{type(model).__name__} itself raises behind an update by the given optimizer, as it does "
                f"without effcompile. {first_line(error)}\n  at {place_of(error, model)}\n  Give an "
                "optimizer with a smaller learning rate, or leave it out."
            ) from error

    return told


def repeated(step: Callable[[], torch.Tensor], model: nn.Module, inputs: LeafInputs, steps: int) -> Steps:
    """So many forwards and backwards without updates; of the last one the seconds."""
    libraries = verify.held_by_libraries(model)
    with torch_compat_memory.watched_memory(device_of(model)) as peak:
        for _ in range(steps):
            spent = verify.seconds(step, model, inputs)
    return Steps(
        peak_bytes=libraries + peak(), reserved=verify.reserved(), step_seconds=spent, update_seconds=0.0
    )


def _step(
    step: Callable[[], torch.Tensor], update: Callable[..., object], optimizer: Optimizer, inputs: LeafInputs
) -> None:
    """One step."""
    step().backward()
    update()
    optimizer.zero_grad()
    for tensor in inputs.values():
        tensor.grad = None


def _update(model: nn.Module, optimizer: Optimizer, runner: StepRunner | None, gradients: Gradients) -> None:
    """The update after a backward that made these gradients."""
    consume = optimizer.consume if runner is not None and isinstance(optimizer, PlannedOptimizer) else None
    consumed = frozenset(runner.consumed) if runner is not None and consume is not None else frozenset()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            gradient = gradients.get(name)
            if gradient is not None and consume is not None and name in consumed:
                consume(name, gradient)
            else:
                parameter.grad = gradient
            del gradient
    optimizer.step()
    optimizer.zero_grad()


def _bind(runner: StepRunner | None, optimizer: Optimizer, around: Callable[[Sink], Sink]) -> None:
    if runner is not None and isinstance(optimizer, PlannedOptimizer):
        runner.sink = around(optimizer.consume)


class _Clock:
    """Adds up what calls take."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def around(self, function: Callable[..., object]) -> Callable[..., None]:
        def timed(*args: object) -> None:
            start = perf_counter()
            function(*args)
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()
            self.seconds += perf_counter() - start

        return timed


class _parameters_restored:  # noqa: N801  a context manager, named like one
    """Parameters get their values back from copies that are no memory of the process."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __enter__(self) -> None:
        self.values = Spool()
        for name, p in self.model.named_parameters():
            if p.requires_grad:
                self.values.put(name, p)

    def __exit__(self, *_: object) -> None:
        with torch.no_grad():
            for name, value in self.values.items():
                assert value is not None
                self.model.get_parameter(name).copy_(value)


@contextlib.contextmanager
def as_fresh(optimizer: Optimizer) -> Iterator[None]:
    """An optimizer without states is put back as it was, also one that it wraps; within, its hooks are not
    called: a step here is none of the user's.

    Steps write into its groups, too (a counter, Prodigy's estimate of the rate), and into its attributes. A
    tensor there gets its value back in place: a scheduler may hold it.
    """
    held = [vars(optimizer), *optimizer.param_groups]
    before = [
        {key: (value, _copied(value)) for key, value in each.items() if key not in _APART} for each in held
    ]
    with contextlib.ExitStack() as stack:
        for value in vars(optimizer).values():
            if isinstance(value, Optimizer):
                stack.enter_context(as_fresh(value))
        for name, value in vars(optimizer).items():
            if name.startswith("_optimizer_step_"):
                value.clear()
        try:
            yield
        finally:
            optimizer.state.clear()
            for each, were in zip(held, before, strict=True):
                for key in each.keys() - were.keys() - _APART:
                    del each[key]
                each.update({key: _put_back(value, was) for key, (value, was) in were.items()})


#: What is no option of an optimizer or of a group.
_APART = {"state", "param_groups", "params"}


def _copied(value: object) -> object:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    return copy.copy(value) if isinstance(value, list | dict | set) else None


@torch.no_grad()
def _put_back(value: object, was: object) -> object:
    if isinstance(value, torch.Tensor) and isinstance(was, torch.Tensor):
        value.copy_(was)
    elif isinstance(value, list) and isinstance(was, list):
        value[:] = was
    elif isinstance(value, dict | set) and isinstance(was, dict | set):
        value.clear()
        value.update(was)
    return value


def check(states: StatesOption, given: Optimizer, model: nn.Module, gradients: Gradients) -> Check | Reason:
    """Parameters after two planned updates with the same gradients against the given optimizer's: a check, or
    a note.

    The note stands for updates that the user allowed to differ. Where an element's update depends on that
    element's gradient, or its block's, the first elements of a large parameter stand for all: in 8 bits on a
    CPU an update takes microseconds an element.
    """
    name = type(given).__name__
    if one_by_one(given) is not None:
        return Because("the update of {name} is run as it is", (name,))
    groups = {id(p): group for group in given.param_groups for p in group["params"]}
    moved, apart, seen, there = 0.0, 0.0, 0, 0
    worst = (0.0, EXACT_TOLERANCE)  # error, and what rounding allows in the parameter's dtype
    for key, parameter in model.named_parameters():
        gradient = gradients.get(key)
        if gradient is None or id(parameter) not in groups:
            continue
        tensor, there = parameter.detach(), there + parameter.numel()
        if (
            type(given) in _ELEMENTWISE
            and states.form.name in (GIVEN, EIGHT_BIT)
            and tensor.is_contiguous()
            and not gradient.is_sparse
        ):
            tensor, gradient = tensor.view(-1)[:_SAMPLE], gradient.reshape(-1)[:_SAMPLE]
        seen += tensor.numel()
        ours = Spool()
        ours.put(key, _updated(tensor, groups[id(parameter)], given, states.form, states.on_host, gradient))
        theirs = _updated(tensor, groups[id(parameter)], given, StatesForm(), False, gradient)
        between = verify.GradientSums.of(ours[key], theirs)
        error = math.sqrt(between.apart / max(between.theirs, 1e-24))
        worst = max(worst, (error, verify.rounding(parameter)), key=lambda pair: pair[0] / pair[1])
        moved += verify.GradientSums.of(tensor, theirs).apart
        apart += between.apart
    if states.changes_numbers:
        relative = (apart / moved) ** 0.5 if moved else 0.0
        text = (
            "{name}: two updates differ from those of {name} by {error} of them, at the example "
            "inputs' gradients"
        )
        return Because(text, (states.form.name, name, relative))
    note = (
        Because("on {} of {} elements, the first of each parameter", (seen, there)) if seen < there else None
    )
    return Check(name=f"parameters after two updates, as {name}'s", error=worst[0], limit=worst[1], note=note)


def _updated(
    tensor: torch.Tensor,
    group: Mapping[str, object],
    given: Optimizer,
    form: StatesForm,
    on_host: bool,
    gradient: torch.Tensor,
) -> torch.Tensor:
    made = nn.Parameter(tensor.clone())
    worker = Worker(made, group, given, form, on_host)
    with torch.no_grad():
        for _ in range(2):
            worker.step(gradient, group)
    return made.detach()
