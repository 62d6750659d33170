"""The comparisons that a GPU's kernels go through pass in the mended interpreter, and find a kernel that is
wrong.
"""

from __future__ import annotations

from importlib import import_module

import pytest
import torch

from effcompile.backends.triton import proof
from effcompile.backends.triton.proof_cases import CASES
from effcompile.ops import rows as operators


@pytest.mark.parametrize("family", [name for name in CASES if not name.startswith("attention")])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_right_kernels_pass(family: str, dtype: str) -> None:
    import_module(f"effcompile.backends.triton.{family}").register("cpu")
    verdict = proof._compared(family, dtype, 0, "cpu")
    assert verdict.reason is None and 0 <= verdict.error <= verdict.limit and verdict.case


def test_attention_passes() -> None:
    import_module("effcompile.backends.triton.attention").register("cpu")
    assert [
        proof._compared("attention", "bfloat16", part, "cpu").reason
        for part in range(len(CASES["attention"]))
    ] == [None, None]
    verdict = proof._compared("attention_in_tiles", "bfloat16", 0, "cpu")
    assert verdict.reason is None and verdict.case


@pytest.mark.parametrize(
    "wrong", [lambda t: t * 1.02, lambda t: torch.full_like(t, torch.nan), lambda t: t.roll(1)]
)
def test_a_wrong_kernel_is_found(wrong: object, monkeypatch: pytest.MonkeyPatch) -> None:
    tiled = import_module("effcompile.backends.triton.rows")
    right = tiled.rotary
    operators.rotary.register_kernel("cpu")(lambda *args: wrong(right(*args)))  # type: ignore[operator]
    try:
        verdict = proof._compared("rows", "bfloat16", 0, "cpu")
        assert verdict.reason is not None and "rotation" in verdict.reason
    finally:
        operators.rotary.register_kernel("cpu")(right)
