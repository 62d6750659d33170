"""The given optimizer where a plan has another in its place.

Its own `step` would keep states of its own, in fp32 and beside the planned ones, which no budget counts: it
is refused. Its state_dict is the planned one's, and what is loaded into it goes there: it has no states
itself, and a checkpoint of none would begin the moments anew without a word.
"""

from __future__ import annotations

import gc
import weakref
from typing import Any

from torch.optim import Optimizer

from effcompile.core.errors import UsageError

Saved = dict[str, Any]


class Replaced:
    """Hooks of the given optimizer that hold as long as the planned one is there."""

    def __init__(self, by: Optimizer) -> None:
        self.by = weakref.ref(by)

    def register(self, given: Optimizer) -> None:
        given.register_step_pre_hook(self.before_step)
        given.register_state_dict_post_hook(self.state_dict)
        given.register_load_state_dict_pre_hook(self.load)
        given.register_load_state_dict_post_hook(self.loaded)

    def before_step(self, given: Optimizer, args: object, kwargs: object) -> None:
        """Raises UsageError: this is not the planned optimizer."""
        if self.by() is not None:
            raise UsageError(
                f"step() of the {type(given).__name__} that was given is called, but this plan updates the "
                "parameters by an optimizer of its own: states would be kept twice, and the planned ones "
                "stand still. Call step() of the planned model's `optimizer` (give that one to a Trainer, "
                "too), or plan with --pass no-states to keep yours."
            )

    def state_dict(self, given: Optimizer, own: Saved) -> Saved:
        """The planned one's."""
        return own if (by := self.by()) is None else by.state_dict()

    def load(self, given: Optimizer, state: Saved) -> Saved:
        """Into the planned one; what is left to load into the given one has no states.

        Raises:
            FormatError: states of another form, or of other parameters.
        """
        if (by := self.by()) is None:
            return state
        by.load_state_dict(state)
        return {**state, "state": {}}

    def loaded(self, given: Optimizer) -> None:
        """Loading gave it groups of its own."""
        if (by := self.by()) is not None:
            given.param_groups = by.param_groups


def put_in_place_of(given: Optimizer, by: Optimizer) -> None:
    """From now on `by` updates in the place of the given one, which may be the given one itself."""
    give_back(given)
    if by is not given:
        Replaced(by).register(given)


def give_back(given: Optimizer) -> None:
    """The given optimizer is the user's again: no earlier plan's is in its place."""
    for name, hooks in vars(given).items():
        if name.startswith("_optimizer_"):
            for key in [key for key, hook in hooks.items() if _replaced(hook) is not None]:
                del hooks[key]


def check_not_stepped(given: object) -> None:
    """Raises UsageError: an earlier plan's optimizer is in its place and has states, which a new plan's would
    not have.
    """
    if not isinstance(given, Optimizer) or not _has_states(given):
        return
    gc.collect()  # a planned model that was let go of is in circles
    if _has_states(given):
        raise UsageError(
            f"The {type(given).__name__} that is given was planned with before, and that plan's optimizer "
            "has states: a new one would begin without them. Keep them (`state = optimizer.state_dict()`), "
            "plan with a new optimizer of the same parameters, and load them into the planned model's "
            "(`planned.optimizer.load_state_dict(state)`)."
        )


def _has_states(given: Optimizer) -> bool:
    found = (_replaced(hook) for hook in given._optimizer_step_pre_hooks.values())
    planned = (replaced.by() for replaced in found if replaced is not None)
    return any(by is not None and by.state for by in planned)


def _replaced(hook: object) -> Replaced | None:
    owner = getattr(hook, "__self__", None)
    return owner if isinstance(owner, Replaced) else None


def has_hooks(optimizer: Optimizer) -> bool:
    """Whether the user has hooks around its step."""
    hooks = [*optimizer._optimizer_step_pre_hooks.values(), *optimizer._optimizer_step_post_hooks.values()]
    return any(_replaced(hook) is None for hook in hooks)
