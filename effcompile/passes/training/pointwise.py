"""Chains of element-wise operators of a training step as one kernel each.

An eager GELU of eight operators reads and writes its tensor eight times, and its backward keeps five tensors:
as one kernel each, forward and backward read and write once, and the backward computes what it needs again in
registers. That is what torch.compile gains on a step of matrix products; here the planner still sees every
kernel, and what it may keep.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import ClassVar

from torch import fx

from effcompile.core.cost import Cost
from effcompile.core.reasons import Because, Reason
from effcompile.core.torch_compat_aot import is_random
from effcompile.ir.plan import Decision, Setting
from effcompile.ir.step import Step
from effcompile.ops.fused import Fused, compile_together
from effcompile.passes.training.base import Case, StepChoice, StepContext, StepOption, StepOutcome
from effcompile.passes.training.pointwise_build import replace_group, size_of
from effcompile.passes.training.pointwise_cut import absorbed
from effcompile.passes.training.pointwise_graph import (
    Reach,
    base,
    block_of,
    elements,
    is_cheap,
    is_elementwise,
    is_sum,
    lasting_order,
    link,
    readers,
    sort,
    with_views,
    written,
)
from effcompile.passes.training.step_edit import copied
from effcompile.schedules.blocks import split

#: Operators of one kernel at the most.
_LARGEST = 48
#: Times that groups are formed again after the slow ones were left out.
_ROUNDS = 4

KIND, ONE_BY_ONE, FUSED = "element-wise", "one by one", "kernels"

#: (nodes) → seconds of each, measured here.
Price = Callable[[Sequence[fx.Node]], Sequence[float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fusion:
    """One kernel.

    `node`: its call in the new graph. `members`: the nodes of the old graph that it stands for, in order.
    """

    node: fx.Node
    members: tuple[fx.Node, ...]

    @property
    def names(self) -> frozenset[str]:
        """What it stands for, by the old graph's names."""
        return frozenset(node.name for node in self.members)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pointwise:
    """`enabled`: run chains of element-wise operators as one kernel each, where that is measured to be
    faster.
    """

    enabled: bool = True

    name: ClassVar[str] = "pointwise"
    exact: ClassVar[bool] = True

    def propose(self, case: Case, context: StepContext) -> Iterator[StepChoice]:
        """The step with its chains fused where that was measured to be faster, for another machine all; no
        other form competes.
        """
        if not self.enabled:
            return
        apart: set[frozenset[str]] = set()
        for _ in range(_ROUNDS):
            changed, fusions = fuse(case.step, apart)
            slow = _slow(fusions, context.prices.priced) if context.here else []
            if not slow:
                break
            apart.update(fusion.names for fusion in slow)
        else:
            changed, fusions = fuse(case.step, apart)
        if not fusions and not apart:
            return
        names = sorted(tuple(sorted(group)) for group in apart)
        option = StepOption(
            name=FUSED, settings={str(number): group for number, group in enumerate(names)},
            told=partial(_told, names), made=replace(case, step=changed),
        )  # fmt: skip
        yield StepChoice(site="", kind=KIND, baseline=ONE_BY_ONE, options=(option,), settled=True)

    def apply(self, case: Case, choice: StepChoice, option: StepOption) -> Case:
        """The step with its chains fused but for those that the settings leave apart."""
        apart = [option.setting(number, tuple) for number in option.settings]
        return replace(case, step=fuse(case.step, [frozenset(group) for group in apart])[0])


def _told(apart: Sequence[tuple[str, ...]], outcome: StepOutcome) -> Iterator[Decision]:
    """One decision for the kernels of every block that has any, and one for all chains that are none."""
    kernels = [
        (block.name, sum(isinstance(n.target, Fused) for n in (*block.forward, *block.backward)))
        for block in outcome.cut.blocks
    ]
    for site, count in kernels:
        if count:
            yield _decision(
                site,
                f"{count} kernel{'s' * (count > 1)}",
                Because("chains measured to be faster as one kernel each"),
                {},
            )
    if apart:
        settings = {str(number): names for number, names in enumerate(apart)}
        yield _decision(
            KIND,
            f"{len(apart)} chain{'s' * (len(apart) > 1)} one by one",
            Because("measured to be no slower apart"),
            settings,
        )


def _decision(site: str, option: str, why: Reason, settings: Mapping[str, Setting]) -> Decision:
    return Decision(
        site=site, kind=KIND, option=option, baseline=ONE_BY_ONE, by=Pointwise.name, cost=Cost(),
        baseline_cost=Cost(), why=why, settings=settings,
    )  # fmt: skip


