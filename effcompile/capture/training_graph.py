"""The graphs of training capture: state lifted to placeholders before autograd, and the joint graph made tidy
after it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx, nn

from effcompile.capture.cleanup import refuse_layouts
from effcompile.capture.draws import draw_in_memory_order, separate_draws, without_masks
from effcompile.capture.layouts import lay_out_plainly
from effcompile.core import torch_compat_aot
from effcompile.core.errors import CaptureError
from effcompile.core.types import Value
from effcompile.ir.program import module_path
from effcompile.ir.roles import Entering, Enters, Leaves, Leaving, Roles

aten = torch.ops.aten

#: What the wrapper around the user's model calls it; stripped from every qualified name.
WRAPPED = "effcompile_user_model"
#: In a forward's `meta`: qualified name → what stands for a parameter of the model, such as one rank's part
#: of it.
PARTS = "effcompile_parts"

_ASSERTS = (
    "_assert_tensor_metadata",
    "_assert_scalar",
    "_assert_async",
    "sym_constrain_range",
    "sym_constrain_range_for_size",
)
_SAME_VALUE = (aten.detach.default, aten.alias.default)
_RESHAPES = (aten.view.default, aten._unsafe_view.default, aten.expand.default, aten.reshape.default)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lifted:
    """A module without state: `module(*tensors)`, where `entering[i]` says what tensor i is."""

    module: fx.GraphModule
    tensors: Sequence[torch.Tensor]
    entering: Sequence[Enters]


@dataclass(frozen=True, slots=True, kw_only=True)
class JointGraph:
    """The tidy joint graph and what its placeholders and results are: see `effcompile.ir.step.Step`."""

    module: fx.GraphModule
    roles: Roles


def lift(front: fx.GraphModule, model: nn.Module, inputs: Sequence[torch.Tensor]) -> Lifted:
    """Parameters, buffers and constants as placeholders, one per distinct tensor: a tied weight stays one
    weight.
    """
    separate_draws(front.graph)
    owners = _owners(model, front.meta.get(PARTS, {}))
    graph, found = fx.Graph(), dict[int, tuple[Enters, torch.Tensor, list[fx.Node]]]()
    given = [node for node in front.graph.nodes if node.op == "placeholder"]
    assert len(given) == len(inputs), f"{len(given)} placeholders for {len(inputs)} inputs"
    for node in front.graph.find_nodes(op="get_attr"):
        value = _resolved(front, str(node.target), owners)
        if isinstance(value, torch.Tensor):
            entry = owners.entering.get(id(value), Enters(Entering.CONSTANT, value=value))
            found.setdefault(id(value), (entry, value, []))[2].append(node)
    ordered = sorted(found.values(), key=lambda item: item[0].role.value)
    copies: dict[fx.Node, fx.Node] = {}
    for index, (_, _, nodes) in enumerate(ordered):
        copies.update(dict.fromkeys(nodes, graph.placeholder(f"state_{index}")))
    copies.update({node: graph.placeholder(f"input_{index}") for index, node in enumerate(given)})
    for node in front.graph.nodes:
        if node not in copies:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    targets = {str(node.target) for node in graph.nodes if node.op in ("get_attr", "call_module")}
    module = fx.GraphModule({target: _attribute(front, target) for target in targets}, graph)
    for part in module.modules():
        if isinstance(part, fx.GraphModule):
            _strip_wrapper(part.graph)
    users = [Enters(Entering.INPUT, f"input_{index}") for index in range(len(inputs))]
    return Lifted(
        module=module,
        tensors=[*(value for _, value, _ in ordered), *inputs],
        entering=[*(entry for entry, _, _ in ordered), *users],
    )


@dataclass(frozen=True, slots=True)
class _Owners:
    """The user's tensors: id → what it is, by its first qualified name, and any qualified name → tensor."""

    entering: dict[int, Enters]
    tensors: dict[str, torch.Tensor]


def _owners(model: nn.Module, parts: Mapping[str, torch.Tensor]) -> _Owners:
    entering: dict[int, Enters] = {}
    tensors: dict[str, torch.Tensor] = {}
    listed: list[tuple[Entering, Iterable[tuple[str, torch.Tensor]]]] = [
        (Entering.PARAMETER, model.named_parameters(remove_duplicate=False)),
        (Entering.BUFFER, model.named_buffers(remove_duplicate=False)),
    ]
    for role, pairs in listed:
        for name, whole in pairs:
            tensor = parts.get(name, whole)
            tensors[name] = tensor
            entering.setdefault(id(tensor), Enters(role, name))
    return _Owners(entering, tensors)


