"""Whether the planned step is the model's own.

Loss and every gradient against eager, and the allocator's peak against the plan.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from time import perf_counter
from types import MappingProxyType

import numpy as np
import torch
from torch import nn

from effcompile.capture.memory import SEED as SEED
from effcompile.core import torch_compat_memory
from effcompile.core.errors import VerificationError
from effcompile.core.findings import Cosine, Together
from effcompile.core.garbage import uncollected
from effcompile.core.goal import EXACT_TOLERANCE
from effcompile.core.reasons import Because, Reason
from effcompile.ir.figures import Check
from effcompile.machine.room import device_of
from effcompile.proof.digests import Digests
from effcompile.proof.spool import Spool
from effcompile.search.training.work import LeafInputs

_NO_LEAVES: LeafInputs = MappingProxyType({})
#: Relative error that the dtype's own rounding makes when sums are taken in another order.
_ROUNDING = {torch.float64: 1e-10, torch.float32: EXACT_TOLERANCE, torch.bfloat16: 1e-2, torch.float16: 2e-3}
#: Elements that are compared at a time, of a host and of a device: in float64 they stay in a core's cache, or
#: pay for their launches.
_PIECE, _PIECE_ON_DEVICE = 1 << 15, 1 << 22
#: A gradient whose elements are smaller than this share of the usual one is compared with that share.
_NEGLIGIBLE = 1e-3
#: A gradient may be so many times as far from float64's as the model's own, or as gradients usually are.
_AS_NEAR = 4.0
#: Where there is none in float64: the difference that is rounding, as a share of the usual gradient: some 16
#: units in the last place of fp32, and in 16 bits what sums in another order make.
_ROUNDED_AWAY, NARROW = 1e-6, (torch.bfloat16, torch.float16)


@dataclass(frozen=True, kw_only=True)
class Result:
    """One step: its loss, its gradients by name, the bytes allocated at its highest instant, seconds while
    watched; whose it is.

    reserved: on a GPU, what torch's allocator took from the device in all.
    """

    loss: torch.Tensor
    gradients: Mapping[str, torch.Tensor | None]  # of inputs too, as "input x"
    peak_bytes: int | None
    seconds: float = 0.0
    named: str = "eager's"
    reserved: int = 0


def run(
    step: Callable[[], torch.Tensor],
    model: nn.Module,
    inputs: LeafInputs = _NO_LEAVES,
    spool: Spool | Digests | None = None,
    *,
    watched: bool = True,
) -> Result:
    """One step from seed, with the model's gradients, buffers and the random generators put back afterwards.

    Args:
        step: runs the forward and returns the loss.
        model: whose gradients it makes.
        inputs: those that get a gradient too, by name.
        spool: where the gradients are put, so that none is alive; those that left within the backward are
            there already.
        watched: whether its peak is told; who does not ask is spared the record of every allocation.
    """
    with restored(model, inputs):
        torch.manual_seed(SEED)
        libraries, before = held_by_libraries(model), 0.0 if spool is None else spool.seconds
        device = device_of(model)
        record: contextlib.AbstractContextManager[Callable[[], int] | None]
        if watched:
            record = torch_compat_memory.watched_memory(device)
        else:
            record = uncollected() if device == "cpu" else contextlib.nullcontext()
        with record as peak:
            start = perf_counter()
            loss = step()
            loss.backward()
            loss = loss.detach().clone()
            if loss.is_cuda:
                torch.cuda.synchronize()
            # gradients that leave within the backward are put aside for the proof, not by the step
            spent = perf_counter() - start - (0.0 if spool is None else spool.seconds - before)
        gradients: Mapping[str, torch.Tensor | None]
        if spool is None:
            gradients = {name: tensor.grad for name, tensor in differentiated(model, inputs)}
        else:
            gradients = spool
            put = spool.put_kept if isinstance(spool, Digests) else spool.put
            for name, tensor in differentiated(model, inputs):
                if tensor.grad is not None or name not in spool:
                    put(name, tensor.grad)
                tensor.grad = None
        return Result(
            loss=loss,
            gradients=gradients,
            peak_bytes=None if peak is None else libraries + peak(),
            seconds=spent,
            reserved=reserved(),
        )


def held_by_libraries(model: nn.Module) -> int:
    """What products keep on the model's GPU between steps; 0 for a model elsewhere."""
    if device_of(model) != "cuda":
        return 0
    torch.cuda.empty_cache()  # what is reserved from here on is the step's
    return torch_compat_memory.held_by_libraries()


