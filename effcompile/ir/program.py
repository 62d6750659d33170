"""The IR: a captured torch.fx graph with what the passes need to know about it.

The graph stays plain torch.fx.
"""

from __future__ import annotations

import copy
import enum
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import sympy
import torch
from torch import fx
from torch.utils import _pytree as pytree

from effcompile.core import torch_compat
from effcompile.core.reasons import Reason
from effcompile.core.types import Args, Kwargs, Value
from effcompile.ir.formats import FP32, Form, WeightFormat
from effcompile.ir.guards import CallGuards, StateGuards
from effcompile.ir.roles import Entering, Enters, Leaves, Leaving, Roles

Dim = int | str  # a fixed size, or the name of a dynamic axis


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """Name, dtype and shape of one graph input or output; dynamic axes are names.

    Attributes:
        values: what an input must be, row by row; None: anything of its shape.
        counts: numbers, and how often each must be among its values.
    """

    name: str
    dtype: str
    shape: tuple[Dim, ...]
    values: tuple[int, ...] | None = None
    counts: tuple[tuple[int, int], ...] = ()


class Output(enum.Enum):
    """What stands at a place of a model's flat outputs."""

    TENSOR = enum.auto()


@dataclass(frozen=True, slots=True)
class Size:
    """An output that follows from the inputs' sizes: a formula in the names of their axes."""

    formula: str


@dataclass(frozen=True, kw_only=True)
class Traced:
    """What every captured graph has, be it of a call of a model or of a training step.

    Attributes:
        name: the model's class.
        module: the graph.
        args, kwargs: the example inputs it was captured with.
        mends: known fixes applied at capture.
        state: what must be so of the model at each call.
    """

    name: str
    module: fx.GraphModule
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    mends: tuple[Reason, ...] = ()
    state: StateGuards | None = field(default=None, compare=False, repr=False)

    @property
    def graph(self) -> fx.Graph:
        return self.module.graph

    def calls(self, *targets: Callable[..., object]) -> Iterator[fx.Node]:
        """call_function nodes with one of these targets (all of them when none is given), in graph order."""
        for node in self.graph.nodes:
            if node.op == "call_function" and (not targets or node.target in targets):
                yield node


@dataclass(frozen=True, kw_only=True)
class Program(Traced):
    """A captured model: a flat aten graph, called like the model (pytrees in, pytrees out).

    Its parameters are get_attr nodes with their original qualified names; no operator is decomposed.

    Attributes:
        calibration: further inputs, (args, kwargs) each, that the user gave to measure errors and find
            constants with.
        recovered: what was found out of values of the graph and is shared by its copies, whose nodes keep
            their names.
        inputs, outputs: the flat tensors at the boundary, in order.
        returned: what the model's flat outputs are: `Output.TENSOR` for the next one of `outputs`, a `Size`,
            or the plain value itself (None, a number, a text). Empty where all are tensors.
        dynamic_shapes: what torch.export needs to capture `module` again.
        fixed: axes that were asked to be dynamic and that the model's code made constant.
        left: attention → why it stands as the model writes it.
        tags: site → form, set by passes for the backend to act on.
        history: names of the passes applied so far.
        made: parameters of `module` that a pass made anew, whose memory nothing else has.
        call: what must be so of the arguments at each call.
        carried: input → output, for state that enters and is updated (keys and values): the output is its
            next value.
    """

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    returned: tuple[Any, ...] = ()
    dynamic_shapes: Any = None
    fixed: tuple[Reason, ...] = ()
    left: Mapping[str, Reason] = field(default_factory=dict)
    tags: Mapping[str, Form] = field(default_factory=dict)
    history: tuple[str, ...] = ()
    made: tuple[str, ...] = ()
    calibration: tuple[tuple[tuple[Any, ...], Mapping[str, Any]], ...] = ()
    recovered: dict[tuple[Hashable, ...], object] = field(default_factory=dict, repr=False, compare=False)
    call: CallGuards | None = field(default=None, compare=False, repr=False)
    carried: Mapping[str, str] = field(default_factory=dict)

    @property
    def roles(self) -> Roles:
        """What each placeholder and each of the tensors returned is."""
        named = zip(self.graph.find_nodes(op="placeholder"), self.inputs, strict=True)
        entering = {
            n: Enters(Entering.STATE if spec.name in self.carried else Entering.INPUT, spec.name)
            for n, spec in named
        }
        state = {after: Leaves(Leaving.UPDATED, before) for before, after in self.carried.items()}
        return Roles(
            entering, tuple(state.get(spec.name, Leaves(Leaving.OUTPUT, spec.name)) for spec in self.outputs)
        )

    def at_boundary(self, dtype: str) -> str | None:
        """The first input or output that has this dtype."""
        return next((spec.name for spec in (*self.inputs, *self.outputs) if spec.dtype == dtype), None)

    def tensor_results(self) -> list[fx.Node]:
        """The nodes of `outputs`; what else the model returns is left out."""
        leaves = pytree.tree_leaves(self.graph.output_node().args[0])
        kinds = self.returned or [Output.TENSOR] * len(leaves)
        return [
            leaf
            for leaf, kind in zip(leaves, kinds, strict=True)
            if kind is Output.TENSOR and isinstance(leaf, fx.Node)
        ]

    def with_plain_results(self, tensors: Sequence[torch.Tensor], sizes: Mapping[str, int]) -> list[Value]:
        """The flat outputs of the model: the tensors, and what it returns beside them at these sizes of the
        inputs' axes.
        """
        made = iter(tensors)
        kinds = self.returned or [Output.TENSOR] * len(tensors)
        return [
            next(made)
            if kind is Output.TENSOR
            else evaluated(kind.formula, sizes)
            if isinstance(kind, Size)
            else kind
            for kind in kinds
        ]

    def tensor(self, node: fx.Node | None) -> torch.Tensor | None:
        """The parameter or buffer behind a get_attr node; None for anything else."""
        if node is None or node.op != "get_attr":
            return None
        value: Any = self.module
        for part in str(node.target).split("."):
            value = getattr(value, part, None)
        return value if isinstance(value, torch.Tensor) else None

    def editable(self, pass_name: str) -> Program:
        """A copy whose graph may be edited; parameters are shared with the original."""
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        for node in self.graph.nodes:
            copies[node] = graph.node_copy(node, copies.__getitem__)
        graph.set_codegen(copy.copy(self.graph._codegen))
        module = fx.GraphModule(self.module, graph, class_name=type(self.module).__name__)
        module.meta = copy.copy(self.module.meta)
        return replace(self, module=module, history=(*self.history, pass_name))

    def tagged(self, tags: Mapping[str, Form], pass_name: str) -> Program:
        """The same graph with more tags."""
        return replace(self, tags={**self.tags, **tags}, history=(*self.history, pass_name))

    def format_at(self, site: str) -> WeightFormat:
        """The format that a linear or table is tagged with; fp32 where nothing is said."""
        form = self.tags.get(site)
        return form.weights if form is not None and form.weights is not None else FP32

    def word_at(self, site: str) -> str:
        """What a site is tagged to become; "" where nothing is said."""
        form = self.tags.get(site)
        return form.word if form is not None else ""

    def flat_inputs(self, args: Args | None = None, kwargs: Kwargs | None = None) -> list[torch.Tensor]:
        """The tensor leaves of the given (default: example) inputs, in the order of `inputs`.

        Keyword inputs are put into the order of capture, so callers may pass them in any order.
        """
        given_args = self.args if args is None else args
        given_kwargs = dict(self.kwargs if kwargs is None else kwargs)
        ordered = {k: given_kwargs[k] for k in self.kwargs if k in given_kwargs}
        return [leaf for leaf in pytree.tree_leaves((given_args, ordered)) if isinstance(leaf, torch.Tensor)]

    def leaves_with(self, tensors: Sequence[torch.Tensor]) -> list[Value]:
        """The leaves of the example's arguments with its tensors replaced by these, as the graph's
        placeholders take them.
        """
        given = iter(tensors)
        return [
            next(given) if isinstance(leaf, torch.Tensor) else leaf
            for leaf in pytree.tree_leaves((self.args, dict(self.kwargs)))
        ]

    @property
    def on_gpu(self) -> bool:
        """Whether a weight or an input of it lies on a GPU."""
        return any(
            t.is_cuda for t in (*self.module.parameters(), *self.module.buffers(), *self.flat_inputs())
        )

    def weight_bytes(self) -> int:
        """Bytes of parameters and buffers, each storage once."""
        return stored_bytes(self.module)

    def parameter_count(self) -> int:
        """Number of distinct parameter elements."""
        return sum({id(p): p.numel() for p in self.module.parameters()}.values())