def _resolved(front: fx.GraphModule, target: str, owners: _Owners) -> Value:
    """The user's own tensor behind a get_attr, else what the traced module holds under that name."""
    _, marker, name = target.rpartition(f"{WRAPPED}.")
    return owners.tensors[name] if marker and name in owners.tensors else _attribute(front, target)


def _attribute(module: nn.Module, target: str) -> Value:
    value: Value = module
    for part in target.split("."):
        value = getattr(value, part)
    return value


def _strip_wrapper(graph: fx.Graph) -> None:
    """The user's own module names: without the wrapper around the model, and without torch's `@1` at a second
    call.
    """
    for node in graph.nodes:
        stack = node.meta.get("nn_module_stack")
        if stack:
            kept = {key: entry for key, entry in stack.items() if WRAPPED in entry[0]}
            node.meta["nn_module_stack"] = {
                key: (_user_name(entry[0]), *entry[1:]) for key, entry in kept.items()
            }


def _user_name(path: str) -> str:
    return re.sub(r"@\d+", "", path.rpartition(WRAPPED)[2].lstrip("."))


def join(lifted: Lifted, model: nn.Module) -> JointGraph:
    """Trace autograd through a lifted module, and tidy the graph.

    Raises:
        CaptureError: the forward writes into an input, a parameter, or a tensor that is no buffer; a tensor
            is not dense; an operator has an effect.
    """
    module, inputs, results = torch_compat_aot.joint_graph(lifted.module, lifted.tensors)
    _refuse_effects(module.graph, model)
    updated = _updated(results, lifted, model)
    placeholders = module.graph.find_nodes(op="placeholder")
    nodes = {index: node for node, (kind, index) in zip(placeholders, inputs, strict=True) if kind == "input"}
    tangents = [node for node, (kind, _) in zip(placeholders, inputs, strict=True) if kind == "tangent"]
    assert len(tangents) == 1 and len(nodes) == len(lifted.tensors) and len(placeholders) == len(nodes) + 1, (
        inputs
    )
    flat = dict(zip(results, module.graph.output_node().args[0], strict=True))  # type: ignore[arg-type]
    assert flat.get(("other", -1)) is None, module.graph.output_node().meta["desc"]
    gradients = [
        (lifted.entering[i], node)
        for (kind, i), node in flat.items()
        if kind == "gradient" and node is not None
    ]
    of = {entry.name: node for entry, node in gradients if entry.role is Entering.PARAMETER}
    returned = [
        *(
            (Leaves(Leaving.OUTPUT if i else Leaving.LOSS), node)
            for (kind, i), node in flat.items()
            if kind == "output"
        ),
        *((Leaves(Leaving.UPDATED, name), flat["updated", i]) for name, i in updated.items()),
        *((Leaves(Leaving.GRADIENT, name), of[name]) for name, _ in model.named_parameters() if name in of),
        *(
            (Leaves(Leaving.INPUT_GRADIENT, entry.name), node)
            for entry, node in gradients
            if entry.role is Entering.INPUT
        ),
    ]
    module.graph.output_node().args = (tuple(node for _, node in returned),)
    module.graph.output_node().meta.pop("desc", None)
    entering = {node: lifted.entering[i] for i, node in nodes.items()} | _lift_constants(module)
    entering |= {node: Enters(Entering.TANGENT, node.name) for node in tangents}
    _refuse_sparse_gradients(module.graph, model)
    refuse_layouts(module.graph)
    draw_in_memory_order(module.graph)
    lay_out_plainly(module.graph)
    _tidy(module.graph)
    without_masks(module.graph)
    gone = {node for node, entry in entering.items() if entry.role is not Entering.INPUT and not node.users}
    for node in gone:
        module.graph.erase_node(node)
    module.graph.lint()
    return JointGraph(
        module=torch_compat_aot.graph_module({}, module.graph, type(model).__name__ + "Step"),
        roles=Roles(
            {node: entry for node, entry in entering.items() if node not in gone},
            tuple(result for result, _ in returned),
        ),
    )


