"""Other inputs of the example's kind: what the error is on those, and how far it may lie on ones that nobody
ran.

A plan is chosen because it is just within the limit on the inputs that it is compared at, and so the error of
others may be beyond (a ViT of 4 layers: of 12 among 40). On several inputs of one kind the errors have a
spread, and a one-sided tolerance bound says below which error a share of all such inputs lies, with a
confidence: the mean and k deviations more, where k is larger the fewer were seen (Natrella, Experimental
Statistics, 1963; NIST/SEMATECH e-Handbook of Statistical Methods, 7.2.6.3). Taken of logarithms: an error is
positive and a factor of the usual one.

Plans are made for the bound. A plan for which none better is there stays, as long as all inputs that were run
are within the limit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import NormalDist, fmean, median, stdev

import torch
from torch import fx

from effcompile.core.findings import AlikeErrors
from effcompile.core.goal import Goal
from effcompile.core.types import Inputs
from effcompile.estimate.inputs import generate_inputs
from effcompile.ir.figures import Check
from effcompile.ir.program import Program, dtype_of

aten = torch.ops.aten

#: Inputs at the most, and at the least: fewer tell no spread.
_MOST, _FEWEST = 16, 8
#: Seconds of the model that they may take: a plan is emulated and run on them a few times.
_SECONDS = 2.0
#: The share of inputs that is to be within the limit, and how sure of that.
_SHARE, _SURE = 0.95, 0.95
#: An error is counted as this share of the usual one at the least: how small some are tells nothing of the
#: largest.
_LEAST = 0.5
#: Of logarithms: beyond is no number.
_OVERFLOWS = 700.0
#: What chooses by numbers.
_CHOOSING = frozenset(
    overload
    for packet in (
        aten.topk, aten.sort, aten.argsort, aten.argmax, aten.argmin, aten.gt, aten.ge, aten.lt, aten.le,
        aten.round, aten.floor, aten.ceil, aten.sign, aten.bucketize, aten.searchsorted,
    )
    for overload in (getattr(packet, name) for name in packet.overloads())
)  # fmt: skip
#: With errors below this share of the limit no spread that was seen reaches it: nothing more is run.
_NEAR = 0.6
#: Cases that are of the example's kind (verify.references).
_OF_KIND = ("example", "calibration input")
#: Others than errors are measured on (seeds 0 and 1).
_SEED = 2


def inputs_alike(program: Program, seconds: float | None) -> list[Inputs]:
    """The user's further calibration inputs, or generated ones, where the model runs some within the time.

    seconds: of one call of the model; None where it is not known.
    """
    count = min(_MOST, int(_SECONDS / seconds)) if seconds else _FEWEST
    if count < _FEWEST:
        return []
    if program.calibration:
        return [(args, dict(kwargs)) for args, kwargs in program.calibration[1 : 1 + count]]
    found = generate_inputs(program, count, seed=_SEED, pads=False)
    return found if any(_differs(program, args, kwargs) for args, kwargs in found[:1]) else []


def _differs(program: Program, args: object, kwargs: object) -> bool:
    """Whether anything of an input was drawn."""
    both = zip(program.flat_inputs(args, kwargs), program.flat_inputs(), strict=True)  # type: ignore[arg-type]
    return any(not torch.equal(a, b) for a, b in both)


def near(errors: Mapping[str, float], goal: Goal, program: Program) -> bool:
    """Whether others of the example's kind may be beyond the limit with these errors of what was run, all of
    which is within: those at other sizes and of short texts have a spread of their own.

    errors: case → its error.
    """
    kind = max((error for name, error in errors.items() if name in _OF_KIND), default=0.0)
    least = 0.0 if _chooses(program) else _NEAR * goal.tolerance
    return not goal.exact and least < kind and max(errors.values(), default=0.0) <= goal.tolerance


def _chooses(program: Program) -> bool:
    """Whether the model takes places, or one of two ways, by comparing numbers: where they are almost equal a
    small error is another choice, on few inputs, and the error of all that follows is large.
    """
    return any(
        node.target in _CHOOSING and any(_is_float(operand) for operand in node.all_input_nodes[:1])
        for node in program.graph.nodes
    )


def _is_float(node: fx.Node) -> bool:
    dtype = dtype_of(node)
    return dtype is not None and dtype.is_floating_point


def likely(errors: Sequence[float]) -> float:
    """The error below which the share of all inputs of the kind lies, no smaller than those that were seen;
    of too few it is the largest of them.
    """
    largest = max(errors, default=0.0)
    if len(errors) < _FEWEST or median(errors) <= 0 or not math.isfinite(largest):
        return largest
    least = _LEAST * median(errors)
    logs = [math.log(max(error, least)) for error in errors]
    log = fmean(logs) + _deviations(len(errors)) * stdev(logs)
    return max(largest, math.exp(log)) if log < _OVERFLOWS else math.inf


def _deviations(count: int) -> float:
    """Above the mean of so many, for the share and the confidence."""
    share, sure = (NormalDist().inv_cdf(p) for p in (_SHARE, _SURE))
    a, b = 1 - sure**2 / (2 * (count - 1)), share**2 - sure**2 / count
    return (share + math.sqrt(share**2 - a * b)) / a


def together(found: Sequence[Check], goal: Goal) -> Check:
    """One check of all inputs of the kind: the largest error, and below which others are to be expected. The
    first that says more than a figure stands for all.
    """
    name = f"{len(found)} inputs like the example"
    errors = [check.error for check in found]
    worst = max(found, key=lambda check: check.error)
    note = worst.note
    if math.isfinite(worst.error) and len(found) >= _FEWEST:
        note = AlikeErrors(count=len(found), share=_SHARE, below=likely(errors))
    return Check(name=name, error=worst.error, limit=goal.tolerance, note=note)


def foreseen(checks: Sequence[Check]) -> float:
    """The largest error of all checks, or of other inputs by their spread."""
    below = (check.note.below for check in checks if isinstance(check.note, AlikeErrors))
    return max([*(check.error for check in checks), *below], default=0.0)


def holds_for_others(checks: Sequence[Check]) -> bool:
    """Whether the share of the inputs that nobody ran is within the limit, too, as far as any tell."""
    return all(check.note.below <= check.limit for check in checks if isinstance(check.note, AlikeErrors))
