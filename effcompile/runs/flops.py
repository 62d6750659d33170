"""The FLOPs of a stage's step, counted operator by operator on tensors without data."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

from effcompile.capture.training import Loss
from effcompile.core.types import Example
from effcompile.loader.loaded import as_inputs


def step_flops(model: nn.Module, example: Example, loss: Loss | None = None) -> float | None:
    """Of forward and backward of the model as it is; None where it cannot run without data."""
    args, kwargs = pytree.tree_map_only(Tensor, lambda t: t.detach().to("meta"), as_inputs(example))
    try:
        twin = copy.deepcopy(model).to("meta").train()
        with FlopCounterMode(display=False) as counter, torch.random.fork_rng(devices=[]):
            outputs = twin(*args, **kwargs)
            own = outputs if isinstance(outputs, Tensor) or loss is not None else outputs.loss
            value = own if loss is None else loss(outputs, kwargs or args)
            value.backward()
    except Exception:  # a user's model of any kind: it may look at data
        return None
    return float(counter.get_total_flops())