def _refuse_effects(graph: fx.Graph, model: nn.Module) -> None:
    """Raises CaptureError where an operator does something beside its result: torch has tokens of such enter
    and leave a graph, to keep their order.
    """
    for node in graph.find_nodes(op="call_function", target=torch.ops.higher_order.with_effects):
        called = node.args[1]
        linalg = called is torch.ops.aten._linalg_check_errors.default
        raise CaptureError(
            f"The forward of {type(model).__name__} calls {called}, which does something beside its result, "
            "and the graph of a step has results alone. "
            + (
                "It is how torch.linalg's inv, solve and cholesky raise for a matrix that has none: use "
                "inv_ex, solve_ex and cholesky_ex there, which return that as a number."
                if linalg
                else "Call it outside of the forward."
            )
        )


def _refuse_sparse_gradients(graph: fx.Graph, model: nn.Module) -> None:
    """Raises CaptureError where a lookup asks for a sparse gradient: the optimizers that want one refuse a
    dense one, and reversely.
    """
    for node in graph.nodes:
        schema = getattr(node.target, "_schema", None)
        names = (
            [argument.name for argument in schema.arguments]
            if schema is not None and "embedding" in schema.name
            else []
        )
        if "sparse" in names and (
            node.kwargs.get("sparse") or dict(zip(names, node.args, strict=False)).get("sparse")
        ):
            raise CaptureError(
                f"{type(model).__name__} asks for sparse gradients ({module_path(node) or node.target}: "
                "nn.Embedding(sparse=True)), and a planned step makes dense ones. Set its `sparse` to "
                "False, with an optimizer that takes dense gradients."
            )


def _updated(results: Sequence[torch_compat_aot.Role], lifted: Lifted, model: nn.Module) -> dict[str, int]:
    """Buffer → index among the lifted tensors, for the buffers that the forward writes into."""
    written = {index: lifted.entering[index] for kind, index in results if kind == "updated"}
    words = {
        Entering.PARAMETER: "the parameter {}",
        Entering.INPUT: "one of its inputs",
        Entering.CONSTANT: "a tensor that is no buffer",
    }
    for entry in written.values():
        if entry.role is not Entering.BUFFER:
            raise CaptureError(
                f"The forward of {type(model).__name__} writes into {words[entry.role].format(entry.name)}. "
                "A training step may only write into buffers: register the tensor with register_buffer, or "
                "write into a copy."
            )
    return {entry.name: index for index, entry in written.items()}


def _lift_constants(module: fx.GraphModule) -> dict[fx.Node, Enters]:
    """get_attr nodes of tensors as placeholders, one per tensor."""
    lifted: dict[int, fx.Node] = {}
    constants: dict[fx.Node, Enters] = {}
    last = module.graph.find_nodes(op="placeholder")[-1]
    for node in module.graph.find_nodes(op="get_attr"):
        value = _attribute(module, str(node.target))
        assert isinstance(value, torch.Tensor), f"{node.target} is a {type(value).__name__}"
        if id(value) not in lifted:
            with module.graph.inserting_after(last):
                last = lifted[id(value)] = module.graph.placeholder(f"constant_{len(lifted)}")
            last.meta.update(node.meta)
            constants[last] = Enters(Entering.CONSTANT, value=value)
        node.replace_all_uses_with(lifted[id(value)])
        module.graph.erase_node(node)
    return constants


def _tidy(graph: fx.Graph) -> None:
    """Remove asserts, what only gives its input another name, and dead code; random operators stay where they
    are.
    """
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        name = getattr(node.target, "_opname", None)
        if name in _ASSERTS:
            graph.erase_node(node)
        elif _is_same(node) and not any(user.op == "output" for user in node.users):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    graph.eliminate_dead_code(lambda node: node.is_impure() or torch_compat_aot.is_random(node.target))


def _is_same(node: fx.Node) -> bool:
    """A detach or alias (autograd is behind us), or a reshape to the shape and strides that its input has."""
    source = node.args[0] if node.args else None
    if not isinstance(source, fx.Node) or node.target not in (*_SAME_VALUE, *_RESHAPES):
        return False
    mine, other = node.meta.get("val"), source.meta.get("val")
    if not isinstance(mine, torch.Tensor) or not isinstance(other, torch.Tensor):
        return False
    return mine.shape == other.shape and mine.stride() == other.stride() and mine.dtype == other.dtype
