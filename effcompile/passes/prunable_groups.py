"""Hidden neurons and attention heads as groups that can be removed: the linears that make them and read them,
and what lies between.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, fx

from effcompile.core.reasons import Unsupported
from effcompile.ir.program import Program, shape_of
from effcompile.passes.channel_dependencies import EXPANDS, SPLITS, VIEWS, Channels, Line, channels
from effcompile.passes.constants import readers, replace_constant, storage_of
from effcompile.sites.parts import LinearSite, argument, common_parent

aten = torch.ops.aten


@dataclass(frozen=True, slots=True, kw_only=True)
class Structure:
    """Units (hidden neurons or heads) that some linears make and others read.

    Attributes:
        site: `layers.0.mlp:neurons`, `layers.0.attention:heads`.
        kind: "neurons" or "heads".
        count: U, the units.
        makes: (linear, unit of each of its output rows (N)).
        reads: (linear, unit of each of its input columns (K)).
        refused: why none of them can be removed; None if they can.
            family: which units of the graph's `channels` they are.
    """

    site: str
    kind: str
    count: int
    makes: tuple[tuple[LinearSite, Tensor], ...]
    reads: tuple[tuple[LinearSite, Tensor], ...]
    refused: Unsupported | None
    family: tuple[int, ...]
    channels: Channels = field(repr=False, compare=False)

    @property
    def members(self) -> tuple[LinearSite, ...]:
        """All linears, those that make units first."""
        return tuple(site for site, _ in (*self.makes, *self.reads))

    def shrunk(self, kept: int) -> tuple[LinearSite, ...]:
        """The linears at the sizes that they have with so many units left."""
        rows = [replace(site, n=site.n // self.count * kept) for site, _ in self.makes]
        return (*rows, *(replace(site, k=site.k // self.count * kept) for site, _ in self.reads))


def structures(program: Program, dtypes: Collection[torch.dtype] = (torch.float32,)) -> list[Structure]:
    """The structures of a program, in graph order; no linear is in two of them that can be removed.

    dtypes: those that weights may have; smaller linears are priced in fp32 alone.
    """
    found = channels(program)
    shared = readers(program)
    names: dict[str, int] = defaultdict(int)
    taken: dict[str, str] = {}
    result = []
    for makes, reads in _families(found):
        structure = _structure(program, found, makes, reads, shared, dtypes)
        if structure is None:
            continue
        names[structure.site] += 1
        if names[structure.site] > 1:
            structure = replace(structure, site=f"{structure.site}#{names[structure.site]}")
        clash = next((taken[member.site] for member in structure.members if member.site in taken), "")
        if not structure.refused and clash:
            structure = replace(
                structure, refused=Unsupported("a linear of it is cut for {site} already", (clash,))
            )
        if not structure.refused:
            taken |= dict.fromkeys((member.site for member in structure.members), structure.site)
        result.append(structure)
    return result


def _families(found: Channels) -> Iterator[tuple[list[str], list[str]]]:
    """(linears that make, linears that read) of units that hang together, in graph order."""
    home: dict[int, int] = {}  # unit → family
    members: dict[int, tuple[list[str], list[str], set[int]]] = {}
    tables = [(0, site, units) for site, units in found.makes.items()] + [
        (1, site, units) for site, units in found.reads.items()
    ]
    for family, (role, site, units) in enumerate(tables):
        own = set(units.unique().tolist())
        sites: tuple[list[str], list[str]] = ([], [])
        sites[role].append(site)
        for old in {home[unit] for unit in own if unit in home}:
            makes, reads, theirs = members.pop(old)
            sites[0].extend(makes)
            sites[1].extend(reads)
            own |= theirs
        members[family] = (*sites, own)
        home.update(dict.fromkeys(own, family))
    order = {site: place for place, site in enumerate(found.sites)}
    families = [
        (sorted(makes, key=order.__getitem__), sorted(reads, key=order.__getitem__))
        for makes, reads, _ in members.values()
    ]
    yield from sorted((f for f in families if f[0] and f[1]), key=lambda f: order[f[0][0]])


def _structure(
    program: Program,
    found: Channels,
    makes: list[str],
    reads: list[str],
    shared: Mapping[int, int],
    dtypes: Collection[torch.dtype],
) -> Structure | None:
    """None for what is no structure: channels of one unit, or units that some linears make for nobody."""
    units = torch.cat([found.makes[site] for site in makes]).unique()
    family = tuple(units.tolist())
    if len(family) < 2:
        return None
    own = set(family)
    heads = not found.attended.isdisjoint(own)
    made, read = (
        tuple((found.sites[site], torch.searchsorted(units, table[site])) for site in sites)
        for table, sites in ((found.makes, makes), (found.reads, reads))
    )
    kind = "heads" if heads else "neurons"
    refused = next((found.pinned[unit] for unit in family if unit in found.pinned), None)
    refused = refused or _uneven([u for _, u in (*made, *read)], len(family))
    refused = refused or _weights(program, [s for s, _ in (*made, *read)], shared, dtypes)
    fixed = (_fixed(node, found) for node in program.graph.nodes if _touches(node, found, own))
    refused = refused or next(filter(None, fixed), None)
    parent = common_parent([site.site for site, _ in (*made, *read)])
    return Structure(
        site=f"{parent}:{kind}" if parent else kind,
        kind=kind,
        count=len(family),
        makes=made,
        reads=read,
        refused=refused,
        family=family,
        channels=found,
    )


def _uneven(tables: list[Tensor], count: int) -> Unsupported | None:
    """Why units are not of one size in every linear; None if they are."""
    uneven = any(len(set(torch.bincount(units, minlength=count).tolist())) > 1 for units in tables)
    return Unsupported("its units are of different sizes") if uneven else None


def _weights(
    program: Program, members: list[LinearSite], shared: Mapping[int, int], dtypes: Collection[torch.dtype]
) -> Unsupported | None:
    """Why the weights cannot be cut; None if they can."""
    for site in members:
        weight = program.tensor(site.weight)
        assert weight is not None
        if shared[storage_of(weight)] > 1:
            return Unsupported(
                "the weight of {site} is tied: something else reads it at its full size", (site.site,)
            )
        if weight.dtype not in dtypes:
            named = [str(dtype).removeprefix("torch.") for dtype in (weight.dtype, *dtypes)]
            return Unsupported(
                "the weight of {site} is {name}; smaller layers are there in {name}",
                (site.site, named[0], " and ".join(named[1:])),
            )
    return None


# ---------------------------------------------------------------- what lies between


def _touches(node: fx.Node, found: Channels, family: set[int]) -> bool:
    """Whether an operator reads values in which these units lie."""
    lines = [found.lines.get((n, 0)) for n in node.all_input_nodes]
    return any(line is not None and line.first in family for line in lines)


def _source(node: fx.Node, found: Channels) -> tuple[fx.Node, Line]:
    """The first of an operator's operands in which units lie, and where."""
    return next((n, found.lines[n, 0]) for n in node.all_input_nodes if (n, 0) in found.lines)


