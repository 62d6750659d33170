"""How much each option of a step, and of an encoder before it, changes the logits."""

from __future__ import annotations

from collections.abc import Sequence

from effcompile.backends.base import Backend
from effcompile.capture.generation import GenerationStep
from effcompile.core.goal import Goal
from effcompile.estimate import kept
from effcompile.estimate.sensitivity import Sensitivity
from effcompile.passes import Pass
from effcompile.search.generation.cases import scored
from effcompile.search.generation.joined import (
    begins_with_image,
    inputs_with_eye,
    joined,
    joined_inputs,
    joined_with_eye,
)
from effcompile.search.generation.text import CalibrationText, as_inputs, sensed
from effcompile.search.pricing import is_had, measured_options, replaced_weights

#: Half of it for gradients: by one pass a plan's error was predicted within 7 %.
_SECONDS = 10.0
#: Kinds of sites whose forms a backend may have no kernel for.
_OF_BACKENDS = ("linear", "embedding", "attention")


def option_errors(
    step: GenerationStep,
    goal: Goal,
    passes: tuple[Pass, ...],
    texts: Sequence[CalibrationText],
    backends: Sequence[Backend],
) -> Sensitivity:
    """Error of every low-precision option at the logits of these texts.

    `passes`: that decide about any of the graphs. `backends`: what none of them has is not measured.
    """
    if goal.exact:
        return Sensitivity(errors={}, method="the goal allows no error")
    options, texts = measured_options(passes), sensed(texts)
    options = {
        kind: tuple(form for form in forms if kind not in _OF_BACKENDS or is_had(form, backends, kind))
        for kind, forms in options.items()
    }
    seeing = [text for text in texts if begins_with_image(step, text)]
    if seeing:
        program = joined_with_eye(step, seeing[0])
        inputs = [inputs_with_eye(step, text) for text in seeing]
    elif step.encoder is None:
        program = scored(step.program)
        inputs = [as_inputs(text, step.layout, program.kwargs) for text in texts]
    else:
        program, inputs = joined(step, texts[0]), [joined_inputs(step, text) for text in texts]
    weights = replaced_weights(passes, program)
    return kept.measured(program, inputs, options, weights=weights, budget_seconds=_SECONDS)
