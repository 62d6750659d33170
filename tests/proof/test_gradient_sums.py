"""Sums over two gradients, piece by piece, are those over the whole."""

import pytest
import torch

from effcompile.proof.training import verify


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("shape", [(), (0,), (7, 5), (3, 2 * verify._PIECE // 3 + 1)])
def test_pieces_sum_up_to_the_whole(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    a, b = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
    x, y = a.double(), b.double()
    found = verify.GradientSums.of(a, b)
    wanted = [((x - y) ** 2).sum(), (x * x).sum(), (y * y).sum(), (x * y).sum()]
    assert [found.apart, found.ours, found.theirs, found.dot] == pytest.approx(
        [float(each) for each in wanted], rel=1e-12
    )
    alone = verify.GradientSums.of(None, b)
    assert (alone.apart, alone.ours, alone.dot) == (pytest.approx(found.theirs), 0.0, 0.0)


def test_layouts_do_not_matter() -> None:
    a = torch.randn(6, 4)
    assert verify.GradientSums.of(a.T, a.T.contiguous()).apart == 0.0
    assert verify.GradientSums.of(a.to_sparse(), a).apart == 0.0
