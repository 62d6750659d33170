"""Is the planned step the model's own? Loss and every gradient against eager, and the allocator's peak against the plan."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from time import perf_counter
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from effcompile.core import torch_compat
from effcompile.core.errors import VerificationError
from effcompile.core.goal import EXACT_TOLERANCE
from effcompile.core.units import format_bytes
from effcompile.ir.plan import Check

#: Inputs that require a gradient, by name.
Leaves = Mapping[str, torch.Tensor]
_NO_LEAVES: Leaves = MappingProxyType({})
#: Relative error that the dtype's own rounding makes when sums are taken in another order.
_ROUNDING = {torch.float64: 1e-10, torch.float32: EXACT_TOLERANCE, torch.bfloat16: 1e-2, torch.float16: 2e-3}
_SEED = 20
#: A gradient whose elements are smaller than this share of the usual one is compared with that share.
_NEGLIGIBLE = 1e-3


@dataclass(frozen=True, kw_only=True)
class Result:
    """One step: its loss, its gradients by name, and the bytes allocated at its highest instant."""

    loss: torch.Tensor
    gradients: Mapping[str, torch.Tensor | None]  # of inputs too, as "input x"
    peak_bytes: int | None


def run(step: Callable[[], torch.Tensor], model: nn.Module, inputs: Leaves = _NO_LEAVES) -> Result:
    """One step from seed, with the model's gradients, buffers and the random generators put back afterwards.

    Args:
        step: runs the forward and returns the loss.
        model: whose gradients it makes.
        inputs: those that get a gradient too, by name.
    """
    with restored(model, inputs):
        torch.manual_seed(_SEED)
        with torch_compat.watched_memory(device_of(model)) as peak:
            loss = step()
            loss.backward()
        gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
        gradients |= {f"input {name}": tensor.grad for name, tensor in inputs.items()}
        return Result(loss=loss.detach(), gradients=gradients, peak_bytes=peak())


def device_of(model: nn.Module) -> str:
    """The type of device that a model's steps run on: that of its first parameter."""
    return next((p.device.type for p in model.parameters()), "cpu")


def into_gradients(model: nn.Module) -> Callable[[str, torch.Tensor], None]:
    """A sink of gradients that the backward consumes: into the parameters, as an unplanned backward leaves them."""

    def keep(name: str, gradient: torch.Tensor) -> None:
        model.get_parameter(name).grad = gradient

    return keep


def seconds(step: Callable[[], torch.Tensor], model: nn.Module, inputs: Leaves = _NO_LEAVES) -> float:
    """Time of one step (forward and backward), with everything put back as in `run`."""
    with restored(model, inputs):
        start = perf_counter()
        loss = step()
        loss.backward()
        if loss.is_cuda:
            torch.cuda.synchronize()
        return perf_counter() - start


def compare(found: Result, wanted: Result, limit: float | None) -> Check:
    """Loss and gradients of the planned step against the model's own.

    Raises:
        VerificationError: the model's own loss, or a gradient of its, is not a number.
    """
    if not math.isfinite(float(wanted.loss)):
        raise _nothing_to_compare(f"loss is {float(wanted.loss)}")
    for name, gradient in wanted.gradients.items():
        if gradient is not None and not bool(gradient.isfinite().all()):
            raise _nothing_to_compare(f"gradient of {name} is not finite")
    same = torch.equal(found.loss, wanted.loss)
    worst, where = _relative(found.loss, wanted.loss, 0.0), "loss"
    usual = _root_mean_square(wanted.gradients.values())
    for name, gradient in wanted.gradients.items():
        other = found.gradients.get(name)
        if gradient is None and other is None:
            continue
        error = _relative(other, gradient, _NEGLIGIBLE * usual)
        same = same and error == 0.0 and gradient is not None and other is not None and torch.equal(other, gradient)
        if not (error <= worst or math.isnan(worst)):  # NaN is the worst
            worst, where = error, name
    rounded = [_ROUNDING.get(dtype, EXACT_TOLERANCE) for dtype in (wanted.loss.dtype, *_autocast_dtypes())]
    allowed = max(limit or 0.0, *rounded, *(_rounding(g) for g in wanted.gradients.values()))
    note = "bit-identical" if same else f"largest at {where}"
    return Check(name="loss and all gradients, as eager", error=worst, limit=allowed, note=note)