def reserved() -> int:
    """Bytes that torch's allocator held from the current GPU at the most since the last watch began."""
    return int(torch.cuda.max_memory_reserved()) if torch.cuda.is_initialized() else 0


def differentiated(model: nn.Module, inputs: LeafInputs) -> Iterator[tuple[str, torch.Tensor]]:
    """What may get a gradient: parameters by their qualified names, inputs as "input x"."""
    yield from model.named_parameters()
    yield from ((f"input {name}", tensor) for name, tensor in inputs.items())


def seconds(step: Callable[[], torch.Tensor], model: nn.Module, inputs: LeafInputs = _NO_LEAVES) -> float:
    """Time of one step (forward and backward), with everything put back as in `run`."""
    with restored(model, inputs):
        start = perf_counter()
        loss = step()
        loss.backward()
        if loss.is_cuda:
            torch.cuda.synchronize()
        return perf_counter() - start


def compare(
    found: Result, wanted: Result, limit: float | None, exact: Callable[[], Result | None] = lambda: None
) -> Check:
    """Loss and gradients of the planned step against the model's own, each relative to its own norm.

    A gradient that is mathematically zero (a key's bias: softmax does not see it) is rounding in both, and
    its relative error says nothing. So one that fails is compared with what the step makes in float64, or in
    16 bits rounded otherwise: it has to be as near to that as the model's own. Where there is neither, it has
    to be within rounding of the whole gradient's scale.

    Args:
        found: of the planned step.
        wanted: of the original one.
        limit: the goal's error.
        exact: the original in float64 or rounded otherwise, where it runs so; called only when a gradient
            fails.

    Raises:
        VerificationError: the model's own loss, or a gradient of its, is not a number.
    """
    return _compared(_pairs(found, wanted), found, wanted, limit, exact)


