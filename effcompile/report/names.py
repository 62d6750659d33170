"""Collapse many site names to a few templates: `encoder.layer.{0–11}.attention.self.{query,key,value}`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

_INDEX = re.compile(r"(?<![A-Za-z0-9])\d+(?![A-Za-z0-9])")
_TOKEN = re.compile(r"([.:])")
_MANY_RUNS = 6  # more runs of indices than this are shortened in the middle

Box = tuple[tuple[int, ...], ...]  # one sorted set of indices per numbered place; stands for their product
Tokens = tuple[tuple[str, ...], ...]  # alternatives at each place of the name


@dataclass(frozen=True, slots=True, kw_only=True)
class Template:
    """One printed name and the number of sites that it stands for."""

    text: str
    count: int


def collapse(sites: Iterable[str]) -> list[Template]:
    """The fewest templates we can see that stand for exactly these sites, in order of first appearance.

    Numbers between separators become ranges; names that differ at one place only, over the same ranges,
    become alternatives. Every template expands to sites that are all in the list: nothing is implied.
    """
    skeletons: dict[tuple[str, int], set[tuple[int, ...]]] = {}
    for site in dict.fromkeys(sites):
        numbers = _INDEX.findall(site)
        indices = tuple(map(int, numbers))
        # numbers with leading zeros or other digits cannot be printed as a range: such a name stays as it is
        simple = "\0" not in site and all(
            str(index) == number for index, number in zip(indices, numbers, strict=True)
        )
        key = (_INDEX.sub("\0", site), len(indices)) if simple else (site, 0)
        skeletons.setdefault(key, set()).add(indices if simple else ())
    counted: list[tuple[Tokens, int]] = []
    for (skeleton, _), members in skeletons.items():
        counted.extend((_tokens(skeleton, box), prod(map(len, box))) for box in _boxes(members))
    return [
        Template(text="".join(map(_alternatives, tokens)), count=count) for tokens, count in _merge(counted)
    ]


def printed(templates: Sequence[Template]) -> list[str]:
    """Each template with its count, which is left out where it says nothing: one site, or one template."""
    return [f"{t.text} ({t.count})" if t.count > 1 and len(templates) > 1 else t.text for t in templates]


def inputs_told(lines: Iterable[str]) -> list[str]:
    """A plan's inputs, `name [sizes] dtype` each; those that differ in a number of their names alone, as the
    layers of a cache do, as one.
    """
    alike: dict[tuple[str, str], list[str]] = {}
    for line in lines:
        name, _, rest = line.partition(" ")
        alike.setdefault((_INDEX.sub("\0", name), rest), []).append(name)
    return [
        f"{template.text} {rest}" if rest else template.text
        for (_, rest), names in alike.items()
        for template in collapse(names)
    ]


def _boxes(members: set[tuple[int, ...]]) -> list[Box]:
    """Index tuples as a few products of sets: first-axis values with equal remainders share a box."""
    if members == {()}:
        return [()]
    remainders: dict[int, set[tuple[int, ...]]] = {}
    for head, *tail in sorted(members):
        remainders.setdefault(head, set()).add(tuple(tail))
    shared: dict[frozenset[tuple[int, ...]], list[int]] = {}
    for head, tails in remainders.items():
        shared.setdefault(frozenset(tails), []).append(head)
    return [(tuple(heads), *rest) for tails, heads in shared.items() for rest in _boxes(set(tails))]


def _tokens(skeleton: str, box: Box) -> Tokens:
    sets = iter(box)
    filled = re.sub("\0", lambda _: _ranges(next(sets)), skeleton) if box else skeleton
    return tuple((token,) for token in _TOKEN.split(filled))


def _ranges(indices: Sequence[int]) -> str:
    """`{0–3,5}` for sorted indices; the bare number when there is one."""
    if len(indices) == 1:
        return str(indices[0])
    runs: list[list[int]] = []
    for index in indices:
        if runs and index == runs[-1][1] + 1:
            runs[-1][1] = index
        else:
            runs.append([index, index])
    texts = [str(a) if a == b else f"{a}–{b}" for a, b in runs]
    if len(texts) > _MANY_RUNS:
        texts = [*texts[:3], "…", texts[-1]]
    return "{" + ",".join(texts) + "}"


def _merge(counted: list[tuple[Tokens, int]]) -> list[tuple[Tokens, int]]:
    """Join templates that differ at one named place only, last place first."""
    for place in range(max((len(tokens) for tokens, _ in counted), default=0) - 1, -1, -1):
        joined: dict[tuple[object, ...], tuple[Tokens, int]] = {}
        for tokens, count in counted:
            mergeable = (
                place < len(tokens)
                and not tokens[place][0].startswith("{")
                and not tokens[place][0].isdigit()
            )
            key: tuple[object, ...] = (
                (tokens[:place], tokens[place + 1 :]) if mergeable else (tokens, place, "as it is")
            )
            if key in joined:
                old, old_count = joined[key]
                tokens = (*old[:place], old[place] + tokens[place], *old[place + 1 :])
                count += old_count
            joined[key] = (tokens, count)
        counted = list(joined.values())
    return counted


def _alternatives(names: tuple[str, ...]) -> str:
    return names[0] if len(names) == 1 else "{" + ",".join(names) + "}"
