"""Closed form of the seconds of a step: of one layer and micro-batch on one rank, and of what data
parallelism does not hide.

A layer takes, for a micro-batch of b sequences on tp × cp ranks,

    products / (peak(precision) · η · w / (w + w½)) + attention / (peak · η_a) + moved bytes / (bandwidth ·
    η_m) + kernels · launch

with w = hidden / tp: narrow products do not fill the machine (the factor is fitted, see engines.py).
Attention has a rate of its own.

Collectives are rings (Thakur et al. 2005; NCCL): gathering or scattering n bytes over g ranks moves n (g − 1)
/ g over each link, and takes g − 1 steps; a sum is a scatter and a gather. Tensor parallelism sums the
residual stream after each row-parallel product, and once for each in the backward (Shoeybi et al. 2019, arXiv
1909.08053); sequence parallelism scatters and gathers instead, the same bytes (Korthikanti et al. 2022,
§4.2.2). These are not hidden. ZeRO-3 gathers each layer before it runs, beside the layer before it; what
takes longer than that layer is exposed. Context parallelism passes keys and values round beside attention
(Liu et al. 2023, arXiv 2310.01889).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from effcompile.ir.strategy import Strategy
from effcompile.machine.cluster import Cluster, on_one_node
from effcompile.machine.target import Target
from effcompile.planner.parallel import bytes as held
from effcompile.planner.parallel.bytes import RankPlace
from effcompile.planner.parallel.engines import ENGINES
from effcompile.planner.parallel.model import Layer, LayerWork, Model

#: Bytes that an update reads and writes for each parameter: gradient, master, two moments in; master,
#: moments, the copy out.
_UPDATE_BYTES = 4 + 12 + 12 + 2
#: So much of a backward is there to hide gradients' sums; the first layer's have nothing beside them.
#: Assumed.
_LAST_OF_BACKWARD = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Seconds of one direction: computing, and summing over tp (or passing keys round) that nothing hides."""

    compute: float = 0.0
    tensor: float = 0.0

    @property
    def total(self) -> float:
        return self.compute + self.tensor

    def __add__(self, other: Times) -> Times:
        return Times(compute=self.compute + other.compute, tensor=self.tensor + other.tensor)


