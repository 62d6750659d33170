"""The lowered callable: the model's own signature, its parameters, the plan, and saving to a folder."""

from __future__ import annotations

import copy
import functools
import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Never

import torch
from torch import nn
from torch.utils import _pytree as pytree

from effcompile.backends.base import Lowered
from effcompile.core import torch_compat
from effcompile.core.errors import GuardError, InputsError, UsageError
from effcompile.core.types import Forward, Outputs
from effcompile.ir import saved
from effcompile.ir.plan import Plan
from effcompile.ir.program import Program
from effcompile.runtime.carry import carried
from effcompile.runtime.gradients import GradientGuard
from effcompile.runtime.inputs import GraphInputs
from effcompile.runtime.planned import PlannedModel, SetOnModel, past_the_plan

#: Why torch.compile runs an Executable as it is.
COMPILED = (
    "An effcompile.Executable is compiled already: call it as it is, outside of "
    "torch.compile(fullgraph=True)."
)


class Executable(SetOnModel, PlannedModel):
    """Called like the model it was made of, with inputs of the captured structure.

    `parameters()`, `state_dict()`, `train()` and `eval()` are the original's. In training mode the original
    model runs, as the lowered one has no gradients; the weights of the lowered one are those at the time of
    planning, and a call after they were changed is refused, as is one after a change of whatever else the
    plan took for granted. `on_change` says what runs instead.

    With gradients enabled, results require a gradient where the original's would (an input or a parameter
    requires one), and a backward that reaches them is refused in words; the call itself is as fast as
    without.

        score = executable(images)              # .numpy() wants torch.no_grad() or .detach(), as the model's
        (score.mean() + other_loss).backward()  # InputsError: use the model itself, or detach the score
    """

    def __init__(self, model: nn.Module, program: Program, lowered: Lowered, plan: Plan) -> None:
        super().__init__()
        torch_compat.hide_from_dynamo(type(self), "forward", COMPILED)
        self.original = model
        self._effcompile_fallback = None
        self.training = False
        self._program, self._lowered = program, lowered
        self._output_spec = program.module.graph._codegen.pytree_info.out_spec  # type: ignore[attr-defined]
        self._gradients = GradientGuard(program.name, model.parameters())
        assert program.call is not None and program.state is not None
        self._call, self._state, self._inputs = program.call, program.state, GraphInputs(program)
        notes = self._state.settle()
        said = tuple(dict.fromkeys((*plan.notes, *notes)))
        self.plan = replace(
            plan, guards=self._inputs.guards(), signature=self._inputs.signature(), notes=said
        )

    def forward(self, *args: object, **kwargs: object) -> Outputs:
        """Run the lowered model (in training mode: the original).

        Raises:
            GuardError: arguments that the plan was not made for, or a model that is not as it was then.
        """
        if self.training:
            return self.original(*args, **kwargs)
        self._gradients.check()
        try:
            self._state.check()
            tensors = self._inputs.fitting(self._call.take(args, kwargs))
        except GuardError as error:
            return self._refuse(error, args, kwargs)
        outputs = self._gradients.results(tensors, self._run(tensors))
        sizes = self._inputs.sizes(tensors) if self._program.returned else {}
        return pytree.tree_unflatten(self._program.with_plain_results(outputs, sizes), self._output_spec)

    def check_weights(self) -> None:
        """Look at every byte of the model's weights: a write through `weight.data` to some elements is
        noticed by calls only in time.

        Raises:
            GuardError: they are not what they were when the plan was made. Call effcompile.optimize again.
        """
        self._state.check()
        self._state.check_weights()

    def _run(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """The lowered model's outputs.

        Raises:
            LoweringError: it cannot run with these tensors.
        """
        return carried(
            f"{self._program.name} as lowered to {self.plan.backend}",
            lambda: self._lowered(*tensors),
            "If the model itself takes them, please report it, and plan with these inputs as the example "
            "or with another backend=.",
        )

    def unplanned(self) -> nn.Module:
        """The model itself."""
        return self.original

    def _beside(self, name: str, found: object) -> object:
        if not callable(found) or not (why := past_the_plan(name)):
            return found
        return saying_original(found, type(self.original).__name__, why)

    def __copy__(self) -> Executable:
        return self._around(self.original)

    def __deepcopy__(self, memo: dict[int, object]) -> Executable:
        """A copy of the model with the same lowered weights, which it shares; a call after the copy's weights
        changed is refused.
        """
        return self._around(copy.deepcopy(self.original, memo))

    def _around(self, model: nn.Module) -> Executable:
        """The same for a model that is a copy of the original."""
        made = type(self).__new__(type(self))
        nn.Module.__init__(made)
        made.__dict__.update(
            {name: value for name, value in self.__dict__.items() if name not in made.__dict__}
        )
        made.original, made.training = model, self.training
        if model is not self.original:
            made._state = self._state.bound_to(model)
            made._state.settle()
            made._gradients = GradientGuard(self._program.name, model.parameters())
            made._effcompile_fallback = None
        return made

    def __reduce_ex__(self, protocol: object) -> tuple[object, ...]:
        raise UsageError(
            "An Executable cannot be pickled, for its lowered model is bound to this process: "
            f"{self._program.name}. Write it with executable.save(folder), and open it anywhere with "
            "effcompile.load(folder)."
        )

    def save(self, directory: str | os.PathLike[str], *, beside: Mapping[str, str] | None = None) -> Path:
        """Write the artifact and plan.json into a folder, which holds nothing else afterwards; it is replaced
        whole or stays as it was.

        Args:
            directory: made where it does not exist; what effcompile wrote there before is replaced.
            beside: further files, name → text.

        Raises:
            UsageError: the folder cannot be written, or holds files of others. GuardError: the model was
                changed since it was planned.
        """
        self.check_weights()
        folder = Path(directory)
        saved.save(self.plan, folder, artifact=self._lowered.save, beside=beside)
        return folder

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The original model's, with its own names."""
        return self.original.state_dict(*args, **kwargs)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Executable:
        """What to(), half(), cuda() ... do.

        Refused where it would change a dtype or a device, which the lowered model would not follow.

        Raises:
            InputsError: it would.
        """
        for tensor in {
            (t.dtype, t.device): t for t in (*self.original.parameters(), *self.original.buffers())
        }.values():
            changed = fn(torch.empty(0, dtype=tensor.dtype, device=tensor.device))
            if (changed.dtype, changed.device) != (tensor.dtype, tensor.device):
                raise InputsError(
                    f"An Executable's weights are fixed when it is planned: {tensor.dtype} on "
                    f"{tensor.device}. They cannot become {changed.dtype} on {changed.device} afterwards. "
                    "Convert the model, then call effcompile.optimize."
                )
        return super()._apply(fn, recurse)

    def load_state_dict(self, *args: object, **kwargs: object) -> Never:
        """Refused: the lowered weights would no longer be the original's."""
        raise InputsError(
            "An Executable's weights are fixed when it is planned. Load them into the model, then call "
            "effcompile.optimize."
        )


def saying_original(method: Forward, name: str, why: str) -> Forward:
    """A method of the original, which says so: it calls the original, and not the optimized model."""

    @functools.wraps(method)
    def said(*args: object, **kwargs: object) -> Outputs:
        warnings.warn(f"effcompile runs the original {name}: {why}", stacklevel=2)
        return method(*args, **kwargs)

    return said
