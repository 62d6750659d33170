"""Which linears train sparse, and in blocks of which size: a choice under a budget of bytes, by times
measured at the rows of a step.

A sparse FLOP takes eps times as long as a dense one (Dietrich et al. 2021, arXiv 2108.06277, section 5),
which depends on the layer's shape, the block and the machine. So each linear has the options dense and
sparse; its seconds are measured for both, its bytes are those of its weight, gradient and states; and for
each size of block the planner takes the fastest choice within the budget.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from effcompile.core.errors import InfeasibleError, UsageError
from effcompile.core.units import parse_bytes
from effcompile.estimate.optimizer import state_bytes
from effcompile.ops.optimizers import given_form
from effcompile.planner import Alternative, Problem, solve
from effcompile.sparse import select
from effcompile.sparse.costs import RowTimes, layer_seconds, rows_of
from effcompile.sparse.layer import BlockSparseLinear
from effcompile.sparse.pattern import BlockPattern

DENSE, SPARSE = "dense", "sparse"
_ROUNDS = 5
Bytes = Callable[[torch.Size], int]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockTrial:
    """The best choice with blocks of one size.

    Attributes:
        block: their side. layers: that train sparse, by name.
        seconds, bytes: of all layers to choose from in a step: products forward and backward; weights,
            gradients and states. None, and the least bytes, where no choice is within the budget.
        eps: layer → how many times as long a sparse FLOP takes as a dense one, measured.
    """

    block: int
    layers: tuple[str, ...]
    seconds: float | None
    bytes: int
    eps: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseLayers:
    """What was chosen: `DynamicSparsity(model, optimizer, sparsity=…, block=found.block,
    layers=found.layers)`.

    Attributes:
        sparsity: the share of zeros. block: the side of the blocks. layers: that train sparse, by name; none
            where that is fastest.
        seconds, bytes: as of a trial; dense_seconds, dense_bytes: with all layers dense.
        trials: the best choice for each size of block that was asked for.
        left_out: layer → why it was not to choose from.
    """

    sparsity: float
    block: int
    layers: tuple[str, ...]
    seconds: float
    bytes: int
    dense_seconds: float
    dense_bytes: int
    trials: tuple[BlockTrial, ...]
    left_out: Mapping[str, str] = field(default_factory=dict)


def sparse_layers(
    model: nn.Module, loss: Callable[[], Tensor], *, sparsity: float = 0.9,
    blocks: Sequence[int] = (16, 8, 4), optimizer: Optimizer | None = None, memory: int | str | None = None,
    layers: Sequence[str] | None = None,
) -> SparseLayers:  # fmt: skip
    """Choose the linears that train sparse. Nothing of the model is changed.

    Args:
        model: as it trains, on this machine.
        loss: runs its forward on a usual batch and returns the loss.
        sparsity: the share of a sparse layer's weights that is zero.
        blocks: sides of blocks to choose from; finer ones learn better, coarser ones are faster.
        optimizer: whose states count.
        memory: bytes that all parameters, gradients and states together may take.
        layers: names or patterns of those to choose from; None: the linears inside repeated blocks.

    Raises:
        UsageError: a share or block that is none, or layers that cannot be sparse. InfeasibleError: no choice
            is within the memory.
    """
    if not 0 < sparsity < 1 or not blocks:
        said = f"sparsity = {sparsity!r}, blocks = {blocks!r}"
        raise UsageError(f"{said}: a share between 0 and 1 and one size of block at the least are wanted.")
    chosen = select.choose(model, layers, 1)
    rows = rows_of(model, chosen, loss)
    left_out = {name: "the loss does not run it" for name in chosen if not rows[name].forward}
    left_out |= {
        name: "no block divides it"
        for name, layer in chosen.items()
        if not any(_divides(block, layer) for block in blocks)
    }
    wanted = {name: layer for name, layer in chosen.items() if name not in left_out}
    size = _sizes(optimizer, model)
    beside = sum(
        size(p.shape)
        for p in model.parameters()
        if p.requires_grad and all(p is not layer.weight for layer in wanted.values())
    )
    room = None if memory is None else int(parse_bytes(memory)) - beside
    measured = {block: _measured(wanted, rows, block, sparsity) for block in sorted(blocks, reverse=True)}
    dense = {name: min(found[name][1] for found in measured.values() if name in found) for name in wanted}
    trials, errors = [], list[InfeasibleError]()
    for block, times in measured.items():
        problem = _problem(wanted, times, dense, size, block, sparsity, room)
        try:
            trials.append(_trial(problem, times, block))
        except InfeasibleError as error:
            errors.append(error)
            least = sum(min(a.resources["bytes"] for a in options) for options in problem.sites.values())
            trials.append(BlockTrial(block=block, layers=(), seconds=None, bytes=int(least), eps=_eps(times)))
    best = min(
        (trial for trial in trials if trial.seconds is not None),
        key=lambda trial: trial.seconds or 0.0,
        default=None,
    )
    if best is None:
        raise errors[0]
    return SparseLayers(
        sparsity=sparsity, block=best.block, layers=best.layers, seconds=best.seconds or 0.0,
        bytes=best.bytes, dense_seconds=sum(dense.values()),
        dense_bytes=sum(size(layer.weight.shape) for layer in wanted.values()), trials=tuple(trials),
        left_out=left_out,
    )  # fmt: skip


def _sizes(optimizer: Optimizer | None, model: nn.Module) -> Bytes:
    """Shape → bytes of a parameter of the model's dtype, its gradient and its states."""
    first = next(model.parameters())

    def size(shape: torch.Size) -> int:
        held = torch.empty(shape, dtype=first.dtype, device="meta")
        states = 0
        if optimizer is not None:
            form = given_form(optimizer, first.device.type)
            states = state_bytes(
                form, optimizer, [(optimizer.param_groups[0], held)], first.device.type
            ).state_bytes
        return 2 * held.nbytes + states

    return size


