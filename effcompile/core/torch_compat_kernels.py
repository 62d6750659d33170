"""The private torch APIs of building Inductor's C++ kernels: many that are generated one after the other, as
a few files.

Inductor builds each kernel by itself. Of the 0.75 CPU seconds that one takes, 0.07 are the kernel's: the rest
is templates that each file instantiates again, and linking. The nine of a GPT-2's training step took 6.7, and
in one file take 1.2 (g++ 12 on a Xeon).
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from threading import RLock, get_ident
from typing import TYPE_CHECKING, Any

from effcompile.core.torch_compat_inductor import compiling

if TYPE_CHECKING:
    from torch._inductor.codecache import CppPythonBindingsCodeCache

#: Kernels of a file: where there are more, the first are built while the next are generated.
_OF_A_FILE = 12
_INCLUDE = re.compile(r"^[ \t]*#[ \t]*include\b.*$", re.MULTILINE)

#: What gives a kernel, once it is built.
Build = Callable[[], Callable[..., None]]
#: Has a pool run something.
Submit = Callable[[Callable[..., object]], object]


@contextlib.contextmanager
def built_later() -> Iterator[list[Callable[[], None]]]:
    """Within, what this thread has Inductor generate is built by its pool of compilers, many kernels as one
    file, while the next are generated.

    Yields:
        A list that what waits for each is added to: its kernels cannot be called before, and it raises what
        building them raised.
    """
    from torch._inductor.async_compile import AsyncCompile, get_compile_threads
    from torch._inductor.codecache import LambdaFuture

    waits: list[Callable[[], None]] = []
    together, ours = _Together(), get_ident()
    wait, bind = AsyncCompile.wait, AsyncCompile.cpp_pybinding

    def later(self: AsyncCompile, scope: dict[str, object]) -> None:
        if get_ident() == ours:
            waits.append(partial(wait, self, scope))
        else:
            wait(self, scope)

    def bound(self: AsyncCompile, argtypes: list[str], source_code: str) -> object:
        if get_ident() != ours or get_compile_threads() <= 1:
            return bind(self, argtypes, source_code)

        def alone() -> Callable[..., None]:
            with compiling():  # as they were generated, though later
                found: Callable[..., None] = bind(self, argtypes, source_code).result()
            return found

        return LambdaFuture(together.later(argtypes, source_code, alone, self.submit))

    AsyncCompile.wait, AsyncCompile.cpp_pybinding = later, bound  # type: ignore[method-assign]
    try:
        yield waits
    finally:
        AsyncCompile.wait, AsyncCompile.cpp_pybinding = wait, bind  # type: ignore[method-assign]
        together.begin()


class _Together:
    """Kernels that are asked for one after the other, and built as few files."""

    def __init__(self) -> None:
        self._file = _File()

    def later(self, argtypes: Sequence[str], source: str, alone: Build, submit: Submit | None) -> Build:
        """A kernel of the library that has it already, or of a file with those that are asked for before and
        after it.

        `alone`: builds it by itself, for where that fails.
        """
        try:
            name = _name(argtypes, source)
            place = _place(name)
            if place.exists():
                return partial(_known, name, place, alone)
            self._file.texts.setdefault(name, _text(name, argtypes, source))
        except Exception:  # another version's templates
            return alone
        file, file.submit = self._file, submit
        if len(file.texts) == _OF_A_FILE:
            self.begin()
        return partial(file.function, name, alone)

    def begin(self) -> None:
        """Have what was asked for until now built."""
        if self._file.texts:
            self._file.begin()
            self._file = _File()


class _File:
    """Kernels of one file.

    Attributes:
        texts: name → C++ that exports a Python module of that name. submit: has the pool run something.
    """

    def __init__(self) -> None:
        self.texts = dict[str, str]()
        self.submit: Submit | None = None
        self._building: Callable[[], Path] | None = None
        self._lock = RLock()

    def begin(self) -> None:
        """Have it built, as it is now."""
        with self._lock:
            if self._building is None:
                self._building = _building(list(self.texts.values()), self.submit)

    def function(self, name: str, alone: Build) -> Callable[..., None]:
        """One of its kernels; where the file does not build or load, that kernel's own file."""
        try:
            with self._lock:
                self.begin()
                assert self._building is not None
                library = self._building()
            _point(_place(name), library)
            return _loaded(name, library)
        except Exception:  # no compiler, or one kernel that it does not take: each says it for itself
            return alone()


