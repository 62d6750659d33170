"""The fields of a Stage that do something, in the order in which they change a model.

A new one: its file, a line here, and a test.
"""

from __future__ import annotations

from effcompile.runs.fields.average import Average
from effcompile.runs.fields.base import Effect, Graph
from effcompile.runs.fields.data import Data
from effcompile.runs.fields.depth import Depth
from effcompile.runs.fields.image import Image
from effcompile.runs.fields.init import Init
from effcompile.runs.fields.layers import KeptLayers
from effcompile.runs.fields.precision import StagePrecision
from effcompile.runs.fields.sparsity import BackwardSparsity, Sparsity
from effcompile.runs.fields.tokens import Tokens

__all__ = ["FIELDS", "LAYERED", "Effect", "Graph"]

FIELDS: dict[str, type[Effect]] = {
    each.name: each
    for each in (
        Image,
        Depth,
        Init,
        Tokens,
        KeptLayers,
        Sparsity,
        BackwardSparsity,
        StagePrecision,
        Average,
        Data,
    )
}
#: Those that need to know which modules are the model's layers.
LAYERED = frozenset({Depth.name, Init.name, Tokens.name, KeptLayers.name})
