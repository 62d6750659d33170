"""Whether ranks that have the same parameters still treat them alike, asked at each step beside its
collectives.

A parameter that is frozen on one rank, an optimizer's step that one rank leaves out, a weight that one rank
loads: nothing of it is a fault of that rank's own, the collectives of a step fit all the same, and the ranks
train apart without a word. So each rank makes one number of what must be alike, the largest and the least of
which is found while the backward runs; where they differ the ranks tell each other all of it, and all of them
raise the same error, before a gradient is handed out.

On an accelerator numbers are read at the first step, the second, the fourth ... and each 64th alone, for
whoever reads them waits for the device.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from effcompile.backends.torch.ranks import Alone, Ranks, told_as
from effcompile.capture.tensors import Digest, bytes_of
from effcompile.core.errors import GuardError
from effcompile.ops.messages import answered
from effcompile.runtime.meeting import Meeting
from effcompile.runtime.treatment import HeldPart, RankState, Treatment, differing

#: On an accelerator: every how many steps at the least.
_EACH = 64
#: What a rank says of a parameter that it has not got.
_NOTHING = -(2**62)


class Agreement(Alone):
    """That of one planned model.

    `optimizer`: the planned one, if any. `shared`: parameters that several stages of a pipeline have.
    `draws`: whether the step draws random numbers, tensor-parallel ranks the same ones.
    """

    def __init__(
        self,
        model: nn.Module,
        ranks: Ranks,
        meeting: Meeting,
        *,
        optimizer: Optimizer | None = None,
        shared: Collection[str] = (),
        draws: bool = False,
    ) -> None:
        self._ranks, self._meeting, self._optimizer, self._shared = ranks, meeting, optimizer, shared
        self._draws = draws
        # ranks that round differently drift apart by their last bits, and nobody is at fault
        alike = len({json.dumps(one) for one in meeting.exchanged("arithmetic", _arithmetic())}) == 1
        self._compares_bytes = alike
        self._bind(model)

    def bound_to(self, model: nn.Module) -> Agreement:
        """The same for a copy of the model, whose optimizer is not known."""
        other = object.__new__(Agreement)
        other._ranks, other._meeting, other._shared = self._ranks, self._meeting, self._shared
        other._optimizer, other._compares_bytes, other._draws = None, self._compares_bytes, self._draws
        other._bind(model)
        return other

    def _bind(self, model: nn.Module) -> None:
        tables = {id(p): (m._parameters, n) for m in model.modules() for n, p in m._parameters.items()}
        self._places = {name: tables[id(p)] for name, p in model.named_parameters()}
        self._on_cpu = self._ranks.mesh.device_type == "cpu"
        self._steps = 0
        self._digests: dict[str, Digest] = {}
        self._versions = {name: (id(p), p._version) for name, p in self._parameters().items()}

    def begin(self) -> Callable[[], None]:
        """Ask the other ranks; what is returned waits for their answers.

        Raises, when that is called, GuardError: some rank treats a parameter otherwise; on all ranks.
        """
        self._steps += 1
        if not self._on_cpu and self._steps & (self._steps - 1) and self._steps % _EACH:
            return super().begin()
        mine, (first, *others) = self._treated(), self._ranks.axes
        asked = self._asked(first, self._numbers(first, mine), differs=False)

        def finish() -> None:
            differs = asked()
            for axis in others:
                differs = self._asked(axis, self._numbers(axis, mine), differs=differs)()
            for axis in (first, *others)[:-1]:  # what the last ones have found out
                differs = self._asked(axis, [], differs=differs)()
            if differs:
                self._tell(mine)

        return finish

    def _numbers(self, axis: str, mine: Mapping[str, int]) -> list[int]:
        """What must be alike along an axis: in a pipeline, of each parameter that several stages have."""
        if axis == "pp":
            return [self._shared_number(name, mine) for name in self._shared]
        generator = self._generator() if axis == "tp" else 0
        return [_number(self._groups(), bytes(mine.values()), self._bytes_along(axis), generator)]

    def _parameters(self) -> dict[str, Tensor]:
        """Those that the model has now."""
        found = ((name, table.get(own)) for name, (table, own) in self._places.items())
        return {name: value for name, value in found if value is not None}

    def _treated(self) -> dict[str, int]:
        """How each is treated, as the number of a `Treatment`."""
        found, versions, before = {}, {}, self._versions
        for name, p in self._parameters().items():
            versions[name] = now = id(p), p._version
            found[name] = p.requires_grad + 2 * (p.grad is not None) + 4 * (before.get(name) != now)
        self._versions = versions
        return found

    def _asked(self, axis: str, said: Sequence[int], *, differs: bool) -> Callable[[], bool]:
        """Begin to compare along an axis; what is returned says whether ranks differ there, or one did
        before.
        """
        group = self._ranks.group(axis)
        assert group is not None
        ends = told_as(
            [int(differs), *said, *(_NOTHING if one == _NOTHING else -one for one in said)],
            self._ranks.mesh.device_type,
        )
        with answered(group):
            work = dist.all_reduce(ends, dist.ReduceOp.MAX, group=group, async_op=True)

        def done() -> bool:
            with answered(group):
                work.wait()
            found = list(map(int, ends.tolist()))
            most, least = found[1 : 1 + len(said)], found[1 + len(said) :]
            return bool(found[0]) or any(a != -b for a, b in zip(most, least, strict=True))

        return done

    def _shared_number(self, name: str, mine: Mapping[str, int]) -> int:
        return _number(mine[name], self._bytes_of([name], name)) if name in mine else _NOTHING

    def _bytes_along(self, axis: str) -> int:
        return self._bytes_of([name for name in self._parameters() if not self._apart(name, axis)], axis)

    def _bytes_of(self, names: Sequence[str], key: str) -> int:
        """A number of the bytes of what this rank has of these."""
        if not self._compares_bytes:
            return 0
        there = self._parameters()
        tensors = [_local(there[name]) for name in names]
        if key not in self._digests or not self._digests[key].is_of(tensors):
            self._digests[key] = Digest(tensors)
        return self._digests[key].at(self._steps)

    def _generator(self) -> int:
        """A number of the state of the generator that the step draws from."""
        if not self._draws:
            return 0
        return bytes_of(torch.get_rng_state() if self._on_cpu else torch.cuda.get_rng_state())

    def _groups(self) -> list[dict[str, object]]:
        """The options of the planned optimizer's groups."""
        groups = [] if self._optimizer is None else self._optimizer.param_groups
        return [{name: _plain(value) for name, value in sorted(group.items())} for group in groups]

    def _tell(self, mine: Mapping[str, int]) -> None:
        """Raises GuardError: what the ranks do not treat alike; nothing where it comes to the same."""
        place = [self._ranks.place(axis)[0] for axis in ("pp", "tp", "dp")]
        parameters = {name: [treated, self._held(name)] for name, treated in mine.items()}
        found = self._meeting.exchanged("treatment", [place, self._groups(), parameters, self._generator()])
        said = [self._said(rank, *one) for rank, one in zip(self._meeting.ranks, found, strict=True)]
        if (words := differing(said)) is not None:
            raise GuardError(
                f"{words[1]} Nothing of this step was handed out.", place=words[0], of_model=True
            )

    def _said(
        self, rank: int, place: list[int], groups: list[dict[str, object]],
        parameters: dict[str, list[int]], generator: int,
    ) -> RankState:  # fmt: skip
        """What a rank has told, of JSON."""
        stage, tp, dp = place
        treated = {name: Treatment.of(one[0]) for name, one in parameters.items()}
        held = {
            name: HeldPart(part=(tp * self._apart(name, "tp"), dp * self._apart(name, "dp")), number=one[1])
            for name, one in parameters.items()
        }
        return RankState(
            rank=rank, stage=stage, row=dp, generator=generator, groups=groups, treated=treated, held=held
        )

    def _apart(self, name: str, axis: str) -> bool:
        """Whether ranks along an axis have other bytes of a parameter.

        What all tensor-parallel ranks have each computes by itself, on an accelerator in no certain order.
        """
        spread = self._ranks.spread
        return name in spread.shapes if axis == "dp" else name in spread.parts or not self._on_cpu

    def _held(self, name: str) -> int:
        return bytes_of(_local(self._parameters()[name])) if self._compares_bytes else 0


def _local(parameter: Tensor) -> Tensor:
    with torch.no_grad():
        return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _plain(value: Any) -> object:
    """An option as JSON has it; what is no number or word, by its kind."""
    if isinstance(value, Tensor):
        return float(value) if value.numel() == 1 else list(value.shape)
    if isinstance(value, list | tuple):
        numbers = all(isinstance(each, int | float) for each in value)
        return [_plain(each) for each in value] if numbers else len(value)
    return value if isinstance(value, int | float | str | None) else type(value).__name__


def _number(*what: object) -> int:
    digest = hashlib.blake2b(repr(what).encode(), digest_size=7).digest()
    return int.from_bytes(digest, "big")


def _arithmetic() -> list[object]:
    """What the last bits of an update may depend on."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    return [torch.get_num_threads(), torch.backends.cpu.get_cpu_capability(), device]
