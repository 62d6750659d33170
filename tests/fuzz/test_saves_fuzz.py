"""A save that dies anywhere leaves the old artifact or the new one, never a mix, and the next save leaves
nothing of it behind.

The oracle knows nothing of how a save is made: it kills a saving process before each of its system calls (as
CrashMonkey takes every prefix of a workload), reads, saves again, and looks at what is in the folders.
"""

import itertools
import os
import random
import signal
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fuzz_settings import cases
from killed import killed_at

from effcompile.core import folders
from effcompile.core.cost import Cost
from effcompile.core.errors import UsageError
from effcompile.core.folders import read_steadily
from effcompile.core.goal import Goal
from effcompile.ir import saved
from effcompile.ir.figures import Certificate, Totals
from effcompile.ir.plan import Decision, Plan

MINE = "the user's own"


def a_plan(name: str) -> Plan:
    cost = Cost(seconds=2e-3, weight_bytes=4096)
    taken = Decision(
        site="a", kind="linear", option="fp32", baseline="fp32", by="quantize", cost=cost, baseline_cost=cost
    )
    proof = Certificate(
        status="only one alternative",
        objective=1.0,
        bound=1.0,
        gap=0.0,
        sites=1,
        alternatives=1,
        seconds=0.0,
        solver="z3",
    )
    totals = Totals(seconds=2e-3, weight_bytes=4096)
    return Plan(
        model=name, fingerprint="f", parameters=1, goal=Goal(), target="auto", target_line="2 cores",
        backend="onnxruntime", decisions=(taken,), declined=(), certificate=proof, baseline=totals,
        predicted=totals,
    )  # fmt: skip


def save(name: str, folder: Path, *, parts: int = 2) -> None:
    """An artifact of several files, as big ONNX models and OpenVINO's are, and a report."""

    def artifact(new: Path) -> list[Path]:
        files = [new / f"part{i}.bin" for i in range(parts)]
        for file in files:
            file.write_bytes(f"{name} {file.name}".encode() * 500)
        return files

    saved.save(
        a_plan(name), folder, artifact=artifact, beside={"report.html": f"<title>effcompile · {name}</title>"}
    )


