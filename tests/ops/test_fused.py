"""Fused kernels: names, layouts, fake tensors, memory, and what happens without a compiler."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import fx

from effcompile.core import torch_compat, torch_compat_kernels, torch_compat_memory
from effcompile.ops import fused as module
from effcompile.ops.fused import Fused, TileLayout, compile_together

aten = torch.ops.aten


def gelu(width: int = 256, factor: float = 0.5) -> Fused:
    """tanh(x·factor)·x and x + 1 transposed, of (128, width)."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    t = graph.call_function(aten.tanh.default, (graph.call_function(aten.mul.Tensor, (x, factor)),))
    first = graph.call_function(aten.mul.Tensor, (t, x))
    turned = graph.call_function(aten.transpose.int, (graph.call_function(aten.add.Tensor, (x, 1)), 0, 1))
    second = graph.call_function(aten.clone.default, (turned,), {"memory_format": torch.contiguous_format})
    graph.output((first, second))
    given = TileLayout((128, width), (width, 1), torch.float32, "cpu")
    return Fused(graph, [given], [given, TileLayout((width, 128), (128, 1), torch.float32, "cpu")])


def expected(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tanh(x * 0.5) * x, (x + 1).T.contiguous()


def test_names_follow_the_content_alone() -> None:
    one, same, other, wider = gelu(), gelu(), gelu(factor=0.25), gelu(width=512)
    assert str(one) == one.__name__ == str(same) and one == same and hash(one) == hash(same)
    assert str(one).startswith("fused[mul,tanh,add,transpose+1]#")
    assert len({str(one), str(other), str(wider)}) == 3 and one != other


def test_kernel_equals_its_operators_and_allocates_its_results_only() -> None:
    kernel, x = gelu(), torch.randn(128, 256)
    assert kernel.compile() is None
    with torch_compat_memory.memory_profile() as profile:
        got = kernel(x)
    assert torch_compat_memory.peak_of_memory_events(profile) == sum(t.nbytes for t in got)
    for a, b in zip(got, expected(x), strict=True):
        assert a.stride() == b.stride()
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def test_fake_tensors_get_fresh_results() -> None:
    with torch_compat.fake_mode():
        x = torch.empty(128, 256)
    results = gelu()(x)
    assert [(tuple(t.shape), t.stride()) for t in results] == [((128, 256), (256, 1)), ((256, 128), (128, 1))]
    assert all(torch_compat.is_fake(t) for t in results)
    assert gelu()(torch.empty(128, 256, device="meta"))[1].shape == (256, 128)


def test_other_layouts_run_operator_by_operator() -> None:
    x = torch.randn(256, 128).T
    for a, b in zip(gelu()(x), expected(x), strict=True):
        torch.testing.assert_close(a, b)


def test_without_a_compiler_the_operators_run_and_the_kernel_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("no C++ compiler\nmore")

    monkeypatch.setattr(module, "elementwise_kernel", fails)
    kernel, x = gelu(width=384), torch.randn(128, 384)
    for a, b in zip(kernel(x), expected(x), strict=True):
        torch.testing.assert_close(a, b)
    assert kernel.fallback_reason == "RuntimeError: no C++ compiler"


def test_a_kernel_that_allocates_more_than_its_results_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "elementwise_kernel", lambda *_: (lambda values: [], 3))
    kernel, x = gelu(width=640), torch.randn(128, 640)
    torch.testing.assert_close(kernel(x)[0], expected(x)[0])
    assert kernel.fallback_reason == "Inductor allocates 3 tensors for 2 results"


def test_a_kernel_that_returns_its_input_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "elementwise_kernel", lambda *_: (lambda values: [values[0], values[0]], 2))
    kernel, x = gelu(width=896), torch.randn(128, 896)
    torch.testing.assert_close(kernel(x)[0], expected(x)[0])
    assert kernel.fallback_reason == "Inductor returned an input, or one tensor twice"


@pytest.mark.parametrize("compilers", [1, 2])
def test_kernels_that_are_built_together_are_each_their_own(compilers: int) -> None:
    from torch._inductor import config

    kernels = [gelu(width=width + 8 * compilers) for width in (136, 168, 200)]
    with config.patch(compile_threads=compilers):
        compile_together([*kernels, kernels[0]])
    for kernel in kernels:
        assert kernel.fallback_reason is None
        x = torch.randn(128, kernel.inputs[0].shape[1])
        for a, b in zip(kernel(x), expected(x), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def test_one_that_does_not_build_runs_operator_by_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import config
    from torch._inductor.cpp_builder import CppBuilder

    builds, built = CppBuilder.build, list[str]()

    def second_fails(self: CppBuilder) -> None:
        path = self.get_target_file_path()
        built.extend([path] * path.endswith("main.so"))  # no header
        if len(built) in (1, 3):  # all of them as one file, and the second by itself
            raise RuntimeError("the compiler ended\nmore")
        builds(self)

    monkeypatch.setattr(CppBuilder, "build", second_fails)
    factor = 1 + random.SystemRandom().random()  # which no cache on disk has, whoever sets seeds
    kernels = [gelu(width=width, factor=factor) for width in (184, 200, 216)]
    with config.patch(compile_threads=2):
        compile_together(kernels)
    assert len(built) == 4
    reasons = sorted(str(kernel.fallback_reason) for kernel in kernels)
    assert reasons == ["None", "None", "RuntimeError: the compiler ended"]
    for kernel in kernels:
        x = torch.randn(128, kernel.inputs[0].shape[1])
        torch.testing.assert_close(kernel(x)[0], torch.tanh(x * factor) * x, rtol=1e-6, atol=1e-6)


def test_what_another_thread_compiles_meanwhile_is_waited_for_there() -> None:
    kernel, x = gelu(width=232), torch.randn(128, 232)
    with ThreadPoolExecutor(1) as other, torch_compat_kernels.built_later() as waits:
        got = other.submit(kernel, x).result()
        assert not waits and kernel.fallback_reason is None
    torch.testing.assert_close(got[0], expected(x)[0], rtol=1e-6, atol=1e-6)
