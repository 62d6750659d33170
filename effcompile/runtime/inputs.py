"""What the tensors of a call must be for a lowered program, beyond what `capture/calls.py` holds of the
arguments.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.utils import _pytree as pytree

from effcompile.backends.indices import bounded_inputs
from effcompile.core.errors import GuardError, InputsError, clipped
from effcompile.core.types import Args, Inputs, Kwargs
from effcompile.ir.export import allowed, domain_of, size_at, sizes_of
from effcompile.ir.guards import Guard
from effcompile.ir.program import Program, TensorSpec
from effcompile.ir.signature import Signature, TensorInput
from effcompile.ir.size_guards import taken
from effcompile.ir.structure import returned_of
from effcompile.ir.values import check_counts, check_values, counted

#: Kinds of calls (shapes, dtypes, devices) that are remembered as accepted.
_REMEMBERED = 256
_AGAIN = "Plan again for other shapes."
_Seen = tuple[tuple[torch.Size, torch.dtype, torch.device, torch.layout, type], ...]


@dataclass(frozen=True, slots=True)
class Bound:
    """The input at `index` is looked up in a table of `size` rows."""

    index: int
    size: int


class GraphInputs:
    """The tensors that a lowered program takes."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._devices = [tensor.device for tensor in program.flat_inputs()]
        self._kinds = {type(tensor) for tensor in program.flat_inputs()} | {torch.Tensor, torch.nn.Parameter}
        self._bounds = tuple(_bounds(program))
        self._counted = [at for at, spec in enumerate(program.inputs) if spec.counts]
        self._values = [
            (at, tensor)
            for at, (spec, tensor) in enumerate(zip(program.inputs, program.flat_inputs(), strict=True))
            if spec.values is not None
        ]
        self._accepted: set[_Seen] = set()

    def fitting(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The tensors as the program takes them: contiguous.

        Raises:
            GuardError: another shape, dtype, device or kind of tensor, or an index that is in no table.
        """
        seen = tuple([(t.shape, t.dtype, t.device, t.layout, type(t)) for t in tensors])
        if seen not in self._accepted:
            self._accept(tensors)
            if len(self._accepted) >= _REMEMBERED:
                self._accepted.clear()
            self._accepted.add(seen)
        for bound in self._bounds:
            check_index(self._program.inputs[bound.index].name, tensors[bound.index], bound.size)
        for at, wanted in self._values:
            check_values(self._program.inputs[at].name, tensors[at], wanted)
        for at in self._counted:
            check_counts(self._program.inputs[at].name, tensors[at], self._program.inputs[at].counts)
        return [t if t.is_contiguous() else t.contiguous() for t in tensors]

    def sizes(self, tensors: Sequence[torch.Tensor]) -> dict[str, int]:
        """The sizes that the named axes have in a call."""
        pairs = (
            (dim, size)
            for spec, t in zip(self._program.inputs, tensors, strict=True)
            for dim, size in zip(spec.shape, t.shape, strict=True)
        )
        return {dim: size for dim, size in pairs if isinstance(dim, str) and dim.isidentifier()}

    def guards(self) -> tuple[Guard, ...]:
        """All guards of the program, for its plan: of its inputs, of the call and of the model's state."""
        assert self._program.call is not None and self._program.state is not None
        return (*self._listed(), *self._program.call.listed(), *self._program.state.listed())

    def signature(self) -> Signature:
        """The same for whoever opens the saved artifact."""
        program, call, domain = self._program, self._program.call, domain_of(self._program)
        assert call is not None
        rows = {bound.index: bound.size for bound in self._bounds}
        sizes = {
            place.guarded.removeprefix("inputs"): spec.shape
            for spec, (place, _) in zip(program.inputs, call.tensors, strict=True)
        }
        example = sizes_of(program)
        known = taken(domain.guards, sizes, domain.bounds)
        return Signature(
            parameters=call.positional,
            inputs=tuple(
                TensorInput(
                    name=s.name,
                    place=place.guarded,
                    dtype=s.dtype,
                    device=str(device),
                    sizes=s.shape,
                    rows=rows.get(at, 0),
                    values=s.values,
                    counts=s.counts,
                )
                for at, (s, device, (place, _)) in enumerate(
                    zip(program.inputs, self._devices, call.tensors, strict=True)
                )
            ),
            fixed=call.texts(given=True),
            left_out=call.texts(given=False),
            bounds={
                name: (1 if known is None and low <= 2 else min(low, example.get(name, low)), high)
                for name, (low, high) in (domain.bounds if known is None else known[0]).items()
            },
            not_one=tuple(tuple(sorted(names)) for names in domain.not_one),
            example=example,
            guards=known[1] if known is not None else (),
            related=known is None
            or any(
                isinstance(dim, str) and not dim.isidentifier() for shape in sizes.values() for dim in shape
            ),
            returns=returned_of(program),
        )

    def _listed(self) -> Iterator[Guard]:
        places = self._program.call.tensors if self._program.call is not None else ()
        for spec, device, (place, _) in zip(self._program.inputs, self._devices, places, strict=True):
            yield Guard(
                kind="input",
                place=place.guarded,
                expected=f"{spec.dtype} [{' × '.join(map(str, spec.shape))}] on {device}",
            )
            if spec.values is not None:
                yield Guard(
                    kind="input", place=f"{place.guarded}.values", expected=clipped(str(list(spec.values)))
                )
            if spec.counts:
                yield Guard(kind="input", place=f"{place.guarded}.values", expected=counted(spec.counts))
        for bound in self._bounds:
            yield Guard(
                kind="input",
                place=f"{places[bound.index][0].guarded}.values",
                expected=f"0 to {bound.size - 1}",
            )

    def _accept(self, tensors: Sequence[torch.Tensor]) -> None:
        sizes: dict[str, int] = {}
        for spec, device, tensor in zip(self._program.inputs, self._devices, tensors, strict=True):
            if type(tensor) not in self._kinds or tensor.layout is not torch.strided:
                raise _refused(
                    spec,
                    f"is a {type(tensor).__name__} of layout {tensor.layout}; the plan takes plain dense "
                    "tensors",
                )
            if tensor.device != device:
                raise _refused(
                    spec, f"is on {tensor.device}; the plan takes it on {device}, where it was captured"
                )
            _check_shape(spec, tensor, sizes)
        for spec, tensor in zip(self._program.inputs, tensors, strict=True):
            derived = [
                (size_at(dim, sizes), size)
                for dim, size in zip(spec.shape, tensor.shape, strict=True)
                if isinstance(dim, str)
            ]
            if any(wanted != size for wanted, size in derived):
                raise _refused(spec, f"is {list(tensor.shape)}; the plan takes [{_sized(spec, sizes)}]")
            if 0 in tensor.shape and 0 not in spec.shape:
                raise _refused(spec, f"is {list(tensor.shape)}; the plan takes no axis of it empty")
        if sizes and not allowed(self._program, sizes):
            said = ", ".join(f"{name}={size}" for name, size in sizes.items())
            raise GuardError(
                f"The captured graph of {self._program.name} does not hold for {said}. {_AGAIN}",
                place="inputs",
            )


def check_index(name: str, tensor: torch.Tensor, size: int) -> None:
    """Look at the values of an input that is looked up in a table of `size` rows.

    Runtimes count negative ones from the end.

    Raises:
        GuardError: one that the table does not have.
    """
    if tensor.device.type != "cpu" or not tensor.numel():
        return
    low, high = (int(t) for t in torch.aminmax(tensor))
    if low < 0 or high >= size:
        raise GuardError(
            f"{name} has the index {low if low < 0 else high}; the table that it is looked up in has the "
            f"rows 0 to {size - 1}, and the model itself raises for it, too. Give indices within it.",
            place=f"inputs[{name!r}]",
        )


def tables_of(program: Program) -> dict[str, int]:
    """The inputs that are looked up as they are, by name: the rows of the smallest of the tables of each."""
    return {program.inputs[bound.index].name: bound.size for bound in _bounds(program)}


def as_captured(program: Program, signature: inspect.Signature, args: Args, kwargs: Kwargs) -> Inputs:
    """The same arguments, positional and by keyword as they were at capture.

    Raises:
        InputsError: other ones than at capture.
    """
    if len(args) == len(program.args) and set(kwargs) == set(program.kwargs):
        return args, kwargs
    try:
        given = signature.bind(*args, **kwargs).arguments
        captured = signature.bind(*program.args, **program.kwargs).arguments
    except TypeError as error:
        raise InputsError(f"{program.name} cannot be called so: {error}.") from error
    given = {name: value for name, value in given.items() if value is not None or name in captured}
    if set(given) != set(captured):
        extra, missing = sorted(set(given) - set(captured)), sorted(set(captured) - set(given))
        parts = [f"not planned for: {', '.join(extra)}"] * bool(extra) + [
            f"missing: {', '.join(missing)}"
        ] * bool(missing)
        raise InputsError(
            f"The inputs differ from those the plan was made with ({'; '.join(parts)}). Plan again with "
            "the inputs you use."
        )
    names = list(captured)
    return tuple(given[name] for name in names[: len(program.args)]), {
        name: given[name] for name in program.kwargs
    }


def _refused(spec: TensorSpec, said: str) -> GuardError:
    return GuardError(f"{spec.name} {said}. {_AGAIN}", place=f"inputs[{spec.name!r}]")


def _check_shape(spec: TensorSpec, tensor: torch.Tensor, sizes: dict[str, int]) -> None:
    """One input against its spec; named axes must agree among inputs."""
    shape = tuple(tensor.shape)
    fits = len(shape) == len(spec.shape)
    for dim, size in zip(spec.shape, shape, strict=False):
        if isinstance(dim, int):
            fits = fits and dim == size
        elif dim.isidentifier():
            fits = fits and sizes.setdefault(dim, size) == size
    dtype = str(tensor.dtype).removeprefix("torch.")
    if fits and dtype != spec.dtype:
        raise _refused(
            spec, f"is {dtype}; the plan takes {spec.dtype}: give {spec.name}.to(torch.{spec.dtype})"
        )
    if not fits:
        raise _refused(spec, f"is {dtype} {list(shape)}; the plan takes {spec.dtype} [{_sized(spec, sizes)}]")


def _sized(spec: TensorSpec, sizes: dict[str, int]) -> str:
    return " × ".join(
        str(dim) if isinstance(dim, int) else f"{dim}={sizes.get(dim, 'any')}" for dim in spec.shape
    )


def _bounds(program: Program) -> Iterator[Bound]:
    """Inputs that are looked up as they are: the smallest of the tables of each."""
    inputs = [node for node in program.graph.nodes if node.op == "placeholder"]
    for node, size in bounded_inputs(program).items():
        if (at := _position(program, inputs.index(node))) is not None:
            yield Bound(index=at, size=size)


def _position(program: Program, holder: int) -> int | None:
    """Which of the program's tensor inputs a placeholder is; plain values have placeholders too."""
    leaves = pytree.tree_leaves((program.args, dict(program.kwargs)))
    if holder >= len(leaves) or not isinstance(leaves[holder], torch.Tensor):
        return None
    return sum(isinstance(leaf, torch.Tensor) for leaf in leaves[:holder])
