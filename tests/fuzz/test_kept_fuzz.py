"""Hostile caches: what planning keeps for the next plan is taken where it is sound, and else as if it were
not there.

Calibrations and operator times are in test_files_fuzz.py, fronts of blocks in
tests/planner/test_remat_kept.py.
"""

from __future__ import annotations

import json
import math
import os
import random
from collections import Counter
from pathlib import Path

import pytest
from test_files_fuzz import hostile, in_a_child, seeds

from effcompile.core.errors import UsageError
from effcompile.core.files import read_kept, write_kept
from effcompile.core.trust import distrust_file
from effcompile.estimate import kept as errors
from effcompile.estimate.sensitivity import Sensitivity
from effcompile.machine import calibration
from effcompile.search.training import figures


def test_no_kept_sensitivity_makes_planning_fail(tmp_path: Path, tally: Counter[str]) -> None:
    path = tmp_path / "sensitivity.json"
    found = {("a", "w4"): 1e-3, ("a", "int8_channel"): 1e-6, ("b", "w4"): 0.0}
    errors._write(path, Sensitivity(errors=found, method="probed", draws=8, seconds=0.5))
    tree = json.loads(path.read_bytes())
    assert errors._read(path) is not None

    def case(dice: random.Random, counts: Counter[str]) -> None:
        counts["caches: sensitivities made hostile"] += 1
        path.write_bytes(hostile(tree, dice))
        kept = errors._read(path)
        if kept is None:
            counts["caches: taken as none"] += 1
            return
        read = kept.sensitivity()
        assert all(0 <= error <= 1e30 for error in read.errors.values())
        assert math.isfinite(math.fsum(read.errors.values())) and read.draws >= 0 and 0 <= read.seconds <= 1e6

    in_a_child(case, seeds(120, share=0.1), tally)


def test_what_others_may_write_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EFFCOMPILE_CACHE", str(tmp_path))
    before = os.umask(0)
    try:
        path = write_kept(tmp_path / "calibration.json", b"{}")
    finally:
        os.umask(before)
    assert read_kept(path, 10, "it") == b"{}", "what we write nobody else can, whatever the umask"
    assert figures.keep_figures({"aten.mm": figures.Measured(seconds=1e-4, workspace=0)}) is None
    assert figures.known_figures()
    for kept in (path, figures.figures_path()):
        kept.chmod(0o666)
    assert figures.known_figures() == {}
    with pytest.raises(UsageError, match="may be written by everybody: it is not read"):
        read_kept(path, 10, "it")
    found, note = calibration.load_or_none(path)
    assert found is None and "may be written by everybody" in str(note)
    if os.geteuid() == 0:
        path.chmod(0o600)
        os.chown(path, 12345, -1)
        assert "belongs to another user" in (distrust_file(path) or "")
