"""Chains of element-wise operators as one kernel each: compiled by Inductor at the first call, once per
process.

`Fused` objects stand as call_function nodes in graphs that our own executor runs. On fake tensors they only
make their outputs, so that whoever traces storages sees no others; a kernel that allocates more than its
outputs is not used.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import fx

from effcompile.core import torch_compat
from effcompile.core.torch_compat_aot import elementwise_kernel
from effcompile.core.torch_compat_kernels import built_later
from effcompile.core.types import Outputs
from effcompile.ops.tanh_by_sigmoid import by_sigmoid

#: Operators that the name shows; the rest is counted.
_SHOWN = 4

Kernel = Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]

_compiled: dict[tuple[str, int], Kernel | str] = {}  # (digest, threads) → the kernel, or why there is none
_checked: set[tuple[str, int]] = set()  # kernels whose first results were what they should be
_compiling = threading.RLock()


@dataclass(frozen=True, slots=True)
class TileLayout:
    """What a tensor looks like: sizes, strides in elements, dtype, and the type of its device."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: str

    @classmethod
    def of(cls, value: torch.Tensor) -> TileLayout:
        """The layout of a real or fake tensor of static shape."""
        return cls(
            tuple(map(int, value.shape)), tuple(map(int, value.stride())), value.dtype, value.device.type
        )

    def fits(self, value: torch.Tensor) -> bool:
        """Whether a tensor has this layout."""
        return (value.shape == self.shape and value.stride() == self.stride and value.dtype == self.dtype
                and value.device.type == self.device)  # fmt: skip


class Fused:
    """Element-wise aten operators that run as one kernel.

    Equal contents are equal objects, with equal names, in any process.

    Called with tensors like `inputs`, it returns one fresh tensor, or a tuple of them, with exactly the
    layouts in `outputs`. Tensors of other layouts are taken too, by running the operators one by one.
    """

    def __init__(self, graph: fx.Graph, inputs: Sequence[TileLayout], outputs: Sequence[TileLayout]) -> None:
        """`graph`: placeholders for `inputs`, aten calls, and a flat tuple of results for `outputs`."""
        self._graph = graph
        self.inputs, self.outputs = tuple(inputs), tuple(outputs)
        self.digest = hashlib.sha256(f"{_text(graph)}{self.inputs}{self.outputs}".encode()).hexdigest()
        self.operators = tuple(str(node.target) for node in graph.nodes if node.op == "call_function")
        self.__name__ = f"fused[{_summary(self.operators)}]#{self.digest[:8]}"

    @cached_property
    def module(self) -> fx.GraphModule:
        """The operators one by one; made when it is first run or compiled, for most of a plan's candidates
        never are.
        """
        return fx.GraphModule(torch.nn.Module(), self._graph)

    def __str__(self) -> str:
        return self.__name__

    __repr__ = __str__

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Fused) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    @property
    def fallback_reason(self) -> str | None:
        """Why the operators run one by one with the present number of threads; None when they do not, or have
        not run yet.
        """
        found = _compiled.get((self.digest, torch.get_num_threads()))
        return found if isinstance(found, str) else None

    def __call__(self, *args: torch.Tensor) -> Outputs:
        if any(torch_compat.is_fake(arg) for arg in args):
            results: Sequence[torch.Tensor] = self._empty(args)
        elif len(args) == len(self.inputs) and all(
            layout.fits(arg) for layout, arg in zip(self.inputs, args, strict=True)
        ):
            results = self._run(list(args))
        else:
            results = self.module(*args)
        return results[0] if len(self.outputs) == 1 else tuple(results)

    def _empty(self, args: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        like = max(args, key=lambda arg: arg.dim())  # scalars may lie on the CPU beside a device's tensors
        return [like.new_empty_strided(out.shape, out.stride, dtype=out.dtype) for out in self.outputs]

    def compile(self) -> str | None:
        """Compile now, for the present number of threads, instead of at the first call; `fallback_reason`
        afterwards.
        """
        key = (self.digest, torch.get_num_threads())
        with _compiling:
            if key not in _compiled:
                try:
                    kernel, allocations = elementwise_kernel(
                        self._to_compile(), [(i.shape, i.stride, i.dtype, i.device) for i in self.inputs]
                    )
                    within = allocations == len(self.outputs)
                    _compiled[key] = (
                        kernel
                        if within
                        else f"Inductor allocates {allocations} tensors for {len(self.outputs)} results"
                    )
                except Exception as error:
                    # no C++ compiler, an operator that Inductor does not know: the aten graph is there
                    _compiled[key] = _no_kernel(error)
        return self.fallback_reason

    def _to_compile(self) -> fx.GraphModule:
        if any(layout.device != "cpu" for layout in self.inputs):
            return self.module
        graph = by_sigmoid(self._graph)
        return self.module if graph is self._graph else fx.GraphModule(torch.nn.Module(), graph)

    def _run(self, args: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        key = (self.digest, torch.get_num_threads())
        if key not in _compiled:
            self.compile()
        kernel = _compiled[key]
        if not isinstance(kernel, str):
            results = kernel(list(args))
            if key in _checked:
                return results
            wrong = self._objection(results, args)
            if wrong is None:
                _checked.add(key)
                return results
            _compiled[key] = wrong
        results = self.module(*args)
        return results

    def _objection(self, results: Sequence[torch.Tensor], args: Sequence[torch.Tensor]) -> str | None:
        """What is wrong with a kernel's first results: aliases, or layouts."""
        given = {arg.untyped_storage().data_ptr() for arg in args}
        made = {result.untyped_storage().data_ptr() for result in results}
        if made & given or len(made) < len(results):
            return "Inductor returned an input, or one tensor twice"
        if not all(layout.fits(result) for layout, result in zip(self.outputs, results, strict=True)):
            return "Inductor chose other strides than the operators have"
        return None


def compile_together(kernels: Sequence[Fused]) -> None:
    """`compile` of each: while one is built in C++, the next is generated and built beside it."""
    threads = torch.get_num_threads()
    pending: dict[tuple[str, int], tuple[Kernel | str, list[Callable[[], None]]]] = {}
    with _compiling:
        with built_later() as waits:
            for kernel in kernels:
                key = (kernel.digest, threads)
                if key not in _compiled and key not in pending:
                    kernel.compile()
                    pending[key] = _compiled.pop(key), waits[:]  # nobody may call it before it is built
                    waits.clear()
        for key, (found, builds) in pending.items():
            try:
                for wait in builds:
                    wait()
                _compiled[key] = found
            except Exception as error:
                _compiled[key] = _no_kernel(error)


def _no_kernel(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip() or 'no reason given').splitlines()[0]}"


def _text(graph: fx.Graph) -> str:
    """The graph as text that does not depend on the names of its nodes."""
    numbers = {node: i for i, node in enumerate(graph.nodes)}
    lines = []
    for node in graph.nodes:
        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda n: f"%{numbers[n]}")
        lines.append("placeholder" if node.op == "placeholder" else f"{node.target}{args}{kwargs or ''}")
    return "\n".join(lines)


def _summary(operators: Sequence[str]) -> str:
    """`mul,pow,add,tanh+1`: the kinds of operators, views left out where there are others."""
    names = list(dict.fromkeys(name.split(".")[1].strip("_") if "." in name else name for name in operators))
    rest = f"+{len(names) - _SHOWN}" if len(names) > _SHOWN else ""
    return ",".join(names[:_SHOWN]) + rest
