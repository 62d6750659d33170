"""Reasons of every kind with any figures and names, for property tests."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, get_type_hints

from hypothesis import strategies as st

from effcompile.core.mask import Edge, MaskForm
from effcompile.core.reason_kinds import KINDS
from effcompile.core.reasons import HOLES, Because, Reason, Unsupported

_figures: dict[str, st.SearchStrategy[Any]] = {
    "float": st.floats(0, 1e6, allow_nan=False),
    "int": st.integers(0, 2**40),
    "bool": st.booleans(),
}


def some(kind: type[Reason], texts: st.SearchStrategy[str]) -> st.SearchStrategy[Reason]:
    """Reasons of one kind, their names drawn from `texts`."""
    if kind in (Because, Unsupported):
        return written(kind, texts)
    hints = get_type_hints(kind)
    drawn = {field.name: _of(str(hints[field.name]), texts) for field in fields(kind) if field.name != "kind"}  # type: ignore[arg-type]
    return st.builds(kind, **drawn)


def written(kind: type[Reason], texts: st.SearchStrategy[str]) -> st.SearchStrategy[Reason]:
    """A text as it stands, or one with holes and their figures."""

    def filled(pairs: list[tuple[str, str, int]], name: str) -> Reason:
        text = "".join(
            before.replace("{", "{{").replace("}", "}}") + f"{{{hole}}}" for before, hole, _ in pairs
        )
        return kind(text, tuple(name if hole in ("site", "name") else figure for _, hole, figure in pairs))  # type: ignore[call-arg]

    pair = st.tuples(texts, st.sampled_from(HOLES), st.integers(0, 2**40))
    return st.builds(kind, texts) | st.builds(filled, st.lists(pair, min_size=1, max_size=3), texts)


def masks(texts: st.SearchStrategy[str]) -> st.SearchStrategy[MaskForm]:
    """Any mask, under guards or none."""
    edges = st.none() | st.builds(Edge, offset=st.integers(-9, 9), aligned=st.booleans())
    names = st.none() | st.lists(texts, max_size=2).map(tuple)
    guards = st.lists(st.builds(Because, texts), max_size=2).map(tuple)
    return st.builds(
        MaskForm, lo=edges, hi=edges, chunk=st.integers(0, 9), q_ids=names, k_ids=names, valid=names,
        mask=names, ahead=st.integers(0, 9), flags=st.booleans(), guards=guards,
    )  # fmt: skip


def _of(hint: str, texts: st.SearchStrategy[str]) -> st.SearchStrategy[Any]:
    optional = st.none() if "None" in hint else st.nothing()
    if "MaskForm" in hint:
        return optional | masks(texts)
    if "tuple" in hint and "Reason" in hint:
        return st.lists(some(KINDS["slower"], texts), max_size=3).map(tuple)
    if "tuple" in hint:
        return st.lists(texts, max_size=3).map(tuple)
    if "Reason" in hint:
        return optional | some(KINDS["slower"], texts)
    for name, strategy in _figures.items():
        if name in hint:
            return optional | strategy
    return optional | texts
