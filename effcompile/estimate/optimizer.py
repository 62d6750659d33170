"""What an optimizer takes: bytes of its states, bytes that its step needs beside them, and seconds.

Bytes are found by running it on tensors without data, one for each different shape. Seconds are measured on
this machine, or modelled: an update reads and writes parameter and states and reads the gradient once (28 B
per parameter for AdamW in fp32).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

import torch
from torch.optim import Optimizer

from effcompile.core import gpu
from effcompile.estimate.storages import Allocations
from effcompile.machine import memory
from effcompile.machine.target import Target
from effcompile.ops.optimizers import EIGHT_BIT, GIVEN, Group, StatesForm, build, one_by_one, pieces
from effcompile.ops.states8 import step8

#: Bytes that torch may take on the CPU for a step's numbers: counters and factors become tensors for a
#: moment.
_SCALARS = 64
#: Elements of the tensor whose update is timed here.
_TIMED = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class StateBytes:
    """An optimizer's bytes for some parameters.

    Attributes:
        state_bytes: kept between steps.
        working_bytes: most bytes alive at an instant of a step (the first or a later one) beside states,
            gradients, parameters.
        largest: the same, where states are made elsewhere than on the device: with those of one parameter in
            its first step.
        moved_bytes: read and written by an update that fuses it.
    """

    state_bytes: int
    working_bytes: int
    largest: int
    moved_bytes: int


def state_bytes(
    form: StatesForm, optimizer: Optimizer, parameters: Sequence[tuple[Group, torch.Tensor]], device: str
) -> StateBytes:
    """What a form of an optimizer takes for its parameters, run on tensors without data."""
    groups = {id(group): group for group, _ in parameters}
    count = Counter((id(group), tuple(p.shape), p.dtype) for group, p in parameters)
    alone = {key: _traced(form, optimizer, groups[key[0]], [_meta(key[1], key[2])], device) for key in count}
    states = sum(alone[key][0] * n for key, n in count.items())
    largest = max((first for _, _, first in alone.values()), default=0)
    working = max((beside for _, beside, _ in alone.values()), default=0)
    if form.name == GIVEN and not form.fused and (_together(optimizer, device) or one_by_one(optimizer)):
        working = _whole(optimizer, parameters, device)
    tensors = sum(p.numel() * p.element_size() for _, p in parameters)
    return StateBytes(
        state_bytes=states, working_bytes=working, largest=largest, moved_bytes=2 * states + 3 * tensors
    )


def measured_seconds(
    form: StatesForm, optimizer: Optimizer, group: Group, largest: torch.Tensor, elements: int, device: str
) -> float:
    """Seconds of one step for so many elements: the update, run here, of a parameter like the largest one, of
    fewer rows if need be.
    """
    if device == "cuda":
        return _measured_on_gpu(form, optimizer, group, largest, elements)
    given = torch.zeros(_timed_shape(tuple(largest.shape)), dtype=largest.dtype)
    size = max(given.numel(), 1)
    makers = [torch.nn.Parameter(piece) for piece in pieces(form, given)]
    inner = build(form, optimizer, group, makers)
    for piece in makers:
        piece.grad = torch.full_like(piece, 1e-3)
    best = float("inf")
    with torch.compiler.set_stance("force_eager"):
        _update(inner, form)
        for _ in range(2):
            start = perf_counter()
            _update(inner, form)
            best = min(best, perf_counter() - start)
    return best * elements / size


def _update(inner: Optimizer, form: StatesForm, device: str = "") -> None:
    """As a planned optimizer makes it, on a type of device or on the tensors' own."""
    if form.name != EIGHT_BIT or not step8(inner, device):
        inner.step()


#: Elements whose update is timed on a GPU, where that of `_TIMED` is a matter of launches; and bytes of all
#: that its update touches, each.
_TIMED_ON_GPU, _TOUCHED = 1 << 25, 32


