"""What Inductor is told of the machine: what it finds itself, found in less time."""

import subprocess
import sys

import pytest
import torch

from effcompile.core import torch_compat_inductor

_THEIRS = "isa = pick_vec_isa()"
_OURS = "isa = ours._best_instruction_set()"
_BROKEN = ("#error no such instructions", "int x = no_such_name;")
#: Each argument in a process of its own, forked from one that has imported what they need.
_EACH = """
import os, sys
from torch._inductor.cpu_vec_isa import pick_vec_isa
import effcompile.core.torch_compat_inductor as ours
for each in sys.argv[1:]:
    if (child := os.fork()) == 0:
        exec(each)
        print(repr(str(isa)), isa and isa.build_arch_flags(), flush=True)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
"""


@pytest.fixture(scope="module")
def said() -> list[str]:
    """What is found by us, by Inductor, and by us where it does not build."""
    broken = [f"ours._BUILDS = {source!r}; {_OURS}" for source in _BROKEN]
    command = [sys.executable, "-c", _EACH, _OURS, _THEIRS, *broken]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=240)
    return done.stdout.splitlines()


@pytest.mark.slow
def test_it_is_the_one_that_inductor_picks(said: list[str]) -> None:
    """With the flags of its extensions; where the CPU is none that we look at, it is left to Inductor."""
    ours, theirs, *_ = said
    assert ours == "'None' None" or ours == theirs


@pytest.mark.slow
def test_what_does_not_build_is_not_picked(said: list[str]) -> None:
    found = said[2:]
    assert len(found) == len(_BROKEN) and set(found) <= {"'None' None", "'INVALID_VEC_ISA' None"}
    assert not set(_BROKEN) & {torch_compat_inductor._BUILDS}


@pytest.mark.skipif(torch.cuda.is_available(), reason="the key names a GPU's compiler")
def test_the_system_has_the_name_that_inductor_gives_it_though_triton_is_not_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from torch._inductor import codecache
    from torch.utils._functools import prefetchable_cache

    name = codecache.CacheBase.get_system.__wrapped__

    @prefetchable_cache
    def other() -> str:
        return "other files of triton"

    @prefetchable_cache
    def read() -> str:
        raise AssertionError("500 MB are read")

    monkeypatch.setattr(codecache, "triton_key", other)
    theirs = name()
    monkeypatch.setattr(codecache, "triton_key", read)
    torch_compat_inductor._leave_triton_unread.cache_clear()
    with torch_compat_inductor.compiling():
        ours = name()
    if "version" in theirs:  # since torch 2.15
        assert ours["version"] == {**theirs["version"], "triton": None}
    else:
        assert ours == theirs
