"""Names for what only the user's model knows the types of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Union

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
