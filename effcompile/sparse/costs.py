"""What a training step under a pattern costs: FLOPs by how they grow with the model, and time per sparse FLOP
against dense.

FLOPs are torch's own counts (FlopCounterMode) of one forward and backward; those of linear layers are split
off by hooks that see their rows, so that a sparse layer counts its active blocks however it is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from effcompile.core.errors import UsageError
from effcompile.core.timing import faster_half_median, interleaved
from effcompile.core.torch_compat import flop_counter
from effcompile.ir.sparsity import Efficiency, StepFlops
from effcompile.sparse.held import Held
from effcompile.sparse.layer import BlockSparseLinear
from effcompile.sparse.select import is_inside

__all__ = ["RowTimes", "layer_seconds", "measure", "per_row", "per_row_of", "rows_of"]


@dataclass(slots=True)
class RowTimes:
    """Rows that a linear layer saw in one step, and how many of them came with a gradient to pass on."""

    trained: bool
    forward: int = 0
    backward: int = 0

    def flops(self, weights: float) -> float:
        """2 per weight and row for the product, and 2 each for the weight's and the input's gradient where it
        is wanted.
        """
        return 2.0 * weights * (self.forward * (1 + self.trained) + self.backward)


def per_row(model: nn.Module, inside: Sequence[str], held: Sequence[Held]) -> StepFlops:
    """FLOPs of the linear layers for one row (token), attention left out: what can be said without running
    the model.

    Args:
        model: the model.
        inside: the linear layers inside the repeated blocks.
        held: those under a pattern.
    """
    _, weights = _linears(model, held)
    within = sum(weights[name] for name in inside)
    saved = sum(map(_saved_weights, held))
    return StepFlops(
        inside=6 * within, outside=6 * (sum(weights.values()) - within), rest=0, saved=6 * saved, of="row"
    )


def per_row_of(model: nn.Module) -> StepFlops | None:
    """The same of a model's own block-sparse layers, whoever made them; None when it has none."""
    sparse = {name: layer for name, layer in model.named_modules() if isinstance(layer, BlockSparseLinear)}
    if not sparse:
        return None
    dense = {name: layer for name, layer in model.named_modules() if isinstance(layer, nn.Linear)}
    weights = {name: layer.out_features * layer.in_features for name, layer in sparse.items()}
    weights |= {name: layer.out_features * layer.in_features for name, layer in dense.items()}
    inside = sum(count for name, count in weights.items() if name in sparse or is_inside(model, name))
    saved = sum(weights[name] - layer.pattern().nnz * layer.block**2 for name, layer in sparse.items())
    return StepFlops(
        inside=6 * inside, outside=6 * (sum(weights.values()) - inside), rest=0, saved=6 * saved, of="row"
    )


def measure(
    model: nn.Module, inside: Sequence[str], held: Sequence[Held], loss: Callable[[], Tensor], rounds: int
) -> tuple[StepFlops, Efficiency | None]:
    """FLOPs of one step, and seconds of its sparse layers against dense ones.

    `loss` runs the forward; its backward is run here. Gradients, buffers and random generators are left as
    they were.

    Raises:
        UsageError: `loss` returns no scalar that depends on the weights.
    """
    collected = [one.dense_gradient for one in held]
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    try:
        with torch.random.fork_rng(devices=devices):
            counted, rows = _count(model, inside, held, loss)
            return counted, _efficiency(held, rows, rounds)
    finally:
        for one, gradient in zip(held, collected, strict=True):
            one.dense_gradient = gradient


def _count(
    model: nn.Module, inside: Sequence[str], held: Sequence[Held], loss: Callable[[], Tensor]
) -> tuple[StepFlops, dict[str, RowTimes]]:
    linears, weights = _linears(model, held)
    with _as_before(model), _rows(linears) as rows, flop_counter() as counter:
        value = loss()
        if not isinstance(value, Tensor) or value.numel() != 1 or not value.requires_grad:
            raise UsageError(
                "The function given to measure() must return the training loss, a scalar that depends on "
                "the weights."
            )
        value.backward()
    counted = counter.get_flop_counts().get("Global", {})
    other = sum(flops for op, flops in counted.items() if not str(op).startswith("effcompile.block_sparse"))
    as_blocks = {one.name for one in held if one.execution == "blocks"}
    rest = other - sum(rows[name].flops(weights[name]) for name in linears if name not in as_blocks)
    within = sum(rows[name].flops(weights[name]) for name in inside)
    outside = sum(rows[name].flops(weights[name]) for name in linears if name not in inside)
    saved = sum(rows[one.name].flops(_saved_weights(one)) for one in held)
    return StepFlops(inside=within, outside=outside, rest=max(rest, 0.0), saved=saved), rows


