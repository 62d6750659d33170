"""Whether what effcompile stands on is right on this machine: each part is run on something small and
compared with what is known.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch
import z3
from torch import nn

from effcompile.backends import BACKENDS, load_backend
from effcompile.backends import triton as tiled
from effcompile.capture.verify import relative_error
from effcompile.compiler.compile import optimize
from effcompile.core import torch_compat
from effcompile.core.errors import EffcompileError, MissingPackageError
from effcompile.core.files import cache_folder, write_atomically
from effcompile.core.goal import Goal
from effcompile.core.stages import first_line
from effcompile.core.units import format_bytes
from effcompile.machine import busy_points, native
from effcompile.machine import calibration as store
from effcompile.machine.accelerator import this_accelerator
from effcompile.ops.block_sparse import block_sparse_linear, fallback_reason
from effcompile.ops.block_sparse_dense import dense_weight
from effcompile.ops.int8_linear import told as int8_told
from effcompile.search.request import Request
from effcompile.sparse.pattern import BlockPattern

#: "ok": right; "absent": not here, which another part stands in for; "wrong": to be mended.
Status = Literal["ok", "absent", "wrong"]
#: The largest relative error of a part that computes in fp32.
_EXACT = 1e-5
#: A GPU of which less is free is in use.
_FREE = 0.9
_PROBE = ".calibration-probe"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One part: what was seen, and what to do where it is not as it should be."""

    part: str
    status: Status
    seen: str
    remedy: str = ""
    seconds: float = 0.0


def examine() -> Iterator[Finding]:
    """All parts, one after the other, each as soon as it is known; none of them raises."""
    parts: dict[str, Callable[[], Iterator[Finding]]] = {
        "torch": _torch, "solver": _solver, "compiler": _compiler, "backends": _backends, "GPU": _gpus,
        "kernels": _kernels, "calibration": _calibration, "cache": _cache,
    }  # fmt: skip
    for name, look in parts.items():
        start = time.perf_counter()
        try:
            for found in look():
                yield _timed(found, start)
                start = time.perf_counter()
        except Exception as error:  # what is broken may break in any way
            yield _timed(
                Finding(part=name, status="wrong", seen=first_line(error), remedy="please report this"), start
            )


def _timed(found: Finding, start: float) -> Finding:
    return replace(found, seconds=time.perf_counter() - start)


def _torch() -> Iterator[Finding]:
    doubt = torch_compat.untested(torch.__version__)
    seen = (
        f"{torch.__version__}, {torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}"
    )
    yield Finding(part="torch", status="ok", seen=seen if doubt is None else f"{seen}; {doubt}")


def _solver() -> Iterator[Finding]:
    """A knapsack of twelve things, against all 4096 ways to pack it."""
    values, weights, room = [7, 2, 9, 4, 8, 1, 6, 5, 3, 9, 2, 7], [3, 1, 5, 2, 6, 1, 4, 4, 2, 7, 1, 5], 17
    taken = [z3.Bool(f"x{i}") for i in range(len(values))]
    solver = z3.Optimize()
    solver.add(z3.PbLe(list(zip(taken, weights, strict=True)), room))
    worth = z3.Sum([z3.If(x, v, 0) for x, v in zip(taken, values, strict=True)])
    solver.maximize(worth)
    solved = solver.check() == z3.sat and solver.model().eval(worth).as_long()
    ways = itertools.product((0, 1), repeat=len(values))
    best = max(_sum(way, values) for way in ways if _sum(way, weights) <= room)
    seen = f"z3 {z3.get_version_string()}"
    if solved == best:
        yield Finding(part="solver", status="ok", seen=seen)
    else:
        yield Finding(
            part="solver",
            status="wrong",
            seen=f"{seen}: {solved} for {best}",
            remedy="pip install --force-reinstall z3-solver",
        )


def _sum(way: tuple[int, ...], of: list[int]) -> int:
    return sum(x * y for x, y in zip(way, of, strict=True))


