"""The measured kernel store of this machine: a standard grid once, then any shape a plan asks for, kept on
disk.

A GPU of this machine has a store of its own, which begins with what it does at the most
(machine/accelerator.py). The file is `calibration-<machine>.json` under $EFFCOMPILE_CACHE, else
$XDG_CACHE_HOME/effcompile, else ~/.cache/effcompile; written whole or not at all. Points of a backend hold
for the package versions they were measured with; on another version that backend is measured again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from datetime import date
from pathlib import Path
from typing import Annotated, Any

import msgspec

from effcompile.core.errors import EffcompileError, FormatError, UsageError, clipped
from effcompile.core.files import cache_folder, read_kept, write_kept
from effcompile.core.json_keys import repeated_key
from effcompile.core.reasons import Because, Reason
from effcompile.ir.formats import W4, W8, W8_CHANNEL
from effcompile.machine import native
from effcompile.machine.grid import grid
from effcompile.machine.hardware import (
    Accelerator,
    DeviceRates,
    Hardware,
    matmul_peak,
    package_versions,
    read_bandwidth,
    this_hardware,
)
from effcompile.machine.load import busy
from effcompile.machine.target import KERNELS, Dims, KernelCall, Law, merge_points

FORMAT = "effcompile-calibration"
VERSION = 2

#: Times one kernel of one backend (seconds), or None where the backend has no such kernel.
Measure = Callable[[KernelCall], float | None]
#: Called after each kernel of the grid with the backend's name, kernels done and kernels in all.
Progress = Callable[[str, int, int], None]

#: Backend → raised whenever it runs a kernel in another way: what was measured before is of the old one.
_LOWERING = {"torch-eager": "8", "torch-inductor": "4", "onnxruntime": "2", "openvino": "2"}
#: Backend → packages whose version its points depend on; every other backend runs on torch.
_DEPENDS = {"onnxruntime": ("onnxruntime",), "openvino": ("openvino",)}

#: A kernel of a minute is not measured, and no machine has more FLOP/s or bytes/s than this.
_Seconds = Annotated[float, msgspec.Meta(gt=0, le=60)]
_Rate = Annotated[float, msgspec.Meta(gt=0, le=1e18)]
_MOST_BYTES = 256 << 20


class BackendPoints(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What was measured of one backend.

    Attributes:
        overhead: seconds of the smallest kernel; what a launch costs.
        points: kernel → (dims, seconds).
        absent: kernel → shapes it does not have; `missing`: kernels it has at no shape.
        failures: kernel call → the error its measurement raised (counted as absent).
        versions: package → version it was measured with; our compiled kernels count as one.
        busy: how busy the machine was with other work meanwhile, in words; "" for not at all.
    """

    overhead: Annotated[float, msgspec.Meta(ge=0, le=60)] = 0.0
    points: dict[str, list[tuple[Dims, _Seconds]]] = {}
    absent: dict[str, list[Dims]] = {}
    missing: set[str] = set()
    failures: dict[str, str] = {}
    versions: dict[str, str] = {}
    busy: str = ""

    def known(self, call: KernelCall) -> tuple[bool, float | None]:
        """(True, seconds or None for an absent kernel) when this call was tried before, else
        (False, None).
        """
        for dims, seconds in self.points.get(call.kernel, ()):
            if dims == call.dims:
                return True, seconds
        return call.kernel in self.missing or call.dims in self.absent.get(call.kernel, ()), None

    def record(self, call: KernelCall, seconds: float | None) -> None:
        if seconds is None:
            self.absent.setdefault(call.kernel, []).append(call.dims)
        else:
            self.points.setdefault(call.kernel, []).append((call.dims, seconds))

    def amend(self, call: KernelCall, seconds: float) -> None:
        """Put another time in the place of one that was measured."""
        timed = self.points[call.kernel]
        timed[[dims for dims, _ in timed].index(call.dims)] = (call.dims, seconds)

    def neighbour(self, call: KernelCall) -> tuple[KernelCall, float] | None:
        """The nearest of the same kernel that was measured, at another shape, and its seconds."""
        others = [point for point in self.points.get(call.kernel, ()) if point[0] != call.dims]
        found = Law(points=tuple(others)).nearest(call) if others else None
        return None if found is None else (KernelCall(call.kernel, found[0]), found[1])

    def law(self, kernel: str) -> Law | None:
        points = self.points.get(kernel)
        return Law(points=merge_points(points), overhead=self.overhead) if points else None


