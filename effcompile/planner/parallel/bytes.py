"""Closed form of the bytes of a rank that no choice of a layer changes: states, gradients, gathered weights,
buffers, the loss.

Per parameter of a stage (P of them on a rank after tensor parallelism; D ranks hold the same), bf16 or fp16
compute with fp32 master weights and Adam (Rajbhandari et al. 2020, arXiv 1910.02054, §3: 2 + 2 + 12 bytes;
here gradients are summed in fp32):

              weights   gradients   master, moments                       source
    zero 0    2         4           12                                    Megatron-LM's main gradients
    zero 1    2         4           12 / D                                its distributed optimizer
    zero 2    2         4 / D       12 / D      + one layer's gradients   ZeRO
    zero 3    0         4 / D       12 / D      + two gathered layers     FSDP2: the shard is the master copy
    fp32: no copy of the weights beside the master's 4; DeepSpeed keeps 2-byte weights, too, in zero 3 (2 /
    D).

Engines differ in what they hold beside that. FSDP2: the root unit (table and head) gathered from forward to
backward, one layer's all-gather buffer, its gradient and the reduce-scatter's fp32 input; under a pipeline
everything gathered and gradients whole until the last micro-batch. DeepSpeed's ZeRO-3: up to 1e9 gathered
parameters, a prefetch bucket of 5e7 and a reduce bucket of 5e8 numbers. Ours: the layer in turn and the next
one, gathered; a root unit for the time of its use.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from effcompile.ir.strategy import Strategy
from effcompile.planner.parallel.engines import ENGINES
from effcompile.planner.parallel.model import Model

STATES, WEIGHTS, GRADIENTS = "optimizer states", "weights", "gradients"
BUFFERS, LOGITS, KEPT = "gathered weights, buffers", "logits", "kept activations"
IN_FLIGHT, WORKING, BESIDE = "kept for other micro-batches", "working memory", "outside of the allocator"

#: DeepSpeed 0.19's defaults in numbers: max_live_parameters, prefetch and reduce bucket.
_LIVE, _PREFETCH, _REDUCE = 1e9, 5e7, 5e8


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """A stage of the pipeline as one rank holds it: its runs of layers (one run per virtual stage), and its
    ends.

    `first`: it has the embedding. `last`: it has the loss.
    """

    rank: int
    runs: tuple[tuple[int, int], ...]
    first: bool
    last: bool

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(i for begin, end in self.runs for i in range(begin, end))


def place(model: Model, strategy: Strategy, rank: int) -> RankPlace:
    """What a rank of the pipeline holds: virtual stage v of rank r is the (v · pp + r)-th piece of the model.

    Raises:
        UsageError: more stages than layers.
    """
    ends = list(accumulate(strategy.layers(model.depth), initial=0))
    runs = tuple((ends[piece], ends[piece + 1]) for piece in range(rank, strategy.stages, strategy.pp))
    return RankPlace(rank=rank, runs=runs, first=rank == 0, last=rank == strategy.pp - 1)


def in_flight(strategy: Strategy, rank: int, micro_batches: int) -> float:
    """Micro-batches whose kept activations stand on a rank at once, in units of its whole share of the
    layers.

    1F1B: min(m, p − r) (Narayanan et al. 2019, arXiv 1806.03377). GPipe: m. Interleaved: the first p·v + 2(p
    − r − 1) forwards of one virtual stage each, 1 / v of the share: 1 + (p − 1) / (p·v) times 1F1B's p on the
    first rank (Narayanan et al. 2021, §2.2). Zero bubble: p and, as the weights' turn is late, one more on
    the last rank (measured, see the survey's facts).
    """
    p, v, m = strategy.pp, strategy.vpp, micro_batches
    if strategy.schedule == "gpipe":
        return m
    if strategy.schedule == "interleaved":
        return min(m * v, (v - 1) * p + 2 * (p - rank - 1) + 1) / v
    if strategy.schedule == "zero-bubble" and p > 1:
        return min(m, p + (rank == p - 1))
    return min(m, p - rank)


def parameters(model: Model, strategy: Strategy, place: RankPlace) -> tuple[float, float]:
    """(of the rank's layers, of its embedding and head), after tensor parallelism."""
    inside = sum(model.layers[model.order[i]].parameters for i in place.layers)
    shared = model.tied and place.first and place.last
    ends = (model.embedding if place.first else 0) + (
        (model.around + (0 if shared else model.head)) if place.last else 0
    )
    return inside / strategy.tp, ends / strategy.tp


def standing(model: Model, strategy: Strategy, place: RankPlace) -> dict[str, float]:
    """Bytes at every instant of the step, by kind."""
    inside, ends = parameters(model, strategy, place)
    p, shards = inside + ends, strategy.shards
    copy = 0.0 if strategy.precision == "fp32" else 2.0
    weights = 0.0 if strategy.zero == 3 else copy * p
    if strategy.engine == "deepspeed" and strategy.zero == 3:
        weights = copy * p / shards
    gradients = 4 * p / (shards if strategy.zero >= 2 else 1)
    master, moments = (
        4 * p / (shards if strategy.zero == 3 or (strategy.zero and copy) else 1),
        8 * p / (shards if strategy.zero else 1),
    )
    if strategy.engine == "fsdp2" and strategy.pp > 1 and strategy.zero >= 2:
        gradients += 4 * p
    if strategy.offload != "none":
        moments, master = 0.0, (4 * p if strategy.precision == "fp32" and strategy.zero < 3 else 0.0)
    if strategy.offload == "all":
        weights = 0.0
    return {
        WEIGHTS: weights + (master if not copy else 0.0),
        GRADIENTS: gradients,
        STATES: moments + (master if copy else 0.0),
        BUFFERS: buffers(model, strategy, place),
        BESIDE: ENGINES[strategy.engine].beside,
    }


def layer_parameters(model: Model, strategy: Strategy, place: RankPlace) -> float:
    """Of the largest layer of a rank, after tensor parallelism."""
    kinds = {model.order[i] for i in place.layers}
    return max((model.layers[kind].parameters for kind in kinds), default=0) / strategy.tp


def number_bytes(strategy: Strategy) -> int:
    """Bytes of one gathered weight."""
    return 4 if strategy.precision == "fp32" else 2


def buffers(model: Model, strategy: Strategy, place: RankPlace) -> float:
    """Gathered weights and the collectives' buffers that stand while layers run."""
    if strategy.shards == 1 or strategy.zero < 2:
        return 0.0
    inside, ends = parameters(model, strategy, place)
    layer, width = layer_parameters(model, strategy, place), number_bytes(strategy)
    unit = max(layer, ends)
    if strategy.zero == 2 and strategy.engine != "fsdp2":
        return 4 * layer  # its gradients, before they are scattered
    if strategy.engine == "fsdp2":
        kept = inside if strategy.zero == 2 or strategy.pp > 1 else 2 * layer
        return width * (kept + ends + layer) + (width + 4) * layer
    if strategy.engine == "deepspeed":
        live = min(inside + ends, _LIVE)
        return width * (live + min(_PREFETCH, inside) + min(_REDUCE, inside + ends))
    if strategy.engine == "megatron":
        return width * 2 * layer + 4 * layer
    return width * (2 * layer + unit) + 4 * layer


def host_bytes(model: Model, strategy: Strategy, place: RankPlace) -> float:
    """What a rank has in its node's memory."""
    p = sum(parameters(model, strategy, place))
    shards = strategy.shards if strategy.zero else 1
    return {
        "none": 0.0,
        "optimizer": 12 * p / shards,
        "all": 12 * p / shards + 2 * p / (strategy.shards if strategy.zero == 3 else 1),
    }[strategy.offload]


def logits(model: Model, strategy: Strategy, place: RankPlace) -> float:
    """Bytes at the loss: of every logit all its copies. tp divides the vocabulary, cp the sequence."""
    if not place.last:
        return 0.0
    here = strategy.micro_batch * model.logits / strategy.cp / strategy.tp
    return (
        ENGINES[strategy.engine].logit_bytes
        * here
        * (2 if strategy.precision == "fp32" and strategy.engine == "megatron" else 1)
    )
