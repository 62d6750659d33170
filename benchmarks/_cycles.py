"""How long attention takes on a GPU that is not here: cycles of a kernel's steps, read off its machine code,
and its programs carried out in their order on the GPU's processors.

Pure arithmetic; gpu_model.py prints it. A step of a program's loop takes tensor cores T cycles, the rest of
its instructions S, and its waits L. One program alone does one after the other; several on a processor fill a
part of each other's gaps.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from effcompile.backends.triton.aot import Report
from effcompile.backends.triton.aot_loops import Loop


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A GPU's processors, per cycle of one of them.

    flops: dense in 16 bits, by products of four warps; warp_share: the part of it that products of a single
    warp reach. special: functions like 2**x. banks: bytes of shared memory. schedulers: instructions that
    begin. wait: cycles that something awaited takes to be there, on average. apart: the part of programs'
    gaps that others on the processor leave unfilled. memory: cycles of a read from the device's memory.
    """

    processors: int
    hertz: float
    flops: int
    warp_share: float
    special: int
    banks: int
    schedulers: int
    registers: int
    shared: int
    wait: float
    apart: float
    memory: float


#: NVIDIA H100 SXM: white paper v1.04, tables 2 and 4; CUDA programming guide, table of arithmetic throughput;
#: products of single warps: 62 % (Luo et al., arXiv 2402.13499, table 8), memory: table 4. Three are fitted,
#: to what gpu_model.py says: the clock under such a load (1.83 GHz at the most), a wait, and the gaps.
H100 = Machine(
    processors=132, hertz=1.5e9, flops=4096, warp_share=0.62, special=16, banks=128, schedulers=4,
    registers=65536, shared=227 << 10, wait=60.0, apart=0.6, memory=800.0,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Cycles:
    """Of one step: of tensor cores, of everything else that begins, of waits."""

    tensor: float
    rest: float
    waits: float

    def of(self, programs: int, apart: float) -> float:
        """Cycles of a step of one program, where so many share a processor and are at their steps at once.

        They take at least what the busiest unit takes, at the most what they take one after the other; apart:
        how far from the least.
        """
        alone = self.tensor + self.rest + self.waits
        least = max(alone, programs * max(self.tensor, self.rest))
        return least + apart * (programs * alone - least)


def cycles(loop: Loop, warps: int, machine: Machine) -> Cycles:
    """Of a loop's step by all of a program's warps."""
    tensor = 0.0
    for name, count in loop.products.items():
        shape, _, where = name.partition(" ")
        m, n, k = map(int, shape.split("x"))
        if m == 64:
            read = 2 * k * (n + (0 if where else m)) / machine.banks
            tensor += count * warps / 4 * max(2 * m * n * k / machine.flops, read)
        else:
            tensor += count * warps * 2 * m * n * k / (machine.flops * machine.warp_share)
    others = loop.instructions - sum(loop.products.values())
    begun = others * warps / machine.schedulers
    special = loop.exponentials * warps * 32 / machine.special
    return Cycles(tensor, max(begun, special), loop.waits * machine.wait)


def resident(report: Report, warps: int, machine: Machine) -> int:
    """Programs that a processor holds at once."""
    registers = -(-report.registers // 8) * 8 * 32 * warps
    return max(1, min(machine.registers // registers, machine.shared // (report.shared + 1024), 64 // warps))


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """A compiled kernel: cycles of a step where nothing is masked and where some is, and before and after."""

    whole: float
    masked: float
    around: float
    resident: int

    @classmethod
    def of(cls, report: Report, warps: int, machine: Machine, *, passes: float = 2.0) -> Kernel:
        """passes: rounds to the device's memory and back before the first step and after the last."""
        held = resident(report, warps, machine)
        whole, masked = (cycles(loop, warps, machine).of(held, machine.apart) for loop in report.loops[:2])
        return cls(whole=whole, masked=masked, around=passes * machine.memory, resident=held)


def seconds(kernel: Kernel, steps: Sequence[tuple[int, int]], copies: int, machine: Machine) -> float:
    """Of a launch whose programs take (whole, masked) steps, in their order, `copies` times over.

    A program begins where the first one before it ends.
    """
    slots = machine.processors * kernel.resident
    ends = [0.0] * slots
    took = [n * kernel.whole + m * kernel.masked + kernel.around for n, m in steps]
    for _ in range(copies):
        for each in took:
            heapq.heapreplace(ends, ends[0] + each)
    return max(ends) / machine.hertz


def rate(flops: float, took: Iterable[float]) -> float:
    """TFLOP/s."""
    return flops / sum(took) / 1e12
