"""Progressive depth: layers are copied when a stage is entered, with their moments.

Stacking: Gong et al. 2019 (ICML, "Efficient training of BERT by progressively stacking"): the whole list
again. Interpolation: Chang et al. 2018 (arXiv 1710.10348): each layer twice, one after the other. Both change
the function; how much is measured and said. "identity" is block expansion (Wu et al. 2024, arXiv 2401.02415):
each copy stands behind its layer and its branches end in zero, so that a model whose norms stand before the
branches stays the function that it was; it is run, and refused where it does not.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import nn

from effcompile.core.errors import UsageError
from effcompile.core.types import Example
from effcompile.runs.branches import branch_ends
from effcompile.runs.carry import Origin, Origins, copied
from effcompile.runs.compare import change_of_function
from effcompile.runs.fields.base import Effect, check_count
from effcompile.runs.fields.values import StageValues

MOVES = ("stack", "interpolate", "identity")
#: What a move that keeps the function may change of it, rounding allowed.
_SAME = 1e-6
#: Names under which configurations say how many layers there are.
_COUNTS = (
    "num_hidden_layers",
    "n_layer",
    "num_layers",
    "n_layers",
    "depth",
    "encoder_layers",
    "decoder_layers",
)


class Depth(Effect):
    """`depth`: layers of the model; `move`: which of those before a new one is a copy of."""

    name: ClassVar[str] = "depth"

    @classmethod
    def check(cls, stage: StageValues) -> None:
        check_count(stage, "depth")
        if stage.move not in MOVES:
            raise UsageError(f"Stage(move={stage.move!r}): one of {', '.join(map(repr, MOVES))} is wanted.")

    @classmethod
    def check_order(cls, stages: Sequence[StageValues]) -> None:
        depths = [stage.depth for stage in stages if stage.depth is not None]
        if depths and stages[0].depth is None:
            raise UsageError(
                "Stage(depth=...) is given later than in the first stage: say in the first one with how "
                "many layers it begins."
            )
        for before, after in pairwise(depths):
            if after < before:
                raise UsageError(
                    f"Stage(depth={after}) follows one of {before} layers: depth can grow, not shrink, "
                    "for layers would be lost."
                )
            if after % before:
                raise UsageError(
                    f"Stage(depth={after}) follows one of {before} layers, which does not divide it: every "
                    f"layer is copied as often as every other. Take {after - after % before or before} or "
                    f"{after - after % before + before}."
                )

    def change(self, model: nn.Module, example: Example) -> Origins:
        """Make the list as long as is wanted; the first stage of a run takes the first layers of what is
        given.

        Raises:
            UsageError: layers that are put in as the identity change what the model computes.
        """
        layers = model.get_submodule(self.layers)
        assert isinstance(layers, (nn.ModuleList, nn.Sequential))
        had, wanted = len(layers), self.value
        if wanted == had:
            return {}
        if self.first:
            return self._cut(model, layers)
        sources = sources_of(had, wanted, self.stage.move)
        change = change_of_function(model, example, lambda: self._grown(model, layers, sources))
        if self.stage.move == "identity" and change is not None and change > _SAME:
            raise UsageError(
                f"Stage(move='identity') changes what {type(model).__name__} computes by {change:.2g}: the "
                "branches of its layers do not end in a linear that zeros would silence, or a norm stands "
                "behind them. Use move='stack'."
            )
        told = "not measured" if change is None else f"the outputs change by {change:.2g}, measured"
        self.notes.append(
            f"depth {had} → {wanted} by {self.stage.move!r}: {told}; weights and moments were copied"
        )
        moved = None if self.stage.move == "identity" else copied
        return {
            f"{self.layers}.{place}.{name}": Origin(
                source=f"{self.layers}.{source}.{name}", moved=copied if _first(sources, place) else moved
            )
            for place, source in enumerate(sources)
            for name, _ in layers[place].named_parameters()
        }

    def _cut(self, model: nn.Module, layers: nn.ModuleList | nn.Sequential) -> Origins:
        had = len(layers)
        if self.value > had:
            raise UsageError(
                f"Stage(depth={self.value}) is the first, and {type(model).__name__} has {had} layers: "
                f"give it {self.value}."
            )
        del layers[self.value :]
        _say_depth(model, had, list(range(self.value)))
        self.notes.append(f"depth: the first {self.value} of the {had} layers of the model")
        return {}

    def _grown(self, model: nn.Module, layers: nn.ModuleList | nn.Sequential, sources: Sequence[int]) -> None:
        old = list(layers)
        new = [
            old[source] if _first(sources, place) else copy.deepcopy(old[source])
            for place, source in enumerate(sources)
        ]
        if self.stage.move == "identity":
            for place, layer in enumerate(new):
                for end in () if _first(sources, place) else branch_ends(layer):
                    _silence(end)
        for place, layer in enumerate(new):
            for module in layer.modules():
                if "layer_idx" in vars(module):
                    module.__dict__["layer_idx"] = place
        layers._modules.clear()
        layers.extend(new)
        _say_depth(model, len(old), sources)


def sources_of(had: int, wanted: int, move: str) -> list[int]:
    """Which layer each of the wanted ones is a copy of."""
    return (
        [place % had for place in range(wanted)]
        if move == "stack"
        else [place * had // wanted for place in range(wanted)]
    )


def _first(sources: Sequence[int], place: int) -> bool:
    """Whether the layer itself stands here, and not a copy."""
    return sources.index(sources[place]) == place


def _silence(linear: nn.Module) -> None:
    with torch.no_grad():
        for parameter in linear.parameters(recurse=False):
            parameter.zero_()


def _say_depth(model: nn.Module, had: int, sources: Sequence[int]) -> None:
    """The new depth in every configuration that said the old one; lists with an entry for each
    layer follow.
    """
    seen: set[int] = set()
    for module in model.modules():
        config = vars(module).get("config")
        if config is None or id(config) in seen:
            continue
        seen.add(id(config))
        for name in _COUNTS:
            if getattr(config, name, None) == had:
                setattr(config, name, len(sources))
        entries: Mapping[str, Any] = dict(vars(config))
        for name, value in entries.items():
            if isinstance(value, list) and len(value) == had and name.endswith("layer_types"):
                setattr(config, name, [value[source] for source in sources])
