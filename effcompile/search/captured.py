"""The model as a program to plan for: captured, its attentions in normal form, and proven to compute what the
model does.
"""

from __future__ import annotations

import inspect
from dataclasses import replace

from effcompile.backends import load_backend, usable_backends
from effcompile.capture import capture, verify_capture, without_needless_guards, without_unproven_ones
from effcompile.capture.mends import MOST_GATHERED
from effcompile.core.errors import CaptureError
from effcompile.core.findings import Equals, Of
from effcompile.core.reasons import Reason, Unsupported
from effcompile.core.units import format_error
from effcompile.ir.program import Program
from effcompile.ir.values import check_counts, check_values
from effcompile.runtime.inputs import as_captured
from effcompile.search.request import Task
from effcompile.sites.attention.normalise import normalised

#: The check at the sizes that were traced, and what helps where it fails, or where only another size's does.
_EXAMPLE = "example"
_OF_TRACING = (
    "With these inputs the model computes something else where it is traced: it branches on being traced, or "
    "on the values of a mask. Of a Hugging Face model try model.set_attn_implementation('eager')."
)
_OF_SIZES = "Capture it with static shapes (--static, dynamic=False)."
#: Bytes of experts' weights whose copies cost little: a graph that has them is open to all backends.
_LITTLE = 1 << 24
#: `Program.left` of a program whose attentions stay as the model writes them.
LEFT_AS_WRITTEN = {
    "": Unsupported("fused, it rounds otherwise, and this model makes more of that than an exact plan allows")
}


def in_normal_form(task: Task) -> Program:
    """The captured program, its attentions one node each, with the user's calibration inputs.

    Raises:
        CaptureError, InputsError: it cannot be captured, or calibration inputs are others than the example.
    """
    with task.request.progress.step("capture"):
        return _with_calibration(normalised(_captured(task)), task)


def as_written(task: Task) -> Program:
    """The captured program, its attentions as the model writes them: where these in normal form do not
    verify.
    """
    return _with_calibration(replace(_captured(task), left=LEFT_AS_WRITTEN), task)


def verified(task: Task) -> tuple[Program, tuple[Reason, ...]]:
    """The program, proven to compute what the model does, and a note saying so.

    Raises:
        CaptureError: the captured graph differs from the model (a mask or a size baked into it).
    """
    program = in_normal_form(task)
    with task.request.progress.step("verify the capture"):
        checks = verify_capture(program, task.model)
        if not all(check.passed for check in checks):
            # top-k routing turns a difference in rounding into another expert
            program = as_written(task)
            checks = verify_capture(program, task.model)
    for check in checks:
        if not check.passed:
            raise CaptureError(
                f"The captured graph of {program.name} differs from the model on {check.name}: relative "
                f"error {format_error(check.error)}{f' ({check.note})' if check.note else ''}. "
                f"{_OF_TRACING if check.name == _EXAMPLE else _OF_SIZES}"
            )
    program = without_unproven_ones(without_needless_guards(program, task.model), task.model)
    return program, (Equals(inputs=tuple(Of(check.name, check.note) for check in checks)),)


def _captured(task: Task) -> Program:
    request = task.request
    named = request.plan.backend if request.plan is not None else request.backend
    return capture(task.model, task.args, task.kwargs, dynamic=request.dynamic, gathered=_gathered(named))


def _gathered(named: str | None) -> int:
    """Bytes of experts' weights that the graph may copy, for backends that multiply no tokens in groups.

    For those that do a copy is a loss: a matrix is written and read for every token, which took ten times as
    long as the model itself.
    """
    backends = usable_backends(None)[0] if named is None else [load_backend(named)]
    if all(getattr(each, "groups_tokens", False) for each in backends):
        return 0
    return _LITTLE if any(getattr(each, "groups_tokens", False) for each in backends) else MOST_GATHERED


def _with_calibration(program: Program, task: Task) -> Program:
    """The program with the user's calibration inputs, positional and by keyword as at capture.

    Raises:
        InputsError: others than the example has. GuardError: other values where the example's are fixed.
    """
    signature = inspect.signature(task.model.forward)
    given = [as_captured(program, signature, tuple(a), kw) for a, kw in task.request.calibration or ()]
    for args, kwargs in given:
        found = zip(program.flat_inputs(args, kwargs), program.flat_inputs(), strict=False)
        for spec, (tensor, planned) in zip(program.inputs, found, strict=False):
            if spec.values is not None:
                check_values(f"calibration: {spec.name}", tensor, planned)
            check_counts(f"calibration: {spec.name}", tensor, spec.counts)
    return replace(program, calibration=tuple(given))
