"""Calibration inputs for a model whose user gave none."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from effcompile.core.types import Args, Kwargs, Value
from effcompile.ir.program import Program, TensorSpec

aten = torch.ops.aten
Inputs = tuple[tuple[Any, ...], Mapping[str, Any]]

#: What an index tensor may pass on its way to an embedding without changing its values.
_VALUE_KEEPING = (
    aten.view.default,
    aten.reshape.default,
    aten._unsafe_view.default,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.expand.default,
    aten.slice.Tensor,
    aten.select.int,
    aten.permute.default,
    aten.transpose.int,
    aten.clone.default,
    aten.contiguous.default,
    aten.alias.default,
    aten.detach.default,
    aten.to.dtype,
    aten._to_copy.default,
)


def describe_generated(count: int) -> str:
    """What a plan says of inputs that `generate_inputs` made."""
    return f"generated: {count} random inputs shaped like the example"


def generate_inputs(program: Program, count: int = 4, seed: int = 0, *, pads: bool = True) -> list[Inputs]:
    """`count` random inputs of the example's shapes and dtypes. `pads`: whether ids whose row is zeros (a
    padding's) are drawn, too; else the example's stand in their place.

    Integers that index an embedding are drawn uniformly from its rows; floats are normal with the example's
    mean and deviation; everything else (masks, token types, flags, integers whose meaning is not known) is
    kept as in the example.
    """
    generator = torch.Generator().manual_seed(seed)
    leaves, structure = pytree.tree_flatten((program.args, dict(program.kwargs)))
    specs = _specs(program)
    rows = _rows(program, specs)
    nothing = [None] * len(leaves) if pads else _zero_rows(program, rows)
    return [
        pytree.tree_unflatten(
            [
                _without(zeros, leaf, _drawn(leaf, limit, spec.counts if spec else (), generator))
                for leaf, limit, spec, zeros in zip(leaves, rows, specs, nothing, strict=True)
            ],
            structure,
        )
        for _ in range(count)
    ]


def stress_inputs(program: Program) -> list[tuple[str, Args, Kwargs]]:
    """Inputs unlike the example on purpose, as (what they are, args, kwargs): numbers a hundred times as
    large, one outlier channel, zeros.

    Of integers that index an embedding only zeros are made, one token everywhere: they cannot be scaled.
    Masks are kept.
    """
    leaves, structure = pytree.tree_flatten((program.args, dict(program.kwargs)))
    specs = _specs(program)
    rows = _rows(program, specs)
    found = []
    for what, change in _STRESSES.items():
        changed = [
            change(leaf) if _is_data(leaf, limit) and not (spec and spec.counts) else leaf
            for leaf, limit, spec in zip(leaves, rows, specs, strict=True)
        ]
        if any(new is not old for new, old in zip(changed, leaves, strict=True)):
            found.append((what, *pytree.tree_unflatten(changed, structure)))
    return found


def _is_data(leaf: object, rows: int | None) -> bool:
    if not isinstance(leaf, torch.Tensor) or leaf.dtype is torch.bool or leaf.numel() == 0:
        return False
    return (
        rows is None and not bool(((leaf == 0) | (leaf == 1)).all())
        if leaf.is_floating_point()
        else rows is not None and rows > 2
    )


def _scaled(leaf: torch.Tensor) -> torch.Tensor:
    return leaf * 100 if leaf.is_floating_point() else leaf


def _with_outlier(leaf: torch.Tensor) -> torch.Tensor:
    if not leaf.is_floating_point() or leaf.dim() == 0:
        return leaf
    changed = leaf.clone()
    changed[..., 0] *= 100
    return changed


#: What is done to each tensor of data.
_STRESSES: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "scaled ×100": _scaled,
    "one outlier channel ×100": _with_outlier,
    "zeros": torch.zeros_like,
}


def _drawn(
    leaf: object, rows: int | None, counts: Sequence[tuple[int, int]], generator: torch.Generator
) -> Value:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    if leaf.is_floating_point():
        # a mask kept in floats, or indices
        if rows is not None or bool(((leaf == 0) | (leaf == 1)).all()):
            return leaf
        noise = torch.randn(leaf.shape, generator=generator).to(leaf)
        deviation = leaf.std() if leaf.numel() > 1 else leaf.abs().amax()
        return leaf.mean() + deviation * noise
    if rows is None or rows <= 2 or leaf.dtype is torch.bool:
        return leaf
    drawn = torch.randint(0, rows, leaf.shape, generator=generator).to(leaf)
    for number, _ in counts:  # as often, and where it is at the example
        drawn = torch.where((drawn == number) & (leaf != number), (number + 1) % rows, drawn)
        drawn = torch.where(leaf == number, leaf, drawn)
    return drawn


def _without(zeros: torch.Tensor | None, leaf: Value, drawn: Value) -> Value:
    """What was drawn, with the example's own where that is one of these ids."""
    if zeros is None or not isinstance(drawn, torch.Tensor):
        return drawn
    return torch.where(torch.isin(drawn, zeros.to(drawn)), leaf, drawn)


def _specs(program: Program) -> list[TensorSpec | None]:
    """What is known of each leaf of the inputs; None of one that is no tensor."""
    specs = iter(program.inputs)
    given = pytree.tree_leaves((program.args, dict(program.kwargs)))
    return [next(specs) if isinstance(leaf, torch.Tensor) else None for leaf in given]


def _rows(program: Program, specs: Sequence[TensorSpec | None]) -> list[int | None]:
    """`_rows_indexed` of each leaf of the inputs; None also of one whose values are fixed."""
    holders = zip(program.graph.find_nodes(op="placeholder"), specs, strict=False)
    rows = [
        None if spec and spec.values is not None else _rows_indexed(program, node) for node, spec in holders
    ]
    return rows + [None] * (len(specs) - len(rows))


def _zero_rows(program: Program, rows: Sequence[int | None]) -> list[torch.Tensor | None]:
    """The rows of zeros in what each leaf of the inputs indexes; None where there are none."""
    holders = program.graph.find_nodes(op="placeholder")
    tables = [_tables(program, node) if limit else [] for node, limit in zip(holders, rows, strict=False)]
    found: list[torch.Tensor | None] = []
    for each in tables:
        first = [(table, (table[:, 0] == 0).nonzero().flatten()) for table in each if table.dim() == 2]
        zeros = [at[~table[at].any(1)] for table, at in first if len(at)]
        found.append(torch.cat(zeros).cpu() if zeros else None)
    return found + [None] * (len(rows) - len(found))


def _rows_indexed(program: Program, node: fx.Node) -> int | None:
    """Rows of the smallest embedding that a placeholder indexes; None where it indexes none."""
    return min((table.shape[0] for table in _tables(program, node)), default=None)


def _tables(program: Program, node: fx.Node) -> list[torch.Tensor]:
    """The embeddings that a placeholder indexes."""
    found: list[torch.Tensor] = []
    todo, seen = [node], {node}
    while todo:
        value = todo.pop()
        for user in value.users:
            if user.target is aten.embedding.default and user.args[1] is value:
                table = user.args[0]
                weight = program.tensor(table) if isinstance(table, fx.Node) else None
                found += [weight] if weight is not None else []
            elif user.target in _VALUE_KEEPING and user not in seen:
                seen.add(user)
                todo.append(user)
    return found
