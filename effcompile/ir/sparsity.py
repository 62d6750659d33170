"""The figures of a sparse training run, as plain data: what the controller measures and the report prints.

Loads without torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from effcompile.core import spoken
from effcompile.core.reasons import Because, Reason
from effcompile.core.units import format_count

__all__ = ["Efficiency", "LayerFigures", "SparsityFigures", "StepFlops"]

#: Block → F_dense / F_sparse at equal loss: what eps must stay below for sparse training to win on BERT-Base
#: at s = 0.9, and whether that is published (Dietrich et al. 2021, 2108.06277, A.3) or read off the losses in
#: their Table 1 by linear interpolation, by us.
MATCHED_BREAK_EVEN: Mapping[int, tuple[float, bool]] = {
    1: (2.0, True),
    4: (1.4, False),
    8: (1.3, False),
    16: (1.2, True),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerFigures:
    """One layer under a pattern; blocks are counted, `explored` counts those that were ever active."""

    name: str
    out_features: int
    in_features: int
    blocks: int
    active: int
    explored: int
    empty_rows: int
    execution: str

    @property
    def density(self) -> float:
        return self.active / self.blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFlops:
    """FLOPs of forward and backward, by how they grow with a transformer's width r and depth d.

    inside: linear layers inside the repeated blocks, were all dense: ∝ r² d.
    outside: other linear layers (head): ∝ r.
    rest: everything else that computes products (attention): ∝ r d.
    saved: what the sparse layers' patterns leave out of `inside`.
    rows: "step" or "row": what they are counted for; per row, attention is not known, and `rest` is 0.
    """

    inside: float
    outside: float
    rest: float
    saved: float
    of: str = "step"

    @property
    def dense(self) -> float:
        """Of the same model, all dense."""
        return self.inside + self.outside + self.rest

    @property
    def sparse(self) -> float:
        return self.dense - self.saved

    def matched_note(self) -> Reason:
        """The dense model of equal FLOPs, for plans."""
        depth = self.matched_depth()
        ways = f"width × {self.matched_width():.2f}" + (
            f" or depth × {depth:.2f}" if depth is not None else ""
        )
        text = (
            "block-sparse layers: {name} FLOPs per {name} of the linear layers against {name} dense; the "
            "dense model of equal FLOPs has {name}: its loss is the one to beat"
        )
        return Because(text, (format_count(self.sparse), self.of, format_count(self.dense), ways))

    def matched_width(self) -> float:
        """The r at which the dense model costs what the sparse one does: inside·r² + (outside + rest)·r =
        sparse.
        """
        linear = self.outside + self.rest
        if self.inside == 0:
            return self.sparse / linear if linear else 1.0
        return float((-linear + (linear**2 + 4 * self.inside * self.sparse) ** 0.5) / (2 * self.inside))

    def matched_depth(self) -> float | None:
        """The d at which it does: (inside + rest)·d + outside = sparse; None when the parts outside the
        blocks alone cost more.
        """
        left = self.sparse - self.outside
        return left / (self.inside + self.rest) if left > 0 and self.inside + self.rest > 0 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """Seconds of the sparse layers' forward and backward in one step, against dense ones of the same shapes,
    measured in turn.
    """

    sparse_seconds: float
    dense_seconds: float
    sparse_flops: float
    dense_flops: float

    @property
    def eps(self) -> float:
        """Time per sparse FLOP over time per dense FLOP."""
        return (self.sparse_seconds / self.sparse_flops) / (self.dense_seconds / self.dense_flops)

    @property
    def break_even(self) -> float:
        """Below this eps the sparse layers are faster than the same layers dense: F_dense / F_sparse."""
        return self.dense_flops / self.sparse_flops


@dataclass(frozen=True, slots=True, kw_only=True)
class SparsityFigures:
    """Where a run under a pattern stands, and what it costs."""

    model: str
    sparsity: float
    block: int
    growth: str
    distribution: str
    step: int
    updates_done: int
    updates: int
    next_update: int | None
    layers: tuple[LayerFigures, ...]
    other_parameters: int
    width: int
    depth: int
    flops: StepFlops
    efficiency: Efficiency | None = None

    @property
    def density(self) -> float:
        return sum(_weights(layer) * layer.density for layer in self.layers) / sum(map(_weights, self.layers))

    @property
    def explored(self) -> float:
        """The share of all blocks that was ever active (Dietrich et al. 2021, sec. 3)."""
        return sum(layer.explored for layer in self.layers) / sum(layer.blocks for layer in self.layers)

    @property
    def matched_break_even(self) -> tuple[float, bool] | None:
        """What eps must stay below to win over the dense model of equal FLOPs on BERT-Base at s = 0.9, and
        whether it is published.
        """
        return MATCHED_BREAK_EVEN.get(self.block) if abs(self.sparsity - 0.9) < 0.01 else None

    def print(self, console: object = None) -> None:
        """Print them; see effcompile.report."""
        spoken.print_sparsity(self, console)


def _weights(layer: LayerFigures) -> int:
    return layer.out_features * layer.in_features
