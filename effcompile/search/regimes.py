"""Which formats of activations a backend may choose together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

from effcompile.estimate.planned_buffers import planned_bytes
from effcompile.estimate.timeline import timeline
from effcompile.ir.program import Program, stored_bytes
from effcompile.passes import Choice, Pass
from effcompile.search.refine import Constraints

#: The backends whose graphs write where they read what they go on from.
IN_PLACE = ("torch-eager", "triton")
#: Type of device → those of them whose attentions read a narrower cache there.
NARROW = {"cpu": IN_PLACE, "cuda": ("triton",)}
#: Those whose runtimes plan buffers before they run.
_PLANNING = ("onnxruntime",)
#: The regime of a model that is called once.
CALL = "call"
#: Those that keep what follows from the sizes of a call, without a limit of memory on a CPU (of_sizes.py).
KEEPING = ("torch-eager",)
#: What the first solve holds to beyond the goal: nothing.
FREE = Constraints()


@dataclass(frozen=True, kw_only=True)
class Regime:
    """One way in which a model is called: its graph at these sizes, and how often.

    graph: of one graph an option is one choice in all its regimes. passes: that decide about it; None: the
    search's. beside: seconds of a call that are no operator's.
    """

    name: str
    program: Program
    calls: float = 1
    graph: str = ""
    passes: tuple[Pass, ...] | None = None
    beside: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Regimes:
    """How a model is called, and what memory has to hold for it.

    weight_bytes: there throughout. kept_bytes: beside them at the highest instant. copied_bytes: says of
    those what a runtime that copies what it is given to go on from holds once more; asked for such a one
    alone. planned_bytes: in the place of kept_bytes where a runtime plans its buffers; asked for such a one
    alone. own_seconds, own_bytes: of what runs as it stands in the model, once, and its weights, which are in
    weight_bytes.
    """

    each: tuple[Regime, ...]
    weight_bytes: int
    kept_bytes: int
    copied_bytes: Callable[[], int] = int
    planned_bytes: Callable[[], int] = int
    own_seconds: float = 0.0
    own_bytes: int = 0

    @classmethod
    def of_call(cls, program: Program) -> Regimes:
        """One call at the example inputs."""
        memory = timeline(program)
        kept = memory.activation_bytes + memory.input_bytes
        return cls(
            each=(Regime(name=CALL, program=program),),
            weight_bytes=memory.weight_bytes,
            kept_bytes=kept,
            planned_bytes=cache(partial(planned_bytes, program)),
        )

    @property
    def stored_bytes(self) -> int:
        """Of weights alone, without constants of the graphs."""
        return stored_bytes(*(regime.program.module for regime in self.each)) + self.own_bytes

    def elsewhere(self, regime: Regime) -> dict[int, bool]:
        """Storages of tensors that other graphs read → whether one of them comes before."""
        found: dict[int, bool] = {}
        graphs = list(dict.fromkeys(each.graph for each in self.each))
        for other in self.each:
            for node in other.program.graph.find_nodes(op="get_attr") if other.graph != regime.graph else ():
                if (tensor := other.program.tensor(node)) is not None:
                    before = graphs.index(other.graph) < graphs.index(regime.graph)
                    storage = tensor.untyped_storage()._cdata
                    found[storage] = found.get(storage, False) or before
        return found

    def kept(self, backend: str) -> int:
        """Bytes beside the weights at the highest instant on a backend."""
        if backend in _PLANNING and (planned := self.planned_bytes()):
            return planned
        return self.kept_bytes + (0 if backend in IN_PLACE else self.copied_bytes())


def merged(regimes: Sequence[Regime], made: Sequence[Sequence[Choice]]) -> Iterator[Choice]:
    """Choices of all regimes of a graph as one: an option's seconds are those of all its calls.

    What one regime does not offer is offered by none.
    """
    for graph in dict.fromkeys(regime.graph for regime in regimes):
        places = [at for at, regime in enumerate(regimes) if regime.graph == graph]
        yield from _of_one_graph([regimes[at] for at in places], [made[at] for at in places])


def _of_one_graph(regimes: Sequence[Regime], made: Sequence[Sequence[Choice]]) -> Iterator[Choice]:
    first, *others = ({choice.site: choice for choice in of_regime} for of_regime in made)
    for site, choice in first.items():
        twins = [choice, *(of_regime[site] for of_regime in others if site in of_regime)]
        if len(twins) < len(regimes):
            continue
        options = []
        for option in choice.options:
            same = [other for twin in twins for other in twin.options if other.name == option.name]
            if len(same) == len(regimes):
                costs = [(regime.calls, other.cost) for regime, other in zip(regimes, same, strict=True)]
                seconds, roof = (
                    sum(calls * cost.seconds for calls, cost in costs),
                    sum(calls * cost.roof_seconds for calls, cost in costs),
                )
                options.append(replace(option, cost=replace(option.cost, seconds=seconds, roof_seconds=roof)))
        if any(option.name == choice.baseline for option in options):
            yield replace(choice, options=tuple(options))
