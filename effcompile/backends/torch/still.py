"""A step of one token a row in which nothing moves: its cache is the whole buffer, the place of the new row a
number on the device, and what is not there yet is hidden by the mask. So a GPU records it once, and replays
it.

Rows of a cache have no order of their own: positions are in the keys. A graph whose masks, or whose results,
tell that the new row does not stand behind all others is left alone.
"""

from __future__ import annotations

import copy
import operator
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from effcompile.backends.torch import graphs
from effcompile.backends.torch.direct import direct
from effcompile.backends.torch.edit_attentions import share_heads
from effcompile.backends.torch.in_place import appends, attend
from effcompile.capture.verify import relative_error
from effcompile.core import gpu
from effcompile.core.errors import LoweringError
from effcompile.ir.cache import CacheLayout, CacheLeaf, Growth
from effcompile.ir.program import TensorSpec
from effcompile.ops import elsewhere
from effcompile.ops.append import room
from effcompile.ops.cache_rows import into
from effcompile.ops.cached_attention import cached_attention

aten = torch.ops.aten
Run = Callable[..., Sequence[Tensor]]

#: Recorded calls that are kept, the last ones used: each of a batch and of a cache's addresses.
_MOST = 4
#: Sizes of the trial: rows of a buffer, rows that are there, positions of an encoder.
_ROOM, _PAST, _SOURCE = 12, 5, 3
#: What one token a row is given beside its cache.
_SMALL = ("tokens", "mask", "positions", "rows", "source_mask")
#: Relative error of logits that rounding explains where sums are in another order, in 32 bits and in 16.
_SAME = {torch.float32: 1e-4}
_HALVES = 2e-2


def write_at(past: Tensor, new: Tensor, place: Tensor) -> Tensor:
    """The whole buffer, with the new row at a place."""
    own = elsewhere.kernel("append_rows", new)
    if own is None or not own(past, new, place):
        raise LoweringError(f"No kernel writes a row of {new.dtype} into a cache of {past.dtype} there.")
    return past


class StillStep(nn.Module):
    """A step whose calls of one token are still ones, where the cache has its room from the start; all others
    are `run`'s.
    """

    def __init__(self, run: fx.GraphModule, still: fx.GraphModule, inputs: Sequence[TensorSpec]) -> None:
        super().__init__()
        self.run, self._still = run, still
        names = [spec.name for spec in inputs]
        self._tokens, self._mask = names.index("tokens"), names.index("mask")
        holders = still.graph.find_nodes(op="placeholder")
        self._grown = [
            at for at, node in enumerate(holders)
            if any(user.target is write_at and user.args[0] is node for user in node.users)
        ]  # fmt: skip
        self._first = min(at for at, name in enumerate(names) if name.startswith("past"))
        self._calls: OrderedDict[tuple[object, ...], _Call] = OrderedDict()
        self._turn = threading.Lock()

    def forward(self, *flat: Tensor) -> Sequence[Tensor]:
        buffers = self._held(flat)
        if buffers is None:
            return self.run(*flat)
        past = flat[self._grown[0]].shape[2]
        with self._turn:
            call = self._call_of(flat, buffers)
            with gpu.current(call.place.device):
                logits = call(flat[: self._first], buffers, past)
        longer = [
            flat[at].as_strided((*flat[at].shape[:2], past + 1, flat[at].shape[3]), flat[at].stride())
            for at in self._grown
        ]
        return [logits, *longer]

    def _held(self, flat: Sequence[Tensor]) -> list[Tensor] | None:
        """The leaves of the cache as whole buffers; None where the call is another one."""
        grown = [flat[at] for at in self._grown]
        rooms = {room(each) for each in grown}
        past, (total, first) = grown[0].shape[2], next(iter(rooms))
        one = flat[self._tokens].shape[1] == 1 and len(rooms) == 1 and first == 0 and 0 < past < total
        if not one or flat[self._mask].shape[1] != past + 1:
            return None
        whole = {at: _whole(flat[at], total) for at in self._grown}
        return [whole.get(at, flat[at]) for at in range(self._first, len(flat))]

    def _call_of(self, flat: Sequence[Tensor], buffers: Sequence[Tensor]) -> _Call:
        form = tuple((each.data_ptr(), each.shape, each.stride()) for each in buffers)
        if form not in self._calls:
            while len(self._calls) >= _MOST:
                self._calls.popitem(last=False)
            rows = buffers[self._grown[0] - self._first].shape[2]
            self._calls[form] = _Call(self._still, flat[: self._first], self._mask, rows)
        self._calls.move_to_end(form)
        return self._calls[form]


