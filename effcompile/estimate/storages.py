"""Which storages a graph makes, and which nodes share one: the graph is run once on fake tensors.

Fake tensors have shapes, strides and storages but no data, so views, in-place ops and `reshape` or `contiguous`
calls that turn out not to copy share a storage here exactly as they do in a real run. Nothing is computed.

An aten op may be made of others (`scaled_dot_product_attention` turns a boolean mask into floats, `matmul` copies
expanded operands): what those allocate and free again is counted as the node's workspace, and so are the block
buffers of CPU's flash attention. What other kernels allocate for themselves (oneDNN's scratchpads and packed
convolution weights) is not visible here.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from effcompile.core import gpu, torch_compat
from effcompile.core.types import Value
from effcompile.ir.program import Program, shape_of

Storage = int  # an index, equal for nodes that share memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Storages:
    """What each node holds.

    Attributes:
        of: node → storages its value (all tensors of it) refers to.
        nbytes: storage → bytes.
        made: node → storages that did not exist before it ran.
        workspace: node → bytes alive at some instant while it runs beyond what was there and what it makes.
        fixed: storages that are parameters, buffers, constants or inputs of the program.
        written: nodes that change an argument in place.
    """

    of: Mapping[fx.Node, tuple[Storage, ...]]
    nbytes: Mapping[Storage, int]
    made: Mapping[fx.Node, tuple[Storage, ...]]
    workspace: Mapping[fx.Node, int]
    fixed: frozenset[Storage]
    written: frozenset[fx.Node]

    def is_free(self, node: fx.Node) -> bool:
        """True for a node that only looks at memory that is already there: a view, a getitem, a check."""
        return not self.made[node] and node not in self.written


def storages(program: Program) -> Storages:
    """The storages of a program's graph at its example inputs."""
    leaves = iter(pytree.tree_leaves((program.args, dict(program.kwargs))))
    return graph_storages(program.graph, lambda node: next(leaves, None) if node.op == "placeholder" else program.tensor(node))


def graph_storages(graph: fx.Graph, given: Callable[[fx.Node], object]) -> Storages:
    """The storages of a graph. `given`: placeholder or get_attr node, asked for in graph order → its (real or fake) value."""
    return _Tracer(graph, given).run()


