"""Gains folded into the linears beside them: LayerScale behind a linear, an RMSNorm's gain before linears,
BatchNorm behind a linear.

With y = g · (W x + b) the weight is diag(g) W and the bias g · b (LayerScale: Touvron et al. 2021, arXiv
2103.17239); with y = W (g · x) + b the weight is W diag(g), where linears alone read g · x; BatchNorm in
evaluation is a gain and a shift (Jacob et al. 2018, arXiv 1712.05877, section 3.2). Exact up to rounding: one
element-wise operator less, no byte more.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, fx

from effcompile.core.cost import Cost
from effcompile.ir.formats import Form
from effcompile.ir.plan import Plan
from effcompile.ir.program import Program, shape_of
from effcompile.passes.base import Choice, Context, Declined, Option, Pass
from effcompile.passes.pricing import price
from effcompile.sites.parts import LinearSite, linears

aten = torch.ops.aten
#: As torch.export writes it in evaluation: (x, weight, bias, mean, variance, momentum, epsilon).
_BATCH_NORM = aten._native_batch_norm_legit_no_training.default
KIND, SEPARATE, FOLDED = "gain", "separate", "folded"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """A gain and its linears.

    Attributes:
        node: that computes g · x, or the BatchNorm. before: the linears that read it, or (`behind`) the one
            that it reads.
        gain, shift: (channels,); shift is None where there is none.
    """

    site: str
    node: fx.Node
    members: tuple[LinearSite, ...]
    behind: bool
    gain: Tensor
    shift: Tensor | None = None

    @property
    def source(self) -> fx.Node:
        """What takes the place of the node."""
        found = next(arg for arg in self.node.all_input_nodes if arg.op != "get_attr")
        return self.members[0].node if self.behind else found


@dataclass(frozen=True, slots=True, kw_only=True)
class Fold(Pass):
    """Takes part where it is named (`--pass fold`): weights that are quantised beside it are others than
    those of the file.
    """

    name: ClassVar[str] = "fold"
    exact: ClassVar[bool] = True

    def propose(self, program: Program, context: Context) -> Iterable[Choice | Declined]:
        for found in gains(program):
            count = _size(found.node)
            cost = price(context, "pointwise/fp32", count) or Cost()
            options = (
                Option(form=Form(word=SEPARATE), cost=cost, by=self.name),
                Option(form=Form(word=FOLDED), cost=Cost(), by=self.name),
            )
            yield Choice(
                site=found.site, kind=KIND, baseline=SEPARATE, options=options, covers=frozenset({found.node})
            )

    def apply(self, program: Program, plan: Plan) -> Program:
        """The gains that the plan folds are in the weights, and their operators are gone."""
        chosen = plan.forms()
        edited = program.editable(self.name)
        tags = dict(program.tags)
        for found in gains(edited):
            if found.site in chosen:
                tags[found.site] = chosen[found.site]
                if chosen[found.site].word == FOLDED:
                    _fold(edited, found)
        edited.graph.eliminate_dead_code()
        edited.module.recompile()
        return replace(edited, tags=tags)


def gains(program: Program) -> list[Gain]:
    """The gains that can be folded, in graph order; a linear takes part in one."""
    known = linears(program)
    taken: set[fx.Node] = set()
    found = []
    for gain in (*_before(program, known), *_behind(program, known)):
        nodes = {member.node for member in gain.members}
        if not nodes & taken:
            taken |= nodes
            found.append(gain)
    return found


def _before(program: Program, known: list[LinearSite]) -> Iterator[Gain]:
    """g · x that linears alone read."""
    for node in program.calls(aten.mul.Tensor):
        gain = _vector(program, node)
        members = tuple(site for site in known if site.x is node)
        if (
            gain is None
            or not members
            or len(members) != len(node.users)
            or any(not _own(site) or site.k != len(gain) for site in members)
        ):
            continue
        yield Gain(site=f"{members[0].site}:gain", node=node, members=members, behind=False, gain=gain)


def _behind(program: Program, known: list[LinearSite]) -> Iterator[Gain]:
    """g · (W x + b), and a BatchNorm of it."""
    for site in known:
        if len(site.node.users) != 1 or not _own(site):
            continue
        [node] = site.node.users
        if (
            node.target is aten.mul.Tensor
            and (gain := _vector(program, node)) is not None
            and len(gain) == site.n
        ):
            yield Gain(site=f"{site.site}:gain", node=node, members=(site,), behind=True, gain=gain)
        elif node.target is _BATCH_NORM and (pair := _normalised(program, node)) is not None:
            [result] = node.users  # the others are of training
            if len(shape_of(result)) == 2:
                yield Gain(
                    site=f"{site.site}:gain",
                    node=result,
                    members=(site,),
                    behind=True,
                    gain=pair[0],
                    shift=pair[1],
                )


def _own(site: LinearSite) -> bool:
    """Whether its weight is read here alone."""
    return (
        not site.shared and len(site.weight.users) == 1 and (site.bias is None or len(site.bias.users) == 1)
    )


def _vector(program: Program, node: fx.Node) -> Tensor | None:
    """The stored vector of a product along the last axis."""
    stored = [
        value
        for arg in node.args[:2]
        if isinstance(arg, fx.Node) and (value := program.tensor(arg)) is not None
    ]
    if len(stored) != 1 or stored[0].dim() != 1 or shape_of(node)[-1] != stored[0].shape[0]:
        return None
    return stored[0]


def _normalised(program: Program, node: fx.Node) -> tuple[Tensor, Tensor] | None:
    """Gain and shift of a BatchNorm in evaluation."""
    args: Any = node.args
    weight, bias, mean, variance = (
        program.tensor(arg) if isinstance(arg, fx.Node) else None for arg in args[1:5]
    )
    if mean is None or variance is None or len(node.users) != 1:
        return None
    gain = (variance + args[6]).rsqrt() * (1.0 if weight is None else weight)
    return gain, (0.0 if bias is None else bias) - mean * gain


@torch.no_grad()
def _fold(program: Program, found: Gain) -> None:
    for site in found.members:
        weight, bias = program.tensor(site.weight), program.tensor(site.bias)
        assert weight is not None
        rows = found.behind != site.transposed  # whether the gain is along the first axis of the weight
        _put(program, site.weight, weight * (found.gain[:, None] if rows else found.gain[None, :]))
        if found.behind and bias is not None:
            _put(program, site.bias, bias * found.gain + (0.0 if found.shift is None else found.shift))
    source = found.source
    if found.shift is not None and found.members[0].bias is None:
        source = _shifted(program, found, found.shift)
    found.node.replace_all_uses_with(source)
    program.graph.erase_node(found.node)


def _put(program: Program, node: fx.Node | None, value: Tensor) -> None:
    """Another value under a name of its own: the original program shares its parameters with this one."""
    assert node is not None
    name = f"{str(node.target).replace('.', '_')}_folded"
    program.module.register_buffer(name, value.detach().contiguous())
    node.target = name


def _shifted(program: Program, found: Gain, shift: Tensor) -> fx.Node:
    """The linear, which has no bias, with the shift added."""
    graph, linear, name = (
        program.graph,
        found.members[0].node,
        f"{found.members[0].site.replace('.', '_')}_shift",
    )
    program.module.register_buffer(name, shift.detach().contiguous())
    with graph.inserting_before(found.node):
        bias = graph.get_attr(name)
        made = graph.call_function(aten.add.Tensor, (linear, bias))
    made.meta = dict(linear.meta)
    bias.meta["val"] = linear.meta["val"].new_empty(shift.shape)
    return made


def _size(node: fx.Node) -> int:
    count = 1
    for size in shape_of(node):
        count *= int(size)
    return count
