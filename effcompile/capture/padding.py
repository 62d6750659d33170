"""On which side a model's texts are padded, which no mask of ones says."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import fx

from effcompile.capture.verify import is_mask, token_value
from effcompile.core.types import Outputs, Value
from effcompile.ir.program import Program, shape_of
from effcompile.sites.parts import attentions

__all__ = ["padded_behind"]

aten = torch.ops.aten
#: Where a model writes attentions as operators of their own.
_SOFTMAX = (aten._softmax.default, aten.softmax.int)
#: What the first query's results differ by where it sees a key, of their size.
_SEEN = 1e-4


def padded_behind(program: Program) -> frozenset[str]:
    """Padding masks, by name, of texts that are padded on the right: the first query of an attention sees the
    last token, as in encoders. No tokenizer of such a model hides its first tokens, which the others look at;
    where the example does, its masks are padded on the left as well.

    On the left are all others: a causal model's last token would not see what is hidden behind it.
    """
    nodes = {site.node for site in attentions(program)} | {
        node for node in program.calls(*_SOFTMAX) if len(shape_of(node)) > 2
    }
    leaves = program.flat_inputs()
    masks = [
        (at, spec, leaf)
        for at, (spec, leaf) in enumerate(zip(program.inputs, leaves, strict=True))
        if is_mask(spec, leaf) and spec.values is None
    ]
    found = set()
    plain = _first_queries(program, nodes, leaves) if nodes and masks else []
    for at, spec, mask in masks:
        token = token_value(spec, mask)
        if bool((mask[:, 0] != token).any()):
            continue
        shorter = mask.clone()
        for row in shorter:
            row[(row == token).nonzero()[-1]] = not token
        others = _first_queries(program, nodes, [*leaves[:at], shorter, *leaves[at + 1 :]])
        if any(_differ(a, b) for a, b in zip(plain, others, strict=True)):
            found.add(spec.name)
    return frozenset(found)


def _differ(plain: torch.Tensor, other: torch.Tensor) -> bool:
    return bool(((plain - other).norm() > _SEEN * plain.norm()).item())


@torch.no_grad()
def _first_queries(
    program: Program, nodes: Collection[fx.Node], leaves: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """What each attention gives its first query (B, H, D), or makes of its scores (B, H, K)."""
    watcher = _FirstQueries(program.module, nodes)
    watcher.run(*program.leaves_with(leaves), enable_io_processing=False)
    return watcher.found


class _FirstQueries(fx.Interpreter):
    def __init__(self, module: fx.GraphModule, nodes: Collection[fx.Node]) -> None:
        super().__init__(module)
        self._nodes = nodes
        self.found: list[torch.Tensor] = []

    def run_node(self, n: fx.Node) -> Outputs:
        value: Value = super().run_node(n)
        if n in self._nodes:
            of_queries = value[0] if isinstance(value, tuple | list) else value
            self.found.append(of_queries[..., 0, :].float().clone())
        return value
