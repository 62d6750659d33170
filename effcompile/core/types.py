"""Names for what only the user's model knows the types of."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, Union

if TYPE_CHECKING:  # the lowest layer loads without torch
    from torch import Tensor

#: What a model is called with, by position and by keyword.
Args = tuple[Any, ...]
Kwargs = Mapping[str, Any]
Inputs = tuple[Args, Kwargs]
#: Example inputs as a user gives them: one tensor, a tuple of positions, or a mapping of keywords.
Example = Union["Tensor", Args, list[Any], Kwargs]
#: What it returns: tensors, plain values, and containers of both.
Outputs = Any
#: A forward, or another function of the user's.
Forward = Callable[..., Outputs]
#: The shape of a tensor, as FLOP formulas are given it.
Shape = Sequence[int]
#: What a node of a graph stands for: a tensor, a size, a plain value, or a list of them.
Value = Any
#: A model of transformers, and its class: they have attributes that torch.nn.Module has not. Its
#: configurations.
HFModel = Any
HFClass = Any
HFConfig = Any
#: An operator's arguments by name: tensors or nodes, numbers, and lists of them.
Arguments = dict[str, Any]


class AutogradContext(Protocol):
    """What autograd hands the two halves of an operator's derivative; attributes of their own may be set on
    it.
    """

    needs_input_grad: tuple[bool, ...]

    @property
    def saved_tensors(self) -> tuple[Tensor, ...]: ...
    def save_for_backward(self, *tensors: Tensor | None) -> None: ...
    def mark_non_differentiable(self, *tensors: Tensor) -> None: ...
    def set_materialize_grads(self, value: bool) -> None: ...
    def __getattr__(self, name: str) -> Any: ...
    def __setattr__(self, name: str, value: object) -> None: ...
