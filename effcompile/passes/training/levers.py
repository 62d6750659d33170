"""What may be done with a value beside keeping it: recompute, and hold it in another way, block by block as
forms of the planner.

A lever over values is a pass (`ValueLever`) that says in which ways it holds a value, which values it takes
and what that costs. Ways that pack on the device may be followed by those to the host, of whatever lever.
`Levers.proposed` adds them to a step that was cut into blocks. Any subset of levers gives the same step with
fewer ways, so that each alone, pairs, and all can be held against each other at one budget.

Levers of installed packages (entry point group `effcompile.value_levers`) are asked alike. One that raises,
or says what cannot be, has no way from then on, and is declined by name (`Levers.broken`).
"""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field, replace
from functools import cache, partial
from time import perf_counter
from typing import ClassVar, Protocol, TypeVar

import torch
from torch import fx

from effcompile.core import gpu
from effcompile.core.errors import EffcompileError, UnknownNameError
from effcompile.core.stages import first_line
from effcompile.machine.rates import kept_rates
from effcompile.machine.target import Target
from effcompile.planner.remat import BlockProblem, Residency
from effcompile.schedules.away import movable
from effcompile.schedules.blocks import Block, Blocks, Host
from effcompile.schedules.ways import Way

RECOMPUTE = "recompute"
_Said = TypeVar("_Said")
#: Elements that are packed to be timed; on a GPU, where so few are a matter of launches, as many times as
#: many.
_PROBE_ELEMENTS, _GPU_MORE = 1 << 20, 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Seconds per byte over the link, out and back; way → seconds per element to pack or unpack; and per call
    of any of these.

    `host_bytes`: room on the host, in `folder`; None when it is not known. `beside`: copies run beside the
    compute.
    """

    out: float = 0.0
    back: float = 0.0
    pack: Mapping[str, float] = field(default_factory=dict)
    call: float = 0.0
    host_bytes: int | None = None
    folder: str = ""
    beside: bool = False

    def __or__(self, other: Rates) -> Rates:
        """With what another lever says."""
        return replace(
            self, out=other.out or self.out, back=other.back or self.back, pack={**self.pack, **other.pack},
            folder=other.folder or self.folder,
            host_bytes=self.host_bytes if other.host_bytes is None else other.host_bytes,
        )  # fmt: skip


class ValueLever(Protocol):
    """A pass over values: a frozen dataclass; its fields are its options, also on the CLI.

    Attributes:
        exact: False for one that changes numbers. known: all ways that it may ever have, the milder ones
            first.
        share: values below this share of their block's bytes are not proposed.
        ways: those that it has with its options.
    """

    name: ClassVar[str]
    exact: ClassVar[bool]
    known: ClassVar[tuple[Way, ...]]

    @property
    def share(self) -> float: ...
    @property
    def ways(self) -> tuple[Way, ...]: ...

    def takes(self, value: torch.Tensor, learned: bool) -> bool:
        """Whether it may hold a value like this fake one. `learned`: that depends on a parameter."""
        ...

    def rates(self, target: Target, here: bool) -> Rates:
        """What it takes on the target. `here`: that is this machine."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Levers:
    """Which of them are there. The default is what there is without asking: recomputation alone.

    refused: names of ways that were run, and did not hold. broken: name of a lever → what it raised, or said
    that cannot be.
    """

    recompute: bool = True
    values: tuple[ValueLever, ...] = ()
    refused: frozenset[str] = frozenset()
    broken: MutableMapping[str, str] = field(default_factory=dict, compare=False)

    @property
    def there(self) -> tuple[ValueLever, ...]:
        """Those over values that have a way left."""
        return tuple(lever for lever in self.values if self.ways(lever))

    def ways(self, lever: ValueLever) -> tuple[Way, ...]:
        """The ways of a lever that are left."""
        with contextlib.suppress(_BrokenError):
            return tuple(
                way for way in self._said(lever, lambda: _known(lever)) if way.name not in self.refused
            )
        return ()

    def _said(self, lever: ValueLever, asked: Callable[[], _Said]) -> _Said:
        """What a lever says.

        Raises:
            _BrokenError: it raised, or what it said cannot be; then, and from then on.
        """
        if lever.name in self.broken:
            raise _BrokenError
        try:
            return asked()
        except EffcompileError:
            raise
        except Exception as error:
            self.broken[lever.name] = f"{type(error).__name__}: {first_line(error)}"
            raise _BrokenError from error

    @property
    def names(self) -> tuple[str, ...]:
        return (*[RECOMPUTE] * self.recompute, *(lever.name for lever in self.there))

    def only(self, names: Collection[str]) -> Levers:
        """These of them alone.

        Raises:
            UnknownNameError: a name that is no lever here.
        """
        for name in names:
            if name not in self.names:
                raise UnknownNameError("lever", name, self.names)
        values = tuple(lever for lever in self.there if lever.name in names)
        return replace(self, recompute=self.recompute and RECOMPUTE in names, values=values)

    def rates(self, target: Target, *, here: bool) -> Rates:
        """Rates for these levers on the target. `here`: it is this machine."""
        found = Rates(call=target.launch_seconds, beside=target.device != "cpu")
        for lever in self.there:
            with contextlib.suppress(_BrokenError):
                found |= self._said(lever, lambda: _sound(lever.rates(target, here)))  # noqa: B023  asked at once
        return found

    def proposed(self, cut: Blocks, rates: Rates, seconds: Callable[[fx.Node], float]) -> Blocks:
        """The step with these levers' ways in its blocks.

        `seconds`: time of a node, of which some hides copies.
        """
        while True:
            with contextlib.suppress(_BrokenError):  # then without that one
                return self._proposed(cut, rates, seconds)

    def _proposed(self, cut: Blocks, rates: Rates, seconds: Callable[[fx.Node], float]) -> Blocks:
        if not self.there and self.recompute:
            return cut
        learned = _learned(cut)
        ways: dict[str, Way] = {}
        forms = [
            {
                name: tuple(
                    _form(way, value, b.problem.nbytes[name], rates)
                    for way in self._of(cut, b, name, value, learned, ways)
                )
                for name, value in movable(cut, b).items()
            }
            for b in cut.blocks
        ]
        most = sum(max((f.host for f in of), default=0) for block in forms for of in block.values())
        scarce = rates.host_bytes is not None and rates.host_bytes < most
        blocks = [self._with(block, f, scarce, _hidden(cut, block, seconds) if rates.beside else None)
                  for block, f in zip(cut.blocks, forms, strict=True)]  # fmt: skip
        return replace(
            cut, blocks=tuple(blocks),
            host=Host(limit=rates.host_bytes, folder=rates.folder, beside=rates.beside), ways=ways,
        )  # fmt: skip

    def _of(
        self,
        cut: Blocks,
        block: Block,
        name: str,
        value: torch.Tensor,
        learned: frozenset[fx.Node],
        known: dict[str, Way],
    ) -> Iterator[Way]:
        """The ways in which a value may be held; they are added to `known`."""
        size, whole = block.problem.nbytes[name], sum(block.problem.nbytes.values())
        made = cut.maker[block.values[name]] in learned
        takes = partial(_takes, size=size, whole=whole, value=value, learned=made)
        able = [lever for lever in self.there if self._said(lever, partial(takes, lever))]
        levers = {way.name: lever for lever in able for way in self.ways(lever)}
        for way in composed([way for lever in able for way in self.ways(lever)]):
            lever = levers[(*way.parts, way.name)[0]]
            if way.codec is None or self._said(lever, lambda: _packed(way, value)) < size:  # noqa: B023
                yield known.setdefault(way.name, way)

    def _with(
        self,
        block: Block,
        forms: dict[str, tuple[Residency, ...]],
        scarce: bool,
        hidden: tuple[float, ...] | None,
    ) -> Block:
        """The block with these ways; blocks that have become different are of different kinds."""
        forms = {name: of for name, of in forms.items() if of}
        forward = (
            block.problem.forward
            if self.recompute
            else tuple(replace(op, repeatable=False) for op in block.problem.forward)
        )
        problem = replace(
            block.problem,
            forms=forms,
            hidden=hidden if forms else None,
            scarce=scarce and bool(forms),
            forward=forward,
        )
        return replace(block, problem=problem, stage=replace(block.stage, kind=_kind(problem)))


