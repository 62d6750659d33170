"""Sensitivities, and the errors of rehearsed plans, kept between plans: the same weights, inputs and options
are measured once, however many budgets are asked for.

A measurement is known by the hash of everything it follows from: the graph, the bytes of every weight and
input, the options, what is drawn, torch's version and the code that measures. What a pass replaces weights by
is made by that pass: its options are measured each time.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Annotated

import msgspec
import torch
from torch.utils.weak import WeakTensorKeyDictionary

from effcompile.core.files import cache_folder
from effcompile.core.kept_json import recalled, remember
from effcompile.core.types import Inputs
from effcompile.estimate.perturb import Weights
from effcompile.estimate.recorder import leaves_of
from effcompile.estimate.sensitivity import Progress, Sensitivity, measure
from effcompile.ir import content
from effcompile.ir.formats import Form
from effcompile.ir.program import Program

#: Files that are kept, and bytes of one: more is none of ours.
_MOST_FILES, _MOST_BYTES = 64, 32 << 20
#: Code of the arithmetic of reduced sites.
_EMULATION = ("perturb", "fake_quant", "codings", "../ops/byte_codings", "../ops/int8_codes")
#: A squared relative error, and seconds: more of either nothing measured ever is.
_Error = Annotated[float, msgspec.Meta(ge=0, le=1e30)]
_Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e6)]
#: Scale and zero point of codes of 8 bits.
Range = tuple[Annotated[float, msgspec.Meta(gt=0, le=1e38)], Annotated[int, msgspec.Meta(ge=0, le=255)]]


#: Tensors whose bytes were read, with how often they had been written to by then, and their hash.
_read_once: ContextVar[WeakTensorKeyDictionary | None] = ContextVar("read_once", default=None)


@contextmanager
def reading_once() -> Iterator[None]:
    """Within it the bytes of a weight are read once, for all hashes of programs that hold it. For a planner's
    own time: what others write through `.data`, or from another library, torch does not count.
    """
    token = _read_once.set(WeakTensorKeyDictionary())
    try:
        yield
    finally:
        _read_once.reset(token)


class KeptErrors(msgspec.Struct, kw_only=True, frozen=True):
    """A measurement as it is kept: `errors` are (site, option, squared error); the rest as in Sensitivity."""

    errors: list[tuple[str, str, _Error]]
    method: str
    draws: Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]
    seconds: _Seconds

    def sensitivity(self) -> Sensitivity:
        """What was measured: of the same weights and inputs, so that a plan's text is the same whether it was
        read or measured.
        """
        errors = {(site, option): error for site, option, error in self.errors}
        return Sensitivity(errors=errors, method=self.method, draws=self.draws, seconds=self.seconds)


def measured(
    program: Program,
    inputs: Sequence[Inputs],
    options: Mapping[str, tuple[Form, ...]],
    *,
    weights: Weights | None = None,
    rounds: bool = True,
    budget_seconds: float,
    progress: Progress | None = None,
) -> Sensitivity:
    """As `sensitivity.measure`, read from the cache where it was measured before, and kept there for the next
    plan.

    A cache that cannot be read or written costs the time of measuring, nothing else.
    """
    key = None if weights else _key(program, inputs, options, f"{budget_seconds} {rounds}")
    path = cache_folder() / "sensitivity" / f"{key}.json"
    if key is not None and (kept := _read(path)) is not None:
        return kept.sensitivity()
    found = measure(
        program, inputs, options,
        weights=weights, rounds=rounds, budget_seconds=budget_seconds, progress=progress,
    )  # fmt: skip
    if key is not None:
        _write(path, found)
    return found


def of_rehearsals(program: Program, calibration: Sequence[Sequence[torch.Tensor]]) -> str | None:
    """What the emulated errors of all plans of a program follow from (estimate/rehearse.py), as a hash: the
    program, and the inputs that ranges are taken from.
    """
    tensors = itertools.chain.from_iterable(calibration)
    return _hash(program, tensors, "", ("rehearse", *_EMULATION))


def ranges(
    program: Program,
    calibration: Sequence[Sequence[torch.Tensor]],
    nodes: Sequence[str],
    how: str,
    find: Callable[[], list[Range]],
) -> list[Range]:
    """Scale and zero point of the codes of some nodes' values over the calibration inputs, read from the
    cache where they were found before, and kept there.

    Args:
        program: that makes the values.
        calibration: its tensors, flat.
        nodes: their names.
        how: the code that finds ranges, and what that is built on.
        find: gives them, in the order of the nodes.
    """
    asked = f"{nodes} {torch.get_num_threads()} {torch.backends.cpu.get_cpu_capability()} {how}"
    leaves = itertools.chain.from_iterable(program.leaves_with(inputs) for inputs in calibration)
    key = _hash(program, leaves, asked, ())
    if key is None:
        return find()
    path = cache_folder() / "ranges" / f"{key}.json"
    found: list[Range] | None = recalled(path, list[Range], _MOST_BYTES, "kept ranges")
    if found is None or len(found) != len(nodes):
        remember(path, found := find(), _MOST_FILES)
    return found


def of_code(program: Program, asked: str) -> str | None:
    """What a compiler makes of a program, as a hash of its graph, its weights' bytes, torch's version, and of
    `asked`: what else it follows from.
    """
    return _hash(program, (), asked, ())


def rehearsed(
    of: str | None,
    inputs: Iterable[torch.Tensor],
    chosen: object,
    emulate: Callable[[], float | None],
) -> float | None:
    """A plan's emulated error, read from the cache where it was found before, and kept there.

    Args:
        of: hash of the program; None for what cannot be told.
        inputs: that it is emulated at.
        chosen: what else it follows from, by how it is written: the plan's options, how outputs are compared.
        emulate: finds it; None is not kept.
    """
    if of is None:
        return emulate()
    digest = hashlib.sha256(f"{of}\0{chosen}".encode())
    for tensor in inputs:
        content.add(digest, tensor)
    path = cache_folder() / "rehearsed" / f"{digest.hexdigest()}.json"
    error: float | None = recalled(path, _Error, _MOST_BYTES, "a kept error")
    if error is None and (error := emulate()) is not None:
        remember(path, error, _MOST_FILES)
    return error


def _key(
    program: Program, inputs: Sequence[Inputs], options: Mapping[str, tuple[Form, ...]], how: str
) -> str | None:
    asked = how + "".join(
        f"{kind}:{[repr(form) for form in forms]};" for kind, forms in sorted(options.items())
    )
    leaves = (leaf for given in inputs for leaf in leaves_of(program, given))
    return _hash(program, leaves, asked, ("sensitivity", "pooled", "recorder", *_EMULATION))


def _hash(program: Program, inputs: Iterable[object], asked: str, code: Sequence[str]) -> str | None:
    """The hash; None where a tensor has no bytes to read (it is on the meta device, or packed by another
    library).
    """
    digest = hashlib.sha256(f"{torch.__version__}\0{_code(code)}\0{asked}".encode())
    try:
        for part in itertools.chain(_graph(program), inputs):
            digest.update(_hash_of(part))
    except (NotImplementedError, RuntimeError, TypeError):
        return None
    return digest.hexdigest()


def _hash_of(part: object) -> bytes:
    """Of one line or tensor. Raises what `content.add` does."""
    known = _read_once.get()
    if known is None or not isinstance(part, torch.Tensor) or part.is_inference():
        return _hash_of_bytes(part)
    before = known.get(part)
    if before is None or before[0] != part._version:
        known[part] = before = (part._version, _hash_of_bytes(part))
    made: bytes = before[1]
    return made


def _hash_of_bytes(part: object) -> bytes:
    digest = hashlib.sha256()
    content.add(digest, part)
    return digest.digest()


def _graph(program: Program) -> Iterator[str | torch.Tensor | None]:
    """Every node with its arguments, and the tensors behind it."""
    for node, line in content.lines(program.graph):
        yield line
        if node.op == "get_attr":
            yield program.tensor(node)


def _code(names: Sequence[str]) -> str:
    """The code that measures: what another release measured is not read."""
    here = Path(__file__).parent
    return hashlib.sha256(b"".join((here / f"{name}.py").read_bytes() for name in names)).hexdigest()


def _read(path: Path) -> KeptErrors | None:
    found: KeptErrors | None = recalled(path, KeptErrors, _MOST_BYTES, "kept sensitivities")
    return found


def _write(path: Path, found: Sensitivity) -> None:
    """An error that is not finite is null in JSON: the file is not read."""
    errors = [(site, option, error) for (site, option), error in found.errors.items()]
    kept = KeptErrors(errors=errors, method=found.method, draws=found.draws, seconds=found.seconds)
    remember(path, kept, _MOST_FILES)
