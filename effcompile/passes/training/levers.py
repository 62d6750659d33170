"""What may be done with a value beside keeping it: recompute, offload, compress; proposed block by block as forms of the planner.

`Levers.proposed` adds them to a step that was cut into blocks. Any subset of levers gives the same step with fewer ways,
so that each alone, pairs, and all can be held against each other at one budget.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace

import torch
from torch import fx

from effcompile.core.errors import UnknownNameError
from effcompile.ops.compress import packed_bytes
from effcompile.passes.training.compress import Compress
from effcompile.passes.training.offload import Offload
from effcompile.planner.remat import BlockProblem, Form
from effcompile.schedule.away import BOTH, COMPRESS, OFFLOAD, movable, pack_workspace
from effcompile.schedule.blocks import Block, Blocks, Host

RECOMPUTE = "recompute"
LEVERS = (RECOMPUTE, OFFLOAD, COMPRESS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Seconds per byte over the link, out and back; per element to pack and unpack; and per call of any of these.

    `host_bytes`: room on the host, None when it is not known. `beside`: copies run beside the compute.
    """

    out: float
    back: float
    pack: float
    call: float = 0.0
    host_bytes: int | None = None
    beside: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Levers:
    """Which of them are there. The default is what there is without asking: recomputation alone."""

    recompute: bool = True
    offload: Offload | None = None
    compress: Compress | None = None

    @property
    def move(self) -> bool:
        """Whether any values may be held in another form."""
        return self.offload is not None or self.compress is not None

    @property
    def names(self) -> tuple[str, ...]:
        there = (self.recompute, self.offload is not None, self.compress is not None)
        return tuple(name for name, yes in zip(LEVERS, there, strict=True) if yes)

    def only(self, names: Collection[str]) -> Levers:
        """These of them alone.

        Raises:
            UnknownNameError: a name that is no lever.
        """
        for name in names:
            if name not in LEVERS:
                raise UnknownNameError("lever", name, LEVERS)
        return Levers(
            recompute=self.recompute and RECOMPUTE in names,
            offload=self.offload if OFFLOAD in names else None,
            compress=self.compress if COMPRESS in names else None,
        )

    def proposed(self, cut: Blocks, rates: Rates, seconds: Callable[[fx.Node], float]) -> Blocks:
        """The step with these levers' ways in its blocks. `seconds`: time of a node, of which some hides copies."""
        if not self.move and self.recompute:
            return cut
        learned = _learned(cut) if self.compress is not None else frozenset()
        forms = [{name: tuple(self._forms(cut, block, name, value, rates, learned)) for name, value in movable(cut, block).items()}
                 for block in cut.blocks]  # fmt: skip
        most = sum(max((f.host for f in of), default=0) for block in forms for of in block.values())
        limit = self._limit(rates)
        host = Host(limit=limit, folder=self.offload.folder if self.offload else "", beside=rates.beside)
        scarce = limit is not None and limit < most
        blocks = [self._with(block, f, scarce, _hidden(cut, block, seconds) if rates.beside else None)
                  for block, f in zip(cut.blocks, forms, strict=True)]  # fmt: skip
        return replace(cut, blocks=tuple(blocks), host=host)

    def _limit(self, rates: Rates) -> int | None:
        if self.offload is None:
            return None
        return rates.host_bytes if self.offload.host_bytes is None else self.offload.host_bytes

    def _forms(
        self, cut: Blocks, block: Block, name: str, value: torch.Tensor, rates: Rates, learned: frozenset[fx.Node]
    ) -> Iterator[Form]:
        size, whole = block.problem.nbytes[name], sum(block.problem.nbytes.values())
        offload = self.offload is not None and size >= self.offload.share * whole
        compress = self.compress is not None and size >= self.compress.share * whole and value.is_floating_point()
        compress = compress and value.dtype != torch.float64 and cut.maker[block.values[name]] in learned
        packed = packed_bytes(value.numel())
        if offload:
            yield _form(OFFLOAD, size, rates, staged=size)
        if compress and packed < size:
            workspace, work = pack_workspace(value), 2 * (value.numel() * rates.pack + rates.call)
            yield Form(name=COMPRESS, held=packed, staged=packed, packed=packed, workspace=workspace, seconds=work)
            if offload:
                yield _form(BOTH, packed, rates, staged=packed, packed=packed, workspace=workspace, seconds=work)

    def _with(self, block: Block, forms: dict[str, tuple[Form, ...]], scarce: bool, hidden: tuple[float, ...] | None) -> Block:
        """The block with these ways; blocks that have become different are of different kinds."""
        forms = {name: of for name, of in forms.items() if of}
        forward = block.problem.forward if self.recompute else tuple(replace(op, repeatable=False) for op in block.problem.forward)
        problem = replace(block.problem, forms=forms, hidden=hidden if forms else None, scarce=scarce and bool(forms), forward=forward)
        return replace(block, problem=problem, stage=replace(block.stage, kind=_kind(problem)))


def _form(name: str, size: int, rates: Rates, *, staged: int, packed: int = 0, workspace: int = 0, seconds: float = 0.0) -> Form:
    """A form on the host. What is on its way is staged on the device where copies run beside the compute."""
    return Form(
        name=name, staged=staged if rates.beside else 0, packed=packed, host=size, workspace=workspace, seconds=seconds,
        out=size * rates.out + rates.call, back=size * rates.back + rates.call,
    )  # fmt: skip


def _kind(problem: BlockProblem) -> str:
    return hashlib.sha256(repr(problem).encode()).hexdigest()[:12]


def _hidden(cut: Blocks, block: Block, seconds: Callable[[fx.Node], float]) -> tuple[float, ...]:
    """Per backward node its time; views take none."""
    return tuple(0.0 if cut.held.is_free(node) else seconds(node) for node in block.backward)


def _learned(cut: Blocks) -> frozenset[fx.Node]:
    """Nodes that depend on a parameter: masks and positions, whose extremes 8 bits do not hold, do not."""
    found = set(cut.step.parameters)
    for node in cut.step.graph.nodes:
        if node.op == "call_function" and any(arg in found for arg in node.all_input_nodes):
            found.add(node)
    return frozenset(found)