#: (Seconds sparse, seconds dense, eps) of each layer that blocks of a size divide.
_Times = dict[str, tuple[float, float, float]]


def _measured(
    layers: Mapping[str, nn.Linear], rows: Mapping[str, RowTimes], block: int, sparsity: float
) -> _Times:
    """Layers of one shape at equally many rows are measured once."""
    found: _Times = {}
    known: dict[tuple[object, ...], tuple[float, float, float]] = {}
    for name, layer in layers.items():
        shape, seen = (layer.out_features, layer.in_features), rows[name]
        if not _divides(block, layer):
            continue
        key = (shape, seen.forward, seen.backward)
        if key not in known:
            sparse = BlockSparseLinear.from_linear(layer, _pattern(shape, block, sparsity))
            seconds, dense = layer_seconds(sparse, sparse.values, shape, seen, _ROUNDS)
            share = sparse.values.numel() / (shape[0] * shape[1])
            known[key] = seconds, dense, seconds / (dense * share)
        found[name] = known[key]
    return found


def _divides(block: int, layer: nn.Linear) -> bool:
    return layer.out_features % block == 0 and layer.in_features % block == 0


def _kept(shape: tuple[int, int], block: int, sparsity: float) -> int:
    """Blocks of a weight that stay, one at the least."""
    return max(1, round((1 - sparsity) * shape[0] * shape[1] / block**2))


def _pattern(shape: tuple[int, int], block: int, sparsity: float) -> BlockPattern:
    grid = (shape[0] // block, shape[1] // block)
    kept = torch.zeros(grid[0] * grid[1], dtype=torch.bool)
    kept[
        torch.randperm(len(kept), generator=torch.Generator().manual_seed(0))[: _kept(shape, block, sparsity)]
    ] = True
    return BlockPattern.from_blocks(kept.view(grid), block)


def _problem(
    layers: Mapping[str, nn.Linear], measured: _Times, dense: Mapping[str, float], size: Bytes, block: int,
    sparsity: float, room: int | None,
) -> Problem:  # fmt: skip
    """Dense, or sparse where the blocks divide it, for each layer."""
    sites = {}
    for name, layer in layers.items():
        shape = (layer.out_features, layer.in_features)
        options = [
            Alternative(name=DENSE, objective=dense[name], resources={"bytes": size(layer.weight.shape)})
        ]
        if name in measured:
            held = size(torch.Size((_kept(shape, block, sparsity), block, block)))
            options.append(Alternative(name=SPARSE, objective=measured[name][0], resources={"bytes": held}))
        sites[name] = tuple(options)
    return Problem(sites=sites, limits={} if room is None else {"bytes": room})


def _trial(problem: Problem, measured: _Times, block: int) -> BlockTrial:
    found = solve(problem)
    taken = tuple(name for name, option in found.choice.items() if option == SPARSE)
    return BlockTrial(
        block=block,
        layers=taken,
        seconds=found.objective,
        bytes=int(found.resources["bytes"]),
        eps=_eps(measured),
    )


def _eps(measured: _Times) -> dict[str, float]:
    return {name: eps for name, (_, _, eps) in measured.items()}
