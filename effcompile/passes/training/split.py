"""Tensor parallelism in the graph: the structures that pruning removes units of are divided among ranks, with
sums at their edges.

Source: Megatron-LM (Shoeybi et al. 2019, arXiv 1909.08053, sec. 3). A structure (hidden neurons, heads with
their keys) is made by some linears, whose rows are divided, and read by others, whose columns are. Each rank
has its own units of it:

- what enters the region between them is the same on every rank, and its gradient is the sum over ranks: of
  the makers' input, and of every replicated weight that is read inside, such as the norm of each head in
  Qwen3, whose gradient on one rank is that of its heads;
- what the readers make is a part of a sum over ranks, and its gradient the same on every rank; their bias is
  added once, after the sum.

The exported forward is changed before autograd is traced through it, so that the gradients are autograd's. A
weight of which a rank has rows in several places (queries, keys and values in one) stays whole on every rank,
as no sharded tensor could say which rows these are: its rows are picked in the graph, and the sum over ranks
of its gradient is whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, fx, nn

from effcompile.capture.training_graph import PARTS, WRAPPED
from effcompile.core.reasons import Unsupported
from effcompile.core.torch_compat_aot import draws
from effcompile.core.types import Args, AutogradContext
from effcompile.ir.program import Program
from effcompile.ir.step import Part
from effcompile.ops import collectives
from effcompile.passes.prunable_groups import Structure, cut, structures
from effcompile.passes.training.split_draws import draw_in_parts
from effcompile.sites.parts import LinearSite, linears

__all__ = ["AXIS", "Split"]

#: The axis of the mesh along which structures are divided.
AXIS = "tp"
aten = torch.ops.aten
_PRUNED = "_pruned"
#: Of weights that can be divided. In 16 bits each rank's part of a sum is rounded, and so is their sum.
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@dataclass(kw_only=True)
class Split:
    """The part of one rank among `ranks` of a model, which stays as it is.

    Attributes:
        parts: qualified name of a parameter → what the rank has of it, once the step is captured with `edit`.
        taken: the structures that were divided → how many units they have. declined: those that were not →
            the reason.
        whole: divided weights that every rank has whole, for its rows in them are in several places.
    """

    model: nn.Module
    ranks: int
    rank: int
    parts: dict[str, Part] = field(default_factory=dict)
    taken: dict[str, int] = field(default_factory=dict)
    declined: dict[str, Unsupported] = field(default_factory=dict)
    uneven: dict[str, int] = field(default_factory=dict)
    whole: list[str] = field(default_factory=list)
    _places: dict[str, tuple[int, Tensor]] = field(default_factory=dict)

    def edit(self, front: fx.GraphModule, inputs: Sequence[Tensor]) -> None:
        """Divide an exported forward, as `capture_training(..., edit=...)` wants it."""
        program = Program(name=type(self.model).__name__, module=front, inputs=(), outputs=())
        _without_idle_casts(front.graph)
        known = structures(program, _DTYPES)
        found = [each for each in known if self._divides(each)]
        self._tell_others(program, known)
        drawn = {node: tuple(node.meta["val"].shape) for node in front.graph.nodes if draws(node)}
        for structure in found:
            self._note(structure)
            cut(program, structure, self._mine(structure))
        draw_in_parts(front.graph, drawn, (self.rank, self.ranks))
        mine = {node for node in front.graph.find_nodes(op="get_attr") if str(node.target).endswith(_PRUNED)}
        sites = {site.site: site for site in linears(program)}
        for structure in found:
            _Edges(front.graph, self.ranks, mine).put(structure, sites)
        self._localise(front, mine)
        front.graph.lint()

    def _divides(self, structure: Structure) -> bool:
        """Whether a structure is divided; else the reason is noted."""
        site = structure.site.rpartition(f"{WRAPPED}.")[2]
        reason = structure.refused
        if reason is None and structure.count % self.ranks:
            reason = Unsupported(
                "its {} {name} do not divide by {}", (structure.count, structure.kind, self.ranks)
            )
            self.uneven[site] = structure.count
        if reason is not None:
            self.declined[site] = reason
            return False
        self.taken[site] = structure.count
        return True

    def _tell_others(self, program: Program, known: Sequence[Structure]) -> None:
        """Linears of repeated modules that make and read no structure are whole on every rank."""
        members = {member.site for structure in known for member in structure.members}
        for site in linears(program):
            name = site.site.rpartition(f"{WRAPPED}.")[2]
            if site.site not in members and any(part.isdigit() for part in name.split(".")):
                self.declined[name] = Unsupported(
                    "it makes and reads no heads or neurons that can be told apart: whole on every rank"
                )

    def _mine(self, structure: Structure) -> Tensor:
        """The units (U) of this rank: a run of them."""
        each = structure.count // self.ranks
        keep = torch.zeros(structure.count, dtype=torch.bool)
        keep[self.rank * each : (self.rank + 1) * each] = True
        return keep

    def _note(self, structure: Structure) -> None:
        keep = self._mine(structure)
        for rows, sites in ((True, structure.makes), (False, structure.reads)):
            for site, units in sites:
                places = keep[units].nonzero().squeeze(1)
                self._places[_name(site.weight)] = int(rows == site.transposed), places
                if rows and site.bias is not None:
                    self._places[_name(site.bias)] = 0, places

    def _localise(self, front: fx.GraphModule, cut_nodes: Iterable[fx.Node]) -> None:
        """Give a parameter that was cut its name back: its part stands for it in the forward's `meta`."""
        known = dict(self.model.named_parameters())
        made: dict[str, Tensor] = front.meta.setdefault(PARTS, {})
        for node in cut_nodes:
            target = str(node.target).removesuffix(_PRUNED)
            name = target.rpartition(f"{WRAPPED}.")[2]
            if name not in known:
                continue  # a constant that is applied by unit
            owner, _, leaf = target.rpartition(".")
            holder = front.get_submodule(owner)
            parameter = known[name]
            axis, places = self._places[name]
            part = Part(axis=axis, shape=tuple(parameter.shape), count=self.ranks, index=self.rank)
            own = nn.Parameter(
                getattr(holder, f"{leaf}{_PRUNED}").detach(), requires_grad=parameter.requires_grad
            )
            delattr(holder, f"{leaf}{_PRUNED}")
            if _is_run(part, places):
                self.parts[name] = part
                made[name] = own
                holder.register_parameter(leaf, own)
                node.target = target
            else:
                holder.register_parameter(leaf, parameter)
                self._pick(front, node, target, axis, places)
                self.whole += [name] * (name not in self.whole)

    def _pick(self, front: fx.GraphModule, node: fx.Node, target: str, axis: int, places: Tensor) -> None:
        """The rank's rows of a weight that it has whole, whose gradient is the sum of all ranks' rows."""
        holder, name = front, f"places_{target.replace('.', '_')}"
        holder.register_buffer(name, places)
        graph = front.graph
        with graph.inserting_before(node):
            whole, rows = graph.get_attr(target), graph.get_attr(name)
            entered = graph.call_function(enter, (whole, AXIS, self.ranks))
            picked = graph.call_function(aten.index_select.default, (entered, axis, rows))
        mine = node.meta["val"]
        shape = dict(self.model.named_parameters())[target.rpartition(f"{WRAPPED}.")[2]].shape
        rows.meta["val"] = places
        picked.meta = dict(node.meta)
        for each in (whole, entered):
            each.meta = {**node.meta, "val": mine.new_empty(shape)}
        node.replace_all_uses_with(picked)
        graph.erase_node(node)


