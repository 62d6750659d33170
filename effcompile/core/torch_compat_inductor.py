"""The private torch APIs of compiling a graph with its weights frozen, and of letting go of it again."""

from __future__ import annotations

import contextlib
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from contextvars import ContextVar
from functools import cache
from threading import RLock, local
from types import CodeType
from typing import Any

import torch

from effcompile.core.kernel_cache import mended


def freezing() -> AbstractContextManager[None]:
    """A context in which compilation turns the weights of a module into constants and folds what is computed
    from them.
    """
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    mended(cache_dir())
    # a scatter into a constant would be a comparison, which no index is out of range for
    return compiling(freezing=True, optimize_scatter_upon_const_tensor=False)


@contextlib.contextmanager
def compiling(**settings: bool) -> Iterator[None]:
    """Within, Inductor compiles by these settings, and for the instruction set that is picked here."""
    import torch._inductor.config

    _leave_triton_unread()
    patched = torch._inductor.config.patch({**settings, **for_this_capability()})
    with patched, _one_instruction_set(), _wrapping_integers():
        yield


#: Whether what this thread compiles is ours.
_wraps: ContextVar[bool] = ContextVar("wraps", default=False)


@contextlib.contextmanager
def _wrapping_integers() -> Iterator[None]:
    """Within, integers that overflow wrap in what Inductor compiles, as they do in torch's own kernels.

    In C++ they do not, and a compiler leaves out what could be wrong then alone: whether an index is below 0
    that is an absolute value (of an infinite number cast to an integer), a square or a clamped one times
    four. What is read instead lies anywhere, or ends the process.
    """
    _install_wrapping()
    token = _wraps.set(True)
    try:
        yield
    finally:
        _wraps.reset(token)


@cache
def _install_wrapping() -> None:
    """Once and for good, as threads compile beside each other; what others compile is as it was."""
    from torch._inductor import cpp_builder

    theirs = getattr(cpp_builder, "_get_optimization_cflags", None)
    if theirs is None or os.name == "nt":  # there the compiler wraps
        return

    def ours(*args: object, **kwargs: object) -> tuple[list[str], list[str]]:
        compiled, linked = theirs(*args, **kwargs)
        return [*compiled, *["fwrapv"] * _wraps.get()], linked

    cpp_builder._get_optimization_cflags = ours


@cache
def _leave_triton_unread() -> None:
    """Inductor's graph cache hashes the files of triton, 500 MB, to name the system, and on a machine without
    a GPU does nothing with it; since torch 2.15 the name has it even there, where it makes nothing of graphs.
    """
    from torch._inductor import codecache

    put = getattr(getattr(codecache, "triton_key", None), "set", None)
    if put is not None and not torch.cuda.is_available():
        with contextlib.suppress(RuntimeError):  # somebody asked for it already
            put(None)


@contextlib.contextmanager
def _one_instruction_set() -> Iterator[None]:
    """Within, Inductor knows the best instruction set of this CPU only, which it takes.

    It compiles and loads a library for each that the CPU has before it picks the first: ten builds where
    there is AMX, seven CPU seconds with an empty cache, of which two are for the one that is picked.
    """
    from torch._inductor import config, cpu_vec_isa

    asked = os.environ.get("ATEN_CPU_CAPABILITY") or config.cpp.simdlen is not None
    found = None if asked else _best_instruction_set()
    if found is None:
        yield
        return
    every = cpu_vec_isa.valid_vec_isa_list
    cpu_vec_isa.valid_vec_isa_list = lambda: [found]  # type: ignore[assignment]
    try:
        yield
    finally:
        cpu_vec_isa.valid_vec_isa_list = every


#: What Inductor's own program for that asks, without its four seconds of torch's headers: that the compiler
#: knows the instructions, and is none before GCC 10, whose vector functions are other ones than torch's.
_BUILDS = """
#if defined(__GNUC__) && !defined(__clang__) && __GNUC__ < 10
#error "too old"
#endif
#include <immintrin.h>
extern "C" void __avx_chk_kernel(float* x) {
#if defined(CPU_CAPABILITY_AVX512)
    _mm512_storeu_ps(x, _mm512_fmadd_ps(_mm512_loadu_ps(x), _mm512_set1_ps(2), _mm512_set1_ps(1)));
#else
    _mm256_storeu_ps(x, _mm256_fmadd_ps(_mm256_loadu_ps(x), _mm256_set1_ps(2), _mm256_set1_ps(1)));
#endif
}
"""


_LOOKING = RLock()


def _best_instruction_set() -> Any | None:
    """The first of Inductor's list that the CPU has and that builds here; None where it is to look itself."""
    with _LOOKING:  # a thread may be at it (headers_compiled)
        return _instruction_set_that_builds()


@cache
def _instruction_set_that_builds() -> Any | None:
    from torch._inductor import cpu_vec_isa

    if not hasattr(cpu_vec_isa, "x86_isa_checker") or not hasattr(cpu_vec_isa.VecISA, "_avx_code"):
        return None
    names = set(cpu_vec_isa.x86_isa_checker())  # none on another CPU
    able = (isa for isa in cpu_vec_isa.supported_vec_isa_list if set(str(isa).split()) <= names)
    theirs, cpu_vec_isa.VecISA._avx_code = cpu_vec_isa.VecISA._avx_code, _BUILDS
    try:
        return next((isa for isa in able if isa), None)  # its truth is its build
    finally:
        cpu_vec_isa.VecISA._avx_code = theirs


def begin_compiling() -> None:
    """Import what Inductor compiles C++ with: once, and by the main thread, for imports of two threads may
    find each other's halves.
    """
    import torch._inductor.codecache  # noqa: F401