def rows_of(
    model: nn.Module, layers: Mapping[str, nn.Module], loss: Callable[[], Tensor]
) -> dict[str, RowTimes]:
    """The rows that each layer sees in a step; the model is left as it was."""
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=devices), _as_before(model), _rows(layers) as rows:
        loss().backward()
    return rows


def _linears(model: nn.Module, held: Sequence[Held]) -> tuple[dict[str, nn.Module], dict[str, int]]:
    """Linear layers, sparse or not, and the weights that each would have dense."""
    shapes = {one.name: one.shape for one in held}
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if name in shapes or isinstance(module, nn.Linear):
            found[name] = module
        if isinstance(module, nn.Linear):
            shapes[name] = (module.out_features, module.in_features)
    return found, {name: shapes[name][0] * shapes[name][1] for name in found}


def _efficiency(held: Sequence[Held], rows: Mapping[str, RowTimes], rounds: int) -> Efficiency | None:
    """Forward and backward of the sparse layers against dense ones, at the rows of a step; None when no layer
    saw any.

    Layers of equal shape and density are measured once. The two are run in turn, so that a busy machine slows
    both.
    """
    totals = [0.0, 0.0, 0.0, 0.0]
    known: dict[tuple[object, ...], tuple[float, float]] = {}
    for one in held:
        seen = rows[one.name]
        if not seen.forward:
            continue
        key = (one.shape, int(one.mask.sum()), seen.forward, seen.backward)
        if key not in known:
            known[key] = layer_seconds(one.layer, one.parameter, one.shape, seen, rounds)
        dense_flops = seen.flops(one.shape[0] * one.shape[1])
        figures = (*known[key], dense_flops - seen.flops(_saved_weights(one)), dense_flops)
        totals = [total + figure for total, figure in zip(totals, figures, strict=True)]
    if not totals[3]:
        return None
    return Efficiency(
        sparse_seconds=totals[0], dense_seconds=totals[1], sparse_flops=totals[2], dense_flops=totals[3]
    )


def layer_seconds(
    sparse: nn.Module, weight: Tensor, shape: tuple[int, int], rows: RowTimes, rounds: int
) -> tuple[float, float]:
    """(Seconds of a sparse layer with this parameter, of a dense one (N, K)): a forward and a backward at the
    rows of a step.
    """
    x = torch.randn(
        rows.forward, shape[1], device=weight.device, dtype=weight.dtype, requires_grad=rows.backward > 0
    )
    dense = nn.Linear(shape[1], shape[0], device=weight.device, dtype=weight.dtype)
    gradient = torch.randn(rows.forward, shape[0], device=weight.device, dtype=weight.dtype)
    wanted = [x] if x.requires_grad else []

    def step(layer: nn.Module, parameter: Tensor) -> None:
        torch.autograd.grad(layer(x), [*wanted, parameter], gradient)
        if x.device.type == "cuda":
            torch.cuda.synchronize()

    samples = interleaved(
        {"sparse": lambda: step(sparse, weight), "dense": lambda: step(dense, dense.weight)}, rounds
    )
    return faster_half_median(samples["sparse"]), faster_half_median(samples["dense"])


def _saved_weights(one: Held) -> int:
    return int((~one.mask).sum()) * one.block**2


@contextmanager
def _rows(linears: Mapping[str, nn.Module]) -> Iterator[dict[str, RowTimes]]:
    rows = {name: RowTimes(trained=next(layer.parameters()).requires_grad) for name, layer in linears.items()}

    def watch(seen: RowTimes) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def hook(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            count = inputs[0].numel() // inputs[0].shape[-1]
            seen.forward += count
            seen.backward += count if inputs[0].requires_grad else 0

        return hook

    handles = [layer.register_forward_pre_hook(watch(rows[name])) for name, layer in linears.items()]
    try:
        yield rows
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _as_before(model: nn.Module) -> Iterator[None]:
    """Gradients and buffers as they were before."""
    gradients = {parameter: parameter.grad for parameter in model.parameters()}
    buffers = {buffer: buffer.clone() for buffer in model.buffers()}
    try:
        for parameter in gradients:
            parameter.grad = None
        yield
    finally:
        for parameter, gradient in gradients.items():
            parameter.grad = gradient
        with torch.no_grad():
            for buffer, value in buffers.items():
                buffer.copy_(value)
