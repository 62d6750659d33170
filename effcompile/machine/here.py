"""The machine, or its GPU, as a target to plan for: what its store holds, and a probe for what nobody has
measured yet.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from time import perf_counter

from effcompile.core.pace import Pace, at_pace
from effcompile.machine.calibration import (
    BackendPoints,
    Calibration,
    Measure,
    measured,
    peak_rates,
    versions_of,
)
from effcompile.machine.cold import reads_weights
from effcompile.machine.hardware import DeviceRates
from effcompile.machine.load import busy
from effcompile.machine.target import KernelCall, Target

#: Name of the target that is this machine.
HERE = "this machine"


def this_machine(
    calibration: Calibration,
    measures: Mapping[str, Measure],
    *,
    budget_seconds: float = 20.0,
    priced_as: PricedAs = lambda backend, call: backend,
    pace: Pace | None = None,
) -> Target:
    """A Target with the calibration's laws, and a probe for shapes that were not measured.

    The probe times a (backend, kernel, shape) once and appends it to `calibration` (absence too), which
    becomes `dirty`: save it with `save_if_dirty` at the end. When a backend's `budget_seconds` are used up
    it falls back to the Law, but a shape that is far from all that were measured is always measured, as there
    is nothing to fall back to. What is `priced_as` another backend's is timed and kept as that one's. At a
    `pace`: see core/pace.py.
    """
    prober, machine, rates = (
        _Prober(calibration, measures, budget_seconds, priced_as, pace),
        calibration.machine,
        calibration.device,
    )
    overheads = [points.overhead for points in calibration.backends.values() if points.overhead > 0]
    found = Target(
        name=HERE,
        description=_described(calibration),
        device="cpu",
        cores=machine.cores,
        memory_bytes=machine.memory_bytes,
        memory_bandwidth=calibration.memory_bandwidth,
        link_bandwidth=calibration.memory_bandwidth,  # the device is the host
        peak_flops=dict(calibration.peak_flops),
        efficiency=0.85,  # of a measured best, which whole models reach to 0.81-0.89 (facts/inference.md §2)
        launch_seconds=min(overheads, default=3e-6),
        calibrated=calibration.date,
        laws=calibration.laws(),
        sources=dict.fromkeys(
            ("memory_bandwidth", "peak_flops", "launch_seconds"), "measured by effcompile calibrate"
        ),
        probe=prober,
        failure=prober.failure,
        peak=prober.peak if rates is None else None,
    )
    return found if rates is None else _on_gpu(found, calibration, rates)


def _described(calibration: Calibration) -> str:
    machine, fp32 = calibration.machine, calibration.peak_flops.get("fp32", 0.0)
    cores = f"{machine.cores} core{'s' * (machine.cores > 1)}"
    threads = (
        ""
        if machine.threads == machine.cores
        else f" ({machine.threads} thread{'s' * (machine.threads > 1)} used)"
    )
    return (
        f"{cores}{threads}, {machine.cpu}, {fp32 / 1e9:.0f} GFLOP/s fp32, "
        f"{calibration.memory_bandwidth / 1e9:.0f} GB/s"
    )


def _on_gpu(host: Target, calibration: Calibration, rates: DeviceRates) -> Target:
    """The machine's GPU, in the place of the machine itself."""
    device = calibration.machine.device
    assert device is not None, "a store of a GPU says of which"
    flops = ", ".join(f"{name} {peak / 1e12:.0f}" for name, peak in rates.peak_flops.items())
    described = (
        f"{device.name}, {device.memory_bytes / 2**30:.0f} GiB; {flops} TFLOP/s, "
        f"{rates.bandwidth / 1e9:.0f} GB/s"
    )
    measured = ("memory_bandwidth", "peak_flops", "launch_seconds", "link_bandwidth")
    return replace(
        host,
        description=f"{described}, {rates.to_host / 1e9:.0f} GB/s to the host, "
        f"{rates.from_host / 1e9:.0f} back",
        device="cuda",
        cores=device.processors,
        memory_bytes=device.memory_bytes,
        memory_bandwidth=rates.bandwidth,
        link_bandwidth=min(rates.to_host, rates.from_host),
        launch_seconds=rates.launch_seconds,
        host_memory_bytes=host.memory_bytes,
        library_bytes=rates.library_bytes,
        sources=dict.fromkeys(measured, "measured on this GPU"),
    )


#: Seconds of timing between two looks at who else uses the machine.
_LOOK_AGAIN = 3.0


#: Weights that are enough to time reading them, and what the columns of a part are a multiple of.
_ENOUGH, _PANEL = 1 << 24, 64


