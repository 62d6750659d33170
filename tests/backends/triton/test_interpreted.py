"""Runs the tests in interpreted/, in processes of their own: whether triton compiles or interprets is fixed
when it is imported, and some register kernels for good.
"""

import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from fresh_process import Forks, forks

FOLDER = Path(__file__).parent / "interpreted"
FILES = sorted(FOLDER.glob("test_*.py"))
SCRIPT = """
import contextlib, io, json, pytest, sys
with contextlib.redirect_stdout(io.StringIO()) as printed:
    code = pytest.main(["-q", "-p", "no:cacheprovider", "-p", "no:xdist", sys.argv[1]])
print("ANSWER" + json.dumps([code, printed.getvalue()]))
"""


@pytest.fixture(scope="module")
def interpreting() -> Iterator[Forks]:
    pytest.importorskip("triton")
    with ExitStack() as started:
        with pytest.MonkeyPatch.context() as patch:
            for name in [name for name in os.environ if name.startswith("PYTEST_")]:
                patch.delenv(name)
            patch.setenv("TRITON_INTERPRET", "1")
            patch.setenv("OMP_NUM_THREADS", "1")
            found = started.enter_context(forks(SCRIPT, ("all_imported",), FOLDER))
        yield found


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem.removeprefix("test_"))
def test_in_the_interpreter(interpreting: Forks, file: Path) -> None:
    code, printed = interpreting.answer(str(file))
    assert code == 0, printed[-10000:]
