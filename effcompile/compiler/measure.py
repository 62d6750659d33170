"""What a run really costs: the original and the lowered candidates timed in turn, peak memory of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from effcompile.capture.mends import as_reference
from effcompile.compiler.settle import Outcome
from effcompile.core import torch_compat_memory
from effcompile.core.timing import faster_half_median, have_settled, interleaved
from effcompile.ir.figures import Totals
from effcompile.ir.program import Program

#: Seconds that comparing may take, and the least and most rounds it is done in.
_BUDGET, _LEAST, _MOST = 3.0, 3, 40

ORIGINAL = "original"


def compare(program: Program, model: nn.Module, outcomes: Sequence[Outcome]) -> dict[str, float]:
    """Seconds per call at the example inputs: the original (eager) and each outcome by backend,
    interleaved.
    """
    inputs = program.flat_inputs()
    with as_reference(model), torch.inference_mode():
        runs: dict[str, Callable[[], Any]] = {ORIGINAL: lambda: model(*program.args, **program.kwargs)}
        runs |= {outcome.plan.backend: partial(outcome.lowered, *inputs) for outcome in outcomes}
        if any(tensor.is_cuda for tensor in inputs):
            runs = {name: _awaited(run) for name, run in runs.items()}
        first = interleaved(runs, 1, repeats=1)
        once = sum(sum(values) for values in first.values())
        rounds = max(_LEAST, min(_MOST, int(_BUDGET / max(3 * once, 1e-4))))
        samples = interleaved(runs, min(rounds, _LEAST))
        while (done := _rounds(samples)) < rounds and not have_settled(samples.values()):
            for name, more in interleaved(runs, min(done, rounds - done)).items():
                samples[name] += more
    return {name: faster_half_median(values) for name, values in samples.items()}


def _rounds(samples: Mapping[str, list[float]]) -> int:
    return min(map(len, samples.values())) // 2


def baseline_totals(program: Program, model: nn.Module, seconds: Mapping[str, float]) -> Totals:
    """Measured figures of the original model at the example inputs."""
    with as_reference(model):
        model(*program.args, **program.kwargs)
        on_gpu = any(tensor.is_cuda for tensor in program.flat_inputs())
        with torch_compat_memory.watched_memory("cuda" if on_gpu else "cpu") as peak:
            model(*program.args, **program.kwargs)
    weights = program.weight_bytes()
    inputs = sum(tensor.nbytes for tensor in program.flat_inputs())
    return Totals(
        seconds=seconds[ORIGINAL], weight_bytes=weights, peak_bytes=weights + inputs + peak(), error=0.0
    )


def totals(outcome: Outcome, seconds: Mapping[str, float], error: float) -> Totals:
    """Measured figures of a lowered plan at the example inputs."""
    return Totals(
        seconds=seconds[outcome.plan.backend],
        weight_bytes=outcome.lowered.weight_bytes,
        peak_bytes=outcome.lowered.peak_bytes(outcome.program.flat_inputs()),
        error=error,
    )


def _awaited(run: Callable[[], object]) -> Callable[[], object]:
    """A call that returns when the GPU is done."""

    def call() -> None:
        run()
        torch.cuda.synchronize()

    return call
