"""What a forward keeps from one call for the next: put back after a capture, written into buffers, or refused
where it is in no buffer.

A graph has no memory but buffers that are written in place. A forward that puts another tensor in the place
of a buffer is traced as if it wrote into it; torch.export does that for buffers of the outermost module
alone. What is kept elsewhere and read again is refused.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from effcompile.capture import reads as code
from effcompile.capture import whose_code
from effcompile.capture.facts import is_plain
from effcompile.core import torch_compat
from effcompile.core.errors import CaptureError

#: Relative difference of a loss that another order of sums may make.
_SAME = 1e-6
#: Of the numbers that each run of a model's own step draws, here and where it is what a plan is held against.
SEED = 20
#: Names in an error at the most.
_NAMED = 3


@contextlib.contextmanager
def as_it_was(model: nn.Module) -> Iterator[list[str]]:
    """Attributes of the model's modules and of the user's own objects in them, and what lists, dicts and sets
    hold, are put back after.

    Yields the places of those that were, in the end.
    """
    before = [(place, holder, holder.copy()) for place, holder in _holders(model)]
    changed: list[str] = []
    try:
        yield changed
    finally:
        for place, holder, held in before:
            if keys := [key for key, _, _ in _differing(holder, held)]:
                changed += [f"{place}.{key}" for key in keys]
                holder.clear()
                (holder.extend if isinstance(holder, list | deque) else holder.update)(held)


def _holders(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """(Place, a mutable thing that holds what a forward may keep), each once."""
    todo: list[tuple[str, Any]] = [
        (f"model.{name}".rstrip("."), vars(module)) for name, module in model.named_modules()
    ]
    seen: set[int] = set()
    while todo:
        place, holder = todo.pop()
        if id(holder) in seen or len(holder) > code.LONGEST:
            continue
        seen.add(id(holder))
        yield place, holder
        for key, value in _items(holder):
            if isinstance(value, list | dict | set | deque):
                todo.append((f"{place}.{key}", value))
            elif (
                hasattr(value, "__dict__")
                and not isinstance(value, nn.Module | type)
                and whose_code.is_own(type(value))
            ):
                todo.append((f"{place}.{key}", vars(value)))


def _items(holder: Any) -> list[tuple[object, object]]:
    """What is held: by its key, by its place, in a set by itself."""
    if isinstance(holder, Mapping):
        return list(holder.items())
    return [(value, value) for value in holder] if isinstance(holder, set) else list(enumerate(holder))


def _differing(holder: Any, held: Any) -> Iterator[tuple[object, object, object]]:
    """(Key, what was there, what is there) of what is no longer the same object; None where nothing is, or
    was.
    """
    now, before = dict(_items(holder)), dict(_items(held))
    for key in dict.fromkeys((*before, *now)):
        if key not in now or key not in before or now[key] is not before[key]:
            yield key, before.get(key), now.get(key)


@contextlib.contextmanager
def written_into(model: nn.Module, noted: list[str]) -> Iterator[None]:
    """A buffer that is replaced within has its new value written into it instead.

    noted: has the attributes of modules added that are other things in the end, before torch.export puts
    there what was there: those that a hook sets before each forward (torch.nn.utils.spectral_norm's weight).
    Of what else the model holds nothing is read here: reads of its configuration are recorded, and guarded.

    Raises:
        CaptureError: the new value has another shape or dtype.
    """
    traced = torch.compiler.is_dynamo_compiling()
    modules = [] if traced else list(model.named_modules())
    before = [(name, m, dict(m._buffers)) for name, m in modules]
    held = [(name, vars(m), vars(m).copy()) for name, m in modules]
    yield
    for place, now, was in held:
        noted.extend(f"{place}.{key}".lstrip(".") for key in now if now[key] is not was.get(key))
    for place, module, buffers in before:
        for name, first in buffers.items():
            last = module._buffers.get(name)
            if last is first or first is None or last is None:
                continue
            if (last.shape, last.dtype) != (first.shape, first.dtype):
                raise CaptureError(
                    f"The forward replaces the buffer {f'{place}.{name}'.lstrip('.')}, {first.dtype} "
                    f"{tuple(first.shape)}, by a tensor of {last.dtype} {tuple(last.shape)}. A step has one "
                    "shape of it: make it as large as it may become, and write into it."
                )
            with torch.no_grad():
                first.copy_(last)
            module._buffers[name] = first


def _looked_at(model: nn.Module) -> Callable[[], list[str]]:
    """What says, after a call, the places where another thing is than now; but for plain values in the place
    of plain ones, which guards follow.
    """
    before = [(place, holder, holder.copy()) for place, holder in _holders(model)]
    return lambda: [
        f"{place}.{key}"
        for place, holder, held in before
        for key, was, now in _differing(holder, held)
        if not (is_plain(was) and is_plain(now))
    ]


class CalledAlone(NamedTuple):
    """What calling the model itself told.

    left: places of what the forward leaves at each call and the loss does not depend on. loss: its own, from
    SEED; None where it was not called, or raised.
    """

    left: frozenset[str]
    loss: Tensor | None = None


def refuse_memory(model: nn.Module, loss: Callable[[], Tensor]) -> CalledAlone:
    """Refuse a forward that reads again what an earlier call kept outside of buffers.

    All is put back as it was.

    It is called twice, with the same inputs, buffers and random numbers; where nothing but plain values
    changes, once: of these the guards know (state.py).

    Args:
        model: as it trains.
        loss: calls it, and returns the loss without a gradient.

    Raises:
        CaptureError: the second loss is another one.
    """
    if any(
        tensor.is_meta or torch_compat.is_fake(tensor) for tensor in (*model.parameters(), *model.buffers())
    ):
        # planned for a machine that is not here: there are no values to compare
        return CalledAlone(frozenset())
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]

    def put_back() -> None:
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)

    def run() -> Tensor:
        put_back()
        torch.manual_seed(SEED)
        return loss()

    kept = _looked_at(model)
    with as_it_was(model):
        try:
            first = run()
            changed = kept()
            again = run() if changed else first
        except RuntimeError:
            # under an autocast that the model does not bear, say: whoever runs the step tells it
            return CalledAlone(frozenset())
        finally:
            put_back()
    if not torch.allclose(again, first, rtol=_SAME, atol=0.0, equal_nan=True):
        raise CaptureError(
            f"The forward of {type(model).__name__} keeps something outside of its buffers "
            f"({', '.join(changed[:_NAMED])}) and reads it at the next call: of the same inputs the loss was "
            f"{float(first):.6g}, and {float(again):.6g} when it was called again. A graph has no memory but "
            "buffers. Keep it in one (register_buffer), or give it as an input."
        )
    return CalledAlone(frozenset(changed), first.clone())


@dataclass(slots=True, kw_only=True)
class Uncalled:
    """A forward that nobody has called since it was captured: `refuse_memory` is still to be asked.

    A model's own step, run whole to be compared with, tells the same where nothing changes: a forward less.

    Attributes:
        model: as it trains. ask: `refuse_memory` of it.
        told: are told what came of it, once that is known.
    """

    model: nn.Module
    ask: Callable[[], CalledAlone]
    told: list[Callable[[CalledAlone], None]] = field(default_factory=list)

    def call(self) -> None:
        """Call it alone.

        Raises what `refuse_memory` does.
        """
        self._tell(self.ask())

    def within(self, step: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """The model's own step, run from SEED with its buffers as they are: it tells, unless it changes more
        than plain values; then calling it alone does.
        """

        def run() -> Tensor:
            kept = _looked_at(self.model)
            loss = step()
            if not kept():
                self._tell(CalledAlone(frozenset(), loss.detach().clone()))
            return loss

        return run

    def _tell(self, found: CalledAlone) -> None:
        for tell in self.told:
            tell(found)
        self.told.clear()
