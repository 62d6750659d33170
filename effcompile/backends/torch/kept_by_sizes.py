"""What a call computes of the sizes of its inputs alone, kept from one call to the next: of a T5's encoder,
512 wide, at 128 tokens the biases of its positions took a tenth.
"""

from __future__ import annotations

import operator

from torch import Tensor, fx

from effcompile.ir.of_sizes import of_sizes

#: Sizes whose values are kept at once.
_SIZES = 8


class KeptBySizes:
    """A graph of sizes to tensors, and what it made of the last sizes that it was called with.

    Args:
        module: of sizes, to a tuple of tensors that whoever reads them leaves as they are.
        most: bytes that may be kept.
    """

    __name__ = "kept_by_sizes"

    def __init__(self, module: fx.GraphModule, most: int) -> None:
        self._module, self._most = module, most
        self._own = {_memory(tensor) for tensor in (*module.parameters(), *module.buffers())}
        # replaced as a whole, for other threads read it
        self._kept: dict[tuple[int, ...], tuple[Tensor, ...]] = {}

    def __call__(self, *sizes: int) -> tuple[Tensor, ...]:
        found = self._kept.get(sizes)
        return self._computed(sizes) if found is None else found

    @property
    def nbytes(self) -> int:
        """Bytes that are kept."""
        return sum(self._bytes(values) for values in self._kept.values())

    def _computed(self, sizes: tuple[int, ...]) -> tuple[Tensor, ...]:
        values: tuple[Tensor, ...] = self._module(*sizes)
        if self._bytes(values) <= self._most:
            kept = {**self._kept, sizes: values}  # the newest last
            while len(kept) > _SIZES or sum(map(self._bytes, kept.values())) > self._most:
                del kept[next(iter(kept))]
            self._kept = kept
        return values

    def _bytes(self, values: tuple[Tensor, ...]) -> int:
        """Each memory once, without weights that some may be views of."""
        memories = {_memory(value): value.untyped_storage().nbytes() for value in values}
        return sum(nbytes for memory, nbytes in memories.items() if memory not in self._own)


def kept_by_sizes(module: fx.GraphModule, most: int) -> KeptBySizes | None:
    """Have the module, which is changed, ask for what follows from sizes alone; None where there is nothing
    that is worth it.
    """
    graph, found = module.graph, of_sizes(module.graph)
    if not found.results:
        return None
    kept = KeptBySizes(fx.GraphModule(module, _apart(found.results, found.nodes, found.sizes)), most)
    last = [*graph.find_nodes(op="placeholder")][-1]
    for size in reversed(found.sizes):  # of inputs: nothing before them is read
        last.append(size)
    with graph.inserting_before((found.sizes[-1] if found.sizes else last).next):
        call = graph.call_function(kept, found.sizes)
        for at, result in enumerate(found.results):
            item = graph.call_function(operator.getitem, (call, at))
            item.meta = dict(result.meta)
            result.replace_all_uses_with(item)
    graph.eliminate_dead_code()
    module.recompile()
    return kept


def _apart(results: tuple[fx.Node, ...], nodes: tuple[fx.Node, ...], sizes: tuple[fx.Node, ...]) -> fx.Graph:
    """A graph of its own that computes them."""
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for size in sizes:
        copies[size] = graph.placeholder(size.name)
    for node in nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[result] for result in results))
    return graph


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
