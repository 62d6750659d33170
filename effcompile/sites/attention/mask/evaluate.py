"""Parts of a graph computed on their own: what a mask reads, and its value at the example inputs, at other
lengths and paddings.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from effcompile.core.types import Args, Kwargs, Value
from effcompile.ir.program import Program

aten = torch.ops.aten
#: Operators that read the shape of a tensor and not its elements.
_OF_SHAPE = (
    aten.sym_size.int, aten.new_ones.default, aten.new_zeros.default, aten.new_full.default,
    aten.zeros_like.default, aten.ones_like.default, aten.full_like.default, aten.empty_like.default,
)  # fmt: skip
#: Masks of inputs longer than this are compared at fewer variants.
_LONG = 1024
Values = Mapping[fx.Node, Any]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Variant:
    """Inputs to evaluate at: the value of every placeholder, under a name for messages."""

    name: str
    values: Values


def ancestors(*nodes: fx.Node, of_values: bool = False, given: Collection[fx.Node] = ()) -> list[fx.Node]:
    """The nodes and all they are computed from, in graph order: not beyond `given`; with `of_values`, not
    what only a shape is taken of.
    """
    found: set[fx.Node] = set()
    waiting = list(nodes)
    while waiting:
        here = waiting.pop()
        if here not in found:
            found.add(here)
            waiting += (
                [] if here in given or (of_values and here.target in _OF_SHAPE) else here.all_input_nodes
            )
    return sorted(found)


def reads(*nodes: fx.Node, given: Collection[fx.Node] = ()) -> list[fx.Node]:
    """The placeholders on whose elements the nodes depend, other than through `given`; sizes alone do not
    count.
    """
    return [
        n for n in ancestors(*nodes, of_values=True, given=given) if n.op == "placeholder" and n not in given
    ]


def evaluate(program: Program, nodes: Iterable[fx.Node], values: Values) -> dict[fx.Node, Value]:
    """The values of the nodes, and of all they are computed from, where some (all placeholders that are
    needed) have given values.
    """
    found: dict[fx.Node, Any] = {}
    with torch.no_grad():
        for node in ancestors(*nodes, given=values):
            if node in values:
                found[node] = values[node]
            elif node.op == "get_attr":
                found[node] = program.tensor(node)
            else:
                args, kwargs = fx.map_arg((node.args, node.kwargs), found.__getitem__)
                found[node] = node.target(*args, **kwargs)  # type: ignore[operator]
    return found


def placeholders(
    program: Program, args: Args | None = None, kwargs: Kwargs | None = None
) -> dict[fx.Node, Value]:
    """The value of each placeholder at the given (default: example) inputs."""
    leaves = pytree.tree_leaves(
        (program.args if args is None else args, dict(program.kwargs if kwargs is None else kwargs))
    )
    return dict(zip(program.graph.find_nodes(op="placeholder"), leaves, strict=True))


def tensors(program: Program, values: Values) -> list[Tensor]:
    """The tensors among the placeholders' values, in the order of `Program.inputs`."""
    return [v for node in program.graph.find_nodes(op="placeholder") if isinstance(v := values[node], Tensor)]


def sized_variants(program: Program, least: int = 0) -> list[Variant]:
    """The example, and its inputs at other lengths and batches where axes are dynamic: longer (at least
    `least`) and shorter.
    """
    here = placeholders(program)
    dims = {
        n: spec.shape
        for n, spec in zip((n for n in here if isinstance(here[n], Tensor)), program.inputs, strict=True)
    }
    others = [
        Variant(name=name, values=_resized(here, dims, sizes))
        for name, sizes in _other_sizes(here, dims, least)
    ]
    return [Variant(name="example", values=here), *others]


def filled_variants(sized: Sequence[Variant], read: Sequence[fx.Node]) -> list[Variant]:
    """Each of them, and as often again with paddings and documents of every kind in the inputs `read`; long
    ones as they are.
    """
    few = [v for v in sized if _longest(v, read) <= _LONG] or sized[:1]
    return [*sized, *(filled for base in few for filled in _filled(base, read))]


