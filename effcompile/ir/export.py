"""torch.export of a program again: inputs at other sizes, concrete shapes for edited graphs, dynamic axes.

torch.export makes an axis of size 0 or 1 constant. Wherever a dynamic axis of the example has size 1, tracing
therefore uses a copy of the inputs with that axis repeated (`grow`); the program's own inputs stay the
user's.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from effcompile.core import torch_compat
from effcompile.core.types import Args, Arguments, Kwargs, Outputs, Value
from effcompile.ir.program import Dim, Output, Program, evaluated

aten = torch.ops.aten

Inputs = tuple[tuple[Any, ...], dict[str, Any]]
#: Views as reshapes, which copy where no view is possible. A view in a captured graph is one for the strides
#: of the kernels that ran then; but attention and norms lay their results out by what they are given (a mask
#: that requires a gradient, a transposed input), and tracing assumes another layout than some kernels have.
LENIENT: Mapping[Any, Any] = {aten.view.default: aten.reshape.default}
#: axis → what torch.export is told about it, for each tensor leaf in the order of `Program.inputs`
Axes = Sequence[Mapping[int, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Domain:
    """Where a captured graph is valid: bounds of each named axis (None: no upper bound), and torch's guards.

    `not_one`: sets of axes that may not all be 1, where the graph was seen not to be the model.
    """

    bounds: Mapping[str, tuple[int, int | None]]
    guards: tuple[str, ...] = ()
    not_one: tuple[frozenset[str], ...] = ()


def domain_of(program: Program) -> Domain:
    """The domain that capture stored with the graph; unbounded where there is none."""
    stored = program.module.meta.get("effcompile_domain")
    return stored if isinstance(stored, Domain) else Domain(bounds={})


def reexport(program: Program) -> torch.export.ExportedProgram:
    """Export `program.module`, edited or not, with its dynamic axes; works for examples of batch 1.

    Nodes keep the module names (`nn_module_stack`) of the program's nodes wherever the two graphs agree. Of a
    model that returns other things beside tensors, or a class of its own (who opens the file may not have
    it), the tensors are returned, as a tuple.
    """
    args, kwargs = trace_inputs(program)
    module = _exportable(program)
    with torch.no_grad():
        exported = torch.export.export(
            module, args, kwargs, dynamic_shapes=program.dynamic_shapes, strict=False
        )
    _copy_module_names(program.graph, exported.graph)
    return exported


def _exportable(program: Program) -> fx.GraphModule:
    """A copy of the module that runs where kernels lay their results out otherwise, and returns
    tensors only.
    """
    module = program.editable("export again").module
    lenient_views(module.graph)
    codegen: Any = module.graph._codegen
    if any(kind is not Output.TENSOR for kind in program.returned) or not _known_everywhere(
        codegen.pytree_info.out_spec
    ):
        tensors = tuple(replace(program, module=module).tensor_results())
        module.graph.output_node().args = (tensors,)
        codegen.pytree_info = codegen.pytree_info._replace(out_spec=pytree.tree_structure(tensors))
        module.graph.eliminate_dead_code()
    module.recompile()
    return module


def _known_everywhere(spec: pytree.TreeSpec) -> bool:
    """Whether a structure is made of Python's own containers."""
    return spec.is_leaf() or (
        spec.type in (list, tuple, dict) and all(_known_everywhere(part) for part in spec.children())
    )


def lenient_views(graph: fx.Graph) -> None:
    """Views as `LENIENT` has them."""
    for node in graph.nodes:
        if node.op == "call_function":
            node.target = LENIENT.get(node.target, node.target)


def mend_views(module: fx.GraphModule, args: Args, kwargs: Kwargs) -> bool:
    """Make those views reshapes that are none at these inputs, as the kernels lay out their results; whether
    there were any.
    """
    views = _Views(module)
    with torch.no_grad():
        views.run(*pytree.tree_leaves((args, dict(kwargs))), enable_io_processing=False)
    if views.mended:
        module.recompile()
    return views.mended