def _along(node: fx.Node, source: fx.Node, axis: int) -> bool:
    """Whether an operator takes its operand apart along the axis of the units."""
    return int(argument(node, "dim")) % len(shape_of(source)) == axis  # type: ignore[call-overload]


def _fixed(node: fx.Node, found: Channels) -> Unsupported | None:
    """Why an operator cannot do with fewer units; None if it can."""
    source, line = _source(node, found)
    if node.target in (aten.select.int, aten.unbind.int) and _along(node, source, line.axis):
        return Unsupported.of("{} takes them by their number", node.name)
    if node.target is aten.slice.Tensor and _along(node, source, line.axis):
        start, end, step = (argument(node, name) for name in ("start", "end", "step"))
        if step != 1 or isinstance(start, fx.Node) or isinstance(end, fx.Node):
            return Unsupported.of("{} takes them by their number", node.name)
    made = found.lines.get((node, 0))
    if (
        node.target in (*VIEWS, *EXPANDS)
        and made is not None
        and isinstance(node.args[1][made.axis], fx.Node)  # type: ignore[index]
    ):
        return Unsupported.of("{} counts them in a size that is computed", node.name)
    if node.target is aten.repeat_interleave.self_int and argument(node, "output_size") is not None:
        return Unsupported.of("{} counts them", node.name)
    return None


