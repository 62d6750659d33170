"""The process in which kernels are compiled for absent GPUs: jobs on stdin, one report per line on stdout.

See `aot`.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from effcompile.backends.triton.aot import CompileJob, Report
from effcompile.backends.triton.aot_loops import loops

_TENSOR_OPS = re.compile(r"wgmma\.mma_async|mma\.sync|tcgen05\.mma|v_s?mfma")
_ADDITIONS = re.compile(r"\badd(?:\.rn)?(?:\.ftz)?\.f32\b")
_POINTERS = {
    torch.float64: "*fp64", torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16",
    torch.float8_e4m3fn: "*fp8e4nv", torch.float8_e5m2: "*fp8e5", torch.int64: "*i64", torch.int32: "*i32",
    torch.int16: "*i16", torch.int8: "*i8", torch.uint8: "*u8", torch.bool: "*i1",
}  # fmt: skip
_OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion")

Launch = tuple[Any, dict[str, Any], dict[str, Any]]  # kernel, arguments by name, options


def main() -> None:
    """Answer each line of stdin."""
    for line in sys.stdin:
        job = CompileJob(**json.loads(line))
        try:
            report = run(job)
        except Exception as error:  # the compiler's errors have no common base
            report = Report(error=_said(error))
        print("\n" + json.dumps(asdict(report)), flush=True)


def _said(error: BaseException) -> str:
    """The innermost cause, in one line: triton wraps it once per function it was in."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (
        f"{type(error).__name__}: "
        f"{' … '.join(dict.fromkeys((lines or ['no reason given'])[:1] + lines[-1:]))}"
    )


def run(job: CompileJob) -> Report:
    """Compile the job's kernel."""
    module, _, function = job.launch.partition(":")
    with recorded() as launches:
        getattr(importlib.import_module(module), function)(**job.arguments)
    kernel, arguments, options = next(launch for launch in launches if launch[0].__name__ == job.kernel)
    return compiled(kernel, arguments, options, job.arch)


@contextmanager
def recorded() -> Iterator[list[Launch]]:
    """Within this context, kernels are recorded where they would be launched; their outputs stay
    as they are.
    """
    launches: list[Launch] = []
    original: Any = JITFunction.run

    def record(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        options = {name: kwargs.pop(name) for name in _OPTIONS if name in kwargs}
        launches.append((self, dict(zip(self.arg_names, args, strict=False)) | kwargs, options))

    JITFunction.run = record
    try:
        yield launches
    finally:
        JITFunction.run = original


def compiled(kernel: Any, arguments: dict[str, Any], options: dict[str, Any], arch: str) -> Report:
    """Compile one launch for an architecture, as the launcher would specialise it."""
    nvidia = arch.startswith("sm_")
    target = GPUTarget("cuda", int(arch[3:]), 32) if nvidia else GPUTarget("hip", arch, 64)
    made = triton.compile(
        specialised(kernel, arguments), target=target, options={"enable_fp_fusion": True, **options}
    )
    return _nvidia(made, int(arch[3:])) if nvidia else _amd(made)


def specialised(kernel: Any, arguments: Mapping[str, Any]) -> ASTSource:
    """A kernel with the types and constants of a launch, as the launcher would have it."""
    signature: dict[str, Any] = {}
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}
    for index, parameter in enumerate(kernel.params):
        value = arguments[parameter.name]
        if parameter.is_constexpr:
            signature[parameter.name], constants[(index,)] = "constexpr", value
        elif parameter.do_not_specialize:
            signature[parameter.name] = "i32"
        else:
            signature[parameter.name] = _type_of(value, (index,), constants, attributes)
    return ASTSource(kernel, signature, constants, attributes)


def _type_of(
    value: Any,
    path: tuple[int, ...],
    constants: dict[tuple[int, ...], Any],
    attributes: dict[tuple[int, ...], Any],
) -> Any:
    """The type of an argument in a signature; what the launcher folds into the code (None, 1) becomes a
    constant.
    """
    if isinstance(value, tuple):
        return tuple(_type_of(one, (*path, i), constants, attributes) for i, one in enumerate(value))
    if isinstance(value, TensorDescriptor):
        return f"tensordesc<{_POINTERS[value.base.dtype][1:]}{list(value.block_shape)}>"
    if value is None or (isinstance(value, int) and value == 1):
        constants[path] = value
        return "constexpr"
    if isinstance(value, float):
        return "fp32"
    if isinstance(value, torch.Tensor) or value % 16 == 0:  # tensors of torch's allocator are aligned
        attributes[path] = [["tt.divisibility", 16]]
    return (
        _POINTERS[value.dtype] if isinstance(value, torch.Tensor) else "i32" if abs(value) < 2**31 else "i64"
    )


def _nvidia(made: Any, capability: int) -> Report:
    ptx = made.asm["ptx"]
    said = _assembled(ptx, capability)
    numbers: dict[str, Any] = {
        name: int(found.group(1)) for name, pattern in _PTXAS.items() if (found := re.search(pattern, said))
    }
    counts: dict[str, Any] = {
        "tensor_ops": len(_TENSOR_OPS.findall(ptx)),
        "additions": len(_ADDITIONS.findall(ptx)),
    }
    # without a product there is no loop with one, and nvdisasm takes 0.4 s to start
    steps = loops(_disassembled(made.asm["cubin"])) if counts["tensor_ops"] else ()
    return Report(shared=made.metadata.shared, **counts, **numbers, loops=steps)


_PTXAS = {"registers": r"Used (\d+) registers", "spills": r"(\d+) bytes spill stores"}


def _assembled(ptx: str, capability: int) -> str:
    """What ptxas says of the kernel's registers."""
    suffix = "a" if capability >= 90 else ""
    with tempfile.NamedTemporaryFile("w", suffix=".ptx", delete=False) as file:
        file.write(ptx)
    try:
        command = [
            get_ptxas(capability).path,
            "-v",
            f"--gpu-name=sm_{capability}{suffix}",
            file.name,
            "-o",
            os.devnull,
        ]
        return subprocess.run(command, check=True, capture_output=True, text=True).stderr
    finally:
        os.unlink(file.name)


def _disassembled(cubin: bytes) -> str:
    """The machine code in words."""
    with tempfile.NamedTemporaryFile(suffix=".cubin", delete=False) as file:
        file.write(cubin)
    try:
        command = [str(Path(get_ptxas(80).path).with_name("nvdisasm")), "-c", file.name]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout
    finally:
        os.unlink(file.name)


def _amd(made: Any) -> Report:
    text = made.asm["amdgcn"]
    found: Callable[[str], int] = lambda name: int(re.search(rf"\.{name}:\s+(\d+)", text).group(1))  # type: ignore[union-attr]  # noqa: E731
    spilled = found("vgpr_spill_count") * 4
    return Report(
        shared=made.metadata.shared,
        registers=found("vgpr_count"),
        spills=spilled,
        tensor_ops=len(_TENSOR_OPS.findall(text)),
    )


if __name__ == "__main__":
    main()
