"""Precision: products of a training step in 16 bits, with parameters, gradients and the optimizer in fp32.

Micikevicius et al. 2018 (arXiv 1710.03740). Which operators run in 16 bits is torch.autocast's own decision,
made while the step is captured, so that every cast is an operator that the planner prices, keeps or repeats
like any other; a parameter is cast once per step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import fx

from effcompile.capture.float8 import float8_linears, unavailable
from effcompile.capture.source import Source
from effcompile.core.errors import EffcompileError, FormatError, UnknownNameError, UsageError
from effcompile.core.reasons import Because, Reason, Unsupported
from effcompile.core.torch_compat_aot import is_random
from effcompile.estimate.halves import draws_as_fp32
from effcompile.ir.plan import Declined
from effcompile.ir.step import Step
from effcompile.machine.target import Target
from effcompile.ops.wide import product_ratio
from effcompile.passes.training.base import Case, StepChoice, StepContext, StepOption
from effcompile.sites.attention.normalise import OUR_ATTENTIONS

aten = torch.ops.aten

SITE, KIND = "step", "precision"
BASELINE = "fp32"

BF16, FP16, FP8 = "bf16", "fp16", "fp8"
#: Those whose loss is scaled, so that small gradients do not vanish.
SCALED = frozenset({FP16})
#: What products may be computed in → the dtype of autocast, under which fp8 has its linears alone.
DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {BF16: torch.bfloat16, FP16: torch.float16, FP8: torch.bfloat16}
)
#: Captures a step, as `capture_training` does.
Capture = Callable[..., Step]
#: Operators that write a tensor into another of the same dtype → which argument is the source.
_WRITES = {
    aten.index_put.default: 2, aten._unsafe_index_put.default: 2, aten.index_copy.default: 3,
    aten.index_add.default: 3, aten.scatter.src: 3, aten.scatter_add.default: 3, aten.scatter_reduce.two: 3,
    aten.masked_scatter.default: 2,
}  # fmt: skip
_NAMES = {torch.bfloat16: BF16, torch.float16: FP16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """Not exact: proposed only where the goal allows an error, which is measured against the fp32 step.

    `dtypes`: in order of preference: the first that the machine is fast in is planned, the next where its
    error is too large. bf16 has fp32's range; fp16 has three more bits, and its loss is scaled
    (torch.amp.GradScaler); fp8, only where it is named, is that of torchao's linears on GPUs that have it.
    `always`: also where fp32 is predicted faster.
    """

    dtypes: tuple[str, ...] = (BF16, FP16)
    always: bool = False

    name: ClassVar[str] = "precision"
    exact: ClassVar[bool] = False

    def __post_init__(self) -> None:
        for dtype in self.dtypes:
            if dtype not in DTYPES:
                raise UnknownNameError("precision", dtype, DTYPES)
        if not self.dtypes:
            raise UsageError(
                f"precision.dtypes is empty. Choose among {', '.join(DTYPES)}, or leave the pass out: "
                "no-precision."
            )

    def propose(self, case: Case, context: StepContext) -> Iterator[StepChoice | Declined]:
        """fp32, and the first dtype that is possible; those before it are declined."""
        for dtype in self.dtypes:
            reason = context.forbidden.get((KIND, label(dtype))) or self.refusal(
                dtype, case.step, context.target, here=context.here
            )
            made = self._made(case, dtype, elsewhere=not context.here) if reason is None else reason
            if isinstance(made, Case):
                options = (
                    self._option(dtype, made, elsewhere=not context.here),
                    *[StepOption(name=BASELINE)] * (not self.always),
                )
                yield StepChoice(
                    site=SITE, kind=KIND, baseline=BASELINE, options=options, settled=self.always
                )
                return
            yield Declined(site=SITE, kind=KIND, option=label(dtype), by=self.name, reason=made)

    def apply(self, case: Case, choice: StepChoice, option: StepOption) -> Case:
        """The step captured under autocast.

        Raises:
            FormatError: this step cannot have the plan's dtype.
        """
        dtype = option.setting("dtype", str)
        if dtype not in DTYPES:
            raise FormatError(
                f"The plan's schedule has the precision {dtype!r}; known: {', '.join(DTYPES)}. Plan "
                "again, or restore the file."
            )
        made = self._made(case, dtype)
        if isinstance(made, Reason):
            raise FormatError(
                f"The plan has products in {dtype}, which this step cannot have: {made}. Plan again."
            )
        return made

    def _made(self, case: Case, dtype: str, *, elsewhere: bool = False) -> Case | Reason:
        """The step in a dtype, or why it cannot be."""
        source = case.source
        if source is None:
            return Unsupported("the step cannot be captured again")

        def capture() -> tuple[Step, fx.GraphModule | None, Source]:
            narrow = replace(source, by=under(dtype, case.step, source.by, elsewhere=elsewhere), made={})
            return *narrow.capture_with_front(), narrow

        try:
            step, front, narrow = source.once(dtype, capture)
        except EffcompileError as error:
            return Unsupported.of("the step cannot be captured under it: {}", str(error).splitlines()[0])
        return _mixed_write(step) or replace(
            case, step=step, front=front, source=narrow, scaled=dtype in SCALED
        )

    def _option(self, dtype: str, made: Case, *, elsewhere: bool) -> StepOption:
        text = (
            "fp32 master weights and gradients"
            + ", scaled loss" * (dtype in SCALED)
            + ", its error is unmeasured" * elsewhere
        )
        note = Because(text + "; cast once a step: {bytes}", (_casts(made.step),))
        return StepOption(name=label(dtype), settings={"dtype": dtype}, note=note, made=made)

    def refusal(self, dtype: str, step: Step, target: Target, *, here: bool) -> Unsupported | None:
        """Why a step in fp32 cannot, or need not, be planned in `dtype`; None where it can.

        `here`: the target is this machine.
        """
        if (own := narrow_dtype(step)) is not None:
            return Unsupported.of("the step computes in {} already, as it was given", own)
        if dtype == FP8 and not find_spec("torchao"):
            return Unsupported("it needs torchao: pip install torchao")
        if not here:
            known = ", ".join(target.peak_flops)
            return (
                None
                if dtype in target.peak_flops
                else Unsupported.of("{} has no arithmetic in {} (it has {})", target.name, dtype, known)
            )
        device = step.loss.meta["val"].device.type
        if dtype == FP8 and (reason := unavailable(device)) is not None:
            return reason
        ratio = product_ratio(DTYPES[dtype], device)
        if ratio > 1 and not self.always:
            return Unsupported.of(
                "products in {} take {} × as long as in fp32 on this machine, measured", dtype, f"{ratio:.1f}"
            )
        if any(is_random(node.target) for node in step.graph.nodes) and not draws_as_fp32(
            DTYPES[dtype], device
        ):
            return Unsupported.of(
                "its random masks would not be those of fp32 on {}, so that the error cannot be measured",
                device,
            )
        return None


def narrow_dtype(step: Step) -> str | None:
    """The 16-bit dtype that a step computes in, under the user's own autocast or by its parameters; None for
    none.
    """
    values = (node.meta.get("val") for node in step.graph.nodes)
    return next(
        (
            _NAMES[value.dtype]
            for value in values
            if isinstance(value, torch.Tensor) and value.dtype in _NAMES
        ),
        None,
    )


def label(dtype: str) -> str:
    """In the plan's words."""
    return "fp8 linears" if dtype == FP8 else f"{dtype} autocast"


