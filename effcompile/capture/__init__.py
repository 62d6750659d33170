"""Model → Program (inference) or Step (training), and the proof that the two compute the same."""

from effcompile.capture.inference import capture
from effcompile.capture.ones import without_needless_guards, without_unproven_ones
from effcompile.capture.short import short_texts, short_variants
from effcompile.capture.training import capture_training
from effcompile.capture.verify import variants, verify_capture

__all__ = [
    "capture",
    "capture_training",
    "short_texts",
    "short_variants",
    "variants",
    "verify_capture",
    "without_needless_guards",
    "without_unproven_ones",
]
