"""Which values of a block tensor parallelism leaves whole, and which it splits: read off the order of its
products with parameters.

Megatron's rule (Shoeybi et al. 2019): columns of the first product, rows of the next. A product that reads
whole values makes split ones; one that reads split values makes whole ones after a sum over the ranks.
Everything else is split where anything that it reads is. Where a block's output would be left split (experts
that are mixed, no pairs of products), values as large as the output count as whole.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx

from effcompile.ir.step import Step
from effcompile.schedules.blocks import Block, Blocks

_PRODUCTS = ("mm", "addmm", "linear", "_grouped_mm")


def sides(cut: Blocks, block: Block) -> tuple[frozenset[str], int]:
    """(values of the block that are whole, sums over tp of its forward)."""
    split: dict[fx.Node, bool] = {}
    sums = 0
    for node in block.forward:
        reads = any(split.get(arg, False) for arg in node.all_input_nodes)
        product = _is_product(node, cut.step)
        sums += product and reads
        split[node] = reads != product if product else reads
    names = {s: name for name, s in block.values.items()}
    made = {names[s]: node for node in block.forward for s in cut.held.made[node] if s in names}
    leaving = {names[s] for s in block.leaving if s in names}
    if sums and not any(split[made[name]] for name in leaving if name in made):
        return frozenset(
            name for name in block.problem.nbytes if name not in made or not split[made[name]]
        ), sums
    size = max((block.problem.nbytes[name] for name in leaving or block.problem.entering), default=0)
    return frozenset(
        name for name, n in block.problem.nbytes.items() if n == size or name in block.problem.entering
    ), max(sums, 2)


def _is_product(node: fx.Node, step: Step) -> bool:
    packet = getattr(node.target, "overloadpacket", None)
    name = str(packet).rpartition(".")[2]
    return name in _PRODUCTS and any(
        of_parameter(arg, step.parameters) is not None for arg in node.all_input_nodes
    )


def of_parameter(node: fx.Node, parameters: Mapping[fx.Node, str]) -> fx.Node | None:
    """The parameter that a node is, or is a view or copy of."""
    while node.op == "call_function" and len(node.all_input_nodes) == 1:
        node = node.all_input_nodes[0]
    return node if node in parameters else None
