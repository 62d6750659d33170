"""What the ranks of a mesh tell each other before a step runs: through the rendezvous store, so that nobody
hangs in a collective.

A rank that does not come is an error with its number, after a time-out of its own.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
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
_ROUNDS: dict[tuple[int, ...], int] = {}


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
        late = waiting_for(store, [f"{key}/{rank}" for rank in self.ranks], seconds)
        if late:
            names = named_ranks([self.ranks[i] for i in late])
            raise RankError(
                f"{names} did not come to '{what}' within {seconds:.0f} s: every rank of the mesh calls "
                "effcompile.optimize, in the same order. Look at the output of that rank; torchrun "
                "--max-restarts starts all of them again."
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
        if waiting_for(store, [key], seconds):
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

    def _key(self, what: str) -> str:
        """Of this meeting: the ranks come to as many, in the same order."""
        _ROUNDS[self.ranks] = _ROUNDS.get(self.ranks, 0) + 1
        return (
            f"effcompile/{'-'.join(map(str, self.ranks[:8]))}x{len(self.ranks)}/{_ROUNDS[self.ranks]}/{what}"
        )


class RepeatedUsageError(UsageError):
    """The rank that plans raised; this one only repeats it."""


class RepeatedInfeasibleError(InfeasibleError):
    """The same of a goal that cannot be met."""

    def __init__(self, said: str) -> None:
        super().__init__()
        self.args = (said,)

    def __str__(self) -> str:
        return str(self.args[0])


def waiting_for(store: Store, keys: Sequence[str], seconds: float) -> list[int]:
    """Which of the keys are not there in time."""
    end = time.monotonic() + seconds
    pause = 0.005
    left = list(range(len(keys)))
    while left and time.monotonic() < end:
        left = [i for i in left if not store.check([keys[i]])]
        if left:
            time.sleep(pause)
            pause = min(2 * pause, 0.25)
    return left


def _said(error: BaseException) -> dict[str, object]:
    told = str(error) if isinstance(error, EffcompileError) else f"{type(error).__name__}: {error}"
    return {"said": told, "infeasible": isinstance(error, InfeasibleError)}


def named_ranks(ranks: Sequence[int]) -> str:
    """As a sentence begins with them."""
    return f"Rank {ranks[0]}" if len(ranks) == 1 else f"Ranks {', '.join(map(str, ranks))}"
