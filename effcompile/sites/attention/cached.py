"""Attentions of a step of generation whose keys and values are all rows of the cache, the new ones last."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from effcompile.core.reasons import Unsupported
from effcompile.ir.formats import Form
from effcompile.ir.program import Program, TensorSpec, dtype_of, shape_of
from effcompile.sites.parts import AttentionSite, argument, attentions

aten = torch.ops.aten
#: Where a plan decides how a runtime's own attentions have their rows, and as what kind.
SITE, KIND = "attentions over the cache", "cached attention"
_TARGET = aten.scaled_dot_product_attention.default
#: New rows behind past ones in a new buffer, and written into the buffer where they stand.
JOINED, IN_PLACE = Form(word="concatenated"), Form(word="in_place")
#: What the names of a step's inputs that are of images begin with.
_OF_IMAGES = ("images", "kinds")
#: What repeats the keys that queries of a group share, and moves elements.
_REPEATING = (
    aten.expand.default, aten.clone.default, aten.view.default, aten._unsafe_view.default,
    aten.reshape.default, aten.unsqueeze.default,
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedAttention:
    """One of them. `key`, `value`: the inputs that its past rows enter by; `heads` read `groups` of them, of
    rows so wide.
    """

    site: str
    key: str
    value: str
    heads: int
    groups: int
    width: int


def cached_attentions(program: Program) -> list[CachedAttention]:
    """Those that read a cache of all tokens in fp32, under a mask of true and false that is alike for all
    heads and has as many rows; none of a step that takes images, whose rows are not those of a batch.
    """
    return [each for each in _judged(program) if isinstance(each, CachedAttention)]


def left_out(program: Program) -> list[tuple[str, Unsupported]]:
    """The others whose rows grow, by site, and why; of a step that takes images all at once."""
    return [each for each in _judged(program) if not isinstance(each, CachedAttention)]


def _judged(program: Program) -> Iterator[CachedAttention | tuple[str, Unsupported]]:
    specs = {spec.name: spec for spec in program.inputs}
    if not {"tokens", "mask"} <= specs.keys():
        return
    holders = dict(zip(program.graph.find_nodes(op="placeholder"), specs, strict=True))
    found = []
    for each in attentions(program):
        leaves = [_leaf(argument(each.node, name), holders) for name in ("key", "value")]
        if None not in leaves and leaves[0] != leaves[1]:
            found.append((each, [leaf for leaf in leaves if leaf is not None]))
    if found and any(name.startswith(_OF_IMAGES) for name in specs):
        yield SITE, Unsupported("the step takes images, whose rows are not those of a batch")
        return
    read = Counter(name for _, leaves in found for name in leaves)
    for each, (key, value) in found:
        sizes = [specs[name].shape for name in (key, value)]
        why = _why_not(each, sizes, specs) or (
            Unsupported("its cache is read by another attention, too")
            if read[key] + read[value] > 2
            else None
        )
        groups, width = sizes[0][1], sizes[0][3]
        if why is None:
            assert isinstance(groups, int) and isinstance(width, int)
            yield CachedAttention(
                site=each.site, key=key, value=value, heads=each.dims[1], groups=groups, width=width
            )
        elif "source_mask" not in specs or sizes[0][2] != specs["source_mask"].shape[1]:
            yield each.site, why  # an encoder's rows never grow


def _why_not(
    each: AttentionSite, sizes: Sequence[tuple[int | str, ...]], specs: Mapping[str, TensorSpec]
) -> Unsupported | None:
    """Of an attention over rows of these sizes; None where nothing speaks against it."""
    groups, width, mask = sizes[0][1], sizes[0][3], each.mask
    new, seen = specs["tokens"].shape[1], specs["mask"].shape[1]
    if each.ours or each.causal or each.sink or each.node.target is not _TARGET or mask is None:
        return Unsupported("it is more or less than an attention under a mask")
    if dtype_of(mask) is not torch.bool:
        return Unsupported("numbers are added to its scores, as biases by position are")
    if dtype_of(each.node) is not torch.float32:
        return Unsupported("it is in {name}, and fp32 alone is written in place", (str(dtype_of(each.node)),))
    if len(shape_of(mask)) != 4 or shape_of(mask)[1] != 1:
        return Unsupported("its mask differs between heads")
    if seen not in (f"{sizes[0][2]} + {new}", f"{new} + {sizes[0][2]}"):
        return Unsupported("its cache is a window of the last tokens, which moves")
    if sizes[0] != sizes[1] or not isinstance(groups, int) or not isinstance(width, int):
        return Unsupported("its keys and values are not of one shape")
    if width % 8 or each.dims[1] % groups:
        return Unsupported("its {} heads of {} are no multiples of {} and 8", (each.dims[1], width, groups))
    return None


def _leaf(node: object, holders: Mapping[fx.Node, str]) -> str | None:
    """The input whose rows, with new ones behind them or within them already, a value has."""
    while isinstance(node, fx.Node) and node.target in _REPEATING:
        node = node.args[0]
    if isinstance(node, fx.Node) and node.target is aten.cat.default:
        parts = node.args[0]
        node = parts[0] if isinstance(parts, list | tuple) and len(parts) == 2 else None
    name = holders.get(node) if isinstance(node, fx.Node) else None
    return name if name is not None and name.startswith("past") else None
