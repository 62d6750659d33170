"""Each family of kernels is compared with PyTorch's arithmetic before its first use, once per device, driver,
torch, triton and source.

In processes of their own: a kernel that reads where it must not ends its process and its CUDA context, not
the user's. Verdicts are kept in the cache's file `proof-<digest>.json`; a file that is damaged is made again.

    python -m effcompile.backends.triton.proof cuda:0 attention:bfloat16:0 rows:float32:0   # a JSON line each
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

import msgspec
import torch

from effcompile.backends.triton.configs import interpreting
from effcompile.core.errors import EffcompileError
from effcompile.core.files import cache_folder, read_kept, write_kept
from effcompile.core.stages import first_line
from effcompile.machine.accelerator import kernel_sources, this_accelerator

__all__ = ["USUAL", "KernelVerdict", "prove", "proven"]

#: What is compared before the first use, by the name of the dtype: float16 runs the kernels of bfloat16.
USUAL = ("bfloat16", "float32")
_SECONDS = 240
_MOST_BYTES = 1 << 20
#: Bytes that a process's context and kernels take of the device.
_CONTEXT = 1 << 30
log = logging.getLogger("effcompile")

#: A family, the name of a dtype, and a part of the family's cases.
Unit = tuple[str, str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelVerdict:
    """On one family in one dtype: its worst case's error, what that may be, and why the family is not used,
    if it is not.
    """

    family: str
    dtype: str
    part: int = 0
    case: str = ""
    error: float = 0.0
    limit: float = 0.0
    reason: str | None = None


def proven(families: Sequence[str], device: str, dtypes: Sequence[str] = USUAL) -> dict[str, str | None]:
    """Family → None, or why its kernels are not to be used on this device; those that nobody has compared yet
    are compared now.
    """
    found = prove([(family, dtype) for family in families for dtype in dtypes], device)
    return {
        family: next((v.reason for v in found if v.family == family and v.reason), None)
        for family in families
    }


def prove(wanted: Sequence[tuple[str, str]], device: str) -> list[KernelVerdict]:
    """The verdicts on (family, dtype), kept ones where there are some."""
    path = cache_folder() / f"proof-{_digest(device)}.json"
    kept = _read(path)
    missing = [pair for pair in wanted if pair not in kept]
    if missing:
        log.info(
            "compare %d families of kernels with PyTorch's on this device, once",
            len({family for family, _ in missing}),
        )
        found = _in_processes([(*pair, part) for pair in missing for part in range(_parts(pair[0]))], device)
        kept |= {pair: _worst([v for v in found if (v.family, v.dtype) == pair]) for pair in missing}
        _write(path, kept)
    return [kept[pair] for pair in wanted]


def _parts(family: str) -> int:
    return len(import_module("effcompile.backends.triton.proof_cases").CASES.get(family, (None,)))


def _worst(parts: Sequence[KernelVerdict]) -> KernelVerdict:
    return max(parts, key=lambda v: (v.reason is not None, v.error / v.limit if v.limit else 0.0))


def _in_processes(units: Sequence[Unit], device: str) -> list[KernelVerdict]:
    """Each unit's verdict, of some processes side by side; one without, for its process ended, gets a process
    of its own.
    """
    count = _processes(device, len(units))
    found = [v for share in _run([units[i::count] for i in range(count)], device) for v in share]
    left = [unit for unit in units if unit not in {(v.family, v.dtype, v.part) for v in found}]
    for family, dtype, part in left:
        (alone,) = _run([[(family, dtype, part)]], device)
        found += alone or [
            KernelVerdict(
                family=family,
                dtype=dtype,
                part=part,
                reason="the process that compared it ended without a result",
            )
        ]
    return found


def _run(shares: Sequence[Sequence[Unit]], device: str) -> list[list[KernelVerdict]]:
    started = []
    for share in shares:
        command = [
            sys.executable,
            "-m",
            __name__,
            _place(device),
            *(f"{family}:{dtype}:{part}" for family, dtype, part in share),
        ]
        env = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "OMP_NUM_THREADS": "1",
            "EFFCOMPILE_TUNE": "off",
        }
        started.append(
            subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        )
    until = time.monotonic() + _SECONDS
    return [_verdicts(process, until) for process in started]


def _place(device: str) -> str:
    """A type of device with the index of the current GPU: another process's would be the first."""
    return f"{device}:{torch.cuda.current_device()}" if device == "cuda" else device


