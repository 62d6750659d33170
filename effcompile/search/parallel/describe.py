"""A model in plain numbers, for planner/parallel: its step is captured with few of its layers, without data,
and cut into blocks.

What a kind of layer computes and keeps, and the options of its block, are read off a layer that stands
between two others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from effcompile.capture.source import Source
from effcompile.capture.training import Loss
from effcompile.core.errors import UsageError
from effcompile.core.types import Args, Kwargs
from effcompile.estimate.roofline import flops, moved_bytes
from effcompile.ir.program import shape_of
from effcompile.ir.step import Step
from effcompile.machine.target import Target
from effcompile.passes.training.checkpoint import Checkpoint
from effcompile.planner.parallel.model import Bytes, Layer, LayerWork, Model, StrategyOption
from effcompile.planner.remat import BlockOption, BlockProblem, option, simulate_block
from effcompile.schedules.blocks import Block, Blocks
from effcompile.search.parallel.layers import LayerRun, runs_of, shortened
from effcompile.search.parallel.sides import of_parameter, sides
from effcompile.search.training.operator_costs import OperatorCosts
from effcompile.search.training.prepare import cut_step
from effcompile.sites.attention.dropped import as_on_gpu

#: Options of a layer at the most.
_POINTS = 24
_ATTENTION = ("scaled_dot_product", "flex_attention", "bmm", "baddbmm")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}


def describe(
    model: nn.Module,
    args: Args,
    kwargs: Kwargs,
    *,
    target: Target,
    loss: Loss | None = None,
    precision: str = "bf16",
) -> Model:
    """What the division of its training step needs to know.

    Raises:
        UsageError: it has no repeated layers. CaptureError, InputsError: its step cannot be captured.
    """
    runs = runs_of(model)
    short = shortened(model, runs, DTYPES[precision])
    args, kwargs = pytree.tree_map_only(Tensor, lambda t: _like(t, precision), (args, dict(kwargs)))
    base = None if target.device == "cpu" else _as_on_gpu
    step = Source(model=short, args=args, kwargs=kwargs, loss=loss, base=base).capture()
    figures = OperatorCosts(target=target, here=False)
    cut = cut_step(step, figures)
    return _Reader(model, runs, cut, figures, 4 if precision == "fp32" else 2).read()


def _as_on_gpu(front: fx.GraphModule, inputs: Sequence[Tensor]) -> None:
    as_on_gpu(front)


def _like(tensor: Tensor, precision: str) -> Tensor:
    return torch.empty(
        tensor.shape, dtype=DTYPES[precision] if tensor.is_floating_point() else tensor.dtype, device="meta"
    )


@dataclass(frozen=True, slots=True)
class _Shape:
    """Of the residual stream as it was captured."""

    batch: int
    sequence: int
    hidden: int


class _Reader:
    """Reads the figures off the cut step of the shortened model."""

    def __init__(
        self, model: nn.Module, runs: Sequence[LayerRun], cut: Blocks, figures: OperatorCosts, width: int
    ) -> None:
        self.model, self.runs, self.cut, self.figures, self.width = model, runs, cut, figures, width
        self.step: Step = cut.step
        self.of_layer = {
            (r, i): self._blocks(f"{run.path}.{i}") for r, run in enumerate(runs) for i in range(run.shown)
        }
        self.shape = self._stream()

    def _blocks(self, path: str) -> list[Block]:
        return [
            block
            for block in self.cut.blocks
            if block.name == path or block.name.startswith((f"{path}.", f"{path}#"))
        ]

    def _found(self, run: int, i: int) -> list[Block]:
        """The blocks of a layer that is read.

        Raises:
            UsageError: it has none of its own.
        """
        if not self.of_layer[run, i]:
            path, names = f"{self.runs[run].path}.{i}", ", ".join(block.name for block in self.cut.blocks)
            raise UsageError(
                f"The layer {path!r} of {type(self.model).__name__} is no block of its own: its step cannot "
                f"be divided by layers. Its blocks: {names}."
            )
        return self.of_layer[run, i]

    def _stream(self) -> _Shape:
        blocks = self._found(0, min(1, self.runs[0].shown - 1))
        shapes: Sequence[tuple[int, ...]] = [
            shape_of(self.cut.maker[s]) for s in blocks[0].entering if s in self.cut.maker
        ]
        if not any(len(shape) == 3 for shape in shapes):
            # kept for several blocks, so no block's own: the layer's last residual sum
            shapes = [
                shape_of(node)
                for block in blocks
                for node in block.forward
                if "aten.add.Tensor" in str(node.target)
            ]
            shapes = [shape for shape in shapes if len(shape) == 3 and shape[-1] > 1][-1:]
        found = max(
            ((a, b, c) for a, b, c in (s for s in shapes if len(s) == 3)), default=None, key=math.prod
        )
        if found is None:
            raise UsageError(
                f"The layers of {type(self.model).__name__} hand on no (batch, tokens, width): {shapes}. "
                "They cannot be divided."
            )
        return _Shape(*found)

    def read(self) -> Model:
        kinds = sorted({kind for run in self.runs for kind in run.kinds})
        layers = tuple(self._layer(kind) for kind in kinds)
        inside = {p for run in self.runs for layer in run.layers for p in layer.parameters()}
        outside = {name: p for name, p in self.model.named_parameters() if p not in inside}
        table, head, vocabulary = self._ends(outside)
        heads, key_heads = self._heads()
        return Model(
            name=type(self.model).__name__,
            layers=layers,
            order=tuple(kind for run in self.runs for kind in run.kinds),
            embedding=table,
            head=head,
            around=max(0, sum(p.numel() for p in outside.values()) - table - (0 if self.tied else head)),
            hidden=self.shape.hidden,
            vocabulary=vocabulary,
            heads=heads,
            key_heads=key_heads,
            sequence=self.shape.sequence,
            width=self.width,
            tied=self.tied,
            causal=self._causal,
            largest=max(p.numel() for layer in self.runs[0].layers[:1] for p in layer.parameters()),
        )

    def _ends(self, outside: Mapping[str, nn.Parameter]) -> tuple[int, int, int]:
        """Parameters of the table and of the head; the classes that the head tells apart."""
        names = {name: self.step.parameters[node] for name, node in self._last_product()}
        head = next(iter(names.values()), "")
        tables = {
            self.step.parameters[p]
            for node in self.step.graph.nodes
            if "embedding" in str(node.target) and "backward" not in str(node.target)
            for p in [of_parameter(node.all_input_nodes[0], self.step.parameters)]
            if p is not None
        }
        self.tied = head in tables
        sizes = {name: p.numel() for name, p in outside.items()}
        table = sum(sizes.get(name, 0) for name in tables)
        made = sizes.get(head, 0)
        return table, made, (made // self.shape.hidden if made else 1) or 1

    def _last_product(self) -> list[tuple[str, fx.Node]]:
        """The parameter of the last product of the forward."""
        found = [
            (node.name, parameter)
            for node in self.cut.blocks[-1].forward
            if flops(node) > 0
            for arg in node.all_input_nodes
            if (parameter := of_parameter(arg, self.step.parameters)) is not None
        ]
        return found[-1:]

    def _heads(self) -> tuple[int, int]:
        config = getattr(self.model, "config", None)
        attentions = [
            n
            for n in self.step.graph.nodes
            if "scaled_dot_product" in str(n.target) and "backward" not in str(n.target)
        ]
        shape = shape_of(attentions[0].all_input_nodes[0]) if attentions else ()
        heads = shape[1] if len(shape) == 4 else int(getattr(config, "num_attention_heads", None) or 1)
        return heads, int(getattr(config, "num_key_value_heads", None) or heads)

    @property
    def _causal(self) -> bool:
        """Whether attention skips the keys behind: told to, or given a mask over all pairs."""
        nodes = [
            n
            for n in self.step.graph.nodes
            if "scaled_dot_product" in str(n.target) and "backward" not in str(n.target)
        ]
        square = (self.shape.sequence, self.shape.sequence)
        masked = any(shape_of(arg)[-2:] == square for n in nodes for arg in n.all_input_nodes[3:])
        return masked or any(arg is True for n in nodes for arg in n.args[3:])

    def _layer(self, kind: int) -> Layer:
        run, i = next(
            (r, i) for wanted in (True, False) for r, run in enumerate(self.runs) for i in range(run.shown)
            if run.kinds[i] == kind and (0 < i < run.shown - 1 or not wanted)
        )  # fmt: skip
        blocks = self._found(run, i)
        parts = [_Part(self, block) for block in blocks]
        rules = {rule: _joined([part.rule(rule) for part in parts]) for rule in ("none", "op", "full")}
        fronts = [part.front() for part in parts]
        options = (
            [_joined(choice) for choice in product(*fronts)] if len(fronts) < 3 else list(rules.values())
        )
        return Layer(
            name=f"{self.runs[run].path}.{i}",
            parameters=sum(p.numel() for p in self.runs[run].layers[i].parameters()),
            forward=self.work([n for block in blocks for n in block.forward]),
            backward=self.work([n for block in blocks for n in block.backward]),
            options=_thinned(options),
            rules=rules,
            sums=sum(part.sums for part in parts),
        )

    def work(self, nodes: Iterable[fx.Node]) -> LayerWork:
        """What these nodes compute, of one sequence."""
        found = LayerWork()
        for node in nodes:
            made = self.cut.held.made[node]
            if not made and node not in self.cut.held.written:
                continue
            count, name = flops(node), str(node.target)
            if any(word in name for word in _ATTENTION):
                found += LayerWork(attention=count * (0.5 if self._causal else 1.0), kernels=self.shape.batch)
            elif count:
                found += LayerWork(products=count, kernels=self.shape.batch)
            else:
                found += LayerWork(moved=moved_bytes(node), kernels=self.shape.batch)
        return found * (1 / self.shape.batch)


class _Part:
    """One block of a layer."""

    def __init__(self, reader: _Reader, block: Block) -> None:
        self.reader, self.block, self.problem = reader, block, block.problem
        self.whole, self.sums = sides(reader.cut, block)
        left = sum(n for name, n in self.problem.nbytes.items() if name in self.whole)
        share = left / max(sum(self.problem.nbytes.values()), 1)
        self.left: BlockProblem = replace(
            self.problem,
            nbytes={name: n if name in self.whole else 0 for name, n in self.problem.nbytes.items()},
            backward=tuple(replace(step, live=int(step.live * share)) for step in self.problem.backward),
            forward=tuple(replace(op, workspace=int(op.workspace * share)) for op in self.problem.forward),
        )

    def front(self) -> list[StrategyOption]:
        return [self.option(o) for o in Checkpoint(points=_POINTS).front(self.block).options]

    def rule(self, rule: str) -> StrategyOption:
        """The option of a usual rule."""
        found = option(self.problem, _RULES[rule](self.block))
        if found is None:
            found = option(self.problem, self.problem.nbytes)
        assert found is not None, "keeping all is always possible"
        return self.option(replace(found, label=rule))

    def option(self, found: BlockOption) -> StrategyOption:
        """Peaks are maxima of sums of bytes, so between a scale of 1 and of 0 of the split ones they are
        below the line (convexity).
        """
        held, forward, backward, _ = simulate_block(self.left, found.kept, found.recomputed)
        batch = self.reader.shape.batch
        pairs = ((found.kept_bytes, held), (found.forward_peak, forward), (found.backward_peak, backward))
        kept, first, second = (
            Bytes(whole=whole // batch, split=max(total - whole, 0) // batch) for total, whole in pairs
        )
        again = self.reader.work(self.block.operators[name] for name in found.recomputed)
        return StrategyOption(kept=kept, forward=first, backward=second, again=again, label=found.label)


def _op_rule(block: Block) -> list[str]:
    """torchtitan's selective operators: every second product and attention are kept, with what enters."""
    products = [op for op in block.problem.forward if flops(block.operators[op.name]) > 0]
    matrices = [
        op for op in products if not any(word in str(block.operators[op.name].target) for word in _ATTENTION)
    ]
    kept = [op for op in products if op not in matrices] + matrices[::2]
    return [*block.problem.entering, *(value for op in kept for value in op.makes)]


