"""Libraries that a killed linker left in Inductor's cache are compiled again."""

from __future__ import annotations

import _ctypes
import os
from pathlib import Path

import pytest
import torch
from torch import fx

from effcompile.core.kernel_cache import mended, unfinished
from effcompile.ops.fused import Fused, TileLayout

WHOLE = Path(_ctypes.__file__).read_bytes()


def written(path: Path, content: bytes, age: float = 3600.0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    then = path.stat().st_mtime - age
    os.utime(path, (then, then))
    return path


@pytest.mark.parametrize(
    ("content", "age", "expected"),
    [
        (WHOLE, 3600, False),
        (WHOLE[:-1], 3600, True),
        (WHOLE[: len(WHOLE) // 2], 3600, True),
        (WHOLE[:40] + bytes(8) + WHOLE[48:], 3600, True),  # no table of sections yet
        (b"", 3600, True),
        (b"", 0, False),  # may still be written
        (WHOLE[:100], 0, False),
        (b"no library of this machine's kind" * 9, 3600, False),
    ],
)
def test_what_is_unfinished(tmp_path: Path, content: bytes, age: float, expected: bool) -> None:
    assert unfinished(written(tmp_path / "a.so", content, age)) is expected


def test_a_kernels_compilation_clears_the_cache_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    broken, whole = (
        written(tmp_path / "ab" / "broken.so", WHOLE[:500]),
        written(tmp_path / "cd" / "whole.so", WHOLE),
    )
    mended.cache_clear()
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output(
        (
            graph.call_function(
                torch.ops.aten.neg.default, (graph.call_function(torch.ops.aten.sin.default, (x,)),)
            ),
        )
    )
    layout = TileLayout((37, 3), (3, 1), torch.float32, "cpu")
    Fused(graph, [layout], [layout]).compile()
    assert whole.exists() and not broken.exists()
