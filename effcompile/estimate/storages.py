"""Which storages a graph makes, and which nodes share one: each operator is run once on fake tensors
(layouts.py).

Fake tensors have shapes, strides and storages but no data, so views, in-place ops and `reshape` or
`contiguous` calls that turn out not to copy share a storage here exactly as they do in a real run. Nothing is
computed.

An aten op may be made of others (`scaled_dot_product_attention` turns a boolean mask into floats, `matmul`
copies expanded operands): what those allocate and free again is counted as the node's workspace, and so are
the block buffers of CPU's flash attention. What other kernels allocate for themselves (oneDNN's scratchpads
and packed convolution weights) is not visible here.
"""

from __future__ import annotations

import contextlib
import logging
import operator
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from effcompile.core import gpu, torch_compat
from effcompile.core.quiet import quiet_libraries
from effcompile.core.torch_compat_aot import writes
from effcompile.core.types import Value
from effcompile.estimate.layouts import (
    REMEMBERED,
    Known,
    StorageLayout,
    Unlike,
    key_of,
    layout,
    mapped,
    remember,
    settings,
)
from effcompile.ir.program import Program, shape_at_example

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
    return graph_storages(
        program.graph, lambda node: next(leaves, None) if node.op == "placeholder" else program.tensor(node)
    )


def graph_storages(graph: fx.Graph, given: Callable[[fx.Node], object]) -> Storages:
    """The storages of a graph.

    `given`: placeholder or get_attr node, asked for in graph order → its (real or fake) value.
    """
    # torch logs an error for each operator that takes no fake tensors, and what capture saw stands in for it
    with quiet_libraries("torch._subclasses.fake_tensor", level=logging.CRITICAL):
        return _Tracer(graph, given).run()


class Allocations(TorchDispatchMode):
    """Follows the storages that the ops of one node allocate and free.

    `peak` is the most bytes alive at once.

    `on_gpu`: as torch's CUDA allocator counts them.
    """

    def __init__(self, *, on_gpu: bool = False) -> None:
        super().__init__()
        self.live = self.peak = 0
        self.on_gpu = on_gpu
        self.readers: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Value:
        there = {
            t.untyped_storage()._cdata
            for t in pytree.tree_leaves((args, kwargs))
            if isinstance(t, torch.Tensor)
        }
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
    """Bytes that CPU's flash attention allocates for its blocks of scores, maxima, sums and outputs, per
    thread.

    Source: pytorch, aten/src/ATen/native/cpu/FlashAttentionKernel.cpp, cpu_flash_attention (block sizes by
    length).
    """
    length, width = int(q_BHSD.shape[-2]), int(q_BHSD.shape[-1])
    rows = min(256 if length >= 768 else 64 if length >= 192 else 32, length)
    cols = min(512, int(k_BHSD.shape[-2]))
    # scores once more, narrow
    half = 2 * rows * cols if q_BHSD.dtype in (torch.bfloat16, torch.float16) else 0
    return torch.get_num_threads() * (4 * (rows * cols + 2 * rows + rows * width) + half)


#: Functional forms of writing through a view: they copy the whole storage behind it, whose bytes their fakes
#: do not have.
_COPY_WHOLE_STORAGE = (
    torch.ops.aten.copy.default,
    torch.ops.aten.slice_scatter.default,
    torch.ops.aten.select_scatter.default,
    torch.ops.aten.diagonal_scatter.default,
    torch.ops.aten.as_strided_scatter.default,
)


