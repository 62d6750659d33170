"""Runs what `optimize -o DIR` left in DIR, without the model it was made of."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch.utils import _pytree as pytree

from effcompile.backends import usable_backends
from effcompile.backends.base import Run
from effcompile.core.errors import FormatError, GuardError, VerificationError, clipped
from effcompile.core.folders import read_steadily
from effcompile.core.timing import median_seconds
from effcompile.core.trees import leaves_with_path
from effcompile.core.types import Args, Inputs, Kwargs, Outputs
from effcompile.core.units import format_bytes
from effcompile.ir.guards import described
from effcompile.ir.plan import Plan
from effcompile.ir.saved import PLAN, check_artifact
from effcompile.ir.signature import Signature, TensorInput
from effcompile.ir.values import check_counts, check_values, planned_values
from effcompile.machine.hardware import this_hardware
from effcompile.machine.memory import give_back
from effcompile.runtime.carry import carried

_INPUT = re.compile(r"(?P<name>\S+) \[(?P<dims>.*)\] (?P<dtype>\w+)")
_SIZE = re.compile(r"[0-9]{1,18}")
_INPUT_SHARE = 16
_AGAIN = "Write both again with `effcompile optimize -o`."


@dataclass(frozen=True, slots=True, kw_only=True)
class ArtifactRun:
    """Seconds per call, and a line for each output."""

    seconds: float
    outputs: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Artifact:
    """A saved artifact, opened: called as the model is, it returns the flat tensors, and refuses what its
    Executable would.
    """

    plan: Plan
    signature: Signature
    folder: Path
    opened: Run

    def structured(self, tensors: Sequence[torch.Tensor], outputs: list[torch.Tensor]) -> Outputs:
        """What the model returns for these inputs, in its structure, around the outputs that are tensors.

        Raises:
            FormatError: the plan says another number of them.
        """
        returns = self.signature.returns
        if returns is None:
            return outputs[0] if len(outputs) == 1 else tuple(outputs)
        if returns.tensors() != len(outputs):
            raise FormatError(
                f"{str(self.folder / PLAN)!r} says {returns.tensors()} outputs; its artifact has "
                f"{len(outputs)}. {_AGAIN}"
            )
        return returns.built(outputs, self.signature.sizes([tuple(tensor.shape) for tensor in tensors]))

    def __call__(self, *args: object, **kwargs: object) -> list[torch.Tensor]:
        """The outputs that are tensors, in order.

        Raises:
            GuardError: arguments that the plan was not made for. LoweringError: it cannot be run on these.
        """
        return self.run(self.fitting(args, kwargs))

    def run(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The same for tensors in the order of the graph.

        Raises:
            LoweringError: the runtime refuses the inputs.
        """
        given = dict(zip((each.name for each in self.signature.inputs), tensors, strict=True))
        return carried(
            f"The artifact in {str(self.folder)!r}",
            lambda: self.opened(given),
            "If the model itself takes them, please report it.",
        )

    def fitting(self, args: Args, kwargs: Kwargs) -> list[torch.Tensor]:
        """The tensors of a call in the order of the graph, as the artifact takes them.

        Raises:
            GuardError: one is missing or new, or another one than the plan was made for; or a plain value is.
        """
        tensors = self._found(args, kwargs)
        for given, tensor in zip(self.signature.inputs, tensors, strict=True):
            _check_kind(given, tensor)
        if refusal := self.signature.refusal([tuple(tensor.shape) for tensor in tensors]):
            raise GuardError(f"{refusal}. Plan again for other sizes.", place="inputs")
        for given, tensor in zip(self.signature.inputs, tensors, strict=True):
            _check_rows(given, tensor)
            if given.values is not None:
                check_values(given.name, tensor, planned_values(given.values, tensor))
            check_counts(given.name, tensor, given.counts)
        return [tensor.contiguous() for tensor in tensors]

    def _found(self, args: Args, kwargs: Kwargs) -> list[torch.Tensor]:
        signature = self.signature
        if len(args) > len(signature.parameters) or set(signature.parameters[: len(args)]) & kwargs.keys():
            raise GuardError(
                f"The artifact takes {', '.join(signature.parameters) or 'nothing'} by position.",
                place="inputs",
            )
        named = {**dict(zip(signature.parameters, args, strict=False)), **kwargs}
        leaves = {f"inputs{pytree.keystr(path)}": leaf for path, leaf in leaves_with_path(named)}
        plain = {**signature.left_out, **signature.fixed}
        for place, leaf in leaves.items():
            if isinstance(leaf, torch.Tensor) or place not in plain:
                continue
            if plain[place] != described(leaf) or plain[place].endswith("…"):
                # a text that was cut short could be another one's
                raise GuardError(
                    f"{place} was {plain[place]} when the plan was made, but got {described(leaf)}. Plan "
                    "again.",
                    place=place,
                )
        wanted = {given.place: given.name for given in signature.inputs}
        tensors = {place: leaf for place, leaf in leaves.items() if isinstance(leaf, torch.Tensor)}
        known = {place for place, leaf in leaves.items() if place in plain or leaf is None}
        new, missing = (
            sorted(leaves.keys() - wanted.keys() - (known - tensors.keys())),
            sorted(wanted.keys() - tensors.keys()),
        )
        missing += sorted(signature.fixed.keys() - leaves.keys())
        if new or missing:
            parts = [f"not planned for: {', '.join(new)}"] * bool(new) + [
                f"missing: {', '.join(missing)}"
            ] * bool(missing)
            raise GuardError(
                f"The inputs differ from those the plan was made with ({clipped('; '.join(parts))}).",
                place=(new or missing)[0],
            )
        return [tensors[given.place] for given in signature.inputs]