def headers_compiled() -> None:
    """Have the header that each of Inductor's C++ kernels includes compiled into its cache, as it does before
    its first kernel: five seconds of a compiler, once a machine. May be called from a thread.

    Nothing is done where it would not, or does it otherwise.
    """
    from torch._inductor import codecache, config, cpp_builder

    isa, kernels = _best_instruction_set(), codecache.CppPythonBindingsCodeCache
    asked = os.environ.get("ATEN_CPU_CAPABILITY") or config.cpp.simdlen is not None
    if asked or isa is None or not config.cpp_cache_precompile_headers:
        return
    with _wrapping_integers():
        # in Inductor's order, by which it knows that it was asked before
        given = dict(
            min_optimize=False, **kernels.cpp_compile_command_flags, device_type="cpu", extra_flags=(),
            use_relative_path=False, vec_isa=isa,
        )  # fmt: skip
        options = cpp_builder.CppTorchDeviceOptions(compile_only=False, **given)
        command = cpp_builder.CppBuilder(name="o", sources="i", BuildOption=options).get_command_line()
        header = kernels._get_uncompiled_header("cpu")
        if header is not None:
            codecache._precompile_header(header, command, **given)


def instruction_set() -> str:
    """The instructions that Inductor generates code for here, and that it lets the compiler use."""
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    with compiling():
        found = pick_vec_isa()
        return f"{found} {found.build_arch_flags()}" if found else "none"


def for_this_capability() -> dict[str, int]:
    """Settings by which Inductor's graph cache tells apart what is generated under ATEN_CPU_CAPABILITY: its
    key leaves that out, and code for wider vectors, found under narrower ones, gives wrong numbers.
    """
    if not os.environ.get("ATEN_CPU_CAPABILITY"):
        return {}
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    found = pick_vec_isa()
    return {"cpp.simdlen": found.bit_width() if found else 1}  # 1: no vectors


@contextlib.contextmanager
def read_as_compiled(
    read: Callable[[torch.fx.Graph], Iterable[str]], of: str | None
) -> Iterator[tuple[Any, Counter[str]]]:
    """Within, one graph is compiled with the pass that is yielded, which reads the final graph: as words,
    that are counted.

    What Inductor counts while it generates code it keeps beside the code, and counts again where it takes the
    code from its cache, whose hits skip passes: the words are those of the graph that the code was made of.

    Args:
        read: gives the words.
        of: a hash of all that graph and words follow from, which becomes a part of Inductor's key: of a
            frozen weight it has the sizes alone. None: nothing is kept.

    Yields:
        The pass, and its words, which are there afterwards.
    """
    from torch._dynamo.utils import counters
    from torch._inductor.custom_graph_pass import CustomGraphPass

    mark, words = f"effcompile {of} ", Counter[str]()

    class _Reader(CustomGraphPass):
        def __call__(self, graph: torch.fx.Graph) -> None:
            counters["inductor"].update(mark + word for word in read(graph))

        def uuid(self) -> str | None:
            return of

    with _ONE_IS_READ:
        before, _HERE.packed = counters["inductor"].copy(), of is not None and _takes_packed()
        try:
            yield _Reader(), words
        finally:
            _HERE.packed = False
        found = counters["inductor"] - before
        words.update({word.removeprefix(mark): n for word, n in found.items() if word.startswith(mark)})


#: Counters are the process's: of two threads that compile the same, each would find the words of both.
_ONE_IS_READ = RLock()
#: Whether this thread compiles a graph whose key covers the bytes of its weights.
_HERE = local()


@cache
def _takes_packed() -> bool:
    """Have Inductor's cache of graphs take frozen weights that a library packed, where `_HERE` says so.

    Such a weight cannot be written, which it declines them for; of a frozen one it writes the name alone.
    """
    from torch._inductor import codecache
    from torch._inductor.freezing_utils import is_frozen_param

    validator: Any = getattr(codecache, "CacheabilityValidator", None)
    pickler: Any = getattr(codecache, "FxGraphCachePickler", None)
    if not (hasattr(validator, "check_tensor") and hasattr(pickler, "_reduce_tensor")):
        return False  # another version: graphs with such weights are generated each time
    check, reduce = validator.check_tensor, pickler._reduce_tensor

    def ours(tensor: torch.Tensor) -> bool:
        return getattr(_HERE, "packed", False) and tensor.is_mkldnn and is_frozen_param(tensor)

    def checked(tensor: torch.Tensor) -> None:
        if not ours(tensor):
            check(tensor)

    def reduced(self: object, tensor: torch.Tensor) -> Any:
        if ours(tensor):
            return str, (f"packed {tensor.dtype} {tuple(tensor.shape)}",)
        return reduce(self, tensor)

    validator.check_tensor, pickler._reduce_tensor = staticmethod(checked), reduced
    return True


@contextlib.contextmanager
def not_kept_by_inductor() -> Iterator[None]:
    """Within, Inductor compiles graphs that it does not hold for the rest of the process: frozen weights are
    attributes of their modules.

    Who holds the compiled function holds what it reads.
    """
    from torch._inductor.codecache import PyCodeCache

    before = {id(module) for module in PyCodeCache.modules}
    try:
        yield
    finally:
        frozen = {
            id(module): module
            for module in PyCodeCache.modules
            if id(module) not in before
            and any(isinstance(value, torch.Tensor) for value in vars(module).values())
        }
        PyCodeCache.modules[:] = [module for module in PyCodeCache.modules if id(module) not in frozen]
        for module in frozen.values():
            if sys.modules.get(module.__name__) is module:
                del sys.modules[module.__name__]


def forget_compiled(code: CodeType) -> None:
    """Have Dynamo drop what it compiled of a function: it hangs on its code, which it refers to, out of the
    sight of Python's collector.
    """
    from torch._C._dynamo.eval_frame import reset_code

    reset_code(code)