class _Tracer:
    """Follows the graph node by node and numbers the storages as they appear; what is not known yet is run
    under one FakeTensorMode.
    """

    def __init__(self, graph: fx.Graph, given: Callable[[fx.Node], object]) -> None:
        self.graph, self.given = graph, given
        self.mode = torch_compat.fake_mode()
        self.values: dict[fx.Node, Value] = {}
        self.numbers: dict[int, Storage] = {}
        # kept alive, so that no address is given out twice
        self.storages: dict[Storage, torch.UntypedStorage] = {}
        self.allocated: dict[Storage, int] = {}
        self.nbytes: dict[Storage, int] = {}
        self.fakes: dict[StorageLayout, torch.Tensor] = {}
        self.settings = settings()

    def run(self) -> Storages:
        of: dict[fx.Node, tuple[Storage, ...]] = {}
        made: dict[fx.Node, tuple[Storage, ...]] = {}
        workspace: dict[fx.Node, int] = {}
        fixed: set[Storage] = set()
        for node in self.graph.nodes:
            before = len(self.nbytes)
            self.values[node], peak = self._value(node)
            of[node] = self._held(self.values[node])
            made[node] = tuple(s for s in of[node] if s >= before)
            if node.target in _COPY_WHOLE_STORAGE:
                behind = sum(self.nbytes[s] for s in of[node.args[0]])
                self.nbytes.update({s: max(self.nbytes[s], behind) for s in made[node]})
            workspace[node] = max(0, peak - sum(self.nbytes[s] for s in made[node]))
            if node.op in ("get_attr", "placeholder"):
                fixed.update(of[node])
        written = frozenset(node for node in self.graph.nodes if _writes(node))
        return Storages(
            of=of, nbytes=self.nbytes, made=made, workspace=workspace, fixed=frozenset(fixed), written=written
        )

    def _value(self, node: fx.Node) -> tuple[Value, int]:
        """A node's value, its tensors as layouts where they have one; and the most bytes that were allocated
        at once while it ran.
        """
        if node.op in ("placeholder", "get_attr"):
            return self._described(self._fake(self.given(node))), 0
        if node.op == "output":
            return fx.map_arg(node.args, self.values.__getitem__), 0
        if node.op != "call_function":
            return None, 0  # torch.export's guard module: checks the inputs and returns nothing
        if node.target is operator.getitem:
            value = self.values[node.args[0]]  # type: ignore[index]
            if not isinstance(value, StorageLayout | torch.Tensor):
                try:
                    return value[node.args[1]], 0
                except (IndexError, TypeError):  # of a value whose length depends on data
                    return self._described(self._captured(node)), 0
        try:
            key, seen = key_of(node, self.values, self.allocated, self.settings)
        except Unlike:
            return self._run(node)[:2]
        known = REMEMBERED.get(key)
        if known is None:
            before = len(self.nbytes)
            given = [self.values[arg] for arg in node.all_input_nodes]
            value, peak, follows = self._run(node)
            if follows and all(
                self.values[arg] is old for arg, old in zip(node.all_input_nodes, given, strict=True)
            ):
                self._remember(key, seen, before, value, peak)
            return value, peak
        places = [*seen, *map(self._new, known.nbytes)]

        def placed(each: object) -> object:
            return each._replace(storage=places[each.storage]) if isinstance(each, StorageLayout) else each

        return mapped(known.result, placed), known.peak

    def _run(self, node: fx.Node) -> tuple[Value, int, bool]:
        """As `_value`, by running the operator; and whether its result follows from its arguments."""
        inside, follows = Allocations(), True
        args: Any = mapped(fx.map_arg(node.args, self.values.__getitem__), self._tensor)
        kwargs: Any = mapped(fx.map_arg(node.kwargs, self.values.__getitem__), self._tensor)
        try:
            with self.mode, torch.no_grad(), inside:
                value = node.target(*args, **kwargs)  # type: ignore[operator]
        except Exception:
            # an op without a fake kernel, or a shape that depends on data: what capture saw stands in
            value, follows = self._captured(node), False
        if _writes(node):
            self._follow_changes(node)
        return self._described(value), inside.peak, follows

    def _follow_changes(self, node: fx.Node) -> None:
        """An operator in place may have changed an argument's own layout (`transpose_`): it has that from now
        on.
        """
        for arg in node.all_input_nodes:
            before = self.values[arg]
            if (
                isinstance(before, StorageLayout)
                and layout(fake := self.fakes[before], before.storage) != before
            ):
                del self.fakes[before]
                self.values[arg] = self._described(fake)

    def _remember(self, key: object, seen: Sequence[Storage], before: int, value: Value, peak: int) -> None:
        """Keep what a node did with layouts of its arguments, which are still theirs, and storages of its
        own.
        """
        fresh = range(before, len(self.nbytes))
        places = {storage: at for at, storage in enumerate((*seen, *fresh))}

        def numbered(each: object) -> object:
            if isinstance(each, StorageLayout):
                if each.storage not in places:
                    raise Unlike
                return each._replace(storage=places[each.storage])
            if isinstance(each, torch.Tensor | torch.SymInt | torch.SymFloat | torch.SymBool):
                raise Unlike
            return each

        with contextlib.suppress(Unlike):
            result = mapped(value, numbered)
            remember(key, Known(result, tuple(self.nbytes[s] for s in fresh), peak))

    def _fake(self, value: object) -> Value:
        if not isinstance(value, torch.Tensor):
            return value
        known = getattr(value, "fake_mode", None)
        if known is not None:  # planned on fake tensors: made anew in our mode, as modes do not mix
            with self.mode:
                return torch.empty_strided(
                    tuple(map(int, value.shape)), value.stride(), dtype=value.dtype, device=value.device
                )
        return self.mode.from_tensor(value, static_shapes=True)

    def _captured(self, node: fx.Node) -> Value:
        """Fresh fake tensors of the shapes in the node's metadata; None where that has none."""

        def fresh(value: object) -> object:
            if not isinstance(value, torch.Tensor):
                return None
            return torch.empty(shape_at_example(value), dtype=value.dtype, device=value.device)

        with self.mode:
            return mapped(node.meta.get("val"), fresh)

    def _described(self, value: Value) -> Value:
        """The value with layouts in the place of its tensors; those that no layout describes stay."""
        return mapped(value, lambda each: self._layout(each) if isinstance(each, torch.Tensor) else each)

    def _layout(self, tensor: torch.Tensor) -> StorageLayout | torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self.numbers:
            number = self.numbers[storage._cdata] = self._new(int(storage.nbytes()))
            self.storages[number] = storage
        try:
            found = layout(tensor, self.numbers[storage._cdata])
        except Unlike:
            return tensor
        self.fakes.setdefault(found, tensor)
        return found

    def _new(self, nbytes: int) -> Storage:
        number = len(self.nbytes)
        self.nbytes[number] = self.allocated[number] = nbytes
        return number

    def _tensor(self, value: object) -> object:
        """A fake tensor of a layout, on its storage."""
        if not isinstance(value, StorageLayout):
            return value
        if value not in self.fakes:
            with self.mode, torch.no_grad():
                if value.storage not in self.storages:
                    whole = torch.empty(
                        self.allocated[value.storage], dtype=torch.uint8, device=value.device
                    ).untyped_storage()
                    self.storages[value.storage], self.numbers[whole._cdata] = whole, value.storage
                piece = torch.empty(0, dtype=value.dtype, device=value.device)
                self.fakes[value] = piece.set_(
                    self.storages[value.storage], value.offset, value.shape, value.stride
                )
        return self.fakes[value]

    def _held(self, value: object) -> tuple[Storage, ...]:
        found: dict[Storage, None] = {}

        def see(each: object) -> None:
            if isinstance(each, StorageLayout):
                found[each.storage] = None
            elif isinstance(each, torch.Tensor):
                found[self.numbers[each.untyped_storage()._cdata]] = None

        mapped(value, see)
        return tuple(found)


def _writes(node: fx.Node) -> bool:
    """True for an assignment in Python, too, which a graph that dynamo traced may have."""
    return writes(node) or node.target is operator.setitem