def _compared(
    pairs: _Pairs, found: Result, wanted: Result, limit: float | None, exact: Callable[[], Result | None]
) -> Check:
    """`compare`, of tensors that were read already."""
    rounded = [_ROUNDING.get(dtype, EXACT_TOLERANCE) for dtype in (wanted.loss.dtype, *_autocast_dtypes())]
    allowed = max(limit or 0.0, *rounded, *(pair.rounding for pair in pairs.gradients.values()))
    usual = math.sqrt(
        sum(sums.theirs for sums in pairs.sums)
        / max(1, sum(pair.elements for pair in pairs.gradients.values()))
    )
    errors = {
        "loss": pairs.loss.error(0.0),
        **{name: pair.error(_NEGLIGIBLE * usual) for name, pair in pairs.gradients.items()},
    }
    same = all(pair.same for pair in (pairs.loss, *pairs.gradients.values()))
    failed = [
        name
        for name, error in errors.items()
        if name != "loss" and not error <= allowed and math.isfinite(error)
    ]
    truth = exact() if failed else None
    scale = usual if truth is None else _AS_NEAR * _usual_rounding(wanted, truth)
    nothing = [name for name in failed if _is_rounding(name, found, wanted, truth, scale)]
    apart = max((errors.pop(name) for name in nothing), default=0.0)
    # NaN is the worst
    where = max(errors, key=lambda name: math.inf if math.isnan(errors[name]) else errors[name])
    notes: list[Reason] = [Because("bit-identical") if same else Because("largest at {name}", (where,))]
    if nothing:
        text = "{name} and {} more" if len(nothing) > 1 else "{name}"
        text += ": off by rounding alone (up to {error}), "
        text += (
            "as near to {name} as eager's"
            if truth is not None
            else "measured by the scale of the whole gradient"
        )
        more = (len(nothing) - 1,) if len(nothing) > 1 else ()
        notes.append(
            Because(text, (nothing[0], *more, apart, *((truth.named,) if truth is not None else ())))
        )
    return Check(
        name="loss and all gradients, as eager", error=errors[where], limit=allowed, note=Together.of(notes)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pair:
    """A tensor of the planned step beside the model's own, read once.

    Attributes:
        sums: over their elements; None where the model has none. elements: of the model's own. rounding: of
            its dtype.
        same: they are equal to the bit. missing: the error where one of the two has none.
    """

    sums: GradientSums | None
    elements: int
    rounding: float
    same: bool
    missing: float | None

    @classmethod
    def of(cls, ours: torch.Tensor | None, theirs: torch.Tensor | None) -> _Pair:
        sums = None if theirs is None else GradientSums.of(ours, theirs)
        there = ours if theirs is None else theirs
        both = ours is not None and theirs is not None
        return cls(
            sums=sums,
            elements=0 if theirs is None else theirs.numel(),
            rounding=rounding(theirs),
            same=both and sums is not None and sums.apart == 0 and torch.equal(ours, theirs),  # type: ignore[arg-type]
            missing=None if both else 0.0 if there is None or not bool(there.any()) else math.inf,
        )

    def error(self, floor: float) -> float:
        """‖a − b‖ / ‖b‖, where b's elements count as `floor` in the mean at the least; a missing tensor
        counts as zeros.

        The floor is for gradients that are zero but for rounding (a key's bias: softmax does not see it).
        """
        if self.sums is None or self.missing is not None:
            return self.missing or 0.0
        difference = math.sqrt(self.sums.apart)
        size = max(math.sqrt(self.sums.theirs), floor * math.sqrt(self.elements))
        return difference / size if size > 0 else math.inf if difference > 0 else 0.0


@dataclass(frozen=True, slots=True)
class _Pairs:
    """The loss, and every gradient that one of the two steps has."""

    loss: _Pair
    gradients: Mapping[str, _Pair]

    @property
    def sums(self) -> list[GradientSums]:
        """Of the gradients that the model has."""
        return [pair.sums for pair in self.gradients.values() if pair.sums is not None]


def _pairs(found: Result, wanted: Result) -> _Pairs:
    """Each gradient read once: some are in a file, and all are large.

    Raises:
        VerificationError: the model's own loss, or a gradient of its, is not a number.
    """
    if not math.isfinite(float(wanted.loss)):
        raise _nothing_to_compare(f"loss is {float(wanted.loss)}")
    gradients = {}
    for name in wanted.gradients:
        theirs, ours = _read(wanted.gradients, name), _read(found.gradients, name)
        if ours is not None or theirs is not None:
            gradients[name] = pair = _Pair.of(ours, theirs)
            # squares of what is finite are, in float64, but of doubles
            finite = pair.sums is None or math.isfinite(pair.sums.theirs)
            if theirs is not None and not finite and not bool(theirs.isfinite().all()):
                raise _nothing_to_compare(f"gradient of {name} is not finite")
    return _Pairs(_Pair.of(found.loss, wanted.loss), gradients)


def _read(gradients: Mapping[str, torch.Tensor | None], name: str) -> torch.Tensor | None:
    """One of them, where it lies: what is read once is not copied out of its file."""
    if name not in gradients:
        return None
    return gradients.mapped(name) if isinstance(gradients, Spool) else gradients[name]


def _usual_rounding(wanted: Result, truth: Result) -> float:
    """How far an element of the model's own gradient usually is from float64's."""
    apart, count = 0.0, 0
    for name, gradient in wanted.gradients.items():
        exact = truth.gradients.get(name)
        if gradient is not None and exact is not None:
            apart, count = apart + GradientSums.of(gradient, exact).apart, count + gradient.numel()
    return math.sqrt(apart / max(1, count))


def _is_rounding(name: str, found: Result, wanted: Result, truth: Result | None, scale: float) -> bool:
    """Whether a gradient is off by rounding alone.

    It is no further from the truth than the model's own or than `scale` an element; without a truth, it is
    off by less than rounding of a gradient of the usual `scale`.
    """
    ours, theirs = found.gradients.get(name), wanted.gradients.get(name)
    if ours is None or theirs is None:
        return False
    exact = None if truth is None else truth.gradients.get(name)
    least = scale * math.sqrt(theirs.numel())
    if exact is None:
        share = rounding(theirs) if theirs.dtype in NARROW else _ROUNDED_AWAY
        return math.sqrt(GradientSums.of(ours, theirs).apart) <= share * least
    return math.sqrt(GradientSums.of(ours, exact).apart) <= max(
        _AS_NEAR * math.sqrt(GradientSums.of(theirs, exact).apart), least
    )


def compare_whole(found: Result, wanted: Result, limit: float) -> Check:
    """The whole gradient, all parameters' as one vector, of a step that rounds what its backward reads; its
    cosine is in the note.

    Raises:
        VerificationError: the model's own loss, or a gradient of its, is not a number.
    """
    pairs = _pairs(found, wanted)
    each = _compared(pairs, found, wanted, limit, lambda: None)
    apart, ours, theirs, dot = (
        math.fsum(getattr(one, name) for one in pairs.sums) for name in ("apart", "ours", "theirs", "dot")
    )
    error = max(math.sqrt(apart / theirs) if theirs else 0.0, pairs.loss.error(0.0))
    cosine = dot / math.sqrt(ours * theirs) if ours and theirs else 1.0
    note = Cosine(cosine=cosine, alone=each.note, error=each.error)
    return Check(name="loss and whole gradient, as eager", error=error, limit=limit, note=note)


def _nothing_to_compare(what: str) -> VerificationError:
    return VerificationError(
        f"The model's own {what} at the example inputs, so nothing can be compared. Give other inputs, "
        "or mend the model (a learning rate, a mask that hides every token, labels that are all ignored)."
    )


@dataclass(frozen=True, slots=True)
class GradientSums:
    """Sums over two tensors' elements in float64, taken piece by piece: of squares of the difference and of
    each, of products.
    """

    apart: float
    ours: float
    theirs: float
    dot: float

    @classmethod
    def of(cls, a: torch.Tensor | None, b: torch.Tensor) -> GradientSums:
        """`a`: None counts as zeros."""
        a, b = a.to_dense() if a is not None and a.is_sparse else a, b.to_dense() if b.is_sparse else b
        flat = (b.detach().reshape(-1), (b if a is None else a).detach().reshape(-1))
        sums = torch.zeros(4, dtype=torch.float64)
        piece = _PIECE if b.device.type == "cpu" else _PIECE_ON_DEVICE
        for theirs, ours in zip(*(t.split(piece) for t in flat), strict=True):
            y, x = (
                theirs.double(),
                ours.double() if a is not None else torch.zeros_like(theirs, dtype=torch.float64),
            )
            apart = x - y
            sums += _sums_of_products((apart, apart), (x, x), (y, y), (x, y))
        return cls(*(float(each) for each in sums))


def _sums_of_products(*pairs: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Of each pair of vectors in float64, on the host.

    No `dot`: BLAS shares each among all threads, and waits milliseconds for one that is not running.
    """
    if pairs[0][0].device.type == "cpu":  # nothing is made of what is only added up
        found = [np.einsum("i,i", a.numpy(), b.numpy()) for a, b in pairs]
        return torch.tensor(found, dtype=torch.float64)
    return torch.stack([(a * b).sum() for a, b in pairs]).cpu()


def rounding(gradient: torch.Tensor | None) -> float:
    """Relative error that sums in another order make in a tensor's dtype."""
    return 0.0 if gradient is None else _ROUNDING.get(gradient.dtype, EXACT_TOLERANCE)


def _autocast_dtypes() -> list[torch.dtype]:
    """Where autocast is on, gradients are sums of rounded products, whatever their own dtype."""
    return [
        torch.get_autocast_dtype(device) for device in ("cpu", "cuda") if torch.is_autocast_enabled(device)
    ]


@contextlib.contextmanager
def restored(model: nn.Module, inputs: LeafInputs = _NO_LEAVES) -> Iterator[None]:
    """Gradients, buffers, tensor attributes and random generators are put back; within, there are no
    gradients yet.
    """
    attributes = [(vars(module), dict(vars(module))) for module in model.modules()]
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
            for name in [name for name, value in now.items() if isinstance(value, torch.Tensor)]:
                del now[name]  # a forward that keeps what it computed would keep its whole graph alive
            now.update(
                {
                    name: value
                    for name, value in before.items()
                    if name not in now or isinstance(value, torch.Tensor)
                }
            )
