import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from effcompile.core import temporary

_CHILD = (
    "from effcompile.core.temporary import own_folder; print(own_folder('effcompile-mine-'), "
    "flush=True); input()"
)


def test_it_goes_with_its_process_and_with_the_next_one_after_a_kill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    environment = os.environ | {"TMPDIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    kept = temporary.own_folder("effcompile-mine-")
    dead, living, done = (
        subprocess.Popen(
            [sys.executable, "-c", _CHILD],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(3)
    )
    folders = [Path(child.stdout.readline().strip()) for child in (dead, living, done) if child.stdout]
    assert all(folder.stat().st_mode & 0o777 == 0o700 for folder in folders)
    dead.send_signal(signal.SIGKILL)
    dead.wait()
    done.communicate("end\n")
    assert [folder.exists() for folder in folders] == [True, True, False]
    again = temporary.own_folder("effcompile-mine-")
    assert [folder.exists() for folder in (*folders, kept, again)] == [False, True, False, True, True]
    living.communicate("end\n")
    for folder in (kept, again):
        temporary.remove(folder)
    assert list(tmp_path.iterdir()) == []


def test_one_that_another_process_takes_for_a_dead_ones_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between making it and saying that its process lives."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    made: list[str] = []
    make = tempfile.mkdtemp

    def taken_once(**asked: Any) -> str:
        made.append(make(**asked))
        if len(made) == 1:
            os.rmdir(made[0])
        return made[-1]

    monkeypatch.setattr(tempfile, "mkdtemp", taken_once)
    folder = temporary.own_folder("effcompile-mine-")
    assert [str(folder)] == made[1:] and folder.exists()
    temporary.remove(folder)
