"""An exported graph as a functional one: only what has to be taken apart is traced again.

Private APIs of torch, found by feature.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from threading import get_ident
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from effcompile.core.torch_compat import SYMBOLIC, expression
from effcompile.core.torch_compat_aot import writes
from effcompile.core.torch_compat_export import graphs_of, private_module, replaced
from effcompile.core.types import Args, Outputs, Value

aten = torch.ops.aten

Functional = tuple[torch.export.ExportedProgram, fx.GraphModule]


def functional(exported: torch.export.ExportedProgram) -> Functional:
    """`exported.run_decompositions({})` and its module: writes in place made values, no operator taken apart
    that can stay whole.

    torch traces the whole graph for that twice more, which is half of a capture. Where nothing but fresh
    values is written in place, only those writes change and the composite operators that torch always takes
    apart: each is run alone, on the fake tensors that the graph has, and what it calls stands in its place.
    What `exported` then knows of its sizes is what was learned by that, too: it is changed.
    """
    module = exported.module(check_guards=False)
    private = private_module(
        "torch.export.exported_program", "_convert_guards_to_code", "_get_updated_range_constraints"
    )
    if private is None or not isinstance(module, fx.GraphModule) or not _took_apart(module):
        exported = traced_again(exported)
        module = exported.module(check_guards=False)
        assert isinstance(module, fx.GraphModule)
        for copy in module.graph.find_nodes(op="call_function", target=aten.copy_.default):
            # into what was given, which torch adds
            for source in copy.all_input_nodes[1:]:
                copy.meta.setdefault("val", source.meta["val"])
    else:
        exported._guards_code = vars(private)["_convert_guards_to_code"](exported.graph_module)
        constraints = vars(private)["_get_updated_range_constraints"](
            exported.graph_module, exported.range_constraints
        )
        exported._range_constraints = constraints
    return exported, module


def traced_again(exported: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """`exported.run_decompositions({})`.

    torch tells every composite operator that it knows, some 600 of them, not to be taken apart: 0.15 s, five
    times what a small model itself costs. Only those of the graph are told here, where its other operators
    cannot lead to any that is not in it.
    """
    module = private_module("torch.export.exported_program", "_collect_all_valid_cia_ops")
    targets = {
        node.target for part in graphs_of(exported) for node in part.nodes if node.op == "call_function"
    }
    if module is None or any(_may_lead_elsewhere(target) for target in targets):
        return exported.run_decompositions({})
    collect, mine = vars(module)["_collect_all_valid_cia_ops"], get_ident()
    narrow = {target for target in targets if _preservable(target)}
    with replaced(
        module, "_collect_all_valid_cia_ops", lambda: set(narrow) if get_ident() == mine else collect()
    ):
        return exported.run_decompositions({})


def _composite(target: torch._ops.OpOverload) -> bool:
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    return key in target.py_kernels or torch._C._dispatch_has_kernel_for_dispatch_key(
        target.name(), "CompositeImplicitAutograd"
    )


def _preservable(target: object) -> bool:
    """Whether torch keeps a composite operator whole: one that is known to write nothing and to give nothing
    of its inputs away.
    """
    if not isinstance(target, torch._ops.OpOverload) or not _composite(target):
        return False
    schema = target._schema
    lies = torch.Tag.maybe_aliasing_or_mutating in target.tags
    return not (
        lies or schema.is_mutable or any(argument.alias_info is not None for argument in schema.arguments)
    )


#: Composite operators that torch always takes apart, into operators that are not composite.
_INTO_PLAIN = frozenset(
    getattr(getattr(aten, name), overload)
    for name, overload in (
        ("reshape", "default"),
        ("dropout", "default"),  # in evaluation it is its input
        ("contiguous", "default"),
        ("flatten", "using_ints"),
        ("expand_as", "default"),
        ("view_as", "default"),
        ("reshape_as", "default"),
        ("to", "dtype"),
        ("to", "device"),
        ("to", "dtype_layout"),
        ("chunk", "default"),
        ("unflatten", "int"),
        ("movedim", "int"),
        ("swapaxes", "default"),
        ("numpy_T", "default"),
        ("mT", "default"),
        ("narrow", "default"),
    )
)


def _may_lead_elsewhere(target: object) -> bool:
    """Whether taking this operator apart, which torch will do, may give composite operators that
    stay whole.
    """
    if not isinstance(target, torch._ops.OpOverload):
        return isinstance(target, torch._ops.HigherOrderOperator)
    if target is aten.sym_numel.default:
        # torch's way writes it as products of two, this one would as one of all sizes
        return True
    return _composite(target) and not _preservable(target) and target not in _INTO_PLAIN


class _NotAloneError(Exception):
    """An operator that cannot be taken apart by itself."""


def _took_apart(module: fx.GraphModule) -> bool:
    """Take the graph's operators apart, one by one; where that is not all that torch would do, False, and the
    graph is of no use.
    """
    if any(is_traceable_wrapper_subclass(tensor) for tensor in (*module.parameters(), *module.buffers())):
        return False
    try:
        for node in list(module.graph.nodes):
            if isinstance(node.target, torch._ops.HigherOrderOperator):
                _inline(node, module)
        if any(_needs_torch(node) for node in module.graph.nodes):
            return False
        sizes: dict[Any, fx.Node] = {}
        for node in list(module.graph.nodes):
            if node.op == "call_function" and node.target in _INTO_PLAIN:
                _take_apart(node, node.target, sizes)
            elif writes(node):
                _take_apart(node, _fresh_result_of(node), sizes)
            elif isinstance(node.meta.get("val"), SYMBOLIC):
                sizes.setdefault(expression(node.meta["val"]), node)
    except _NotAloneError:
        return False
    _write_known_sizes(module.graph)
    module.graph.eliminate_dead_code()
    return True


def _write_known_sizes(graph: fx.Graph) -> None:
    """Write sizes that were found to be the example's as numbers."""
    known: dict[fx.Node, int] = {}
    for node in graph.nodes:
        size = node.meta.get("val")
        if isinstance(size, torch.SymInt) and getattr(expression(size), "is_number", True):
            known[node] = int(expression(size))
    for user in {user for node in known for user in node.users}:
        user.args, user.kwargs = fx.map_arg(
            (user.args, user.kwargs), lambda source: known.get(source, source)
        )


