"""Attention of long inputs on the tiles that a predictor expects to matter: an approximation, where it pays
and the goal allows it.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import fx

from effcompile.core.cost import Cost, Provenance
from effcompile.core.findings import Together
from effcompile.core.mask import OnlyWhere, Sees, StaysDense
from effcompile.core.reasons import NotMeasured, OverError, Reason, Recall, Unsupported
from effcompile.estimate.prediction import PredictorFigure, Trial, calibrate, told
from effcompile.ir.plan import Plan
from effcompile.ir.program import Program, shape_of
from effcompile.ops.tile_predictors import METHODS
from effcompile.passes.attention import Attention
from effcompile.passes.base import Choice, Context, Declined, Option, Pass
from effcompile.passes.pricing import no_error_allowed, no_gain, no_kernel, price
from effcompile.sites.attention.closed_masks import mask_of, visible_keys
from effcompile.sites.attention.find.normal_form import NotThisFormError, faking, tensor_of
from effcompile.sites.attention.node_builder import Emitter
from effcompile.sites.attention.predictor import Predictor
from effcompile.sites.parts import AttentionSite, argument, attentions

_trials: weakref.WeakKeyDictionary[fx.GraphModule, dict[tuple[Predict, tuple[str, ...]], Trial]] = (
    weakref.WeakKeyDictionary()
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Predict(Pass):
    """Runs attentions on the tiles that hold `mass` of the softmax, by a cheap estimate of it.

    It takes part only where it is asked for.

    Measured by benchmarks/predictors.py on one busy core (noisy), 8 heads of 64, 4096 causal tokens, a fifth
    to a quarter of the tiles kept: 0.5 to 0.7 of the time of exact attention. Where attention is spread out,
    nearly all tiles are kept and it is declined.

    Attributes:
        method: which predictors compete: "pooled", "sanger", "elsa", "dota", "a3" look at each call's q and
            k, "vitcod" has its tiles fixed on the calibration inputs (ops/tile_predictors.py has the papers).
        mass: share of the estimated softmax that the tiles of each block of queries shall hold.
        least: attentions with fewer keys are left alone.
        detail: the method's parameter (bits, dimensions, components); 0: its default.
        pool: queries that are averaged before they are scored; 1 as in the papers.
        block: queries and keys of a tile.
        seconds: for measuring errors at the model's output; what is not measured by then is declined.
    """

    method: tuple[str, ...] = ("sanger",)
    mass: float = 0.95
    least: int = 1024
    detail: int = 0
    pool: int = 8
    block: int = 64
    seconds: float = 60.0

    name: ClassVar[str] = "predict"
    exact: ClassVar[bool] = False

    def __post_init__(self) -> None:
        """Refuse a method that is not there, and settings that mean nothing.

        Raises:
            UsageError: one is.
        """
        _ = self.predictors  # each refuses what means nothing

    @property
    def predictors(self) -> tuple[Predictor, ...]:
        """One per method."""
        form = {"mass": self.mass, "detail": self.detail, "pool": self.pool, "block": self.block}
        return tuple(Predictor(method=method, **form) for method in dict.fromkeys(self.method))  # type: ignore[arg-type]

    def propose(self, program: Program, context: Context) -> Iterable[Choice | Declined]:
        found = attentions(program)
        if found and context.goal.exact:
            yield no_error_allowed("attention", ", ".join(self.method), self.name)
        if not found or context.goal.exact:
            return
        reasons = {site.site: self._why_not(program, site) for site in found}
        open_to = [site for site in found if not reasons[site.site]]
        trial: Trial | None = None
        if (
            open_to
            and self._priced(context, "attention/tiles", *open_to[0].dims, self.block, self.block) is not None
        ):
            try:
                trial = self._trial(program, [site.site for site in open_to])
            except NotThisFormError as error:
                reasons |= dict.fromkeys((site.site for site in open_to), error.reason)
        exact = (
            {c.site: c for c in Attention().propose(program, context) if isinstance(c, Choice)}
            if trial
            else {}
        )
        for site in found:
            if trial is None or reasons[site.site] or site.site not in exact:
                reason = reasons[site.site] or no_kernel(context, "attention/tiles")
                yield from (self._declined(site, p.method, reason) for p in self.predictors)
            else:
                yield from self._at(program, site, trial, exact[site.site], context)

    def apply(self, program: Program, plan: Plan) -> Program:
        chosen = plan.forms()
        tags = {s.site: chosen[s.site] for s in attentions(program) if s.site in chosen}
        planned = {site: Predictor.of(form) for site, form in tags.items() if Predictor.known(form)}
        if not planned:
            return program.tagged(tags, self.name)
        wanted = list(planned)
        edited, nodes = told(program, wanted)
        for predictor in dict.fromkeys(planned.values()):
            part = {site: nodes[site] for site in wanted if planned[site] == predictor}
            constants = calibrate(edited, part, [predictor])
            for site, node in part.items():
                held = _constants(
                    edited,
                    node,
                    f"{predictor.method}_{wanted.index(site)}",
                    constants.get((site, predictor.method), ()),
                )
                predictor.insert(Emitter(edited.graph), node, held)
        edited.graph.eliminate_dead_code()
        edited.module.recompile()
        return replace(edited, tags={**program.tags, **tags}, history=(*program.history, self.name))

    def _trial(self, program: Program, sites: Sequence[str]) -> Trial:
        """The predictors on the calibration inputs, once for all backends."""
        known = _trials.setdefault(program.module, {})
        key = (self, tuple(sites))
        if key not in known:
            known[key] = Trial.of(program, sites, self.predictors, self.seconds)
        return known[key]

    def _at(
        self, program: Program, site: AttentionSite, trial: Trial, exact: Choice, context: Context
    ) -> Iterator[Choice | Declined]:
        best, options = min(exact.options, key=lambda option: option.cost.seconds), []
        for predictor in self.predictors:
            if predictor.static and _is_dynamic(program, site):
                yield self._declined(
                    site,
                    predictor.method,
                    Unsupported("its length is dynamic, and calibrated tiles hold for one length"),
                )
                continue
            figure = trial.figures[site.site, predictor.method]
            cost = self._price(program, site, predictor, figure, context)
            error = None
            if cost is None:
                reason: Reason | None = no_kernel(context, f"predict/{predictor.method}")
            elif cost.seconds >= best.cost.seconds:
                reason = replace(figure.reason, but=no_gain(cost, best.cost, best.name))
            else:
                error = trial.error_squared(site.site, predictor.method)
                reason = self._too_wrong(figure, error, context)
            if reason is not None:
                yield self._declined(site, predictor.method, reason, cost)
            else:
                assert cost is not None and error is not None
                cost = replace(cost, error_squared=error)
                options.append(
                    Option(form=predictor.as_option(), cost=cost, by=self.name, note=figure.reason)
                )
        if options:
            yield replace(exact, options=(exact.option(exact.baseline), *options))

    def _too_wrong(self, figure: PredictorFigure, error: float | None, context: Context) -> Recall | None:
        """Why the error rules it out; None if it does not."""
        if error is None:
            return replace(figure.reason, but=NotMeasured(setting="predict.seconds", seconds=self.seconds))
        if not math.sqrt(error) <= (context.goal.max_error or 0.0):
            return replace(
                figure.reason, but=OverError(error=math.sqrt(error), limit=context.goal.max_error or 0.0)
            )
        return None

    def _price(
        self,
        program: Program,
        site: AttentionSite,
        predictor: Predictor,
        figure: PredictorFigure,
        context: Context,
    ) -> Cost | None:
        """Seconds of the predictor and of the attention on its tiles; None where the backend has no such
        kernel.
        """
        sk = site.dims[3]
        grain = max(self.block, sk // 32)  # sites of nearly the same density are measured once
        keys = max(grain, math.ceil(figure.keys / grain - 0.5) * grain)
        kernel = self._priced(context, "attention/tiles", *site.dims, keys, self.block)
        if kernel is None or predictor.static:
            return kernel
        mask = mask_of(program, site.node)
        visible = visible_keys(mask, sk) if mask is not None else sk // 2 if site.causal else sk
        detail = predictor.detail or METHODS[predictor.method].detail or self.block
        ahead = self._priced(
            context, f"predict/{predictor.method}", *site.dims, visible, self.pool, self.block, detail
        )
        return None if ahead is None else kernel + ahead

    def _priced(self, context: Context, kernel: str, *dims: int) -> Cost | None:
        """A measured price: no data sheet tells which runtime has these kernels."""
        cost = price(context, kernel, *dims)
        return cost if cost is not None and cost.provenance == Provenance.MEASURED else None

    def _declined(
        self, site: AttentionSite, method: str, reason: Reason, cost: Cost | None = None
    ) -> Declined:
        return Declined(
            site=site.site, kind="attention", option=method, by=self.name, reason=reason, cost=cost
        )

    def _why_not(self, program: Program, site: AttentionSite) -> Reason | None:
        """Why no predictor can stand at an attention; None if one can."""
        sk = site.dims[3]
        if sk < self.least:
            return Unsupported("its {} keys are fewer than predict.least = {}", (sk, self.least))
        values = shape_of(site.node.args[2])  # type: ignore[arg-type]
        if values[-1] != site.dims[4]:
            return Unsupported(
                "v is {} wide and q {}: the kernel of listed tiles wants them equal",
                (values[-1], site.dims[4]),
            )
        return self._unseen(program, site)

    @staticmethod
    def _unseen(program: Program, site: AttentionSite) -> Reason | None:
        """What of the scores a predictor does not see; None for nothing."""
        if site.ours and argument(site.node, "softcap"):
            return Unsupported("its scores are capped, which the kernel of listed tiles does not do")
        mask = mask_of(program, site.node)
        biased = site.mask is not None if mask is None else bool(mask.biases)
        if mask is not None and mask.left is not None:
            return StaysDense(because=mask.left)
        if mask is not None and mask.guards:
            return OnlyWhere(form=mask.form)
        if biased:
            return Unsupported("its scores have a bias, which predictors do not see")
        if mask is not None and (mask.mask or mask.q_ids is not None):
            return Together((Sees(form=mask.form), Unsupported("predictors know bands, chunks and padding")))
        return None


def _is_dynamic(program: Program, site: AttentionSite) -> bool:
    """Whether a dynamic axis of the inputs is as long as the attention: it may be its length."""
    pairs = zip(program.inputs, program.flat_inputs(), strict=True)
    sizes = {
        size
        for spec, tensor in pairs
        for dim, size in zip(spec.shape, tensor.shape, strict=True)
        if isinstance(dim, str)
    }
    return not sizes.isdisjoint(site.dims[2:4])


def _constants(program: Program, place: fx.Node, name: str, tensors: Sequence[torch.Tensor]) -> list[fx.Node]:
    """New buffers of the program's module, read before a place."""
    nodes = []
    for position, tensor in enumerate(tensors):
        program.module.register_buffer(f"_predicted_{name}_{position}", tensor)
        with program.graph.inserting_before(place):
            node = program.graph.get_attr(f"_predicted_{name}_{position}")
        with faking(tensor_of(place.args[0])):  # type: ignore[arg-type]
            node.meta["val"] = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        nodes.append(node)
    return nodes
