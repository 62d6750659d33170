"""Compile kernels for GPUs that are not here, down to the assembler, and report what they need.

Imports no triton.

A `CompileJob` names a launch by the function that makes it, so that what is compiled is what would run. Jobs
go to worker processes (`aot_worker`), since triton's compiler may abort instead of raising, and a process
either interprets or compiles.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from effcompile.backends.triton.aot_loops import Loop

__all__ = ["ARCHITECTURES", "SHARED_LIMIT", "CompileJob", "Report", "compile_jobs"]

#: Architectures that a table is made for.
ARCHITECTURES = ("sm_80", "sm_90", "sm_100", "gfx942")
#: Shared memory (LDS) that one program may take, in bytes (CUDA C++ Programming Guide, table of compute
#: capabilities; CDNA3 and CDNA4 ISA).
SHARED_LIMIT = {
    "sm_80": 163 << 10, "sm_90": 227 << 10, "sm_100": 227 << 10, "gfx942": 64 << 10, "gfx950": 160 << 10,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileJob:
    """One kernel to compile.

    launch: `module:function`, which is called with `arguments` in the worker, where launches are recorded
    instead of run. kernel: name of the recorded kernel that is compiled.
    """

    arch: str
    launch: str
    kernel: str
    arguments: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a compiled kernel needs.

    shared: bytes of shared memory. registers: per thread. spills: bytes stored per thread. tensor_ops:
    tensor-core instructions in the assembly. additions: of fp32, there. loops: the innermost ones with
    products, on NVIDIA's. error: why there is none of it, in one line; None when it compiled.
    """

    shared: int = 0
    registers: int = 0
    spills: int = 0
    tensor_ops: int = 0
    additions: int = 0
    loops: tuple[Loop, ...] = ()
    error: str | None = None

    @classmethod
    def read(cls, line: str) -> Report:
        """As a worker wrote it."""
        found = json.loads(line)
        return cls(**found | {"loops": tuple(Loop(**loop) for loop in found["loops"])})

    def fits(self, arch: str) -> bool:
        """Compiled, and a program finds room on the architecture."""
        return self.error is None and self.shared <= SHARED_LIMIT[arch]


def compile_jobs(jobs: Sequence[CompileJob]) -> Iterator[tuple[CompileJob, Report]]:
    """Each job with its report, as they are done.

    A job that kills its worker is reported so, and the rest go to a new one.
    """
    left = list(jobs)
    while left:
        worker = _start()
        assert worker.stdin is not None and worker.stdout is not None
        worker.stdin.write("".join(json.dumps(asdict(job)) + "\n" for job in left))
        worker.stdin.close()
        try:
            for line in worker.stdout:
                if line.startswith("{"):  # anything else is the compiler talking
                    yield left.pop(0), Report.read(line)
        finally:
            worker.kill()
            code = worker.wait()
        if left:
            yield left.pop(0), Report(error=f"the compiler ended its process (exit status {code})")


def _start() -> subprocess.Popen[str]:
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "ignore", "-m", "effcompile.backends.triton.aot_worker"]
    return subprocess.Popen(
        command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=None, text=True
    )