def run_mended(program: Program, args: Args, kwargs: Kwargs) -> Outputs:
    """What the graph returns; views that it has and that are none as the kernels lay out their results are
    mended for good.
    """
    try:
        return program.module(*args, **kwargs)
    except RuntimeError:
        if not mend_views(program.module, args, {name: kwargs[name] for name in program.kwargs}):
            raise
        return program.module(*args, **kwargs)


class _Views(fx.Interpreter):
    """Runs a graph, and changes every view that cannot be taken."""

    mended = False

    def run_node(self, n: fx.Node) -> Outputs:
        lenient = LENIENT.get(n.target)
        if lenient is None:
            return super().run_node(n)
        try:
            return super().run_node(n)
        except RuntimeError:
            n.target, self.mended = lenient, True
            return super().run_node(n)


def trace_inputs(program: Program) -> Inputs:
    """The example inputs with every dynamic axis at least 2 long, as tracing needs them."""
    axes = [
        {axis: dim for axis, dim in enumerate(spec.shape) if isinstance(dim, str)} for spec in program.inputs
    ]
    return grow(program.args, program.kwargs, axes)


def grow(args: Args, kwargs: Kwargs, axes: Axes) -> Inputs:
    """The inputs with each of `axes` that has size 1 repeated to 2."""
    targets = iter(axes)

    def repeat(leaf: object) -> Value:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        wanted = next(targets)
        factors = [2 if axis in wanted and size == 1 else 1 for axis, size in enumerate(leaf.shape)]
        return leaf.repeat(factors) if 2 in factors else leaf

    grown_args, grown_kwargs = pytree.tree_map(repeat, (args, dict(kwargs)))
    return grown_args, grown_kwargs


def sizes_of(program: Program) -> dict[str, int]:
    """The example's size of each dynamic axis: {"batch": 2, "seq": 16}."""
    sizes: dict[str, int] = {}
    for spec, tensor in zip(program.inputs, program.flat_inputs(), strict=True):
        for dim, size in zip(spec.shape, tensor.shape, strict=True):
            if isinstance(dim, str) and dim.isidentifier():
                sizes.setdefault(dim, int(size))
    return sizes


def resized(program: Program, sizes: Mapping[str, int]) -> Inputs:
    """The example inputs with the named axes cut or tiled to `sizes`: values stay among the example's.

    Token ids therefore stay within the vocabulary. Unnamed axes keep their sizes.
    """
    wanted = {**sizes_of(program), **sizes}
    specs = iter(program.inputs)

    def resize(leaf: object) -> Value:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        for axis, dim in enumerate(next(specs).shape):
            size = size_at(dim, wanted)
            if size != leaf.shape[axis]:
                if not leaf.shape[axis]:  # nothing to repeat
                    leaf = leaf.new_zeros((*leaf.shape[:axis], 1, *leaf.shape[axis + 1 :]))
                leaf = leaf.index_select(axis, torch.arange(size, device=leaf.device) % leaf.shape[axis])
        return leaf

    args, kwargs = pytree.tree_map(resize, (program.args, dict(program.kwargs)))
    return args, kwargs


def size_at(dim: Dim, sizes: Mapping[str, int]) -> int:
    """The size of an axis, which may be derived from a named one ("8*seq")."""
    if isinstance(dim, int):
        return dim
    return sizes[dim] if dim in sizes else int(evaluated(dim, sizes))


def allowed(program: Program, sizes: Mapping[str, int]) -> bool:
    """Whether torch's guards and the bounds of the axes admit these sizes."""
    domain = domain_of(program)
    for name, size in sizes.items():
        low, high = domain.bounds.get(name, (0, None))
        # tracing assumes every dynamic size to be at least 2; that is torch's, not the model's
        low = low if low > 2 else 1
        if size < low or (high is not None and size > high):
            return False
    if any(all(sizes.get(name) == 1 for name in axes) for axes in domain.not_one):
        return False
    args, kwargs = resized(program, sizes)
    return unmet_guard(program.module, domain.guards, args, kwargs) is None


