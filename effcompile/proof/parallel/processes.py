"""A function on so many ranks of this machine: forked processes that meet over gloo, so that torch is
imported once.

A rank runs on one thread: the thread pools of the process that is forked do not follow it.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

from effcompile.core import torch_compat_ranks
from effcompile.core.errors import EffcompileError, RankError, UsageError
from effcompile.core.stages import first_line

T = TypeVar("T")
#: Ranks that one machine is asked to run.
MOST = 16


def on_ranks(
    function: Callable[..., T], world: int, *args: object, seconds: float = 300.0, silence: float = 60.0
) -> list[T]:
    """What `function(rank, *args)` returns on each of `world` gloo ranks, in their order.

    Args:
        function: may close over anything: it is forked with this process. What it returns is pickled.
        world: how many ranks.
        args: given to each.
        seconds: for all of it.
        silence: seconds that a collective waits for a rank.

    Raises:
        RankError: a rank ended without a result, or in no time. UsageError: no such number of ranks, or no
            fork here.
        EffcompileError: what a rank raised, if that is one of ours; of several, the one that is no
            consequence of another's.
    """
    if not 1 <= world <= MOST:
        raise UsageError(f"ranks = {world}: give 1 to {MOST} processes of this machine.")
    if not hasattr(os, "fork"):
        raise UsageError(
            "Ranks of this machine are forked processes, which this system has not. Start them yourself, "
            "with torchrun."
        )
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory(prefix="effcompile-ranks-") as folder:
        started: list[tuple[ForkProcess, Connection]] = []
        sys.stdout.flush(), sys.stderr.flush()
        try:
            for rank in range(world):
                mine, theirs = context.Pipe(duplex=False)
                process = context.Process(
                    target=_rank, args=(rank, world, Path(folder) / "store", theirs, silence, function, args)
                )
                process.start()
                theirs.close()
                started.append((process, mine))
            return _results(started, seconds)
        finally:
            for process, mine in started:
                if process.is_alive():
                    process.kill()
                process.join()
                mine.close()


def _rank(
    rank: int,
    world: int,
    store: Path,
    told: Connection,
    silence: float,
    function: Callable[..., object],
    args: Sequence[object],
) -> None:
    """A forked process. It leaves without the exit handlers of the process that it is a copy of."""
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # a machine without a network name has this one
    status, answer = 1, b""
    try:
        torch_compat_ranks.check_forked_autograd()
        try:
            dist.init_process_group(
                "gloo",
                init_method=f"file://{store}",
                rank=rank,
                world_size=world,
                timeout=timedelta(seconds=silence),
            )
            dist.barrier()  # who leaves before all have met closes connections that others wait for
        except RuntimeError as error:
            raise RankError(f"Rank {rank} did not reach the others: {_unreachable(error)}") from error
        answer = pickle.dumps((True, function(rank, *args)))
        status = 0
    except BaseException as error:
        answer = _pickled(error)
    with contextlib.suppress(OSError):
        told.send_bytes(answer)
    sys.stdout.flush(), sys.stderr.flush()
    os._exit(status)


def _unreachable(error: RuntimeError) -> str:
    """gloo's words, or which network interface was named that is not here."""
    here, named = [name for _, name in socket.if_nameindex()], os.environ["GLOO_SOCKET_IFNAME"]
    if wrong := [name for name in named.split(",") if name not in here]:
        there = ", ".join(here)
        return f"$GLOO_SOCKET_IFNAME names {wrong[0]!r}; interfaces here: {there}. Unset it, or name one."
    return first_line(error)


def _pickled(error: BaseException) -> bytes:
    try:
        answer = pickle.dumps((False, error))
        pickle.loads(answer)
    except Exception:
        said = f"{type(error).__name__}: {error}"
        answer = pickle.dumps(
            (False, type(error)(said) if isinstance(error, RankError) else RuntimeError(said))
        )
    return answer


def _results(started: Sequence[tuple[ForkProcess, Connection]], seconds: float) -> list[T]:
    found: dict[int, T] = {}
    failed: dict[int, BaseException] = {}
    waiting = {mine: rank for rank, (_, mine) in enumerate(started)}
    end = time.monotonic() + seconds
    while waiting and (left := end - time.monotonic()) > 0:
        for mine in wait(list(waiting), timeout=left):
            assert isinstance(mine, Connection)
            rank = waiting.pop(mine)
            try:
                fine, value = pickle.loads(mine.recv_bytes())
            except EOFError:
                fine, value = (
                    False,
                    RankError(f"Rank {rank} ended {_how(started[rank][0])} without a result."),
                )
            (found if fine else failed)[rank] = value
        if failed:
            end = min(end, time.monotonic() + 10.0)  # the others will notice
    if failed:
        raise _cause(failed)
    if waiting:
        raise RankError(
            f"Rank {', '.join(map(str, waiting.values()))} did not come to an end within {seconds:.0f} s, "
            "and was stopped."
        )
    return [found[rank] for rank in range(len(started))]


def _cause(failed: dict[int, BaseException]) -> BaseException:
    """The error that the others follow from: one that is not about a lost rank."""
    ended = [
        error
        for error in failed.values()
        if isinstance(error, RankError) and "without a result" in str(error)
    ]
    own = [error for error in failed.values() if not isinstance(error, RankError)]
    rank, error = next((r, e) for r, e in failed.items() if e in (own or ended or list(failed.values())))
    if isinstance(error, (EffcompileError, AssertionError)):
        return error
    return RankError(f"Rank {rank} failed: {type(error).__name__}: {error}")


def _how(process: ForkProcess) -> str:
    process.join(5.0)
    code = process.exitcode
    return (
        f"by the signal {signal.Signals(-code).name}"
        if code is not None and code < 0
        else f"with status {code}"
    )
