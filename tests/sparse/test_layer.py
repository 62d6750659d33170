"""The block-sparse layer: made of a linear, trained, saved, compiled, exported, captured; patterns change
without a new compilation.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from effcompile.capture.training import capture_training
from effcompile.core.errors import UsageError
from effcompile.sparse import BlockPattern, BlockSparseLinear
from effcompile.sparse.layer import carry


def pattern(seed: int = 0, sparsity: float = 0.5, block: int = 8) -> BlockPattern:
    return BlockPattern.random(48, 64, block, sparsity, torch.Generator().manual_seed(seed))


def layer(seed: int = 0, capacity: int | None = None) -> BlockSparseLinear:
    torch.manual_seed(seed)
    return BlockSparseLinear.from_linear(nn.Linear(64, 48), pattern(seed), capacity=capacity)


def close(a: Tensor, b: Tensor) -> bool:
    return bool((a - b).norm() <= 1e-5 * b.norm())


def test_is_the_masked_linear_and_goes_back() -> None:
    linear, kept = nn.Linear(64, 48).requires_grad_(False), pattern()
    sparse, x = BlockSparseLinear.from_linear(linear, kept), torch.randn(3, 5, 64)
    assert close(sparse(x), nn.functional.linear(x, linear.weight * kept.mask(), linear.bias))
    assert not sparse.values.requires_grad and sparse.bias is linear.bias and sparse.pattern() == kept
    dense = sparse.dense()
    assert (
        torch.equal(dense.weight, linear.weight * kept.mask())
        and close(dense(x), sparse(x))
        and not dense.weight.requires_grad
    )
    assert "block=8, kept=50.0%" in repr(sparse)


def test_state_dicts_carry_the_pattern(tmp_path: Any) -> None:
    one, other, x = layer(0), layer(1), torch.randn(4, 64)
    assert not torch.equal(one(x), other(x)) and set(one.state_dict()) == {"values", "bias", "crow", "col"}
    torch.save(one.state_dict(), tmp_path / "state.pt")
    other.load_state_dict(torch.load(tmp_path / "state.pt"))
    assert torch.equal(one(x), other(x)) and other.pattern() == one.pattern()
    x.requires_grad_()
    expected = torch.autograd.grad(one(x).square().sum(), [x, one.values])
    for same in (other, copy.deepcopy(one)):
        found = torch.autograd.grad(same(x).square().sum(), [x, same.values])
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_a_state_dict_with_a_broken_pattern_is_refused() -> None:
    state = layer(0).state_dict() | {"col": torch.full_like(layer(0).col, 99)}
    with pytest.raises(UsageError, match="column indices from 0 to 7; given 99 to 99"):
        layer(1).load_state_dict(state)


def test_a_new_pattern_keeps_values_and_moments_where_blocks_stay() -> None:
    sparse, x = layer(0, capacity=30), torch.randn(7, 64)
    before, moments = sparse.dense().weight, torch.randn(30, 8, 8)
    old, new = pattern(0), pattern(5, 0.4)
    places = sparse.set_pattern(new)
    assert sparse.pattern() == new and torch.equal(sparse.dense().weight, before * new.mask())
    assert torch.equal(
        new.to_dense(carry(moments, places)[: new.nnz]), old.to_dense(moments[: old.nnz]) * new.mask()
    )
    assert close(sparse(x), nn.functional.linear(x, sparse.dense().weight, sparse.bias))
    (grad,) = torch.autograd.grad(sparse(x).sum(), sparse.values)
    assert bool((grad[: new.nnz] != 0).any()) and not bool(grad[new.nnz :].any())
    with pytest.raises(UsageError, match="keeps 48 blocks; this layer has memory for 30"):
        sparse.set_pattern(pattern(0, 0.0))


def test_a_new_pattern_does_not_compile_again() -> None:
    """Dynamo calls the backend once for every graph that it compiles."""
    graphs: list[fx.GraphModule] = []

    def backend(graph: fx.GraphModule, inputs: list[Tensor]) -> Any:
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()
    model, x = nn.Sequential(layer(0, capacity=30), nn.ReLU()), torch.randn(6, 64)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    for seed in range(4):
        model[0].set_pattern(pattern(seed, 0.4 + 0.1 * seed))
        assert torch.equal(compiled(x), model(x))
        compiled(x).sum().backward()
    assert len(graphs) == 1


def test_inductor() -> None:
    torch.compiler.reset()
    model, x = nn.Sequential(layer(0), nn.GELU(), nn.Linear(48, 64), layer(1)), torch.randn(6, 64)
    expected = torch.autograd.grad(model(x).square().mean(), list(model.parameters()))
    ours = torch.autograd.grad(torch.compile(model)(x).square().mean(), list(model.parameters()))
    assert all(close(a, b) for a, b in zip(ours, expected, strict=True))


def test_export_with_any_number_of_rows() -> None:
    model, x = nn.Sequential(layer(0), nn.ReLU()), torch.randn(6, 64)
    rows = torch.export.Dim("rows", min=2, max=1000)
    exported = torch.export.export(model, (x,), dynamic_shapes=({0: rows},)).module()
    for count in (6, 77):
        assert torch.equal(exported(torch.ones(count, 64)), model(torch.ones(count, 64)))


def test_capture_for_training() -> None:
    """The joint graph has the three operators, and its gradients are eager's."""
    model, x = nn.Sequential(nn.Linear(16, 64), layer(0), nn.ReLU(), nn.Linear(48, 1)), torch.randn(6, 16)
    step = capture_training(model, (x,), loss=lambda out, _: out.square().mean())
    names = [node.target.name() for node in step.graph.nodes if "block_sparse" in str(node.target)]
    assert sorted(n.removeprefix("effcompile::block_sparse_") for n in names) == [
        "grad_input",
        "grad_values",
        "linear",
    ]
    weights = dict(model.named_parameters()) | dict(model.named_buffers())
    given = {node: weights[name].detach() for node, name in (*step.parameters.items(), *step.buffers.items())}
    given |= dict(step.constants) | dict(zip(step.inputs, step.leaves((x,), {}), strict=True))
    if step.tangent is not None:
        given[step.tangent] = torch.ones(())
    with torch.no_grad():
        flat = fx.Interpreter(step.module).run(
            *[given[node] for node in step.graph.find_nodes(op="placeholder")]
        )
    found = dict(zip(step.differentiated, flat[len(flat) - len(step.differentiated) :], strict=True))
    model(x).square().mean().backward()
    assert all(
        close(found[name], parameter.grad)
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    )