def unmet_guard(module: torch.nn.Module, guards: Sequence[str], args: Args, kwargs: Kwargs) -> str | None:
    """The first of torch.export's guards that these inputs break, or None."""
    scope = torch_compat.guard_scope(bound_arguments(module, args, kwargs))
    return next((guard for guard in guards if not torch_compat.guard_holds(guard, scope)), None)


def bound_arguments(module: torch.nn.Module, args: Args, kwargs: Kwargs) -> dict[str, Any]:
    """Arguments by parameter name of `forward`, as torch.export sees them."""
    return dict(inspect.signature(module.forward).bind(*args, **kwargs).arguments)


def shapes_for(module: torch.nn.Module, args: Args, kwargs: Kwargs, axes: Axes) -> dict[str, Any]:
    """`dynamic_shapes` for torch.export in the structure of `module.forward`'s arguments."""
    leaves = [leaf for leaf in pytree.tree_leaves((args, dict(kwargs))) if isinstance(leaf, torch.Tensor)]
    wanted = {id(leaf): dict(axis) for leaf, axis in zip(leaves, axes, strict=True)}
    return pytree.tree_map(lambda leaf: wanted.get(id(leaf)), bound_arguments(module, args, kwargs))


def refresh_shapes(module: fx.GraphModule, args: Args, kwargs: Kwargs) -> None:
    """Give every node of `module` a concrete fake tensor in `meta["val"]`, at the sizes of these inputs.

    Call it after editing a graph. Nothing is computed and no weight is copied. From the first operator on
    whose result is known only with data (`item`, `nonzero`), nodes keep torch.export's symbolic values: their
    sizes at the traced example.
    """
    leaves = pytree.tree_leaves((args, dict(kwargs)))
    propagation = _ShapePropagation(module)
    with torch_compat.fake_mode() as mode, torch.no_grad():
        inputs = [mode.from_tensor(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        propagation.fake = mode.from_tensor
        with contextlib.suppress(*torch_compat.data_dependent_errors()):
            propagation.run(*inputs, enable_io_processing=False)


class _ShapePropagation(fx.Interpreter):
    """Runs a graph on fake tensors and records each node's value."""

    fake: Callable[[torch.Tensor], torch.Tensor]

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        held = {
            str(node.target): super(_ShapePropagation, self).fetch_attr(str(node.target))
            for node in module.graph.nodes
            if node.op == "get_attr"
        }
        # here, for a mode of fake tensors takes 5 times as long to detach one
        self._held = {
            name: value.detach() if isinstance(value, torch.Tensor) else value for name, value in held.items()
        }

    def fetch_attr(self, target: str) -> Value:
        value = self._held[target]
        return self.fake(value) if isinstance(value, torch.Tensor) else value

    def call_function(self, target: fx.node.Target, args: Args, kwargs: Arguments) -> Value:
        return super().call_function(LENIENT.get(target, target), args, kwargs)

    def run_node(self, n: fx.Node) -> Outputs:
        result = super().run_node(n)
        if n.op != "output":
            n.meta["val"] = result
        return result


def _copy_module_names(source: fx.Graph, target: fx.Graph) -> None:
    """Carry `nn_module_stack` over to a re-exported graph, whose calls come in the same order.

    Export may drop or add a node here and there; a call is matched to the next one with the same operator.
    """
    calls = [node for node in source.nodes if node.op == "call_function"]
    position = 0
    for node in target.nodes:
        if node.op != "call_function":
            continue
        ahead = (i for i in range(position, min(position + 8, len(calls))) if calls[i].target == node.target)
        match = next(ahead, None)
        if match is not None:
            stack = calls[match].meta.get("nn_module_stack", {})
            node.meta["nn_module_stack"] = {
                key: (path, _type_name(kind)) for key, (path, kind) in stack.items()
            }
            position = match + 1


def _type_name(kind: object) -> str:
    """A module's class as the text that torch.export can save."""
    return f"{kind.__module__}.{kind.__qualname__}" if isinstance(kind, type) else str(kind)
