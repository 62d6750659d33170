"""What any rounding does to a model at one input: some of them answer otherwise there, whoever rounds.

An error limit is of the inputs that it was calibrated on. A sharp softmax that chose one value on all of
these is nearly a tie on another one, and eight bits decide it: no plan of the first inputs could know. How
far that goes is asked of eager PyTorch, with products of values that are moved by eight bits' steps.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

#: So many times are the values moved; the answer that went farthest says how far rounding may go.
DRAWS = 32


def moved_answers(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Any]:
    """The answers of copies whose matrices, row by row, and inputs of linears, as a whole, are off by up to
    one step of eight bits at random: twice what rounding does.
    """
    for draw in range(DRAWS):
        copied, generator = copy.deepcopy(model), torch.Generator().manual_seed(draw)

        def moved(values: Tensor, largest: Tensor, generator: torch.Generator = generator) -> Tensor:
            share = torch.rand(values.shape, generator=generator) * 2 - 1
            return values + (share * largest / 127).to(values.dtype)

        with torch.no_grad():
            for weight in copied.parameters():
                if weight.dim() >= 2:
                    weight.copy_(moved(weight, weight.abs().amax(-1, keepdim=True)))
            for module in copied.modules():
                if isinstance(module, nn.Linear):
                    module.register_forward_pre_hook(
                        lambda _, given, moved=moved: (moved(given[0], given[0].abs().amax()), *given[1:])
                    )
            yield copied(*args, **kwargs)
