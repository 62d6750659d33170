"""Seconds and workspace of single operators of a graph, run alone on this machine at the shapes that the
graph has.

Operators with equal targets, operand shapes, dtypes, strides and constants are run once. Operands are made
up: normal values, and zeros for integers, which are valid as indices and labels. Workspace is the most bytes
that the allocator had given out at an instant inside the operator beyond what it returned: what kernels
allocate for themselves, which no shape tells.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from dataclasses import dataclass, replace
from time import perf_counter
from types import MappingProxyType

import torch
from torch import fx
from torch.utils import _pytree as pytree

from effcompile.core import gpu, torch_compat_memory
from effcompile.core.pace import Pace, current_pace
from effcompile.core.timing import SETTLED, median_seconds
from effcompile.core.types import Args, Value
from effcompile.machine import memory
from effcompile.machine.cold import OtherValues, forget
from effcompile.ops import block_sparse, grouped
from effcompile.ops.products import OPERANDS
from effcompile.ops.wide import pays

#: Bytes of operands and results from which on it is asked whether they fit beside the model.
_LARGE = 256 << 20
#: Share of an operator's time that reading its operands must be, that it matters whether a cache holds them;
#: and of the seconds of each, those for one where it does.
_SMALL, _COLD = 0.125, 0.25
#: Times the seconds of each from which on one call is enough, where the machine ran as it can before and
#: after: the next were 0 to 5 % from it.
_LONG = 4
#: Rows between two neighbours that are looked up, where rows are made up: a prime.
_STRIDE = 7919
#: Multiplications of a slow product that are timed, and its rows at the least.
_TIMED, _LEAST_ROWS = 1 << 25, 2
#: Backward kernels that read their random state on the host, and its operands' names.
_SEEDED = (
    torch.ops.aten._scaled_dot_product_efficient_attention_backward.default,
    torch.ops.aten._efficient_attention_backward.default,
)
_SEEDS = ("philox_seed", "philox_offset")


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One operator, run alone.

    Attributes:
        seconds: the median of calls. workspace: bytes beyond operands and results.
        results: bytes of the storages that it made, in the order of its results: a kernel may make them
            larger than their shapes.
        busy: whether others used the machine meanwhile, so that the seconds do not hold when it is idle.
        cold: bytes of other values that were read before each call of one that is bound by memory.
    """

    seconds: float
    workspace: int
    results: tuple[int, ...] = ()
    busy: bool = False
    cold: int = 0

    def with_bytes_of(self, other: Measured) -> Measured:
        """The same with the more of both measurements' bytes."""
        results = (
            tuple(map(max, self.results, other.results))
            if len(self.results) == len(other.results)
            else self.results
        )
        return replace(self, workspace=max(self.workspace, other.workspace), results=results)


#: Where a node keeps its value's description, and the value that it is of.
_TEXT = "effcompile_described"


def key(node: fx.Node) -> str:
    """Equal for operators that take the same time: target, operands' shapes, dtypes, strides and devices,
    constants.
    """
    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), described)
    return f"{node.target}{args}{kwargs or ''}"


def measure(
    nodes: Iterable[fx.Node],
    known: MutableMapping[str, Measured],
    *,
    seconds_each: float = 0.05,
    cold: int = 0,
    progress: Callable[[int, int], None] = lambda done, of: None,
    shares: Mapping[str, float] = MappingProxyType({}),
) -> None:
    """Run every operator that is not yet in `known`, and put it there.

    `shares`: what part of all seconds an operator's are: it is worth that part of those that may be waited
    for the machine's pace, which the first small ones would use up; all of them where that is not said.

    `cold`: bytes that are read before each call of those that are bound by memory, as a step's other values
    are.

    Operators that cannot run alone are left out.

    Random generators are left as they were.
    """
    todo = {key(node): node for node in nodes if node.op == "call_function"}
    todo = {k: node for k, node in todo.items() if k not in known}
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    others = OtherValues(cold) if cold and todo else None
    pace = current_pace()
    patience = 0.0 if pace is None else pace.left
    for done, (name, node) in enumerate(todo.items()):
        progress(done, len(todo))
        if not _fits(node):
            continue
        try:
            with torch.random.fork_rng(devices=devices), _waiting(pace, patience * shares.get(name, 1.0)):
                known[name] = _measure(node, seconds_each, others)
        except Exception:  # an operator that needs real values (data-dependent): the target's law stands in
            continue
    if others is not None:
        forget()