@dataclass(frozen=True, kw_only=True)
class Clock:
    """Prices what a strategy does with a model on a cluster."""

    model: Model
    strategy: Strategy
    cluster: Cluster
    target: Target

    @cached_property
    def _rate(self) -> tuple[float, float, float]:
        """FLOP/s of products, of attention; bytes/s of the rest."""
        engine, peaks, precision = (
            ENGINES[self.strategy.engine],
            self.target.peak_flops,
            self.strategy.precision,
        )
        width = self.model.hidden / self.strategy.tp
        narrow = "bf16" if precision in ("bf16", "fp8") else precision
        attention = peaks.get(narrow, peaks.get("fp32", 0.0)) * engine.attention
        products = peaks.get(precision, 0.0) * engine.products * width / (width + engine.half_width)
        return products, attention, self.target.memory_bandwidth * self.target.efficiency / engine.fused

    def seconds(self, work: LayerWork, whole: float = 0.0) -> float:
        """Of one micro-batch of this work of a sequence; `whole`: share of the moved bytes that tp leaves on
        every rank.
        """
        s, (products, attention, moved) = self.strategy, self._rate
        ranks = s.tp * s.cp
        left = 1 / s.tp if s.sp else whole + (1 - whole) / s.tp
        computed = (
            work.products / products + work.attention / attention
        ) / ranks + work.moved * left / s.cp / moved
        return s.micro_batch * computed + work.kernels * self.target.launch_seconds

    @cached_property
    def stream(self) -> float:
        """Bytes of the residual stream of one micro-batch where it stands whole over tp."""
        width = 4 if self.strategy.precision == "fp32" else 2
        return self.strategy.micro_batch * self.model.sequence * self.model.hidden * width / self.strategy.cp

    def ring(self, size: int, stride: int, nbytes: float) -> float:
        """Seconds to gather (or scatter) this many bytes over `size` ranks whose numbers differ
        by `stride`.
        """
        if size == 1:
            return 0.0
        local = on_one_node(stride, size, self.cluster.per_node)
        return nbytes * (size - 1) / size / self.cluster.bandwidth(local, size) + (
            size - 1
        ) * self.cluster.latency(local, size)

    def over_shards(self, nbytes: float) -> float:
        """The same over the ranks that hold the same parameters (dp × cp)."""
        return self.ring(self.strategy.shards, self.strategy.tp, nbytes)

    @cached_property
    def sum(self) -> float:
        """One sum of the residual stream over tp."""
        return 2 * self.ring(self.strategy.tp, 1, self.stream)

    @cached_property
    def hop(self) -> float:
        """Seconds to hand the residual stream to the next stage; tp ranks hand a part each (Narayanan et al.
        2021, §4.1).
        """
        s = self.strategy
        if s.pp == 1:
            return 0.0
        local = on_one_node(s.stride("pp"), s.pp, self.cluster.per_node)
        return self.stream / s.tp / self.cluster.bandwidth(local, s.pp) + self.cluster.latency(local, s.pp)

    def _round(self, layer: Layer, attention: float) -> float:
        """What passing keys and values round takes beyond the attention that it runs beside."""
        s = self.strategy
        if s.cp == 1:
            return 0.0
        keys = 2 * self.stream * self.model.key_heads / self.model.heads / s.tp * s.cp
        return max(0.0, self.ring(s.cp, s.tp, keys) - attention)

    def forward(self, layer: Layer) -> Times:
        """Of one layer and micro-batch."""
        attention = self.seconds(LayerWork(attention=layer.forward.attention))
        return Times(
            compute=self.seconds(layer.forward, whole(layer)),
            tensor=layer.sums * self.sum + self._round(layer, attention),
        )

    def backward(self, layer: Layer) -> Times:
        """The same, nothing computed again."""
        attention = self.seconds(LayerWork(attention=layer.backward.attention))
        return Times(
            compute=self.seconds(layer.backward, whole(layer)),
            tensor=layer.sums * self.sum + 2 * self._round(layer, attention),
        )

    def again(self, layer: Layer, work: LayerWork) -> float:
        """Computing this much of a layer again, with the sums that are among it."""
        share = work.products / layer.forward.products if layer.forward.products else 0.0
        return self.seconds(work, whole(layer)) + share * layer.sums * self.sum

    @cached_property
    def head(self) -> tuple[float, float]:
        """Forward and backward of the loss head."""
        forward = self.seconds(self.model.head_work)
        return forward, 2 * forward

    def gathering(self, layer: Layer) -> tuple[float, float, float]:
        """Exposed seconds of one layer's ZeRO in (forward, backward that gathers again, backward whose
        weights were kept).
        """
        s = self.strategy
        if s.zero < 2 or s.shards == 1:
            return 0.0, 0.0, 0.0
        weights = layer.parameters / s.tp
        gather = self.over_shards(held.number_bytes(s) * weights) if s.zero == 3 else 0.0
        scatter = self.over_shards(4 * weights)
        if s.zero == 2 and s.engine != "fsdp2":
            gather = 0.0
        forward, backward = self.forward(layer).total, self.backward(layer).total
        return max(0.0, gather - forward), max(0.0, gather + scatter - backward), max(0.0, scatter - backward)

    def exposed(self, place: RankPlace, backward: float) -> float:
        """Seconds of data parallelism at the end of a step that nothing hides.

        `backward`: of the rank's last micro-batch.
        """
        s, p = self.strategy, sum(held.parameters(self.model, self.strategy, place))
        if s.shards == 1 or (s.zero >= 2 and s.pp == 1 and s.engine != "deepspeed"):
            return 0.0
        scatter, gather = (
            self.over_shards(4 * p),
            self.over_shards(held.number_bytes(s) * p if s.zero else 4 * p),
        )
        if s.zero == 3:
            gather *= 2
        if not ENGINES[s.engine].overlaps:
            return scatter + gather
        return max(0.0, scatter - _LAST_OF_BACKWARD * backward) + max(0.0, gather - 0.5 * backward)

    def update(self, place: RankPlace) -> float:
        """The optimizer's step; where states stand on the host, gradients go there and weights come back, and
        its memory is the limit.
        """
        s, p = self.strategy, sum(held.parameters(self.model, self.strategy, place))
        mine = p / (s.shards if s.zero else 1)
        if s.offload == "none":
            return mine * _UPDATE_BYTES / (self.target.memory_bandwidth * self.target.efficiency)
        link = mine * 6 / self.target.link_bandwidth
        return link + mine * _UPDATE_BYTES * min(self.cluster.per_node, s.world) / self.target.host_bandwidth


def whole(layer: Layer) -> float:
    """The share of a layer's bytes that tensor parallelism leaves on every rank."""
    kept = layer.options[0].kept
    return kept.whole / kept.total if kept.total else 0.0
