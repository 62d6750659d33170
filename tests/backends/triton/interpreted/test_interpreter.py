"""The mend of triton's interpreter: nothing known to be wrong is wrong here."""

import os
import subprocess
import sys

from effcompile.backends.triton.kernels.checks import defects


def test_the_mended_interpreter_has_no_known_defect() -> None:
    assert defects() == ()


def test_the_self_test_finds_the_defects_of_the_stock_interpreter() -> None:
    """A self-test that cannot fail is worth nothing: unmended, the bf16 dot, sum and casts must show."""
    code = "from effcompile.backends.triton.kernels.checks import defects; print(*defects(), sep='\\n')"
    found = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    for defect in (
        "bf16 dot",
        "bf16 +",
        "bf16 sum",
        "float32 to torch.bfloat16",
        "float32 to torch.float8_e4m3fn",
    ):
        assert defect in found.stdout
