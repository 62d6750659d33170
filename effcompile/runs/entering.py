"""A stage is entered: its fields change the model, the optimizer follows, and what holds for the stage
begins.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

from torch import nn
from torch.optim import Optimizer

from effcompile.core.types import Example
from effcompile.runs.carry import States, group_names, load_states, moved_states, names_of, of_changed
from effcompile.runs.fields import FIELDS, Effect, Graph
from effcompile.runs.layers import Forwards, skipping
from effcompile.runs.stage import Stage


@dataclass(kw_only=True)
class Entered:
    """A model in the form of a stage.

    Attributes:
        optimizer: of its parameters. states: that were carried to it, by parameter. taken_up: whether it has
            them already.
        layers: qualified name of the list of layers, "" where no field needs it.
    """

    model: nn.Module
    stage: Stage
    number: int
    optimizer: Optimizer
    states: States
    effects: list[Effect]
    layers: str
    taken_up: bool = False
    skipped: dict[Graph, Forwards] = field(default_factory=dict)

    def begin(self) -> None:
        """What holds for the stage begins; where it moves the optimizer's states itself, the optimizer takes
        them up first.
        """
        if any(effect.moves_states for effect in self.effects) and self.states:
            self.take_up(self.optimizer)
        for effect in self.effects:
            effect.begin(self.model, self.optimizer)

    def take_up(self, optimizer: Optimizer) -> None:
        """Give an optimizer of these parameters the states, if it does not have them."""
        if self.states and not (self.taken_up and optimizer is self.optimizer):
            load_states(optimizer, names_of(self.model), self.states, self.number)
            self.taken_up = optimizer is self.optimizer

    def end(self) -> None:
        for effect in self.effects:
            effect.end()

    @property
    def notes(self) -> list[str]:
        return [note for effect in self.effects for note in effect.notes]

    @property
    def passes(self) -> list[str]:
        """The stage's own, and those of its fields."""
        # what is carried on has its weights
        added = [item for effect in self.effects for item in effect.passes] + ["no-frozen"]
        if len(self.graphs) > 1:
            added.append("states.in_backward=false")
        return [*(self.stage.passes or ()), *added]

    @property
    def graphs(self) -> tuple[Graph, ...]:
        """The graphs that its steps run by turns; the first has all layers."""
        found = tuple(graph for effect in self.effects for graph in effect.graphs(self.model))
        return found or (Graph(named="", share=1.0),)

    @property
    def bytes_beside(self) -> int:
        return sum(effect.bytes_beside(self.model) for effect in self.effects)

    @contextmanager
    def around(self, graph: Graph) -> Iterator[None]:
        """While it lasts, the model runs this graph."""
        with ExitStack() as stack:
            for effect in self.effects:
                stack.enter_context(effect.around(self.model))
            stack.enter_context(self._skipping(graph))
            yield

    def _skipping(self, graph: Graph) -> Forwards:
        """The same for a graph each time: what is planned has the forwards of its modules among
        its guards.
        """
        if graph not in self.skipped:
            layers = list(self.model.get_submodule(self.layers).children()) if graph.dropped else []
            self.skipped[graph] = skipping(layers, graph.dropped)
        return self.skipped[graph]


def enter(
    model: nn.Module,
    optimizer: Optimizer,
    states: States,
    stage: Stage,
    number: int,
    layers: str,
    example: Example,
) -> Entered:
    """Bring a model into the form of a stage, in place, and the optimizer and its states with it.

    Raises:
        UsageError: what a field asks for cannot be had of this model.
    """
    effects = [
        field(stage=stage, first=number == 0, layers=layers)
        for name, field in FIELDS.items()
        if getattr(stage, name) is not None
    ]
    groups, shapes = (
        group_names(optimizer, names_of(model)),
        {name: p.shape for name, p in model.named_parameters()},
    )
    before = [id(p) for p in model.parameters()]
    origins = {name: origin for effect in effects for name, origin in effect.change(model, example).items()}
    rates = {name: factor for effect in effects for name, factor in effect.rates(model).items()}
    if before != [id(p) for p in model.parameters()] or rates:
        optimizer = of_changed(optimizer, groups, model, origins, rates)
        states = moved_states(states, origins, dict(model.named_parameters()), shapes)
    return Entered(
        model=model,
        stage=stage,
        number=number,
        optimizer=optimizer,
        states=states,
        effects=effects,
        layers=layers,
    )
