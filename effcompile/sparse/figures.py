"""Where a sparse training stands, in figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from effcompile.ir.sparsity import Efficiency, LayerFigures, SparsityFigures, StepFlops
from effcompile.sparse.held import Held
from effcompile.sparse.recipe import Recipe


def figures_of(
    model: nn.Module, recipe: Recipe, layers: Sequence[Held], explored: Mapping[str, Tensor],
    measured: tuple[StepFlops, Efficiency | None], *, step: int, updates_done: int, next_update: int | None,
) -> SparsityFigures:  # fmt: skip
    """Of a model and its sparse layers.

    `explored`: the blocks of each that were ever active, bool (O / b, I / b).
    """
    held = {id(held.parameter) for held in layers}
    return SparsityFigures(
        model=type(model).__name__, sparsity=recipe.sparsity, block=recipe.block, growth=recipe.growth,
        distribution=recipe.distribution, step=step, updates_done=updates_done, updates=recipe.updates,
        next_update=next_update, layers=tuple(_layer_figures(held, explored[held.name]) for held in layers),
        other_parameters=sum(p.numel() for p in model.parameters() if id(p) not in held),
        width=_commonest([one.shape[1] for one in layers]),
        depth=len({_block_of(one.name) for one in layers}), flops=measured[0], efficiency=measured[1],
    )  # fmt: skip


def _layer_figures(held: Held, explored: Tensor) -> LayerFigures:
    return LayerFigures(
        name=held.name, out_features=held.shape[0], in_features=held.shape[1], blocks=held.mask.numel(),
        active=int(held.mask.sum()), explored=int(explored.sum()),
        empty_rows=int((~held.mask.any(dim=1)).sum()), execution=held.execution,
    )  # fmt: skip


def _commonest(values: Sequence[int]) -> int:
    return max(values, key=values.count) if values else 0


def _block_of(name: str) -> str:
    """The path to the first numbered part: blocks.3 of blocks.3.mlp.up."""
    parts = name.split(".")
    numbered = next((place for place, part in enumerate(parts) if part.isdigit()), len(parts) - 1)
    return ".".join(parts[: numbered + 1])
