"""BatchNorm(momentum=None): its statistics are means over all batches, whose factor torch reads off a buffer
as a Python number, which no graph has. Here it is a tensor, so that each step has its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

_KINDS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_Norm = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d


@contextlib.contextmanager
def cumulative_statistics(model: nn.Module) -> Iterator[None]:
    """The model whose BatchNorms of no momentum, in training mode, can be traced."""
    changed = [norm for norm in model.modules() if isinstance(norm, _KINDS) and _accumulates(norm)]
    for norm in changed:
        vars(norm)["forward"] = _forward_of(norm)
    try:
        yield
    finally:
        for norm in changed:
            del vars(norm)["forward"]


def _accumulates(norm: _Norm) -> bool:
    theirs = type(norm).forward is nn.BatchNorm1d.forward and "forward" not in vars(norm)
    tracked = norm.training and norm.track_running_stats and norm.num_batches_tracked is not None
    return theirs and tracked and norm.momentum is None


def _forward_of(norm: _Norm) -> object:
    def forward(x: Tensor) -> Tensor:
        norm._check_input_dim(x)
        assert isinstance(norm.num_batches_tracked, Tensor)
        norm.num_batches_tracked.add_(1)
        held = [tensor for tensor in (norm.running_mean, norm.running_var) if tensor is not None]
        batch = [torch.zeros_like(tensor) for tensor in held]  # with a momentum of 1 they are the batch's own
        found = F.batch_norm(x, batch[0], batch[1], norm.weight, norm.bias, True, 1.0, norm.eps)
        share = norm.num_batches_tracked.double().reciprocal()
        for tensor, new in zip(held, batch, strict=True):  # in fp64, as torch's kernel has them
            tensor.copy_(tensor.double() * (1 - share) + new.double() * share)
        return found

    return forward
