"""Sections of gpu.py: what planned steps reserve of a GPU, and copies to the host beside the compute."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from _gpu_common import DEVICE, DRY, DTYPE, END, OUT, attempt, late, make, mine, missing, say, seconds
from _gpu_step import BATCH, LENGTH, SHAPE, Llama, lost

import effcompile
from effcompile.ops.offload import arrived, ask, fetch, offload, send, sent

#: A quarter of the layers: what is looked at are bytes.
SMALLER = (*SHAPE[:2], max(1, SHAPE[2] // 4), *SHAPE[3:])
#: How torch's allocator takes memory, each in a process of its own: it reads this when it first takes some.
ALLOCATORS = ("expandable_segments:False", "expandable_segments:True")


def memory() -> None:
    """`reserved` in processes of their own."""
    script = str(Path(__file__).with_name("gpu.py"))
    for allocator in ALLOCATORS:
        if late():
            return
        left = ["--seconds", str(max(1.0, END[0] - time.monotonic()))]
        out = ["--out", OUT[0].name] if OUT else []
        command = [
            sys.executable,
            script,
            "--processes",
            "0",
            *left,
            *out,
            *["--dry"] * DRY,
            "--only",
            "reserved",
        ]
        environment = {**os.environ, "PYTORCH_ALLOC_CONF": allocator}
        done = subprocess.run(command, env=environment, check=False)
        say(case="memory", allocator=allocator, exit_status=done.returncode)


def reserved() -> None:
    """Five steps with updates at half of eager's peak: allocated, reserved and in use after each.

    The plan's notes say whether they ran where no more may be reserved than was foreseen.
    """
    if late() or lost("reserved", missing("msgspec", "z3")):
        return
    torch.manual_seed(0)
    model = Llama(*SMALLER, LENGTH).to(DEVICE, DTYPE)
    ids, labels = (torch.randint(SHAPE[-1], (BATCH, LENGTH), device=DEVICE) for _ in range(2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    torch.cuda.reset_peak_memory_stats()
    model(ids, labels).backward()
    optimizer.step()
    natural = torch.cuda.max_memory_allocated()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    model.zero_grad(set_to_none=True)
    torch.cuda.empty_cache()
    with attempt("reserved", name="planned"):
        planned = effcompile.optimize(
            model,
            inputs={"ids": ids, "labels": labels},
            mode="training",
            optimizer=optimizer,
            memory=natural // 2,
        )
        said = [str(note) for note in planned.plan.notes if "allocator" in str(note)]
        say(
            case="reserved",
            name="plan",
            limit_mbytes=natural / 2e6,
            notes=said,
            allocator=os.environ.get("PYTORCH_ALLOC_CONF"),
        )
        steps(planned, ids, labels)


def steps(planned: Any, ids: torch.Tensor, labels: torch.Tensor) -> None:
    for step in range(1, 6):
        torch.cuda.reset_peak_memory_stats()
        planned(ids=ids, labels=labels).backward()
        planned.optimizer.step()
        planned.optimizer.zero_grad()
        torch.cuda.synchronize()
        free, size = torch.cuda.mem_get_info()
        say(
            case="reserved", name=f"step {step}", allocated_mbytes=torch.cuda.max_memory_allocated() / 1e6,
            reserved_mbytes=torch.cuda.max_memory_reserved() / 1e6, in_use_mbytes=(size - free) / 1e6,
        )  # fmt: skip


def copies() -> None:
    """A value that is sent to the host and asked back: alone, and beside products that take as long."""
    if not mine():
        return
    side, size = (64, 1 << 12) if DRY else (8192, 1 << 27)
    a, x = make(side, side), make(size)

    def products() -> torch.Tensor:
        out = a
        for _ in range(2 if DRY else 8):
            out = a @ a
        return out

    def beside() -> torch.Tensor:
        slot = send(x)
        products()
        coming = ask(sent(slot, x))
        products()
        return arrived(coming)

    with attempt("copies"):
        kept = x.clone()
        say(
            case="correct: copies",
            ok=bool(torch.equal(beside(), kept) and torch.equal(fetch(offload(x)), kept)),
        )
        alone, both = seconds(lambda: fetch(offload(x))), seconds(lambda: (products(), products()))
        together = seconds(beside)
        say(
            case="copies", gbytes_per_s=2 * x.nbytes / alone / 1e9, copies_ms=alone * 1e3,
            products_ms=both * 1e3, together_ms=together * 1e3,
            hidden=(alone + both - together) / min(alone, both),
        )  # fmt: skip
