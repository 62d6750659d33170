"""What an option means, as data: how a weight is held and multiplied, and what else is done at a site.

Loads without torch.

A pass proposes a `Form`, the plan keeps it, the backend acts on it and reads one back from what it built.
Nobody takes a name apart: a form knows how it is printed, and a name is unique among the options of one site.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from effcompile.core.errors import UsageError
from effcompile.core.mask import MaskForm

Scale = Literal["none", "tensor", "channel", "group"]
Activation = Literal[
    "as given",
    "bf16",
    "dynamic int8",
    "static int8",
    "int8 rows",
    "int13 rows",
    "int8 blocks",
    "int8 groups",
]

#: The sizes that a group of weights with one scale may have, and the one that needs no mention.
GROUPS = (16, 32, 64, 128, 256)
USUAL_GROUP = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFormat:
    """How a weight (N, K) is stored and what it is multiplied with.

    Attributes:
        family: the word for formats that differ in their group or pattern only; also the name of the kernel.
        bits: of one stored weight.
        scale: what shares a scale: the tensor, an output channel (a row), or a group along K.
        group: weights in such a group; 0 for none.
        scale_bytes: of one scale, with its zero point where it has one.
        symmetric: whether codes are centred on 0.
        activation: what activations are rounded to before the product; of "int8 blocks" at the coarsest: a
            backend may keep them finer.
        block: side of the blocks that are kept or left out; 0 for a dense weight.
        density: share of the blocks that is kept, in steps of 0.0001.

    Raises:
        UsageError: a figure that means nothing.
    """

    family: str
    bits: int = 32
    scale: Scale = "none"
    group: int = 0
    scale_bytes: int = 0
    symmetric: bool = True
    activation: Activation = "as given"
    block: int = 0
    density: float = 1.0

    def __post_init__(self) -> None:
        if self.bits not in (4, 8, 16, 32):
            raise UsageError(f"A weight of {self.bits} bits is not known; there are 4, 8, 16 and 32.")
        if (self.scale == "group") != bool(self.group) or (self.group and self.group not in GROUPS):
            raise UsageError(
                f"{self.family}: groups of {self.group} with a scale per {self.scale}; sizes are "
                f"{', '.join(map(str, GROUPS))}."
            )
        if self.block < 0 or not 0 <= self.density <= 1:
            raise UsageError(
                f"{self.family}: density {self.density} in blocks of {self.block} is no pattern."
            )

    @property
    def name(self) -> str:
        """How it is printed: `w4`, `w4g64`, `sparse16@0.90`, `sparse16@0.90+int8`, `2:4`."""
        if self.family == "sparse":
            sparsity = 1 - self.density
            head = "unstructured" if self.block == 1 else f"sparse{self.block}"
            share = f"{sparsity:.2f}" if sparsity < 0.99 else f"{sparsity:.4f}"
            return f"{head}@{share}+int8" if self.bits == 8 else f"{head}@{share}"
        return f"{self.family}g{self.group}" if self.group not in (0, USUAL_GROUP) else self.family

    def stored_bytes(self, n: int, k: int) -> int:
        """Bytes of a dense weight (N, K) with its scales, and those of columns that it may have
        (ops/int8_codes.py); those of a pattern depend on its indices (sparse/forms.py).
        """
        scales = {"none": 0, "tensor": 1, "channel": n, "group": n * math.ceil(k / (self.group or 1))}[
            self.scale
        ]
        more = 5 if self.activation == "static int8" else 0  # scale and zero point of the input
        if self.activation == "int8 rows" and not self.block:
            panel = 64 * math.ceil(k / 4)
            more = panel * math.ceil(4 * (n + k) / panel)
        return n * k * self.bits // 8 + scales * self.scale_bytes + more

    def grouped_by(self, size: int) -> WeightFormat:
        """The same with groups of another size; a format without groups as it is."""
        return replace(self, group=size) if self.group else self


FP32 = WeightFormat(family="fp32")
FP16 = WeightFormat(family="fp16", bits=16)
BF16 = WeightFormat(family="bf16", bits=16, activation="bf16")
#: u8 activations with one scale taken at run time, times s8 weights with one scale for all.
INT8_DYNAMIC = WeightFormat(
    family="int8_dynamic", bits=8, scale="tensor", scale_bytes=5, activation="dynamic int8"
)
INT8_CHANNEL = WeightFormat(
    family="int8_channel", bits=8, scale="channel", scale_bytes=5, activation="dynamic int8"
)
#: s8 activations with a scale for each row (token), taken at run time, times s8 weights with a scale per
#: output channel.
INT8_TOKEN = WeightFormat(family="int8_token", bits=8, scale="channel", scale_bytes=4, activation="int8 rows")
#: The same with codes of 13 bits, held in 16: VNNI multiplies such at half the rate of bytes, AVX2 alone
#: at the same.
INT13_TOKEN = WeightFormat(
    family="int13_token", bits=16, scale="channel", scale_bytes=4, activation="int13 rows"
)
#: The range of the activations is fixed from calibration inputs.
INT8_STATIC = WeightFormat(
    family="int8_static", bits=8, scale="channel", scale_bytes=5, activation="static int8"
)
W8 = WeightFormat(
    family="w8", bits=8, scale="group", group=USUAL_GROUP, scale_bytes=4, activation="int8 blocks"
)
#: torch's weight-only product: a bf16 scale per output channel, x and the result in bf16.
W8_CHANNEL = WeightFormat(family="w8_channel", bits=8, scale="channel", scale_bytes=2, activation="bf16")
W4 = WeightFormat(
    family="w4", bits=4, scale="group", group=USUAL_GROUP, scale_bytes=4, activation="int8 blocks"
)
#: Ours: s8 activations with a scale for each group, too, taken at run time; sums of a group are whole
#: numbers. Scales of weights are bf16.
INT8_GROUPS = WeightFormat(
    family="int8_groups", bits=8, scale="group", group=USUAL_GROUP, scale_bytes=2, activation="int8 groups"
)
INT4_GROUPS = WeightFormat(
    family="int4_groups", bits=4, scale="group", group=USUAL_GROUP, scale_bytes=2, activation="int8 groups"
)
TWO_OF_FOUR = WeightFormat(family="2:4", block=1, density=0.5)
#: A table with one scale and zero point, one with a scale per row, and one with those of INT8_GROUPS.
TABLE_INT8 = WeightFormat(family="int8", bits=8, scale="tensor", scale_bytes=5, symmetric=False)
TABLE_INT8_ROWS = WeightFormat(family="int8_rows", bits=8, scale="channel", scale_bytes=4)
TABLE_INT8_GROUPS = WeightFormat(
    family="int8_row_groups", bits=8, scale="group", group=USUAL_GROUP, scale_bytes=2
)

#: Rows of a cache in 4 bits.
ROWS_INT4_GROUPS = WeightFormat(
    family="int4_row_groups", bits=4, scale="group", group=USUAL_GROUP, scale_bytes=2
)


def _table(formats: Iterable[WeightFormat]) -> dict[str, WeightFormat]:
    return {each.family: each for each in formats}


#: Every format of a dense linear, by its family; the baseline first.
LINEAR_FORMATS = _table(
    (
        FP32,
        BF16,
        INT8_DYNAMIC,
        INT8_CHANNEL,
        INT8_TOKEN,
        INT13_TOKEN,
        INT8_STATIC,
        W8,
        W8_CHANNEL,
        W4,
        INT8_GROUPS,
        INT4_GROUPS,
    )
)
#: Every format of an embedding's table; the baseline first.
TABLE_FORMATS = _table((FP32, TABLE_INT8, TABLE_INT8_ROWS, TABLE_INT8_GROUPS))


def sparse_format(kept: int, blocks: int, block: int) -> WeightFormat:
    """The format that keeps so many of all blocks of that side."""
    return WeightFormat(family="sparse", block=block, density=round(kept / blocks, 4))


def in_bytes(sparse: WeightFormat) -> WeightFormat:
    """The same pattern as codes of 8 bits, multiplied as `int8_token`."""
    coded = {"bits": 8, "scale": "channel", "scale_bytes": 4, "activation": INT8_TOKEN.activation}
    return replace(sparse, **coded)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """What an option makes of its site.

    Attributes:
        word: what is done, where it is more than a format of a weight: "merged", "last", "tiled", "fused".
        weights: the format of the linear or table; of the linears that are changed with it, for another site.
        pruned: share of the units that go, for a structure.
        figures: parameters of what is done, by name; they are not printed.
        mask: of an attention that knows its mask in closed form; the report prints it.
    """

    word: str = ""
    weights: WeightFormat | None = None
    pruned: float = 0.0
    figures: tuple[tuple[str, float], ...] = ()
    mask: MaskForm | None = None

    def agrees(self, found: Form) -> bool:
        """Whether what was found is this, as far as it can be found: a built thing does not show all of its
        parameters.
        """
        same = (self.word, self.weights, self.pruned) == (found.word, found.weights, found.pruned)
        same = same and (self.mask is None or found.mask is None or self.mask.same_terms(found.mask))
        return same and set(found.figures) <= set(self.figures)

    @property
    def rounds(self) -> bool:
        """Whether all it does to values is to round them to 16 bits: no scale, no range, nothing left out."""
        held = FP32 if self.weights is None else self.weights
        kept, bits = not held.block, 32 if held.scale != "none" else held.bits
        return not self.pruned and kept and (bits == 16 or self.word.endswith(("bf16", "fp16")))

    @property
    def name(self) -> str:
        """How it is printed: `w4`, `merged@w4`, `-25% merged@w4`; fp32 goes without saying beside something
        else.
        """
        weights = self.weights.name if self.weights is not None else ""
        plain = weights if weights != "fp32" or not (self.word or self.pruned) else ""
        done = f"{self.word}@{plain}" if self.word and plain else self.word or plain
        return " ".join(part for part in (f"-{100 * self.pruned:.3g}%" if self.pruned else "", done) if part)


#: What a backend found where it can no longer be told, or nothing is left to be told.
NOT_FOUND = Form(word="not found")