class _Call:
    """Calls of one batch over one cache: what enters beside the cache has tensors of its own."""

    def __init__(self, still: fx.GraphModule, small: Sequence[Tensor], mask: int, rows: int) -> None:
        self._still, self._mask = still, mask
        self.inputs = [each.clone() for each in small]
        self.inputs[mask] = small[mask].new_zeros((small[mask].shape[0], rows))
        self.place = torch.zeros(1, dtype=torch.int64, device=small[mask].device)
        self._recorded: tuple[Any, list[Tensor]] | None = None
        self._done: Any = None

    def __call__(self, small: Sequence[Tensor], buffers: Sequence[Tensor], past: int) -> Tensor:
        if self._done is not None:  # the last call may be under way on another stream
            torch.cuda.current_stream().wait_event(self._done)
        for at, (own, given) in enumerate(zip(self.inputs, small, strict=True)):
            if at == self._mask:
                own.zero_()
                own[:, : past + 1].copy_(given)
            else:
                own.copy_(given)
        self.place.fill_(past)
        if not self.place.is_cuda:
            return self._still(*self.inputs, *buffers, self.place)[0].clone()
        if self._recorded is None:  # the cache is held while it is recorded, and not beyond
            with torch.inference_mode(False), torch.no_grad():
                self._recorded = graphs.captured(self._still, [*self.inputs, *buffers, self.place])
        graph, outputs = self._recorded
        graph.replay()
        made = outputs[0].clone()
        self._done = torch.cuda.Event()
        self._done.record()
        return made


def _whole(rows: Tensor, total: int) -> Tensor:
    return rows.as_strided((*rows.shape[:2], total, rows.shape[3]), rows.stride())


def still(
    module: fx.GraphModule,
    run: fx.GraphModule,
    inputs: Sequence[TensorSpec],
    layout: CacheLayout,
    context: int,
) -> StillStep | str:
    """The step with still calls, or why it has none.

    Args:
        module: the graph as it was lowered.
        run: the same, running in place.
        inputs: its inputs.
        layout: of its cache.
        context: rows that a cache has room for.
    """
    if (reason := graphs.asked()) is not None:
        return reason
    device = next((each.device for each in module.parameters()), torch.device("cpu"))
    if elsewhere.kernel("append_rows", torch.empty(0, device=device)) is None:
        return "its attention over the cache is torch's, which reads what is hidden"
    if any(leaf.growth not in (Growth.FULL, Growth.SOURCE) for leaf in layout):
        return "windows and states of its cache move"
    places = [at for at, spec in enumerate(inputs) if spec.name.startswith("past")]
    if any(spec.name not in _SMALL for at, spec in enumerate(inputs) if at not in places):
        return "it takes images, whose rows come and go"
    made = _standing(module, [places[at] for at in layout.appended])
    if isinstance(made, str):
        return made
    if (reason := graphs.waits(made.graph)) is not None:
        return reason
    try:
        if not _hides(made, inputs, layout, context, device):
            return "an attention sees more or less of the cache than the given mask says"
        step = StillStep(run, direct(made), inputs)
        alike = _alike(step, inputs, layout, device)
    except (RuntimeError, LoweringError) as error:
        return f"it does not run so: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
    return step if alike else "its results tell where the new row of a cache stands"


def _standing(module: fx.GraphModule, grown: Sequence[int]) -> fx.GraphModule | str:
    """The graph over whole buffers; its last input is the place of the new row."""
    graph = copy.deepcopy(module.graph)
    share_heads(graph)
    graph.eliminate_dead_code()
    holders = graph.find_nodes(op="placeholder")
    with graph.inserting_after(holders[-1]):
        place = graph.placeholder("place")
    for holder in (holders[at] for at in grown):
        for user in list(holder.users):
            with graph.inserting_before(user):
                if appends(user, holder):
                    other = graph.call_function(write_at, (holder, user.args[0][1], place))
                    other.meta = dict(user.meta)
                    user.replace_all_uses_with(other)
                elif user.target is aten.sym_size.int and user.args[1] == 2:
                    size = graph.call_function(aten.sym_size.int, (holder, 2))
                    user.replace_all_uses_with(graph.call_function(operator.sub, (size, 1)))
                elif user.target is not aten.sym_size.int:
                    return f"{user.name} reads the cache itself"
                else:
                    continue
            graph.erase_node(user)
    attend(graph)
    return fx.GraphModule(module, graph, class_name=type(module).__name__)