def _is_run(part: Part, places: Tensor) -> bool:
    """Whether these places are the rank's run of equal length, which a sharded tensor can say."""
    size, rest = divmod(part.shape[part.axis], part.count)
    return not rest and torch.equal(places, torch.arange(part.index * size, (part.index + 1) * size))


def _without_idle_casts(graph: fx.Graph) -> None:
    """Remove casts to the dtype that a value has, as models write them around norms, and what export asserts
    of them.
    """
    for node in list(graph.nodes):
        if node.target is aten._assert_tensor_metadata.default:
            graph.erase_node(node)
        elif node.target in (aten.to.dtype, aten.to.dtype_layout, aten.to.device) and isinstance(
            source := node.args[0], fx.Node
        ):
            mine, given = node.meta.get("val"), source.meta.get("val")
            if (
                isinstance(mine, Tensor)
                and isinstance(given, Tensor)
                and (mine.dtype, mine.device) == (given.dtype, given.device)
            ):
                node.replace_all_uses_with(source)
                graph.erase_node(node)


def _name(node: fx.Node) -> str:
    return str(node.target).rpartition(f"{WRAPPED}.")[2]


class _Edges:
    """Puts identities and sums at the edges of the region between those that make a structure's units and
    those that read them.
    """

    def __init__(self, graph: fx.Graph, ranks: int, local: set[fx.Node]) -> None:
        self.graph, self.ranks, self.local = graph, ranks, local

    def put(self, structure: Structure, sites: Mapping[str, LinearSite]) -> None:
        makes = [sites[site.site] for site, _ in structure.makes]
        reads = [sites[site.site] for site, _ in structure.reads]
        for site in reads:
            self._leave(site)
        self._enter(_between([site.node for site in makes], [site.node for site in reads]))

    def _enter(self, inside: set[fx.Node]) -> None:
        """Whatever floating value enters from outside: what was cut for this rank is its own."""
        ordered = [node for node in self.graph.nodes if node in inside]
        entered: dict[fx.Node, fx.Node] = {}
        for node in ordered:
            for operand in node.all_input_nodes:
                if operand in inside or operand in self.local or not _is_floating(operand):
                    continue
                if operand not in entered:
                    with self.graph.inserting_before(node):
                        entered[operand] = self._call(enter, operand, node)
                node.replace_input_with(operand, entered[operand])

    def _leave(self, site: LinearSite) -> None:
        """The sum of what a reader makes, then its bias."""
        node, users = site.node, list(site.node.users)
        bias = site.bias
        if bias is not None:
            node.target, node.args, node.kwargs = _without_bias(node), _operands(node), {}
        with self.graph.inserting_before(node.next):
            made = self._call(leave, node, node)
            if bias is not None:
                total, made = made, self.graph.call_function(aten.add.Tensor, (made, bias))
                made.meta = dict(total.meta)
        for user in users:
            user.replace_input_with(node, made)

    def _call(self, function: Callable[..., Tensor], operand: fx.Node, place: fx.Node) -> fx.Node:
        """`place`: whose module it is of: what enters a layer is no part of the layer before it."""
        node = self.graph.call_function(function, (operand, AXIS, self.ranks))
        node.meta = {key: place.meta[key] for key in ("nn_module_stack", "stack_trace") if key in place.meta}
        node.meta["val"] = operand.meta["val"]
        return node