class _BrokenError(Exception):
    """A lever cannot be asked any more: see `Levers.broken`."""


def _known(lever: ValueLever) -> tuple[Way, ...]:
    """The ways of a lever, which it has to know.

    Raises:
        ValueError: others.
    """
    found, known = tuple(lever.ways), type(lever).known
    if strange := [way for way in found if way not in known]:
        raise ValueError(
            f"has the way {getattr(strange[0], 'name', strange[0])!r}, which is none that it knows"
        )
    return found


def _takes(lever: ValueLever, size: int, whole: int, value: torch.Tensor, learned: bool) -> bool:
    if not 0 <= lever.share <= 1:
        raise ValueError(f"takes values of the share {lever.share}: 0 to 1 is one")
    return size >= lever.share * whole and bool(lever.takes(value, learned))


def _packed(way: Way, value: torch.Tensor) -> int:
    """Bytes of a packed value.

    Raises:
        ValueError: there are no such.
    """
    assert way.codec is not None
    size = way.codec.packed_bytes(value.numel())
    if type(size) is not int or size < 0:
        raise ValueError(f"packs {value.numel()} elements to {size!r} bytes")
    return size


def _sound(rates: Rates) -> Rates:
    """The same rates.

    Raises:
        ValueError: a figure that is negative, or none.
    """
    for name, figure in (("out", rates.out), ("back", rates.back), ("call", rates.call), *rates.pack.items()):
        if not (math.isfinite(figure) and figure >= 0):
            raise ValueError(f"takes {figure} seconds per byte or element ({name})")
    if rates.host_bytes is not None and rates.host_bytes < 0:
        raise ValueError(f"has {rates.host_bytes} bytes of room on the host")
    return rates


