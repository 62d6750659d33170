"""A step of generation lowered: each of its graphs by the backend, then put together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from effcompile.backends.base import Backend, Lowered
from effcompile.backends.torch import TorchLowered
from effcompile.capture.generation import PAST, GenerationStep
from effcompile.ir.plan import Plan
from effcompile.ir.program import Program
from effcompile.runtime.generation.steps import CacheRoom, LoweredStep, assembled
from effcompile.runtime.inputs import tables_of
from effcompile.search.generation.cases import sized, solid
from effcompile.search.generation.text import CalibrationText, as_inputs


def lower_step(
    step: GenerationStep,
    program: Program,
    backend: Backend,
    plan: Plan,
    room: CacheRoom,
    texts: Sequence[CalibrationText] = (),
) -> tuple[LoweredStep, dict[str, Lowered]]:
    """A step made runnable, and what the backend made of each of its graphs: `step`, and of an
    encoder-decoder `source` and `encoder`, and `eye` of one that encodes images.

    Args:
        step: as captured.
        program: its graph as passes left it.
        backend: where it runs.
        plan: what is done at its sites.
        room: of its cache.
        texts: to find ranges with.

    Raises:
        LoweringError: the backend cannot run it.
    """
    # most calls have one row: backends look at the example's
    program = solid(sized(step, program, batch=1, past=PAST, new=2, images=2))
    calibration = [program.flat_inputs(*as_inputs(text, step.layout, program.kwargs)) for text in texts] or [
        program.flat_inputs()
    ]
    graphs = {"step": program, "source": step.source, "encoder": step.encoder, "eye": step.eye}
    ranges = {"step": calibration, "encoder": [list(text.source.values()) for text in texts if text.source]}
    made: dict[str, Lowered] = {}
    for name, graph in graphs.items():
        if graph is not None:
            made[name] = backend.lower(graph, plan, ranges.get(name) or [graph.flat_inputs()])
            made[name].tune(graph.flat_inputs())
    tables = {
        name: rows
        for graph in (step.program, step.encoder)
        if graph is not None
        for name, rows in tables_of(graph).items()
    }
    seen = step.eye.inputs if step.eye else ()
    whole = assembled(step.boundary, step.layout, room, program.inputs, tables, made, step.image, seen)
    part = made["step"]
    if isinstance(part, TorchLowered) and {"CUDA graph", "kernels"} & {*part.settings}:  # on a GPU
        made["step"] = replace(part, settings={**part.settings, "CUDA graph": whole.recorded})
    return whole, made