def _mixed_write(step: Step) -> Unsupported | None:
    """Why no kernel runs a step: it writes one dtype into another, which tracing lets pass."""
    for node in step.graph.nodes:
        if node.target in _WRITES:
            into, source = node.args[0], node.args[_WRITES[node.target]]
            dtypes = [
                str(value.meta["val"].dtype).removeprefix("torch.")
                for value in (into, source)
                if isinstance(value, fx.Node)
            ]
            if len(set(dtypes)) > 1:
                return Unsupported.of(
                    "{} would write {} into {}, which PyTorch refuses", node.target, dtypes[1], dtypes[0]
                )
    return None


def under(dtype: str, wide: Step, capture_wide: Capture, *, elsewhere: bool = False) -> Capture:
    """A capture under torch.autocast: the dispatcher casts operator by operator, in the forward that autograd
    is traced through.

    A step without data is traced through as on a CPU (torch_compat_aot), and so it is that device's autocast.
    """
    device = wide.loss.meta["val"].device.type

    def capture(*args: Any, edit: Callable[..., None] | None = None, **options: Any) -> Step:
        def edited(front: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> None:
            if edit is not None:
                edit(front, inputs)
            _settle(front, DTYPES[dtype])

        linears = float8_linears(args[0], elsewhere=elsewhere) if dtype == FP8 else contextlib.nullcontext()
        with linears, torch.autocast(device, dtype=DTYPES[dtype]):
            return _cast_once(capture_wide(*args, edit=edited, **options))

    return capture


def _cast_once(step: Step) -> Step:
    """The step with equal casts of one value made once: autocast caches those of parameters only, and casts x
    for q, k and v each.
    """
    known: dict[tuple[Any, ...], fx.Node] = {}
    for node in [n for n in step.graph.nodes if n.target is aten._to_copy.default]:
        first = known.setdefault((node.args[0], *sorted(node.kwargs.items(), key=lambda item: item[0])), node)
        if first is not node:
            node.replace_all_uses_with(first)
            step.graph.erase_node(node)
    step.module.recompile()
    return step


def _settle(front: fx.GraphModule, dtype: torch.dtype) -> None:
    """A forward graph as autocast leaves it: fused attention in its dtype, as SDPA's policy says; no
    assertion of another dtype.
    """
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


def _casts(step: Step) -> int:
    """Bytes of the parameters' copies in 16 bits."""
    casts = [
        n for n in step.graph.nodes if n.target is aten._to_copy.default and n.args[0] in step.parameters
    ]
    return sum(n.meta["val"].numel() * n.meta["val"].element_size() for n in casts)
