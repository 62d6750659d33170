"""benchmarks/gpu.py's section of block-sparse linears, against dense ones."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from _gpu_common import DEVICE, DRY, Timed, attempt, close, compare, make, mine

from effcompile.ops.block_sparse import block_sparse_linear
from effcompile.sparse.pattern import BlockPattern


def block_sparse() -> None:
    """y = x Wᵀ with half and nine of ten blocks left out, against the dense product."""
    for b in (32,) if DRY else (64, 32):
        for sparsity in (0.9, 0.5):
            if mine():
                with attempt(f"block-sparse {sparsity} b{b}"):
                    one_sparsity(b, sparsity, *((40, 128) if DRY else (16384, 8192)))


def one_sparsity(b: int, sparsity: float, rows: int, n: int) -> None:
    """rows × n times n × n, forward, and the two gradients."""
    pattern = BlockPattern.random(n, n, b, sparsity, torch.Generator().manual_seed(0))
    structure = [t.to(DEVICE) for t in (pattern.crow, pattern.col, pattern.ccol, pattern.row, pattern.perm)]
    values, x, weight = make(len(pattern.col), b, b), make(rows, n), make(n, n)
    runs: Timed = {
        "ours": lambda: block_sparse_linear(x, values, *structure),
        "dense": lambda: F.linear(x, weight),
    }
    close(
        f"block-sparse {sparsity} b{b}",
        runs["ours"](),
        F.linear(x, pattern.to(DEVICE).to_dense(values)),
        6e-3,
    )
    compare(f"block-sparse {sparsity} b{b}", 2.0 * rows * values.numel(), runs, predicted=1 / (1 - sparsity))
    leaves, full = tuple(t.requires_grad_() for t in (x, values)), weight.requires_grad_()
    grad, known = make(rows, n), block_sparse_linear(x, values, *structure)
    theirs = F.linear(x, full)
    pair: Timed = {
        "ours": lambda: torch.autograd.grad(known, leaves, grad, retain_graph=True),
        "dense": lambda: torch.autograd.grad(theirs, (x, full), grad, retain_graph=True),
    }
    compare(
        f"block-sparse backward {sparsity} b{b}",
        4.0 * rows * values.numel(),
        pair,
        predicted=1 / (1 - sparsity),
    )