def _between(makes: Sequence[fx.Node], reads: Sequence[fx.Node]) -> set[fx.Node]:
    """The nodes on the way from those that make units to those that read them, these among them."""
    inside, waiting = set[fx.Node](), list(makes)
    while waiting:
        node = waiting.pop()
        if node not in inside:
            inside.add(node)
            if node not in reads:
                waiting += node.users
    return inside


def _is_floating(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.dtype.is_floating_point


def _without_bias(node: fx.Node) -> Callable[..., Tensor]:
    return aten.linear.default if node.target is aten.linear.default else aten.mm.default


def _operands(node: fx.Node) -> Args:
    return node.args[:2] if node.target is aten.linear.default else node.args[1:3]


# ------------------------------------------------------------------ what autograd makes of the edges


def enter(x: Tensor, axis: str, ranks: int) -> Tensor:
    """x; its gradient is summed over ranks."""
    entered: Tensor = _Enter.apply(x, axis, ranks)
    return entered


def leave(x: Tensor, axis: str, ranks: int) -> Tensor:
    """The sum of x over ranks; its gradient is what arrives."""
    left: Tensor = _Leave.apply(x, axis, ranks)
    return left


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: AutogradContext, x: Tensor, axis: str, ranks: int) -> Tensor:
        ctx.over = axis, ranks
        return x.view_as(x)

    @staticmethod
    def backward(ctx: AutogradContext, gradient: Tensor) -> Args:
        return collectives.SUMMED([gradient], *ctx.over)[0], None, None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: AutogradContext, x: Tensor, axis: str, ranks: int) -> Tensor:
        total: Tensor = collectives.SUMMED([x], axis, ranks)[0]
        return total

    @staticmethod
    def backward(ctx: AutogradContext, gradient: Tensor) -> Args:
        return gradient, None, None
