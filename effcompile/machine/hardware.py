"""What this machine is: processor, cores, threads, memory, package versions, and its memory bandwidth by
measurement.
"""

from __future__ import annotations

import hashlib
import os
import platform
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from time import perf_counter
from typing import Annotated

import msgspec
import psutil

from effcompile.core.timing import interleaved

#: Packages whose kernels we time: a new version may be faster or slower.
PACKAGES = ("torch", "onnxruntime", "openvino", "torchao")


_Rate = Annotated[float, msgspec.Meta(gt=0, le=1e18)]
_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 50)]


class Accelerator(msgspec.Struct, kw_only=True, frozen=True):
    """What a timing on a GPU depends on.

    Attributes:
        capability: NVIDIA's compute capability, or AMD's name of the architecture. processors:
            multiprocessors.
        memory_bytes: in all. driver: its version, "" where the system does not say. runtime: CUDA's or HIP's.
        packages: versions of torch and triton. kernels: digits that change with our kernels and their tiles.
    """

    name: str
    capability: str
    processors: _Count
    memory_bytes: _Count
    driver: str
    runtime: str
    packages: str
    kernels: str


class DeviceRates(msgspec.Struct, kw_only=True, frozen=True):
    """What a GPU does, the best that was seen.

    Attributes:
        bandwidth: bytes/s of a copy in its memory, read and written ones together. peak_flops: dtype → FLOP/s
            of a large product.
        to_host, from_host: bytes/s of copies to and from pinned memory. launch_seconds: of a kernel that does
            next to nothing.
        library_bytes: what the vendor's products keep for themselves from their first call on, per thread
            that calls them; and what those with a bias keep on top.
    """

    bandwidth: _Rate
    peak_flops: dict[str, _Rate]
    to_host: _Rate
    from_host: _Rate
    launch_seconds: Annotated[float, msgspec.Meta(gt=0, le=1)]
    library_bytes: tuple[_Count, _Count] = (0, 0)


class Hardware(msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True):
    """What a timing depends on besides the packages, and what kernels allocate.

    Attributes:
        threads: what the runtimes will use. memory_bytes: rounded to GiB.
        instructions: the sets of vector instructions that kernels choose by, and the environment's limits on
            them.
        device: the GPU that is meant; None for the processor.
    """

    cpu: str
    cores: int
    threads: int
    memory_bytes: int
    instructions: str = ""
    device: Accelerator | None = None

    @property
    def key(self) -> str:
        """Twelve hexadecimal digits that name this machine's files."""
        return hashlib.sha256(msgspec.json.encode(self)).hexdigest()[:12]


def this_hardware(device: Accelerator | None = None) -> Hardware:
    """The machine this process runs on. `device`: its GPU that is meant."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    return Hardware(
        cpu=_cpu_model(),
        cores=cores,
        threads=_threads(cores),
        memory_bytes=_memory_bytes(),
        instructions=_instructions(),
        device=device,
    )


def _threads(cores: int) -> int:
    """What `torch.set_num_threads` said, else the environment, else one for each of the cores."""
    asked = os.environ.get("OMP_NUM_THREADS", "").split(",")[0]
    threads = int(asked) if asked.isdigit() and int(asked) > 0 else cores
    torch_threads = getattr(sys.modules.get("torch"), "get_num_threads", None)
    set_here = threads if torch_threads is None else int(torch_threads())
    # unless told otherwise torch takes one for each core that is none of hyper-threading's
    return threads if set_here in (cores, psutil.cpu_count(logical=False)) and not asked else set_here


def package_versions() -> dict[str, str]:
    """Installed versions of PACKAGES, read without importing them."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return versions


def read_bandwidth(nbytes: int = 2**28) -> float:
    """Bytes/s of reading a buffer much larger than the caches: torch's sum over `nbytes` of fp32, all
    threads.
    """
    import torch

    buffer = torch.ones(nbytes // 4, dtype=torch.float32)
    return nbytes / _best_seconds(lambda: buffer.sum())


def matmul_peak(size: int = 768) -> float:
    """FLOP/s of torch's fp32 product of two square matrices, all threads."""
    import torch

    a = torch.randn(size, size, dtype=torch.float32)
    with torch.no_grad():
        return 2.0 * size**3 / _best_seconds(lambda: a @ a)


def small_product(size: int = 160) -> Callable[[], object]:
    """What a pace is told by (core/pace.py): 8 MFLOP of fp32 on 300 KiB, as torch does it."""
    import torch

    a = torch.ones(size, size, dtype=torch.float32, device="cpu")

    def product() -> None:
        with torch.no_grad():
            a @ a

    return product


def _best_seconds(fn: Callable[[], object], budget: float = 0.3) -> float:
    """The fastest call of many: a peak is what the machine can do, not what it does while others use it."""
    samples: list[float] = []
    deadline = perf_counter() + budget
    while len(samples) < 5 or perf_counter() < deadline:
        samples += interleaved({"": fn}, 1)[""]
    return min(samples)


def _cpu_model() -> str:
    named = _cpu_entry("model name") or _arm_model()
    return named or platform.processor() or platform.machine() or "unknown processor"


def _arm_model() -> str:
    """Of an ARM, which Linux tells by numbers alone: "ARM implementer 0x41, part 0xd0c"; "" of others."""
    implementer, part = _cpu_entry("CPU implementer"), _cpu_entry("CPU part")
    return f"ARM implementer {implementer}, part {part}" if part else ""


def _cpu_entry(name: str) -> str:
    """An entry of Linux's table of processors, of the first one; "" elsewhere."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == name:
                return value.strip()
    except OSError:
        pass
    return ""


#: As Linux names them. Virtual machines hide some of what a processor of one name has.
_SETS = frozenset(
    (
        "avx2",
        "fma",
        "avx512f",
        "avx512_vnni",
        "avx512_bf16",
        "avx512_fp16",
        "avx_vnni",
        "amx_tile",
        "amx_bf16",
        "amx_int8",
        "amx_fp16",
        "asimd",
        "asimddp",
        "i8mm",
        "sve",
        "sve2",
    )
)
#: What tells torch, oneDNN and MKL to use less than there is.
_LIMITS = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS")


def _instructions() -> str:
    """For instance "avx2 avx512f fma; ONEDNN_MAX_CPU_ISA=AVX2"."""
    told = _cpu_entry("flags") or _cpu_entry("Features")  # the second on ARM
    flags = sorted(_SETS.intersection(told.split()))
    return "; ".join(
        [" ".join(flags), *(f"{name}={os.environ[name].upper()}" for name in _LIMITS if os.environ.get(name))]
    )


def _memory_bytes() -> int:
    """Physical memory, or the container's limit where that is lower, in whole GiB (rounded up)."""
    size = psutil.virtual_memory().total
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii").strip()
        size = min(size, int(limit)) if limit.isdigit() else size
    except OSError:
        pass
    return -(-size // 2**30) * 2**30
