"""A model as the division of its step sees it: layers of a few kinds, an embedding before them and a loss
head behind, in plain numbers.

All figures are of one sequence on one device. A byte is *whole* where tensor parallelism alone leaves it on
every rank (the residual stream, norms' outputs), and *split* where it stands between a column- and a
row-parallel product.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from effcompile.core.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWork:
    """What is to be computed: floating-point operations of products and of attention, bytes that other
    operators move, kernels.
    """

    products: float = 0.0
    attention: float = 0.0
    moved: float = 0.0
    kernels: float = 0.0

    def __add__(self, other: LayerWork) -> LayerWork:
        return LayerWork(
            products=self.products + other.products,
            attention=self.attention + other.attention,
            moved=self.moved + other.moved,
            kernels=self.kernels + other.kernels,
        )

    def __mul__(self, times: float) -> LayerWork:
        return LayerWork(
            products=self.products * times,
            attention=self.attention * times,
            moved=self.moved * times,
            kernels=self.kernels * times,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Bytes:
    """Bytes on one device before tensor parallelism: see the module's docstring."""

    whole: int = 0
    split: int = 0

    @property
    def total(self) -> int:
        return self.whole + self.split

    def on_rank(self, tp: int, sp: bool) -> float:
        """Of one rank: sequence parallelism divides what tensor parallelism leaves whole (Korthikanti et al.
        2022, §4.2).
        """
        return self.total / tp if sp else self.whole + self.split / tp


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyOption:
    """One way to run a layer, from the block solver: what it keeps, its highest instants, what it computes
    again.
    """

    kept: Bytes
    forward: Bytes
    backward: Bytes
    again: LayerWork
    label: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """A kind of layer.

    Attributes:
        name: of one of them. parameters: of each.
        forward, backward: what is computed.
        options: least extra work first; the last keeps the least. `rules`: of the usual rules ("none", "op",
            "full"), the option.
        sums: sums over tp of one forward (after row-parallel products).
    """

    name: str
    parameters: int
    forward: LayerWork
    backward: LayerWork
    options: tuple[StrategyOption, ...]
    rules: Mapping[str, StrategyOption]
    sums: int = 2


@dataclass(frozen=True, kw_only=True)
class Model:
    """What is divided.

    Attributes:
        name: the model's class. layers: kinds. order: which kind each layer is, in forward order.
        embedding, head: parameters of the table and of the loss head; a tied head counts in both, and once in
            `parameters`.
        around: parameters of what stands beside the layers otherwise (a last norm).
        hidden, vocabulary, heads, key_heads, sequence: sizes. width: bytes of one number of the activations
            as captured.
        tied: whether the head is the embedding's table.
        causal: whether attention skips the keys behind, half of all pairs; its operations here are those that
            are left.
        largest: parameters of the largest linear of a layer.
    """

    name: str
    layers: tuple[Layer, ...]
    order: tuple[int, ...]
    embedding: int
    head: int
    around: int
    hidden: int
    vocabulary: int
    heads: int
    key_heads: int
    sequence: int
    width: int = 2
    tied: bool = False
    causal: bool = False
    largest: int = 0

    def __post_init__(self) -> None:
        if not self.order:
            raise UsageError(
                f"{self.name} has no repeated layers: there is nothing that a pipeline or ZeRO could "
                "divide block by block."
            )

    @cached_property
    def depth(self) -> int:
        """Layers."""
        return len(self.order)

    @cached_property
    def parameters(self) -> int:
        inside = sum(self.layers[kind].parameters for kind in self.order)
        return inside + self.embedding + self.around + (0 if self.tied else self.head)

    @cached_property
    def stream(self) -> int:
        """Bytes of the residual stream of one sequence."""
        return self.sequence * self.hidden * self.width

    @cached_property
    def flops(self) -> float:
        """Of one sequence, forward and backward with nothing computed again: what MFU counts (Chowdhery et
        al. 2022, appendix B).
        """
        inside = sum(self._layer_flops[kind] for kind in self.order)
        return inside + 3 * self.head_work.products

    @cached_property
    def _layer_flops(self) -> tuple[float, ...]:
        pairs = 2 if self.causal else 1  # published figures count all pairs
        return tuple(
            k.forward.products + k.backward.products + 3 * pairs * k.forward.attention for k in self.layers
        )

    @cached_property
    def head_work(self) -> LayerWork:
        """The forward of the loss head: one product; its backward is twice that."""
        return LayerWork(
            products=2.0 * self.sequence * self.hidden * self.vocabulary,
            moved=6.0 * self.sequence * self.vocabulary,
            kernels=4,
        )

    @property
    def logits(self) -> int:
        """Logits of one sequence."""
        return self.sequence * self.vocabulary
