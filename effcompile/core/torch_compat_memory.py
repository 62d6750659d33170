"""What torch tells of its memory, by private APIs: traces of the allocator, and what its libraries keep for
themselves.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch

from effcompile.core.garbage import uncollected


@contextlib.contextmanager
def memory_profile() -> Iterator[torch.profiler.profile]:
    """Records every allocation and free of the CPU (and, where there is one, the CUDA) allocator.

    Python's collector rests.
    """
    with (
        uncollected(),
        torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
        ) as profile,
    ):
        yield profile


@contextlib.contextmanager
def watched_memory(device: str) -> Iterator[Callable[[], int]]:
    """What it yields says, after the context, how many bytes beyond those before it were allocated on a type
    of device at the most.
    """
    found: list[int] = []
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        yield lambda: found[0]
        torch.cuda.synchronize()
        found.append(torch.cuda.max_memory_allocated() - before)
    else:
        with memory_profile() as profile:
            yield lambda: found[0]
        found.append(peak_of_memory_events(profile))


def forget_workspaces() -> bool:
    """Have the vendor's products take their workspaces anew at their next call; whether torch can."""
    clear: Callable[[], None] | None = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if clear is not None:
        clear()
    return clear is not None


def library_bytes() -> tuple[int, int]:
    """Bytes that the vendor's products keep for themselves on the current GPU, per thread that calls them; 0
    where torch does not tell.

    The second is what one with a bias takes on top, which goes by another library (cuBLASLt).
    """
    a, row = torch.ones(1024, 1024, device="cuda"), torch.ones(1024, device="cuda")
    torch.cuda.synchronize()
    if not forget_workspaces():
        return 0, 0
    taken = [torch.cuda.memory_allocated()]
    for product in (lambda: torch.mm(a, a), lambda: torch.addmm(row, a, a)):
        product()
        torch.cuda.synchronize()
        taken.append(torch.cuda.memory_allocated())
    return max(0, taken[1] - taken[0]), max(0, taken[2] - taken[1])


def held_by_libraries() -> int:
    """Bytes that the vendor's products keep on the current GPU from a step's end on: of this thread, and of
    that which runs a backward.

    They are freed and taken again here, by a small step, so that a step that is watched from here on finds
    them there as every later one does. 0 where there is no GPU in use, or torch does not tell.
    """
    if not torch.cuda.is_initialized():
        return 0
    weight, row = torch.ones(64, 64, device="cuda", requires_grad=True), torch.ones(64, device="cuda")
    torch.cuda.synchronize()
    if not forget_workspaces():
        return 0
    before = torch.cuda.memory_allocated()
    with torch.enable_grad():
        torch.addmm(row, weight.detach(), weight).mm(weight).sum().backward()
    weight.grad = None
    torch.cuda.synchronize()
    return max(0, torch.cuda.memory_allocated() - before)


def peak_of_memory_events(profile: torch.profiler.profile) -> int:
    """Highest running sum of the CPU allocations and frees that a profile with `profile_memory=True`
    recorded.
    """
    live = peak = 0
    for event in profile.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.name() == "[memory]" and event.device_type().name == "CPU":
            live += event.nbytes()  # type: ignore[union-attr]
            peak = max(peak, live)
    return peak