def _measured_on_gpu(
    form: StatesForm, optimizer: Optimizer, group: Group, largest: torch.Tensor, elements: int
) -> float:
    """The same on the current GPU, by its own clock, of several parameters at once, as a model has them."""
    shape = _timed_shape(tuple(largest.shape))
    room = (memory.free_bytes("cuda") or 0) // 2 // _TOUCHED
    count = max(1, min(_TIMED_ON_GPU, elements, room) // max(1, math.prod(shape)))
    given = [torch.zeros(shape, dtype=largest.dtype, device="cuda") for _ in range(count)]
    makers = [torch.nn.Parameter(piece) for tensor in given for piece in pieces(form, tensor)]
    inner = build(form, optimizer, group, makers)
    for piece in makers:
        piece.grad = torch.full_like(piece, 1e-3)

    with torch.compiler.set_stance("force_eager"):
        return gpu.seconds(lambda: _update(inner, form)) * elements / max(1, sum(t.numel() for t in given))


def _timed_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape with as many rows as make it small enough to time; an update may ask for matrices (Muon)."""
    if math.prod(shape) <= _TIMED:
        return shape
    return (max(1, _TIMED // math.prod(shape[1:])), *shape[1:])


def modelled_seconds(found: StateBytes, target: Target, count: int) -> float:
    """Memory-bound on the device, with one launch for each parameter."""
    return found.moved_bytes / (target.memory_bandwidth * target.efficiency) + count * target.launch_seconds


def modelled_host_seconds(found: StateBytes, target: Target, link_bytes: int, count: int) -> float:
    """Gradients to the host, the update there, parameters back; one after the other (ZeRO-Offload, arXiv
    2101.06840, §4).

    Each parameter takes three calls, two copies and an update, which cost a launch each.
    """
    return (
        link_bytes / target.link_bandwidth
        + found.moved_bytes / target.host_bandwidth
        + 3 * count * target.launch_seconds
    )


def _together(optimizer: Optimizer, device: str) -> bool:
    """Whether torch updates all parameters at once (foreach), which makes temporaries of all their bytes."""
    asked = [group.get("foreach") for group in optimizer.param_groups if "foreach" in group]
    return bool(asked) and (any(asked) or (device == "cuda" and all(a is None for a in asked)))


def _whole(optimizer: Optimizer, parameters: Sequence[tuple[Group, torch.Tensor]], device: str) -> int:
    """Working bytes of a step of all parameters, group by group as the optimizer runs them."""
    most = 0
    for group in optimizer.param_groups:
        mine = [p for g, p in parameters if g is group]
        together = {**group, "foreach": True} if _together(optimizer, device) else group
        most = max(
            most,
            _traced(
                StatesForm(), optimizer, together, [_meta(tuple(p.shape), p.dtype) for p in mine], device
            )[1],
        )
    return most


def _meta(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _traced(
    form: StatesForm, optimizer: Optimizer, group: Group, tensors: Sequence[torch.Tensor], device: str
) -> tuple[int, int, int]:
    """(bytes of states, working bytes of a step, bytes made by the first step of one piece) of
    these tensors.
    """
    try:
        inner = _unfused(form, optimizer, group, tensors)
        states, working, first = _run(inner, form, device)
    except (RuntimeError, NotImplementedError):  # it reads numbers from its tensors (Adafactor, ASGD)
        inner = _unfused(
            form, optimizer, group, [torch.zeros(tensor.shape, dtype=tensor.dtype) for tensor in tensors]
        )
        states, working, first = _run(inner, form, device)
    untraced = _tables(inner) + (
        _counters(inner) if device == "cpu" else _counters_on_gpu(inner) if form.fused else 0
    )
    states, first = states + untraced, first + untraced
    scalars = _SCALARS if device == "cpu" else 0
    return states, scalars + (0 if form.fused else working), scalars + (states if form.fused else first)


def _unfused(
    form: StatesForm, optimizer: Optimizer, group: Group, tensors: Sequence[torch.Tensor]
) -> Optimizer:
    """The optimizer of parameters like these; the fused kernels do not run without data, and the others make
    the same states.
    """
    parameters = [torch.nn.Parameter(piece) for tensor in tensors for piece in pieces(form, tensor)]
    for p in parameters:
        p.grad = torch.zeros_like(p)
    return build(
        StatesForm(form.name, False, form.piece),
        optimizer,
        {**group, "fused": None} if group.get("fused") else group,
        parameters,
    )


def _tables(inner: Optimizer) -> int:
    """Bytes of the codes' tables in torchao's 8-bit states, one each; torch.tensor makes them, which tracing
    does not see.
    """
    return sum(
        value.qmap.nbytes
        for values in inner.state.values()
        for value in values.values()
        if hasattr(value, "qmap")
    )


def _counters(inner: Optimizer) -> int:
    """Bytes of step counters and learning rates, which torch makes on the CPU, past what is traced."""
    kept = [*inner.state.values(), *inner.param_groups]
    numbers = [
        v
        for values in kept
        for v in values.values()
        if isinstance(v, torch.Tensor) and v.device.type == "cpu"
    ]
    return sum(v.nbytes for v in numbers if v.numel() == 1)


def _counters_on_gpu(inner: Optimizer) -> int:
    """Of fused updates there, which count their steps on the GPU."""
    return sum(gpu.BLOCK for values in inner.state.values() if isinstance(values.get("step"), torch.Tensor))


def _run(inner: Optimizer, form: StatesForm, device: str) -> tuple[int, int, int]:
    """(states, working bytes, peak of the first step) of one step that makes the states and one that has
    them.
    """
    with Allocations(on_gpu=device == "cuda") as seen, torch.compiler.set_stance("force_eager"):
        _update(inner, form, "cpu" if device == "cpu" else "")
        first, states = seen.peak, seen.live
        seen.peak = states
        _update(inner, form, "cpu" if device == "cpu" else "")
    return states, max(first, seen.peak) - states, first
