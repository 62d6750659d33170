"""Forms by the words that they are printed with: tests name options as a report does, the package never reads
them so.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from effcompile.ir.formats import LINEAR_FORMATS, TABLE_FORMATS, TWO_OF_FOUR, Form, WeightFormat, in_bytes

KNOWN = {**TABLE_FORMATS, **LINEAR_FORMATS, TWO_OF_FOUR.name: TWO_OF_FOUR}


def held(name: str) -> WeightFormat:
    """`w4`, `w4g64`, `sparse16@0.90`, `unstructured@0.90`."""
    if (grouped := re.fullmatch(r"(w\d)g(\d+)", name)) is not None:
        return KNOWN[grouped[1]].grouped_by(int(grouped[2]))
    if (sparse := re.fullmatch(r"(?:sparse(\d+)|unstructured)@([\d.]+)(\+int8)?", name)) is not None:
        found = WeightFormat(
            family="sparse", block=int(sparse[1] or 1), density=round(1 - float(sparse[2]), 4)
        )
        return in_bytes(found) if sparse[3] else found
    return KNOWN[name]


def form(name: str) -> Form:
    """A format by its name, or something done: `merged@w4`, `last`, `-25% merged`, `tiled`."""
    pruned, _, rest = name.rpartition("% ") if "% " in name else ("", "", name)
    if name.endswith("%"):
        pruned, rest = name[:-1], ""
    share = -float(pruned) / 100 if pruned else 0.0
    if rest in KNOWN or re.match(r"w\dg|sparse\d|unstructured", rest):
        return Form(weights=held(rest), pruned=share)
    word, _, inside = rest.partition("@")
    return Form(word=word, weights=held(inside) if inside else None, pruned=share)


def forms(options: Mapping[str, str]) -> dict[str, Form]:
    """site → form of site → name."""
    return {site: form(name) for site, name in options.items()}


def names(found: Mapping[str, Form]) -> dict[str, str]:
    """site → name of site → form."""
    return {site: each.name for site, each in found.items()}
