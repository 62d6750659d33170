"""Running a random operator a second time with the numbers of the first: the generator's state is kept and
put back.

Plain functions, not custom operators: they stand as call_function nodes in graphs that our own executor runs.
"""

from __future__ import annotations

import torch

from effcompile.core.types import Forward, Value

#: Bytes of the state that `random_state` returns for a CPU generator (Mersenne twister, its own format since
#: 1.0).
CPU_STATE_BYTES = 5056


def random_state(device: str) -> torch.Tensor:
    """The state of the device's default generator before a random operator runs: uint8, on the CPU."""
    return torch.get_rng_state() if device == "cpu" else torch.cuda.get_rng_state(device)


def replay(state: torch.Tensor, device: str, target: Forward, /, *args: object, **kwargs: object) -> Value:
    """`target(*args, **kwargs)`, also of a target with a `device`, with the generator as `state` says; then
    it is as it was before.
    """
    now = random_state(device)
    _set(state, device)
    try:
        return target(*args, **kwargs)
    finally:
        _set(now, device)


def _set(state: torch.Tensor, device: str) -> None:
    if device == "cpu":
        torch.set_rng_state(state)
    else:
        torch.cuda.set_rng_state(state, device)