def fuse(step: Step, refused: Collection[frozenset[str]] = ()) -> tuple[Step, tuple[Fusion, ...]]:
    """A copy of the step with its chains fused, and what was fused.

    A kernel has nodes of one block, all of the forward or all of the backward, on tensors of one size.
    Kernels of the backward make values of the forward's chains again inside, where fewer bytes then go from
    forward to backward (see pointwise_cut.py); the forward computes no more what nobody reads. Random
    operators and what touches memory that is written in place stay as they are, in their order.

    Args:
        step: functional but for writes in place that stand in the right order.
        refused: sets of node names that are not to be one kernel.
    """
    step, nodes = copied(step)
    old = {copy: node for node, copy in nodes.items()}
    graph = step.graph
    order, unread = lasting_order(graph), {node for node in graph.nodes if not node.users}
    fusions: list[Fusion] = []

    def fused(groups: Iterable[Sequence[fx.Node]], again: Collection[fx.Node]) -> None:
        fusions.extend(
            Fusion(node=replace_group(graph, g, again), members=tuple(old[node] for node in g))
            for g in groups
        )
        _remove_unread(graph, unread)
        sort(graph, order)

    forward, backward = split(step)
    allowed = _allowed(graph)
    groups = [g.nodes for g in _groups(graph, [n for n in backward if n in allowed], refused, loose=True)]
    again = absorbed(
        [(_block(g), g) for g in groups], allowed & set(forward), set(backward), step.forward_results
    )
    fused([g for g in groups if size_of(g, again) > 1], again)
    forward, _ = split(step)
    chains = _groups(graph, [n for n in forward if n in allowed], refused, loose=False)
    fused([g.nodes for g in chains if len(g.nodes) > 1], ())
    graph.lint()
    step.module.recompile()
    return step, tuple(fusions)


def _slow(fusions: Sequence[Fusion], price: Price) -> list[Fusion]:
    """Kernels that take as long as their operators."""
    compile_together([fusion.node.target for fusion in fusions])  # type: ignore[misc]
    # at once: before and after a measurement it is asked what the machine does
    found = iter(price([node for fusion in fusions for node in (fusion.node, *fusion.members)]))
    return [fusion for fusion in fusions if next(found) >= sum(islice(found, len(fusion.members)))]


def _allowed(graph: fx.Graph) -> set[fx.Node]:
    """Element-wise operators that touch no memory that is written in place."""
    changed = {target for targets in written(graph).values() for target in targets}
    return {
        n
        for n in graph.nodes
        if is_elementwise(n) and n not in changed and not any(base(a) in changed for a in n.all_input_nodes)
    }


def _remove_unread(graph: fx.Graph, before: Collection[fx.Node]) -> None:
    """Remove what has lost its last reader. Random operators stay: they move the generator on."""
    for node in reversed(list(graph.nodes)):
        if (
            node.op == "call_function"
            and not node.users
            and node not in before
            and not is_random(node.target)
        ):
            graph.erase_node(node)


@dataclass(eq=False)
class _Group:
    """Nodes that will be one kernel. `block`: "" while none of them says. `size`: elements of its results."""

    block: str
    size: int
    nodes: list[fx.Node] = field(default_factory=list)


def _block(nodes: Sequence[fx.Node]) -> str:
    return next((name for name in map(block_of, nodes) if name), "")


def _groups(
    graph: fx.Graph, candidates: Sequence[fx.Node], refused: Collection[frozenset[str]], *, loose: bool
) -> list[_Group]:
    """Groups of the candidates (in graph order), each joined with those whose results it reads where it may
    be.

    loose: nodes of no block may join any one; else they only join each other.
    """
    reach, of = Reach(graph), dict[fx.Node, _Group]()
    for node in candidates:
        of[node] = _Group(block=block_of(node), size=elements(node), nodes=[node])
        for source in dict.fromkeys(link(arg) for arg in node.all_input_nodes):
            first, second = of.get(source), of[node]
            if first is None or first is second or not _fit(first, second, loose):
                continue
            if reach.join(with_views([*first.nodes, *second.nodes])):
                position = reach.position.__getitem__
                both = sorted([*first.nodes, *second.nodes], key=position)
                joined = _Group(block=first.block or second.block, size=second.size, nodes=both)
                of.update(dict.fromkeys(both, joined))
    groups = list(dict.fromkeys(of.values()))
    return [group for group in groups if frozenset(n.name for n in group.nodes) not in refused]


def _fit(first: _Group, second: _Group, loose: bool) -> bool:
    """Whether a group may be one with another that reads it."""
    if len(first.nodes) + len(second.nodes) > _LARGEST:
        return False
    if first.nodes[0].meta["val"].device != second.nodes[0].meta["val"].device:
        return False
    if first.block != second.block and not (loose and "" in (first.block, second.block)):
        return False
    inside = {*first.nodes, *second.nodes}
    if all(map(is_sum, inside)):  # all terms of one sum would be alive at once, and little is gained
        return False
    if first.size == second.size:
        return True
    broadcast = first.size < second.size and all(
        reader in inside for node in first.nodes for reader in readers(node)
    )
    return broadcast and all(is_cheap(node) for node in first.nodes)