def _check_kind(given: TensorInput, tensor: torch.Tensor) -> None:
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided:
        raise GuardError(
            f"{given.name} is a {type(tensor).__name__} of layout {tensor.layout}, no plain dense tensor.",
            place=given.place,
        )
    dtype = str(tensor.dtype).removeprefix("torch.")
    if (dtype, str(tensor.device)) != (given.dtype, given.device):
        raise GuardError(
            f"{given.name} is {dtype} on {tensor.device}; the artifact takes {given.dtype} on "
            f"{given.device}. Plan again for others.",
            place=given.place,
        )


def _check_rows(given: TensorInput, tensor: torch.Tensor) -> None:
    if not given.rows or not tensor.numel() or tensor.device.type != "cpu":
        return
    low, high = (int(t) for t in torch.aminmax(tensor))
    if low < 0 or high >= given.rows:
        raise GuardError(
            f"{given.name} has the index {low if low < 0 else high}; the table that it is looked up in "
            f"has the rows 0 to {given.rows - 1}.",
            place=given.place,
        )


def open_artifact(directory: str | Path) -> Artifact:
    """Open what `optimize -o` wrote: plan.json and the artifact.

    Raises:
        UsageError: no plan or artifact there. FormatError: not one of ours, or not the one that the plan
            describes.
    """
    return read_steadily(Path(directory), _opened)


def run_artifact(directory: str | Path, inputs: Inputs | None = None) -> ArtifactRun:
    """Load a saved artifact, run it, time it.

    Args:
        directory: what `optimize -o` wrote: plan.json and the artifact.
        inputs: (args, kwargs); None makes inputs of the plan's example sizes (integers 1, floats of unit
            variance).

    Raises:
        UsageError: no plan or artifact there. FormatError: not one of ours, or not the one that the plan
            describes.
        GuardError: other inputs than the plan's.
        LoweringError: it cannot be run. VerificationError: the outputs hold NaN.
    """
    artifact = open_artifact(directory)
    tensors = list(_generated(artifact.plan).values()) if inputs is None else artifact.fitting(*inputs)
    outputs = artifact.run(tensors)
    if any(output.is_floating_point() and bool(output.isnan().any()) for output in outputs):
        raise VerificationError(
            f"The artifact in {str(directory)!r} returned NaN. Check it with `effcompile optimize` again."
        )
    seconds = median_seconds(partial(artifact.run, tensors), min_rounds=5, budget=1.0)
    return ArtifactRun(seconds=seconds, outputs=tuple(_describe(output) for output in outputs))


