"""In which order programs take the tiles of a matrix."""

import triton
import triton.language as tl


@triton.jit
def in_bands(pid, rows, columns, BAND: tl.constexpr):
    """(row, column) of a program's tile: down BAND rows of a column, then the next column, and the next band
    after the last column.

    Programs that run at once share rows of one operand and columns of the other, which the L2 cache then
    holds; all rows of a column in turn read the whole left operand again for every column. After Triton's
    tutorial of matrix multiplication.
    """
    first = pid // (BAND * columns) * BAND
    height = tl.minimum(rows - first, BAND)
    within = pid % (BAND * columns)
    return first + within % height, within // height
