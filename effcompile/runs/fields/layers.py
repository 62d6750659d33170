"""Progressive layer dropping: steps of which some layers are left out, by a few graphs that are each planned.

Fan et al. 2020 (LayerDrop, arXiv 1909.11556); Zhang & He 2020 (arXiv 2010.13369): deeper layers are left out
more often. Layers are drawn once, not at every step: every graph is static, and its price and peak are known.
The largest has all layers.
"""

from __future__ import annotations

import math
from typing import ClassVar

from torch import nn

from effcompile.core.errors import UsageError
from effcompile.runs.fields.base import Effect, Graph, check_share
from effcompile.runs.fields.values import StageValues

#: Graphs beside that of all layers.
_GRAPHS = 3


class KeptLayers(Effect):
    """`layers`: the share of the layers that a step runs, on average."""

    name: ClassVar[str] = "layers"

    @classmethod
    def check(cls, stage: StageValues) -> None:
        check_share(stage, "layers")

    def graphs(self, model: nn.Module) -> tuple[Graph, ...]:
        """All layers, and a few selections without some, so often that the share is exact."""
        layers = model.get_submodule(self.layers)
        assert isinstance(layers, (nn.ModuleList, nn.Sequential))
        return graphs(len(layers), self.value)


def graphs(depth: int, share: float) -> tuple[Graph, ...]:
    """The graphs of a stack of so many layers: Σ share of a graph · its layers = share · depth.

    Each of K graphs leaves out d = ⌈(1 − share) · depth · (K + 1) / K⌉ layers, at the most all but the first,
    and the graph of all layers is run in 1 − (1 − share) · depth / d of the steps.

    Raises:
        UsageError: fewer than one layer would be left.
    """
    absent = (1 - share) * depth
    if absent < 1e-9:
        return ()
    if absent > depth - 1:
        raise UsageError(
            f"Stage(layers={share}) of {depth} layers leaves less than one: take {1 / depth:.2g} or more."
        )
    dropped = min(depth - 1, math.ceil(absent * (_GRAPHS + 1) / _GRAPHS - 1e-9))
    picked = list(dict.fromkeys(_picked(depth, dropped, number) for number in range(_GRAPHS)))
    rest = absent / dropped
    whole = [Graph(named="all", share=1 - rest)]
    return (
        *whole,
        *[Graph(named=f"without {_listed(some)}", share=rest / len(picked), dropped=some) for some in picked],
    )


def _picked(depth: int, dropped: int, number: int) -> frozenset[int]:
    """`dropped` of the layers after the first, spread over the depth and shifted from graph to graph; the
    deep ones more often.
    """
    places = depth - 1
    at = [1 + math.floor((i + (number + 1) / _GRAPHS) * places / dropped - 1e-9) for i in range(dropped)]
    return frozenset(min(place, depth - 1) for place in at)


def _listed(some: frozenset[int]) -> str:
    return ", ".join(str(place) for place in sorted(some))
