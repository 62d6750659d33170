"""A model that keeps its cache in the request that runs it, and tensors that stand for what is kept there.

What the runtime keeps is not copied from call to call: OpenVINO's attention appends to it where it stands. A
Hugging Face cache holds `KeptRows` in its place, which are read when somebody asks.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Self, SupportsIndex

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from effcompile.backends.openvino.shapes import check_numbers
from effcompile.core.arrays import Array
from effcompile.core.errors import LoweringError
from effcompile.core.types import Args, Kwargs, Value

#: A model, a node or a request of openvino, which ships no types.
Untyped = Any

#: Rows of the batch as they go on; with it OpenVINO takes cache and attention for one operator.
ORDER = "beam_idx"
#: How the name of what leaves a model begins: a state is called by that of what enters and of what leaves.
TO = ":"
#: Requests that nobody uses and that are kept for the next cache.
_SPARE = 1


def with_states(model: Untyped, pairs: Mapping[str, str], tokens: str) -> Untyped:
    """A copy that keeps those inputs, which leave as those outputs: no rows of any at first.

    `tokens`: an input whose first size is the batch.
    """
    from openvino import PartialShape
    from openvino import opset13 as ops
    from openvino._offline_transformations import apply_make_stateful_transformation

    copy: Untyped = model.clone()
    inputs = {port.get_any_name(): port for port in copy.inputs}
    order, zero = ops.parameter(PartialShape([-1]), np.int32, name=ORDER), ops.constant(np.int64(0))
    order.output(0).get_tensor().add_names({ORDER})
    copy.add_parameters([order])
    for name in pairs:
        users = list(inputs[name].get_target_inputs())
        kept = ops.gather(inputs[name].get_node(), order, zero)
        for user in users:
            user.replace_source_output(kept.output(0))
    copy.validate_nodes_and_infer_types()
    apply_make_stateful_transformation(copy, dict(pairs))
    batch = ops.gather(ops.shape_of(inputs[tokens].get_node(), "i64"), ops.constant(np.array([0])), zero)
    for read in [op for op in copy.get_ordered_ops() if op.get_type_name() == "ReadValue"]:
        _, heads, _, width = read.get_output_partial_shape(0)
        sizes = [ops.constant(np.array([size])) for size in (heads.get_length(), 0, width.get_length())]
        nothing = ops.convert(ops.constant(np.float32(0)), read.get_output_element_type(0).get_type_name())
        read.set_arguments([ops.broadcast(nothing, ops.concat([batch, *sizes], 0)).output(0)])
    copy.validate_nodes_and_infer_types()
    return copy


def states_of(model: Untyped) -> list[tuple[str, str]]:
    """What a model keeps: (name of what would enter, of what would leave)."""
    names = [op.get_variable_id() for op in model.get_sinks()]
    return [(name.partition(TO)[0], TO + name.partition(TO)[2]) for name in names]


class RequestState:
    """What one request keeps. `rows`: of each state now; -1 where nobody knows."""

    def __init__(self, request: Untyped, names: Sequence[str]) -> None:
        states = {state.name.partition(TO)[0]: state for state in request.query_state()}
        self.request, self._states = request, [states[name] for name in names]
        self.rows = 0

    def read(self, place: int, rows: int) -> Tensor:
        """The first rows of a state: whatever came behind them since."""
        found = self._states[place].state.data
        if found.shape[2] < rows:
            raise LoweringError(
                f"A cache of {rows} tokens was lost in a call that failed. Begin again with the whole text."
            )
        return torch.from_numpy(found[:, :, :rows].copy())

    def begin(self, tensors: Sequence[Tensor]) -> None:
        """Take up what these hold."""
        import openvino

        self.request.reset_state()
        self.rows = tensors[0].shape[2]
        if self.rows:
            for state, tensor in zip(self._states, tensors, strict=True):
                rows = plain(tensor).numpy()
                check_numbers({"cache": rows})
                state.state = openvino.Tensor(rows)


class KeptRows(Tensor):
    """The rows of a state as a tensor: it has their sizes, and is read from the runtime by what computes with
    it. What is written to it, or to a view of it, holds from then on in the place of the state.
    """

    _kept: RequestState
    _place: int
    _own: Tensor | None

    @staticmethod
    def __new__(cls, kept: RequestState, place: int, sizes: Sequence[int], dtype: torch.dtype) -> Self:
        made: Self = Tensor._make_wrapper_subclass(cls, tuple(sizes), dtype=dtype, device=torch.device("cpu"))
        return made

    def __init__(self, kept: RequestState, place: int, sizes: Sequence[int], dtype: torch.dtype) -> None:
        self._kept, self._place, self._own = kept, place, None

    def plain(self) -> Tensor:
        """What it stands for."""
        return self._kept.read(self._place, self.shape[2]) if self._own is None else self._own

    def current(self, place: int) -> RequestState | None:
        """What keeps it, where that is as it was; None where it went on, or where other values hold."""
        there = self._own is None and self._place == place and self._kept.rows == self.shape[2]
        return self._kept if there else None

    def __deepcopy__(self, memo: dict[int, object]) -> Tensor:
        made = memo[id(self)] = self.plain().clone()
        return made

    def __reduce_ex__(self, protocol: SupportsIndex) -> str | tuple[object, ...]:
        return self.plain().__reduce_ex__(protocol)

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return repr(self.plain())

    def numpy(self, *, force: bool = False) -> Array:
        """Of what it stands for."""
        return self._held().numpy(force=force)

    def _held(self) -> Tensor:
        """What it stands for, which holds from now on."""
        self._own = self.plain()
        return self._own

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Untyped, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> Value:
        # a result that is a view, or an argument that is written to
        shared = any(each.alias_info is not None for each in (*func._schema.arguments, *func._schema.returns))
        read = cls._held if shared else cls.plain
        args, kwargs = pytree.tree_map_only(KeptRows, read, (args, kwargs or {}))
        return func(*args, **kwargs)


def plain(tensor: Tensor) -> Tensor:
    """A tensor of rows that lie side by side."""
    return (tensor.plain() if isinstance(tensor, KeptRows) else tensor.detach()).contiguous()


class Requests:
    """Requests of a compiled model, one for each cache that is in use."""

    def __init__(self, compiled: Untyped, names: Sequence[str]) -> None:
        self._compiled, self._names = compiled, tuple(names)
        self._free: list[Untyped] = []

    def of(self, tensors: Sequence[Tensor]) -> RequestState:
        """What keeps these; where nothing does, or it has gone on since, a request that takes them up."""
        first = tensors[0].current(0) if tensors and isinstance(tensors[0], KeptRows) else None
        if first is not None and all(
            isinstance(each, KeptRows) and each.current(at) is first for at, each in enumerate(tensors)
        ):
            return first
        made = RequestState(
            self._free.pop() if self._free else self._compiled.create_infer_request(), self._names
        )
        if tensors:
            made.begin(tensors)
        weakref.finalize(made, self._back, made.request)
        return made

    def _back(self, request: Untyped) -> None:
        if len(self._free) < _SPARE:
            self._free.append(request)
