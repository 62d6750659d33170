"""The optimizer as planned: the user's parameter groups, with states in another form, on the host, or updated
in the backward.

A plain loop works: `loss.backward(); optimizer.step(); optimizer.zero_grad()`. Learning rates are read from
`param_groups` at every step. Each parameter has an inner optimizer of its own, so that it can be updated as
soon as its gradient is there.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from effcompile.backends.torch.consumed_gradient import ConsumedGradient
from effcompile.backends.torch.host import host_copies, rest
from effcompile.core.errors import FormatError, InputsError, UsageError
from effcompile.ops.one_by_one import OneByOne
from effcompile.ops.optimizers import (
    EIGHT_BIT,
    GIVEN,
    Group,
    StatesForm,
    build,
    check_groups,
    keep_counted,
    numbers_of,
    pieces,
    update_options,
)
from effcompile.ops.saved_states import check_state, parts_of
from effcompile.ops.states8 import step8


class PlannedOptimizer(OneByOne):
    """An optimizer of the given one's groups. Its state_dict is the given one's where states are in its form.

    Attributes:
        form: of the inner optimizers. on_host: whether states lie in the host's memory. by_name: the model's
            parameters that it has.
    """

    def __init__(self, given: Optimizer, form: StatesForm, *, on_host: bool, names: Mapping[int, str]):
        """Args: `names`: id of a parameter → its qualified name."""
        self._given, self.form, self.on_host = given, form, on_host
        super().__init__(given.param_groups, dict(given.defaults))
        self.param_groups = given.param_groups  # a scheduler may have been made of the given one before
        self._workers: dict[int, Worker] = {}
        self.by_name = {
            names[id(p)]: p for group in self.param_groups for p in group["params"] if id(p) in names
        }
        # as they stand when the backward begins: they may be moved, and loading replaces them
        self._group_of: dict[int, Group] = {}
        self._consumed: set[str] = set()
        self._counted: dict[int, dict[str, float]] = {}  # id of a group → since the last step
        self._options: list[dict[str, object]] = []  # of all groups, as the backward read them

    def step(self, closure: Callable[[], object] | None = None) -> Any:
        """Update all parameters that have a gradient; those that the backward has updated have none any more.

        Raises:
            InputsError: a learning rate or another option was changed since the backward, which has used it;
                an option was set that the planned form does not have. UsageError: the given one has states.
        """
        if any(self._given.state.values()):
            raise UsageError(
                f"The {type(self._given).__name__} that was given has states (written into its `state`), "
                "but this plan's optimizer has its own. Load them into the planned model's `optimizer`, and "
                "clear `state` of the given one."
            )
        loss = None if closure is None else torch.enable_grad()(closure)()
        check_groups(self.form, self._given, self.param_groups)
        for name in self._consumed:
            self.by_name[name].grad = None
        super().step()
        changed = self._changed() if self._consumed else None
        for group in self.param_groups:
            keep_counted(self.form, group, self._counted.get(id(group), {}))
        self._counted.clear()
        self._options = []
        self._consumed.clear()
        if changed is not None:
            raise InputsError(
                f"{changed} was changed between the backward and optimizer.step(), but this plan consumes "
                "gradients in the backward, which has updated the parameters by what it was. Change it "
                "before the backward, or plan with --pass states.in_backward=false."
            )
        return loss

    def _changed(self) -> str | None:
        """An option that is another one than the backward read; groups that came since were not read."""
        both = zip(self._options, self._plain_options(), strict=False)
        return next((name for a, b in both for name in a if a[name] != b.get(name)), None)

    def _plain_options(self) -> list[dict[str, object]]:
        return [
            {name: _plain(value) for name, value in group.items() if name != "params"}
            for group in self.param_groups
        ]

    @torch.no_grad()
    def consume(self, name: str, gradient: torch.Tensor) -> None:
        """Update one parameter within the backward.

        Raises:
            InputsError: it was updated already since the last step, or is in none of the groups any more; an
                option was set that the planned form does not have.
        """
        if name in self._consumed:
            raise InputsError(
                f"A second backward came before optimizer.step(): {name} was updated by the first one "
                "already, as this plan consumes gradients in the backward. Call step() after every "
                "backward, or plan with --pass states.in_backward=false to accumulate."
            )
        if not self._consumed:
            check_groups(self.form, self._given, self.param_groups)
            self._options = self._plain_options()
            self._group_of = {id(p): group for group in self.param_groups for p in group["params"]}
        parameter = self.by_name[name]
        if (group := self._group_of.get(id(parameter))) is None:
            raise InputsError(
                f"{name} is in none of the optimizer's groups any more, and this plan's backward hands its "
                "gradient to the optimizer at once. Put it back, or plan again without it (or with --pass "
                "states.in_backward=false)."
            )
        if parameter.grad is not None and not isinstance(parameter.grad, ConsumedGradient):
            gradient = gradient + parameter.grad  # the user's own, or of a loss beside: a backward adds to it
        self._consumed.add(name)
        self.update(parameter, gradient, group)
        parameter.grad = ConsumedGradient.of(parameter, name)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take up what `state_dict` returned.

        Raises:
            FormatError: states of another form, or of other parameters.
        """
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        parameters = [(p, group) for group in self.param_groups for p in group["params"]]
        if len(numbers) != len(parameters):
            raise FormatError(f"The state has {len(numbers)} parameters, this optimizer {len(parameters)}.")
        for number, (parameter, _) in zip(numbers, parameters, strict=True):  # before anything is replaced
            check_state(self.form, type(self._given), parameter, state_dict["state"].get(number))
        super().load_state_dict({"state": {}, "param_groups": state_dict["param_groups"]})
        self._given.param_groups = self.param_groups
        self._workers.clear()
        self._counted.clear()
        for number, (parameter, group) in zip(numbers, parameters, strict=True):
            if number in state_dict["state"]:
                self.state[parameter] = self._worker(parameter, group).load(state_dict["state"][number])

    def update(self, parameter: torch.Tensor, gradient: torch.Tensor, group: Group) -> None:
        worker = self._worker(parameter, group)
        # each counts from what the group says, which is written when all are done
        self._counted.setdefault(id(group), {}).update(worker.step(gradient, group))
        self.state[parameter] = worker.state

    def _worker(self, parameter: torch.Tensor, group: Group) -> Worker:
        """Who updates it, with the states that stand in `state` now: they may be cleared, or others be put
        there.
        """
        known = self.state.get(parameter)
        worker = self._workers.get(id(parameter))
        if worker is None or not worker.has(known):
            self._workers[id(parameter)] = worker = Worker(
                parameter, group, self._given, self.form, self.on_host
            )
            if known:
                self.state[parameter] = worker.load(known)
        return worker


