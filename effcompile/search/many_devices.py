"""What is asked where a step is to be divided among devices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Literal, cast

from effcompile.core.errors import UsageError, clipped
from effcompile.ir.strategy import Strategy, StrategyFields, check_fields
from effcompile.machine.cluster import MOST_DEVICES, Cluster, parse_nodes

Devices = int | Literal["auto"] | Cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class ManyDevices:
    """How many devices, how they stand, what of the strategy is given, how large a step is.

    Attributes:
        devices: their number; "auto": the fewest that are enough. cluster: nodes and links, where they are
            given themselves.
        nodes: "8x8", 8 nodes of 8; None: whole nodes of the target's.
        strategy: the fields that are given; the others are free.
        global_batch: sequences of one step; batch_tokens: the same in tokens; neither: the example's batch on
            each device.

    Raises:
        UsageError: a value that is not allowed, or two that say the same.
    """

    devices: int | Literal["auto"]
    cluster: Cluster | None = None
    nodes: str | None = None
    strategy: StrategyFields = field(default_factory=StrategyFields)
    global_batch: int | None = None
    batch_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.devices != "auto" and (
            type(self.devices) is not int or not 1 <= self.devices <= MOST_DEVICES
        ):
            raise UsageError(
                f"devices = {clipped(repr(self.devices))} must be a whole number from 1 to "
                f"{MOST_DEVICES}, or auto."
            )
        if self.nodes is not None and self.devices == "auto":
            raise UsageError("devices = auto finds how many there are: leave nodes out.")
        if self.global_batch is not None and self.batch_tokens is not None:
            raise UsageError("global_batch and batch_tokens say the same: give one of them.")
        for name in ("global_batch", "batch_tokens"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or not 1 <= value <= 1 << 50):
                raise UsageError(f"{name} = {clipped(repr(value))} must be a whole number, at least 1.")
        check_fields(self.strategy)

    @classmethod
    def of(
        cls, devices: Devices, *, nodes: str | None = None, strategy: Strategy | StrategyFields | None = None,
        global_batch: int | None = None, batch_tokens: int | None = None,
    ) -> ManyDevices:  # fmt: skip
        """From an entry's arguments: a Cluster says how many devices there are and how they stand.

        Raises:
            UsageError: see the class.
        """
        given = _given(strategy)
        cluster = devices if isinstance(devices, Cluster) else None
        if cluster is not None and nodes is not None:
            raise UsageError("A Cluster says how its devices stand: leave nodes out.")
        count = cluster.devices if cluster is not None else cast("int | Literal['auto']", devices)
        return cls(
            devices=count, cluster=cluster, nodes=nodes, strategy=given, global_batch=global_batch,
            batch_tokens=batch_tokens
        )  # fmt: skip

    @property
    def per_node(self) -> int | None:
        """Devices of a node, where they are given."""
        if self.cluster is not None:
            return self.cluster.per_node
        return None if self.nodes is None else parse_nodes(self.nodes)[1]


def _given(strategy: Strategy | StrategyFields | None) -> StrategyFields:
    """The fields of a strategy that are given; of a whole one all that are not as they would be
    anyway empty.
    """
    if isinstance(strategy, Strategy):
        whole = asdict(strategy)
        return cast(
            "StrategyFields",
            {f.name: whole[f.name] for f in fields(strategy) if f.name != "cuts" or strategy.cuts},
        )
    if not isinstance(strategy, Mapping | None):
        raise UsageError(
            f"strategy = {clipped(repr(strategy))} is none. Give an effcompile.Strategy, or a dict of its "
            f"fields: {{'tp': 8}}."
        )
    return cast("StrategyFields", dict(strategy or {}))
