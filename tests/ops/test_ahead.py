"""What is compiled ahead is what the kernels then load, and nothing is compiled twice."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
from torch import fx

from effcompile.core import torch_compat_inductor
from effcompile.core.errors import LoweringError
from effcompile.machine import native
from effcompile.ops import (
    ahead,
    bf16_attention,
    bf16_linear,
    cached_attention,
    few_rows,
    fp32_attention,
    fp32_linear,
    group_codes,
    group_native,
    int8_attention,
    int8_mlp,
    int8_native,
    int13_linear,
    loss_rows,
    row_program,
    rows_native,
    tape,
)
from effcompile.ops.fused import Fused, TileLayout
from effcompile.ops.instruction_sets import WORDS

EACH = (
    rows_native, few_rows, int8_native, int8_mlp, group_native, group_codes, int13_linear, bf16_attention,
    fp32_attention, cached_attention, int8_attention, fp32_linear, bf16_linear,
)  # fmt: skip
RUNNERS = (row_program._runner, tape._runner)


def test_it_is_what_the_kernels_load(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Path, Mapping[str, int], str]] = []
    compiled = native.compiled

    def noted(source: Path, defines: Mapping[str, int], isa: str) -> Path:
        asked.append((source, dict(defines), isa))
        return compiled(source, defines, isa)

    monkeypatch.setattr(native, "compiled", noted)
    if isinstance(rows_native.kernels.__wrapped__(), str):
        pytest.skip("no kernels are compiled here")
    for module in EACH:
        module.kernels.__wrapped__()  # those of bf16 or of VNNI are not everywhere
    for runner in RUNNERS:
        assert runner.__wrapped__() is not None

    def key(library: tuple[Path, Mapping[str, int], str]) -> tuple[str, frozenset[tuple[str, int]], str]:
        return library[0].name, frozenset(library[1].items()), library[2]

    everything = set(map(key, ahead.libraries(exact=False)))
    steps = set(map(key, ahead.libraries(exact=False, steps=True)))
    assert everything | steps == set(map(key, asked))  # one compares itself with another's
    assert {name for name, *_ in steps - everything} == {"cached_attention.cpp"}
    assert {name for name, *_ in everything - steps} <= {
        "fp32_attention.cpp", "fp32_linear.cpp", "attention_tiles.cpp", "int8_attention.cpp",
        "bf16_linear.cpp",
    }  # fmt: skip
    exact = set(map(key, ahead.libraries(exact=True)))
    assert {name for name, *_ in exact} == {
        "rows.cpp", "few_rows.cpp", "fp32_attention.cpp", "fp32_linear.cpp", "row_program.cpp", "tape.cpp",
    }  # fmt: skip
    assert exact < everything


@pytest.fixture
def slowly(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Files that were compiled, into an empty cache, by a compiler that takes its time."""
    monkeypatch.setenv("EFFCOMPILE_CACHE", str(tmp_path))
    made: list[str] = []

    def compile_slowly(command: Sequence[str], path: Path) -> None:
        made.append(path.name)
        time.sleep(0.2)
        path.write_bytes(b"")
        path.chmod(0o700)

    monkeypatch.setattr(native, "_compile", compile_slowly)
    return made


def test_who_needs_it_meanwhile_waits_for_it(slowly: list[str]) -> None:
    library = ahead.libraries(exact=True)[0]
    threads = [threading.Thread(target=native.compiled, args=library) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(slowly) == 1


@pytest.mark.skipif(not hasattr(os, "getpriority"), reason="no priorities of threads here")
def test_a_compiler_gives_way_to_who_started_it(slowly: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """On one of two cores it made each parallel loop of a forward wait."""
    mine, seen = os.getpriority(os.PRIO_PROCESS, 0), list[int]()

    def noted(command: Sequence[str], path: Path) -> None:
        said = subprocess.run(["nice"], capture_output=True, text=True, check=True)
        seen.append(int(said.stdout))

    monkeypatch.setattr(native, "_compile", noted)
    ahead.begin.__wrapped__(exact=True).join()
    assert seen and min(seen) == min(19, mine + 10) == max(seen)
    assert os.getpriority(os.PRIO_PROCESS, 0) == mine


def test_a_compiler_that_fails_is_no_error_here(slowly: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(command: Sequence[str], path: Path) -> None:
        slowly.append(path.name)
        raise LoweringError("it cannot compile")

    monkeypatch.setattr(native, "_compile", fails)
    ahead.begin.__wrapped__(exact=True).join()
    assert len(slowly) == len(ahead.libraries(exact=True)) > 0


def test_of_a_training_step_it_is_what_inductor_and_the_loss_need(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = loss_rows.kernels()
    if isinstance(kernels, str):
        pytest.skip("no kernels are compiled here")
    [(source, macros, isa)] = ahead.of_training()
    assert (source, dict(macros), isa) == (loss_rows._SOURCE, {"WIDTH": WORDS[isa]}, kernels.isa)

    from torch._inductor import codecache

    asked, compiled = [], codecache._precompile_header

    def noted(*args: object, **given: object) -> str:
        asked.append((args, tuple(given.items())))
        return compiled(*args, **given)

    monkeypatch.setattr(codecache, "_precompile_header", noted)
    torch_compat_inductor.headers_compiled()
    if not asked:
        pytest.skip("Inductor is asked for another instruction set")
    like = TileLayout.of(torch.ones(3, 5))
    graph = fx.Graph()
    given = graph.placeholder("x")
    graph.output((graph.call_function(torch.ops.aten.mul.Tensor, (given, given)),))
    with torch_compat_inductor.compiling(force_disable_caches=True):
        assert Fused(graph, [like], [like]).compile() is None
    assert len(asked) > 1 and len(set(asked)) == 1
