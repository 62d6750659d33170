"""What Inductor is told of the machine: what it finds itself, found in less time."""

import subprocess
import sys

import pytest
import torch

from effcompile.core import torch_compat_inductor

_THEIRS = "from torch._inductor.cpu_vec_isa import pick_vec_isa as pick; isa = pick(); "
_OURS = "from effcompile.core.torch_compat_inductor import _best_instruction_set as best; isa = best(); "
_SAID = "print(repr(str(isa)), isa and isa.build_arch_flags())"


def _said(program: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program + _SAID], capture_output=True, text=True, check=True, timeout=120
    )
    return done.stdout.strip()


@pytest.mark.slow
def test_it_is_the_one_that_inductor_picks() -> None:
    """With the flags of its extensions; where the CPU is none that we look at, it is left to Inductor."""
    ours = _said(_OURS)
    assert ours == "'None' None" or ours == _said(_THEIRS)


@pytest.mark.slow
@pytest.mark.parametrize("broken", ["#error no such instructions", "int x = no_such_name;"])
def test_what_does_not_build_is_not_picked(broken: str) -> None:
    change = f"import effcompile.core.torch_compat_inductor as ours; ours._BUILDS = {broken!r}; "
    assert _said(change + _OURS) in ("'None' None", "'INVALID_VEC_ISA' None")
    assert broken not in torch_compat_inductor._BUILDS


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
        assert name() == theirs
