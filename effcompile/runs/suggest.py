"""Stages that a run might have: from how many layers to grow, by the planner's times and a short run of each,
as AutoProg does by search.

Li et al. 2022 (arXiv 2203.14509). A suggestion, not a proof: what a model learns in a few steps on the
example inputs, per predicted second, stands for what it would learn in a stage. The depth that falls fastest
per second comes first, for half of the steps.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from effcompile.core.errors import UsageError
from effcompile.core.types import Example
from effcompile.loader.loaded import as_inputs
from effcompile.runs.carry import group_names, names_of, of_changed
from effcompile.runs.entering import enter
from effcompile.runs.layers import find_layers
from effcompile.runs.stage import Stage

AUTO = "auto"
#: Steps of the short run of each depth.
PROXY = 12
#: The share of the steps that the first stage of fewer layers takes.
_FIRST = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Proxy:
    """A depth's short run: by how much its loss fell, and the predicted seconds of a step."""

    depth: int
    fall: float
    seconds: float

    @property
    def rate(self) -> float:
        return self.fall / (PROXY * self.seconds)


def depths_of(layers: int) -> list[int]:
    """All layers, a half and a quarter of them, where that divides."""
    return [layers // part for part in (1, 2, 4) if layers % part == 0]


def suggested(
    model: nn.Module,
    steps: int | None,
    inputs: Callable[[Stage], Example],
    optimizer: Optimizer,
    seconds: Callable[[Stage], float],
) -> tuple[list[Stage], str]:
    """Stages, and why. `seconds`: a stage → predicted seconds of its step.

    Raises:
        UsageError: no steps are given, or the model has no layers to begin with fewer of.
    """
    if steps is None or steps < 2:
        raise UsageError(f"stages='auto' wants the steps of the whole run, 2 or more: steps={steps!r}.")
    if any(p.is_meta for p in model.parameters()):
        raise UsageError(
            "stages='auto' runs the model for some steps, and it is on the meta device: give the stages."
        )
    depth = len(find_layers(model))
    proxies = [
        _proxy(model, Stage(steps=steps, depth=some), inputs, optimizer, seconds) for some in depths_of(depth)
    ]
    best = max(proxies, key=lambda proxy: proxy.rate)
    told = "; ".join(f"{proxy.depth} layers: {proxy.rate:.3g} of loss a second" for proxy in proxies)
    why = f"suggested, not proven, by {PROXY} measured steps of each depth and predicted seconds: {told}"
    if best.depth == depth:
        return [Stage(steps=steps, depth=depth)], why
    first = round(_FIRST * steps)
    return [Stage(steps=first, depth=best.depth), Stage(steps=steps - first, depth=depth)], why


def _proxy(
    model: nn.Module,
    stage: Stage,
    inputs: Callable[[Stage], Example],
    optimizer: Optimizer,
    seconds: Callable[[Stage], float],
) -> Proxy:
    """A copy of the model in the stage's form, run for a few steps."""
    twin = copy.deepcopy(model).train()
    own = of_changed(optimizer, group_names(optimizer, names_of(model)), twin, {})
    example = inputs(stage)
    entered = enter(twin, own, {}, replace(stage, steps=PROXY), 0, find_layers(model).name, example)
    with torch.random.fork_rng(devices=[]):
        losses = [_step(twin, entered.optimizer, example) for _ in range(PROXY)]
    return Proxy(depth=stage.depth or 0, fall=max(0.0, losses[0] - losses[-1]), seconds=seconds(stage))


def _step(model: nn.Module, optimizer: Optimizer, example: Example) -> float:
    args, kwargs = as_inputs(example)
    outputs = model(*args, **kwargs)
    loss: Tensor = outputs if isinstance(outputs, Tensor) else outputs.loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def check(stages: Sequence[Stage] | str, steps: int | None) -> None:
    """Raise UsageError for stages that are none."""
    if stages == AUTO:
        return
    if isinstance(stages, str) or not stages or not all(isinstance(stage, Stage) for stage in stages):
        raise UsageError(
            "stages: give a list of effcompile.Stage(steps=...), one for each while, or 'auto' with steps."
        )
    if steps is not None:
        raise UsageError("steps are for stages='auto': each Stage has its own.")