def cut(program: Program, structure: Structure, keep: Tensor) -> None:
    """Leave only some units (U) bool of a structure of an editable program: smaller weights, constants, sizes
    and fake values.
    """
    found = structure.channels
    gone = torch.tensor(structure.family)[~keep]
    family = set(structure.family)

    def left(units: Tensor) -> Tensor:
        return (~torch.isin(units, gone)).nonzero().squeeze(1)

    for (node, constant), line in found.constants.items():
        if line.first in family:
            value = program.tensor(constant)
            assert value is not None
            replace_constant(
                program, node, constant, value.detach().index_select(line.axis, left(line.units))
            )
    for node in program.graph.nodes:
        if _touches(node, found, family):
            _resize(node, found, left)
    for (node, number), line in found.lines.items():
        if line.first in family:
            _refresh(node, number, line.axis, len(left(line.units)))
    for site, units in structure.makes:
        _cut_weight(program, site, keep[units].nonzero().squeeze(1), rows=True)
    for site, units in structure.reads:
        _cut_weight(program, site, keep[units].nonzero().squeeze(1), rows=False)


def _cut_weight(program: Program, site: LinearSite, left: Tensor, *, rows: bool) -> None:
    weight, bias = program.tensor(site.weight), program.tensor(site.bias)
    assert weight is not None
    axis = int(rows == site.transposed)  # a weight (N, K) has its rows along 0, one stored (K, N) along 1
    replace_constant(program, site.node, site.weight, weight.detach().index_select(axis, left).contiguous())
    if rows and site.bias is not None and bias is not None and bias.numel() == site.n:
        replace_constant(program, site.node, site.bias, bias.detach().index_select(-1, left))


def _resize(node: fx.Node, found: Channels, left: Callable[[Tensor], Tensor]) -> None:
    """The sizes that an operator is called with."""
    source, before = _source(node, found)
    made = found.lines.get((node, 0))
    if node.target in (*VIEWS, *EXPANDS) and made is not None:
        sizes = list(node.args[1])  # type: ignore[arg-type]
        if sizes[made.axis] != -1:
            sizes[made.axis] = len(left(made.units))
        node.args = (node.args[0], sizes, *node.args[2:])
    elif node.target in SPLITS and _along(node, source, before.axis):
        sizes = [
            len(left(part))
            for part in before.units.split([int(part.shape[before.axis]) for part in node.meta["val"]])
        ]
        node.target, node.args, node.kwargs = aten.split_with_sizes.default, (source, sizes, before.axis), {}
    elif node.target is aten.slice.Tensor and _along(node, source, before.axis):
        start, end, _ = slice(argument(node, "start"), argument(node, "end")).indices(len(before.units))
        ends = [len(left(before.units[:place])) for place in (start, end)]
        node.args, node.kwargs = (source, before.axis, *ends), {}


def _refresh(node: fx.Node, number: int, axis: int, size: int) -> None:
    """The fake value of one result of a node, at its new size."""
    value = node.meta.get("val")
    several = isinstance(value, (tuple, list))
    part = value[number] if several else value  # type: ignore[index]
    if isinstance(part, Tensor):
        smaller = part.new_empty((*part.shape[:axis], size, *part.shape[axis + 1 :]))
        node.meta["val"] = (*value[:number], smaller, *value[number + 1 :]) if several else smaller  # type: ignore[index]
