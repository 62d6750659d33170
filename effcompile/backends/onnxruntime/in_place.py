"""Calls of a model that writes new rows of a cache where the past ones stand (grouped.py)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from effcompile.backends.onnxruntime.session import numpy_feeds
from effcompile.core.errors import LoweringError
from effcompile.core.stages import first_line
from effcompile.ops.append import lengthened, room

if TYPE_CHECKING:
    import onnxruntime

#: The operator, and whose it is.
GROUPED, DOMAIN = "GroupQueryAttention", "com.microsoft"
#: What the name of an axis of rows with room begins with.
ROOM = "room of "
#: Inputs that say the same of all rows of a batch.
_OF_ALL = ("rows",)


class InPlace:
    """Calls of a session whose caches stay in their buffers. `names`: of the tensors that it is given, in
    order.
    """

    def __init__(self, names: Sequence[str], session: onnxruntime.InferenceSession) -> None:
        self._names, given = list(names), session.get_inputs()
        self._outputs = [value.name for value in session.get_outputs()]
        of_room = {name: value.name for value in session.get_outputs() if (name := _room_of(value))}
        #: Input → output of each.
        self.caches = {value.name: of_room[name] for value in given if (name := _room_of(value))}
        self._plain = [value.name for value in given if value.name not in self.caches]
        #: Rows of a new buffer, by input; where none is said, as many as there are.
        self.rooms: Mapping[str, int] = {}

    def __bool__(self) -> bool:
        """Whether there is such a cache."""
        return bool(self.caches)

    def __call__(
        self, session: onnxruntime.InferenceSession, tensors: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """The outputs; those of caches are longer views of the buffers that entered, where they have room.

        Raises:
            LoweringError: ORT failed.
        """
        given = dict(zip(self._names, tensors, strict=True))
        batch, new = given["tokens"].shape
        past = given[next(iter(self.caches))].shape[2]
        longer = {name: lengthened(given[name], new, self.rooms.get(name, 0)) for name in self.caches}
        if batch == 1 or past == 0 or new == 1:
            found = self._run(session, given, longer, 0, batch)
        else:
            rows = [self._run(session, _row(given, at, batch), longer, at, 1) for at in range(batch)]
            found = {name: torch.cat([row[name] for row in rows]) for name in rows[0]}
        found |= {self.caches[name]: rows for name, rows in longer.items()}
        return [found[name] for name in self._outputs]

    def _run(
        self, session: onnxruntime.InferenceSession, given: Mapping[str, torch.Tensor],
        longer: Mapping[str, torch.Tensor], first: int, count: int,
    ) -> dict[str, torch.Tensor]:  # fmt: skip
        """Output → what it is, of those that are no cache; of so many rows of a batch, from the first."""
        bound = session.io_binding()
        for name, array in numpy_feeds(self._plain, [given[name] for name in self._plain]).items():
            bound.bind_cpu_input(name, array)
        others = [name for name in self._outputs if name not in self.caches.values()]
        for name in others:
            bound.bind_output(name, "cpu")
        for name, rows in longer.items():
            total, skipped = room(rows)
            sizes = [count, rows.shape[1], total, rows.shape[3]]
            at = first * math.prod(sizes[1:]) - skipped * rows.shape[3]
            place = rows.data_ptr() + at * rows.element_size()
            bound.bind_input(name, "cpu", 0, np.float32, sizes, place)
            bound.bind_output(self.caches[name], "cpu", 0, np.float32, sizes, place)
        try:
            session.run_with_iobinding(bound)
        except Exception as error:
            raise LoweringError(
                f"ONNX Runtime failed while running the lowered model: {first_line(error)}"
            ) from error
        found = zip(others, bound.get_outputs(), strict=False)  # in the order in which they were bound
        return {name: torch.from_numpy(value.numpy()) for name, value in found}


def _room_of(value: onnxruntime.NodeArg) -> str:
    """The name of an axis of rows with room; "" of a value without one."""
    axis = value.shape[2] if len(value.shape) == 4 else ""
    return axis if isinstance(axis, str) and axis.startswith(ROOM) else ""


def _row(given: Mapping[str, torch.Tensor], at: int, batch: int) -> dict[str, torch.Tensor]:
    """One row of a batch, of what has a row for each."""
    return {
        name: value[at : at + 1] if name not in _OF_ALL and value.shape[0] == batch else value
        for name, value in given.items()
    }
