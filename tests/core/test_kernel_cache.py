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
from effcompile.core.torch_compat_inductor import (
    _instruction_set_that_builds,
    compiling,
    for_this_capability,
    freezing,
)
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


class _Set:
    """An instruction set of Inductor that notes when it is built."""

    def __init__(self, name: str, builds: bool, built: list[str]) -> None:
        self.name, self.builds, self.built = name, builds, built

    def __str__(self) -> str:
        return self.name

    def __bool__(self) -> bool:
        self.built.append(self.name)
        return self.builds


def test_only_the_instruction_set_that_is_picked_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each compiles the vector headers of torch, a second of CPU, and the worse ones are never taken."""
    built: list[str] = []
    monkeypatch.delenv("ATEN_CPU_CAPABILITY", raising=False)
    monkeypatch.setattr(cpu_vec_isa, "x86_isa_checker", lambda: ["avx2", "avx512", "avx512_vnni"])
    names = {"avx512 avx512_vnni amx_tile": True, "avx512 avx512_vnni": False, "avx512": True, "avx2": True}
    sets = [_Set(name, builds, built) for name, builds in names.items()]
    monkeypatch.setattr(cpu_vec_isa, "supported_vec_isa_list", sets)
    every = cpu_vec_isa.valid_vec_isa_list
    _instruction_set_that_builds.cache_clear()
    try:
        with compiling():
            assert str(cpu_vec_isa.pick_vec_isa()) == "avx512"
        assert built == ["avx512 avx512_vnni", "avx512"]
        assert cpu_vec_isa.valid_vec_isa_list is every
        with inductor_config.patch({"cpp.simdlen": 256}), compiling():  # another than the best is asked for
            assert cpu_vec_isa.valid_vec_isa_list is every
    finally:
        _instruction_set_that_builds.cache_clear()
