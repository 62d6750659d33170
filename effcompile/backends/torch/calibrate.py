"""Finds the ranges of activations on calibration inputs, with torch's own observers, and how linears in
bytes have x.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import fx

from effcompile.core import torch_compat
from effcompile.core.errors import LoweringError
from effcompile.core.types import Outputs
from effcompile.estimate.codings import on_inputs
from effcompile.ir.formats import INT8_TOKEN
from effcompile.ir.program import Program
from effcompile.ops.byte_codings import Coding
from effcompile.sites.parts import linears

Range = tuple[float, int]  # scale, zero point


def activation_ranges(
    program: Program, nodes: Collection[fx.Node], calibration: Sequence[Sequence[torch.Tensor]]
) -> Mapping[fx.Node, Range]:
    """node → (scale, zero) of u8 codes for its values over all calibration inputs (flat tensor lists).

    Raises:
        LoweringError: there are nodes and no calibration inputs.
    """
    if not nodes:
        return {}
    if not calibration:
        raise LoweringError(
            "int8_static needs calibration inputs: pass calibration inputs, or let effcompile generate them."
        )
    # both with msgspec, which kernels alone do without
    from effcompile.estimate import kept
    from effcompile.machine.hardware import package_versions

    ordered = [node for node in program.graph.nodes if node in nodes]  # as they stand, in any process

    def observed() -> list[Range]:
        observers = {node: torch_compat.activation_observer() for node in ordered}
        interpreter = _Observing(program.module, observers)
        with torch.no_grad():
            for inputs in calibration:
                interpreter.run(*program.leaves_with(inputs), enable_io_processing=False)
        return [_qparams(observer) for observer in observers.values()]

    how = f"{Path(__file__).read_text(encoding='utf-8')}{package_versions()}"
    found = kept.ranges(program, calibration, [node.name for node in ordered], how, observed)
    return dict(zip(ordered, found, strict=True))


class Codings:
    """How the linears in bytes of a program that is not edited have x, found for all of them when the first
    is asked for: where none is packed anew they are not.
    """

    def __init__(self, program: Program, calibration: Sequence[Sequence[torch.Tensor]]) -> None:
        self._program, self._calibration = program, calibration

    def __call__(self, site: str) -> Coding | None:
        return self._found.get(site)

    @cached_property
    def _found(self) -> Mapping[str, Coding | None]:
        coded = [s for s in linears(self._program) if self._program.format_at(s.site) == INT8_TOKEN]
        return on_inputs(self._program, coded, self._calibration)


def _qparams(observer: Any) -> Range:
    scale, zero = observer.calculate_qparams()
    return float(scale), int(zero)


class _Observing(fx.Interpreter):
    """Shows every value of some nodes to their observers."""

    def __init__(
        self, module: fx.GraphModule, observers: Mapping[fx.Node, Callable[[torch.Tensor], object]]
    ) -> None:
        super().__init__(module)
        self._observers = observers

    def run_node(self, n: fx.Node) -> Outputs:
        result = super().run_node(n)
        if n in self._observers:
            self._observers[n](result.float())
        return result
