"""Ways to hold an optimizer's states and to make its update, priced: bytes beside the step, bytes while it
updates, seconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch.optim import Optimizer

from effcompile.core.errors import UsageError
from effcompile.core.reasons import Unsupported
from effcompile.estimate.optimizer import (
    StateBytes,
    measured_seconds,
    modelled_host_seconds,
    modelled_seconds,
    state_bytes,
)
from effcompile.ir.footprint import STATES, Footprint
from effcompile.ir.plan import Setting
from effcompile.ir.step import Step
from effcompile.machine.target import Target
from effcompile.ops.optimizers import CHANGES, EIGHT_BIT, GIVEN, Group, StatesForm, given_form, one_by_one

#: (qualified name, the optimizer's group, parameter).
Parameters = Sequence[tuple[str, Group, torch.Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class StatesOption:
    """One way to hold the states and to make the update.

    Attributes:
        form: the optimizer's. on_host: whether the states lie there. consumed: whether gradients are consumed
            in the backward.
        resident_bytes: of states, alive on the device at every instant of the step.
        working_bytes: beside them, at the highest instant of the optimizer's step.
        pieces: where gradients are consumed, parameter → bytes that its update allocates.
        host_bytes: in the host's memory. link_bytes: moved to and from it in a step.
        seconds: of the update. measured: they were, here.
    """

    form: StatesForm
    on_host: bool = False
    consumed: bool = False
    resident_bytes: int = 0
    working_bytes: int = 0
    pieces: Mapping[str, int] = field(default_factory=dict)
    host_bytes: int = 0
    link_bytes: int = 0
    seconds: float = 0.0
    measured: bool = False

    @property
    def label(self) -> str:
        """In the plan's words: "as given", "8-bit, on the host"."""
        name = {GIVEN: "as given", EIGHT_BIT: "8-bit"}.get(
            self.form.name, CHANGES.get(self.form.name, ("",))[0]
        )
        return f"{name}, on the host" if self.on_host else name

    @property
    def full_label(self) -> str:
        """States and gradients: "8-bit, on the host; gradients consumed in the backward"."""
        return self.label + ("; gradients consumed in the backward" if self.consumed else "")

    @property
    def settings(self) -> dict[str, Setting]:
        """What a plan's decision says of it."""
        return {"form": self.form.name, "on_host": self.on_host, "consumed": self.consumed}

    @property
    def footprint(self) -> Footprint:
        """What stands beside forward and backward."""
        resident = {STATES: self.resident_bytes} if self.resident_bytes else {}
        return Footprint(resident=resident, working=self.working_bytes, host=self.host_bytes)

    @property
    def changes_numbers(self) -> bool:
        """Whether training is another than the given optimizer's."""
        return self.form.name != GIVEN