def _waiting(pace: Pace | None, seconds: float) -> contextlib.AbstractContextManager[None]:
    """Within, so many seconds are waited at the most."""
    return contextlib.nullcontext() if pace is None else pace.losing(seconds)


def _even() -> bool:
    """Whether the machine is known to run as it can."""
    pace = current_pace()
    return pace is not None and pace.surely_even()


def _fits(node: fx.Node) -> bool:
    """Whether operands and results, made up beside the model, fit what is free; large ones are looked at
    only.
    """
    values = [n.meta.get("val") for n in (node, *node.all_input_nodes)]
    nbytes = sum(t.numel() * t.element_size() for t in _tensors(values))
    if nbytes < _LARGE:
        return True
    free = memory.free_bytes("cuda" if any(t.is_cuda for t in _tensors(values)) else "cpu")
    return free is None or 2 * nbytes < free


def _measure(node: fx.Node, seconds_each: float, others: OtherValues | None = None) -> Measured:
    args, kwargs = _operands(node)
    args = _with_spread_rows(
        node.target, _with_seeds_on_host(node.target, _with_full_bags(node.target, args))
    )
    args = tuple(grouped.with_offsets(node.target, block_sparse.with_indices(node.target, args)))
    args, times = _of_fewer_rows(node.target, args)
    on_gpu = any(t.is_cuda for t in _tensors((args, kwargs, node.meta.get("val"))))

    def call() -> Value:
        return node.target(*args, **kwargs)  # type: ignore[operator]

    with torch.no_grad():
        if on_gpu:
            # kernels are compiled, their tiles chosen, and what libraries keep is taken, at the first call
            call()
        even = not on_gpu and _even()
        with torch_compat_memory.watched_memory("cuda" if on_gpu else "cpu") as peak:
            start = perf_counter()
            result = call()
            first = perf_counter() - start
        results = _made_bytes(result, args)
        workspace = peak() - sum(map(gpu.rounded, results) if on_gpu else results)
        del result
        if on_gpu:
            seconds = gpu.seconds(call, budget=seconds_each)
        elif even and first >= _LONG * seconds_each and _even():
            seconds = first
        else:
            touched = sum(t.numel() * t.element_size() for t in _tensors((args, kwargs))) + sum(results)
            seconds = _seconds(call, seconds_each, first, touched, others)
        made = results if times == 1 else ()
        return Measured(
            seconds=times * seconds,
            workspace=max(0, workspace),
            results=made,
            cold=0 if others is None else others.nbytes,
        )


