"""Writers of one folder take turns, readers get whole ones, and the user's files survive; tests/fuzz kills
writers everywhere.
"""

import fcntl
import os
import signal
import threading
from pathlib import Path

import pytest

from effcompile.core import disk, folders
from effcompile.core.disk import locked
from effcompile.core.errors import UsageError
from effcompile.core.folders import check_replaceable, check_writable, place_of, read_steadily, replacing

OURS = {"ours.txt"}


def write(folder: Path, text: str) -> None:
    with replacing(folder, lambda _: OURS) as new:
        (new / "ours.txt").write_text(text)


def text_of(folder: Path) -> str:
    return (folder / "ours.txt").read_text()


def is_free(folder: Path) -> bool:
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(handle)
    return True


@pytest.fixture(params=["exchanged", "renamed twice"])
def out(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    if request.param == "renamed twice":
        monkeypatch.setattr(folders, "_exchange", lambda a, b: False)
    return tmp_path / "out"


def test_where_there_are_no_locks_a_writer_removes_its_own(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "fcntl", None)
    for text in ("first", "second", "third"):
        write(out, text)
        assert read_steadily(out, text_of) == text
    assert os.listdir(out.parent) == ["out"]


def test_a_lock_that_is_never_given_back_does_not_stop_a_save(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "_PATIENCE", 0.01)
    handle = os.open(out.parent, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    try:
        write(out, "first")
        write(out, "second")
        assert read_steadily(out, text_of) == "second"
    finally:
        os.close(handle)
    assert os.listdir(out.parent) == ["out"]


def test_nobody_else_switches_while_a_writer_does(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the check for strangers and the end of the switch the folder above is locked, and free at the
    end.
    """
    write(out, "first")
    real, seen = folders._put, []

    def put(whole: Path, target: Path) -> None:
        seen.append(is_free(out.parent))
        real(whole, target)

    monkeypatch.setattr(folders, "_put", put)
    write(out, "second")
    assert seen == [False]
    assert is_free(out.parent)


def test_a_file_put_into_the_old_folder_at_the_last_moment_is_kept(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(out, "first")
    real = folders._put

    def put(whole: Path, target: Path) -> None:
        (target / "notes.txt").write_text("mine")
        real(whole, target)

    monkeypatch.setattr(folders, "_put", put)
    write(out, "second")
    assert {path.name: path.read_text() for path in out.iterdir()} == {
        "ours.txt": "second",
        "notes.txt": "mine",
    }
    assert os.listdir(out.parent) == ["out"]
    with pytest.raises(UsageError, match=r"notes\.txt"):
        write(out, "third")
    assert text_of(out) == "second"


def test_a_reader_that_lost_a_few_times_lets_no_writer_in(out: Path) -> None:
    write(out, "first")
    seen: list[str] = []
    writers: list[threading.Thread] = []

    def read(place: Path) -> str:
        seen.append(text_of(place))
        if is_free(out.parent):
            write(out, f"{len(seen)} later")
        else:
            writers.append(threading.Thread(target=write, args=(out, "last")))
            writers[0].start()
            writers[0].join(0.05)
        return seen[-1] + text_of(place)

    assert read_steadily(out, read) == "3 later3 later"
    assert seen == ["first", "1 later", "2 later", "3 later"]
    writers[0].join()
    assert read_steadily(out, text_of) == "last"


def test_an_old_folder_that_vanishes_while_it_is_looked_for(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = out.with_name(f"{folders._prefix(out)}1234{folders._OLD}")
    monkeypatch.setattr(folders, "_beside", lambda target: [gone])
    assert place_of(out) == out


def test_a_forked_child_does_not_keep_the_lock(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    with locked(tmp_path):
        child = os.fork()
        if child == 0:
            os.close(writing)
            os.read(reading, 1)
            os._exit(0)
    assert is_free(tmp_path)
    os.close(writing)
    os.waitpid(child, 0)
    os.close(reading)


def test_a_killed_process_does_not_keep_the_lock(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        with locked(tmp_path):
            os.write(writing, b"x")
            signal.pause()
    os.read(reading, 1)
    assert not is_free(tmp_path)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert is_free(tmp_path)


def test_a_name_that_is_too_long_is_told_before_the_work(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"too long\. Give another name"):
        check_replaceable(tmp_path / ("x" * 300), lambda folder: set())


def test_a_folder_below_a_file_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    check_writable(tmp_path / "not" / "yet" / "there")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(UsageError, match=r"is a file\. Give a folder"):
            check_writable(path)