def _known(name: str, place: Path, alone: Build) -> Callable[..., None]:
    try:
        return _loaded(name, place)
    except Exception:  # somebody cleaned the cache in parts
        place.unlink(missing_ok=True)
        return alone()


def _name(argtypes: Sequence[str], source: str) -> str:
    """Of a kernel: all that its library follows from."""
    from torch._inductor import codecache, cpp_builder
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    given = dict(codecache.CppPythonBindingsCodeCache.cpp_compile_command_flags)
    options = cpp_builder.CppTorchDeviceOptions(vec_isa=pick_vec_isa(), device_type="cpu", **given)
    command = cpp_builder.CppBuilder(name="o", sources="i", BuildOption=options).get_command_line()
    whole = repr((list(argtypes), source, command, codecache.CppPythonBindingsCodeCache.suffix_template))
    return f"kernel_{hashlib.sha256(whole.encode()).hexdigest()[:32]}"


def _place(name: str) -> Path:
    """Where a kernel's library is found again: a link into Inductor's cache, beside what it points to."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return Path(cache_dir(), "together", f"{name}.so")


def _point(place: Path, library: Path) -> None:
    """Make a link to a library; where there can be none, the library is built again another time."""
    partly = place.with_suffix(f".{os.getpid()}")
    with contextlib.suppress(OSError):
        place.parent.mkdir(exist_ok=True)
        partly.symlink_to(library)
        partly.replace(place)


def _loaded(name: str, library: Path) -> Callable[..., None]:
    try:
        function: Callable[..., None] = getattr(_bindings(name)._load_library(str(library), name), name)
    except Exception:
        sys.modules.pop(f"{name}.{name}", None)  # torch puts it there before it is loaded
        raise
    return function


def _text(name: str, argtypes: Sequence[str], source: str) -> str:
    """A kernel and its binding, as torch writes them, in a namespace of its own."""
    texts: list[str] = []
    _bindings(name, texts).load_pybinding_async(argtypes, source)
    (text,) = texts
    return f"#define kernel {name}\nnamespace of_{name} {{\n{text}\n}}\n#undef kernel\n"


def _bindings(name: str, texts: list[str] | None = None) -> type[CppPythonBindingsCodeCache]:
    """Torch's builder of Python modules around one function, of that name; nothing is built, but its text is
    added to `texts`.
    """
    from torch._inductor.codecache import CppPythonBindingsCodeCache

    class Named(CppPythonBindingsCodeCache):
        entry_function = name

        @classmethod
        def load_async(cls, main_code: str, *rest: object, **named: object) -> None:
            assert texts is not None
            texts.append(main_code)

    return Named


def _building(texts: Sequence[str], submit: Submit | None) -> Callable[[], Path]:
    """Has one library of these built by torch's builder, in its cache; waits for it, and gives its path."""
    from torch._inductor.codecache import CppPythonBindingsCodeCache

    class Library(CppPythonBindingsCodeCache):
        cache: dict[str, Any] = {}  # noqa: RUF012  (torch declares it so)

        @classmethod
        def _load_library(cls, path: str, key: str) -> Path:  # type: ignore[override]
            return Path(path)

    included = dict.fromkeys(line.strip() for text in texts for line in _INCLUDE.findall(text))
    parts = ["#define PY_SSIZE_T_CLEAN", *included, *(_INCLUDE.sub("", text) for text in texts)]
    with compiling():  # for the instruction set that they were generated for
        building: Callable[[], Path] = Library.load_async("\n".join(parts), "cpu", submit_fn=submit)
    return building
