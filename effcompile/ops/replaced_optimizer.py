"""The given optimizer where a plan has another in its place: its own `step` would keep states of its own, in
fp32 and beside the planned ones, which no budget counts.
"""

from __future__ import annotations

import weakref

from torch.optim import Optimizer

from effcompile.core.errors import UsageError


class Replaced:
    """A hook before the given optimizer's step, which is refused as long as the planned one is there."""

    def __init__(self, by: Optimizer) -> None:
        self._by = weakref.ref(by)

    def __call__(self, given: Optimizer, args: object, kwargs: object) -> None:
        """Raises UsageError: this is not the planned optimizer."""
        if self._by() is not None:
            raise UsageError(
                f"step() of the {type(given).__name__} that was given is called, but this plan updates the "
                "parameters by an optimizer of its own: states would be kept twice, and the planned ones "
                "stand still. Call step() of the planned model's `optimizer` (give that one to a Trainer, "
                "too), or plan with --pass no-states to keep yours."
            )


def put_in_place_of(given: Optimizer, by: Optimizer) -> None:
    """From now on `by` updates in the place of the given one, which may be the given one itself."""
    hooks = given._optimizer_step_pre_hooks
    for key in [key for key, hook in hooks.items() if isinstance(hook, Replaced)]:
        del hooks[key]  # of an earlier plan
    if by is not given:
        given.register_step_pre_hook(Replaced(by))


def has_hooks(optimizer: Optimizer) -> bool:
    """Whether the user has hooks around its step."""
    hooks = [*optimizer._optimizer_step_pre_hooks.values(), *optimizer._optimizer_step_post_hooks.values()]
    return any(not isinstance(hook, Replaced) for hook in hooks)