def _needs_torch(node: fx.Node) -> bool:
    """Whether torch's tracing would change this node otherwise than here."""
    if isinstance(node.target, torch._ops.OpOverload):
        return not writes(node) and _may_lead_elsewhere(node.target)
    return node.op not in ("placeholder", "get_attr", "output") and isinstance(
        node.target, torch._ops.HigherOrderOperator
    )


#: Writes of where a value lies, not of what it is.
_OTHER_MEMORY = ("set_", "resize_", "resize_as_")


def _fresh_result_of(write: fx.Node) -> torch._ops.OpOverload:
    """The operator that makes what this one writes: of a value that no other value shares memory with.

    What reads the written value afterwards reads the result.

    Raises:
        _NotAloneError: another value may share its memory, or there is no such operator.
    """
    found, written = _without_writing(write.target), write.args[0] if write.args else None
    if found is None or not isinstance(written, fx.Node) or not _fresh(written):
        raise _NotAloneError
    earlier = set(itertools.takewhile(lambda node: node is not write, written.graph.nodes))
    if any(_shares(user) for user in written.users if user in earlier):
        raise _NotAloneError
    written.replace_all_uses_with(
        write, delete_user_cb=lambda user: user not in earlier and user is not write
    )
    return found


def _without_writing(target: Any) -> torch._ops.OpOverload | None:
    """The operator that returns what this one writes into its first argument.

    Of aten alone: elsewhere a name promises nothing.
    """
    first, *others = target._schema.arguments
    only_first = first.alias_info is not None and all(argument.alias_info is None for argument in others)
    drawn = torch.Tag.nondeterministic_seeded in target.tags
    name = target._opname
    if (
        target.namespace != "aten"
        or drawn
        or not only_first
        or not name.endswith("_")
        or name in _OTHER_MEMORY
    ):
        return None
    return getattr(getattr(aten, name[:-1], None), target._overloadname, None)


def _fresh(node: fx.Node) -> bool:
    """Whether an operator made this value, or this one of its values, in memory of its own."""
    if node.target is operator.getitem:
        source = node.args[0]
        assert isinstance(source, fx.Node)
        others = [user for user in source.users if user is not node]
        taken_once = all(user.target is operator.getitem and user.args[1] != node.args[1] for user in others)
        return taken_once and isinstance(source.target, torch._ops.OpOverload) and not _shares(source)
    return (
        isinstance(node.target, torch._ops.OpOverload)
        and len(node.target._schema.returns) == 1
        and not _shares(node)
    )


def _shares(node: fx.Node) -> bool:
    """Whether a value may share the memory of what it was made from."""
    if (
        not isinstance(node.target, torch._ops.OpOverload)
        or torch.Tag.maybe_aliasing_or_mutating in node.target.tags
    ):
        return True
    return any(result.alias_info is not None for result in node.target._schema.returns)


def _inline(node: fx.Node, module: fx.GraphModule) -> None:
    """A graph that is called to run without gradients, or without autocast, which this one is: its nodes in
    the place of the call.

    Raises:
        _NotAloneError: another operator on graphs, or one that has weights of its own.
    """
    body, given = _called_as_it_is(node, module)
    if body is None or any(
        inner.op not in ("placeholder", "call_function", "output") for inner in body.graph.nodes
    ):
        raise _NotAloneError
    copies = dict(zip(body.graph.find_nodes(op="placeholder"), given, strict=True))
    with node.graph.inserting_before(node):
        for inner in body.graph.nodes:
            if inner.op == "call_function":
                copies[inner] = node.graph.node_copy(inner, copies.__getitem__)
                if isinstance(inner.target, torch._ops.HigherOrderOperator):
                    raise _NotAloneError
    results: Any = fx.map_arg(body.graph.output_node().args[0], copies.__getitem__)
    for user in list(node.users):
        if (
            user.op != "call_function"
            or user.target is not operator.getitem
            or not isinstance(results, (tuple, list))
        ):
            raise _NotAloneError
        at: Any = user.args[1]
        user.replace_all_uses_with(results[at])
        node.graph.erase_node(user)
    node.graph.erase_node(node)


