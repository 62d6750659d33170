"""What the current GPU is and does: its name and versions, and rates by measurement (copies, products by
dtype, the link, a launch).
"""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from importlib import metadata
from pathlib import Path

import torch

from effcompile.core import gpu, torch_compat_memory
from effcompile.machine import memory
from effcompile.machine.hardware import Accelerator, DeviceRates

#: Sides of the squares that are multiplied, the largest that has room: large ones reach the peak, and none
#: takes a second on any GPU.
_SIDES = (8192, 4096, 2048, 1024)
#: Bytes that are copied on the device, and over the link.
_COPIED, _LINKED = 1 << 30, 128 << 20
#: Share of the free bytes that a measurement may take.
_SHARE = 8
#: A context that gives a product to call.
_Product = AbstractContextManager[Callable[[], object]]
_KERNELS = Path(__file__).parent.parent / "backends" / "triton"


def this_accelerator() -> Accelerator:
    """The current GPU."""
    found = torch.cuda.get_device_properties(torch.cuda.current_device())
    amd = getattr(found, "gcnArchName", "") if torch.version.hip else ""
    return Accelerator(
        name=found.name,
        capability=amd or f"{found.major}.{found.minor}",
        processors=found.multi_processor_count,
        memory_bytes=found.total_memory,
        driver=_driver(),
        runtime=f"HIP {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}",
        packages=f"torch {torch.__version__}, triton {_version('triton')}",
        kernels=kernel_sources(),
    )


def device_rates() -> DeviceRates:
    """Measured on the current GPU, in some two seconds."""
    with torch.no_grad(), torch.random.fork_rng(devices=[torch.cuda.current_device()]):
        to_host, from_host = _link()
        rates = DeviceRates(
            bandwidth=_copy_bandwidth(), peak_flops=dict(_peaks()), to_host=to_host, from_host=from_host,
            launch_seconds=_launch_seconds(), library_bytes=torch_compat_memory.library_bytes(),
        )  # fmt: skip
    torch.cuda.empty_cache()
    return rates


def _copy_bandwidth() -> float:
    size = min(_COPIED, _free_bytes() // _SHARE)
    source, target = (torch.empty(size, dtype=torch.uint8, device="cuda") for _ in range(2))
    return 2 * size / gpu.seconds(lambda: target.copy_(source), cold=False)


def _link() -> tuple[float, float]:
    """(to the host, from it)."""
    size = min(_LINKED, _free_bytes() // _SHARE)
    there, host = (
        torch.empty(size, dtype=torch.uint8, device="cuda"),
        torch.empty(size, dtype=torch.uint8, pin_memory=True),
    )
    out = gpu.seconds(lambda: host.copy_(there, non_blocking=True), cold=False)
    return size / out, size / gpu.seconds(lambda: there.copy_(host, non_blocking=True), cold=False)


def _launch_seconds() -> float:
    """Of one of many queued kernels: the host's time to queue it, or the GPU's to begin it, whichever is
    longer.
    """
    number = torch.zeros(1, device="cuda")
    count = 200

    def many() -> None:
        for _ in range(count):
            number.add_(1)

    return gpu.seconds(many, cold=False) / count


def _peaks() -> Iterator[tuple[str, float]]:
    """FLOP/s by dtype; what this GPU or this torch does not multiply is left out."""
    side = next((side for side in _SIDES if _SHARE * 8 * side**2 < _free_bytes()), _SIDES[-1])
    for name, made in _products(side).items():
        with suppress(RuntimeError, AttributeError, NotImplementedError), made() as product:
            yield name, 2.0 * side**3 / gpu.seconds(product, cold=False)
        torch.cuda.empty_cache()


def _products(side: int) -> dict[str, Callable[[], _Product]]:
    """dtype → a context that gives a product of two squares to call."""

    def plain(dtype: torch.dtype) -> Callable[[], object]:
        a = torch.randn(side, side, device="cuda").to(dtype)
        return lambda: a @ a

    @contextmanager
    def of(dtype: torch.dtype) -> Iterator[Callable[[], object]]:
        yield plain(dtype)

    @contextmanager
    def tf32() -> Iterator[Callable[[], object]]:
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("high")
        try:
            yield plain(torch.float32)
        finally:
            torch.set_float32_matmul_precision(before)

    @contextmanager
    def fp8() -> Iterator[Callable[[], object]]:
        a, one = torch.randn(side, side, device="cuda").to(torch.float8_e4m3fn), torch.ones((), device="cuda")
        product = torch.ops.aten._scaled_mm.default
        yield lambda: product(a, a.t(), one, one, out_dtype=torch.bfloat16)

    @contextmanager
    def int8() -> Iterator[Callable[[], object]]:
        a = torch.randint(-100, 100, (side, side), device="cuda", dtype=torch.int8)
        yield lambda: torch.ops.aten._int_mm.default(a, a.t())

    return {
        "fp32": lambda: of(torch.float32), "tf32": tf32, "bf16": lambda: of(torch.bfloat16),
        "fp16": lambda: of(torch.float16), "fp8": fp8, "int8": int8,
    }  # fmt: skip


def _free_bytes() -> int:
    return memory.free_bytes("cuda") or 0


def _driver() -> str:
    """The version of the kernel's driver."""
    for path, word in (("/proc/driver/nvidia/version", "Module"), ("/sys/module/amdgpu/version", "")):
        with suppress(OSError):
            said = Path(path).read_text(encoding="utf-8", errors="replace").splitlines()[0]
            return (
                next(
                    (part for part in said.partition(word)[2].split() if part[:1].isdigit()),
                    said.strip()[:80],
                )
                if word
                else said
            )
    return platform.release() if platform.system() != "Linux" else ""


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"


def kernel_sources() -> str:
    """Eight digits of our kernels' sources and the table of their tiles: other kernels take other times."""
    digest = hashlib.sha256()
    for path in sorted([*_KERNELS.glob("*.toml"), *_KERNELS.glob("**/*.py")]):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:8]
