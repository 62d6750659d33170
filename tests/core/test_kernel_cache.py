"""Libraries that a killed linker left in Inductor's cache are compiled again."""

from __future__ import annotations

import _ctypes
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import fx
from torch._inductor import config as inductor_config
from torch._inductor import cpu_vec_isa

from effcompile.core.kernel_cache import mended, unfinished
from effcompile.core.torch_compat_inductor import for_this_capability, freezing
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


def test_code_for_one_capability_is_not_taken_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's graph cache gave AVX-512's loops to a process with ATEN_CPU_CAPABILITY=avx2: off by 1e35."""
    monkeypatch.delenv("ATEN_CPU_CAPABILITY", raising=False)
    assert for_this_capability() == {}
    found = SimpleNamespace(bit_width=lambda: 256)
    monkeypatch.setattr(cpu_vec_isa, "pick_vec_isa", lambda: found)
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "avx2")
    assert for_this_capability() == {"cpp.simdlen": 256}
    with freezing():
        assert inductor_config.cpp.simdlen == 256
    monkeypatch.setattr(cpu_vec_isa, "pick_vec_isa", lambda: None)  # "default": no vectors at all
    assert for_this_capability() == {"cpp.simdlen": 1}
