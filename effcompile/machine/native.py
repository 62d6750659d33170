"""C++ sources of this package as shared libraries: compiled once per source, flags and compiler, and kept on
disk.

Needs a C++17 compiler with OpenMP and vector extensions (GCC 12, Clang 16 or later), named by $CXX or found
as g++, clang++ or c++. Libraries are kept in the folder `native` of the cache. What others could have written
or put there is not loaded (core/trust.py).
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Lock

from effcompile.core.errors import LoweringError
from effcompile.core.files import cache_folder
from effcompile.core.temporary import own_folder
from effcompile.core.trust import distrust

_FLAGS = ("-O3", "-std=c++17", "-shared", "-fPIC", "-fopenmp", "-ffp-contract=fast", "-Wno-psabi")
#: The C++ of this package: what is compiled belongs to the operators.
SOURCES = Path(__file__).parents[1] / "ops"
#: File → held by the thread that compiles it.
_TURNS: dict[Path, Lock] = {}
_SECONDS = 120  # for one compilation: some second of work on an idle machine

_WIDE = ("-mavx512f", "-mavx512vl", "-mavx512dq", "-mavx512bw", "-mfma", "-mprefer-vector-width=512")
#: Instruction set → the compiler's flags for it. Named flags and not -march=native, so that machines may
#: share the cache.
ISA_FLAGS: Mapping[str, tuple[str, ...]] = {
    "avx512": _WIDE,
    "avx512_vnni": (*_WIDE, "-mavx512vnni"),
    "amx_int8": (*_WIDE, "-mavx512vnni", "-mavx512bf16", "-mamx-tile", "-mamx-int8"),
    "amx_bf16": (*_WIDE, "-mavx512vnni", "-mavx512bf16", "-mamx-tile", "-mamx-bf16"),
    "avx512_bf16": (*_WIDE, "-mavx512bf16"),
    "avx2": ("-mavx2", "-mfma"),
    "avx_vnni": ("-mavx2", "-mfma", "-mavxvnni"),
    "neon": ("-march=armv8-a",),
    "neon_dotprod": ("-march=armv8.2-a+dotprod",),
    "neon_i8mm": ("-march=armv8.2-a+dotprod+i8mm",),
    "generic": (),
}


def fingerprint() -> str:
    """What changes whenever other kernels would be compiled: all sources here, and the compiler; "no
    compiler" without one.
    """
    try:
        compiler = _compiler()
    except LoweringError:
        return "no compiler"
    texts = [file.read_text() for file in sorted(SOURCES.iterdir()) if file.suffix in (".cpp", ".h")]
    return hashlib.sha256("\0".join((*texts, *compiler)).encode()).hexdigest()[:12]


def library(source: Path, defines: Mapping[str, int], isa: str) -> ctypes.CDLL:
    """The loaded library of a C++ source with these macros.

    Raises:
        LoweringError: as `compiled`, or what was compiled cannot be loaded.
    """
    path = compiled(source, defines, isa)
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise LoweringError(
            f"The compiled kernels {str(path)!r} cannot be loaded: {error}. Remove the file to compile "
            "them again."
        ) from error


def compiled(source: Path, defines: Mapping[str, int], isa: str) -> Path:
    """The file of that library, for an instruction set of ISA_FLAGS.

    The source may include headers of its folder.

    Raises:
        LoweringError: there is no compiler, or it fails; says what it said.
    """
    compiler = _compiler()
    flags = (*_FLAGS, *ISA_FLAGS[isa], *(f"-D{name}={value}" for name, value in defines.items()))
    texts = [file.read_text() for file in (source, *sorted(source.parent.glob("*.h")))]
    key = hashlib.sha256(
        "\0".join((*texts, *flags, *compiler, _version(compiler), platform.machine())).encode()
    )
    path = _folder() / f"{source.stem}-{key.hexdigest()[:24]}.so"
    if not path.exists():
        with _TURNS.setdefault(path, Lock()):  # another thread may be at it
            if not path.exists():
                _compile([*compiler, *flags, str(source)], path)
    if (said := distrust(path)) is not None:
        raise LoweringError(
            f"The compiled kernels are not loaded: {said}. Remove {str(path)!r} to compile them again."
        )
    return path


def _compile(command: Sequence[str], path: Path) -> None:
    """Into a file of another name, then renamed: processes that compile the same at once do not see each
    other's halves.
    """
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    os.close(handle)
    try:
        done = subprocess.run(
            [*command, "-o", temporary], capture_output=True, text=True, timeout=_SECONDS, check=False
        )
        if done.returncode:
            said = (done.stderr.strip() or f"exit status {done.returncode}").splitlines()[0]
            raise LoweringError(f"{command[0]} cannot compile {Path(command[-1]).name}: {said}")
        os.chmod(temporary, 0o700)  # whatever the compiler's mask gave to others
        os.replace(temporary, path)
    except (OSError, subprocess.SubprocessError) as error:
        raise LoweringError(f"{command[0]} cannot compile {Path(command[-1]).name}: {error}") from error
    finally:
        Path(temporary).unlink(missing_ok=True)


def _compiler() -> tuple[str, ...]:
    named = shlex.split(os.environ.get("CXX", ""))
    for command in [named] if named else [["g++"], ["clang++"], ["c++"]]:
        if found := shutil.which(command[0]):
            return (found, *command[1:])
    wanted = named[0] if named else "g++, clang++ or c++"
    raise LoweringError(
        f"There is no C++ compiler: {wanted} is not on the PATH. Install one, or name it by CXX."
    )


@functools.cache
def _version(compiler: tuple[str, ...]) -> str:
    try:
        return subprocess.run(
            [*compiler, "--version"], capture_output=True, text=True, timeout=_SECONDS, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise LoweringError(f"The C++ compiler {compiler[0]!r} does not run: {error}") from error


def _folder() -> Path:
    """Where libraries are kept; a folder of this process alone where the cache is not the user's own."""
    folder = cache_folder() / "native"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        return _private_folder(f"{str(folder)!r}: {error.strerror or error}")
    if (said := distrust(folder)) is not None:
        return _private_folder(said)
    return folder if os.access(folder, os.W_OK) else _private_folder(f"{str(folder)!r} cannot be written")


@functools.cache
def _private_folder(why: str) -> Path:
    warnings.warn(
        f"The compiled kernels are not kept for the next process: {why}. Mend that, or name a folder of "
        "your own by EFFCOMPILE_CACHE.",
        RuntimeWarning,
        stacklevel=2,
    )
    return own_folder("effcompile-native-")