class Calibration(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Everything measured of one machine.

    Attributes:
        memory_bandwidth: bytes/s; `peak_flops`: dtype → FLOP/s; both the best that was seen.
            On a GPU they are its own. device: what else a GPU does; `machine` says which.
        pace: the least seconds of what a pace is told by (core/pace.py); 0: not known.
        busy: as of BackendPoints, while these rates were measured.
        dirty: whether it holds points that its file does not.
        amended: how many of its times were put in the place of others, in this process.
    """

    machine: Hardware
    date: str
    memory_bandwidth: _Rate
    peak_flops: dict[str, _Rate]
    device: DeviceRates | None = None
    busy: str = ""
    pace: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0
    backends: dict[str, BackendPoints] = {}
    dirty: bool = False
    amended: int = 0

    def laws(self) -> dict[str, dict[str, Law]]:
        """backend → kernel → Law, as a Target carries them."""
        return {
            b: {k: law for k in points.points if (law := points.law(k)) is not None}
            for b, points in self.backends.items()
        }


# ------------------------------------------------------------------ measuring


def calibrate_device(device: Accelerator, rates: DeviceRates) -> Calibration:
    """A store for a GPU with these rates, and no kernel of any backend yet."""
    return Calibration(
        machine=this_hardware(device), date=date.today().isoformat(), memory_bandwidth=rates.bandwidth,
        peak_flops=dict(rates.peak_flops), device=rates, dirty=True,
    )  # fmt: skip


def calibrate(
    measures: Mapping[str, Measure],
    *,
    quick: bool = False,
    keep: Calibration | None = None,
    progress: Progress | None = None,
) -> Calibration:
    """Measure this machine: memory bandwidth, then the grid on every backend.

    A kernel that its first two shapes do not have is recorded as missing and not tried again. A measurement
    that raises counts as absent, with the error kept in `BackendPoints.failures`.

    Args:
        measures: backend → how it times a kernel.
        quick: one small shape per kernel instead of the grid.
        keep: an earlier calibration of this machine; its points of backends not in `measures` are kept.
        progress: called after each kernel call of the grid.
    """
    backends = dict(keep.backends) if keep else {}
    for name, measure in measures.items():
        backends[name] = _measure_backend(name, measure, grid(quick=quick), progress)
    found = busy()
    return Calibration(
        machine=this_hardware(),
        date=date.today().isoformat(),
        memory_bandwidth=read_bandwidth(),
        peak_flops=peak_rates(backends, matmul_peak()),
        busy=found or busy(),
        backends=backends,
        dirty=True,
    )


def _measure_backend(
    name: str, measure: Measure, calls: tuple[KernelCall, ...], progress: Progress | None
) -> BackendPoints:
    points = BackendPoints(versions=versions_of(name), busy=busy())
    launch = KernelCall("pointwise/fp32", (1,))
    for done, call in enumerate((launch, *calls)):
        if not points.known(call)[0]:
            points.record(call, measured(points, measure, call))
        if call == launch:
            points.overhead = points.known(launch)[1] or 0.0
        elif not points.points.get(call.kernel) and len(points.absent[call.kernel]) == min(
            2, _count(calls, call.kernel)
        ):
            points.missing.add(call.kernel)
        if progress is not None and done:
            progress(name, done, len(calls))
    points.busy = points.busy or busy()
    return points


def _count(calls: tuple[KernelCall, ...], kernel: str) -> int:
    return sum(call.kernel == kernel for call in calls)


def measured(points: BackendPoints, measure: Measure, call: KernelCall) -> float | None:
    """Seconds of one kernel; None where it is absent, fails (noted), or gives no usable figure."""
    try:
        seconds = measure(call)
    except Exception as error:
        # a backend's library may raise anything; the kernel is then not offered, and it says why
        points.failures[str(call)] = (
            str(error)[:400]
            if isinstance(error, EffcompileError)
            else f"{type(error).__name__}: {error}"[:200]
        )
        return None
    return seconds if seconds is not None and math.isfinite(seconds) and seconds > 0 else None


def peak_rates(backends: Mapping[str, BackendPoints], fp32: float) -> dict[str, float]:
    """dtype → the best FLOP/s that any linear reached; fp32 at least that of torch's own product, which is
    given.
    """
    peaks = {"fp32": fp32}
    for points in backends.values():
        for kernel, timed in points.points.items():
            held = KERNELS[kernel].format
            if (
                kernel.startswith("linear/")
                and held is not None
                and held.family not in (W8.family, W8_CHANNEL.family, W4.family)
            ):
                best = max(KernelCall(kernel, dims).flops / seconds for dims, seconds in timed)
                dtype = KERNELS[kernel].dtype
                peaks[dtype] = max(best, peaks.get(dtype, 0.0))
    return peaks


def versions_of(backend: str) -> dict[str, str]:
    """What a backend's points hold for: package → version, and our kernels that it runs."""
    depends = _DEPENDS.get(backend, ("torch", "torchao"))
    found = {package: version for package, version in package_versions().items() if package in depends}
    found |= {"lowering": _LOWERING[backend]} if backend in _LOWERING else {}
    return found if backend == "openvino" else {**found, "compiled kernels": native.fingerprint()}


# ------------------------------------------------------------------ on disk


def calibration_path(machine: Hardware | None = None) -> Path:
    """The file of a machine's calibration (default: of this one)."""
    return cache_folder() / f"calibration-{(machine or this_hardware()).key}.json"


def save(calibration: Calibration, path: Path | None = None) -> Path:
    """Write the calibration, whole or not at all.

    Raises:
        UsageError: the folder cannot be made or written.
    """
    path = path or calibration_path(calibration.machine)
    body = msgspec.to_builtins(calibration)
    for of_process in ("dirty", "amended"):
        body.pop(of_process, None)
    written = write_kept(path, msgspec.json.encode({"format": FORMAT, "version": VERSION, **body}))
    calibration.dirty = False
    return written


def save_if_dirty(calibration: Calibration, path: Path | None = None) -> Reason | None:
    """Write the calibration if it holds new points.

    Returns None, or a note for the report when it could not be written.
    """
    if not calibration.dirty:
        return None
    try:
        save(calibration, path)
    except UsageError as error:
        return Because("The kernel timings were not kept for the next run: {name}", (str(error),))
    return None


def load(path: Path | None = None, device: Accelerator | None = None) -> Calibration:
    """Read this machine's calibration, or that of its GPU.

    Points of backends whose packages changed since are dropped.

    Raises:
        UsageError: there is no such file, or it cannot be read.
        FormatError: the file is corrupted, foreign, of another version or of another machine.
    """
    path = path or calibration_path(this_hardware(device))
    if not path.exists():
        raise UsageError(
            f"This machine is not calibrated yet: there is no {str(path)!r}. Run `effcompile calibrate`."
        )
    return _without_stale(_parsed(read_kept(path, _MOST_BYTES, "the calibration"), path, device))


def load_or_none(
    path: Path | None = None, device: Accelerator | None = None
) -> tuple[Calibration | None, Reason | None]:
    """(calibration or None, a note for the report or None): never raises.

    A file that is not there yet gives (None, None), a bad one (None, why).
    """
    path = path or calibration_path(this_hardware(device))
    try:
        if not path.exists():
            return None, None
        calibration = load(path, device)
    except (UsageError, OSError) as error:
        return None, Because(
            "The kept kernel timings were ignored and are measured again. {name}", (str(error),)
        )
    changed = [
        name for name, points in calibration.backends.items() if not points.points and not points.missing
    ]
    note = Because("Kernel timings of {name} are measured again: its version changed.", (", ".join(changed),))
    return calibration, note if changed else None


def _parsed(raw: bytes, path: Path, device: Accelerator | None) -> Calibration:
    mend = "Run `effcompile calibrate` to measure it anew."
    try:
        data: Any = msgspec.json.decode(raw)
        repeated = repeated_key(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FormatError(
            f"The calibration {str(path)!r} is not valid JSON ({error}); it may be cut off. {mend}"
        ) from error
    if repeated is not None:
        raise FormatError(
            f"The calibration {str(path)!r} says {clipped(repr(repeated))} twice in one object. {mend}"
        )
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise FormatError(
            f"{str(path)!r} is not an effcompile calibration: it has no 'format': {FORMAT!r}. {mend}"
        )
    if data.get("version") != VERSION:
        raise FormatError(
            f"The calibration {str(path)!r} has version {data.get('version')!r}; this effcompile reads "
            f"{VERSION}. {mend}"
        )
    try:
        calibration = msgspec.convert(data, Calibration)
    except msgspec.ValidationError as error:
        raise FormatError(f"The calibration {str(path)!r} is not valid: {clipped(error)}. {mend}") from error
    if (bad := _bad_kernel(calibration)) is not None:
        raise FormatError(
            f"The calibration {str(path)!r} holds {clipped(bad)}, which this effcompile does not know. {mend}"
        )
    if calibration.machine != this_hardware(device) or (calibration.device is None) != (device is None):
        raise FormatError(
            f"The calibration {str(path)!r} is of another machine ({calibration.machine.cpu}) or thread "
            f"count. {mend}"
        )
    calibration.dirty = False
    return calibration


def _bad_kernel(calibration: Calibration) -> str | None:
    """The first kernel whose name is unknown or whose dimensions do not fit it, as words."""
    for points in calibration.backends.values():
        for kernel, timed in points.points.items():
            wanted = len(KERNELS[kernel].dims.split()) if kernel in KERNELS else 0
            for dims, _ in timed:
                if len(dims) != wanted or min(dims, default=0) < 1 or max(dims) > 1 << 40:
                    return f"the kernel {kernel!r} with dimensions {list(dims)}"
    return None


def _without_stale(calibration: Calibration) -> Calibration:
    """Backends measured with other package versions are emptied, to be measured again."""
    for name, points in calibration.backends.items():
        if points.versions != versions_of(name):
            calibration.backends[name] = BackendPoints(versions=versions_of(name))
            calibration.dirty = True
    return calibration
