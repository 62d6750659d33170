"""What was decided about a step is kept: the same question asked once more is answered by the same plan.

It is carried out, simulated, verified and measured as it was the first time.

A plan is known by the hash of all that it follows from, but for prices: the captured graph, what is asked,
the machine with torch's settings, versions, and all code of ours. Beside it stands what was asked of each
operator's price; it holds where each is known today, is not doubted, and is what it was. Only plans of exact
steps without an optimizer are kept, by our own passes: nothing else that these decide by is a number of a
run, or of a file of somebody's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import replace
from datetime import date
from pathlib import Path

import msgspec
from torch import Tensor, fx, nn

from effcompile.core import effort
from effcompile.core.files import cache_folder
from effcompile.core.installed import versions
from effcompile.core.kept_json import recalled, remember
from effcompile.core.reasons import Because
from effcompile.estimate.operators import described
from effcompile.ir import content
from effcompile.ir.plan import Plan, as_reason
from effcompile.ir.sane import objection
from effcompile.passes import TRAINING_PASSES, registered_for_training
from effcompile.passes.training.base import Case
from effcompile.proof.training.agreed import computing_settings, own_code
from effcompile.search.request import Request
from effcompile.search.training.operator_costs import OperatorCosts
from effcompile.search.training.work import Work

#: Nodes of a graph from which on its plan is worth a file: a smaller one is planned within a second.
LEAST_NODES = 500
#: Files that are kept, and bytes of one.
_MOST_FILES, _MOST_BYTES = 64, 64 << 20
_AGAIN = "not solved again: decided on {name} for the same step, by the same prices, limits and code"
#: What capture notes of a node's module, by which blocks are told.
_STACKS = ("nn_module_stack", "fwd_nn_module_stack")


class KeptPlan(msgspec.Struct, kw_only=True, frozen=True):
    """A plan as it was decided, without what a run found.

    Attributes:
        prices: the operators whose prices it follows from, and priced: the hash of these.
    """

    plan: Plan
    day: str
    prices: list[str]
    priced: str


def place_of(work: Work, case: Case, request: Request) -> Path | None:
    """The file of a question; None where its answer is not kept."""
    figures = work.figures
    if (
        work.optimizer is not None or not work.goal.exact or figures.target.device != "cpu"
        or figures.store is None or work.passes.levers.values or request.mesh is not None
        or len(case.step.graph.nodes) < LEAST_NODES
        or registered_for_training().keys() != TRAINING_PASSES.keys()
    ):  # fmt: skip
        return None
    follows = hashlib.sha256(
        repr((_asked(request), _machine(figures), computing_settings(), own_code())).encode()
    )
    try:
        for part in _followed(work.model, case):
            content.add(follows, part)
    except content.UNREADABLE:
        return None
    return cache_folder() / "plans" / f"{follows.hexdigest()}.json"


def known_plan(place: Path, figures: OperatorCosts) -> Plan | None:
    """What was decided, said to be of that day; None where prices are others today, or are to be taken
    anew.
    """
    kept: KeptPlan | None = recalled(place, KeptPlan, _MOST_BYTES, "a kept plan", as_reason)
    if kept is None or objection(kept.plan) is not None or not figures.doubted.isdisjoint(kept.prices):
        return None
    if _priced(kept.prices, figures) != kept.priced:
        return None
    figures.asked.update(kept.prices)
    return replace(kept.plan, notes=(*kept.plan.notes, Because(_AGAIN, (kept.day,))))


def keep_plan(place: Path, figures: OperatorCosts, plan: Plan) -> None:
    """Keep what was decided, unless by prices of a machine that others used."""
    prices = sorted(figures.asked)
    if not any(found.busy for name in prices if (found := figures.known.get(name)) is not None):
        day = date.today().isoformat()
        kept = KeptPlan(plan=plan.unmeasured, day=day, prices=prices, priced=_priced(prices, figures))
        remember(place, kept, _MOST_FILES)


def _priced(names: Iterable[str], figures: OperatorCosts) -> str:
    """What is known of operators; of one that cannot be run alone, nothing."""
    return hashlib.sha256(repr([(name, figures.known.get(name)) for name in names]).encode()).hexdigest()


def _asked(request: Request) -> tuple[object, ...]:
    """What is asked of the planner; the loss stands in the graph."""
    passes = None if request.passes is None else tuple(request.passes)
    return request.goal, passes, request.keep_outputs, effort.is_low(), effort.is_high()


def _machine(figures: OperatorCosts) -> tuple[object, ...]:
    """What prices and limits of a step read of the machine, beside its operators' times."""
    store, target = figures.store, figures.target
    assert store is not None, "what is planned for here has one"
    return (
        store.machine, store.date, store.memory_bandwidth, sorted(store.peak_flops.items()), figures.cold,
        target.memory_bytes, target.library_bytes, target.link_bandwidth, sorted(versions().items()),
    )  # fmt: skip


def _followed(model: nn.Module, case: Case) -> Iterator[object]:
    """A step's graph, and the forward that it was traced through; the roles of what enters and leaves it, its
    bytes beside, and all values that a pass may read: of masks, say.
    """
    step = case.step
    yield from _of_graph(step.graph)
    yield from [] if case.front is None else _of_graph(case.front.graph)
    for name, buffer in model.named_buffers():
        yield name
        yield buffer
    for node, enters in step.roles.entering.items():
        yield node.name, enters.role.name, enters.name
        yield enters.value
    yield [(leaves.role.name, leaves.name) for leaves in step.roles.leaving]
    yield step.name, step.resident_bytes, step.copied_bytes, step.consumed, sorted(step.dropped.items())


def _of_graph(graph: fx.Graph) -> Iterator[object]:
    """Every node with its arguments, what its value looks like, and the modules that made it.

    torch's number of it in autograd's sequence counts all that the process did before.
    """
    for node, line in content.lines(graph):
        modules = [[entry[0] for entry in node.meta.get(name, {}).values()] for name in _STACKS]
        yield line, described(node), modules
        if node.op == "get_attr":
            yield from _attribute(graph, str(node.target))


def _attribute(graph: fx.Graph, name: str) -> Iterator[object]:
    """What a graph reads of its module: a tensor by its bytes, and no weight; another graph (what runs within
    `no_grad`, say) by what is in it.

    Raises:
        TypeError: it is neither.
    """
    found: object = graph.owning_module
    for part in name.split("."):
        found = getattr(found, part)
    if isinstance(found, fx.GraphModule):
        yield from _of_graph(found.graph)
    elif isinstance(found, Tensor):
        yield None if isinstance(found, nn.Parameter) else found
    else:
        raise TypeError(f"{name} is neither a tensor nor a graph")
