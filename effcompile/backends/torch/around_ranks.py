"""What is done around a model whose step was planned for a mesh: whole weights are loaded into it, and what
would shard or replicate it once more is refused in words.
"""

from __future__ import annotations

from collections.abc import Collection, MutableMapping
from typing import TypeGuard

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from effcompile.core import torch_compat_ranks

_ONCE_MORE = (
    "A model whose step was planned for a mesh cannot be sharded or replicated once more (fully_shard, "
    "replicate, DistributedDataParallel): its ranks have their parts of the parameters and average gradients "
    "already. Leave that out, and train what effcompile.optimize returned as it is. To shard by fully_shard "
    "instead, give it the original model, and plan its blocks with block.compile(backend='effcompile')."
)


def prepare(model: nn.Module, elsewhere: Collection[str] = ()) -> None:
    """Make a model ready for what users do, its parameters spread.

    `elsewhere`: names of the parameters that other stages of a pipeline have.
    """
    torch_compat_ranks.refuse_wrappers(model, _ONCE_MORE)
    model.register_load_state_dict_pre_hook(TakesWhole(elsewhere))


class TakesWhole:
    """Before load_state_dict: of a whole tensor the rank's part, and nothing for other stages.

    A whole checkpoint is loaded by each rank from its own copy, without any collective. It holds no mesh, for
    the model may outlive the processes' groups.
    """

    def __init__(self, elsewhere: Collection[str]) -> None:
        self._elsewhere = frozenset(elsewhere)

    def __call__(
        self, module: nn.Module, state: MutableMapping[str, object], prefix: str, *_: object
    ) -> None:
        """See nn.Module.register_load_state_dict_pre_hook."""
        here = dict(module.named_parameters(remove_duplicate=False))
        for key in [key for key in state if key.startswith(prefix)]:
            name, value = key[len(prefix) :], state[key]
            own = here.get(name)
            if name in self._elsewhere:
                del state[key]
            elif isinstance(own, DTensor) and _is_whole(value, own):
                state[key] = distribute_tensor(value, own.device_mesh, own.placements, src_data_rank=None)


def _is_whole(value: object, own: DTensor) -> TypeGuard[Tensor]:
    """Whether it is a plain tensor of all of a parameter."""
    return isinstance(value, Tensor) and not isinstance(value, DTensor) and value.shape == own.shape