def part_of(call: KernelCall) -> tuple[KernelCall, float]:
    """What is timed in the place of a call, and how many times as long that takes: of a vocabulary's head for
    few rows a part of its columns, as making it in every format takes longer than all else that is timed.
    """
    if not reads_weights(call) or call.dims[1] * call.dims[2] <= 2 * _ENOUGH:
        return call, 1.0
    m, k, n, *group = call.dims
    columns = -(-(_ENOUGH // k) // _PANEL) * _PANEL
    return KernelCall(call.kernel, (m, k, columns, *group)), n / columns


def _times(seconds: float | None, times: float, overhead: float) -> float | None:
    """Of so many times the work; the launch is one."""
    return None if seconds is None else seconds * times - overhead * (times - 1)


#: What a dtype's best rate is taken of: a linear of ours of so many rows, columns in and out.
_OF_PEAKS, _LARGE = {"int8": "linear/int8_token", "bf16": "linear/bf16"}, (1024, 1024, 4096)
_OURS = "torch-eager"

#: Times as long, or as short, as what its neighbour's time allows, that a time is not taken for true at once.
_OUTLYING = 2.0


def outlying(call: KernelCall, seconds: float, near: KernelCall, near_seconds: float) -> int:
    """Whether a time contradicts that of a neighbour: 1 where it is too long, -1 too short, 0 where the two
    agree. Time grows as the bytes, as the FLOPs, or between them.
    """
    ratios = [
        1.0,
        call.bytes / max(near.bytes, 1.0),
        (call.flops or call.bytes) / max(near.flops or near.bytes, 1.0),
    ]
    least, most = near_seconds * min(ratios) / _OUTLYING, near_seconds * max(ratios) * _OUTLYING
    return (seconds > most) - (seconds < least)


#: The backend whose time of a kernel is that of this backend.
PricedAs = Callable[[str, KernelCall], str]


class _Prober:
    """Target.probe: measure once, remember, and fall back to the law when the time is used up."""

    def __init__(
        self,
        calibration: Calibration,
        measures: Mapping[str, Measure],
        budget_seconds: float,
        priced_as: PricedAs,
        pace: Pace | None,
    ) -> None:
        self.calibration, self.measures = calibration, measures
        self.priced_as, self.looked = priced_as, -_LOOK_AGAIN
        # each its own: the first would leave the others to their laws, and be compared with those
        self.left = dict.fromkeys(measures, budget_seconds)
        # those that were taken twice
        self.confirmed = set[KernelCall]()
        self.peaks = dict[str, float]()
        self.pace = pace

    def _busy(self) -> str:
        """Whether others use the machine now, looked at every few seconds."""
        if perf_counter() - self.looked < _LOOK_AGAIN:
            return ""
        self.looked = perf_counter()
        return busy()

    def _whose(self, backend: str, call: KernelCall) -> str:
        """The backend that is timed for it, or was."""
        other = self.priced_as(backend, call)
        points = self.calibration.backends.get(other)
        return other if other in self.measures or (points and points.known(call)[0]) else backend

    def __call__(self, backend: str, call: KernelCall) -> float | None:
        backend = self._whose(backend, call)
        points = self.calibration.backends.get(backend)
        tried, seconds = points.known(call) if points else (False, None)
        if tried:
            return seconds
        law = points.law(call.kernel) if points else None
        measure = self.measures.get(backend)
        if measure is None or (self.left[backend] <= 0 and law is not None and law.reaches(call)):
            return law.seconds(call) if law is not None else None
        if points is None:
            points = self.calibration.backends[backend] = BackendPoints(versions=versions_of(backend))
        points.busy = points.busy or self._busy()
        start = perf_counter()
        seconds = self._agreed(points, measure, call)
        self.left[backend] -= perf_counter() - start
        points.record(call, seconds)
        self.calibration.dirty = True
        return seconds

    def _timed(self, points: BackendPoints, measure: Measure, call: KernelCall) -> float | None:
        part, times = part_of(call) if self.calibration.device is None else (call, 1.0)
        with at_pace(self.pace):
            return measured(points, lambda _: _times(measure(part), times, points.overhead), call)

    def _agreed(self, points: BackendPoints, measure: Measure, call: KernelCall) -> float | None:
        """Seconds of a call, which are kept for good: where they contradict those of the nearest one, the
        longer of the two are taken once more, and the shorter kept, as noise only adds.
        """
        seconds, near = self._timed(points, measure, call), points.neighbour(call)
        if seconds is None or near is None:
            return seconds
        side = outlying(call, seconds, *near)
        if side > 0:
            return min(seconds, self._timed(points, measure, call) or seconds)
        if side < 0 and near[0] not in self.confirmed:
            self.confirmed.add(near[0])
            if (again := self._timed(points, measure, near[0])) is not None and again < near[1]:
                points.amend(near[0], again)
                self.calibration.amended += 1
        return seconds

    def peak(self, dtype: str) -> float:
        """Target.peak: FLOP/s that some linear reached, a large one of ours among them."""
        if dtype not in self.peaks:
            if (kernel := _OF_PEAKS.get(dtype)) is not None:
                self(_OURS, KernelCall(kernel, _LARGE))
            self.peaks[dtype] = peak_rates(self.calibration.backends, 0.0).get(dtype, 0.0)
        return self.peaks[dtype]

    def failure(self, backend: str, call: KernelCall) -> str | None:
        """Target.failure: what the measurement of an absent kernel raised."""
        points = self.calibration.backends.get(self._whose(backend, call))
        return points.failures.get(str(call)) if points else None