def _of_fewer_rows(target: object, args: Args) -> tuple[Args, float]:
    """The operands of a product with as many rows as are enough to time it, and how many times those it has.

    Where torch multiplies 16-bit matrices in plain loops (ops/wide.py), whose time is in proportion to the
    rows and which allocate nothing, one product of a large model takes minutes.
    """
    where = OPERANDS.get(target, 0)
    a, b = args[where : where + 2] if target in OPERANDS else (None, None)
    if not (
        isinstance(a, torch.Tensor)
        and isinstance(b, torch.Tensor)
        and a.dim() == 2
        and pays(a.dtype, a.device.type)
    ):
        return args, 1
    rows = max(_LEAST_ROWS, _TIMED // (a.shape[1] * b.shape[1]))
    if rows >= len(a):
        return args, 1
    return (*args[:where], a[:rows], *args[where + 1 :]), len(a) / rows


def _operands(node: fx.Node) -> tuple[Args, dict[str, Value]]:
    found: tuple[Args, dict[str, Value]] = fx.map_arg((node.args, dict(node.kwargs)), _operand)
    return found


def _operand(node: fx.Node) -> Value:
    """Made-up values.

    Bytes beside another operator's results are in a form of its own (an RNN's workspace): that operator makes
    them.
    """
    value = node.meta["val"]
    source = node.args[0] if node.target is operator.getitem else None
    if not (
        isinstance(source, fx.Node)
        and source.op == "call_function"
        and isinstance(value, torch.Tensor)
        and value.dtype == torch.uint8
    ):
        return pytree.tree_map(made_up, value)
    args, kwargs = _operands(source)
    with torch.no_grad():
        return source.target(*args, **kwargs)[node.args[1]]  # type: ignore[operator]


def _seconds(
    call: Callable[[], object], budget: float, first: float, touched: int, others: OtherValues | None
) -> float:
    """The median of calls; of a call that takes longer than the budget, the faster of one and of the one that
    was watched before (`first` seconds).

    Calls are warm where there are no others, or where reading the bytes that are touched takes little of
    them.
    """
    start = perf_counter()
    call()
    once = perf_counter() - start
    if once >= budget:
        return min(once, first)
    if others is not None and touched * others.seconds_per_byte >= _SMALL * once:
        left = _COLD * (budget - once)
        return median_seconds(call, min_rounds=2, budget=left, before=others.read, warm=once)
    return median_seconds(call, min_rounds=2, budget=budget - once, settled=SETTLED, warm=once)


def made_up(value: object) -> Value:
    """A real tensor like a fake one; anything else as it is."""
    if not isinstance(value, torch.Tensor):
        return value
    shape, strides = tuple(map(int, value.shape)), tuple(map(int, value.stride()))
    extent = (
        0 if 0 in shape else 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    )
    # strides may be 0: what is written has none
    flat = torch.empty(extent, dtype=value.dtype, device=value.device)
    if value.dtype.is_floating_point:
        flat = flat.normal_() if extent < 1 << 20 else flat.fill_(0.5)
    else:
        flat.zero_()
    return flat.as_strided(shape, strides)


def _with_full_bags(target: object, args: Args) -> Args:
    """The operands of an embedding bag's backward with one index in every bag: empty ones would
    be skipped.
    """
    if target is not torch.ops.aten._embedding_bag_backward.default:
        return args
    return (*args[:4], torch.ones_like(args[4]), *args[5:])


def _with_seeds_on_host(target: object, args: Args) -> Args:
    """The operands of an attention kernel's backward with its random state where the kernel reads it.

    Outside of a stream capture the memory-efficient kernel of CUDA dereferences the seed and the offset on
    the host (ATen/native/transformers/cuda/attention_backward.cu), though their fake values lie on the
    device: made up there, they end the process.
    """
    found = next((each for each in _SEEDED if each is target), None)
    if found is None:
        return args
    names = [argument.name for argument in found._schema.arguments]
    return tuple(value.cpu() if name in _SEEDS else value for name, value in zip(names, args, strict=False))


def _with_spread_rows(target: object, args: Args) -> Args:
    """The operands of a lookup on a GPU, or of its backward, with rows all over the table: thousands of sums
    into one row queue up.
    """
    rows = {
        torch.ops.aten.embedding.default: lambda: len(args[0]),
        torch.ops.aten.embedding_dense_backward.default: lambda: args[2],
    }
    if target not in rows or not args[1].is_cuda:
        return args
    indices = args[1]
    spread = (torch.arange(indices.numel(), device=indices.device) * _STRIDE % max(1, rows[target]())).to(
        indices.dtype
    )
    return (args[0], spread.view(indices.shape), *args[2:])


def _made_bytes(result: object, args: object) -> tuple[int, ...]:
    """Bytes of each of the result's storages that are not the arguments'."""
    given = {t.untyped_storage()._cdata for t in _tensors(args)}
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in _tensors(result)}
    return tuple(nbytes for storage, nbytes in storages.items() if storage not in given)


def _tensors(value: object) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    pytree.tree_map_only(torch.Tensor, found.append, value)
    return found


def described(node: fx.Node) -> str:
    """What a node's value looks like, kept with it: a plan asks again for each reader, and for all that is
    known of an operator.
    """
    value = node.meta.get("val")
    of, text = node.meta.get(_TEXT, (None, ""))
    if of is not value or value is None:
        text = ",".join(map(_leaf, pytree.tree_leaves(value)))
        node.meta[_TEXT] = value, text
    return text


def _leaf(leaf: object) -> str:
    if not isinstance(leaf, torch.Tensor):
        return repr(leaf)
    strides = "" if leaf.is_contiguous() else leaf.stride()
    dtype, shape = str(leaf.dtype).removeprefix("torch."), list(map(int, leaf.shape))
    return f"{dtype}{shape}{strides}@{leaf.device.type}"
