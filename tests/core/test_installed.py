from __future__ import annotations

import shutil
from importlib import metadata
from pathlib import Path

import pytest

from effcompile.core.installed import entry_points

GROUP = "effcompile.test_group"


def put(folder: Path, name: str) -> Path:
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{GROUP}]\n{name} = there:{name}\n")
    return info


def found() -> list[str]:
    return sorted(entry.name for entry in entry_points(GROUP))


def test_packages_that_come_and_go_are_seen_and_others_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads, read = list[str](), metadata.entry_points
    monkeypatch.setattr(metadata, "entry_points", lambda group: reads.append(group) or read(group=group))
    assert found() == []
    monkeypatch.syspath_prepend(str(tmp_path))
    info = put(tmp_path, "theirs")
    assert found() == found() == found() == ["theirs"]
    put(tmp_path, "others")
    assert found() == ["others", "theirs"]
    shutil.rmtree(info)
    assert found() == ["others"] and len(reads) <= 4