def _longest(variant: Variant, read: Sequence[fx.Node]) -> int:
    return max(
        (size for n in read if isinstance(t := variant.values[n], Tensor) for size in t.shape), default=0
    )


def _other_sizes(
    here: Values, dims: Mapping[fx.Node, Sequence[int | str]], least: int
) -> Iterator[tuple[str, dict[str, int]]]:
    """Longer and shorter than the example, on every named axis at once; sizes that are computed from others
    follow no rule of ours.
    """
    sizes = {
        dim: here[n].shape[axis]
        for n, shape in dims.items()
        for axis, dim in enumerate(shape)
        if isinstance(dim, str)
    }
    if not sizes or not all(name.isidentifier() for name in sizes):
        return
    for name, step in (
        ("longer", lambda n: max(n + max(3, min(n // 2, _LONG)), least)),
        ("shorter", lambda n: max(2, min(n // 2, _LONG // 2) + 1)),
    ):
        yield name, {dim: size + 1 if dim == "batch" else step(size) for dim, size in sizes.items()}


def _resized(
    here: Values, dims: Mapping[fx.Node, Sequence[int | str]], sizes: Mapping[str, int]
) -> dict[fx.Node, Value]:
    """Cut or tiled along the named axes."""
    resized = dict(here)
    for node, shape in dims.items():
        for axis, dim in enumerate(shape):
            tensor = resized[node]
            if isinstance(dim, str):
                resized[node] = tensor.index_select(
                    axis, torch.arange(sizes[dim], device=tensor.device) % max(1, tensor.shape[axis])
                )
    return resized


def _filled(base: Variant, read: Sequence[fx.Node]) -> Iterator[Variant]:
    """The base with other elements in the inputs that the mask reads: zeros and ones where the example has
    these, else labels.
    """
    for kind in ("whole", "left", "right", "inner", "none in one row", "random"):
        values = dict(base.values)
        for node in read:
            tensor = values[node]
            if isinstance(tensor, Tensor) and not tensor.is_complex() and tensor.dim() and tensor.numel():
                values[node] = _binary(tensor, kind) if is_binary(tensor) else _labels(tensor, kind)
        if read:
            yield Variant(name=f"{base.name}, {kind}", values=values)


def is_binary(tensor: Tensor) -> bool:
    """Whether it holds nothing but zeros and ones, as padding masks do."""
    return tensor.dtype is torch.bool or bool(((tensor == 0) | (tensor == 1)).all())


def _binary(like: Tensor, kind: str) -> Tensor:
    """Zeros and ones of this shape; rows differ in how much of the last axis is 0."""
    rows, length = like.numel() // like.shape[-1], like.shape[-1]
    position, cut = (
        torch.arange(length),
        1 + torch.arange(rows)[:, None] * max(1, length // 5) % max(1, length - 1),
    )
    generator = torch.Generator().manual_seed(length)
    shapes = {
        "whole": torch.ones(rows, length, dtype=torch.bool),
        "left": position >= cut,
        "right": position < length - cut,
        "inner": (position < length // 3) | (position >= length // 3 + cut),
        "none in one row": (position >= cut) & (torch.arange(rows)[:, None] > 0),
        "random": torch.rand(rows, length, generator=generator) < 0.6,
    }
    return shapes[kind].reshape(like.shape).to(like)


def _labels(like: Tensor, kind: str) -> Tensor:
    """Positions or documents that start again after a few tokens, of this shape and dtype; floats stay."""
    if like.is_floating_point():
        return like
    position = torch.arange(like.shape[-1])
    length = (
        1
        + like.shape[-1]
        // {"whole": 1, "left": 2, "right": 3, "inner": 4, "none in one row": 5, "random": 6}[kind]
    )
    restarted = (
        position % length if int(like.flatten()[0]) == 0 and like.shape[-1] > 1 else position // length
    )
    return restarted.expand(like.shape).to(like).contiguous()
