"""Short texts: of one token, or of as few as a graph takes.

What attends to one token alone has its value, where others have the mean of many: what holds for long texts
(a range that codes are made for) need not hold for these.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch.utils import _pytree as pytree

from effcompile.capture.verify import Variant, is_mask, runs_at, token_value
from effcompile.core.types import Inputs
from effcompile.ir.export import allowed, size_at, sizes_of
from effcompile.ir.program import Program, TensorSpec

#: Dimensions of what is one text to a row, as ids or as a row of numbers for each token; images have more.
_MOST_DIMS = 3
#: Name of the axis of which each row is one text.
BATCH = "batch"
#: Calls of one input, where each holds one row.
_CALLS = 4
#: What attends to one token has its value; among two it chooses.
LENGTHS = (1, 2)


@torch.no_grad()  # with gradients attentions lay their results out otherwise, and views are none
def short_texts(program: Program, rows: int, length: int = 1) -> list[Inputs]:
    """Inputs of about so many rows with `length` tokens each, or twice, four times, ... as many where the
    graph takes no fewer, which are the example's from its begin to its end; in one call where the batch is
    free.

    Nothing where no text's length is free, where the graph takes none that is shorter than the example, or
    where inputs have to hold a number of tokens.
    """
    texts, here = _texts(program), sizes_of(program)
    if not texts or any(spec.counts for spec in program.inputs):
        return []
    own = here.get(BATCH, 1)
    times = max(1, min(rows // own, rows if BATCH in here else _CALLS))
    free = {BATCH: own * times} if BATCH in here else {}
    runs = runs_at(program)
    while length < min(texts.values()):
        sizes = free | dict.fromkeys(texts, length)
        if allowed(program, sizes) and runs(sizes):
            break
        length *= 2
    else:
        return []
    tokens = {name: positions for spec, leaf in _leaves(program) for name, positions in _tokens(spec, leaf)}
    begins = [at / times for at in range(times)]
    cut = [_cut(program, here | dict.fromkeys(texts, length), begin, tokens) for begin in begins]
    return [_beside(program, cut)] if free else cut


def short_variants(program: Program, rows: int) -> list[Variant]:
    """Short texts as what is verified with: of one token, and of two, which are the fewest of which an
    attention chooses.
    """
    found: dict[str, Variant] = {}
    for length in LENGTHS:
        for args, kwargs in short_texts(program, rows, length)[:1]:
            given = _leaves(replace(program, args=args, kwargs=kwargs))
            sizes = next(leaf.shape for spec, leaf in given if _text_axes(spec))
            name = f"short texts {'×'.join(map(str, sizes[:2]))}"
            found[name] = name, args, kwargs
    return list(found.values())


def _leaves(program: Program) -> list[tuple[TensorSpec, torch.Tensor]]:
    return list(zip(program.inputs, program.flat_inputs(), strict=True))


def _tokens(spec: TensorSpec, leaf: torch.Tensor) -> list[tuple[str, list[int]]]:
    """Where no text has a pad, by a mask."""
    name = spec.shape[-1]
    if not is_mask(spec, leaf) or not isinstance(name, str):
        return []
    where = (leaf == token_value(spec, leaf)).all(0).nonzero().flatten().tolist()
    return [(name, where)] if where else []


def _texts(program: Program) -> dict[str, int]:
    """The free lengths of texts, as they are at the example."""
    here = sizes_of(program)
    names = {name for spec in program.inputs for name in _text_axes(spec)}
    return {name: size for name, size in here.items() if name in names}


def _text_axes(spec: TensorSpec) -> list[str]:
    if len(spec.shape) > _MOST_DIMS:
        return []
    return [dim for dim in spec.shape[1:] if isinstance(dim, str) and dim != BATCH]


def _cut(
    program: Program, sizes: Mapping[str, int], begin: float, tokens: Mapping[str, Sequence[int]]
) -> Inputs:
    """The example's rows with texts of these sizes, from that share of their length on; all tokens count.

    `tokens`: where texts have them.
    """
    specs = iter(program.inputs)
    here = sizes_of(program)

    def cut(leaf: object) -> object:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        spec = next(specs)
        if is_mask(spec, leaf):
            leaf = torch.full_like(leaf, token_value(spec, leaf))
        for axis, dim in enumerate(spec.shape):
            size, whole = size_at(dim, sizes), leaf.shape[axis]
            if isinstance(dim, str) and size != size_at(dim, here):
                among = tokens.get(dim, range(whole))
                # what has to have the example's values has them from its begin on
                first = 0 if spec.values is not None else among[int(begin * len(among))]
                leaf = leaf.index_select(axis, torch.arange(first, first + size, device=leaf.device) % whole)
        return leaf

    args, kwargs = pytree.tree_map(cut, (program.args, dict(program.kwargs)))
    return args, kwargs


def _beside(program: Program, found: list[Inputs]) -> Inputs:
    """All in one call, as rows of one batch."""
    specs = iter(program.inputs)

    def together(*leaves: object) -> object:
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if not tensors:
            return leaves[0]
        axes = [at for at, dim in enumerate(next(specs).shape) if isinstance(dim, str) and BATCH in dim]
        return torch.cat(tensors, axes[0]) if axes else tensors[0]

    args, kwargs = pytree.tree_map(together, *found)
    return args, kwargs
