"""Attentions of a step of generation whose keys and values are all rows of the cache, the new ones last."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import fx

from effcompile.ir.formats import Form
from effcompile.ir.program import Program, dtype_of, shape_of
from effcompile.sites.parts import argument, attentions

aten = torch.ops.aten
#: Where a plan decides how a runtime's own attentions have their rows, and as what kind.
SITE, KIND = "attentions over the cache", "cached attention"
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
    specs = {spec.name: spec for spec in program.inputs}
    if not {"tokens", "mask"} <= specs.keys() or any(name.startswith(_OF_IMAGES) for name in specs):
        return []
    new, seen = specs["tokens"].shape[1], specs["mask"].shape[1]
    holders = dict(zip(program.graph.find_nodes(op="placeholder"), specs, strict=True))
    found = []
    for each in attentions(program):
        if each.ours or each.causal or each.sink or not _plain(each.node, each.mask):
            continue
        key, value = (_leaf(argument(each.node, name), holders) for name in ("key", "value"))
        if key is None or value is None or key == value:
            continue
        sizes = [specs[name].shape for name in (key, value)]
        groups, width = sizes[0][1], sizes[0][3]
        if (
            sizes[0] == sizes[1]
            and isinstance(groups, int)
            and isinstance(width, int)
            and seen in (f"{sizes[0][2]} + {new}", f"{new} + {sizes[0][2]}")
            and width % 8 == 0
            and each.dims[1] % groups == 0
        ):
            found.append(
                CachedAttention(
                    site=each.site, key=key, value=value, heads=each.dims[1], groups=groups, width=width
                )
            )
    read = [name for each in found for name in (each.key, each.value)]
    return [each for each in found if read.count(each.key) == read.count(each.value) == 1]


def _plain(node: fx.Node, mask: fx.Node | None) -> bool:
    if node.target is not aten.scaled_dot_product_attention.default or mask is None:
        return False
    sizes = shape_of(mask)
    return (
        dtype_of(node) is torch.float32 and dtype_of(mask) is torch.bool and len(sizes) == 4 and sizes[1] == 1
    )


def _leaf(node: object, holders: Mapping[fx.Node, str]) -> str | None:
    """The input whose rows, with new ones behind them or within them already, a value has."""
    while isinstance(node, fx.Node) and node.target in _REPEATING:
        node = node.args[0]
    if isinstance(node, fx.Node) and node.target is aten.cat.default:
        parts = node.args[0]
        node = parts[0] if isinstance(parts, list | tuple) and len(parts) == 2 else None
    name = holders.get(node) if isinstance(node, fx.Node) else None
    return name if name is not None and name.startswith("past") else None
