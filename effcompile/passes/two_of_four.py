"""2:4 on sparse tensor cores: for weights that lie on a GPU, or are planned for one.

Elsewhere it is a pattern of single weights.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from effcompile.core.cost import Cost, Provenance
from effcompile.core.reasons import NotAllowed, NotMeasured, Reason, SparseSpeed, Unsupported
from effcompile.ir.formats import BF16, TWO_OF_FOUR, Form
from effcompile.ops import two_of_four
from effcompile.passes.base import Context, Option
from effcompile.passes.pricing import no_kernel, price
from effcompile.passes.sparse_forms import SparseForm
from effcompile.sites.parts import LinearSite

__all__ = ["offered", "on_cores"]

#: Backends that lower it.
BACKENDS = ("torch-eager", "torch-inductor", "triton")


def on_cores(context: Context, weight: Tensor) -> bool:
    """Whether products with this weight run on a CUDA GPU: it lies on one, or the target is one."""
    return weight.device.type == "cuda" or (
        context.target.device == "cuda" and weight.device.type in ("cpu", "meta")
    )


def offered(
    context: Context, site: LinearSite, weight: Tensor, form: SparseForm, by: str
) -> Option | tuple[Reason, Cost | None]:
    """2:4 as an option of a linear, or why it is none, with what it would cost.

    It is priced by the target's law, which gives it the published gain where arithmetic binds and nothing
    where bytes do, or as measured where the GPU is. A weight in fp32 is multiplied in bf16: that error is
    added.
    """
    half = weight.dtype in two_of_four.DTYPES
    cost, dense = (price(context, f"linear/{held.family}", *site.dims) for held in (TWO_OF_FOUR, BF16))
    error = _error(context, site, form, half)
    if (reason := _refusal(context, site, weight, form, half)) is not None:
        return reason, cost
    if cost is None or dense is None:
        return _no_cores(context, TWO_OF_FOUR.name if cost is None else BF16.name), cost
    cost = replace(cost, weight_bytes=two_of_four.stored_bytes(site.n, site.k), error_squared=error or 0.0)
    eps = cost.seconds / form.density / dense.seconds
    speed = SparseSpeed(epsilon=eps, break_even=1 / form.density, bits=16, gains=True)
    wanted = context.goal.minimize == "memory" or context.goal.memory is not None
    if cost.seconds >= dense.seconds and not wanted:
        return replace(speed, gains=False), cost
    if error is None:
        return NotMeasured(also="" if half else "bf16, in which it multiplies"), cost
    if cost.provenance is Provenance.PUBLISHED:
        source = context.target.sources.get("gains", "its source is not given")
        speed = replace(speed, published=context.target.gains[TWO_OF_FOUR.family], source=source)
    return Option(form=Form(weights=replace(TWO_OF_FOUR, bits=16)), cost=cost, by=by, note=speed)


def _refusal(
    context: Context, site: LinearSite, weight: Tensor, form: SparseForm, half: bool
) -> Reason | None:
    """Why a linear has no such form, whatever it would cost; None if it has."""
    if context.backend not in BACKENDS:
        return no_kernel(context, f"linear/{TWO_OF_FOUR.family}", others=tuple(BACKENDS))
    if context.goal.exact and not half:
        return NotAllowed(because="it multiplies in bf16")
    return two_of_four.misfit(weight.dtype if half else torch.bfloat16, site.n, site.k)


def _error(context: Context, site: LinearSite, form: SparseForm, half: bool) -> float | None:
    """Squared, at the output: of what is pruned, and of bf16 where the model is in fp32.

    None where one of them was not measured.
    """
    pruned = 0.0 if form.given else context.sensitivity.get((site.site, form.format.name))
    rounded = 0.0 if half else context.sensitivity.get((site.site, BF16.name))
    return None if pruned is None or rounded is None else pruned + rounded


def _no_cores(context: Context, option: str) -> Reason:
    """Why the target has no price for it."""
    if context.target.laws or context.target.probe is not None:
        return no_kernel(context, f"linear/{option}")
    return Unsupported(
        "{name} has no sparse tensor cores on record: its file gives no [gains] for '2:4', or no bf16",
        (context.target.name,),
    )