def composed(ways: Collection[Way]) -> Iterator[Way]:
    """These ways: those to the host, then each that packs on the device, alone and then to the host."""
    hosts = [way for way in ways if way.codec is None]
    yield from hosts
    for way in ways:
        if way.codec is not None:
            yield way
            yield from (way.on(host) for host in hosts)


def _form(way: Way, value: torch.Tensor, size: int, rates: Rates) -> Residency:
    """A way as a form of the planner.

    Where copies run beside the compute, what is on its way is staged on the device.
    """
    packed = 0 if way.codec is None else way.codec.packed_bytes(value.numel())
    moved = packed or size
    out, back = (
        (moved * rates.out + rates.call, moved * rates.back + rates.call) if way.on_host else (0.0, 0.0)
    )
    return Residency(
        name=way.name,
        held=0 if way.on_host else packed,
        staged=moved if rates.beside or not way.on_host else 0,
        packed=packed,
        host=moved if way.on_host else 0,
        workspace=0
        if way.codec is None
        else max(way.codec.pack_workspace(value), way.codec.unpack_workspace(value)),
        seconds=0.0
        if way.codec is None
        else 2 * (value.numel() * rates.pack.get((*way.parts, way.name)[0], 0.0) + rates.call),
        out=out,
        back=back,
    )


def _kind(problem: BlockProblem) -> str:
    return hashlib.sha256(repr(problem).encode()).hexdigest()[:12]


def _hidden(cut: Blocks, block: Block, seconds: Callable[[fx.Node], float]) -> tuple[float, ...]:
    """Per backward node its time; views take none."""
    return tuple(0.0 if cut.held.is_free(node) else seconds(node) for node in block.backward)


def _learned(cut: Blocks) -> frozenset[fx.Node]:
    """Nodes that depend on a parameter: masks and positions do not."""
    found = set(cut.step.parameters)
    for node in cut.step.graph.nodes:
        if node.op == "call_function" and any(arg in found for arg in node.all_input_nodes):
            found.add(node)
    return frozenset(found)


@cache
def packing_seconds(way: Way, dtype: torch.dtype, device: str) -> float:
    """Seconds per element of packing or unpacking here, as `_packing_seconds` measured, maybe for an earlier
    plan.
    """
    return kept_rates(f"pack {way.name} {dtype}", device, lambda: (_packing_seconds(way, dtype, device),))[0]


def _packing_seconds(way: Way, dtype: torch.dtype, device: str) -> float:
    """Seconds per element of packing or unpacking here, the mean of both: the fastest of three runs; on a GPU
    the usual one.
    """
    assert way.codec is not None
    codec, count = way.codec, _PROBE_ELEMENTS if device == "cpu" else _PROBE_ELEMENTS * _GPU_MORE
    x = torch.ones(count, dtype=dtype, device=device)
    both = lambda: codec.unpack(codec.pack(x, [1]), [count], [1], dtype)  # noqa: E731
    if device == "cuda":
        return gpu.seconds(both) / 2 / count
    times = []
    for _ in range(3):
        start = perf_counter()
        both()
        times.append(perf_counter() - start)
    return min(times) / 2 / count