def compare_whole(found: Result, wanted: Result, limit: float) -> Check:
    """The whole gradient, all parameters' as one vector, of a step that rounds what its backward reads; its cosine is in the note.

    Raises:
        VerificationError: the model's own loss, or a gradient of its, is not a number.
    """
    each = compare(found, wanted, limit)  # also refuses what cannot be compared
    pairs = [(found.gradients.get(name), g) for name, g in wanted.gradients.items() if g is not None]
    couples = [(torch.zeros_like(b) if a is None else a, b) for a, b in pairs]
    apart = math.fsum(float((a.double() - b.double()).square().sum()) for a, b in couples)
    ours = math.fsum(float(a.double().square().sum()) for a, _ in couples)
    theirs = math.fsum(float(b.double().square().sum()) for _, b in couples)
    dot = math.fsum(float((a.double() * b.double()).sum()) for a, b in couples)
    error = max(math.sqrt(apart / theirs) if theirs else 0.0, _relative(found.loss, wanted.loss, 0.0))
    cosine = dot / math.sqrt(ours * theirs) if ours and theirs else 1.0
    note = f"cosine of the whole gradient {cosine:.6f}; of one parameter's alone {each.note}, {each.error:.1e}"
    return Check(name="loss and whole gradient, as eager", error=error, limit=limit, note=note)


def _nothing_to_compare(what: str) -> VerificationError:
    return VerificationError(
        f"The model's own {what} at the example inputs, so nothing can be compared. Give other inputs, "
        "or mend the model (a learning rate, a mask that hides every token, labels that are all ignored)."
    )


def room_for(peak_bytes: int) -> str | None:
    """None, or why the unplanned step cannot be run beside for comparison: it needs more than there is."""
    free = _free_bytes()
    if free is None or peak_bytes < 0.9 * free:
        return None
    return f"the unplanned step needs {format_bytes(peak_bytes)}, {format_bytes(free)} are free"


def _free_bytes() -> int | None:
    if torch.cuda.is_available():
        return int(torch.cuda.mem_get_info()[0])
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            found = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in file}
        return min(found["MemAvailable"], os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    except (OSError, KeyError, ValueError):
        return None


def _relative(a: torch.Tensor | None, b: torch.Tensor | None, floor: float) -> float:
    """‖a − b‖ / ‖b‖, where b's elements count as `floor` in the mean at the least; a missing tensor counts as zeros.

    The floor is for gradients that are zero but for rounding (a key's bias: softmax does not see it).
    """
    if a is None or b is None:
        there = b if a is None else a
        return 0.0 if there is None or not bool(there.any()) else math.inf
    difference = float((a.double() - b.double()).norm())
    size = max(float(b.double().norm()), floor * math.sqrt(b.numel()))
    return difference / size if size > 0 else math.inf if difference > 0 else 0.0


def _root_mean_square(gradients: Iterable[torch.Tensor | None]) -> float:
    known = [g for g in gradients if g is not None]
    return math.sqrt(sum(float(g.double().square().sum()) for g in known) / max(1, sum(g.numel() for g in known)))


def _rounding(gradient: torch.Tensor | None) -> float:
    return 0.0 if gradient is None else _ROUNDING.get(gradient.dtype, EXACT_TOLERANCE)


def _autocast_dtypes() -> list[torch.dtype]:
    """Where autocast is on, gradients are sums of rounded products, whatever their own dtype."""
    return [torch.get_autocast_dtype(device) for device in ("cpu", "cuda") if torch.is_autocast_enabled(device)]


@contextlib.contextmanager
def restored(model: nn.Module, inputs: Leaves = _NO_LEAVES) -> Iterator[None]:
    """Gradients, buffers, tensor attributes and random generators are put back; within, there are no gradients yet."""
    attributes = [(vars(module), _tensors_among(vars(module))) for module in model.modules()]
    leaves = [*model.parameters(), *inputs.values()]
    gradients = [leaf.grad for leaf in leaves]
    buffers = {name: b.clone() for name, b in model.named_buffers()}
    for leaf in leaves:
        leaf.grad = None
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.is_cuda})
    try:
        with torch.random.fork_rng(devices=devices), torch.enable_grad():
            yield
    finally:
        for leaf, gradient in zip(leaves, gradients, strict=True):
            leaf.grad = gradient
        with torch.no_grad():
            for name, b in model.named_buffers():
                b.copy_(buffers[name])
        for now, before in attributes:
            for name in _tensors_among(now).keys() - before.keys():
                del now[name]  # a forward that keeps what it computed would keep its whole graph alive
            now.update(before)


def _tensors_among(attributes: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    return {name: value for name, value in attributes.items() if isinstance(value, torch.Tensor)}


def loss_of(outputs: Any, inputs: Any, loss: Callable[[Any, Any], torch.Tensor] | None) -> torch.Tensor:
    """The scalar of what a model returned, as capture found it."""
    if loss is not None:
        return loss(outputs, inputs)
    if isinstance(outputs, torch.Tensor):
        return outputs
    if isinstance(outputs, Mapping) and "loss" in outputs:
        return outputs["loss"]
    return outputs.loss if hasattr(outputs, "loss") else outputs[0]
