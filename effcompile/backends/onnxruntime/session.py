"""Sessions: created, tuned by measurement, run on torch tensors, and measured for memory in a process of
their own.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import msgspec

from effcompile.backends import resident
from effcompile.backends.onnxruntime.custom_ops import library_for
from effcompile.core.arrays import Array
from effcompile.core.errors import FormatError, LoweringError, clipped
from effcompile.core.stages import first_line
from effcompile.core.timing import faster_half_median
from effcompile.machine.memory import give_back

if TYPE_CHECKING:
    import onnxruntime
    import torch

_open: weakref.WeakSet[onnxruntime.InferenceSession] = weakref.WeakSet()
#: Bytes above which a protobuf message, as the quantisers take it, cannot be serialised.
PROTOBUF_LIMIT = 2**31 - 2**20
#: Bytes of weights above which they stand in a file beside the model. ONNX Runtime maps that file, one tensor
#: at a time, where a model that holds its weights is serialised, read, parsed and copied whole: four times
#: the weights at once.
BESIDE = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Session options that change speed but no result. Plain ORT defaults also run the artifact.

    pattern: from its second call on a session takes what a call of these sizes works with in one piece,
    beside what the first one left in the arena: 14.4 MB of a BERT that works with 10.0 without.
    """

    threads: int
    spinning: bool = True
    arena: bool = True
    pattern: bool = True

    def describe(self) -> str:
        without = {"spinning": self.spinning, "arena": self.arena, "pattern": self.pattern}
        threads = f"{self.threads} thread{'s' if self.threads > 1 else ''}"
        return " ".join([threads, *(f"no {name}" for name, on in without.items() if not on)])


def default_settings() -> Settings:
    """As many threads as torch takes: who gave it fewer than there are cores meant what is planned, too."""
    return Settings(threads=usable_threads())


def settings_of(saved: Mapping[str, object]) -> Settings:
    """The settings that a plan holds, with no more threads than this machine has cores; the defaults for what
    it does not hold.

    Raises:
        FormatError: a value that is none.
    """
    names = [field.name for field in fields(Settings)]
    try:
        asked = msgspec.convert(
            {"threads": usable_threads(), **{name: saved[name] for name in names if name in saved}}, Settings
        )
    except msgspec.ValidationError as error:
        raise FormatError(
            f"The plan's settings are not ONNX Runtime's: {clipped(error)}. Plan again, or restore the file."
        ) from error
    if asked.threads < 1:
        raise FormatError(
            f"The plan's settings say threads = {asked.threads}: at least 1 is needed. Plan again, or "
            "restore the file."
        )
    return replace(asked, threads=min(asked.threads, usable_cores()))


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def usable_threads() -> int:
    """Of them as many as torch has threads ($OMP_NUM_THREADS, torch.set_num_threads); all where it is not
    loaded.
    """
    cores, torch = usable_cores(), sys.modules.get("torch")
    return cores if torch is None else min(cores, int(torch.get_num_threads()))


def candidates() -> list[Settings]:
    """The settings worth timing: all threads with and without spinning, where one waits for another, no
    arena, and half of the threads.
    """
    threads = usable_threads()
    several = [
        Settings(threads=threads),
        *([Settings(threads=threads, spinning=False)] if threads > 1 else []),
        Settings(threads=threads, arena=False),
    ]
    return several if threads <= 2 else [*several, Settings(threads=threads // 2)]


def open_session(model: Path | bytes, settings: Settings | None = None) -> onnxruntime.InferenceSession:
    """A CPU session of a model file or of its bytes, with our operators where it has any.

    Raises:
        LoweringError: ORT refuses the model, or our operators cannot be compiled here.
    """
    import onnxruntime

    settings = settings or default_settings()
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = settings.threads
    options.inter_op_num_threads = 1
    options.enable_cpu_mem_arena, options.enable_mem_pattern = settings.arena, settings.pattern
    options.log_severity_level = 4  # what fails is raised, with the same words
    options.add_session_config_entry("session.intra_op.allow_spinning", "1" if settings.spinning else "0")
    # threads do not burn a core between calls
    options.add_session_config_entry("session.force_spinning_stop", "1")
    source = str(model) if isinstance(model, Path) else model
    library = library_for(model)
    try:
        if library is not None:
            options.register_custom_ops_library(str(library))
        opened = onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])
    except Exception as error:
        raise LoweringError(
            f"ONNX Runtime cannot load the model that the plan describes: {first_line(error)}"
        ) from error
    _open.add(opened)
    return opened


def _keep_in_a_forked_child() -> None:
    """A session that is freed waits for its threads, and a forked child has none of them: there it is never
    freed.
    """
    for opened in _open:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(opened))


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_keep_in_a_forked_child)


def run(session: onnxruntime.InferenceSession, feeds: Mapping[str, Array]) -> list[Array]:
    """One call.

    Raises:
        LoweringError: ORT failed while running.
    """
    try:
        outputs: list[Array] = session.run(None, dict(feeds))
    except Exception as error:
        raise LoweringError(
            f"ONNX Runtime failed while running the lowered model: {first_line(error)}"
        ) from error
    return outputs


