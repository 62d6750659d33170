"""An optimizer of replicated parameters whose states are divided over the data-parallel ranks (ZeRO-1).

Source: Rajbhandari et al. 2020 (arXiv 1910.02054). A rank updates its rows of every parameter, by the states
of these alone; then all ranks take each other's rows. Rows are DTensors, as those of sharded parameters are:
an update that looks at a whole parameter (a norm) sees it, and states are saved and loaded by DCP for any
number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from effcompile.backends.torch.ranks import Ranks, spread_value
from effcompile.ops.collectives import exchange_rows
from effcompile.ops.one_by_one import OneByOne
from effcompile.ops.optimizers import Group, StatesForm, build, update_options

_GIVEN = StatesForm()


class DividedStates(OneByOne):
    """The given optimizer's groups; `state` has the states of this rank's rows."""

    def __init__(self, given: Optimizer, model: nn.Module, ranks: Ranks) -> None:
        super().__init__([dict(group) for group in given.param_groups], dict(given.defaults))
        self._given = given
        self._names = {id(p): name for name, p in model.named_parameters()}
        self._owned, group = ranks.spread.owned, ranks.group("dp")
        assert group is not None
        self._group = group
        # as sharded parameters lie
        self._ranks = replace(ranks, spread=replace(ranks.spread, shapes=self._owned))
        self._inner: dict[int, tuple[int, nn.Parameter, Optimizer]] = {}

    def step(self, closure: Callable[[], object] | None = None) -> Any:
        """Update this rank's rows of all parameters that have a gradient, and take the others'; on all ranks
        together.
        """
        loss = super().step(closure)
        parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        divided = [p for p in parameters if self._names.get(id(p)) in self._owned]
        exchange_rows([_local(p) for p in divided], self._group)
        for parameter in divided:  # on a rank without a row of it, too
            torch.autograd.graph.increment_version(parameter)
        return loss

    def update(self, parameter: Tensor, gradient: Tensor, group: Group) -> None:
        rows, inner = self._of(parameter, group)
        known = self.state.get(parameter)
        if known and known is not inner.state.get(rows):  # loaded
            inner.state[rows] = {key: self._mine(parameter, value) for key, value in known.items()}
        update_options(inner, _GIVEN, group)
        rows.grad = self._rows(parameter, gradient)
        inner.step()
        rows.grad = None
        self.state[parameter] = inner.state[rows]

    def _of(self, parameter: Tensor, group: Group) -> tuple[nn.Parameter, Optimizer]:
        """Its rows here, and what updates them; other ones where it has other memory now."""
        at, known = _local(parameter).data_ptr(), self._inner.get(id(parameter))
        if known is None or known[0] != at:
            rows = nn.Parameter(self._rows(parameter, parameter))
            known = self._inner[id(parameter)] = at, rows, build(_GIVEN, self._given, group, [rows])
        return known[1:]

    def _rows(self, parameter: Tensor, value: Tensor) -> Tensor:
        """Of a tensor like a parameter, this rank's rows, in its memory; of one that is not divided all."""
        name = self._names.get(id(parameter), "")
        if name not in self._owned:
            return value.detach()
        local = _local(value)
        me, world = self._ranks.place("dp")
        each = -(-local.shape[0] // world)
        return self._ranks.as_dtensor(name, local[me * each : (me + 1) * each])

    def _mine(self, parameter: Tensor, value: Any) -> Any:
        """Of a state that was loaded whole this rank's rows."""
        name = self._names.get(id(parameter), "")
        whole = isinstance(value, Tensor) and not isinstance(value, DTensor) and value.dim() > 0
        if whole and name in self._owned and value.shape == parameter.shape:
            return spread_value(name, value, self._ranks)
        return value


def _local(value: Tensor) -> Tensor:
    value = value.detach()
    return value.to_local() if isinstance(value, DTensor) else value


def with_divided_states(given: Optimizer | None, model: nn.Module, ranks: Ranks) -> Optimizer | None:
    """The optimizer that carries out how a plan divides states: the given one where it divides none."""
    return given if given is None or not ranks.spread.owned else DividedStates(given, model, ranks)
