"""What the passes share: the price of a kernel and the reasons for what cannot be or does not pay."""

from __future__ import annotations

from effcompile.core.cost import Cost
from effcompile.core.reasons import NoKernel, NotAllowed, NotFaster, Reason
from effcompile.ir.formats import FP32, WeightFormat
from effcompile.ir.plan import Declined
from effcompile.machine.target import Dims, KernelCall, linear_call
from effcompile.passes.base import Context

#: What a `site` of one refusal for all sites of a kind is called.
EVERYWHERE = ""

#: The backend name under which the unplanned model's operators are priced: `F.linear`, its weight not packed.
STOCK = "torch"


def price(context: Context, kernel: str, *dims: int, backend: str | None = None) -> Cost | None:
    """Seconds of one kernel on the context's backend, or another; None where it has no such kernel."""
    return price_call(context, KernelCall(kernel, dims), backend)


def price_linear(context: Context, held: WeightFormat, dims: Dims) -> Cost | None:
    """Seconds of a dense linear (M, K, N) with its weight in this format; None where the backend has no such
    kernel.
    """
    found = price_call(context, linear_call(context.stored if held == FP32 else held, dims))
    return found if found is not None or held != FP32 else price_call(context, linear_call(FP32, dims))


def price_call(context: Context, call: KernelCall, backend: str | None = None) -> Cost | None:
    """Seconds of one kernel on the context's backend, or another; None where it has no such kernel."""
    if backend is None and context.lacks(call) is not None:
        return None
    found = context.target.price(backend or context.backend, call)
    return (
        None
        if found is None
        else Cost(seconds=found[0], roof_seconds=context.target.roof(call), provenance=found[1])
    )


def no_kernel(context: Context, kernel: str, because: str = "", others: tuple[str, ...] = ()) -> NoKernel:
    """Why an option that the backend cannot run is not offered."""
    return NoKernel(backend=context.backend, kernel=kernel, because=because, others=others)


def no_call(context: Context, call: KernelCall) -> Reason:
    """Why an option that takes a kernel call is not offered where that has no price."""
    return context.lacks(call) or no_kernel(context, call.kernel)


def no_linear(context: Context, held: WeightFormat, dims: Dims) -> Reason:
    """Why a linear is not offered in a format that the backend cannot run it in."""
    return no_call(context, linear_call(held, dims))


def no_gain(cost: Cost, other: Cost, name: str) -> NotFaster:
    """Why an option that is slower than another and saves nothing is not offered."""
    return NotFaster(seconds=cost.seconds, against=other.seconds, than=name)


def no_error_allowed(kind: str, option: str, by: str) -> Declined:
    """One refusal for a kind of site where the goal is exact."""
    return Declined(site=EVERYWHERE, kind=kind, option=option, by=by, reason=NotAllowed())