def tune(
    path: Path, feeds: Mapping[str, Array], before: float
) -> tuple[Settings, dict[str, float], onnxruntime.InferenceSession | None]:
    """The fastest settings by measurement, the candidates between two runs of the defaults, each one's
    seconds, and the session of the fastest where it is the last that was open.

    A session holds the weights, so that one is open at a time, and opening one of a large model takes longer
    than its calls: `before` are the seconds of the defaults in the session that was open. Defaults stay
    unless another candidate is at least 2 % faster: a smaller difference is noise.
    """
    default, *others = candidates()
    seconds = {default.describe(): before}
    for other in others:
        seconds[other.describe()] = timed(open_session(path, other), feeds)
        give_back()
    opened = open_session(path, default)
    beside = (before + timed(opened, feeds)) / 2
    fastest = min(others, key=lambda other: seconds[other.describe()])
    if seconds[fastest.describe()] < 0.98 * beside:
        return fastest, seconds, None
    return default, seconds, opened


#: Timed calls of a session when settings are compared, at the most and at the least, and the seconds after
#: which fewer do.
_TIMED, _FEWEST, _ENOUGH = 12, 4, 0.6


def timed(session: onnxruntime.InferenceSession, feeds: Mapping[str, Array]) -> float:
    """Seconds of a call."""
    samples = list[float]()
    run(session, feeds)
    started = perf_counter()
    while len(samples) < _FEWEST or (len(samples) < _TIMED and perf_counter() < started + _ENOUGH):
        start = perf_counter()
        run(session, feeds)
        samples.append(perf_counter() - start)
    return faster_half_median(samples)


#: A session before the one that is measured brings what ONNX Runtime itself holds once: its code's pages and
#: its registries, some 11 MB, of which the model is none. Two calls: the second takes its memory in another
#: way (`Settings.pattern`).
_MEASURE_PEAK = """
import ctypes, gc, json, onnxruntime
threads, arena, pattern, library, caches, *names = options
given, caches = dict(zip(names, inputs)), json.loads(caches)
if caches:
    one = len(given["tokens"]) > 1 and given["tokens"].shape[1] > 1 and any(given[n].shape[2] for n in caches)
    rows = lambda name, value: value[:1] if one and name != "rows" else value
    given = {name: numpy.ascontiguousarray(rows(name, value)) for name, value in given.items()}
    for name in caches:
        heads, past, width = given[name].shape[1:]
        size = (len(given[name]), heads, past + given["tokens"].shape[1], width)
        given[name] = numpy.ones(size, numpy.float32)
settings = onnxruntime.SessionOptions()
settings.intra_op_num_threads, settings.inter_op_num_threads = int(threads), 1
settings.enable_cpu_mem_arena, settings.enable_mem_pattern = arena == "True", pattern == "True"
if library:
    settings.register_custom_ops_library(library)

def opened():
    session = onnxruntime.InferenceSession(path, settings, providers=["CPUExecutionProvider"])
    given_back()
    return session

def given_back():
    gc.collect()
    if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)

def call(session):
    if not caches:
        session.run(None, given)
        return
    bound = session.io_binding()
    for name, value in given.items():
        bound.bind_input(name, "cpu", 0, value.dtype, value.shape, value.ctypes.data)
    for value in session.get_outputs():
        if value.name not in caches.values():
            bound.bind_output(value.name, "cpu")
    for name, to in caches.items():
        bound.bind_output(to, "cpu", 0, numpy.float32, given[name].shape, given[name].ctypes.data)
    session.run_with_iobinding(bound)

call(opened())
given_back()
before()
session = opened()
loaded()
call(session)
call(session)
"""


def peak_bytes(
    path: Path, feeds: Mapping[str, Array], settings: Settings, caches: Mapping[str, str] | None = None
) -> int | None:
    """Peak resident bytes of weights and activations over one call, in a fresh process; None off Linux.

    ORT has no allocator statistics for CPU, so the process's high-water mark (reset after loading) is read,
    less what the process held before the session was made and ONNX Runtime had run. `caches`: input → output
    that is the same buffer, which stands before; of a batch that is given row by row, one row.
    """
    return resident.peak_bytes(
        _MEASURE_PEAK,
        path,
        list(feeds.values()),
        settings.threads,
        settings.arena,
        settings.pattern,
        library_for(path) or "",
        json.dumps(dict(caches or {})),
        *feeds,
    )


def settings_dict(settings: Settings) -> dict[str, Any]:
    """Settings as plan data."""
    return asdict(settings)


def numpy_feeds(names: Sequence[str], tensors: Sequence[torch.Tensor]) -> dict[str, Array]:
    """Torch tensors as numpy arrays by input name, without copying contiguous CPU tensors."""
    return {
        name: tensor.detach().cpu().resolve_neg().contiguous().numpy()
        for name, tensor in zip(names, tensors, strict=True)
    }
