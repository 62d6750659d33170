"""Model → Program, and the proof that the two compute the same."""

from effcompile.capture.inference import capture
from effcompile.capture.verify import variants, verify_capture

__all__ = ["capture", "variants", "verify_capture"]
