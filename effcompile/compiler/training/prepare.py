"""From a captured step to what the planner chooses from: its variants, cut into blocks, with the options of every block."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from torch import fx

from effcompile.compiler.progress import QUIET, Progress
from effcompile.compiler.training.attend import AS_WRITTEN, Forms
from effcompile.compiler.training.rates import rates_of
from effcompile.estimate import operators
from effcompile.estimate.operators import Measured
from effcompile.estimate.roofline import roofline_seconds
from effcompile.estimate.storages import Storages, graph_storages
from effcompile.ir.footprint import Footprint
from effcompile.ir.plan import Declined
from effcompile.ir.step import Step
from effcompile.machine.target import Target
from effcompile.ops import products
from effcompile.ops.products import Product, of_node
from effcompile.ops.workspace import workspace_bytes
from effcompile.passes.training.base import StepForm
from effcompile.passes.training.checkpoint import Checkpoint
from effcompile.passes.training.consume import with_consumed_gradients
from effcompile.passes.training.fused_attention import Attended
from effcompile.passes.training.heads import LossHeads, Variant
from effcompile.passes.training.levers import Levers
from effcompile.passes.training.pointwise import Pointwise
from effcompile.passes.training.precision import SCALED
from effcompile.planner.remat import BlockFront, BlockOption, Stage
from effcompile.schedule.blocks import Blocks, cut_into_blocks, reads_of
from effcompile.schedule.emit import emit
from effcompile.schedule.simulate import Trace, simulate

#: Recomputation alone: what there is without asking.
ALONE = Levers()


#: Fused attention is taken without a look at the other form when it makes the step's predicted time smaller by this factor,
#: and its largest operator does not need more bytes.
_CLEARLY_FASTER = 0.97
_NOT_CONSUMED: Mapping[str, Mapping[str, int]] = MappingProxyType({})


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """One variant of the step, ready to be planned.

    Attributes:
        variant: which loss head and gradient accumulation it has.
        cut: the step in blocks.
        options: kind of block → its options.
        seconds: predicted time of the step without recomputation.
        plain: the step in blocks before offload and compress were proposed in them.
        fronts: kind of block → its front, where values may be held in other forms.
        least: peak of its leanest schedule, once that is known (solve.leanest).
    """

    variant: Variant
    cut: Blocks
    options: Mapping[str, tuple[BlockOption, ...]]
    seconds: float
    plain: Blocks
    fronts: Mapping[str, BlockFront] = field(default_factory=dict)
    least: MutableMapping[Checkpoint, int] = field(default_factory=dict, compare=False)

    @property
    def step(self) -> Step:
        return self.cut.step

    @property
    def stages(self) -> tuple[Stage, ...]:
        return tuple(block.stage for block in self.cut.blocks)


@dataclass(kw_only=True)
class Figures:
    """Seconds and workspace of operators: measured on this machine, else by the target's roofline.

    Attributes:
        target: the machine planned for.
        here: whether it is this one, and operators may be run.
        known: operator → what was measured.
        modelled: operators that had to be modelled.
    """

    target: Target
    here: bool
    known: MutableMapping[str, Measured] = field(default_factory=dict)
    modelled: set[str] = field(default_factory=set)

    def measure(self, nodes: Iterable[fx.Node], progress: Progress) -> None:
        """Run what is not known yet."""
        if self.here:
            operators.measure(nodes, self.known, progress=lambda done, of: progress.update("measure operators", done, of))

    def seconds(self, node: fx.Node) -> float:
        """Time of one operator."""
        found = self.known.get(operators.key(node))
        if found is not None:
            return found.seconds
        self.modelled.add(str(node.target))
        return roofline_seconds(node, self.target)

    def priced(self, nodes: Sequence[fx.Node], progress: Progress) -> list[float]:
        """Times of operators that may never run in a plan: measured, or modelled where they cannot be."""
        self.measure(nodes, progress)
        found = [self.known.get(operators.key(node)) for node in nodes]
        return [roofline_seconds(n, self.target) if one is None else one.seconds for n, one in zip(nodes, found, strict=True)]

    def workspace(self, node: fx.Node, traced: int) -> int:
        """Bytes that an operator needs for itself: the most of what was traced, measured and is known of our own operators.

        What matrix products take for themselves is measured on this machine, with their operator or alone; for another one it is a margin.
        """
        found = self.known.get(operators.key(node))
        args = [_value(arg) for arg in node.args]
        if not self.here:
            ours = workspace_bytes(node.target, args, node.kwargs, self.scratch)
            return max(traced, ours or 0, sum(map(self.scratch, of_node(node))))
        ours = workspace_bytes(node.target, args, node.kwargs, products.measured if found is None else products.unknown)
        return max(traced, found.workspace if found is not None else 0, ours or 0)

    def made_bytes(self, node: fx.Node, traced: Sequence[int]) -> Sequence[int]:
        """Bytes of the storages that an operator makes: as traced on fakes, or larger where kernels were seen to take more."""
        found = self.known.get(operators.key(node))
        if found is None or len(found.results) != len(traced):
            return traced
        return [max(pair) for pair in zip(traced, found.results, strict=True)]

    def scratch(self, product: Product) -> int:
        """The margin for a product on the target, which is not here."""
        return products.bounded(product) if self.target.device == "cpu" else 0


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """All variants of a step, and the step as it was captured: what stock torch would run.

    Attributes:
        variants: ready to be planned, the one with the loss head as captured first.
        attended: what can be said of its attentions. refused: dtypes that were not planned, with reasons.
        declined: what further passes decline.
        captured: the step. seconds, footprint: predicted of it, with all kept that its backward reads.
    """

    variants: list[Prepared]
    captured: Step
    seconds: float
    footprint: Footprint
    attended: Attended = field(default_factory=Attended)
    refused: tuple[Declined, ...] = ()
    declined: tuple[Declined, ...] = ()


def prepare(
    step: Step, checkpoint: Checkpoint, heads: LossHeads | None, pointwise: Pointwise | None, figures: Figures,
    progress: Progress = QUIET, *, forms: Forms = AS_WRITTEN, unfused: Collection[frozenset[str]] | None = None, levers: Levers = ALONE,
    consumed: Mapping[str, Mapping[str, int]] = _NOT_CONSUMED, changed: Callable[[Step], Step] | None = None,
    more: Callable[[Step], Iterable[StepForm | Declined]] = lambda step: ((step, ()),),
) -> Preparation:  # fmt: skip
    """Every variant of a step, with the options of its blocks. Equal blocks are solved once, across variants.

    Args:
        step: as captured.
        checkpoint: makes the options of a block.
        heads: makes the variants; None: as captured.
        pointwise: fuses chains; None leaves them as they are.
        figures: times of operators.
        progress: is told what is being done.
        forms: the same step in 16 bits, and with its attentions fused. That keeps no scores; where it is clearly faster too, the
            step as captured is no variant, else both are.
        unfused: chains to leave apart, decided earlier; None decides by measuring.
        levers: what may be done with values beside keeping and recomputing them.
        consumed: ways in which gradients may be consumed in the backward, each with what the update of a parameter allocates.
        changed: a last change of every variant.
        more: the forms of a step that further passes have, and what they decline.
    """
    plain_forms = _forms(step, forms, figures, progress)
    with progress.step("find loss head"):
        groups = [(form, heads.variants(form.step) if heads is not None else (form,)) for form in plain_forms]
    variants = tuple(
        replace(variant, fused_attention=form.fused_attention, precision=form.precision) for form, group in groups for variant in group
    )
    variants, declined = _with_forms(variants, more)
    if pointwise is not None:
        with progress.step("fuse element-wise operators"):
            variants = tuple(_fused(variant, pointwise, figures, progress, unfused) for variant in variants)
    if changed is not None:
        variants = tuple(replace(variant, step=changed(variant.step)) for variant in variants)
    consumable = [v for v in variants if v.precision not in SCALED]  # an overflow must be seen before the update
    variants = (*variants, *(_consuming(v, key, pieces) for key, pieces in consumed.items() for v in consumable))
    with progress.step("trace storages"):
        traced = [(variant, _storages(variant.step)) for variant in variants]
        plain = traced[0][1] if variants[0].step is step else _storages(step)
    with progress.step("measure operators"):
        figures.measure([*_costly(step, plain), *(n for variant, held in traced for n in _costly(variant.step, held))], progress)
    solved: dict[str, BlockFront] = {}
    prepared = []
    for variant, held in traced:
        cut = _cut(variant.step, held, figures)
        with progress.step("find the options of every block"):
            whole = Prepared(variant=variant, cut=cut, options={}, seconds=_seconds(variant.step, held, figures), plain=cut)
            prepared.append(with_levers(whole, levers, checkpoint, figures, solved))
    unplanned = simulate_unplanned(_cut(step, plain, figures))
    return Preparation(
        variants=prepared, captured=step, seconds=_seconds(step, plain, figures), footprint=unplanned.footprint, declined=declined,
    )  # fmt: skip


def _with_forms(
    variants: Iterable[Variant], more: Callable[[Step], Iterable[StepForm | Declined]]
) -> tuple[tuple[Variant, ...], tuple[Declined, ...]]:
    """Every variant in every form that further passes have, and what they decline."""
    found: list[Variant] = []
    declined: dict[Declined, None] = {}
    for variant in variants:
        for item in more(variant.step):
            if isinstance(item, Declined):
                declined[item] = None
            else:
                found.append(replace(variant, step=item[0], taken=item[1]))
    return tuple(found), tuple(declined)


def _forms(step: Step, forms: Forms, figures: Figures, progress: Progress) -> list[Variant]:
    """The step as it was given, and in 16 bits, with attentions as written or fused."""
    narrow = forms.narrow
    given = [] if narrow is not None and narrow.only else [(form, forms, "") for form in _steps(step, forms, figures, progress)]
    if narrow is not None:
        inner = narrow.forms
        given += [(form, inner, narrow.dtype) for form in _steps(narrow.captured.step, inner, figures, progress)]
    return [Variant(step=form, fused_attention=form is of.fused, precision=dtype) for form, of, dtype in given]


def _steps(step: Step, forms: Forms, figures: Figures, progress: Progress) -> list[Step]:
    """The forms of a step that the planner chooses from."""
    fused = forms.fused
    if fused is None or forms.only:
        return [step if fused is None else fused]
    with progress.step("measure attention"):
        held = [(form, _storages(form)) for form in (step, fused)]
        figures.measure((n for form, storages in held for n in _costly(form, storages)), progress)
        as_written, as_fused = (_seconds(form, storages, figures) for form, storages in held)
    larger, smaller = (_largest(form, storages, figures) for form, storages in reversed(held))
    return [fused] if as_fused < _CLEARLY_FASTER * as_written and larger <= smaller else [fused, step]


def _largest(step: Step, held: Storages, figures: Figures) -> int:
    """Most bytes that one operator reads, makes and needs for itself: no schedule of the step can do with fewer."""
    return max((_footprint(node, held, figures) for node in _costly(step, held)), default=0)


def _footprint(node: fx.Node, held: Storages, figures: Figures) -> int:
    return sum(held.nbytes[s] for s in (*reads_of(node, held), *held.made[node])) + figures.workspace(node, held.workspace[node])


def with_levers(
    prepared: Prepared, levers: Levers, checkpoint: Checkpoint, figures: Figures, solved: MutableMapping[str, BlockFront] | None = None
) -> Prepared:
    """The same variant with the options that these levers leave its blocks. `solved`: fronts by kind, found and added."""
    fronts = {} if solved is None else solved
    cut = levers.proposed(prepared.plain, rates_of(levers, figures.target, here=figures.here), figures.seconds)
    for block in cut.blocks:
        if block.stage.kind not in fronts:
            fronts[block.stage.kind] = checkpoint.front(block)
    kinds = {block.stage.kind: block for block in cut.blocks}
    moved = {kind: fronts[kind] for kind, block in kinds.items() if block.problem.forms}
    return replace(prepared, cut=cut, options={kind: fronts[kind].options for kind in kinds}, fronts=moved, least={})


def simulate_unplanned(cut: Blocks) -> Trace:
    """The step with all kept that its backward reads."""
    return simulate(cut, emit(cut, cut.decidable))


def _fused(
    variant: Variant, pointwise: Pointwise, figures: Figures, progress: Progress, unfused: Collection[frozenset[str]] | None
) -> Variant:
    price = (lambda nodes: figures.priced(nodes, progress)) if figures.here and unfused is None else None
    changed, apart = pointwise.apply(variant.step, price, unfused or ())
    return replace(variant, step=changed, unfused=apart)


def _consuming(variant: Variant, key: str, pieces: Mapping[str, int]) -> Variant:
    return replace(variant, step=with_consumed_gradients(variant.step, pieces.keys(), pieces), consumed=key)


def _storages(step: Step) -> Storages:
    return graph_storages(step.graph, lambda node: node.meta["val"])


def _cut(step: Step, held: Storages, figures: Figures) -> Blocks:
    nbytes = dict(held.nbytes)
    for node, made in held.made.items():
        if made and node.op == "call_function":
            nbytes.update(zip(made, figures.made_bytes(node, [held.nbytes[s] for s in made]), strict=True))
    workspace = {node: figures.workspace(node, size) for node, size in held.workspace.items()}
    exact = replace(held, nbytes=nbytes, workspace=workspace)
    return cut_into_blocks(step, exact, figures.seconds)


def _seconds(step: Step, held: Storages, figures: Figures) -> float:
    return sum(figures.seconds(node) for node in _costly(step, held))


def _costly(step: Step, held: Storages) -> Iterator[fx.Node]:
    """Operators that do something: views and getitems are free."""
    yield from (n for n in step.graph.nodes if n.op == "call_function" and (held.made[n] or n in held.written))


def _value(arg: Any) -> Any:
    """An argument with its nodes replaced by their (fake) values."""
    return fx.map_arg(arg, lambda n: n.meta.get("val"))
