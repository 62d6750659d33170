"""The blocks of a training step: what each makes, reads and could recompute, in the planner's plain numbers.

The graph is split into what does not depend on the gradient that arrives at the loss (the forward, and what
the backward may compute without it) and the rest (the backward). Blocks follow the user's modules (cuts.py).
Storages, not nodes, are the values: views cost nothing and follow what they look at.

Who may keep a storage v made in block m:
- read in the backward of m only, and in no later forward: m decides (a value of its own);
- read by one later block k, in its forward or backward, and not in m's backward: k decides (an entering
  value);
- read by several blocks' backwards or later forwards (rotary tables, masks, an encoder's output), or in the
  backward of an earlier one: kept in any case, like what the forward returns. These are no values of any
  block; the stages' bases count them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from torch import fx

from effcompile.estimate.storages import Storage, Storages
from effcompile.ir.step import Step
from effcompile.planner.remat.problem import BlockProblem, BlockStage
from effcompile.schedules.in_place import Written
from effcompile.schedules.ways import Way

Seconds = Callable[[fx.Node], float]

#: The name of the block that is a whole step. No block of a step that was cut has it: theirs are of modules,
#: "start", "end" or "model".
WHOLE = "step"


@dataclass(frozen=True, kw_only=True)
class Block:
    """One stage of the chain.

    Attributes:
        name: the module's, or "start", "end".
        forward, backward: its nodes, in the order in which they run.
        problem: for the planner; `values` and `operators` say which storage and node its names stand for.
        entering: storages that it takes over from one earlier block. `leaving`: those that it hands on.
        stage: the chain's view of it. `problem` and `stage.kind` are equal for identical blocks.
    """

    name: str
    forward: tuple[fx.Node, ...]
    backward: tuple[fx.Node, ...]
    problem: BlockProblem
    values: Mapping[str, Storage]
    operators: Mapping[str, fx.Node]
    entering: tuple[Storage, ...]
    leaving: tuple[Storage, ...]
    stage: BlockStage


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """Where a step may put values: at most `limit` bytes (None: no limit), in a pool in `folder`
    (ops/offload.py).

    `beside`: copies run beside the compute; else they stop it.
    """

    limit: int | None = None
    folder: str = ""
    beside: bool = False


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """A step, cut.

    `shared`: storages kept in any case. `base_bytes`: the whole model, constants, inputs, the tangent,
    `libraries`.

    libraries: bytes that products keep for themselves on a GPU.
    host: where values may be put. ways: name of a form → what it is, of those that its blocks' values may
    have. written: nodes of the backward that write into an operand, of which `held` knows.
    """

    step: Step
    held: Storages
    blocks: tuple[Block, ...]
    shared: frozenset[Storage]
    base_bytes: int
    libraries: int = 0
    host: Host = Host()
    ways: Mapping[str, Way] = field(default_factory=dict)
    written: Mapping[fx.Node, Written] = field(default_factory=dict)

    @property
    def decidable(self) -> frozenset[Storage]:
        """All storages that some block decides about: keeping them all recomputes nothing."""
        return frozenset(s for block in self.blocks for s in block.values.values())

    @cached_property
    def maker(self) -> Mapping[Storage, fx.Node]:
        """Storage → the first node whose value is exactly the tensor that was made with it."""
        found: dict[Storage, fx.Node] = {}
        for node in (n for block in self.blocks for n in block.forward):
            if len(self.held.of[node]) == 1:
                found.setdefault(self.held.of[node][0], node)
        return found

    @property
    def given_bytes(self) -> int:
        """`base_bytes` less the gradient that arrives at the loss: what is there before the step begins."""
        return self.base_bytes - self.libraries - _tangent_bytes(self.step, self.held)

    def beside_libraries(self, nbytes: int) -> Blocks:
        """The same where products keep so many bytes for themselves, throughout."""
        return replace(self, libraries=nbytes, base_bytes=self.base_bytes + nbytes - self.libraries)


def _tangent_bytes(step: Step, held: Storages) -> int:
    return sum(held.nbytes[s] for node in step.tangents for s in held.of[node])


def base_bytes(step: Step, held: Storages) -> int:
    """What is alive throughout: all of the model and its inputs, or, where none is known, what the graph
    reads.
    """
    if step.resident_bytes is None:
        return sum(held.nbytes[s] for s in held.fixed)
    return step.resident_bytes + _tangent_bytes(step, held)


def split(step: Step) -> tuple[list[fx.Node], list[fx.Node]]:
    """(nodes that do not depend on the tangent, the others), each in graph order."""
    backward: set[fx.Node] = set(step.tangents)
    calls = [node for node in step.graph.nodes if node.op == "call_function"]
    for node in calls:
        if any(arg in backward for arg in node.all_input_nodes):
            backward.add(node)
    return [n for n in calls if n not in backward], [n for n in calls if n in backward]


def reads_of(node: fx.Node, held: Storages) -> tuple[Storage, ...]:
    """Storages that running a node reads, each once; parameters, buffers and inputs left out."""
    return tuple({s: None for arg in node.all_input_nodes for s in held.of[arg] if s not in held.fixed})
