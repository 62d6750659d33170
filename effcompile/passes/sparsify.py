"""Linears with mostly zero weights served as blocks, or 2:4 on sparse tensor cores.

Exactly where the model is sparse already, by pruning where it is asked for.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from effcompile.core import torch_compat
from effcompile.core.cost import Cost, Provenance
from effcompile.core.errors import LoweringError, UnknownNameError, UsageError
from effcompile.core.reasons import NoKernel, NotMeasured, Reason, SparseSpeed, Unsupported
from effcompile.estimate.perturb import Coded
from effcompile.ir.formats import FP32, TWO_OF_FOUR, Form
from effcompile.ir.plan import Plan
from effcompile.ir.program import Program
from effcompile.machine.target import KernelCall
from effcompile.ops.block_sparse import fallback_reason
from effcompile.passes.base import Choice, Context, Declined, Option, Pass
from effcompile.passes.constants import readers, replace_constant, storage_of
from effcompile.passes.pricing import STOCK, no_error_allowed, no_kernel, price
from effcompile.passes.sparse_forms import SparseForm, fitting, given_forms, keep, masked_forms, pruned_forms
from effcompile.passes.two_of_four import offered as offered_on_cores
from effcompile.passes.two_of_four import on_cores
from effcompile.passes.weight_saliency import SALIENCIES, SaliencyScores, check_shares, load_masks
from effcompile.sites.parts import LinearSite, linears, weight_of
from effcompile.sparse import BLOCKS
from effcompile.sparse.pattern import check_block

BASELINE = FP32.name


@dataclass(frozen=True, slots=True, kw_only=True)
class Sparsify(Pass):
    """Forms `sparse16@0.90` (blocks of 16, 90 % of them 0), `unstructured@0.90` (single weights) and `2:4` of
    single linears.

    A weight that is sparse as given (after `DynamicSparsity`, or multiplied with a mask) is offered in every
    form that keeps all that is not 0: that makes no error. Pruning dense weights is asked for by `sparsity`
    or `masks`, and its error is measured like that of a precision. A form is offered where it was measured to
    be faster, or smaller where memory counts; eps stands beside the break-even in either case (Dietrich et
    al. 2108.06277, A.3).

    Attributes:
        sparsity: shares of the blocks to prune, each in [0, 1); the solve chooses one at each linear, or
            none.
        block: side of the blocks; 0 chooses among all of BLOCKS that divide.
        saliency: "magnitude" (L1 norm), "wanda" (times the norms of the inputs), "snip" (gradients;
            weight_saliency.py), or "given": only by `masks`.
        sites: patterns of the linears to prune (`*.mlp.*`); none: all inside repeated blocks, so no heads.
        masks: file of `torch.save({site: mask (N, K)})` that says what to keep.
    """

    sparsity: tuple[float, ...] = ()
    block: int = 0
    saliency: str = "magnitude"
    sites: tuple[str, ...] = ()
    masks: str = ""

    name: ClassVar[str] = "sparsify"
    exact: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_shares(self.sparsity, "sparsify.sparsity", "blocks")
        if self.block not in (0, *BLOCKS):
            raise UsageError(
                f"sparsify.block = {self.block} is not allowed. Choose one of: 0 (any), "
                f"{', '.join(map(str, BLOCKS))}."
            )
        if self.saliency not in SALIENCIES:
            raise UnknownNameError("saliency", self.saliency, SALIENCIES)
        if (self.saliency == "given") != bool(self.masks) or (self.masks and self.sparsity):
            raise UsageError(
                "sparsify.masks says which weights to keep: it goes with saliency=given and without a "
                "sparsity."
            )

    def propose(self, program: Program, context: Context) -> Iterable[Choice | Declined]:
        forms = self._forms(program)
        if context.goal.exact:
            for option in sorted(
                {f.format.name for _, found in forms for f in found if not (f.given or f.coded)}
            ):
                yield no_error_allowed("linear", option, self.name)
        yield from self._misfits(program)
        tied = readers(program)
        for site, found in forms:
            weight = program.tensor(site.weight)
            assert weight is not None
            half = weight.element_size() == 2
            base = price(context, "linear/bf16" if half else f"linear/{BASELINE}", *site.dims)
            served = [form for form in found if not form.coded or context.backend.startswith("torch")]
            possible = [form for form in served if form.given or not context.goal.exact]
            missing = no_kernel(context, f"linear/{BASELINE}") if base is None and not half else None
            reason = missing or _tied(weight, tied)
            items = [
                self._declined(site.site, form.format.name, reason)
                if reason
                else self._item(context, site, weight, form, base)
                for form in possible
            ]
            yield from (item for item in items if isinstance(item, Declined))
            if base is not None and (options := [item for item in items if isinstance(item, Option)]):
                dense = Option(
                    form=Form(weights=FP32), cost=replace(base, weight_bytes=weight.nbytes), by=self.name
                )
                covers = frozenset([site.node])
                yield Choice(
                    site=site.site, kind="linear", baseline=BASELINE, options=(dense, *options), covers=covers
                )

    def replaced_weights(self, program: Program) -> dict[tuple[str, str], Callable[[], Tensor]]:
        """(site, option) → the pruned weight (N, K), for those whose error has to be measured."""
        tied = readers(program)
        return {
            (site.site, form.format.name): _replacement(weight_of(program, site), form)
            for site, found in self._forms(program)
            if not _tied(weight_of(program, site), tied)
            for form in found
            if not form.given
        }

    def apply(self, program: Program, plan: Plan) -> Program:
        """Pruned weights in the place of the given ones, and tags.

        Raises:
            LoweringError: a form that this model's weights do not have, and these settings do not make.
        """
        chosen = {
            site: form
            for site, form in plan.forms().items()
            if form.weights is not None and form.weights.block
        }
        if not chosen:
            return program.tagged({}, self.name)
        edited = program.editable(self.name)
        left = dict(chosen)
        for site, found in self._forms(edited):
            wanted = left.pop(site.site, None)
            form = next(
                (form for form in found if wanted is not None and form.format.name == wanted.name), None
            )
            if wanted is not None and form is None:
                raise _not_there(site.site, wanted.name)
            if form is not None and not form.given:
                _replace(edited, site, keep(weight_of(edited, site), form))
        for name, wanted in left.items():
            raise _not_there(name, wanted.name)
        edited.module.recompile()
        return replace(edited, tags={**program.tags, **chosen})

    # ------------------------------------------------------------------ what is possible

    def _forms(self, program: Program) -> list[tuple[LinearSite, list[SparseForm]]]:
        """Every linear with sparse forms; forms that change no result come first and hide others of their
        name.
        """
        known = linears(program)
        pruned = {site.site for site in self._pruned(known)}
        scores = SaliencyScores(program, self.saliency, [site for site in known if site.site in pruned])
        masks = self._masks(known)
        result = []
        for site in known:
            weight = weight_of(program, site)
            found = [] if torch_compat.is_fake(weight) else given_forms(weight)
            blocks = (
                fitting(weight.shape)
                if not self.block
                else tuple(b for b in (self.block,) if b in fitting(weight.shape))
            )
            if site.site in masks:
                found += masked_forms(weight, _checked(masks[site.site], site), blocks)
            elif self.sparsity and site.site in pruned:
                found += pruned_forms(weight, self.sparsity, blocks, functools.partial(scores.of, site))
            unique = {form.format.name: form for form in reversed(found)}
            if unique:
                forms = list(reversed(unique.values()))
                coded = [form.in_bytes() for form in forms if form.format != TWO_OF_FOUR]
                result.append((site, forms + coded))
        return result

    def _pruned(self, known: list[LinearSite]) -> list[LinearSite]:
        """The linears to prune: those of `sites`, else all below a numbered module (Dietrich et al. 2021,
        sec. 2).
        """
        for pattern in self.sites:
            if not any(fnmatchcase(site.site, pattern) for site in known):
                raise UnknownNameError("linear site", pattern, [site.site for site in known])
        if self.sites:
            return [site for site in known if any(fnmatchcase(site.site, pattern) for pattern in self.sites)]
        return [site for site in known if any(part.isdigit() for part in site.site.split(".")[:-1])]

    def _masks(self, known: list[LinearSite]) -> dict[str, Tensor]:
        if not self.masks:
            return {}
        masks = load_masks(Path(self.masks), "sparsify.masks")
        if unknown := sorted(set(masks) - {site.site for site in known}):
            raise UnknownNameError("linear site", unknown[0], [site.site for site in known])
        return masks

    def _misfits(self, program: Program) -> Iterator[Declined]:
        """Linears that were to be pruned in blocks that do not divide them."""
        known = linears(program)
        masks = self._masks(known)
        for site in (
            self._pruned(known)
            if self.block and self.sparsity
            else [site for site in known if self.block and site.site in masks]
        ):
            try:
                check_block(site.n, site.k, self.block)
            except UsageError as error:
                yield self._declined(site.site, f"sparse{self.block}", Unsupported.of("{}", str(error)))

    # ------------------------------------------------------------------ what it costs

    def _item(
        self, context: Context, site: LinearSite, weight: Tensor, form: SparseForm, base: Cost | None
    ) -> Option | Declined:
        """A form as an option, or why it is none here."""
        if form.format == TWO_OF_FOUR and on_cores(context, weight):
            found = offered_on_cores(context, site, weight, form, self.name)
            return found if isinstance(found, Option) else self._declined(site.site, form.format.name, *found)
        reason = _refusal(weight)
        if reason or base is None:
            return self._declined(
                site.site, form.format.name, reason or no_kernel(context, f"linear/{BASELINE}")
            )
        return self._option(context, site, form, base)

    def _option(self, context: Context, site: LinearSite, form: SparseForm, base: Cost) -> Option | Declined:
        # two digits: layers that differ by a few blocks share a measurement
        timed = min(form.blocks, int(float(f"{form.kept:.1e}")))
        cost = price(context, form.kernel, *site.dims, timed, form.block)
        if cost is None:
            call = KernelCall(form.kernel, (*site.dims, timed, form.block))
            return self._declined(site.site, form.format.name, _no_kernel(context, call))
        size = form.nbytes(site.n, site.k)
        error = 0.0 if form.given else context.sensitivity.get((site.site, form.format.name))
        cost = replace(cost, weight_bytes=size, error_squared=error or 0.0)
        wanted = context.goal.minimize == "memory" or context.goal.memory is not None
        eps = cost.seconds / (timed / form.blocks) / base.seconds
        stock = price(context, f"linear/{BASELINE}", *site.dims, backend=STOCK)
        loose = eps * base.seconds / stock.seconds if stock is not None else eps
        over = loose if f"{loose:.1f}" != f"{eps:.1f}" else None
        speed = SparseSpeed(epsilon=eps, over_stock=over, break_even=1 / form.density, gains=True)
        if cost.provenance is not Provenance.MEASURED:
            reason: Reason = Unsupported(
                "sparse products are not modelled, only measured, and this target has no measurement of them"
            )
        elif cost.seconds >= base.seconds and not (wanted and size < 4 * site.n * site.k):
            reason = replace(speed, gains=False)
        elif error is None:
            reason = NotMeasured()
        else:
            return Option(form=Form(weights=form.format), cost=cost, by=self.name, note=speed)
        return self._declined(site.site, form.format.name, reason, cost)

    def _declined(self, site: str, option: str, reason: Reason, cost: Cost | None = None) -> Declined:
        return Declined(site=site, kind="linear", option=option, by=self.name, reason=reason, cost=cost)


def _replacement(weight: Tensor, form: SparseForm) -> Callable[[], Tensor]:
    """What the linear is measured with."""
    kept = functools.partial(keep, weight, form)
    return Coded(kept) if form.coded else kept


def _no_kernel(context: Context, call: KernelCall) -> NoKernel:
    """Why there is no sparse product: what measuring it raised, what hinders every backend's kernels, or that
    other backends have them.
    """
    failed = context.target.failure(context.backend, call) if context.target.failure is not None else None
    why = failed or fallback_reason(torch.empty(0), call.dims[-1])
    served = context.backend.startswith(("torch", "onnxruntime"))
    return no_kernel(
        context, call.kernel, because=why or "", others=() if why or served else ("torch", "onnxruntime")
    )


def _not_there(site: str, option: str) -> LoweringError:
    return LoweringError(
        f"The plan has {site} as {option}, but its weight is not that sparse and pruning it so was not asked "
        "for. Give the weights and the --pass sparsify settings that the plan was made with."
    )


def _tied(weight: Tensor, found: Counter[int]) -> Unsupported | None:
    """Why a weight cannot have a pattern of its own, by `readers`; None if it can."""
    return (
        Unsupported("its weight is tied: something else reads it, which a pattern of its own cannot serve")
        if found[storage_of(weight)] > 1
        else None
    )


def _refusal(weight: Tensor) -> Unsupported | None:
    """Why a linear cannot be served as blocks; None if it can."""
    if weight.device.type not in ("cpu", "meta"):
        return Unsupported.of("its weight is on {}; products of blocks are planned for CPU", weight.device)
    if weight.dtype != torch.float32:
        return Unsupported.of(
            "its weight is {}; products of blocks are measured in float32",
            str(weight.dtype).removeprefix("torch."),
        )
    return None


def _replace(program: Program, site: LinearSite, weight: Tensor) -> None:
    """Make a linear read another weight (N, K)."""
    replace_constant(program, site.node, site.weight, (weight.T if site.transposed else weight).contiguous())


def _checked(mask: Tensor, site: LinearSite) -> Tensor:
    if mask.shape != (site.n, site.k):
        of = f"the weight of {site.site} is ({site.n}, {site.k})"
        raise UsageError(f"A mask of {tuple(mask.shape)} is given where {of}: a mask for another model?")
    return mask