_RULES: Mapping[str, Callable[[Block], Iterable[str]]] = {
    "none": lambda block: block.problem.nbytes,
    "op": _op_rule,
    "full": lambda block: block.problem.entering,
}


def _joined(parts: Sequence[StrategyOption]) -> StrategyOption:
    """The options of a layer's blocks, one after another."""
    first, *rest = parts
    for then in rest:
        first = StrategyOption(
            kept=_sum(first.kept, then.kept),
            forward=_most(first.forward, _sum(first.kept, then.forward)),
            backward=_most(first.backward, _sum(first.kept, then.backward)),
            again=first.again + then.again,
            label="; ".join(label for label in (first.label, then.label) if label),
        )
    return first


def _sum(a: Bytes, b: Bytes) -> Bytes:
    return Bytes(whole=a.whole + b.whole, split=a.split + b.split)


def _most(a: Bytes, b: Bytes) -> Bytes:
    return Bytes(whole=max(a.whole, b.whole), split=max(a.total, b.total) - max(a.whole, b.whole))


def _thinned(options: Sequence[StrategyOption]) -> tuple[StrategyOption, ...]:
    """None as good as another in all measures, at most _POINTS of them, least extra work first."""
    front: list[StrategyOption] = []
    for each in sorted(options, key=lambda o: (_again(o), o.kept.total)):
        size = (each.kept.total, max(each.forward.total, each.backward.total))
        if not any(
            o.kept.total <= size[0] and max(o.forward.total, o.backward.total) <= size[1] for o in front
        ):
            front.append(each)
    if len(front) <= _POINTS:
        return tuple(front)
    return tuple(front[round(i * (len(front) - 1) / (_POINTS - 1))] for i in range(_POINTS))


def _again(o: StrategyOption) -> float:
    """One number to put options in order: attention is slower than products, a byte moved takes as long as
    some 300 of them.
    """
    return o.again.products + 2 * o.again.attention + 300 * o.again.moved
