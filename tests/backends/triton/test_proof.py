"""Kernels are compared with PyTorch's before their first use: what is wrong or hangs is not used, and
verdicts are kept.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from effcompile.backends import triton as kernels
from effcompile.backends.triton import proof

PAIRS = [("rows", "bfloat16"), ("loss_head", "bfloat16"), ("attention", "float32")]


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("EFFCOMPILE_CACHE", str(tmp_path))


def played(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, body: str) -> Path:
    """Children run this instead of the comparison; what they were asked for is a line each of the file
    returned.
    """
    script, log = tmp_path / "child.py", tmp_path / "asked"
    lines = [
        "import json, os, sys",
        "pairs = [p for p in sys.argv[1:] if ':' in p]",
        f"open({str(log)!r}, 'a').write(' '.join(pairs) + '\\n')",
    ]
    script.write_text(
        "\n".join([*lines, "for pair in pairs:", "    family, dtype, part = pair.split(':')", f"    {body}"])
    )
    plain = proof.subprocess.Popen

    def start(command: list[str], **options: Any) -> Any:
        return plain([sys.executable, str(script), *command[3:]], **options)

    monkeypatch.setattr(proof.subprocess, "Popen", start)
    monkeypatch.setattr(proof, "_processes", lambda device, pairs: 1)
    return log


RIGHT = (
    "print(json.dumps(dict(family=family, dtype=dtype, part=int(part), case='c', error=1e-3, "
    "limit=1e-2)), flush=True)"
)


def test_what_ends_its_process_is_refused_and_the_others_are_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    played(monkeypatch, tmp_path, f"os.abort() if family == 'loss_head' else {RIGHT}")
    found = proof.prove(PAIRS, "cpu")
    assert [(v.family, v.dtype) for v in found] == PAIRS
    assert [v.reason is None for v in found] == [True, False, True]
    assert "ended without a result" in str(found[1].reason)


def test_what_hangs_is_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    played(monkeypatch, tmp_path, "import time; time.sleep(60)")
    monkeypatch.setattr(proof, "_SECONDS", 0.0)
    (found,) = proof.prove(PAIRS[:1], "cpu")
    assert found.reason is not None


def test_verdicts_are_kept_until_something_changes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    log = played(monkeypatch, tmp_path, RIGHT)
    first = proof.prove(PAIRS, "cpu")
    assert proof.prove(PAIRS, "cpu") == first
    assert len(log.read_text().splitlines()) == 1
    proof.prove([*PAIRS, ("rows", "float32")], "cpu")
    assert log.read_text().splitlines()[-1] == "rows:float32:0"
    (kept,) = tmp_path.glob("proof-*.json")
    for damaged in ("", "{}", "[1]", '[{"family": 3}]', json.dumps([{"family": "rows"}])):
        kept.write_text(damaged)
        assert proof.prove(PAIRS, "cpu") == first
    monkeypatch.setattr(proof.torch, "__version__", "9.9")
    proof.prove(PAIRS, "cpu")
    assert len(log.read_text().splitlines()) == 8


def test_one_wrong_dtype_is_enough_to_leave_a_family_to_torch(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    played(
        monkeypatch,
        tmp_path,
        RIGHT.replace("))", ", reason='wrong' if pair == 'rows:float32:0' else None))", 1),
    )
    assert proof.proven(["rows", "states8"], "cpu") == {"rows": "wrong", "states8": None}


def test_a_refuted_family_is_not_registered_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    registered: list[str] = []
    monkeypatch.setattr(kernels, "unavailable", lambda: None)
    monkeypatch.setattr(kernels, "refuted", lambda device: {"rows": "relative error 2.0e-01"})
    monkeypatch.setattr(kernels, "origin", lambda: "tiles of a test")

    class Family:
        def __init__(self, name: str) -> None:
            self.name = name

        def register(self, device: str) -> None:
            registered.append(self.name.rpartition(".")[2])

    monkeypatch.setattr(kernels.importlib, "import_module", Family)
    said = [str(each) for each in kernels.use({"cuda"})]
    assert "rows" not in registered and "attention" in registered
    assert (
        "norms, gates and rotations are declined" in said[1]
        and "2.0e-01" in said[1]
        and "norms" not in said[0]
    )
