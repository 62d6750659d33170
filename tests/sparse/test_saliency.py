"""Scores and choices against loops over single elements."""

import itertools

import pytest
import torch
from hypothesis import given as cases
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

from effcompile.core.errors import UsageError
from effcompile.sparse import saliency

SEEDS = st.integers(0, 2**31)
SIZES = st.integers(1, 4)


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@cases(seed=SEEDS, rows=SIZES, columns=SIZES, block=SIZES)
def test_block_scores_are_sums_over_their_elements(seed: int, rows: int, columns: int, block: int) -> None:
    weight, gradient = (
        normal(seed, rows * block, columns * block),
        normal(seed + 1, rows * block, columns * block),
    )
    norms = normal(seed + 2, columns * block).abs()
    found = {
        "l1": saliency.blocks(saliency.magnitude(weight), block),
        "wanda": saliency.blocks(saliency.wanda(weight, norms), block),
        "snip": saliency.blocks(saliency.snip(weight, gradient), block),
    }
    for r, c in itertools.product(range(rows), range(columns)):
        wanted = {"l1": 0.0, "wanda": 0.0, "snip": 0.0}
        for i, j in itertools.product(range(r * block, (r + 1) * block), range(c * block, (c + 1) * block)):
            wanted["l1"] += abs(float(weight[i, j]))
            wanted["wanda"] += abs(float(weight[i, j])) * float(norms[j])
            wanted["snip"] += abs(float(weight[i, j]) * float(gradient[i, j]))
        for name, value in wanted.items():
            assert float(found[name][r, c]) == pytest.approx(value, rel=1e-4)


def test_snip_is_the_loss_change_of_taking_a_weight_out_to_first_order() -> None:
    torch.manual_seed(0)
    weight, x = (
        torch.randn(4, 3, dtype=torch.double, requires_grad=True),
        torch.randn(5, 3, dtype=torch.double),
    )
    loss = (x @ weight.T).square().sum()
    loss.backward()
    assert weight.grad is not None
    scores = saliency.snip(weight, weight.grad)
    gate = torch.ones(4, 3, dtype=torch.double, requires_grad=True)
    (x @ (weight.detach() * gate).T).square().sum().backward()
    assert gate.grad is not None
    torch.testing.assert_close(scores, gate.grad.abs())


@cases(seed=SEEDS, hidden=st.integers(1, 6), width=SIZES)
def test_neurons_sum_their_rows_and_columns(seed: int, hidden: int, width: int) -> None:
    gate, up, down = (
        normal(seed, hidden, width).abs(),
        normal(seed + 1, hidden, width).abs(),
        normal(seed + 2, width, hidden).abs(),
    )
    found = saliency.neurons([gate, up], [down])
    wanted = [float(gate[n].sum() + up[n].sum() + down[:, n].sum()) for n in range(hidden)]
    torch.testing.assert_close(found, torch.tensor(wanted))


def test_heads_sum_the_rows_of_each() -> None:
    q, k, v, out = (normal(seed, 6, 6).abs() for seed in range(4))
    found = saliency.heads([q, k, v], [out], 3)
    wanted = [
        float(sum(m[2 * h : 2 * h + 2].sum() for m in (q, k, v)) + out[:, 2 * h : 2 * h + 2].sum())
        for h in range(3)
    ]
    torch.testing.assert_close(found, torch.tensor(wanted))
    with pytest.raises(UsageError, match="4 heads"):
        saliency.heads([q, k, v], [out], 4)


@cases(seed=SEEDS, lines=SIZES, size=st.integers(1, 8), data=st.data())
def test_top_is_sorting_each_line(seed: int, lines: int, size: int, data: st.DataObject) -> None:
    # with many equal ones
    scores = torch.randint(4, (lines, size), generator=torch.Generator().manual_seed(seed)).float()
    count = torch.tensor([data.draw(st.integers(0, size)) for _ in range(lines)])
    found = saliency.top(scores, count)
    for line in range(lines):
        best = sorted(range(size), key=lambda i: (-float(scores[line, i]), i))[: int(count[line])]
        assert found[line].nonzero().squeeze(1).tolist() == sorted(best)


@cases(seed=SEEDS, sparsity=st.floats(0, 0.99), balanced=st.booleans())
@settings(max_examples=50)
def test_uniform_masks_keep_the_best_of_each_layer(seed: int, sparsity: float, balanced: bool) -> None:
    scores = {"a": normal(seed, 4, 6).abs(), "b": 100 * normal(seed + 1, 2, 3).abs()}
    masks = saliency.masks(scores, sparsity, "uniform", balanced)
    for name, mask in masks.items():
        kept = max(1, round(mask.numel() * (1 - sparsity)))
        if balanced:
            assert set(mask.sum(dim=1).tolist()) == {max(1, round(kept / mask.shape[0]))}
            assert all(
                row[m].min() >= row[~m].max()
                for row, m in zip(scores[name], mask, strict=True)
                if not m.all()
            )
        else:
            assert int(mask.sum()) == kept
            assert mask.all() or scores[name][mask].min() >= scores[name][~mask].max()


@cases(seed=SEEDS, sparsity=st.floats(0, 0.99))
@settings(max_examples=50)
def test_global_masks_keep_the_best_of_all(seed: int, sparsity: float) -> None:
    scores = {
        "a": normal(seed, 4, 6).abs(),
        "b": 3 * normal(seed + 1, 2, 3).abs(),
        "c": 1e-3 * normal(seed + 2, 2, 2).abs(),
    }
    masks = saliency.masks(scores, sparsity, "global")
    ranked = sorted(
        ((float(s), name) for name, tensor in scores.items() for s in tensor.flatten()), reverse=True
    )
    best = ranked[: max(1, round(len(ranked) * (1 - sparsity)))]
    for name, mask in masks.items():
        assert int(mask.sum()) == max(1, sum(owner == name for _, owner in best))
        assert mask.all() or scores[name][mask].min() >= scores[name][~mask].max()


def test_two_of_four_keeps_the_largest_pairs() -> None:
    values = normal(0, 6, 8).abs()
    found = saliency.two_of_four(values)
    for row, group in itertools.product(range(6), range(2)):
        part, kept = values[row, 4 * group : 4 * group + 4], found[row, 4 * group : 4 * group + 4]
        assert kept.sum() == 2
        assert part[kept].sum() == max(a + b for a, b in itertools.combinations(part, 2))
    with pytest.raises(UsageError, match="multiple of 4"):
        saliency.two_of_four(torch.ones(2, 6))


def test_a_given_mask_is_of_elements_or_of_blocks() -> None:
    elements = torch.zeros(4, 6, dtype=torch.bool)
    elements[3, 0] = True
    wanted = torch.tensor([[False, False, False], [True, False, False]])
    assert torch.equal(saliency.given("up", elements, (4, 6), 2), wanted)
    assert torch.equal(saliency.given("up", wanted, (4, 6), 2), wanted)


@pytest.mark.parametrize(
    ("mask", "says"), [(torch.ones(6, 4), "another model"), (torch.zeros(4, 6), "keeps nothing")]
)
def test_a_mask_that_does_not_fit_is_refused(mask: Tensor, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        saliency.given("up", mask, (4, 6), 2)


def test_shapes_that_do_not_fit_are_refused() -> None:
    weight = torch.ones(4, 6)
    for call in (
        lambda: saliency.wanda(weight, torch.ones(4)),
        lambda: saliency.snip(weight, torch.ones(6, 4)),
        lambda: saliency.blocks(weight, 4),
    ):
        with pytest.raises(UsageError, match=r"6"):
            call()
