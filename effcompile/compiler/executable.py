"""The lowered callable: the model's own signature, its parameters, the plan, and saving to a folder."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from effcompile.backends.base import Lowered
from effcompile.compiler.gradients import GradientGuard
from effcompile.core.errors import InputsError
from effcompile.ir import saved
from effcompile.ir.plan import Plan
from effcompile.ir.program import Program, TensorSpec

if TYPE_CHECKING:
    from rich.console import Console


class Executable(nn.Module):
    """Called like the model it was made of, with inputs of the captured structure.

    `parameters()`, `state_dict()`, `train()` and `eval()` are the original's. In training mode the original model
    runs, as the lowered one has no gradients; the weights of the lowered one are those at the time of planning.

    With gradients enabled, results require a gradient where the original's would (an input or a parameter requires one), and a
    backward that reaches them is refused in words; the call itself is as fast as without.

        score = executable(images)               # as with the model, .numpy() wants torch.no_grad() or .detach()
        (score.mean() + other_loss).backward()   # InputsError: use the model itself, or detach the score
    """

    def __init__(self, model: nn.Module, program: Program, lowered: Lowered, plan: Plan) -> None:
        super().__init__()
        self.original = model
        self.training = False
        self.plan = plan
        self._program, self._lowered = program, lowered
        self._output_spec = program.module.graph._codegen.pytree_info.out_spec  # type: ignore[attr-defined]
        self._signature = inspect.signature(model.forward)
        self._gradients = GradientGuard(program.name, model.parameters())

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the lowered model (in training mode: the original).

        Raises:
            InputsError: inputs of another structure, dtype or shape than the plan was made for.
        """
        if self.training:
            return self.original(*args, **kwargs)
        self._gradients.check()
        tensors = self._flat(args, kwargs)
        outputs = self._gradients.results(tensors, self._lowered(*tensors))
        return pytree.tree_unflatten(outputs, self._output_spec)

    def report(self, console: Console | None = None, *, verbose: bool = False) -> None:
        """Print the plan."""
        self.plan.report(console, verbose=verbose)

    def save(self, directory: str | os.PathLike[str], *, beside: Mapping[str, str] | None = None) -> Path:
        """Write the artifact and plan.json into a folder, which holds nothing else afterwards; it is replaced whole or stays as it was.

        Args:
            directory: made where it does not exist; what effcompile wrote there before is replaced.
            beside: further files, name → text.

        Raises:
            UsageError: the folder cannot be written, or holds files of others.
        """
        folder = Path(directory)
        saved.save(self.plan, folder, artifact=self._lowered.save, beside=beside)
        return folder

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The original model's, with its own names."""
        return self.original.state_dict(*args, **kwargs)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Executable:
        """What to(), half(), cuda() ... do. Refused where it would change a dtype or a device, which the lowered model would not follow.

        Raises:
            InputsError: it would.
        """
        for tensor in {(t.dtype, t.device): t for t in (*self.original.parameters(), *self.original.buffers())}.values():
            changed = fn(torch.empty(0, dtype=tensor.dtype, device=tensor.device))
            if (changed.dtype, changed.device) != (tensor.dtype, tensor.device):
                raise InputsError(
                    f"An Executable's weights are fixed when it is planned: {tensor.dtype} on {tensor.device}. They cannot become "
                    f"{changed.dtype} on {changed.device} afterwards. Convert the model, then call effcompile.optimize."
                )
        return super()._apply(fn, recurse)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Refused: the lowered weights would no longer be the original's."""
        raise InputsError("An Executable's weights are fixed when it is planned. Load them into the model, then call effcompile.optimize.")

    def _flat(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
        args, kwargs = self._as_captured(args, kwargs)
        tensors = self._program.flat_inputs(args, kwargs)
        if len(tensors) != len(self._program.inputs):
            wanted = ", ".join(spec.name for spec in self._program.inputs)
            raise InputsError(f"{len(tensors)} tensors were given; the plan was made for {len(self._program.inputs)}: {wanted}.")
        sizes: dict[str, int] = {}
        for spec, tensor in zip(self._program.inputs, tensors, strict=True):
            _check(spec, tensor, sizes)
        return tensors

    def _as_captured(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
        """The same arguments, positional and by keyword as they were at capture."""
        wanted = self._program
        if len(args) == len(wanted.args) and set(kwargs) == set(wanted.kwargs):
            return args, kwargs
        try:
            given = self._signature.bind(*args, **kwargs).arguments
            captured = self._signature.bind(*wanted.args, **wanted.kwargs).arguments
        except TypeError as error:
            raise InputsError(f"{wanted.name} cannot be called so: {error}.") from error
        given = {name: value for name, value in given.items() if value is not None or name in captured}
        if set(given) != set(captured):
            extra, missing = sorted(set(given) - set(captured)), sorted(set(captured) - set(given))
            parts = [f"not planned for: {', '.join(extra)}"] * bool(extra) + [f"missing: {', '.join(missing)}"] * bool(missing)
            raise InputsError(
                f"The inputs differ from those the plan was made with ({'; '.join(parts)}). Plan again with the inputs you use."
            )
        names = list(captured)
        positional = len(wanted.args)
        return tuple(given[name] for name in names[:positional]), {name: given[name] for name in wanted.kwargs}


def _check(spec: TensorSpec, tensor: torch.Tensor, sizes: dict[str, int]) -> None:
    """One input against its spec; named axes must agree among inputs."""
    shape = tuple(tensor.shape)
    fits = len(shape) == len(spec.shape)
    for dim, size in zip(spec.shape, shape, strict=False):
        if isinstance(dim, int):
            fits = fits and dim == size
        elif dim.isidentifier():
            fits = fits and sizes.setdefault(dim, size) == size
    dtype = str(tensor.dtype).removeprefix("torch.")
    if not fits or dtype != spec.dtype:
        allowed = " × ".join(str(dim) if isinstance(dim, int) else f"{dim}={sizes.get(dim, 'any')}" for dim in spec.shape)
        raise InputsError(f"{spec.name} is {dtype} {list(shape)}; the plan takes {spec.dtype} [{allowed}]. Plan again for other shapes.")
