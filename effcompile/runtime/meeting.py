"""What the ranks of a mesh tell each other before a step runs: through the rendezvous store, so that nobody
hangs in a collective.

A rank that does not come is an error with its number: at once where it raised one by itself, else after a
time-out of its own.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import Store

from effcompile.core import torch_compat_ranks
from effcompile.core.errors import EffcompileError, InfeasibleError, RankError, UsageError

T = TypeVar("T")
#: Seconds that a rank may take to capture its model; planning on the first one may take hours.
COMING, PLANNING = 600.0, 24 * 3600.0
#: Of the ranks of a mesh, how many calls they made together (`attended`); the last one in which they met, and
#: how often.
_CALLS: dict[tuple[int, ...], int] = {}
_ROUNDS: dict[tuple[int, ...], tuple[int, int]] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """The ranks of a mesh (their global numbers), and which of them this process is."""

    ranks: tuple[int, ...]
    me: int

    @classmethod
    def of(cls, mesh: DeviceMesh) -> Meeting:
        """Those of a mesh, in its order."""
        ranks = tuple(int(rank) for rank in mesh.mesh.flatten().tolist())
        return cls(ranks=ranks, me=dist.get_rank())

    @property
    def first(self) -> bool:
        """Whether this rank is the one that plans."""
        return self.me == self.ranks[0]

    def exchanged(self, what: str, mine: object, *, seconds: float = COMING) -> list[Any]:
        """What every rank says, in the mesh's order; as JSON has it.

        Raises:
            RankError: some did not come in time; it names them.
        """
        key = self._key(what)
        store = torch_compat_ranks.store()
        store.set(f"{key}/{self.me}", json.dumps(mine))
        late = self._late(store, {rank: f"{key}/{rank}" for rank in self.ranks}, what, seconds)
        if late:
            raise RankError(
                f"{named_ranks(late)} did not come to '{what}' within {seconds:.0f} s: every rank of the "
                "mesh calls effcompile.optimize, in the same order. Look at the output of that rank; "
                "torchrun --max-restarts starts all of them again."
            )
        return [json.loads(store.get(f"{key}/{rank}")) for rank in self.ranks]

    def told(self, make: Callable[[], Mapping[str, Any]], *, seconds: float = PLANNING) -> Mapping[str, Any]:
        """What the first rank makes, on every rank.

        Raises:
            EffcompileError: the first rank could not make it; the others say what it said. RankError: it fell
                out.
        """
        key, store = self._key("plan"), torch_compat_ranks.store()
        if self.first:
            try:
                made = make()
            except BaseException as error:
                store.set(key, json.dumps({"error": _said(error)}))
                raise
            store.set(key, json.dumps({"made": made}))
            return made
        if self._late(store, {self.ranks[0]: key}, "plan", seconds):
            raise RankError(
                f"Rank {self.ranks[0]}, which makes the plan for all, did not tell it within "
                f"{seconds:.0f} s. See its output."
            )
        found = json.loads(store.get(key))
        if "error" in found:
            kind = RepeatedInfeasibleError if found["error"]["infeasible"] else RepeatedUsageError
            raise kind(
                f"Rank {self.ranks[0]}, which makes the plan for all, could not: {found['error']['said']}"
            )
        made = found["made"]
        assert isinstance(made, dict)
        return made

    def together(self, make: Callable[[], T]) -> T:
        """What this rank makes, once all have made theirs.

        Raises:
            EffcompileError: of this rank. UsageError: of another one, named.
        """
        try:
            made = make()
        except EffcompileError as error:
            self.exchanged("made", str(error))
            raise
        said = self.exchanged("made", None)
        if failed := next(
            ((r, text) for r, text in zip(self.ranks, said, strict=True) if text is not None), None
        ):
            raise UsageError(f"Rank {failed[0]} cannot carry out its part: {failed[1]}")
        return made

    def agree(self, what: Mapping[str, object]) -> None:
        """Require that all ranks say the same of each thing.

        Raises:
            UsageError: they differ; it names the thing, the ranks, and what they say.
        """
        found = self.exchanged("agreeing", dict(what))
        for name in what:
            said: dict[str, list[int]] = {}
            for rank, one in zip(self.ranks, found, strict=True):
                said.setdefault(json.dumps(one.get(name), ensure_ascii=False), []).append(rank)
            if len(said) > 1:
                each = "; ".join(
                    f"{named_ranks(ranks)}: {value.strip(chr(34))}" for value, ranks in list(said.items())[:4]
                )
                raise UsageError(f"The ranks have different {name}: {each}. Start them all with the same.")

    def _late(self, store: Store, keys: Mapping[int, str], what: str, seconds: float) -> list[int]:
        """The ranks whose keys are not there in time.

        Raises:
            RankError: one of them raised an error by itself, and will not come.
        """
        end, pause, left = time.monotonic() + seconds, 0.005, dict(keys)
        while left and time.monotonic() < end:
            gone = [rank for rank in left if store.check([_gone(self.ranks, rank)])]
            # what a rank said it said before it went
            left = {rank: key for rank, key in left.items() if not store.check([key])}
            if rank := next((rank for rank in gone if rank in left), None):
                said = store.get(_gone(self.ranks, rank)).decode()
                raise RankError(f"Rank {rank} left effcompile.optimize before '{what}' with an error: {said}")
            if left:
                time.sleep(pause)
                pause = min(2 * pause, 0.25)
        return list(left)

    def _key(self, what: str) -> str:
        """Of this meeting: the ranks come to as many, in the same order."""
        now = _CALLS.get(tuple(sorted(self.ranks)), 0)
        call, count = _ROUNDS.get(self.ranks, (now, 0))
        _ROUNDS[self.ranks] = now, count + 1 if call == now else 1
        return f"{_call(self.ranks)}/{_ROUNDS[self.ranks][1]}/{what}"


@contextlib.contextmanager
def attended(mesh: DeviceMesh | None) -> Iterator[None]:
    """A call that all ranks of a mesh make: an error that one of them raises within ends the others' waiting
    for it, too, and they meet in the next one all the same.
    """
    if mesh is None:
        yield
        return
    ranks = tuple(map(int, mesh.mesh.flatten().tolist()))
    call = tuple(sorted(ranks))
    _CALLS[call] = _CALLS.get(call, 0) + 1
    try:
        yield
    except BaseException as error:
        with contextlib.suppress(RuntimeError, ValueError):  # whoever kept the store may be gone
            torch_compat_ranks.store().set(_gone(ranks, dist.get_rank()), str(_said(error)["said"]))
        raise


def _call(ranks: tuple[int, ...]) -> str:
    """The keys of the call that these ranks are in begin so."""
    number = _CALLS.get(tuple(sorted(ranks)), 0)
    return f"effcompile/{'-'.join(map(str, ranks[:8]))}x{len(ranks)}/{number}"


def _gone(ranks: tuple[int, ...], rank: int) -> str:
    """Where a rank says what it raised."""
    return f"{_call(tuple(sorted(ranks)))}/gone/{rank}"


class RepeatedUsageError(UsageError):
    """The rank that plans raised; this one only repeats it."""


class RepeatedInfeasibleError(InfeasibleError):
    """The same of a goal that cannot be met."""

    def __init__(self, said: str) -> None:
        super().__init__()
        self.args = (said,)

    def __str__(self) -> str:
        return str(self.args[0])


def _said(error: BaseException) -> dict[str, object]:
    told = str(error) if isinstance(error, EffcompileError) else f"{type(error).__name__}: {error}"
    return {"said": told, "infeasible": isinstance(error, InfeasibleError)}


def named_ranks(ranks: Sequence[int]) -> str:
    """As a sentence begins with them."""
    return f"Rank {ranks[0]}" if len(ranks) == 1 else f"Ranks {', '.join(map(str, ranks))}"
