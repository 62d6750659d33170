"""What reads the prompt of a generation takes any number of any length, padded in any way."""

from __future__ import annotations

from effcompile.core.errors import CaptureError
from effcompile.ir.program import Program


def refuse_one_prompt(encoder: Program, model: str, *, sound: bool) -> None:
    """Refuse an encoder that was traced for its example alone.

    `sound`: that it reads has always one length.

    Raises:
        CaptureError: tells what the model's code fixes.
    """
    free = slice(0, 1 if sound else 2)
    for spec in encoder.inputs:
        sizes = [size for size in spec.shape[free] if isinstance(size, int)]
        if sizes or spec.values is not None:
            why = "".join(f" {reason}." for reason in encoder.fixed[:2])
            raise CaptureError(
                f"generate() gives the encoder of {model} prompts of any length, number and padding, and its "
                f"code fixes {spec.name} at the example's.{why} Let it generate as it is; its forward can be "
                "planned for one shape (mode='inference', dynamic=False)."
            )
