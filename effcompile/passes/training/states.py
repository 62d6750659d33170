"""Optimizer states: as they are, in 8 bits, of another optimizer, on the host; gradients consumed in the backward.

Sources: 8-bit states: Dettmers et al. 2022 (arXiv 2110.02861), torchao. Host: ZeRO-Offload, Ren et al. 2021 (arXiv 2101.06840).
Lion: Chen et al. 2023 (arXiv 2302.06675). Each combination is one option of the whole step; the solver takes it together with
the activations' plan, so a byte that is freed in one place may be spent in the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch.optim import Optimizer

from effcompile.core.errors import EffcompileError, UsageError
from effcompile.core.goal import Goal
from effcompile.core.stages import first_line
from effcompile.core.units import format_bytes
from effcompile.estimate.optimizer import StateBytes, measured_seconds, modelled_host_seconds, modelled_seconds, state_bytes
from effcompile.ir.footprint import STATES, Footprint
from effcompile.ir.plan import Declined, Setting
from effcompile.ir.step import Step
from effcompile.machine.target import Target
from effcompile.ops.optimizers import CHANGES, CPU_PIECE, EIGHT_BIT, GIVEN, LION8, Form, Group, declined, given_form, one_by_one

SITE = "optimizer"
KIND = "optimizer states"

#: (qualified name, the optimizer's group, parameter).
Parameters = Sequence[tuple[str, Group, torch.Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class StatesOption:
    """One way to hold the states and to make the update.

    Attributes:
        form: the optimizer's. on_host: whether the states lie there. consumed: whether gradients are consumed in the backward.
        resident_bytes: of states, alive on the device at every instant of the step.
        working_bytes: beside them, at the highest instant of the optimizer's step.
        pieces: where gradients are consumed, parameter → bytes that its update allocates.
        host_bytes: in the host's memory. link_bytes: moved to and from it in a step.
        seconds: of the update. measured: they were, here.
    """

    form: Form
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
        name = {GIVEN: "as given", EIGHT_BIT: "8-bit"}.get(self.form.name, CHANGES.get(self.form.name, ("",))[0])
        return f"{name}, on the host" if self.on_host else name

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


@dataclass(frozen=True, slots=True, kw_only=True)
class States:
    """How optimizer states may be held, where an optimizer is given.

    `offload`: on the host, with the update there. `eight_bit`: in 8 bits; also proposed where the goal allows an error.
    `in_backward`: gradients may be consumed in the backward; only on demand, because a loop that clips, accumulates or reads
    gradients between `backward()` and `step()` would silently do something else. `change`: optimizers that may replace the
    given one: lion, lamb, lars, and lion8, which is Lion with its state in 8 bits.
    """

    offload: bool = True
    eight_bit: bool = False
    in_backward: bool = False
    change: tuple[str, ...] = ()

    name: ClassVar[str] = "states"
    exact: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for name in self.change:
            if name not in CHANGES:
                raise UsageError(f"states.change = {name!r} is not known. Choose among: {', '.join(CHANGES)}.")

    def options(
        self, step: Step, optimizer: Optimizer, parameters: Iterable[tuple[str, torch.Tensor]], goal: Goal, target: Target, here: bool
    ) -> tuple[tuple[StatesOption, ...], tuple[Declined, ...]]:
        """Every allowed way, the given one first, and what cannot be, with reasons.

        Args:
            step: captured; parameters without a gradient in it have no states.
            optimizer: the user's.
            parameters: (qualified name, parameter) of the model.
            goal: whether an error is allowed.
            target: prices what is not measured.
            here: it is this machine.
        """
        names = {id(p): name for name, p in parameters if name in step.gradients}
        mine = [(names[id(p)], group, p) for group in optimizer.param_groups for p in group["params"] if id(p) in names]
        if not mine:
            raise UsageError("The optimizer has none of the model's trainable parameters. Make it of model.parameters().")
        try:
            return self._priced(optimizer, _Pricer(optimizer, mine, target, here), goal, target)
        except EffcompileError:
            raise
        except Exception as error:  # an optimizer of any kind, run on parameters like the model's with dense gradients
            raise UsageError(
                f"{type(optimizer).__name__} cannot be planned: its step raises on parameters like the model's with dense gradients: "
                f"{first_line(error)}. Leave the optimizer out, and count its states in `memory` yourself."
            ) from error

    def _priced(
        self, optimizer: Optimizer, price: _Pricer, goal: Goal, target: Target
    ) -> tuple[tuple[StatesOption, ...], tuple[Declined, ...]]:
        """`options` of an optimizer that has parameters of the model's."""
        forms, refused = self._forms(optimizer, goal, target.device)
        found = [price(form, on_host=False) for form in forms]
        reason = self._no_host(optimizer, price, target, forms[0])
        if reason is None:
            found += [price(form, on_host=True) for form in forms]
        else:
            refused.append(Declined(site=SITE, kind=KIND, option="on the host", by=self.name, reason=reason))
        consumed = [price(o.form, on_host=o.on_host, consumed=True) for o in found] if self._consumes(optimizer, refused) else []
        return (*found, *consumed), tuple(refused)

    def _forms(self, optimizer: Optimizer, goal: Goal, device: str) -> tuple[list[Form], list[Declined]]:
        forms, refused = [given_form(optimizer, device)], []
        wanted = dict.fromkeys(self.change, "")
        piece = CPU_PIECE if device == "cpu" else 0
        allowed = self.eight_bit or not goal.exact
        wanted = {EIGHT_BIT: "" if allowed else "changes numbers: allow it with max_error or --pass states.eight_bit=true", **wanted}
        for name, reason in wanted.items():
            reason = reason or declined(name, optimizer) or ""
            if reason:
                refused.append(Declined(site=SITE, kind=KIND, option=name, by=self.name, reason=reason))
            else:
                forms.append(Form(name, False, piece if name in (EIGHT_BIT, LION8) else 0))
        return forms, refused

    def _no_host(self, optimizer: Optimizer, price: _Pricer, target: Target, form: Form) -> str | None:
        if not self.offload:
            return "--pass states.offload=false"
        if (reason := one_by_one(optimizer)) is not None:
            return reason
        if target.device != "cpu" and not target.link_bandwidth > 0:
            return f"the link of the target {target.name!r} has {target.link_bandwidth:g} B/s"
        needed = price(form, on_host=True).host_bytes
        if target.host_memory_bytes is not None and needed > target.host_memory_bytes:
            return f"needs {format_bytes(needed)} on the host, which has {format_bytes(target.host_memory_bytes)}"
        return None

    def _consumes(self, optimizer: Optimizer, refused: list[Declined]) -> bool:
        reason = (
            one_by_one(optimizer)
            if self.in_backward
            else "a loop that clips or accumulates gradients would change: allow it with --pass states.in_backward=true"
        )
        if reason is not None:
            refused.append(Declined(site=SITE, kind=KIND, option="gradients consumed in the backward", by=self.name, reason=reason))
        return reason is None


