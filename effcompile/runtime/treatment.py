"""How each rank treats its parameters, and in words what they do not treat alike."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from effcompile.runtime.meeting import named_ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Treatment:
    """What becomes of a parameter on a rank: whether it gets a gradient, has one already, and was written
    since the last step.
    """

    trained: bool
    has_gradient: bool
    written: bool

    @classmethod
    def of(cls, number: int) -> Treatment:
        """That of a number with a bit for each, in their order."""
        return cls(trained=bool(number & 1), has_gradient=bool(number & 2), written=bool(number & 4))


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldPart:
    """What a rank has of a parameter: which part along "tp" and along "dp", and a number of its bytes."""

    part: tuple[int, int]
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankState:
    """What a rank says where ranks differ.

    `stage`, `row`: its places along "pp" and "dp". `groups`: the options of the planned optimizer's.
    `generator`: a number of the random generator's state, where tensor-parallel ranks draw the same numbers.
    """

    rank: int
    stage: int
    row: int
    generator: int
    groups: Sequence[Mapping[str, object]]
    treated: Mapping[str, Treatment]
    held: Mapping[str, HeldPart]


def differing(said: Sequence[RankState]) -> tuple[str, str] | None:
    """(place, words) of the first thing that ranks do not treat alike; None where it comes to the same."""
    return (
        _of_generators(said)
        or _of_parameters(said, lambda one: one.trained, "gets no gradient", "gets one", _FROZEN)
        or _of_groups(said)
        or _of_parameters(said, lambda one: one.has_gradient, "has no gradient", "has one", _LEFT)
        or _of_writes(said)
        or _of_bytes(said)
    )


_FROZEN = (
    "(requires_grad), so that the ranks would train apart. What one rank freezes, or trains again, all do, "
    "before the same step."
)
_LEFT = (
    "from before this backward, which adds to it: a zero_grad() was left out on some ranks, or a step. All "
    "ranks clear their gradients before the same step."
)
_WRITTEN = (
    "Call optimizer.step() on all ranks or on none (a test of the loss, or of gradients, is of one rank: "
    "all_reduce what is tested), and load weights on all."
)
_APART = (
    "though all of these ranks hold the same part of it. They were given other learning rates or groups, a "
    "hook or clipping on one of them changes its gradients, or it was written there (.data, which is not "
    "counted, load_state_dict, init). What one rank does to a parameter all do."
)


def _of_parameters(
    said: Sequence[RankState], of: Callable[[Treatment], bool], no: str, yes: str, more: str
) -> tuple[str, str] | None:
    for name in _names(said):
        ranks = _by(said, name, of)
        if len(ranks) > 1:
            has, lacks = named_ranks(ranks[True]), named_ranks(ranks[False])
            return f"model.{name}", f"{name} {no} on {lacks} and {yes} on {has} {more}"
    return None


def _of_generators(said: Sequence[RankState]) -> tuple[str, str] | None:
    first: dict[tuple[int, int], RankState] = {}
    for one in said:
        other = first.setdefault((one.stage, one.row), one)
        if other.generator != one.generator:
            return "torch.get_rng_state()", (
                f"Ranks {other.rank} and {one.rank} stand in one place along 'dp', and drew other random "
                "numbers (dropout). Seed them alike, by torch.manual_seed(seed + "
                "mesh['dp'].get_local_rank()), and draw nothing more on one of them alone: give what draws "
                "there a torch.Generator of its own."
            )
    return None


def _of_groups(said: Sequence[RankState]) -> tuple[str, str] | None:
    """Ranks of one stage have groups of the same options."""
    first: dict[int, RankState] = {}
    for one in said:
        other = first.setdefault(one.stage, one)
        if len(other.groups) != len(one.groups):
            return "optimizer", (
                f"The optimizer has {len(other.groups)} groups on rank {other.rank} and {len(one.groups)} on "
                f"rank {one.rank}. What one rank does to it all do."
            )
        for at, (a, b) in enumerate(zip(other.groups, one.groups, strict=True)):
            for key in (key for key in dict.fromkeys((*a, *b)) if a.get(key) != b.get(key)):
                return f"optimizer.param_groups[{at}]", (
                    f"{key} of the optimizer's group {at} is {a.get(key)} on rank {other.rank} and "
                    f"{b.get(key)} on rank {one.rank}, so that the ranks would train apart. Set it on all "
                    "ranks, before the same step (a scheduler that looks at a loss looks at one rank's)."
                )
    return None


def _of_writes(said: Sequence[RankState]) -> tuple[str, str] | None:
    """Ranks that have written into a parameter since the last step, and others that have not; but where they
    hold the same all the same.
    """
    for name in _names(said):
        ranks = _by(said, name, lambda one: one.written)
        same = len({one.held[name] for one in said if name in one.held}) == 1
        if len(ranks) > 1 and not same:
            return f"model.{name}", (
                f"{name} was updated since the last step on {named_ranks(ranks[True])}, and not on "
                f"{named_ranks(ranks[False])}. {_WRITTEN}"
            )
    return None


def _of_bytes(said: Sequence[RankState]) -> tuple[str, str] | None:
    for name in _names(said):
        first: dict[tuple[int, int], RankState] = {}
        for one in (one for one in said if name in one.held):
            other = first.setdefault(one.held[name].part, one)
            if other.held[name] != one.held[name]:
                return f"model.{name}", (
                    f"{name} has other values on rank {one.rank} than on rank {other.rank}, {_APART}"
                )
    return None


def _names(said: Iterable[RankState]) -> Iterable[str]:
    return dict.fromkeys(name for one in said for name in one.treated)


def _by(said: Iterable[RankState], name: str, of: Callable[[Treatment], bool]) -> dict[bool, list[int]]:
    found: dict[bool, list[int]] = {}
    for one in said:
        if name in one.treated:
            found.setdefault(of(one.treated[name]), []).append(one.rank)
    return {yes: sorted(ranks) for yes, ranks in found.items()}
