"""What one step of a compiled kernel's loops does, read off NVIDIA's machine code (SASS) by nvdisasm.

A kernel's loop is where its time goes. What is asked of one: products as wide as the tensor cores take, none
that two groups of warps make alike, nothing spilled, asynchronous copies.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

__all__ = ["Loop", "loops"]

_LABEL = re.compile(r"^\.(L_x_\d+):")
_CODE = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)([^;]*);")
_TARGET = re.compile(r"\(\.(L_x_\d+)\)")
#: Rows, columns and depth of a product of 4 warps (HGMMA, IGMMA, QGMMA), and of one of a single warp.
_GROUP = re.compile(r"^[HIQ]GMMA\.(?:SP\.)?(\d+)x(\d+)x(\d+)")
_SHAPES = {"16816": (16, 8, 16), "1688": (16, 8, 8), "16832": (16, 8, 32)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """One step of an innermost loop that multiplies: instructions of a thread, or of its warp.

    Attributes:
        instructions: in all.
        products: "rows×columns×depth" (with " of registers" where the left operand is there) → how many,
            each of four warps together on Hopper, of one elsewhere; "tcgen05" for data-centre Blackwell's,
            which do not tell.
        exponentials: 2**x and other special functions.
        copies: asynchronous ones to shared memory, of 16 bytes a thread or less.
        tiles: of whole tiles (TMA).
        spilled: loads and stores of what found no register.
        waits: for products, copies, and other warps.
    """

    instructions: int
    products: dict[str, int]
    exponentials: int = 0
    copies: int = 0
    tiles: int = 0
    spilled: int = 0
    waits: int = 0

    def flops(self, warps: int) -> int:
        """Multiplications and additions of all of a program's warps."""
        total = 0
        for (m, n, k), count in self.shapes():
            total += 2 * m * n * k * count * (warps // 4 if m == 64 else warps)
        return total

    def shapes(self) -> Iterator[tuple[tuple[int, int, int], int]]:
        """(rows, columns, depth) of its products, and how many."""
        for name, count in self.products.items():
            m, n, k = map(int, name.split(" ")[0].split("x"))
            yield (m, n, k), count

    @property
    def narrowest(self) -> int:
        """Columns of its narrowest product."""
        return min(n for (_, n, _), _ in self.shapes())


@dataclass(frozen=True, slots=True)
class _Code:
    """An instruction and its operands."""

    name: str
    rest: str


def loops(sass: str) -> tuple[Loop, ...]:
    """The innermost loops with products, in the order of the code."""
    code, labels = _read(sass)
    spans = []
    for at, one in enumerate(code):
        target = _TARGET.search(one.rest) if one.name.startswith("BRA") else None
        if target is not None and (start := labels.get(target.group(1), at + 1)) <= at:
            spans.append((start, at))
    # a wait that lasts goes on behind the kernel's end, and from there back into the loop
    spans = [span for span in spans if not any(a < span[0] <= b < span[1] for a, b in spans)]
    multiply = [span for span in spans if any(_product(code[i]) for i in range(span[0], span[1] + 1))]
    innermost = [
        span
        for span in multiply
        if not any(other != span and span[0] <= other[0] and other[1] <= span[1] for other in multiply)
    ]
    return tuple(_loop(code[start : end + 1]) for start, end in sorted(set(innermost)))


def _read(sass: str) -> tuple[list[_Code], dict[str, int]]:
    """Instructions in their order, and label → the one that it stands before."""
    code: list[_Code] = []
    labels: dict[str, int] = {}
    for line in sass.splitlines():
        if (label := _LABEL.match(line.strip())) is not None:
            labels[label.group(1)] = len(code)
        elif (found := _CODE.search(line)) is not None:
            code.append(_Code(found.group(1), found.group(2)))
    return code, labels


def _product(one: _Code) -> str | None:
    """Its shape, where it is one."""
    if (group := _GROUP.match(one.name)) is not None:
        operands = one.rest.split(",")
        registers = len(operands) > 1 and re.match(r"\s*R\d+", operands[1]) is not None
        return "x".join(group.groups()) + (" of registers" if registers else "")
    if one.name.startswith(("HMMA.", "IMMA.")):
        return "x".join(map(str, _SHAPES.get(one.name.split(".")[1], (16, 8, 16))))
    return "tcgen05" if one.name.startswith(("UTCHMMA", "UTCQMMA", "UTCIMMA")) else None


def _loop(code: Sequence[_Code]) -> Loop:
    names = Counter(_kinds(code))
    products = Counter(shape for one in code if (shape := _product(one)) is not None)
    return Loop(
        instructions=len(code), products=dict(products), exponentials=names["special"], copies=names["copy"],
        tiles=names["tile"], spilled=names["spilled"], waits=names["wait"],
    )  # fmt: skip


def _kinds(code: Sequence[_Code]) -> Iterator[str]:
    for one in code:
        for kind, starts in _STARTS.items():
            if one.name.startswith(starts):
                yield kind


_STARTS = {
    "special": ("MUFU",),
    "copy": ("LDGSTS",),
    "tile": ("UTMALDG", "UBLKCP"),
    "spilled": ("LDL", "STL"),
    "wait": ("WARPGROUP.DEPBAR", "DEPBAR", "BAR.", "SYNCS.PHASECHK"),
}
