"""How linears in bytes have x (ops/byte_codings.py): by what enters them on calibration
inputs, and all the weights that read it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
from torch import fx

from effcompile.core.types import Args, Arguments, Outputs, Value
from effcompile.ir.export import LENIENT
from effcompile.ir.program import Program, shape_of
from effcompile.ops.byte_codings import Coding, coding
from effcompile.sites.parts import LinearSite, argument, weight_of

aten = torch.ops.aten

__all__ = ["MOST_ROWS", "Lenient", "by_value", "on_inputs", "parts_of", "some_rows"]

#: Operators that split a result → the argument that says where.
_SPLITS = {aten.split_with_sizes.default: "split_sizes", aten.split.Tensor: "split_size"}
#: Rows of a value that are looked at, and inputs that they are taken from.
MOST_ROWS, _MOST_INPUTS = 256, 4


def on_inputs(
    program: Program, sites: Collection[LinearSite], calibration: Sequence[Sequence[torch.Tensor]]
) -> dict[str, Coding | None]:
    """Site → how it has x, None: by plain rows; of the program's linears `sites`, on flat inputs.

    Without inputs there are none.
    """
    wanted = {site.x for site in sites}
    if not wanted or not calibration:
        return {}
    watcher = _Rows(program.module, wanted)
    with torch.no_grad():
        for inputs in calibration[:_MOST_INPUTS]:
            watcher.run(*program.leaves_with(inputs), enable_io_processing=False)
            if watcher.fewest() >= MOST_ROWS:
                break
    weights = {site.site: parts_of(site.node, weight_of(program, site)) for site in sites}
    values = {site.site: site.x for site in sites}
    return by_value(values, weights, {node: some_rows(rows) for node, rows in watcher.rows.items()})


def by_value(
    values: Mapping[str, fx.Node],
    weights: Mapping[str, Sequence[torch.Tensor]],
    rows: Mapping[fx.Node, torch.Tensor],
) -> dict[str, Coding | None]:
    """The same by the value that enters each site, the parts of its weight (`parts_of`), and rows (M, K) of
    that value. Sites that read one value have it alike: they may be merged.
    """
    readers: dict[fx.Node, list[str]] = {}
    for site, value in values.items():
        readers.setdefault(value, []).append(site)
    found: dict[str, Coding | None] = {}
    for value, sites in readers.items():
        given = [part for site in sites for part in weights[site]]
        found.update(dict.fromkeys(sites, coding(rows[value], given)))
    return found


def parts_of(linear: fx.Node, weight: torch.Tensor) -> Sequence[torch.Tensor]:
    """A weight (N, K) in the parts that its linear's result is split into: queries, keys and values, say,
    merged or of a model that has them as one, count as linears of their own.
    """
    for reader in linear.users:
        if reader.target in _SPLITS and len(linear.users) == 1:
            axis = argument(reader, "dim")
            if axis in (-1, len(shape_of(linear)) - 1):
                return weight.detach().split(argument(reader, _SPLITS[reader.target]))
    return [weight.detach()]


def some_rows(values: Iterable[torch.Tensor]) -> torch.Tensor:
    """At most MOST_ROWS rows (M, K) of values (..., K), evenly from all of them."""
    rows = torch.cat([value.reshape(-1, value.shape[-1]) for value in values])
    return rows[:: max(1, -(-len(rows) // MOST_ROWS))]


class Lenient(fx.Interpreter):
    """Runs a captured graph; views are made where they can be."""

    def call_function(self, target: fx.node.Target, args: Args, kwargs: Arguments) -> Value:
        return super().call_function(LENIENT.get(target, target), args, kwargs)


class _Rows(Lenient):
    """Keeps rows of chosen values."""

    def __init__(self, module: fx.GraphModule, wanted: Collection[fx.Node]) -> None:
        super().__init__(module)
        self.rows: dict[fx.Node, list[torch.Tensor]] = {node: [] for node in wanted}

    def run_node(self, n: fx.Node) -> Outputs:
        value = super().run_node(n)
        if n in self.rows:
            self.rows[n].append(some_rows([value.detach()]).clone())
        return value

    def fewest(self) -> int:
        return min(sum(map(len, rows)) for rows in self.rows.values())