class GivenOptimizer:
    """The user's optimizer, on a target: prices ways to hold its states; each form is looked at once."""

    def __init__(
        self, optimizer: Optimizer, mine: Parameters, target: Target, here: bool, *, on_ranks: bool = False
    ) -> None:
        """`mine`: its parameters of the model that get a gradient. `here`: the target is this machine.
        `on_ranks`: it runs as it was made, not by torch's fused kernels, and its update has tensors of its
        own.
        """
        self.optimizer, self.mine, self.target = optimizer, mine, target
        self.here, self.on_ranks = here, on_ranks
        self.count = sum(p.numel() for _, _, p in mine)
        self.bytes = sum(p.numel() * p.element_size() for _, _, p in mine)
        self.known: dict[tuple[StatesForm, str], StateBytes] = {}
        self.times: dict[StatesForm, float] = {}

    @classmethod
    def of(
        cls,
        optimizer: Optimizer,
        parameters: Iterable[tuple[str, torch.Tensor]],
        step: Step,
        target: Target,
        here: bool,
    ) -> GivenOptimizer:
        """The optimizer with those of the model's (qualified name, parameter) that the step makes gradients
        of: no others have states.

        Raises:
            UsageError: it has none of them.
        """
        names = {id(p): name for name, p in parameters if name in step.gradients}
        mine = [
            (names[id(p)], group, p)
            for group in optimizer.param_groups
            for p in group["params"]
            if id(p) in names
        ]
        if not mine:
            raise UsageError(
                "The optimizer has none of the model's trainable parameters. Make it of model.parameters()."
            )
        return cls(optimizer, mine, target, here)

    def resized(self, step: Step) -> GivenOptimizer:
        """The same of parameters as a step has them: one rank's part of each."""
        here = {name: node.meta["val"] for node, name in step.parameters.items()}
        mine = [
            (n, g, torch.empty(here[n].shape, dtype=p.dtype, device="meta") if n in here else p)
            for n, g, p in self.mine
        ]
        return GivenOptimizer(self.optimizer, mine, self.target, self.here, on_ranks=True)

    def of_parts(self, parts: Mapping[str, torch.Tensor]) -> GivenOptimizer:
        """The same of one rank's parameters, of shapes as given."""
        mine = [
            (n, g, torch.empty(parts[n].shape, dtype=p.dtype, device="meta"))
            for n, g, p in self.mine
            if n in parts
        ]
        return GivenOptimizer(self.optimizer, mine, self.target, self.here, on_ranks=True)

    @cached_property
    def given(self) -> StatesOption:
        """The optimizer as the user gave it."""
        fused = not self.on_ranks
        return self.way(given_form(self.optimizer, self.target.device) if fused else StatesForm())

    def way(self, form: StatesForm, *, on_host: bool = False, consumed: bool = False) -> StatesOption:
        """A way, priced."""
        taken = self._bytes_of(form, self.mine)
        copies = on_host and self.target.device != "cpu"
        return StatesOption(
            form=form,
            on_host=on_host,
            consumed=consumed,
            resident_bytes=0 if on_host else taken.state_bytes,
            working_bytes=0 if consumed else self._working(taken, on_host),
            pieces={
                name: self._working(self._bytes_of(form, [(name, g, p)]), on_host) for name, g, p in self.mine
            }
            if consumed
            else {},
            host_bytes=(taken.state_bytes + (self.bytes if copies else 0)) if on_host else 0,
            link_bytes=2 * self.bytes if copies else 0,
            seconds=self._seconds(form, taken, copies),
            measured=self.here and not copies,
        )

    def no_host(self) -> Unsupported | None:
        """Why its states cannot lie on the host; None where they can."""
        if (reason := one_by_one(self.optimizer)) is not None:
            return reason
        target = self.target
        if target.device != "cpu" and not target.link_bandwidth > 0:
            return Unsupported(
                "the link of the target {name} has {} B/s", (repr(target.name), target.link_bandwidth)
            )
        needed = self.way(self.given.form, on_host=True).host_bytes
        if target.host_memory_bytes is not None and needed > target.host_memory_bytes:
            return Unsupported(
                "needs {bytes} on the host, which has {bytes}", (needed, target.host_memory_bytes)
            )
        return None

    def _working(self, taken: StateBytes, on_host: bool) -> int:
        """On a CPU the states of the host's pool are made in torch's memory first, one
        parameter's at a time.
        """
        if not on_host:
            return taken.working_bytes
        return max(taken.working_bytes, taken.largest) if self.target.device == "cpu" else 0

    def _bytes_of(self, form: StatesForm, parameters: Parameters) -> StateBytes:
        """Of all parameters, or of one, which has the bytes of every other of its shape."""
        key = (
            ""
            if parameters is self.mine
            else f"{id(parameters[0][1])}{tuple(parameters[0][2].shape)}{parameters[0][2].dtype}"
        )
        if (form, key) not in self.known:
            self.known[form, key] = state_bytes(
                form, self.optimizer, [(g, p) for _, g, p in parameters], self.target.device
            )
        return self.known[form, key]

    def _seconds(self, form: StatesForm, taken: StateBytes, copies: bool) -> float:
        if not self.here or copies:
            link = 2 * self.bytes if copies else 0
            count = len(self.mine)
            return (
                modelled_host_seconds(taken, self.target, link, count)
                if copies
                else modelled_seconds(taken, self.target, count)
            )
        if form not in self.times:
            _, group, p = max(self.mine, key=lambda item: item[2].numel())
            self.times[form] = measured_seconds(
                form, self.optimizer, group, p, self.count, self.target.device
            )
        return self.times[form]
