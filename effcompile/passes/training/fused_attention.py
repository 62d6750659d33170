"""Attention of a training step as one operator each: no scores are kept for the backward, and only what is
seen is visited.

The forward is changed before autograd is traced through it, so that the operator brings its own backward and
both are nodes that the planner sees (Dao et al. 2022, FlashAttention, section 3: the softmax is computed
again from its row sums).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, fx

from effcompile.capture.source import Source
from effcompile.capture.training import through_dynamo
from effcompile.capture.training_graph import WRAPPED
from effcompile.core.cost import Cost
from effcompile.core.errors import FormatError
from effcompile.core.mask import MaskForm, Names, OnlyWhere, Sees, StaysDense
from effcompile.core.reasons import Because, Reason, Unsupported
from effcompile.core.torch_compat import is_fake
from effcompile.core.torch_compat_aot import off_meta
from effcompile.ir.plan import Decision, Declined
from effcompile.ir.program import Program, TensorSpec
from effcompile.ir.step import Step
from effcompile.passes.training.base import Case, StepChoice, StepContext, StepOption, StepOutcome
from effcompile.sites.attention.closed_masks import in_closed_form, mask_of
from effcompile.sites.attention.find.match import SDPA, match
from effcompile.sites.attention.find.normal_form import AttentionMatch, Unmatched
from effcompile.sites.attention.mask.graph_mask import GraphMask
from effcompile.sites.attention.normalise import normalise, refused
from effcompile.sites.attention.rewrite import why_not
from effcompile.sites.parts import AttentionSite, attentions

KIND, WRITTEN, FUSED = "attention", "as written", "fused"

#: Fused attention is taken without a look at the other form when it makes the step's predicted time smaller
#: by this factor, and its largest operator does not need more bytes.
_CLEARLY_FASTER = 0.97
_UNTRACED = Unsupported("the forward cannot be traced with its attentions as one operator each")
#: Elements of the largest mask that is made up where inputs have no values.
_MOST_WITHOUT_DATA = 1 << 27


@dataclass(slots=True, kw_only=True)
class Attended:
    """What an edit did: fused: site → its mask; score_bytes: site → bytes of its scores; left: site → why."""

    fused: dict[str, MaskForm] = field(default_factory=dict)
    score_bytes: dict[str, int] = field(default_factory=dict)
    left: dict[str, Reason] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedAttention:
    """`enabled`: run every attention as one operator, where that is predicted to be faster or needed for the
    memory; `always`: anyway.
    """

    enabled: bool = True
    always: bool = False

    name: ClassVar[str] = "attention"
    exact: ClassVar[bool] = True

    def propose(self, case: Case, context: StepContext) -> Iterator[StepChoice | Declined]:
        """The step as written, and with its attentions fused: the forward is captured again.

        Masks are understood by their values.
        """
        if not self.enabled or case.source is None or case.front is None:
            return
        names = _Renamed(case.step)
        found = match(case.front.graph)
        if not any(isinstance(m, AttentionMatch) and _pays(m) for m in found):
            yield from _left(names.of(Attended(left=refused(found))))
        elif case.source.without_data and (most := _largest(found)) > _MOST_WITHOUT_DATA:
            text = (
                "its mask has no values to look at on the meta device, and one of {} elements is not made up"
            )
            yield from _left(Attended(left={KIND: Unsupported(text, (most,))}))
        else:
            made, attended = self._made(case.source, case)
            attended = names.of(attended)
            yield from _left(attended)
            if attended.fused:
                yield self._choice(case, made, attended, context)

    def apply(self, case: Case, choice: StepChoice, option: StepOption) -> Case:
        """The step with all its attentions fused.

        Raises:
            FormatError: the plan's attentions cannot be fused in this step.
        """
        if case.source is None:
            raise FormatError(
                "The plan has fused attentions, and this step cannot be captured again to have them. Plan "
                "again."
            )
        made, attended = self._made(case.source, case)
        if not attended.fused:
            raise FormatError("The plan has fused attentions, and nothing in this step is fused. Plan again.")
        return made

    def _made(self, source: Source, case: Case) -> tuple[Case, Attended]:
        def capture() -> tuple[Step, Attended]:
            found: list[Attended] = []
            step = source.capture(lambda front, inputs: found.append(self.fuse(front, inputs)))
            if found and through_dynamo(step):
                # which traces the model anew: what the edit did is not in the step
                return step, Attended(left={KIND: _UNTRACED})
            return step, found[-1] if found else Attended()

        step, attended = source.once(self.name, capture)
        return replace(case, step=step, front=None), attended

    def _choice(self, case: Case, made: Case, attended: Attended, context: StepContext) -> StepChoice:
        """Fused keeps no scores; where it is clearly faster too, or wanted `always`, the step as written is
        no alternative, else it is.
        """
        options = [StepOption(name=FUSED, told=partial(_told, attended, True), made=made)]
        settled = self.always or _clearly_better(*context.prices.unplanned(made.step, case.step))
        if not settled:
            options.append(StepOption(name=WRITTEN, told=partial(_told, attended, False)))
        return StepChoice(site="", kind=KIND, baseline=WRITTEN, options=tuple(options), settled=settled)

    def fuse(self, front: fx.GraphModule, inputs: Sequence[Tensor]) -> Attended:
        """Change a forward graph in place.

        Args:
            front: a flat aten graph as torch.export gives it, parameters as get_attr.
            inputs: the values of its placeholders.
        """
        if any(is_fake(tensor) for tensor in inputs):
            off_meta(front)
        program = _program(front, [_made_up(tensor) if is_fake(tensor) else tensor for tensor in inputs])
        attended = Attended(left=normalise(front.graph, training=True))
        found = attentions(program)
        sites = [site for site in found if _gains(program, site)]
        attended.left |= {
            site.site: reason
            for site in found
            if (reason := _why_not(mask_of(program, site.node), site)) is not None
        }
        for site in sites:
            mask = mask_of(program, site.node)
            b, h, sq, sk, _ = site.dims
            attended.fused[site.site] = mask.form if mask is not None else MaskForm()
            attended.score_bytes[site.site] = b * h * sq * sk * site.node.args[0].meta["val"].element_size()  # type: ignore[union-attr]
        in_closed_form(program, [site.node for site in sites if _is_closed(mask_of(program, site.node))])
        front.graph.eliminate_dead_code()
        front.recompile()
        return attended


def _clearly_better(fused: tuple[float, int], written: tuple[float, int]) -> bool:
    """Whether one step is so much faster than another that there is no need to look at that one, and its
    largest operator is no larger.
    """
    return fused[0] < _CLEARLY_FASTER * written[0] and fused[1] <= written[1]


def _told(attended: Attended, fused: bool, outcome: StepOutcome) -> Iterator[Decision]:
    """What became of every attention that can be one operator."""
    for site, mask in attended.fused.items():
        size = attended.score_bytes[site]
        yield Decision(
            site=site,
            kind=KIND,
            option=FUSED if fused else WRITTEN,
            baseline=WRITTEN,
            by=FusedAttention.name,
            cost=Cost(),
            baseline_cost=Cost(bytes_kept=size),
            note=Sees(form=mask),
            why=Because("its scores, {bytes}, are never whole", (size,))
            if fused
            else Because("no faster here"),
        )


def _left(attended: Attended) -> Iterator[Declined]:
    """The attentions that stay as they are."""
    for site, reason in attended.left.items():
        yield Declined(site=site, kind=KIND, option=FUSED, by=FusedAttention.name, reason=reason)


class _Renamed:
    """Modules without the wrapper around the model, inputs by the names that the user gives them."""

    def __init__(self, step: Step) -> None:
        self.inputs = {f"tensors_{index}": name for index, name in enumerate(step.input_names)}

    def of(self, attended: Attended) -> Attended:
        return Attended(
            fused={_site(s): self.mask(mask) for s, mask in attended.fused.items()},
            score_bytes={_site(s): size for s, size in attended.score_bytes.items()},
            left={_site(s): self.reason(reason) for s, reason in attended.left.items()},
        )

    def mask(self, form: MaskForm) -> MaskForm:
        return replace(
            form.told(
                MaskForm,
                ids=self.names,
                condition=self.names,
                limit=lambda edge: edge,
                ahead=form.ahead,
                flags=form.flags,
            ),
            guards=tuple(self.reason(guard) for guard in form.guards),
        )

    def names(self, inputs: Names) -> Names:
        return tuple(self.text(name) for name in inputs)

    def reason(self, reason: Reason) -> Reason:
        match reason:
            case StaysDense():
                return replace(reason, because=self.reason(reason.because))
            case OnlyWhere():
                return replace(reason, form=self.mask(reason.form))
            case Because() | Unsupported():
                return replace(
                    reason, figures=tuple(self.text(f) if isinstance(f, str) else f for f in reason.figures)
                )
        return reason

    def text(self, words: str) -> str:
        return re.sub(r"tensors_\d+", lambda found: self.inputs.get(found[0], found[0]), words)


def _site(name: str) -> str:
    return name.removeprefix(f"{WRAPPED}.")


def _made_up(tensor: Tensor) -> Tensor:
    """Values for an input that has none, for masks to be understood by: nothing is padded, nothing added."""
    number = 0 if tensor.dtype.is_floating_point or tensor.dtype.is_complex else 1
    return torch.full(tensor.shape, number, dtype=tensor.dtype)


def _largest(found: Iterable[AttentionMatch | Unmatched]) -> int:
    """Elements of the largest mask of a batch."""
    sizes = (site.anchor.meta["val"].shape for site in found if isinstance(site, AttentionMatch))
    return max((int(shape[0] * shape[-2] ** 2) for shape in sizes if len(shape) > 1), default=0)


def _pays(found: AttentionMatch) -> bool:
    """Whether a match can be fused and is not yet: SDPA without a mask is the kernel that it would become."""
    return not why_not(found) and (found.anchor.target is not SDPA or bool(found.edits))


def _gains(program: Program, site: AttentionSite) -> bool:
    """Ours already, or an SDPA with a mask that is understood: it would compute all scores."""
    return site.ours or (site.mask is not None and _is_closed(mask_of(program, site.node)))


def _why_not(mask: GraphMask | None, site: AttentionSite) -> Reason | None:
    """Why an SDPA keeps its dense mask; None where it has none, or is ours."""
    if site.ours or mask is None or mask.certain:
        return None
    return StaysDense(because=mask.left) if mask.left is not None else OnlyWhere(form=mask.form)


def _is_closed(mask: GraphMask | None) -> bool:
    """A mask in closed form, for all inputs."""
    return mask is not None and mask.certain


def _program(front: fx.GraphModule, inputs: Sequence[Tensor]) -> Program:
    """A forward graph as a program of static shapes."""
    pairs = zip(front.graph.find_nodes(op="placeholder"), inputs, strict=True)
    specs = [
        TensorSpec(name=n.name, dtype=str(t.dtype).removeprefix("torch."), shape=tuple(t.shape))
        for n, t in pairs
    ]
    return Program(name="step", module=front, args=tuple(inputs), kwargs={}, inputs=tuple(specs), outputs=())