def read(folder: Path) -> str:
    """The name of what is saved there, all of whose files are its own."""

    def opened(place: Path) -> tuple[str, dict[str, bytes]]:
        plan = Plan.load(place / "plan.json")
        saved.check_artifact(plan, place)
        try:
            return plan.model, {name: (place / name).read_bytes() for name in plan.artifact}
        except FileNotFoundError as error:
            raise UsageError("replaced meanwhile: to be read again") from error

    model, contents = read_steadily(folder, opened)
    assert contents
    for name, content in contents.items():
        assert content == f"{model} {name}".encode() * 500
    return model


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.fixture
def fast(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory where there is one: thousands of fsync would take minutes."""
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=memory, prefix="effcompile-test-") as folder:
        yield Path(folder)


@pytest.fixture(params=["exchanged", "renamed twice"])
def parent(request: pytest.FixtureRequest, fast: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a file of the user's; on systems that can exchange two names in one step, and
    on others.
    """
    if request.param == "renamed twice":
        monkeypatch.setattr(folders, "_exchange", lambda a, b: False)
    (fast / "notes.txt").write_text(MINE)
    return fast


def prefixes(
    action: Callable[[], object], prepare: Callable[[], None], check: Callable[[], None], stride: int = 1
) -> int:
    """`check` after every prefix of the action's system calls, or every few; returns how many there were."""
    for count in itertools.count():
        prepare()
        killed = killed_at(count * stride, action)
        check()
        if not killed:
            return count
    raise AssertionError


def test_every_prefix_of_a_save_over_an_old_one(parent: Path, tally: Counter[str]) -> None:
    folder, seen = parent / "out", Counter[str]()

    def prepare() -> None:
        save("old", folder, parts=3)

    def check() -> None:
        seen[read(folder)] += 1
        assert (parent / "notes.txt").read_text() == MINE
        save("third", folder, parts=1)
        assert read(folder) == "third"
        assert names(parent) == {"out", "notes.txt"}
        assert names(folder) == {"part0.bin", "plan.json", "report.html"}

    count = prefixes(lambda: save("new", folder), prepare, check)
    tally["files: prefixes of a save"] += count
    assert count > 40
    assert set(seen) == {"old", "new"}
    assert min(seen.values()) > 5  # kills before and after the switch


def test_every_prefix_of_a_first_save(fast: Path, tally: Counter[str]) -> None:
    """Names are exchanged only where a folder was before."""
    folder, made = fast / "below" / "out", [0, 0]

    def prepare() -> None:
        for path in sorted(folder.parent.rglob("*"), reverse=True) if folder.parent.exists() else []:
            path.rmdir() if path.is_dir() else path.unlink()
        made[1] = 0

    def check() -> None:
        try:
            assert read(folder) == "new"
            made[0] += 1
        except UsageError as error:
            if "Cannot read the plan" not in str(error):
                raise
        save("second", folder, parts=1)
        assert names(folder.parent) == {"out"}
        assert names(folder) == {"part0.bin", "plan.json", "report.html"}

    tally["files: prefixes of a save"] += prefixes(lambda: save("new", folder), prepare, check)
    assert made[0] > 0


def test_every_prefix_of_the_save_after_a_killed_one(parent: Path, tally: Counter[str]) -> None:
    """What a killed save left is itself removed by a save that is killed."""
    folder = parent / "out"
    step = [0]

    def prepare() -> None:
        save("old", folder)
        step[0] += 7
        killed_at(step[0] % 90, lambda: save("lost", folder))

    def check() -> None:
        assert read(folder) in ("old", "lost", "new")
        save("third", folder)
        assert names(parent) == {"out", "notes.txt"}

    tally["files: prefixes of a save"] += prefixes(
        lambda: save("new", folder), prepare, check, stride=cases(5, most=1)
    )


def test_a_single_file_is_old_or_new_at_every_prefix(fast: Path, tally: Counter[str]) -> None:
    path, seen = fast / "plan.json", Counter[str]()

    def check() -> None:
        seen[Plan.load(path).model] += 1
        a_plan("third").save(path)
        assert names(fast) == {"plan.json"}

    tally["files: prefixes of a save"] += prefixes(
        lambda: a_plan("new").save(path), lambda: void(a_plan("old").save(path)), check
    )
    assert set(seen) == {"old", "new"}


def void(_: object) -> None: ...


def test_all_is_on_the_disk_before_the_switch(parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A power cut keeps what was brought to the disk: every file whole before its folder is, and the folder
    before it is renamed.
    """
    folder, synced = parent / "out", {}
    real_sync, real_put = os.fsync, folders._put

    def fsync(handle: int) -> None:
        status = os.fstat(handle)
        synced[status.st_ino] = (status.st_size, status.st_mtime_ns)
        real_sync(handle)

    def put(whole: Path, target: Path) -> None:
        for path in (whole, *whole.iterdir()):
            status = path.stat()
            assert synced[status.st_ino] == (status.st_size, status.st_mtime_ns), path.name
        synced.clear()
        real_put(whole, target)

    save("old", folder)
    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(folders, "_put", put)
    save("new", folder)
    assert parent.stat().st_ino in synced  # the switch itself, before the old folder is removed


@pytest.mark.parametrize("writers", [1, 2])
def test_readers_beside_writers_that_are_killed_see_whole_ones(
    parent: Path, writers: int, tally: Counter[str]
) -> None:
    folder, dice = parent / "out", random.Random(writers)
    save("first", folder)

    def writing(name: str) -> int:
        child = os.fork()
        if child == 0:
            try:
                for i in range(10_000):
                    save(name, folder, parts=1 + i % 3)
            finally:
                traceback.print_exc()
                os._exit(1)
        return child

    for _ in range(cases(15, most=200)):
        children = [writing(f"writer{i}") for i in range(writers)]
        until = time.monotonic() + dice.uniform(0.002, 0.1)
        try:
            while time.monotonic() < until:
                assert read(folder).startswith(("first", "writer"))
                tally["files: reads beside writers"] += 1
        finally:
            for child in children:
                os.kill(child, signal.SIGKILL)
            ends = [os.waitpid(child, 0)[1] for child in children]
        assert all(map(os.WIFSIGNALED, ends)), "a writer failed"
        tally["files: writers killed"] += writers
        assert read(folder).startswith(("first", "writer"))
    save("last", folder)
    assert names(parent) == {"out", "notes.txt"}
    assert read(folder) == "last"
