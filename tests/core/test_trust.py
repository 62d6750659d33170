import os
from pathlib import Path

import pytest

from effcompile.core.trust import distrust


@pytest.fixture
def library(tmp_path: Path) -> Path:
    folder = tmp_path / "cache" / "native"
    folder.mkdir(parents=True, mode=0o700)
    tmp_path.chmod(0o700)
    (folder.parent).chmod(0o755)
    file = folder / "kernel.so"
    file.write_bytes(b"code")
    file.chmod(0o700)
    return file


def test_the_users_own_is_trusted(library: Path) -> None:
    assert distrust(library) is None
    assert distrust(library.parent) is None


@pytest.mark.parametrize("level", [0, 1, 2, 3])
@pytest.mark.parametrize("mode", [0o777, 0o722, 0o703])
def test_what_others_may_write_is_not(library: Path, level: int, mode: int) -> None:
    path = (library, *library.parents)[level]
    path.chmod(mode)
    said = distrust(library)
    path.chmod(0o700)
    assert said is not None
    assert repr(str(path)) in said


def test_another_owner_is_not(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.geteuid() == 0:
        os.chown(library, 65534, 65534)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 65534)
    assert "belongs to another user" in str(distrust(library))


def test_a_link_is_not_and_a_folder_behind_a_link_is_looked_at_where_it_lies(
    library: Path, tmp_path: Path
) -> None:
    link = library.with_name("link.so")
    link.symlink_to(library)
    assert distrust(link) is not None
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    hidden = tmp_path / "open" / "native"
    library.parent.rename(hidden)
    library.parent.symlink_to(hidden)
    assert "open" in str(distrust(library))


def test_pipes_and_what_is_not_there_are_not(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert distrust(tmp_path / "pipe") is not None
    assert "No such file" in str(distrust(tmp_path / "absent"))