class _Pricer:
    """Prices ways to hold the states of one optimizer; each form is looked at once."""

    def __init__(self, optimizer: Optimizer, mine: Parameters, target: Target, here: bool) -> None:
        self.optimizer, self.mine, self.target = optimizer, mine, target
        self.here = here and target.device == "cpu"
        self.count = sum(p.numel() for _, _, p in mine)
        self.bytes = sum(p.numel() * p.element_size() for _, _, p in mine)
        self.known: dict[tuple[Form, str], StateBytes] = {}
        self.times: dict[Form, float] = {}

    def __call__(self, form: Form, *, on_host: bool, consumed: bool = False) -> StatesOption:
        taken = self._bytes_of(form, self.mine)
        copies = on_host and self.target.device != "cpu"
        return StatesOption(
            form=form,
            on_host=on_host,
            consumed=consumed,
            resident_bytes=0 if on_host else taken.state_bytes,
            working_bytes=0 if consumed else self._working(taken, on_host),
            pieces={name: self._working(self._bytes_of(form, [(name, g, p)]), on_host) for name, g, p in self.mine} if consumed else {},
            host_bytes=(taken.state_bytes + (self.bytes if copies else 0)) if on_host else 0,
            link_bytes=2 * self.bytes if copies else 0,
            seconds=self._seconds(form, taken, copies),
            measured=self.here,
        )

    def _working(self, taken: StateBytes, on_host: bool) -> int:
        """On a CPU the states of the host's pool are made in torch's memory first, one parameter's at a time."""
        if not on_host:
            return taken.working_bytes
        return max(taken.working_bytes, taken.largest) if self.target.device == "cpu" else 0

    def _bytes_of(self, form: Form, parameters: Parameters) -> StateBytes:
        """Of all parameters, or of one, which has the bytes of every other of its shape."""
        key = "" if parameters is self.mine else f"{id(parameters[0][1])}{tuple(parameters[0][2].shape)}{parameters[0][2].dtype}"
        if (form, key) not in self.known:
            self.known[form, key] = state_bytes(form, self.optimizer, [(g, p) for _, g, p in parameters], self.target.device)
        return self.known[form, key]

    def _seconds(self, form: Form, taken: StateBytes, copies: bool) -> float:
        if not self.here:
            link = 2 * self.bytes if copies else 0
            count = len(self.mine)
            return modelled_host_seconds(taken, self.target, link, count) if copies else modelled_seconds(taken, self.target, count)
        if form not in self.times:
            _, group, p = max(self.mine, key=lambda item: item[2].numel())
            self.times[form] = measured_seconds(form, self.optimizer, group, p, self.count)
        return self.times[form]
