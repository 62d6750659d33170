"""Products in groups: what is made up for timing them, their work, and what they allocate with all rows in
one group.
"""

from __future__ import annotations

import pytest
import torch

from effcompile.core import torch_compat_memory
from effcompile.ops import grouped
from effcompile.ops.workspace import workspace_bytes

GROUPED = torch.ops.aten._grouped_mm.default
ROWS, MATRICES = torch.empty(48, 16), torch.empty(4, 16, 24)


def test_made_up_groups_have_all_rows_evenly() -> None:
    rows, matrices, offs = grouped.with_offsets(GROUPED, (ROWS, MATRICES, torch.zeros(4, dtype=torch.int32)))
    assert rows is ROWS and matrices is MATRICES
    assert offs.tolist() == [12, 24, 36, 48] and offs.dtype == torch.int32
    of_weights = grouped.with_offsets(
        GROUPED, (ROWS.t(), torch.empty(48, 24), torch.zeros(4, dtype=torch.int32))
    )
    assert of_weights[2].tolist() == [12, 24, 36, 48]
    assert grouped.with_offsets(torch.ops.aten.mm.default, (ROWS, MATRICES)) == (ROWS, MATRICES)


def test_work_is_that_of_the_rows_and_not_of_rows_times_groups() -> None:
    offs = torch.zeros(4, dtype=torch.int32)
    assert grouped.flops(GROUPED, (ROWS, MATRICES, offs)) == 2 * 48 * 16 * 24
    assert grouped.flops(GROUPED, (ROWS.t(), torch.empty(48, 24), offs)) == 2 * 48 * 16 * 24
    assert grouped.flops(torch.ops.aten.mm.default, (ROWS, MATRICES[0])) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ends", [[48, 48, 48, 48], [0, 0, 0, 48], [5, 20, 21, 48]])
def test_what_is_declared_covers_every_distribution_of_rows(dtype: torch.dtype, ends: list[int]) -> None:
    args = (
        torch.randn(48, 16).to(dtype),
        torch.randn(4, 16, 24).to(dtype),
        torch.tensor(ends, dtype=torch.int32),
    )
    GROUPED(*args)
    with torch_compat_memory.watched_memory("cpu") as peak:
        result = GROUPED(*args)
    declared = workspace_bytes(GROUPED, args)
    small = 4096  # what aten allocates for bookkeeping; a plan has it from the operator's own measurement
    assert declared is not None and peak() - result.nbytes <= declared + small
