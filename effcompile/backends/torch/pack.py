"""From a program to something to run: flat tensors in and out, constants folded, weights packed."""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import fx, nn
from torch.export.graph_signature import ConstantArgument, InputKind
from torch.utils import _pytree as pytree

from effcompile.backends.mapped import mapped, put_aside
from effcompile.backends.torch.tidy import without_asserts
from effcompile.core import torch_compat
from effcompile.core.errors import LoweringError
from effcompile.core.types import Value
from effcompile.ir.export import lenient_views
from effcompile.ir.program import Program
from effcompile.machine.memory import give_back
from effcompile.ops import few_rows, wide
from effcompile.ops.fp32_linear import fp32_pack

#: Bytes of plain weights from which on they are worth files.
LARGE = 16 << 20
#: Key → weight in oneDNN's layout, as long as what was lowered with it is there.
_PACKED: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()
_KEYS = itertools.count()
_LIBRARY = torch.library.Library("effcompile", "FRAGMENT")
_LIBRARY.define("packed(Tensor weight, int key) -> Tensor")
_LIBRARY.impl("packed", lambda weight, key: _PACKED[key], "CPU")
_LIBRARY.impl("packed", lambda weight, key: weight.new_empty(_PACKED[key].shape), "Meta")


def flatten(program: Program) -> fx.GraphModule:
    """The program's graph as a function of its tensor leaves, which returns its tensor leaves as a tuple.

    Raises:
        LoweringError: the graph's placeholders are not the leaves of the example's arguments.
    """
    leaves = pytree.tree_leaves((program.args, dict(program.kwargs)))
    if (takes := len(program.graph.find_nodes(op="placeholder"))) != len(leaves):
        raise LoweringError(
            f"{program.name}: the graph takes {takes} inputs and the example has {len(leaves)}. "
            "Capture again."
        )
    values = {at: leaf for at, leaf in enumerate(leaves) if not isinstance(leaf, torch.Tensor)}
    graph = _flat(program.graph, values, program.tensor_results())
    return fx.GraphModule(program.module, graph, class_name=program.name)


def flatten_exported(exported: torch.export.ExportedProgram) -> fx.GraphModule:
    """What `flatten` made of a program, of one that was exported since."""
    module = exported.module(check_guards=False)
    given = [spec.arg for spec in exported.graph_signature.input_specs if spec.kind is InputKind.USER_INPUT]
    values = {at: arg.value for at, arg in enumerate(given) if isinstance(arg, ConstantArgument)}
    results = pytree.tree_leaves(module.graph.output_node().args[0])
    graph = _flat(module.graph, values, [leaf for leaf in results if isinstance(leaf, fx.Node)])
    without_asserts(graph)
    return fx.GraphModule(module, graph)


def _flat(source: fx.Graph, values: Mapping[int, Value], results: Sequence[fx.Node]) -> fx.Graph:
    """`values`: what stands for an input that is no tensor, by its place."""
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    graph.graph_copy(source, copies)
    graph.output(tuple(copies[node] for node in results))
    lenient_views(graph)
    for old, new in copies.items():
        new.meta = dict(old.meta)
    for at, holder in enumerate(graph.find_nodes(op="placeholder")):
        if at in values:
            _replace_by_value(graph, holder, values[at])
    return graph


def _replace_by_value(graph: fx.Graph, node: fx.Node, value: Value) -> None:
    for user in list(node.users):
        user.args = fx.node.map_arg(user.args, lambda a: value if a is node else a)
        user.kwargs = fx.node.map_arg(user.kwargs, lambda a: value if a is node else a)
    graph.erase_node(node)


def pack(module: fx.GraphModule, packed: Sequence[torch.Tensor] | None = None) -> fx.GraphModule:
    """The module with its packing operators carried out: weights in the layout of their products,
    plain copies dropped.

    packed: what they return (`packed_weights`), where it is there already.
    """
    packed = packed_weights(module) if packed is None else packed
    for index, (node, weight) in enumerate(zip(_packings(module), packed, strict=True)):
        name = f"_packed_{index}"
        module.register_buffer(name, weight)
        with module.graph.inserting_before(node):
            constant = module.graph.get_attr(name)
        node.replace_all_uses_with(constant)
        module.graph.erase_node(node)
    module.graph.eliminate_dead_code()
    return fx.GraphModule(module, module.graph, class_name=type(module).__name__)


def by_rows(module: fx.GraphModule, *, widens: bool = False) -> fx.GraphModule:
    """The module, whose linears on plain weights of its own read these once where rows are few.

    `widens`: those in 16 bits are made in fp32 where rows are many and the processor has no such products,
    which takes a copy of a weight meanwhile (ops/wide.py).
    """
    for node in module.graph.find_nodes(op="call_function", target=torch.ops.aten.linear.default):
        parts = [part for part in node.args[1:] if isinstance(part, fx.Node)]
        held = [attribute(module, str(part.target)) for part in parts if part.op == "get_attr"]
        if node.kwargs or len(held) != len(parts):
            continue
        if few_rows.takes(*held):
            node.target = few_rows.linear
        elif widens and wide.takes(*held):
            node.target = wide.linear
    module.recompile()
    return module


def packed_weights(module: fx.GraphModule) -> list[torch.Tensor]:
    """What the module's packing operators return, in their order."""
    with torch.no_grad():
        return [node.target(_weight(module, node).detach(), *node.args[1:]) for node in _packings(module)]  # type: ignore[operator]


def packed_elsewhere(module: fx.GraphModule, packed: Sequence[torch.Tensor]) -> fx.GraphModule:
    """The module with lookups of what its packing operators return, so that a compiler that folds them holds
    these very tensors.

    They are found as long as the caller holds them.
    """
    for node, weight in zip(_packings(module), packed, strict=True):
        _PACKED[key := next(_KEYS)] = weight
        node.target, node.args = torch.ops.effcompile.packed.default, (node.args[0], key)
    module.recompile()
    return module


def put_plain_aside(module: fx.GraphModule, made: Collection[str]) -> None:
    """Weights that passes made and that packing operators alone read, in files: whoever saves them reads them
    there, and no call does.
    """
    packers = _packers()
    readers: dict[str, set[object]] = {}
    for node in module.graph.find_nodes(op="get_attr"):
        readers.setdefault(str(node.target), set()).update(user.target for user in node.users)
    found = [
        attribute(module, name)
        for name, targets in readers.items()
        if name in made and targets <= set(packers)
    ]
    plain = [weight for weight in found if isinstance(weight, nn.Parameter)]
    if sum(weight.nbytes for weight in plain) > LARGE:
        with contextlib.suppress(OSError):  # a full disk: they stay where they are
            for weight in plain:
                put_aside(mapped([weight]))
        give_back()


def _packers() -> tuple[object, ...]:
    return (*torch_compat.packing_operators(), fp32_pack.default)


def _packings(module: fx.GraphModule) -> list[fx.Node]:
    packers = _packers()
    return [node for node in module.graph.nodes if node.op == "call_function" and node.target in packers]


def _weight(module: fx.GraphModule, packing: fx.Node) -> torch.Tensor:
    weight = packing.args[0]
    assert isinstance(weight, fx.Node)
    return attribute(module, str(weight.target))


def attribute(module: fx.GraphModule, path: str) -> torch.Tensor:
    """The tensor that a `get_attr` names."""
    owner, _, name = path.rpartition(".")
    value = getattr(module.get_submodule(owner), name)
    assert isinstance(value, torch.Tensor)
    return value
