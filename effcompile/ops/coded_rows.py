"""Where the compiled 8-bit linears (`int8_native`, `group_native`) hold x while they run: as codes, with a
scale and a sum each group.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

__all__ = ["CodedRows", "flat_rows"]


@dataclass(frozen=True, slots=True)
class CodedRows:
    """Codes of x (rows, groups · width), and the scale and sum of each group of a row, in one allocation:
    codes, scales, sums, and where groups have three numbers what codes are lowered by.
    """

    rows: int
    groups: int
    width: int
    numbers: int = 2

    @classmethod
    def of(cls, x: Tensor, groups: int, width: int) -> CodedRows:
        """Those of x (..., K), K at most groups · width."""
        columns = int(x.shape[-1])
        return cls(int(x.numel()) // columns if columns else 0, groups, width)

    @property
    def row_bytes(self) -> int:
        """Of the codes of one row."""
        return self.groups * self.width

    @property
    def nbytes(self) -> int:
        return self.rows * (self.row_bytes + 4 * self.numbers * self.groups)

    def addresses(self, start: int) -> tuple[int, int, int]:
        """Of the codes, the scales and the sums."""
        scales = start + self.rows * self.row_bytes
        return start, scales, scales + 4 * self.rows * self.groups


def flat_rows(x: Tensor) -> Tensor:
    """x (..., K) as (M, K) with adjacent columns."""
    flat = x.reshape(-1, x.shape[-1])
    return flat if flat.stride(1) == 1 or flat.shape[1] == 1 else flat.contiguous()
