"""Which machine is planned for: a target file, or this machine as calibrated, measuring what a plan still
needs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from effcompile.backends import usable_backends
from effcompile.backends.base import Backend
from effcompile.backends.torch.measure import measure as torch_measure
from effcompile.backends.torch.measure import priced_as
from effcompile.core import timing
from effcompile.core.errors import UsageError
from effcompile.core.pace import Pace
from effcompile.core.reasons import Reason
from effcompile.machine import busy_points, memory
from effcompile.machine import calibration as store
from effcompile.machine.accelerator import device_rates, this_accelerator
from effcompile.machine.calibration import Calibration
from effcompile.machine.cold import forget
from effcompile.machine.hardware import Accelerator, small_product
from effcompile.machine.here import this_machine
from effcompile.machine.machines import load_target
from effcompile.machine.target import KernelCall, Target
from effcompile.search.progress import QUIET, Progress

AUTO = "auto"

#: What the unplanned model runs on: torch's own operators, as the user's code calls them.
BASELINE = "torch"

_HOST = torch.device("cpu")
#: Backends that run on the processor alone: their kernels are no measure of a GPU's.
_ON_HOST = ("onnxruntime", "openvino")

#: Types of device that are measured; what has no data is planned as if it were here.
_PLACES = ("cpu", "cuda", "meta")

#: Seconds that one plan may spend on timing a backend's kernels that it has no measurement of; further ones
#: are interpolated.
PROBE_SECONDS = 25.0
#: Seconds that its timings may wait in all for others who use the machine.
_WAITED = 6.0


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A target, and for this machine the store where new timings go, and the pace that they are held
    against.
    """

    target: Target
    calibration: Calibration | None = None
    notes: tuple[Reason, ...] = ()
    pace: Pace | None = None

    @property
    def here(self) -> bool:
        """True when plans for it can be run and timed here."""
        return self.calibration is not None

    @property
    def amended(self) -> int:
        """How many times of kernels were put in the place of others until now."""
        return self.calibration.amended if self.calibration is not None else 0

    def distrust(self, backend: str) -> bool:
        """Forget all kernel times of a backend, to be taken again for the next plan; whether
        there were any.
        """
        found = self.calibration is not None and self.calibration.backends.pop(backend, None) is not None
        if found and self.calibration is not None:
            self.calibration.dirty = True
        return found

    def priced_anew(self, backends: Iterable[Backend]) -> Machine:
        """The same machine with all kernel times of these backends forgotten: they are taken again as they
        are asked for.
        """
        if self.calibration is None:
            return self
        backends = tuple(backends)
        for backend in backends:
            self.distrust(backend.name)
        measures = _measures(backends, self.calibration.machine.device)
        fresh = this_machine(
            self.calibration, measures, budget_seconds=PROBE_SECONDS, priced_as=priced_as, pace=self.pace
        )
        return replace(self, target=fresh)

    def keep_timings(self) -> tuple[Reason, ...]:
        """Save what was measured since; returns a note where it could not be."""
        forget()
        if self.calibration is not None and self.pace is not None:
            self.calibration.pace = self.pace.best
        note = store.save_if_dirty(self.calibration) if self.calibration is not None else None
        return (note,) if note else ()


def is_here(target: str | Target, place: torch.device) -> bool:
    """Whether a target is this machine: "auto", or that which names the GPU that the model lies on."""
    if target == AUTO:
        return True
    named = target if isinstance(target, Target) else load_target(target)
    return place.type == "cuda" and torch.cuda.get_device_name(place) in named.devices


def resolve(target: str | Target, backends: Iterable[Backend], place: torch.device = _HOST) -> Machine:
    """The machine meant by a name, a path to a target file, or a Target.

    `place`: where the model lies. On a GPU, which has to be the current device, "auto" is that GPU, and so is
    a target that names it.

    Raises:
        UnknownNameError: no such target. FormatError: a target file that is not one. UsageError: a plan for
            here, where the model lies on something that is not measured.
    """
    if not is_here(target, place):
        return Machine(target=target if isinstance(target, Target) else load_target(target))
    if place.type not in _PLACES:
        raise UsageError(
            f"The model lies on {place}, which effcompile does not measure: plans are carried out on CPUs "
            "and on GPUs that torch calls 'cuda' (NVIDIA's, and AMD's under ROCm). Move the model and its "
            "inputs there, or ask for a plan alone: effcompile.plan(..., target='h100-sxm')."
        )
    found = _here(backends, this_accelerator() if place.type == "cuda" else None)
    if target == AUTO:
        return found
    named = target if isinstance(target, Target) else load_target(target)
    known = {
        name: getattr(named, name)
        for name in ("name", "cluster", "watts", "hourly_price", "gains", "devices")
    }
    return replace(found, target=replace(found.target, **known))


def calibrated_alone() -> bool:
    """Have this processor's rates measured, if nobody has, before anything is compiled beside; whether it is
    what a model is planned for, as there is no GPU.
    """
    if torch.cuda.is_available():
        return False
    if store.load_or_none() == (None, None):
        store.save_if_dirty(store.calibrate({}))
    return True


def _here(backends: Iterable[Backend], device: Accelerator | None) -> Machine:
    """Where planning runs: the machine, or its current GPU."""
    calibration, note = store.load_or_none(device=device)
    if calibration is None:
        calibration = (
            store.calibrate({}) if device is None else store.calibrate_device(device, device_rates())
        )
    notes = tuple(said for said in (note, busy_points.without_busy(calibration)) if said)
    measures = _measures(backends, device)
    pace = None  # a GPU has a clock of its own
    if device is None:
        pace = Pace(small_product(), calibration.pace or math.inf, _WAITED * timing.PATIENCE)
    here = this_machine(calibration, measures, budget_seconds=PROBE_SECONDS, priced_as=priced_as, pace=pace)
    if device is not None:  # others may use it, too
        here = replace(
            here,
            memory_bytes=min(
                here.memory_bytes, (memory.free_bytes("cuda") or 0) + torch.cuda.memory_allocated()
            ),
        )
    return Machine(target=here, calibration=calibration, notes=notes, pace=pace)


def calibrate(*, quick: bool = False, progress: Progress = QUIET) -> Path:
    """Measure this machine's kernels on every backend that runs here and keep them; returns the file.

    Raises:
        UsageError: the cache folder cannot be written (it says how to choose another).
    """
    backends, _ = usable_backends(None)
    with progress.step("calibrate this machine"):
        measured = store.calibrate(_measures(backends), quick=quick, progress=progress.update)
    return store.save(measured)


def _measures(backends: Iterable[Backend], device: Accelerator | None = None) -> dict[str, store.Measure]:
    """How each backend, and the unplanned model, times a kernel.

    `device`: those that run on the current GPU, on it.
    """
    if device is not None:
        on_it: dict[str, store.Measure] = {
            each.name: partial(_on_device, each.measure) for each in backends if each.name not in _ON_HOST
        }
        return {BASELINE: partial(torch_measure, engine="stock", device="cuda"), **on_it}
    measures: dict[str, store.Measure] = {BASELINE: partial(torch_measure, engine="stock")}
    for backend in backends:
        measures[backend.name] = backend.measure
    return measures


def _on_device(measure: store.Measure, call: KernelCall) -> float | None:
    with torch.device("cuda"):
        return measure(call)
