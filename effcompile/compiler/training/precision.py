"""A step captured once more under torch.autocast, as an alternative to the one in fp32; and what the plan says of the two."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from effcompile.backends.torch.training import StepRunner
from effcompile.capture import capture_training
from effcompile.capture.float8 import float8_linears
from effcompile.compiler.training.attend import Captured, Narrow
from effcompile.compiler.training.cases import Joint
from effcompile.compiler.training.moved import TooCoarseError
from effcompile.compiler.training.prepare import Figures, Preparation, Prepared
from effcompile.compiler.training.verify import Result
from effcompile.core.cost import Cost
from effcompile.core.errors import EffcompileError
from effcompile.core.units import format_bytes, format_seconds
from effcompile.ir.plan import Decision, Declined
from effcompile.ir.step import Step
from effcompile.passes.training.precision import BASELINE, DTYPES, FP8, KIND, SCALED, SITE, Precision, label
from effcompile.sites.attention.normalise import OUR_ATTENTIONS

aten = torch.ops.aten

#: `capture_training`, or the same under autocast.
Capture = Callable[..., Step]
#: Captures the step with a `Capture`, in the forms that its attentions may have.
Capturer = Callable[[Capture], Captured]
#: Operators that write a tensor into another of the same dtype → which argument is the source.
_WRITES = {
    aten.index_put.default: 2, aten._unsafe_index_put.default: 2, aten.index_copy.default: 3, aten.index_add.default: 3,
    aten.scatter.src: 3, aten.scatter_add.default: 3, aten.scatter_reduce.two: 3, aten.masked_scatter.default: 2,
}  # fmt: skip
#: Loss scales that are too small to be of use: an fp16 step that overflows still is given up.
_LEAST_SCALE = 2.0**-14


def with_narrow(wide: Captured, precision: Precision, figures: Figures, capture: Capturer) -> Captured:
    """The captured step with the same in the first dtype that is possible and not among its refused ones; those not taken are refused.

    Args:
        wide: the step as it was given, without a narrow one.
        precision: which dtypes, in order of preference.
        figures: of the machine that is planned for.
        capture: captures it again.
    """
    refused = list(wide.refused)
    tried = {refusal.option for refusal in refused}
    for dtype in (d for d in precision.dtypes if label(d) not in tried):
        reason = precision.refusal(dtype, wide.step, figures.target, here=figures.here)
        if reason is None:
            try:
                narrow = Narrow(dtype=dtype, captured=capture(under(dtype, wide.step)), only=precision.always)
                reason = _mixed_write(narrow.captured.step)
                if reason is None:
                    return replace(wide, narrow=narrow, refused=tuple(refused))
            except EffcompileError as error:
                reason = f"the step cannot be captured under it: {str(error).splitlines()[0]}"
        refused.append(declined_dtype(dtype, reason))
    return replace(wide, narrow=None, refused=tuple(refused))


def _mixed_write(step: Step) -> str | None:
    """Why no kernel runs a step: it writes one dtype into another, which tracing lets pass."""
    for node in step.graph.nodes:
        if node.target in _WRITES:
            into, source = node.args[0], node.args[_WRITES[node.target]]
            dtypes = [str(value.meta["val"].dtype).removeprefix("torch.") for value in (into, source) if isinstance(value, fx.Node)]
            if len(set(dtypes)) > 1:
                return f"{node.target} would write {dtypes[1]} into {dtypes[0]}, which PyTorch refuses"
    return None


def under(dtype: str, wide: Step) -> Capture:
    """`capture_training` under torch.autocast: the dispatcher casts operator by operator, in the forward that autograd is traced through.

    A step without data is traced through as on a CPU (torch_compat_aot), and so it is that device's autocast.
    """
    device = wide.loss.meta["val"].device.type

    def capture(*args: Any, edit: Callable[..., None] | None = None, **options: Any) -> Step:
        def edited(front: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> None:
            if edit is not None:
                edit(front, inputs)
            _settle(front, DTYPES[dtype])

        linears = float8_linears(args[0]) if dtype == FP8 else contextlib.nullcontext()
        with linears, torch.autocast(device, dtype=DTYPES[dtype]):
            return _cast_once(capture_training(*args, edit=edited, **options))

    return capture


def _cast_once(step: Step) -> Step:
    """The step with equal casts of one value made once: autocast caches those of parameters only, and casts x for q, k and v each."""
    known: dict[tuple[Any, ...], fx.Node] = {}
    for node in [n for n in step.graph.nodes if n.target is aten._to_copy.default]:
        first = known.setdefault((node.args[0], *sorted(node.kwargs.items(), key=lambda item: item[0])), node)
        if first is not node:
            node.replace_all_uses_with(first)
            step.graph.erase_node(node)
    step.module.recompile()
    return step


def _settle(front: fx.GraphModule, dtype: torch.dtype) -> None:
    """A forward graph as autocast leaves it: fused attention in its dtype, as SDPA's policy says; no assertion of another dtype."""
    for node in list(front.graph.nodes):
        if node.target is aten._assert_tensor_metadata.default:
            front.graph.erase_node(node)
        elif node.target in OUR_ATTENTIONS:
            with front.graph.inserting_before(node):
                q, k, v = (_cast(front.graph, arg, dtype) for arg in node.args[:3])
            node.args = (q, k, v, *node.args[3:])
    front.graph.eliminate_dead_code()


