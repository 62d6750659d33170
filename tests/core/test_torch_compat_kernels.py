"""Inductor's kernels as one file of C++: each is its own, found again, and built alone where that fails."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch._inductor.cpp_builder import CppBuilder
from torch._inductor.runtime.cache_dir_utils import cache_dir

from effcompile.core import torch_compat_kernels as module

POINTERS = ["const float*", "float*"]


def fresh() -> float:
    """A factor that no cache on disk has, whoever sets seeds."""
    return 1 + random.SystemRandom().random()


def kernel(factor: float, body: str = "out[i] = in[i] * {};") -> str:
    """Multiplies 64 elements, as Inductor would write it."""
    return (
        "#include <torch/csrc/inductor/cpp_prefix.h>\n"
        'extern "C" void kernel(const float* in, float* out)\n'
        "{ for (int64_t i = 0; i < 64; ++i) { " + body.format(f"{factor!r}f") + " } }\n"
    )


def asked(together: module._Together, sources: list[str]) -> tuple[list[module.Build], list[int]]:
    """What gives each, and a list that those add to which are to be built by themselves."""
    alone = list[int]()

    def by_itself(number: int) -> Callable[..., None]:
        alone.append(number)
        return lambda *_: None

    found = [
        together.later(POINTERS, source, lambda n=n: by_itself(n), None)  # type: ignore[misc]
        for n, source in enumerate(sources)
    ]
    return found, alone


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The libraries that are built meanwhile."""
    builds, paths = CppBuilder.build, list[str]()

    def told(self: CppBuilder) -> None:
        path = self.get_target_file_path()
        paths.extend([path] * path.endswith("main.so"))  # no header
        builds(self)

    monkeypatch.setattr(CppBuilder, "build", told)
    return paths


def check(function: Callable[..., None], factor: float) -> None:
    x, y = torch.randn(64), torch.empty(64)
    function(x, y)
    torch.testing.assert_close(y, x * factor)


def test_many_are_one_library_in_which_others_find_them(built: list[str]) -> None:
    factors = [fresh() for _ in range(3)]
    found, alone = asked(module._Together(), [kernel(f) for f in (*factors, factors[0])])
    for build, factor in zip(found, (*factors, factors[0]), strict=True):
        check(build(), factor)
    assert len(built) == 1 and not alone
    for factor in factors:  # as another process asks, whose plan has one of them
        (again,), alone = asked(module._Together(), [kernel(factor)])
        check(again(), factor)
    assert len(built) == 1 and not alone


def test_a_full_file_is_begun_before_the_rest_is_asked_for(
    built: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_OF_A_FILE", 2)
    factors = [fresh() for _ in range(5)]
    together = module._Together()
    found, alone = asked(together, [kernel(f) for f in factors])
    together.begin()
    for build, factor in zip(found, factors, strict=True):
        check(build(), factor)
    assert len(built) == 3 and not alone


def test_one_that_is_no_c_leaves_each_to_itself() -> None:
    found, alone = asked(module._Together(), [kernel(fresh()), kernel(fresh(), "no {}")])
    assert [build() for build in found] and alone == [0, 1]


@pytest.mark.parametrize("content", [b"no library", b""])
def test_a_library_that_does_not_load_is_left_and_forgotten(content: bytes) -> None:
    factor = fresh()
    before = set(Path(cache_dir(), "together").glob("*"))
    (build,), alone = asked(module._Together(), [kernel(factor)])
    check(build(), factor)
    name = module._name(POINTERS, kernel(factor))
    place = Path(cache_dir(), "together", f"{name}.so")
    assert place not in before and place.exists()
    place.unlink()
    place.write_bytes(content)
    del sys.modules[f"{name}.{name}"]  # as in another process
    (again,), alone = asked(module._Together(), [kernel(factor)])
    again()
    assert alone == [0] and not place.exists()


def test_texts_of_another_version_are_left_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_text", lambda *_: 1 / 0)
    (build,), alone = asked(module._Together(), [kernel(fresh())])
    build()
    assert alone == [0]