def _hides(
    module: fx.GraphModule,
    inputs: Sequence[TensorSpec],
    layout: CacheLayout,
    context: int,
    device: torch.device,
) -> bool:
    """Whether each attention over the cache sees what the given mask says, over the whole context."""
    graph, kept = fx.Graph(), dict[fx.Node, fx.Node]()
    graph.graph_copy(module.graph, kept)
    over = [
        node for node in graph.find_nodes(op="call_function", target=cached_attention)
        if any(isinstance(arg, fx.Node) and arg.target is write_at for arg in node.args[1:3])
    ]  # fmt: skip
    masks = list(dict.fromkeys(node.args[3] for node in over))
    if not masks or None in masks:
        return False
    graph.output(tuple(masks))
    graph.eliminate_dead_code()
    given = torch.arange(context, device=device) % 3 != 1
    flat = _example(
        inputs, layout, context - 1, given, lambda leaf, spec: _nothing(leaf, spec, context, device)
    )
    with torch.no_grad():
        found = fx.GraphModule(module, graph)(*flat, given.new_zeros(1, dtype=torch.int64))
    return all(each.shape[2:] == (1, context) and bool((_seen(each) == given).all()) for each in found)


def _seen(mask: Tensor) -> Tensor:
    """What a mask shows: where it is true, or adds nothing. What it adds a little to is neither."""
    return mask if mask.dtype is torch.bool else torch.where(mask == 0, 1, torch.where(mask < -1e4, 0, 2))


def _alike(step: StillStep, inputs: Sequence[TensorSpec], layout: CacheLayout, device: torch.device) -> bool:
    """Whether a call says what it says in place, over a cache whose other rows are NaN, and leaves that."""
    seen = torch.arange(_PAST + 1, device=device) != 1
    generator = torch.Generator().manual_seed(0)
    flat = _example(inputs, layout, _PAST - 1, seen, lambda leaf, spec: _drawn(leaf, spec, generator, device))
    copies = [_again(each) if each.dim() == 4 else each.clone() for each in flat]
    with torch.no_grad():
        wanted, found = step.run(*copies), step(*flat)
    calls = len(step._calls)
    step._calls.clear()
    limit = _SAME.get(wanted[0].dtype, _HALVES)
    return calls == 1 and all(
        relative_error(mine.float(), right.float()) <= limit
        for mine, right in zip(found, wanted, strict=True)
    )


def _example(
    inputs: Sequence[TensorSpec], layout: CacheLayout, position: int, seen: Tensor,
    leaf_of: Callable[[CacheLeaf, TensorSpec], Tensor],
) -> list[Tensor]:  # fmt: skip
    """Inputs of a call of one token in one row."""
    whole = seen.to(torch.int64)[None]
    one, leaves = whole.new_ones((1, 1)), iter(layout)
    small = {
        "tokens": one, "mask": whole, "positions": one * position, "rows": one[0] - 1,
        "source_mask": one.expand(1, _SOURCE).contiguous(),
    }  # fmt: skip
    return [
        leaf_of(next(leaves), spec) if spec.name.startswith("past") else small[spec.name] for spec in inputs
    ]


def _nothing(leaf: CacheLeaf, spec: TensorSpec, context: int, device: torch.device) -> Tensor:
    """A leaf of the whole context that takes no memory."""
    rows = context if leaf.growth is Growth.FULL else _SOURCE
    kind = getattr(torch, leaf.held or spec.dtype)
    return torch.zeros((), dtype=kind, device=device).expand(1, leaf.shape[0], rows, leaf.width)


def _drawn(leaf: CacheLeaf, spec: TensorSpec, generator: torch.Generator, device: torch.device) -> Tensor:
    """A leaf of some rows, in a buffer whose others are NaN."""
    kind, grown = getattr(torch, leaf.held or spec.dtype), leaf.growth is Growth.FULL
    rows = torch.randn((1, leaf.shape[0], _PAST if grown else _SOURCE, leaf.shape[-1]), generator=generator)
    held = into(rows, kind).to(kind)
    if not grown:
        return held.to(device)
    whole = torch.full((1, leaf.shape[0], _ROOM, held.shape[3]), torch.nan if kind.is_floating_point else -1)
    whole = whole.to(kind)  # as bytes of a scale, -1 are NaN
    whole[:, :, :_PAST] = held
    return whole.to(device)[:, :, :_PAST]


def _again(rows: Tensor) -> Tensor:
    """The same rows in a copy of their buffer."""
    total, first = room(rows)
    return rows.clone() if first else _whole(rows, total).clone()[:, :, : rows.shape[2]]
