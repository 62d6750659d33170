"""Compares a lowered model with the original, where outputs mean something: padded positions are left out."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from effcompile.capture import short_variants, variants
from effcompile.capture.mends import as_reference
from effcompile.capture.padding import padded_behind
from effcompile.capture.short import BATCH
from effcompile.capture.verify import relative_error
from effcompile.core.errors import EffcompileError
from effcompile.core.findings import Failed, Together
from effcompile.core.goal import Goal
from effcompile.core.reasons import Because
from effcompile.core.trees import leaves_with_path
from effcompile.core.types import Args, Inputs, Kwargs, Outputs
from effcompile.estimate.inputs import stress_inputs
from effcompile.ir.figures import Check
from effcompile.ir.program import Program
from effcompile.proof.alike import near, together
from effcompile.proof.rounding import doubled, exact_limit, in_float64, most_rounding
from effcompile.proof.spool import put_aside

Run = Callable[..., Any]

#: An output this small beside the usual one may be no more than rounding ...
_SMALL = 0.1
#: ... which it is told to be by the model's own: this share of the tolerance, or more.
_TOLD_APART = 0.25
#: Short texts that are verified in one call.
_SHORT_TEXTS = 8
#: Elements of an output by which its usual size is told.
_SAMPLED = 1 << 16


@dataclass(frozen=True, kw_only=True)
class Reference:
    """One input of the verification and what the original model returns for it.

    `rounding`: how far each output is from what the model computes in float64; nothing where it cannot. It
    runs the model when called. `most`: the largest error that it may explain. `usual`: the usual size of an
    element of the outputs. `rows`: output → the axes of its texts, where each of them has to be within the
    limit: a user may send it alone. `asked`: of one of several of the example's kind, which are judged
    together, the same with outputs: the model is run for them when it is called; None where it refuses it.
    """

    name: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    inputs: tuple[torch.Tensor, ...]
    outputs: Sequence[torch.Tensor]
    plain: tuple[Any, ...]
    rounding: Callable[[], Sequence[float]] = lambda: ()
    most: float
    usual: Callable[[], float] = lambda: 0.0
    rows: Mapping[int, Sequence[int]] = field(default_factory=dict)
    asked: Callable[[], Reference | None] | None = None

    @property
    def alike(self) -> bool:
        """Whether it is one of several of the example's kind."""
        return self.asked is not None

    def limit(self, goal: Goal, error: float) -> float:
        """The largest error to accept here."""
        return exact_limit(goal, error, self.most, self.most_rounding)

    def most_rounding(self) -> float:
        """Of the model's own in any output, as far as it may explain an error."""
        return max((min(each, self.most) for each in self.rounding()), default=0.0)

    def error(
        self, at: int, found: torch.Tensor, wanted: torch.Tensor, tolerance: float
    ) -> tuple[float, bool]:
        """(relative L2 error of an output, whether it is a share of the outputs' usual size and not of its
        own).

        That it is of one that is no more than what rounding leaves of a sum (the mean of a layer norm, which
        is zero): the model itself has it farther from float64's than may be told from right.
        """
        error = relative_error(found, wanted)
        if error <= tolerance or not wanted.is_floating_point() or _kind(found) != _kind(wanted):
            return error, False
        usual = self.usual() * math.sqrt(wanted.numel())
        if not float(wanted.norm()) < _SMALL * usual:  # most are not: the model is not run for them
            return error, False
        own = dict(enumerate(self.rounding())).get(at, 0.0)
        if wanted.dtype == torch.float64:  # of which no finer copy tells the rounding
            own = max(own, torch.finfo(wanted.dtype).eps * usual / max(float(wanted.norm()), 1e-300))
        apart = float((found.double() - wanted.double()).norm()) / usual
        rounded = own > _TOLD_APART * tolerance and apart < error
        return (apart if rounded else error), rounded


