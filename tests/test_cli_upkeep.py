"""The commands about effcompile itself, names that are checked before torch is loaded, and what a saved plan
answers by itself.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import effcompile
from effcompile import cli
from effcompile.backends import BACKENDS as REAL_BACKENDS
from effcompile.core import names
from effcompile.core.errors import UnknownNameError
from effcompile.passes import OPTIONAL, PASSES, TRAINING_PASSES


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stopped:
        cli.main([str(a) for a in arguments])
    out, err = capsys.readouterr()
    return int(stopped.value.code or 0), out, err


def test_names_are_those_of_the_registries() -> None:
    assert list(names.INFERENCE_PASSES) == list(PASSES)
    assert list(names.TRAINING_PASSES) == list(TRAINING_PASSES)
    assert list(names.BACKENDS) == list(REAL_BACKENDS)
    assert names.OPTIONAL == OPTIONAL


@pytest.mark.parametrize("given", ["quantise", "no-merg", "quantise.group_size=64", "foo=1"])
def test_a_pass_that_there_is_none_of(given: str) -> None:
    with pytest.raises(UnknownNameError):
        names.check_passes([given])


@pytest.mark.parametrize("given", ["quantize", "no-merge", "quantize.group_size=64", "checkpoint"])
def test_a_pass_that_there_is(given: str) -> None:
    names.check_passes([given])


@pytest.mark.parametrize(
    "wrong",
    [
        ["nothing.py"],
        ["{file}", "--pass", "foo"],
        ["{file}", "--backend", "foo"],
        ["{file}", "--shape", "8"],
        ["{file}", "--target", "foo"],
    ],
)
def test_what_is_wrong_is_said_before_torch_is_loaded(wrong: list[str], tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text("raise SystemError('not to be run')")
    arguments = [word.format(file=tmp_path / "model.py") for word in wrong]
    code = (
        "import sys; from effcompile.cli import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit as stopped: assert stopped.code == 2, stopped.code\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "plan", *arguments], check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_passes_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "passes")
    assert status == 0
    assert all(name in out for name in (*PASSES, *TRAINING_PASSES, *REAL_BACKENDS))
    listed = json.loads(run(capsys, "passes", "--json")[1])
    assert [entry["name"] for entry in listed["training"]] == list(TRAINING_PASSES)
    assert (
        next(entry for entry in listed["inference"] if entry["name"] == "quantize")["options"]["group_size"]
        == "32"
    )


def test_the_cache_is_shown_and_removed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = tmp_path / "cache"
    monkeypatch.setenv("EFFCOMPILE_CACHE", str(folder))
    assert run(capsys, "cache", "size")[1].startswith("0 B in 0 files")
    (folder / "native").mkdir(parents=True)
    (folder / "native" / "kernel.so").write_bytes(b"1234")
    (folder / "calibration-0.json").write_bytes(b"12")
    assert run(capsys, "cache", "dir")[1].strip() == str(folder)
    assert json.loads(run(capsys, "cache", "size", "--json")[1]) == {
        "dir": str(folder),
        "files": 2,
        "bytes": 6,
        "removed": False,
    }
    assert run(capsys, "cache", "clean")[0] == 0
    assert list(folder.iterdir()) == []
    assert run(capsys, "cache", "clean")[0] == 0


def test_all_that_is_kept_is_cleaned(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Every name that a source puts into the cache's folder."""
    kept = re.compile(r'cache_folder\(\) / f?"([^"{]+)')
    texts = (file.read_text() for file in sorted(Path(effcompile.__file__).parent.rglob("*.py")))
    names = {name for text in texts for name in kept.findall(text)}
    assert {"agreements", "races", "native"} <= names
    monkeypatch.setenv("EFFCOMPILE_CACHE", str(tmp_path))
    for name in names:
        (tmp_path / name).write_text("kept")
    assert run(capsys, "cache", "clean")[0] == 0
    assert list(tmp_path.iterdir()) == []


def test_a_cache_that_is_a_folder_of_others_is_left_alone(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("EFFCOMPILE_CACHE", str(tmp_path))
    (tmp_path / "thesis.tex").write_text("mine")
    status, _, err = run(capsys, "cache", "clean")
    assert status == 2
    assert "thesis.tex" in err
    assert (tmp_path / "thesis.tex").exists()


def test_a_plan_of_a_newer_version_says_to_update(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(json.dumps({"format": "effcompile-plan", "version": 999}))
    status, _, err = run(capsys, "explain", tmp_path)
    assert status == 2
    assert "Update effcompile" in " ".join(err.split())