def test_autocast_is_that_of_a_linear() -> None:
    sparse, x = layer(0), torch.randn(6, 64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = sparse(x)
    y.float().sum().backward()
    assert (
        y.dtype == torch.bfloat16
        and sparse.values.grad is not None
        and sparse.values.grad.dtype == torch.float32
    )
    assert (y - sparse(x)).norm() <= 1e-2 * y.float().norm()


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: BlockSparseLinear.from_linear(nn.Linear(64, 40), pattern()), "another model"),
        (lambda: BlockSparseLinear(pattern(), torch.zeros(3, 8, 8)), r"\(24, 8, 8\); given \(3, 8, 8\)"),
        (
            lambda: BlockSparseLinear(pattern(), torch.zeros(24, 8, 8), torch.zeros(64)),
            r"\(48\); given \(64,\)",
        ),
        (
            lambda: BlockSparseLinear(pattern(), torch.zeros(24, 8, 8), capacity=20),
            "20 blocks is less than the pattern's 24",
        ),
    ],
)
def test_what_does_not_fit_is_refused(make: Any, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        make()


def test_quantised_weights_are_refused() -> None:
    linear = nn.Linear(64, 48)
    linear.weight = nn.Parameter(linear.weight.detach().to(torch.int8), requires_grad=False)
    with pytest.raises(UsageError, match="sparsify before quantising"):
        BlockSparseLinear.from_linear(linear, pattern())