def references(
    program: Program,
    model: nn.Module,
    goal: Goal,
    calibration: Sequence[Inputs] = (),
    kin: Sequence[Inputs] = (),
) -> list[Reference]:
    """The original's outputs on the example, a second shape, a padded mask, and one calibration input; where
    an error is allowed on short texts, too, and padded as texts are (capture/padding.py); with a robust goal
    on stress inputs. `kin`: further ones of the example's kind (proof/alike.py), last.

    Computed once: a plan that is corrected and lowered again is compared with the same outputs.
    """
    cases = variants(program, () if goal.exact else padded_behind(program))
    short = [] if goal.exact else short_variants(program, _SHORT_TEXTS)
    cases += short
    cases += [("calibration input", args, dict(kwargs)) for args, kwargs in list(calibration)[:1]]
    stress = stress_inputs(program) if goal.robust else []
    found = _references(program, model, goal, [*cases, *stress])
    doubtful, axes = {name for name, _, _ in short}, _batch_axes(program)
    told = [
        replace(case, rows=axes) if case.name in doubtful else case
        for case in found
        if case.name not in doubtful or _tells(case)
    ]
    return [*told, *(_to_be_asked(program, model, goal, given) for given in kin)]


def alike_in(cases: Sequence[Reference]) -> list[Reference]:
    """Those of the example's kind, with what the model returns for them."""
    asked = (case.asked() for case in cases if case.asked is not None)
    return [case for case in asked if case is not None]


def _to_be_asked(program: Program, model: nn.Module, goal: Goal, given: Inputs) -> Reference:
    """An input of the example's kind, for which the model is not run yet: most plans are far from their
    limit.
    """
    (args, kwargs), name = given, "like the example"

    def asked() -> Reference | None:
        return next(iter(_references(program, model, goal, [(name, args, kwargs)])), None)

    flat = tuple(program.flat_inputs(args, kwargs))
    return Reference(
        name=name, args=args, kwargs=kwargs, inputs=flat, outputs=(), plain=(), most=0.0, asked=cache(asked)
    )


def _batch_axes(program: Program) -> dict[int, tuple[int, ...]]:
    """Output → the axes of its texts; nothing for one that has none."""
    found = {
        at: tuple(axis for axis, dim in enumerate(spec.shape) if dim == BATCH)
        for at, spec in enumerate(program.outputs)
    }
    return {at: axes for at, axes in found.items() if axes}


def _tells(case: Reference) -> bool:
    """Whether an error can be a share of each output: the deviation of one token is none, or no number."""
    floats = (output for output in case.outputs if output.is_floating_point())
    return all(bool(output.isfinite().all()) and bool(output.any()) for output in floats)


def stress_references(program: Program, model: nn.Module, goal: Goal) -> list[Reference]:
    """The original's outputs on stress inputs, where a goal that allows errors promises nothing of them."""
    return [] if goal.exact or goal.robust else _references(program, model, goal, stress_inputs(program))


def stressed(run: Run, program: Program, cases: Sequence[Reference], goal: Goal) -> tuple[Check, ...]:
    """How far the result is off under stress inputs; results that are not finite are left out, as are inputs
    that overflow the model.
    """
    found = (
        _check(run, program, case, goal)
        for case in cases
        if all(bool(t.isfinite().all()) for t in case.outputs)
    )
    return tuple(check for check in found if math.isfinite(check.error))


def _references(
    program: Program, model: nn.Module, goal: Goal, cases: Sequence[tuple[str, Args, Kwargs]]
) -> list[Reference]:
    exact = cache(partial(_in_float64, model, program, goal, cases))
    found: list[Reference] = []
    most, usual = most_rounding(model), cache(lambda: _usual_size(found))
    with as_reference(model):
        for name, args, kwargs in cases:
            try:
                outputs = model(*args, **kwargs)
            except Exception:  # an input of our making that the model refuses proves nothing
                continue
            inputs, read = tuple(program.flat_inputs(args, kwargs)), put_aside(_read(_tensors(outputs), goal))
            rounding = partial(_rounding, exact, name, read, _mask(program, inputs))
            plain = tuple(_plain(outputs))
            found.append(
                Reference(
                    name=name,
                    args=args,
                    kwargs=kwargs,
                    inputs=inputs,
                    outputs=read,
                    plain=plain,
                    rounding=rounding,
                    most=most,
                    usual=usual,
                )
            )
    return found