def _opened(folder: Path) -> Artifact:
    plan = Plan.load(folder / PLAN)
    check_artifact(plan, folder)
    if plan.signature is None or [given.name for given in plan.signature.inputs] != [
        line.partition(" ")[0] for line in plan.inputs
    ]:
        raise FormatError(f"{str(folder / PLAN)!r} does not say what its artifact takes. {_AGAIN}")
    for given in plan.signature.inputs:
        sizes = [size for size in given.sizes if isinstance(size, int)]
        known = len(sizes) == len(given.sizes)
        if given.values is not None and not (known and math.prod(sizes) == len(given.values)):
            raise FormatError(
                f"{str(folder / PLAN)!r} gives {len(given.values)} values for {given.name}, whose sizes are "
                f"{list(given.sizes)}. {_AGAIN}"
            )
    backends, _ = usable_backends(plan.backend)
    opened = backends[0].open(folder, plan)
    give_back()  # what was read of the file beside what the runtime made of it: the weights are held once
    return Artifact(plan=plan, signature=plan.signature, folder=folder, opened=opened)


def _generated(plan: Plan) -> dict[str, torch.Tensor]:
    """Inputs of the plan's example sizes.

    Raises:
        FormatError: a line that is none, or sizes that no example has.
    """
    specs = [_spec(line) for line in plan.inputs]
    most = this_hardware().memory_bytes // _INPUT_SHARE
    needed = sum(math.prod(sizes) * dtype.itemsize for _, sizes, dtype in specs)
    if needed > most:
        raise FormatError(
            f"The plan's inputs ({clipped('; '.join(plan.inputs))}) take "
            f"{format_bytes(min(needed, 1 << 63))}; examples are given {format_bytes(most)} here, a "
            f"{_INPUT_SHARE}th of this machine's memory. Give inputs of your own: `effcompile run --inputs`."
        )
    generator = torch.Generator().manual_seed(0)
    given = plan.signature.inputs if plan.signature is not None else ()
    fixed = {each.name: each.values for each in given if each.values is not None}

    def made(name: str, sizes: list[int], dtype: torch.dtype) -> torch.Tensor:
        if name in fixed and len(fixed[name]) == math.prod(sizes):
            return planned_values(fixed[name], torch.empty(sizes, dtype=dtype))
        if dtype.is_floating_point:
            return torch.randn(sizes, generator=generator).to(dtype)
        return torch.ones(sizes, dtype=dtype)

    return {name: made(name, sizes, dtype) for name, sizes, dtype in specs}


def _spec(line: str) -> tuple[str, list[int], torch.dtype]:
    """(name, sizes, dtype) of a plan's input line: `ids [batch=2 × 128] int64`."""
    match = _INPUT.fullmatch(line)
    dtype = vars(torch).get(match["dtype"]) if match else None
    sizes = [dim.rpartition("=")[2] for dim in match["dims"].split(" × ") if dim] if match else []
    if (
        match is None
        or not isinstance(dtype, torch.dtype)
        or not all(_SIZE.fullmatch(size) for size in sizes)
    ):
        raise FormatError(
            f"The plan's input line {clipped(line)!r} does not read `name [sizes] dtype`. Plan again, or "
            "give inputs."
        )
    return match["name"], [int(size) for size in sizes], dtype


def _describe(output: torch.Tensor) -> str:
    dtype = str(output.dtype).removeprefix("torch.")
    norm = f", norm {float(output.float().norm()):.4g}" if output.numel() else ""
    return f"{dtype} [{' × '.join(map(str, output.shape))}]{norm}"


def check_pickled(folder: str, found: Plan, artifact: Mapping[str, str]) -> None:
    """Raises FormatError where another artifact stands in a folder now than the one that was pickled, by its
    files' hashes.
    """
    if dict(found.artifact) != artifact:
        raise FormatError(
            f"{folder!r} holds another artifact than the one that was pickled. Load it with "
            f"effcompile.load({folder!r})."
        )