def _verdicts(process: subprocess.Popen[str], until: float) -> list[KernelVerdict]:
    try:
        text, _ = process.communicate(timeout=max(1.0, until - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.kill()
        text, _ = process.communicate()
    found = []
    for line in text.splitlines():
        if line.startswith("{"):
            try:
                found.append(KernelVerdict(**json.loads(line)))
            except (ValueError, TypeError):  # a line that its end cut short
                continue
    return found


def _processes(device: str, units: int) -> int:
    """As many as there are cores for, and memory on the device.

    Nearly all of their time goes to compilers.
    """
    room = units if device == "cpu" else torch.cuda.mem_get_info()[0] // _CONTEXT // 2
    return max(1, min(units, os.cpu_count() or 1, room))


def _digest(device: str) -> str:
    """Of all that a verdict hangs on: the device with its driver, the versions and the sources."""
    about = [device, str(interpreting()), torch.__version__, version("triton"), kernel_sources()]
    there = b"" if device == "cpu" else msgspec.json.encode(this_accelerator())
    return hashlib.sha256("\0".join(about).encode() + there).hexdigest()[:16]


def _read(path: Path) -> dict[tuple[str, str], KernelVerdict]:
    try:
        verdicts = [
            KernelVerdict(**each) for each in json.loads(read_kept(path, _MOST_BYTES, "kept verdicts"))
        ]
    except (EffcompileError, ValueError, TypeError):  # none yet, or damaged: made again
        return {}
    return {(v.family, v.dtype): v for v in verdicts}


def _write(path: Path, kept: Mapping[tuple[str, str], KernelVerdict]) -> None:
    try:
        write_kept(path, json.dumps([asdict(v) for v in kept.values()], indent=1).encode())
    except EffcompileError as error:  # a read-only home: compared again by the next process
        log.info("the verdicts on kernels are not kept: %s", error)


def _compared(family: str, name: str, part: int, device: str) -> KernelVerdict:
    """All cases of a part of one family in one dtype, in this process."""
    from effcompile.backends.triton.proof_cases import CASES, Maker

    dtype = getattr(torch, name)
    make = Maker(device, dtype, torch.Generator().manual_seed(0))
    worst, error, limit = "", -1.0, 0.0
    for one in CASES[family][part](make):
        if not one.error <= one.limit(dtype):
            reason = (
                f"{one.name} in {name}: relative error {one.error:.1e} against PyTorch's, more than "
                f"{one.limit(dtype):.1e}"
            )
            return KernelVerdict(
                family=family,
                dtype=name,
                part=part,
                case=one.name,
                error=-1.0,
                limit=one.limit(dtype),
                reason=reason,
            )
        if one.error > error:
            worst, error, limit = one.name, one.error, one.limit(dtype)
    return KernelVerdict(family=family, dtype=name, part=part, case=worst, error=error, limit=limit)


def main(place: str, *units: str) -> None:
    """Print a verdict for each FAMILY:DTYPE:PART, on a place like "cuda:1"."""
    device = torch.device(place).type
    if device == "cuda":
        torch.cuda.set_device(torch.device(place))
    if interpreting():
        import_module("effcompile.backends.triton.interpreter").patch_interpreter()
    for unit in units:
        family, name, part = unit.split(":")
        try:
            module = family.partition("_in_")[0]
            import_module(f"effcompile.backends.triton.{module}").register(device)
            verdict = _compared(family, name, int(part), device)
        except Exception as error:
            verdict = KernelVerdict(
                family=family, dtype=name, part=int(part), reason=f"in {name}: {first_line(error)}"
            )
        print(json.dumps(asdict(verdict)), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
