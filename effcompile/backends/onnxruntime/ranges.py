"""Input ranges of linears on the calibration inputs, for static quantisation."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from effcompile.core.types import Outputs
from effcompile.ir.formats import INT8_STATIC
from effcompile.ir.program import Program
from effcompile.sites import parts as sites


def input_ranges(
    program: Program, calibration: Sequence[Sequence[torch.Tensor]]
) -> dict[str, tuple[float, float]]:
    """Site → (lowest, highest) input of each linear over the calibration inputs, for static quantisation."""
    planned = [site for site in sites.linears(program) if program.format_at(site.site) == INT8_STATIC]
    if not planned:
        return {}
    recorder = _RangeRecorder(program.module, {site.x.name for site in planned})
    with torch.no_grad():
        for inputs in calibration:
            recorder.run(*program.leaves_with(inputs), enable_io_processing=False)
    return {site.site: recorder.ranges[site.x.name] for site in planned}


class _RangeRecorder(torch.fx.Interpreter):
    """Interprets a graph on flat inputs and keeps the range of chosen values."""

    def __init__(self, module: torch.fx.GraphModule, wanted: set[str]) -> None:
        super().__init__(module)
        self.wanted = wanted
        self.ranges: dict[str, tuple[float, float]] = {}

    def run_node(self, n: torch.fx.Node) -> Outputs:
        value = super().run_node(n)
        if n.name in self.wanted:
            low, high = self.ranges.get(n.name, (0.0, 0.0))
            self.ranges[n.name] = min(low, float(value.min())), max(high, float(value.max()))
        return value
