"""A graph that is compiled at one set of shapes, and runs at others all the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from effcompile.core.types import Forward


class AtShapes:
    """The compiled function at the shapes it was compiled for; at any other the same graph, packed and
    uncompiled.

    So a new sequence length costs a slower call, not half a minute of compiling, and no call is one too many
    for Dynamo, which compiles a function eight times.

    Args:
        shapes: of the tensors that it is compiled for, in order; None where that is not known: of any.
        uncompiled: makes the graph that others run, once.
    """

    def __init__(
        self, shapes: Sequence[list[int]] | None, compiled: Forward, uncompiled: Callable[[], Forward]
    ) -> None:
        self._shapes, self._compiled, self._uncompiled = shapes, compiled, uncompiled
        self._eager: Forward | None = None

    def __call__(self, *args: object, **kwargs: object) -> Any:
        leaves = args
        if kwargs or not all(isinstance(leaf, torch.Tensor) for leaf in args):
            leaves = tuple(pytree.tree_leaves((args, kwargs)))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if self._shapes is None or [list(tensor.shape) for tensor in tensors] == self._shapes:
            if any(tensor.is_inference() for tensor in tensors):  # it was compiled for what is none
                args, kwargs = pytree.tree_map_only(torch.Tensor, torch.clone, (args, kwargs))
            return self._compiled(*args, **kwargs)
        if self._eager is None:
            self._eager = self._uncompiled()
        return self._eager(*args, **kwargs)