class Worker:
    """Updates one parameter: as it is, in pieces, or by a copy on the host where the parameter is on another
    device.
    """

    def __init__(
        self, parameter: torch.Tensor, group: Group, given: Optimizer, form: StatesForm, on_host: bool
    ) -> None:
        self.parameter, self.form, self.on_host = parameter, form, on_host
        self.apart = on_host and parameter.device.type != "cpu"
        self.master = host_copies([parameter.detach()])[0] if self.apart else None
        self.version = parameter._version
        self.leaves = [nn.Parameter(piece) for piece in pieces(form, self._values())]
        self.inner = build(form, given, group, self.leaves)
        self.adopted = False
        self.held: list[torch.Tensor] = []  # of the states, in the host's memory

    @property
    def state(self) -> dict[str, Any]:
        """The parameter's states; those of pieces by number."""
        found = [self.inner.state[leaf] for leaf in self.leaves]
        return found[0] if len(found) == 1 else {f"piece {i}": state for i, state in enumerate(found)}

    def has(self, state: Mapping[str, Any] | None) -> bool:
        """Whether these are its own states."""
        if state is None:
            return False
        found = parts_of(state, len(self.leaves))
        return all(one is self.inner.state.get(leaf) for one, leaf in zip(found, self.leaves, strict=True))

    def step(self, gradient: torch.Tensor, group: Group) -> dict[str, float]:
        """Update the parameter; returns what the inner optimizer has counted in its group."""
        update_options(self.inner, self.form, group)
        before = numbers_of(self.inner)
        if self.master is not None and self.parameter._version != self.version:
            # loaded, or otherwise changed, since
            self.master.copy_(self.parameter)
        gradients = pieces(self.form, gradient.contiguous() if self.form.piece else gradient)
        moved = [host_copies([g])[0] for g in gradients] if self.apart else gradients
        for leaf, piece, g in zip(self.leaves, pieces(self.form, self._values()), moved, strict=True):
            leaf.data, leaf.grad = piece, g
        if self.form.name != EIGHT_BIT or not step8(self.inner):
            # torchao compiles its update
            stance = "default" if self.parameter.is_cuda and not self.apart else "force_eager"
            with torch.compiler.set_stance(stance):
                self.inner.step()
        for leaf in self.leaves:
            leaf.grad = None
        if self.master is not None:
            self.parameter.copy_(self.master, non_blocking=False)
            self.version = self.parameter._version
        if self.on_host and not self.adopted:
            self._to_host()
        if self.on_host:
            rest(self.held)
        return {key: now for key, now in numbers_of(self.inner).items() if before.get(key) != now}

    def load(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """States from a state_dict. Returns them as they are held.

        Raises:
            FormatError: they are of another form.
        """
        check_state(self.form, type(self.inner), self._values(), state)
        found = parts_of(state, len(self.leaves))
        device = self.leaves[0].device
        for leaf, values in zip(self.leaves, found, strict=True):
            held = {
                k: _placed(v, device) if isinstance(v, torch.Tensor) else copy.deepcopy(v)
                for k, v in (values or {}).items()
            }
            self.inner.state[leaf] = held
        if self.on_host:
            self._to_host()
        return self.state

    def _values(self) -> torch.Tensor:
        return self.master if self.master is not None else self.parameter.detach()

    def _to_host(self) -> None:
        """Move the states out of torch's allocator: all of a parameter's in one region."""
        self.adopted, self.held = True, []
        for leaf in self.leaves:
            state = self.inner.state[leaf]
            plain = [key for key, value in state.items() if type(value) is torch.Tensor]
            state.update(zip(plain, self._host_copies([state[key] for key in plain]), strict=True))
            for key in state.keys() - set(plain):
                if isinstance(state[key], torch.Tensor):
                    state[key] = _mapped(state[key], self._host_copies)

    def _host_copies(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        copies = host_copies(tensors)
        self.held += copies
        return copies


def _plain(value: object) -> object:
    """An option as it is now: a learning rate may be a tensor that schedulers write to."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    return tuple(map(_plain, value)) if isinstance(value, tuple | list) else value


def _placed(value: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy on the parameter's device; counters, which have no dimensions, stay where they are."""
    return _mapped(
        value,
        lambda parts: [
            p.detach().clone() if p.dim() == 0 else p.detach().to(device, copy=True) for p in parts
        ],
    )


def _mapped(
    value: torch.Tensor, change: Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]
) -> torch.Tensor:
    """A tensor with its memory changed; of a quantised one (torchao's), the tensors that it is made of."""
    if type(value) in (torch.Tensor, nn.Parameter):
        return change([value])[0]
    quantised: Any = value
    names, context = quantised.__tensor_flatten__()
    parts = dict(zip(names, change([getattr(value, name) for name in names]), strict=True))
    made: torch.Tensor = type(quantised).__tensor_unflatten__(parts, context, value.shape, value.stride())
    return made


def planned_optimizer(
    given: Optimizer, form: StatesForm, *, on_host: bool, consumes: frozenset[str], model: nn.Module
) -> Optimizer:
    """The optimizer that carries out a plan: the given one itself where only its kernels change."""
    if form.name == GIVEN and not on_host and not consumes:
        for group in given.param_groups if form.fused else ():
            group["fused"] = True
        return given
    names = {id(p): name for name, p in model.named_parameters()}
    return PlannedOptimizer(given, form, on_host=on_host, names=names)
