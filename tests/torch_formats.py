"""Formats that torch may lack on the machine at hand: int8 where products are cut at 16 bits, bf16 where
oneDNN has none.
"""

from __future__ import annotations

from typing import Any

import pytest
from form_names import held

from effcompile.backends.torch import numerics
from effcompile.ir.formats import FP32


def lacking(name: str) -> str | None:
    """Why torch's CPU kernels have no such linear here; None where they have."""
    if name == FP32.name:
        return None
    reason = numerics.why_not(held(name), 128, 128, 128) or numerics.not_here(held(name))
    return None if reason is None else str(reason)


def where_there(name: str, *more: Any, value: object = None, id: str | None = None) -> Any:
    """A parameter of a test, the name or another value, which is skipped, with the reason, where torch lacks
    the format.
    """
    reason = lacking(name)
    skipped = pytest.mark.skipif(reason is not None, reason=reason or "")
    return pytest.param(name if value is None else value, *more, marks=skipped, id=id)
