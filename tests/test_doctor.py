"""`effcompile doctor`: what is right is told so, what is missing with what to do, and what is wrong is found
and fails the command.
"""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from effcompile import doctor, report
from effcompile.backends.torch import TorchEager
from effcompile.cli import main
from effcompile.core.errors import MissingPackageError
from effcompile.ops import int8_linear


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "BACKENDS", {"torch-eager": "", "openvino": ""})
    monkeypatch.setattr(doctor, "load_backend", load)


def load(name: str) -> TorchEager:
    if name == "openvino":
        raise MissingPackageError("openvino", "The backend openvino", "pip install 'effcompile[openvino]'")
    return TorchEager()


def statuses() -> dict[str, str]:
    return {found.part: found.status for found in doctor.examine()}


def test_a_sound_machine_and_what_it_has_not(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["doctor", "--json"])
    parts = {each["part"]: each for each in json.loads(capsys.readouterr().out)["parts"]}
    assert ended.value.code == 0
    assert {parts[name]["status"] for name in ("torch", "solver", "torch-eager", "cache")} == {"ok"}
    assert (
        parts["openvino"]["status"] == "absent"
        and "pip install" in parts["openvino"]["seen"] + parts["openvino"]["remedy"]
    )
    assert all(each["seconds"] >= 0 and each["seen"] for each in parts.values())
    if parts["C++ kernels"]["status"] == "ok":
        assert f"bytes are multiplied by {int8_linear.told()}" in parts["C++ kernels"]["seen"]


def test_a_backend_that_is_wrong_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = doctor.optimize

    def wrong(*args: Any, **asked: Any) -> Any:
        made = right(*args, **asked)
        return lambda x: made(x) + 1e-3

    monkeypatch.setattr(doctor, "optimize", wrong)
    assert statuses()["torch-eager"] == "wrong"


def test_a_solver_that_is_wrong_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.z3.Optimize, "maximize", doctor.z3.Optimize.minimize)
    assert statuses()["solver"] == "wrong"


def test_what_raises_is_wrong_and_the_rest_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    def raises(*args: object) -> bool:
        raise OSError("no such device")

    monkeypatch.setattr(torch.cuda, "is_available", raises)
    found = {each.part: each for each in doctor.examine()}
    assert found["GPU"].status == "wrong" and "no such device" in found["GPU"].seen
    assert found["cache"].status == "ok"


def test_a_cache_that_cannot_be_written_fails_the_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("EFFCOMPILE_CACHE", str(tmp_path / "file" / "cache"))
    monkeypatch.setattr(doctor, "BACKENDS", {})
    with pytest.raises(SystemExit) as ended:
        main(["doctor"])
    said = capsys.readouterr().out
    assert ended.value.code == 1 and "✘ cache" in said and "EFFCOMPILE_CACHE" in said and "1 wrong" in said


def test_the_page() -> None:
    page = io.StringIO()
    wrong = "causal in bfloat16: relative error 2.0e-01 against PyTorch's, more than 1.2e-02"
    rows = [
        ("solver", "ok", "z3 5.4.0", ""),
        ("openvino", "absent", "the package 'openvino' is not installed", "Install it"),
        ("attention", "wrong", wrong, "report it"),
    ]
    report.print_findings(rows, Console(file=page, width=60))
    assert page.getvalue() == (
        " part         seen\n"
        " ✔ solver     z3 5.4.0\n"
        " – openvino   the package 'openvino' is not installed\n"
        "              → Install it\n"
        " ✘ attention  causal in bfloat16: relative error 2.0e-01\n"
        "              against PyTorch's, more than 1.2e-02\n"
        "              → report it\n"
        "\n"
        "1 right, 1 not here, 1 wrong\n"
    )