def _cast(graph: fx.Graph, node: Any, dtype: torch.dtype) -> fx.Node:
    """A tensor in `dtype`; itself where it was only cast from there."""
    if node.target is aten.to.dtype and node.args[0].meta["val"].dtype == dtype:
        source: fx.Node = node.args[0]
        return source
    if node.meta["val"].dtype == dtype:
        return node
    made = graph.call_function(aten.to.dtype, (node, dtype))
    made.meta = {**node.meta, "val": node.meta["val"].to(dtype)}
    return made


def settled(run: Callable[[], Result], runner: StepRunner) -> Result:
    """A step whose gradients are finite: where the loss is scaled, it is run until the scale has come down to what fits.

    Raises:
        TooCoarseError: the loss is not finite, or a gradient is not at any scale.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        found = run()
        scale = runner.loss_scale
        while scale is not None and scale.overflowed and scale.scaler.get_scale() > _LEAST_SCALE:
            found = run()
    if scale is not None and (scale.overflowed or not bool(found.loss.isfinite())):
        what = f"a gradient is not finite at a loss scale of {scale.scaler.get_scale():g}" if scale.overflowed else "the loss is not finite"
        raise TooCoarseError(f"it overflows: {what}")
    return found


# ------------------------------------------------------------------ what the plan says


def declined_dtype(dtype: str, reason: str) -> Declined:
    """A dtype that was not taken."""
    return Declined(site=SITE, kind=KIND, option=label(dtype), by=Precision.name, reason=reason)


def decisions(joint: Joint, found: Preparation) -> list[Decision]:
    """The step's precision, where it is another than it was given in. Bytes: what it keeps between forward and backward if it keeps all."""
    best = joint.schedule
    dtype = best.prepared.variant.precision
    if not dtype:
        return []
    wide = next((p for p in found.variants if not p.variant.precision), None)
    seconds = joint.record.seconds_with(KIND, BASELINE) if joint.record is not None else None
    less = 0.0 if seconds is None else seconds - joint.seconds
    size = _casts(best.prepared.step)
    return [
        Decision(
            site=SITE, kind=KIND, option=label(dtype), baseline=BASELINE, by=Precision.name,
            cost=Cost(seconds=-less, bytes_kept=_kept(best.prepared) if wide else 0),
            baseline_cost=Cost(bytes_kept=_kept(wide) if wide else 0),
            why=_why(less, fits=seconds is not None or wide is None),
            note=f"fp32 master weights and gradients{', scaled loss' * (dtype in SCALED)}; cast once a step: {format_bytes(size)}",
            settings={"dtype": dtype},
        )
    ]  # fmt: skip


def _why(less: float, *, fits: bool) -> str:
    if not fits:
        return "no plan in fp32 is within the budget"
    return f"{format_seconds(less)} less a step" if less > 0 else "as precision.always asks"


def _kept(prepared: Prepared) -> int:
    return sum(max(option.kept_bytes for option in prepared.options[stage.kind]) for stage in prepared.stages)


def _casts(step: Step) -> int:
    """Bytes of the parameters' copies in 16 bits."""
    casts = [n for n in step.graph.nodes if n.target is aten._to_copy.default and n.args[0] in step.parameters]
    return sum(n.meta["val"].numel() * n.meta["val"].element_size() for n in casts)
