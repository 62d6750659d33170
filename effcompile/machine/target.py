"""What a machine can do, as data: peaks, bandwidths, sizes, and measured kernel laws.

A *kernel* is a name and integer dimensions, e.g. `linear/int8_dynamic (M, K, N)`. Passes price their options
by kernel and backends measure kernels: this is where the two meet without importing each other. `KERNELS`
lists every name with the meaning of its dimensions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from effcompile.core.cost import Provenance
from effcompile.ir.formats import INT8_DYNAMIC, LINEAR_FORMATS, TABLE_FORMATS, WeightFormat
from effcompile.machine.cluster import Links

Dims = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class KernelSpec:
    """The meaning of a kernel's dimensions, its FLOPs, the bytes it must at least move, and the format of its
    weight or table.
    """

    dims: str
    dtype: str
    flops: Callable[[Dims], float]
    bytes: Callable[[Dims], float]
    gain: str = ""  # what in `Target.gains` makes its arithmetic faster than the dense one; "": nothing
    format: WeightFormat | None = None
    elsewhere: str | None = None  # what has a kernel of ours in C++ on other devices; "": nothing


def _linear(held: WeightFormat) -> KernelSpec:
    """Integer products where both sides are integers; 16 bits where weights are floating and have them; else
    fp32.
    """
    whole = held.activation in ("dynamic int8", "static int8", "int8 rows", "int8 groups")
    words = "int13" if held.activation == "int13 rows" else "bf16" if held.bits == 16 else "fp32"
    dtype = "int8" if whole else words
    activation_bytes = 2.0 if dtype == "bf16" else 4.0

    def size(d: Dims) -> float:
        m, k, n = d[:3]
        return held.grouped_by(d[-1]).stored_bytes(n, k) + (m * k + m * n) * activation_bytes

    elsewhere = {"int8 rows": "", "int13 rows": "", "int8 groups": "triton"}.get(held.activation)
    dims = "M K N G" if held.group else "M K N"
    return KernelSpec(dims, dtype, lambda d: 2.0 * d[0] * d[1] * d[2], size, format=held, elsewhere=elsewhere)


def _lookup(held: WeightFormat) -> KernelSpec:
    """Rows read as they are stored, written in fp32."""
    width = 4 + held.bits // 8
    return KernelSpec(
        "rows cols",
        "fp32",
        lambda d: 2.0 * math.prod(d) * (held.bits < 32),
        lambda d: float(width * math.prod(d)),
        format=held,
    )


def _sparse_linear() -> KernelSpec:
    """A linear of Z kept blocks of B × B: only these are read and multiplied."""

    def size(d: Dims) -> float:
        m, k, n, kept, block = d
        return 4.0 * (kept * block**2 + m * k + m * n)

    return KernelSpec("M K N Z B", "fp32", lambda d: 2.0 * d[0] * d[3] * d[4] ** 2, size)


def _sparse_bytes() -> KernelSpec:
    """The same in 8 bits, activations too, with a scale per row of both."""

    def size(d: Dims) -> float:
        m, k, n, kept, block = d
        return kept * block**2 + 4.0 * (m * k + m * n)

    return KernelSpec("M K N Z B", "int8", lambda d: 2.0 * d[0] * d[3] * d[4] ** 2, size, elsewhere="")


def _two_of_four() -> KernelSpec:
    """The dense product's FLOPs and bytes: what torch's kernels save of the bytes they lose to padding few
    rows (pytorch #111339).
    """
    dense = _linear(LINEAR_FORMATS["bf16"])
    return KernelSpec(dense.dims, dense.dtype, dense.flops, dense.bytes, gain="2:4")


def _attention(dtype: str = "fp32", width: int = 4) -> KernelSpec:
    def flops(d: Dims) -> float:
        b, h, sq, sk, dh = d
        return 4.0 * b * h * sq * sk * dh

    def size(d: Dims) -> float:
        b, h, sq, sk, dh = d
        return float(width * b * h * dh * (2 * sq + 2 * sk))

    return KernelSpec("B H Sq Sk D", dtype, flops, size)


def _visited() -> KernelSpec:
    """Attention that visits V keys per query in the mean, and no others."""

    def flops(d: Dims) -> float:
        b, h, sq, _, dh, visible = d
        return 4.0 * b * h * sq * visible * dh

    return KernelSpec("B H Sq Sk D V", "fp32", flops, lambda d: 8.0 * d[0] * d[1] * d[4] * (d[2] + d[3]))


def _tiles() -> KernelSpec:
    """Attention on listed tiles of T × T that make V keys per query in the mean."""
    return KernelSpec(
        "B H Sq Sk D V T",
        "fp32",
        lambda d: 4.0 * d[0] * d[1] * d[2] * d[5] * d[4],
        lambda d: 8.0 * d[0] * d[1] * d[4] * (d[2] + d[3]),
    )


def _predictor() -> KernelSpec:
    """Scores of every P-th query with the V keys that it may see, for tiles of T × T; R: the method's own
    parameter.
    """
    return KernelSpec(
        "B H Sq Sk D V P T R",
        "fp32",
        lambda d: 2.0 * d[0] * d[1] * d[2] / d[6] * d[5] * d[4],
        lambda d: 4.0 * d[0] * d[1] * d[4] * (d[2] + d[3]),
    )


def _pointwise(dims: str, flops_per_element: float, reads_and_writes: int) -> KernelSpec:
    return KernelSpec(
        dims,
        "fp32",
        lambda d: flops_per_element * math.prod(d),
        lambda d: 4.0 * reads_and_writes * math.prod(d),
    )


#: Every kernel that a pass may ask the price of. One line per kernel.
KERNELS: dict[str, KernelSpec] = {
    **{f"linear/{family}": _linear(held) for family, held in LINEAR_FORMATS.items()},
    "linear/2:4": _two_of_four(),  # bf16 or fp16, two of every four weights of a row on sparse tensor cores
    "linear/sparse": _sparse_linear(),  # fp32, block-sparse weight with its pattern as constants
    "linear/sparse_int8": _sparse_bytes(),
    "product/int8": replace(_linear(INT8_DYNAMIC), format=None),  # of codes that are there: search/bound.py
    "matmul/fp32": KernelSpec(
        "B M K N",
        "fp32",
        lambda d: 2.0 * math.prod(d),
        lambda d: 4.0 * d[0] * (d[1] * d[2] + d[2] * d[3] + d[1] * d[3]),
    ),
    "attention/sdpa": _attention(),  # one kernel, heads split by explicit transposes around it
    "attention/sdpa_int8": _attention("int8"),  # q and k in 8 bits, by scales from calibration inputs
    "attention/sdpa_bf16": _attention("bf16"),  # both products of bf16, q, k, v and the result in fp32
    "attention/sdpa_int8_token": _attention("int8"),  # both products, by scales of rows, all else in fp32
    "attention/sdpa_fp32": _attention(),  # ours for a CPU
    "attention/packed": _attention(),  # one kernel that reads (B, S, H·D) and needs no transposes
    "attention/math": _attention(),  # matmul, softmax, matmul as separate kernels
    "attention/causal": _visited(),  # sdpa told to be causal: no mask is read
    "attention/causal_fp32": _visited(),  # ours for a CPU, told to be causal
    "attention/tiled": _visited(),  # ours, on the keys that each block of queries may see
    "attention/tiled_scores": _visited(),  # the same with a softcap, sinks or biases
    "attention/flex": _visited(),  # FlexAttention with the same blocks
    "attention/tiles": _tiles(),  # ours, on tiles that are listed head by head
    "predict/pooled": _predictor(),  # which tiles to list, see ops/tile_predictors.py
    "predict/sanger": _predictor(),
    "predict/elsa": _predictor(),
    "predict/dota": _predictor(),
    "predict/a3": _predictor(),
    "norm/layer": _pointwise("rows cols", 8, 2),
    "norm/rms": _pointwise("rows cols", 5, 2),
    "add_norm/split": _pointwise("rows cols", 9, 5),  # residual add, then LayerNorm
    "add_norm/fused": _pointwise("rows cols", 9, 4),  # the backend's SkipLayerNorm
    "rows/rms_norm": _pointwise("rows cols", 5, 2),  # ours: see effcompile.ops.rows
    "rows/add_rms_norm": _pointwise("rows cols", 6, 4),  # the same with the residual sum, which it returns
    "rows/swiglu": _pointwise("rows cols", 6, 3),
    "rows/rotary": _pointwise("rows cols", 4, 2),
    "gelu/erf": _pointwise("elements", 20, 2),
    "gelu/tanh": _pointwise("elements", 12, 2),
    **{f"embedding/{family}": _lookup(held) for family, held in TABLE_FORMATS.items()},
    "pointwise/fp32": _pointwise("elements", 1, 2),  # any other op or copy, per tensor read or written
    "softmax/fp32": _pointwise("rows cols", 8, 2),
}


@dataclass(frozen=True, slots=True, order=True)
class KernelCall:
    """One kernel at one shape."""

    kernel: str
    dims: Dims

    @property
    def spec(self) -> KernelSpec:
        return KERNELS[self.kernel]

    @property
    def format(self) -> WeightFormat | None:
        """Of the dense linear's weight, with the group that the dimensions say, or of the table; None for any
        other kernel.
        """
        held, of_linear = self.spec.format, self.kernel.startswith("linear/")
        return held.grouped_by(self.dims[-1]) if held is not None and of_linear else held

    @property
    def flops(self) -> float:
        return self.spec.flops(self.dims)

    @property
    def bytes(self) -> float:
        return self.spec.bytes(self.dims)

    def __str__(self) -> str:
        return f"{self.kernel} {'×'.join(map(str, self.dims))}"


def linear_call(held: WeightFormat, dims: Dims) -> KernelCall:
    """The kernel of a dense linear (M, K, N) with its weight in this format."""
    return KernelCall(f"linear/{held.family}", (*dims, held.group) if held.group else dims)


#: Kernels whose FLOPs `torch.utils.flop_counter.FlopCounterMode` counts too; all others are memory bound.
MATMULS = ("linear/", "matmul/", "attention/")


@dataclass(frozen=True, slots=True, kw_only=True)
class Law:
    """The measured times of one kernel on one backend.

    Between measured shapes, time is scaled from the nearest one (Euclidean distance of log dimensions) by the
    roofline work ratio, after taking the fixed overhead off: t ≈ overhead + (t₀ − overhead) · work / work₀.
    """

    points: tuple[tuple[Dims, float], ...]  # (dims, seconds)
    overhead: float = 0.0  # seconds per kernel launch, measured with an empty body

    def seconds(self, call: KernelCall) -> float | None:
        """Seconds at `call.dims`, or None when nothing was measured."""
        if not self.points:
            return None
        for dims, seconds in self.points:
            if dims == call.dims:
                return seconds
        dims, seconds = self.nearest(call)
        near = KernelCall(call.kernel, dims)
        return self.overhead + max(seconds - self.overhead, 0.0) * _work(call) / max(_work(near), 1.0)

    def reaches(self, call: KernelCall) -> bool:
        """Whether a measured shape is near enough to scale from: a few elements take the launch alone."""
        if not self.points:
            return False
        near = max(_work(KernelCall(call.kernel, self.nearest(call)[0])), 1.0)
        return 1 / _REACH <= max(_work(call), 1.0) / near <= _REACH

    def nearest(self, call: KernelCall) -> tuple[Dims, float]:
        """The measured shape that is nearest, and its seconds."""
        return min(self.points, key=lambda point: _log_distance(point[0], call.dims))


#: Times as much work, or as little, as a shape was measured at, that its time is still scaled to.
_REACH = 16.0


def _work(call: KernelCall) -> float:
    return call.flops or call.bytes


def _log_distance(a: Dims, b: Dims) -> float:
    return sum((math.log(max(x, 1)) - math.log(max(y, 1))) ** 2 for x, y in zip(a, b, strict=True))


#: Times one kernel on a backend of this machine: (backend, call) → seconds, or None if it has no such kernel.
Probe = Callable[[str, KernelCall], float | None]


#: Assumed where a target does not say: half of what one socket with 8 channels of DDR4-3200 (204.8 GB/s)
#: moves at the most.
HOST_BANDWIDTH = 100e9


@dataclass(frozen=True, kw_only=True)
class Target:
    """A machine. All rates in FLOP/s and bytes/s, sizes in bytes, times in seconds.

    Attributes:
        peak_flops: dense peak by dtype ("fp32", "tf32", "bf16", "fp16", "fp8", "int8", "int4").
        memory_bandwidth: device memory, read. `link_bandwidth`: device to host, one direction.
        efficiency: share of the peak that good kernels reach; scales the roofline.
        shares: family of kernels → the share that those reach, where it is another: "attention" and
            "attention_backward" (ours), "sdpa" and "sdpa_backward" (the stock ones), "int8" (linears).
        launch_seconds: fixed cost of one kernel.
        gains: form ("2:4") → what it gains over dense arithmetic of its dtype, as published; for kernels that
            arithmetic binds.
        host_bandwidth: memory bandwidth of the host that the device hangs on. `host_memory_bytes`: its size;
            None: unknown.
        watts: what it draws at load. hourly_price: dollars for an hour of it. None: not stated.
        library_bytes: what the vendor's products keep on the device for themselves, per thread that calls
            them; those with a bias on top.
        devices: the names by which torch knows a device that is this one.
        cluster: what joins several of them; None: nothing that is known.
        laws: backend → kernel → Law, measured (empty for machines that are not here).
        sources: figure name → where it was read.
        probe: measures what `laws` lacks, on this machine only. `failure`: what a probe that found no kernel
            raised. `peak`: a dtype's FLOP/s as it was reached since, for roofs alone.
    """

    name: str
    description: str
    device: str
    cores: int
    memory_bytes: int
    memory_bandwidth: float
    link_bandwidth: float
    peak_flops: Mapping[str, float]
    efficiency: float = 0.75
    shares: Mapping[str, float] = field(default_factory=dict)
    launch_seconds: float = 5e-6
    gains: Mapping[str, float] = field(default_factory=dict)
    host_bandwidth: float = HOST_BANDWIDTH
    host_memory_bytes: int | None = None
    watts: float | None = None
    hourly_price: float | None = None
    library_bytes: tuple[int, int] = (0, 0)
    devices: tuple[str, ...] = ()
    cluster: Links | None = None
    calibrated: str | None = None
    laws: Mapping[str, Mapping[str, Law]] = field(default_factory=dict)
    sources: Mapping[str, str] = field(default_factory=dict)
    probe: Probe | None = field(default=None, repr=False, compare=False)
    failure: Callable[[str, KernelCall], str | None] | None = field(default=None, repr=False, compare=False)
    peak: Callable[[str], float] | None = field(default=None, repr=False, compare=False)

    def price(self, backend: str, call: KernelCall) -> tuple[float, Provenance] | None:
        """Seconds of one kernel on one backend and where they come from; None where there is no such kernel.

        Measured laws first, then the probe, then (for machines that are not here) the roofline
        max(FLOPs / peak, bytes / bandwidth) + launch (Williams et al. 2009).
        """
        law = self.laws.get(backend, {}).get(call.kernel)
        if law is not None and any(dims == call.dims for dims, _ in law.points):
            return law.seconds(call) or 0.0, Provenance.MEASURED
        if self.probe is not None:
            probed = self.probe(backend, call)
            return None if probed is None else (probed, Provenance.MEASURED)
        if law is not None and (seconds := law.seconds(call)) is not None:
            return seconds, Provenance.MEASURED
        if self.laws:  # calibrated, but this backend never ran this kernel
            return None
        return self.roofline(call, backend)

    def roofline(self, call: KernelCall, backend: str = "") -> tuple[float, Provenance] | None:
        """The modelled time from peaks; None when the target has no arithmetic of that dtype or form."""
        spec = call.spec
        peak, gain = self.peak_flops.get(spec.dtype), self.gains.get(spec.gain) if spec.gain else 1.0
        here = self.device == "cpu" or spec.elsewhere in (None, backend or None)
        if peak is None or gain is None or not here:
            return None
        seconds = max(
            call.flops / (peak * gain * self.share(_family(call))),
            call.bytes / (self.memory_bandwidth * self.efficiency),
        )
        return seconds + self.launch_seconds, Provenance.PUBLISHED if spec.gain else Provenance.MODELLED

    def share(self, family: str) -> float:
        """Of the peak, that kernels of a family reach; of any that has no figure of its own, `efficiency`."""
        return self.shares.get(family, self.efficiency)

    def roof(self, call: KernelCall) -> float:
        """Seconds of a product's arithmetic at the peak of its dtype: nothing runs it faster. 0 for what is
        none, or of an unknown peak.
        """
        if not call.kernel.startswith(MATMULS):
            return 0.0
        spec = call.spec
        peak, gain = (
            self.peak_flops.get(spec.dtype, 0.0),
            self.gains.get(spec.gain, 1.0) if spec.gain else 1.0,
        )
        peak = max(peak, 0.0 if self.peak is None else self.peak(spec.dtype))
        return call.flops / (peak * gain) if peak else 0.0

    def describe(self) -> str:
        """One line for the report's head."""
        from_when = (
            f"calibrated {self.calibrated}"
            if self.calibrated
            else "not calibrated: modelled from its data sheet"
        )
        return f"{self.description} ({from_when})"


def _family(call: KernelCall) -> str:
    """As `Target.shares` names it; "" for all others."""
    if call.kernel.startswith("attention/"):
        return "attention" if call.kernel.startswith("attention/til") else "sdpa"
    return call.spec.dtype if call.kernel.startswith("linear/") else ""


def merge_points(points: Iterable[tuple[Dims, float]]) -> tuple[tuple[Dims, float], ...]:
    """Points with one entry per shape, the last measured kept, in a stable order."""
    return tuple(sorted(dict(points).items()))