def _called_as_it_is(node: fx.Node, module: fx.GraphModule) -> tuple[fx.GraphModule | None, Sequence[Any]]:
    """The graph that a node calls under a state that changes nothing here, and what it is given."""
    name = getattr(node.target, "_name", "")
    if name == "wrap_with_set_grad_enabled" and not node.args[0] and not torch.is_grad_enabled():
        at = 1
    elif (
        name == "wrap_with_autocast" and not node.args[2] and not torch.is_autocast_enabled(str(node.args[0]))
    ):
        at = 4
    else:
        return None, ()
    body = node.args[at]
    found = module.get_submodule(str(body.target)) if isinstance(body, fx.Node) else None
    return (found if isinstance(found, fx.GraphModule) else None), node.args[at + 1 :]


class _Recorded(TorchDispatchMode):
    """The operators called below autograd, where composite ones are taken apart, that gave tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Args, dict[str, Any], Outputs]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Args = (), kwargs: Any = None) -> Outputs:
        result = func(*args, **(kwargs or {}))
        if any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(result)):
            # fake tensors are asked for their device, too
            self.calls.append((func, args, dict(kwargs or {}), result))
        return result


def _take_apart(node: fx.Node, target: Any, sizes: dict[Any, fx.Node]) -> None:
    """Put what an operator calls in the place of a node.

    `sizes`: nodes of numbers before it, by their expressions.

    Raises:
        _NotAloneError: a value that it reads is not known, its result is not laid out as the node's, or it
            computes a size that no node before it has.
    """
    values = {source: source.meta.get("val") for source in node.all_input_nodes}
    modes = [mode for value in values.values() if (mode := getattr(value, "fake_mode", None)) is not None]
    if not modes or any(value is None for value in values.values()):
        raise _NotAloneError
    args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
    with torch.no_grad(), modes[0], _Recorded() as recorded:
        result = target(*args, **kwargs)
    made = {id(value): source for source, value in values.items()}

    def written(leaf: Value) -> Value:
        if isinstance(leaf, torch.Tensor):
            return _of(made, id(leaf))
        if isinstance(leaf, SYMBOLIC):
            found = expression(leaf)
            return int(found) if getattr(found, "is_number", True) else _of(sizes, found)
        return leaf

    with node.graph.inserting_before(node):
        for func, given, named, out in recorded.calls:
            new = node.graph.call_function(func, *pytree.tree_map(written, (given, named)))
            new.meta = {**node.meta, "val": out}
            made[id(out)] = new
    if isinstance(result, (tuple, list)):  # as the last operator called gave it
        result = next(
            (out for *_, out in recorded.calls[-1:] if list(map(id, out)) == list(map(id, result))), None
        )
    elif not _alike(result, node.meta["val"]):
        raise _NotAloneError
    node.replace_all_uses_with(_of(made, id(result)))
    node.graph.erase_node(node)


#: Sizes that expressions of one size in two spellings are compared at: each free one gets the next of a row.
_TRIED = ((5, 2, 11, 3, 7), (2, 13, 3, 17, 5), (29, 19, 1, 23, 2))


def _alike(value: Any, other: Any) -> bool:
    """Whether two values have one type, sizes and strides: comparing their expressions assumes nothing of
    sizes that are not known.
    """
    pairs = zip((*value.shape, *value.stride()), (*other.shape, *other.stride()), strict=False)
    same = value.dtype is other.dtype and value.dim() == other.dim()
    return same and all(_equal(expression(a), expression(b)) for a, b in pairs)


def _equal(one: Any, other: Any) -> bool:
    """Whether two expressions of sizes are one number: as they are written, or at all sizes tried, as
    Min(16 n, 32 n) is 16 n, which stands beside it for keys that are repeated for each query.
    """
    free = sorted({*getattr(one, "free_symbols", ()), *getattr(other, "free_symbols", ())}, key=str)
    return bool(one == other) or (
        bool(free) and all(_at(one, free, row) == _at(other, free, row) for row in _TRIED)
    )


def _at(size: Any, free: Sequence[Any], row: Sequence[int]) -> Any:
    """An expression, or a number, where the free sizes are those of a row."""
    return size.subs(dict(zip(free, itertools.cycle(row)))) if hasattr(size, "subs") else size


def _of(nodes: dict[Any, fx.Node], key: object) -> fx.Node:
    if key not in nodes:
        raise _NotAloneError
    return nodes[key]
