"""What is free: the least of what the machine, control groups and the address space's limit leave."""

import subprocess
import sys
from pathlib import Path

import pytest

from effcompile.machine import memory


def test_this_process_is_resident_and_something_is_free() -> None:
    free = memory.free_bytes()
    assert memory.resident_bytes() > 1 << 20 and free is not None and free > 0


def group(folder: Path, limit: str, used: int, cache: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(limit)
    (folder / "memory.current").write_text(str(used))
    (folder / "memory.stat").write_text(f"anon 1\ninactive_file {cache}\n")


def test_control_groups_count_with_those_around_them(tmp_path: Path) -> None:
    group(tmp_path / "a", "1000", 700, 50)
    group(tmp_path / "a" / "b", "max", 300, 0)
    (tmp_path / "of").write_text("0::/a/b\n")
    assert [n for n in memory._of_groups(tmp_path, tmp_path / "of") if n is not None] == [350]
    group(tmp_path / "a" / "b", "400", 300, 20)
    assert sorted(n for n in memory._of_groups(tmp_path, tmp_path / "of") if n is not None) == [120, 350]


def test_control_groups_of_version_one(tmp_path: Path) -> None:
    folder = tmp_path / "memory" / "job"
    folder.mkdir(parents=True)
    for name, value in (("limit_in_bytes", 1000), ("usage_in_bytes", 900)):
        (folder / f"memory.{name}").write_text(str(value))
    (folder / "memory.stat").write_text("total_inactive_file 10\n")
    (tmp_path / "of").write_text("5:cpu,memory:/job\n3:pids:/job\n")
    assert [n for n in memory._of_groups(tmp_path, tmp_path / "of") if n is not None] == [110]


def test_without_control_groups_nothing_is_said(tmp_path: Path) -> None:
    assert list(memory._of_groups(tmp_path, tmp_path / "nowhere")) == []


@pytest.mark.skipif(sys.platform != "linux", reason="an address space's limit")
def test_a_limit_of_the_address_space_counts() -> None:
    script = (
        "import resource; from effcompile.machine import memory;"
        'resource.setrlimit(resource.RLIMIT_AS, (memory._of_process("vms") + (1 << 28),) * 2); '
        "print(memory.free_bytes() <= 1 << 28)"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, check=True
        ).stdout.strip()
        == "True"
    )