class Allocations(TorchDispatchMode):
    """Follows the storages that the ops of one node allocate and free. `peak` is the most bytes alive at once.

    `on_gpu`: as torch's CUDA allocator counts them.
    """

    def __init__(self, *, on_gpu: bool = False) -> None:
        super().__init__()
        self.live = self.peak = 0
        self.on_gpu = on_gpu
        self.readers: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Value:
        there = {t.untyped_storage()._cdata for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                storage = leaf.untyped_storage()
                if storage._cdata in self.readers or storage._cdata not in there:
                    nbytes = int(storage.nbytes())
                    self._follow(leaf, storage._cdata, gpu.rounded(nbytes) if self.on_gpu else nbytes)
        inside = _flash_buffers(*args[:2]) if func is _FLASH_ON_CPU else 0
        self.peak = max(self.peak, self.live + inside)
        return result

    def _follow(self, tensor: torch.Tensor, storage: int, nbytes: int) -> None:
        if self.readers.get(storage, 0) == 0:
            self.live += nbytes
        self.readers[storage] = self.readers.get(storage, 0) + 1
        weakref.finalize(tensor, self._release, storage, nbytes)

    def _release(self, storage: int, nbytes: int) -> None:
        self.readers[storage] -= 1
        if self.readers[storage] == 0:
            del self.readers[storage]  # its address may be given out again
            self.live -= nbytes


_FLASH_ON_CPU = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


def _flash_buffers(q_BHSD: torch.Tensor, k_BHSD: torch.Tensor) -> int:  # noqa: N803
    """Bytes that CPU's flash attention allocates for its blocks of scores, maxima, sums and outputs, per thread.

    Source: pytorch, aten/src/ATen/native/cpu/FlashAttentionKernel.cpp, cpu_flash_attention (block sizes by length).
    """
    length, width = int(q_BHSD.shape[-2]), int(q_BHSD.shape[-1])
    rows = min(256 if length >= 768 else 64 if length >= 192 else 32, length)
    cols = min(512, int(k_BHSD.shape[-2]))
    half = 2 * rows * cols if q_BHSD.dtype in (torch.bfloat16, torch.float16) else 0  # scores once more, narrow
    return torch.get_num_threads() * (4 * (rows * cols + 2 * rows + rows * width) + half)


#: Functional forms of writing through a view: they copy the whole storage behind it, whose bytes their fakes do not have.
_COPY_WHOLE_STORAGE = (
    torch.ops.aten.copy.default,
    torch.ops.aten.slice_scatter.default,
    torch.ops.aten.select_scatter.default,
    torch.ops.aten.diagonal_scatter.default,
    torch.ops.aten.as_strided_scatter.default,
)


class _Tracer:
    """Runs the graph node by node under one FakeTensorMode and numbers the storages as they appear."""

    def __init__(self, graph: fx.Graph, given: Callable[[fx.Node], object]) -> None:
        self.graph, self.given = graph, given
        self.mode = torch_compat.fake_mode()
        self.values: dict[fx.Node, Any] = {}
        self.numbers: dict[int, Storage] = {}
        self.alive: list[Any] = []  # keeps every storage alive, so that no address is given out twice
        self.nbytes: dict[Storage, int] = {}
        self.inside = Allocations()

    def run(self) -> Storages:
        of: dict[fx.Node, tuple[Storage, ...]] = {}
        made: dict[fx.Node, tuple[Storage, ...]] = {}
        workspace: dict[fx.Node, int] = {}
        fixed: set[Storage] = set()
        for node in self.graph.nodes:
            before = len(self.nbytes)
            self.inside = Allocations()
            self.values[node] = self._value(node)
            of[node] = self._number(self.values[node])
            made[node] = tuple(s for s in of[node] if s >= before)
            if node.target in _COPY_WHOLE_STORAGE:
                behind = sum(self.nbytes[s] for s in of[node.args[0]])
                self.nbytes.update({s: max(self.nbytes[s], behind) for s in made[node]})
            workspace[node] = max(0, self.inside.peak - sum(self.nbytes[s] for s in made[node]))
            if node.op in ("get_attr", "placeholder"):
                fixed.update(of[node])
        written = frozenset(node for node in self.graph.nodes if _writes(node))
        return Storages(of=of, nbytes=self.nbytes, made=made, workspace=workspace, fixed=frozenset(fixed), written=written)

    def _value(self, node: fx.Node) -> Value:
        if node.op in ("placeholder", "get_attr"):
            return self._fake(self.given(node))
        if node.op == "output":
            return fx.map_arg(node.args, self.values.__getitem__)
        if node.op != "call_function":
            return None  # torch.export's guard module: checks the inputs and returns nothing
        args, kwargs = fx.map_arg((node.args, node.kwargs), self.values.__getitem__)
        try:
            with self.mode, torch.no_grad(), self.inside:
                return node.target(*args, **kwargs)  # type: ignore[operator]
        except Exception:  # an op without a fake kernel, or a shape that depends on data: what capture saw stands in
            return self._captured(node)

    def _fake(self, value: object) -> Value:
        if not isinstance(value, torch.Tensor):
            return value
        known = getattr(value, "fake_mode", None)
        if known is not None:  # planned on fake tensors: made anew in our mode, as modes do not mix
            with self.mode:
                return torch.empty_strided(tuple(map(int, value.shape)), value.stride(), dtype=value.dtype, device=value.device)
        return self.mode.from_tensor(value, static_shapes=True)

    def _captured(self, node: fx.Node) -> Value:
        """A fresh fake tensor of the shape in the node's metadata; None when that has no tensor."""
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor):
            return None
        with self.mode:
            return torch.empty(shape_of(node), dtype=value.dtype, device=value.device)

    def _number(self, value: object) -> tuple[Storage, ...]:
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


def _writes(node: fx.Node) -> bool:
    """True for an op whose schema says that it writes to an argument."""
    schema = getattr(node.target, "_schema", None)
    return bool(schema is not None and schema.is_mutable) or node.target is operator.setitem
