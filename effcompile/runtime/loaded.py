"""An Executable that was read from its folder: for serving, in a process that has neither the model nor its
code.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Never

import torch
from torch import nn

from effcompile.core import torch_compat
from effcompile.core.errors import GuardError, InputsError, UsageError
from effcompile.core.folders import read_steadily
from effcompile.core.types import Outputs
from effcompile.ir import saved
from effcompile.ir.plan import Plan
from effcompile.runtime.artifact import Artifact, check_pickled, open_artifact
from effcompile.runtime.executable import COMPILED, Executable
from effcompile.runtime.generation import with_transformers
from effcompile.runtime.gradients import GradientGuard
from effcompile.runtime.planned import PlannedModel

if TYPE_CHECKING:  # its module needs transformers
    from effcompile.runtime.generation.executable import OpenedGeneration


class LoadedExecutable(Executable):
    """Called like the model that it was made of, whose weights it has as its artifact holds them, once.

    Outputs have the model's structure; a class of outputs of the model's own comes back as a `Record` with
    the same names. There is no original: it has no parameters, and cannot be trained. A copy shares the
    weights; pickled, it is opened again where it stands.
    """

    def __init__(self, artifact: Artifact) -> None:
        PlannedModel.__init__(self)
        torch_compat.hide_from_dynamo(type(self), "forward", COMPILED)
        self._effcompile_fallback = None
        self.training = False
        self.plan, self.artifact = artifact.plan, artifact
        self._gradients = GradientGuard(artifact.plan.model, ())

    def forward(self, *args: object, **kwargs: object) -> Outputs:
        """Run the artifact.

        Raises:
            GuardError: arguments that the plan was not made for.
        """
        self._gradients.check()
        try:
            tensors = self.artifact.fitting(args, kwargs)
        except GuardError as error:
            return self._refuse(error, args, kwargs)
        return self.artifact.structured(tensors, self._gradients.results(tensors, self.artifact.run(tensors)))

    def check_weights(self) -> None:
        """They cannot change."""

    def unplanned(self) -> nn.Module:
        """Refused: the model is not here."""
        raise self._without_model("runs on")

    def train(self, mode: bool = True) -> LoadedExecutable:
        """Refused, but for leaving training mode: there is nothing to train."""
        if mode:
            raise self._without_model("train")
        return self

    def state_dict(self, *args: object, **kwargs: object) -> Never:
        """Refused: the weights are in the artifact, in the backend's form."""
        raise self._without_model("save")

    def save(self, directory: str | os.PathLike[str], *, beside: Mapping[str, str] | None = None) -> Path:
        """Write the artifact and plan.json into another folder. Raises UsageError: see Executable.save."""
        names, source = self.plan.artifact, self.artifact.folder

        def copied(new: Path) -> Iterator[Path]:
            return (Path(shutil.copyfile(source / Path(name).name, new / Path(name).name)) for name in names)

        read_steadily(source, lambda place: saved.check_artifact(self.plan, place))
        saved.save(self.plan, Path(directory), artifact=copied, beside=beside)
        return Path(directory)

    def _without_model(self, doing: str) -> UsageError:
        return UsageError(
            f"{self.plan.model} was loaded from {str(self.artifact.folder)!r} without the model that it was "
            f"made of: there are no weights to {doing}. Use the model itself; effcompile.optimize(model, "
            f"plan={str(self.artifact.folder)!r}) applies the same plan to it."
        )

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> LoadedExecutable:
        """What to(), half(), cuda() ... do: nothing, or refused where the inputs would have to follow."""
        for given in self.artifact.signature.inputs:
            like = torch.empty(0, dtype=getattr(torch, given.dtype), device=given.device)
            if fn(like).device != like.device or fn(torch.empty(0)).dtype != torch.float32:
                raise InputsError(
                    "An Executable's weights are fixed when it is planned. Convert the model, then call "
                    "effcompile.optimize."
                )
        return self

    def __copy__(self) -> LoadedExecutable:
        return LoadedExecutable(self.artifact)

    def __deepcopy__(self, memo: dict[int, object]) -> LoadedExecutable:
        return LoadedExecutable(self.artifact)

    def __reduce_ex__(self, protocol: object) -> tuple[object, ...]:
        return _again, (str(self.artifact.folder.absolute()), dict(self.plan.artifact))


def load(directory: str | os.PathLike[str]) -> LoadedExecutable | OpenedGeneration:
    """The Executable that `effcompile optimize -o` or `executable.save` wrote, without the model's code.

    Raises:
        UsageError: no plan or artifact there, or one of a training step. FormatError: not one of ours, or not
            the one that the plan describes. MissingPackageError: its backend is not installed here.
    """
    folder = Path(directory)
    if not folder.is_dir():
        raise UsageError(
            f"{str(folder)!r} is no folder. Give the one that `effcompile optimize -o` or "
            "executable.save(folder) wrote."
        )
    plan = read_steadily(folder, lambda place: Plan.load(place / saved.PLAN))
    if plan.goal.mode == "training":
        raise UsageError(
            f"{str(folder / saved.PLAN)!r} plans a training step, which runs on the model itself: "
            f"model = effcompile.optimize(model, inputs=batch, plan={str(folder)!r})"
        )
    if plan.goal.mode == "generation":
        opened: OpenedGeneration = with_transformers(
            "effcompile.runtime.generation.executable"
        ).open_generation(folder)
        return opened
    return LoadedExecutable(open_artifact(folder))


def _again(folder: str, artifact: Mapping[str, str]) -> LoadedExecutable:
    """What was pickled, opened again.

    Raises:
        FormatError: another artifact stands there now.
    """
    found = LoadedExecutable(open_artifact(folder))
    check_pickled(folder, found.plan, artifact)
    return found
