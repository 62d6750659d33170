"""The forward of a training step as torch.export gave it, kept for further captures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor, fx, nn

from effcompile.capture.config_reads import ConfigReads
from effcompile.capture.known_values import Fixed
from effcompile.capture.memory import CalledAlone, Uncalled
from effcompile.capture.training_outputs import OutputLayout


@dataclass(slots=True, kw_only=True)
class Exported:
    """The forward as torch.export gave it, for further captures of the same model with the same inputs,
    edited otherwise.

    front: unedited; None before the first capture, and where a later one has to trace anew. layout: what the
    forward returned. configurations: what of the model's configurations was read while it was traced.
    knowing: it is traced with what is known of the inputs' values; fixed: those that it holds for alone.
    left: attributes that the forward changes and does not depend on. loss: the model's own at these inputs,
    where it was called for that (memory.CalledAlone).
    patient: whoever asked for it runs the model's own step, or has the forward called alone: `uncalled`,
    until then.
    """

    front: fx.GraphModule | None = None
    layout: OutputLayout | None = None
    configurations: ConfigReads = field(default_factory=ConfigReads)
    knowing: bool = False
    fixed: Fixed = field(default_factory=Fixed)
    left: frozenset[str] = frozenset()
    loss: Tensor | None = None
    patient: bool = False
    uncalled: Uncalled | None = None

    def call(self, model: nn.Module, ask: Callable[[], CalledAlone]) -> None:
        """Have the model called alone (`ask`), now or where its own step does not tell what that would."""
        if self.patient:
            self.uncalled = Uncalled(model=model, ask=ask, told=[self.called])
        else:
            self.called(ask())

    def follow(self, leave: Callable[[frozenset[str]], None]) -> None:
        """`leave` is told what the forward leaves, now and once more where that is not known yet."""
        leave(self.left)
        if self.uncalled is not None:
            self.uncalled.told.append(lambda found: leave(found.left))

    def called(self, found: CalledAlone) -> None:
        """What calling the model itself told."""
        self.left, self.loss, self.uncalled = found.left, found.loss, None

    def keep(self, front: fx.GraphModule, layout: OutputLayout | None) -> None:
        """Graphs within the graph are changed in place on their way to autograd: such a forward
        is not kept.
        """
        if not any(isinstance(part, fx.GraphModule) for part in front.modules() if part is not front):
            self.front, self.layout = front, layout


def copied(front: fx.GraphModule) -> fx.GraphModule:
    """The same nodes in a graph of their own, with the same tensors, and what stands for parameters."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(front.graph, {}))
    made = fx.GraphModule(front, graph)
    made.meta = dict(front.meta)
    return made
