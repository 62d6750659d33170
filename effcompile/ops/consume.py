"""A gradient that goes to the optimizer as soon as it is there, and is freed: "optimizer in the backward".

A plain function, like those of replay.py: it stands as a call_function node in graphs that our own executor
runs.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

import torch

from effcompile.core.errors import InputsError
from effcompile.core.torch_compat import is_fake

#: Takes (the parameter's qualified name, its gradient).
Sink = Callable[[str, torch.Tensor], None]


class _Local(threading.local):
    sink: Sink | None = None


_LOCAL = _Local()


@contextlib.contextmanager
def consuming(sink: Sink | None) -> Iterator[None]:
    """Gradients consumed within, in this thread, go to `sink`."""
    before, _LOCAL.sink = _LOCAL.sink, sink
    try:
        yield
    finally:
        _LOCAL.sink = before


def consume(
    name: str, working_bytes: int, gradient: torch.Tensor, parameter: torch.Tensor, *after: object
) -> None:
    """Hand the gradient of a parameter on.

    `working_bytes`: what the update allocates; `parameter`, `after`: run before this.

    Raises:
        InputsError: nobody takes it.
    """
    if is_fake(gradient):  # a graph that is only looked at
        return
    if _LOCAL.sink is None:
        raise InputsError(
            "This planned step hands its gradients to its optimizer within the backward, and this copy of "
            "the model has none. Call effcompile.optimize for the copy, with an optimizer of its parameters."
        )
    _LOCAL.sink(name, gradient)