def _compiler() -> Iterator[Finding]:
    """The C++ kernels of sparse linears, against the dense product, and by which instructions bytes are
    multiplied, or why by torch.
    """
    if (name := native.fingerprint()) == "no compiler":
        yield Finding(
            part="C++ kernels", status="absent",
            seen="no compiler found: sparse weights and chains of operators run on torch's own",
            remedy="apt-get install g++",
        )  # fmt: skip
        return
    pattern = BlockPattern.random(64, 96, 16, 0.5, torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(1)
    x, values = (
        torch.randn(7, 96, generator=generator),
        torch.randn(len(pattern.col), 16, 16, generator=generator),
    )
    if (reason := fallback_reason(x, 16)) is not None:
        yield Finding(part="C++ kernels", status="absent", seen=reason)
        return
    with torch.no_grad():
        found = block_sparse_linear(x, values, *pattern.indices, None)
        error = _error(found, x.double() @ dense_weight(values, *pattern.indices[:2], 96).double().T)
    yield _judged("C++ kernels", error, f"sources {name}; bytes are multiplied by {int8_told()}")


def _judged(part: str, error: float, about: str) -> Finding:
    if error <= _EXACT:
        return Finding(part=part, status="ok", seen=f"{about}; error {error:.1e}")
    return Finding(
        part=part,
        status="wrong",
        seen=f"{about}; error {error:.1e}, more than {_EXACT:.0e}",
        remedy="please report this",
    )


def _error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return relative_error(found.double().cpu(), wanted.double().cpu())


class _Small(nn.Module):
    """Two linears with a GELU between, and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(32, 64), nn.LayerNorm(64), nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.second(self.norm(torch.nn.functional.gelu(self.first(x))))
        return y


def _backends() -> Iterator[Finding]:
    """A small model planned, lowered and verified on each, and called once more."""
    for name in BACKENDS:
        try:
            reason: object = load_backend(name).unavailable()
        except MissingPackageError as error:
            reason = error
        if reason is None:
            yield _on(name, tiled.device() if name == "triton" else "cpu")
        else:
            yield Finding(part=name, status="absent", seen=str(reason))


def _on(backend: str, device: str) -> Finding:
    generator = torch.Generator().manual_seed(0)
    model, x = _Small().eval().to(device), torch.randn(3, 32, generator=generator).to(device)
    with torch.no_grad():
        wanted = model(x)
        try:
            found = optimize(model, (x,), {}, **Request(goal=Goal(), backend=backend).whole)(x)
        except EffcompileError as error:
            return Finding(
                part=backend,
                status="wrong",
                seen=str(error).splitlines()[0],
                remedy="leave it out: --backend names another",
            )
    return _judged(backend, _error(found, wanted), "a small model runs")


def _gpus() -> Iterator[Finding]:
    if not torch.cuda.is_available():
        yield Finding(
            part="GPU",
            status="absent",
            seen="PyTorch sees none: plans for absent ones (--target h100-sxm) go by data sheets",
        )
        return
    for index in range(torch.cuda.device_count()):
        with torch.cuda.device(index):
            free, size = torch.cuda.mem_get_info()
            name = this_accelerator().name
        seen = f"{name}, {format_bytes(free)} of {format_bytes(size)} free"
        busy = "others use it: plans count what is free" if free < _FREE * size else ""
        yield Finding(part=f"GPU {index}", status="ok", seen=seen, remedy=busy)


def _kernels() -> Iterator[Finding]:
    """Every family of tiled kernels in the dtypes of models, against PyTorch in float64."""
    if (reason := tiled.unavailable()) is not None:
        yield Finding(part="Triton kernels", status="absent", seen=f"{reason}; torch's own kernels stand in")
        return
    for family, verdicts in tiled.examined():
        wrong = next((v.reason for v in verdicts if v.reason is not None), None)
        if wrong is not None:
            yield Finding(
                part=family,
                status="wrong",
                seen=wrong,
                remedy="they are not used: torch's own stand in; please report this",
            )
        else:
            errors = ", ".join(f"{v.error:.1e} in {v.dtype}" for v in verdicts)
            yield Finding(part=family, status="ok", seen=f"error {errors}")


def _calibration() -> Iterator[Finding]:
    devices = [this_accelerator()] if torch.cuda.is_available() else []
    for place, device in (("this machine", None), *((device.name, device) for device in devices)):
        found, note = store.load_or_none(device=device)
        if found is None:
            seen = str(note) if note else f"{place} was not measured yet"
            yield Finding(
                part="calibration",
                status="absent",
                seen=seen,
                remedy="effcompile calibrate, or the first plan does it",
            )
        else:
            busy = busy_points.without_busy(found)
            yield Finding(
                part="calibration",
                status="ok",
                seen=f"{place}, of {found.date}",
                remedy=str(busy) if busy else "",
            )


def _cache() -> Iterator[Finding]:
    folder = cache_folder()
    try:
        write_atomically(folder / _PROBE, b"").unlink()
    except (EffcompileError, OSError) as error:
        yield Finding(
            part="cache",
            status="wrong",
            seen=str(error).splitlines()[0],
            remedy="set EFFCOMPILE_CACHE to a folder of yours",
        )
        return
    yield Finding(part="cache", status="ok", seen=str(folder))
