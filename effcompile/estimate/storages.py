"""Which storages a graph makes, and which nodes share one: the graph is run once on fake tensors.

Fake tensors have shapes, strides and storages but no data, so views, in-place ops and `reshape` or `contiguous`
calls that turn out not to copy share a storage here exactly as they do in a real run. Nothing is computed.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from effcompile.program import Program, shape_of

Storage = int  # an index, equal for nodes that share memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Storages:
    """What each node holds.

    Attributes:
        of: node → storages its value (all tensors of it) refers to.
        nbytes: storage → bytes.
        made: node → storages that did not exist before it ran.
        fixed: storages that are parameters, buffers, constants or inputs of the program.
        written: nodes that change an argument in place.
    """

    of: Mapping[fx.Node, tuple[Storage, ...]]
    nbytes: Mapping[Storage, int]
    made: Mapping[fx.Node, tuple[Storage, ...]]
    fixed: frozenset[Storage]
    written: frozenset[fx.Node]

    def is_free(self, node: fx.Node) -> bool:
        """True for a node that only looks at memory that is already there: a view, a getitem, a check."""
        return not self.made[node] and node not in self.written


def storages(program: Program) -> Storages:
    """The storages of a program's graph at its example inputs."""
    return _Tracer(program).run()


class _Tracer:
    """Runs the graph node by node under one FakeTensorMode and numbers the storages as they appear."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.values: dict[fx.Node, Any] = {}
        self.numbers: dict[int, Storage] = {}
        self.alive: list[Any] = []  # keeps every storage alive, so that no address is given out twice
        self.nbytes: dict[Storage, int] = {}

    def run(self) -> Storages:
        of: dict[fx.Node, tuple[Storage, ...]] = {}
        made: dict[fx.Node, tuple[Storage, ...]] = {}
        fixed: set[Storage] = set()
        inputs = iter(_leaves_of(self.program))
        for node in self.program.graph.nodes:
            before = len(self.nbytes)
            self.values[node] = self._value(node, inputs)
            of[node] = self._number(self.values[node])
            made[node] = tuple(s for s in of[node] if s >= before)
            if node.op in ("get_attr", "placeholder"):
                fixed.update(of[node])
        written = frozenset(node for node in self.program.graph.nodes if _writes(node))
        return Storages(of=of, nbytes=self.nbytes, made=made, fixed=frozenset(fixed), written=written)

    def _value(self, node: fx.Node, inputs: Iterator[Any]) -> Any:
        if node.op == "placeholder":
            return self._fake(next(inputs, None))
        if node.op == "get_attr":
            return self._fake(self.program.tensor(node))
        if node.op == "output":
            return fx.map_arg(node.args, self.values.__getitem__)
        if node.op != "call_function":
            return None  # torch.export's guard module: checks the inputs and returns nothing
        args, kwargs = fx.map_arg((node.args, node.kwargs), self.values.__getitem__)
        try:
            with self.mode, torch.no_grad():
                return node.target(*args, **kwargs)  # type: ignore[operator]
        except Exception:  # an op without a fake kernel, or a shape that depends on data: what capture saw stands in
            return self._captured(node)

    def _fake(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        known = getattr(value, "fake_mode", None)
        if known is not None:  # planned on fake tensors: made anew in our mode, as modes do not mix
            with self.mode:
                return torch.empty_strided(tuple(map(int, value.shape)), value.stride(), dtype=value.dtype, device=value.device)
        return self.mode.from_tensor(value, static_shapes=True)

    def _captured(self, node: fx.Node) -> Any:
        """A fresh fake tensor of the shape in the node's metadata; None when that has no tensor."""
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor):
            return None
        with self.mode:
            return torch.empty(shape_of(node), dtype=value.dtype, device=value.device)

    def _number(self, value: Any) -> tuple[Storage, ...]:
        found: dict[Storage, None] = {}
        for leaf in pytree.tree_leaves(value):
            if isinstance(leaf, torch.Tensor):
                storage = leaf.untyped_storage()
                if storage._cdata not in self.numbers:
                    number = self.numbers[storage._cdata] = len(self.numbers)
                    self.nbytes[number] = int(storage.nbytes())
                    self.alive.append(storage)
                found[self.numbers[storage._cdata]] = None
        return tuple(found)


def _leaves_of(program: Program) -> list[Any]:
    """Example inputs flattened in the order of the graph's placeholders, non-tensors included."""
    return pytree.tree_leaves((program.args, dict(program.kwargs)))


def _writes(node: fx.Node) -> bool:
    """True for an op whose schema says that it writes to an argument."""
    schema = getattr(node.target, "_schema", None)
    return bool(schema is not None and schema.is_mutable) or node.target is operator.setitem