def stored_bytes(*modules: torch.nn.Module) -> int:
    """Bytes of the parameters and buffers of all of them, each storage once; a weight in oneDNN's own layout
    shows no storage and counts with its elements.
    """
    tensors = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
    packed = {id(tensor): tensor.nbytes for tensor in tensors if torch_compat.is_packed(tensor)}
    storages = [tensor.untyped_storage() for tensor in tensors if id(tensor) not in packed]
    return sum(packed.values()) + sum({each._cdata: each.nbytes() for each in storages}.values())


def evaluated(formula: str, sizes: Mapping[str, int]) -> int | float:
    """A formula in the names of axes at their sizes."""
    known = {name: sympy.Integer(size) for name, size in sizes.items()}
    value = sympy.sympify(formula, locals={**torch_compat.size_functions(), **known})
    return int(value) if value.is_integer else float(value)


def module_path(node: fx.Node) -> str:
    """Qualified name of the innermost nn.Module that made a node; "" where none is known."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    paths = [entry[0] for entry in stack.values()]
    return paths[-1] if paths else ""


def shape_of(node: fx.Node) -> tuple[int, ...]:
    """Concrete shape of a node's (first) tensor at the example inputs; () where unknown."""
    value = node.meta.get("val")
    if isinstance(value, (tuple, list)):
        value = value[0] if value else None
    return shape_at_example(value) if isinstance(value, torch.Tensor) else ()


def shape_at_example(value: torch.Tensor) -> tuple[int, ...]:
    """Concrete shape of a captured tensor; an axis that depends on data counts as 1."""
    return tuple(_hint(s) for s in value.shape)


def dtype_of(node: fx.Node) -> torch.dtype | None:
    """dtype of a node's (first) tensor; None where unknown."""
    value = node.meta.get("val")
    if isinstance(value, (tuple, list)):
        value = value[0] if value else None
    return value.dtype if isinstance(value, torch.Tensor) else None


def _hint(size: int | torch.SymInt) -> int:
    """The example's size behind a possibly symbolic one."""
    if isinstance(size, int):
        return size
    hint = size.node.hint
    return int(hint) if hint is not None else 1


def ancestors(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """What some nodes are made from, themselves included."""
    found = set(nodes)
    todo = list(found)
    while todo:
        for arg in todo.pop().all_input_nodes:
            if arg not in found:
                found.add(arg)
                todo.append(arg)
    return found
