"""Many devices and what joins them: nodes, the links inside them, the adapters between them.

The bandwidth of a group of ranks that stand on several nodes is that of the adapters of its ranks on one
node, and at most that of the links inside: a group of whole nodes gets all of a node's adapters, one that has
a single rank on each node gets that rank's share. A single figure for "between nodes" would be wrong by the
devices of a node for one of them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from effcompile.core.errors import UsageError, clipped
from effcompile.ir.strategy import Axis, Strategy

_NODES = re.compile(r"\s*(\d{1,7})\s*[x×]\s*(\d{1,7})\s*")
MOST_DEVICES = 1 << 20
#: Figures of links, the least and the most that they may be.
_ALLOWED: tuple[tuple[tuple[str, ...], float, float], ...] = (
    (("devices_per_node", "adapters_per_node"), 1, MOST_DEVICES),
    (("inside", "adapter"), 1, 1e24),
    (("inside_efficiency", "between_efficiency"), 1e-6, 1),
    (("inside_seconds", "between_seconds"), 0, 1),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """What joins the devices of a target: the `[cluster]` section of its file.

    Bytes per second in one direction.

    Attributes:
        devices_per_node: devices that the links inside join.
        inside: of one device to the others of its node.
        adapters_per_node: network adapters. adapter: of one of them.
        inside_efficiency, between_efficiency: share of these that collectives reach.
        inside_seconds, between_seconds: what one step of a collective takes at least.
        sources: where each figure was read.
    """

    devices_per_node: int = 8
    inside: float
    adapters_per_node: int = 8
    adapter: float
    inside_efficiency: float = 0.8
    between_efficiency: float = 0.8
    inside_seconds: float = 3e-6
    between_seconds: float = 8e-6
    sources: Mapping[str, str] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        for names, least, most in _ALLOWED:
            for name in names:
                if not least <= getattr(self, name) <= most:
                    raise UsageError(
                        f"{name} = {getattr(self, name)} of a cluster must be {least:g} to {most:g}."
                    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """So many nodes of so many devices each, and their links.

    Raises:
        UsageError: no node, no device, or more than there are anywhere.
    """

    nodes: int
    per_node: int
    links: Links

    def __post_init__(self) -> None:
        for name, count in (("nodes", self.nodes), ("per_node", self.per_node)):
            if type(count) is not int or not 1 <= count <= MOST_DEVICES:
                raise UsageError(
                    f"{name} = {clipped(repr(count))} must be a whole number from 1 to {MOST_DEVICES}."
                )

    @classmethod
    def of(cls, links: Links, devices: int, nodes: str | None = None) -> Cluster:
        """A cluster from the number of devices and, where it is given, how they stand: "8x8" is 8 nodes of 8.

        Raises:
            UsageError: not a number of devices; nodes that are not of that number; a last node that is not
                full.
        """
        if type(devices) is not int or not 1 <= devices <= MOST_DEVICES:
            raise UsageError(
                f"devices = {clipped(repr(devices))} must be a whole number from 1 to {MOST_DEVICES}, or "
                "auto."
            )
        if nodes is not None:
            count, each = parse_nodes(nodes)
            if count * each != devices:
                raise UsageError(
                    f"nodes = {nodes} are {count * each} devices, not {devices}. Leave one of the two out."
                )
            return cls(nodes=count, per_node=each, links=links)
        each = min(devices, links.devices_per_node)
        if devices % each:
            raise UsageError(
                f"{devices} devices are not whole nodes of {each}. Give a multiple of {each}, or say how "
                f"they stand: --nodes {devices}x1."
            )
        return cls(nodes=devices // each, per_node=each, links=links)

    @property
    def devices(self) -> int:
        return self.nodes * self.per_node

    def with_devices(self, devices: int) -> Cluster:
        """The same machines, of which others are used."""
        each = min(devices, self.per_node)
        return replace(self, nodes=max(1, devices // each), per_node=each)

    def on_one_node(self, strategy: Strategy, axis: Axis) -> int:
        """Ranks of one group along an axis that stand on the same node."""
        return on_one_node(strategy.stride(axis), strategy.size(axis), self.per_node)

    def bandwidth(self, local: int, size: int) -> float:
        """Bytes per second at which a ring of `size` ranks, `local` of them on each node, carries what each
        rank sends.
        """
        inside = self.links.inside * self.links.inside_efficiency
        if size <= local:
            return inside
        share = self.links.adapter * self.links.adapters_per_node / self.per_node
        return min(inside, share * local * self.links.between_efficiency)

    def latency(self, local: int, size: int) -> float:
        """Seconds that one step of a collective takes at least."""
        return self.links.inside_seconds if size <= local else self.links.between_seconds


def on_one_node(stride: int, size: int, per_node: int) -> int:
    """Of `size` ranks whose numbers differ by `stride`, those on one node of `per_node` ranks."""
    return max(1, min(size, per_node // stride))


def parse_nodes(text: str) -> tuple[int, int]:
    """(nodes, devices of each) from "8x8".

    Raises:
        UsageError: not of that form.
    """
    match = _NODES.fullmatch(text)
    if match is None or not int(match[1]) or not int(match[2]):
        raise UsageError(
            f"nodes = {clipped(repr(text))} is not a number of nodes and of devices on each. Write it "
            "like 8x8."
        )
    return int(match[1]), int(match[2])