def _usual_size(cases: Sequence[Reference]) -> float:
    """Of an element, in the output that has the largest ones: the median of those that are not zero, for a
    mask's fill may be any number.
    """
    outputs = (output.flatten() for case in cases for output in case.outputs if output.is_floating_point())
    sizes = (output[:: len(output) // _SAMPLED + 1].abs() for output in outputs)
    told = (size[size.isfinite() & (size > 0)] for size in sizes)
    return max((float(size.median()) for size in told if len(size)), default=0.0)


def _in_float64(
    model: nn.Module, program: Program, goal: Goal, cases: Sequence[tuple[str, Args, Kwargs]]
) -> dict[str, list[torch.Tensor]]:
    """What a copy of the model in float64 returns, by case; a model that does not run so is left out."""
    found: dict[str, list[torch.Tensor]] = {}
    wide = in_float64(model, goal)
    if wide is None:
        return found
    try:
        with as_reference(wide), torch.no_grad():
            for name, args, kwargs in cases:
                args, kwargs = doubled((args, kwargs))
                found[name] = _read(_tensors(wide(*args, **kwargs)), goal)
    except Exception:  # dtypes that the model fixes: the plain limit holds
        return found
    return found


def _rounding(
    exact: Callable[[], dict[str, list[torch.Tensor]]],
    name: str,
    outputs: Sequence[torch.Tensor],
    mask: torch.Tensor | None,
) -> list[float]:
    """Relative error of each of the model's outputs against the float64 ones, padded positions left out."""
    truth = exact().get(name, [])
    if len(truth) != len(outputs):
        return []
    return [
        relative_error(_seen(a, mask).double(), _seen(b, mask).double())
        for a, b in zip(outputs, truth, strict=True)
    ]


def verify(run: Run, program: Program, cases: Sequence[Reference], goal: Goal) -> list[Check]:
    """One check per case: the largest relative L2 error of its outputs, and among short texts of any text in
    them, against the goal's tolerance; one of all inputs like the example, where it comes near it.

    run: called as a user calls the model, with each case's own arguments; returns what the model returns.
    """
    found = [_check(run, program, case, goal) for case in cases if not case.alike]
    if near({check.name: check.error for check in found}, goal, program) and (kin := alike_in(cases)):
        found.append(together([_check(run, program, case, goal) for case in kin], goal))
    return found


def explained(checks: Sequence[Check], cases: Sequence[Reference]) -> list[Check]:
    """The checks; the one that is farthest off says, too, where it is the model that cannot be told from
    itself: in float64 it is beyond the limit, as where it takes the first of an order of equal values.
    """
    bad = max(checks, key=lambda check: check.error)
    own = [each for case in cases if case.name == bad.name for each in case.rounding()]
    if bad.passed or not max(own, default=0.0) > bad.limit:
        return list(checks)
    said = Because(
        "the model itself is {error} off from its own result in float64: rounding decides what it chooses, "
        "as of an order of values that are equal, which random weights often give; trained weights and real "
        "inputs tell such values apart",
        (max(own),),
    )
    told = replace(bad, note=Together.of([*([bad.note] if bad.note else []), said]))
    return [told if check is bad else check for check in checks]


def distance(tensors: Sequence[torch.Tensor], program: Program, case: Reference, goal: Goal) -> float:
    """The largest relative L2 error of the tensors that a run gives in a case, padded positions left out;
    infinite for another number.
    """
    found, mask = _read(tensors, goal), _mask(program, case.inputs)
    if len(found) != len(case.outputs):
        return math.inf
    return max((error for error, _ in _errors(found, case, mask, goal)), default=0.0)


def _errors(
    found: Sequence[torch.Tensor], case: Reference, mask: torch.Tensor | None, goal: Goal
) -> list[tuple[float, bool]]:
    """Reference.error of each output, padded positions left out, or its worst text's where each counts."""
    errors = []
    for at, (a, b) in enumerate(zip(found, case.outputs, strict=True)):
        error, rounded = case.error(at, _seen(a, mask), _seen(b, mask), goal.tolerance)
        if at in case.rows and not rounded and math.isfinite(error) and _kind(a) == _kind(b):
            error = max(error, worst_row(a, b, case.rows[at]))
        errors.append((error, rounded))
    return errors


def worst_row(found: torch.Tensor, wanted: torch.Tensor, axes: Sequence[int]) -> float:
    """The largest ‖y − y₀‖ / ‖y₀‖ of an output's texts; one that is smaller than they are usually (by the
    root of their mean square) is taken as large as that: zeros have no share.

    Where texts are along several axes (CLIP's logits of each with each), a text's row counts, and so does its
    element of the diagonal, which is all that it returns alone.
    """
    if not wanted.is_floating_point() or not wanted.numel():
        return 0.0
    apart = found.double() - wanted.double()
    return max(_worst_share(_texts(apart, of), _texts(wanted, of)) for of in {tuple(axes[:1]), tuple(axes)})


def _texts(output: torch.Tensor, axes: Sequence[int]) -> torch.Tensor:
    """A row of each text, which is at the same place of each of the axes."""
    at = torch.arange(output.shape[axes[0]], device=output.device)
    return output.movedim(tuple(axes), tuple(range(len(axes))))[(at,) * len(axes)].reshape(len(at), -1)


def _worst_share(apart: torch.Tensor, wanted: torch.Tensor) -> float:
    off, size = (torch.linalg.vector_norm(t, dim=1, dtype=torch.float64) for t in (apart, wanted))
    usual = size.square().mean().sqrt()
    return float((off / size.clamp(min=usual)).max()) if usual > 0 else 0.0


def worst(checks: Sequence[Check]) -> float:
    """The largest error of all checks."""
    return max((check.error for check in checks), default=0.0)


def _check(run: Run, program: Program, case: Reference, goal: Goal) -> Check:
    failed = partial(Check, name=case.name, error=math.inf, limit=goal.tolerance)
    given = [tensor.clone() for tensor in case.inputs]
    try:
        with torch.no_grad():  # as the reference
            outputs = run(*case.args, **case.kwargs)
    except EffcompileError as failure:
        return failed(note=Failed(message=str(failure)))
    for spec, before, now in zip(program.inputs, given, case.inputs, strict=True):
        if not torch.allclose(before, now, rtol=0, atol=0, equal_nan=now.is_floating_point()):
            return failed(note=Because("it writes into its input {name}", (spec.name,)))
    found = _read(_tensors(outputs), goal)
    mask = _mask(program, case.inputs)
    if len(found) != len(case.outputs):
        return failed(note=Because("{} outputs instead of {}", (len(found), len(case.outputs))))
    # an output that was put aside is read, and let go
    kinds = zip(map(_kind, found), map(_kind, case.outputs), strict=True)
    if unlike := [(at, ours, theirs) for at, (ours, theirs) in enumerate(kinds) if ours != theirs]:
        return failed(
            note=Together.of([Because("output {} is {name} instead of {name}", each) for each in unlike])
        )
    if (plain := tuple(_plain(outputs))) != case.plain:
        return failed(
            note=Because(
                "beside the tensors it returns {name} instead of {name}", (str(plain), str(case.plain))
            )
        )
    errors = _errors(found, case, mask, goal)
    error = max((error for error, _ in errors), default=0.0)
    limit = case.limit(goal, error)
    hidden = mask is not None and not bool(mask.bool().all())
    notes = [Because("padded positions left out")] if hidden else []
    notes += (
        [Because("the model's own rounding is {error}", (case.most_rounding(),))]
        if limit > goal.tolerance
        else []
    )
    notes += [
        Because("output {} is zero but for rounding: its error is a share of the outputs' usual size", (at,))
        for at, (_, rounded) in enumerate(errors)
        if rounded
    ]
    return Check(name=case.name, error=error, limit=limit, note=Together.of(notes))


def _read(outputs: Sequence[torch.Tensor], goal: Goal) -> list[torch.Tensor]:
    """The positions that the goal says are read."""
    if goal.reads == "all":
        return list(outputs)
    return [output[:, -1:] if output.dim() == 3 else output for output in outputs]


def _seen(output: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """An output's rows at unpadded positions, where it has a (batch, seq) front like the mask's."""
    if mask is None or output.dim() < 3 or output.shape[:2] != mask.shape:
        return output
    return output[mask.bool()]


def _mask(program: Program, inputs: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """The padding mask among the inputs: 1 for a token, 0 for a pad."""
    for spec, tensor in zip(program.inputs, inputs, strict=True):
        if spec.name.endswith("attention_mask") and tensor.dim() == 2 and not tensor.is_floating_point():
            return tensor
    return None


def _kind(tensor: torch.Tensor) -> str:
    """What a result is beside its values, which an error would not show: 1 and 1.0 are alike, and so is what
    broadcasts.
    """
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _tensors(outputs: Outputs) -> list[torch.Tensor]:
    return [leaf.detach() for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, torch.Tensor)]


def _plain(outputs: Outputs) -> list[tuple[str, object]]:
    """What is no tensor among the outputs, each with its place."""
    leaves = leaves_with_path(outputs)
    return [(pytree.keystr(path), leaf) for path, leaf in leaves if not isinstance(leaf, torch.Tensor)]
