"""What was measured while others used the machine is taken again."""

from __future__ import annotations

from effcompile.core.reasons import Because, Reason
from effcompile.machine.calibration import Calibration, peak_rates
from effcompile.machine.hardware import matmul_peak, read_bandwidth
from effcompile.machine.load import busy


def without_busy(calibration: Calibration) -> Reason | None:
    """Takes again, where the machine is not busy now, what was measured while others used it; says so.

    The machine's rates are measured at once, and the kernels of backends when they are asked for. While the
    machine is still busy what was measured stays: it is as good as new.
    """
    if calibration.device is not None:
        return None  # its kernels are timed by its own clock, and take the best of several
    found = {
        f"kernel times of {name}": points.busy for name, points in calibration.backends.items() if points.busy
    }
    if slow := bool(calibration.busy) or _slow_rates(calibration):
        found = {"the machine's rates": calibration.busy or "kernels were faster than they allow", **found}
    if not found:
        return None
    names = ", ".join(found)
    what, figures = (
        "{name} were taken on a busy machine ({name})",
        (names[0].upper() + names[1:], next(iter(found.values()))),
    )
    if now := busy():
        return Because(
            what + "; it is still busy ({name}), so that predicted times may be off.", (*figures, now)
        )
    if slow:
        calibration.memory_bandwidth = max(calibration.memory_bandwidth, read_bandwidth())
        calibration.peak_flops = peak_rates(calibration.backends, matmul_peak())
        calibration.busy = ""
    for name in [name for name, points in calibration.backends.items() if points.busy]:
        del calibration.backends[name]  # an emptied one tells that its version changed
    calibration.dirty = True
    return Because(what + ", and are taken again.", figures)


def _slow_rates(calibration: Calibration) -> bool:
    """Whether a kernel did more FLOP/s than the machine is said to reach, by more than noise: so the rates
    were taken on a busy machine.
    """
    reached = peak_rates(calibration.backends, 0.0)
    return any(reached.get(dtype, 0.0) > 1.25 * stated for dtype, stated in calibration.peak_flops.items())
