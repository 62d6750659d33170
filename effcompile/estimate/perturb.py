"""What an option changes at one site: δ(x) = f_q(x) − f(x) on recorded inputs, with the backend's rounding emulated."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.nn import functional as F  # noqa: N812 - its customary name

from effcompile.estimate import fake_quant
from effcompile.ir.program import Program
from effcompile.sites.parts import LinearSite, attentions, embeddings, gelus, linears, merges

#: int8_dynamic with the weight scale that a merge with its neighbours would impose.
MERGED = "int8_dynamic@merged"


#: Makes a weight (N, K).
Weight = Callable[[], torch.Tensor]
#: (site, option) → the weight that a linear has under an option that changes nothing else.
Weights = Mapping[tuple[str, str], Weight]


@dataclass(slots=True, kw_only=True, eq=False)
class Site:
    """A place and what is needed to compute δ there. `weight`: (N, K) for linears, the table for embeddings."""

    name: str
    kind: str
    node: fx.Node
    x: fx.Node | None
    weight: torch.Tensor | None = None
    bias: fx.Node | None = None
    options: tuple[str, ...] = ()
    shared_peak: float | None = None  # the largest |w| over a merge that this linear belongs to
    replaced: Mapping[str, Weight] = field(default_factory=dict)  # options that are another weight (N, K) in the place of this
    cache: dict[str, torch.Tensor] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class Record:
    """One input's forward pass: tensors at the sites, and the gradients drawn there (one list per output group)."""

    inputs: list[Any]
    outputs: list[torch.Tensor]
    results: dict[fx.Node, Any]
    entering: dict[fx.Node, Any]
    biases: dict[fx.Node, Any]
    batch: int
    separate: set[fx.Node] = field(default_factory=set)  # sites where samples of the batch do not influence each other
    gradients: list[dict[fx.Node, list[torch.Tensor]]] = field(default_factory=list)


def find_sites(program: Program, options: Mapping[str, tuple[str, ...]], group_size: int, weights: Weights | None = None) -> list[Site]:
    """The sites with the options that fit them, and those that are another weight."""
    found = []
    found_linears = linears(program)
    peaks = _shared_peaks(program, found_linears) if "int8_dynamic" in options.get("linear", ()) else {}
    for s in found_linears:
        names = tuple(o for o in options.get("linear", ()) if o != "fp32" and (o not in ("w8", "w4") or s.k % group_size == 0))
        if s.site in peaks:
            names = (*names, MERGED)
        replaced = {option: weight for (site, option), weight in (weights or {}).items() if site == s.site}
        found.append(Site(
            name=s.site, kind="linear", node=s.node, x=s.x, weight=_weight(program, s), bias=s.bias, options=(*names, *replaced),
            shared_peak=peaks.get(s.site), replaced=replaced,
        ))  # fmt: skip
    taken = {site.name for site in found}
    for e in embeddings(program):
        names = tuple(o for o in options.get("embedding", ()) if o != "fp32")
        if e.site not in taken:
            found.append(Site(name=e.site, kind="embedding", node=e.node, x=None, weight=program.tensor(e.weight), options=names))
    for g in gelus(program):
        x = g.node.args[0]
        names = tuple(o for o in options.get("gelu", ()) if o != "erf")
        found.append(Site(name=g.site, kind="gelu", node=g.node, x=x if isinstance(x, fx.Node) else None, options=names))
    for a in attentions(program):
        names = tuple(options.get("attention", ()))
        heads = [value for value in a.node.args[:2] if isinstance(value, fx.Node)]  # q and k: two places of one site, whose errors add
        found += [Site(name=a.site, kind="attention", node=value, x=None, options=names) for value in heads]
    return [site for site in found if site.options]


def _weight(program: Program, site: LinearSite) -> torch.Tensor:
    value = program.tensor(site.weight)
    assert value is not None
    return value.detach().T if site.transposed else value.detach()


def _shared_peaks(program: Program, sites: list[LinearSite]) -> dict[str, float]:
    """Largest |w| over each group of mergeable linears, for members that do not have it themselves."""
    peaks = {}
    for merge in merges(program, sites):
        own = {m.site: fake_quant.peak_of(_weight(program, m)) for m in merge.members}
        peaks.update({site: max(own.values()) for site, peak in own.items() if peak < max(own.values())})
    return peaks


@torch.no_grad()
def delta_of(site: Site, option: str, record: Record, group_size: int, limits: fake_quant.Range | None) -> torch.Tensor:
    """What the option adds to the site's result on this input."""
    result = record.results[site.node].detach()
    if site.kind == "embedding":
        assert site.weight is not None
        return fake_quant.uint8(result, fake_quant.range_of(site.weight.detach())) - result
    if site.kind == "attention":
        return fake_quant.uint8(result) - result
    x = record.entering[site.node]
    if site.kind == "gelu":
        return F.gelu(x, approximate="tanh") - result
    moved = F.linear(_activation(x, option, group_size, limits), _quantised(site, option, group_size))
    if site.bias is not None:
        moved += record.biases[site.node]
    return (fake_quant.bf16(moved) if option == "bf16" else moved).sub_(result)


def _activation(x: torch.Tensor, option: str, group_size: int, limits: fake_quant.Range | None) -> torch.Tensor:
    if option == "bf16":
        return fake_quant.bf16(x)
    if option in ("w8", "w4"):
        return fake_quant.block_int8(x, group_size)
    return fake_quant.uint8(x, limits) if option.startswith("int8") else x


def _quantised(site: Site, option: str, group_size: int) -> torch.Tensor:
    """The weight as the option stores it; int8_channel and int8_static share theirs."""
    key = "int8_channel" if option == "int8_static" else option
    w = site.weight
    assert w is not None
    if key not in site.cache:
        made: dict[str, Callable[[], torch.Tensor]] = {
            "bf16": lambda: fake_quant.bf16(w),
            "int8_dynamic": lambda: fake_quant.per_tensor(w),
            MERGED: lambda: fake_quant.per_tensor(w, site.shared_peak),
            "int8_channel": lambda: fake_quant.per_channel(w),
            "w8": lambda: fake_quant.grouped(w, 8, group_size),
            "w4": lambda: fake_quant.grouped(w, 4, group_size),
            **site.replaced,
        }
        site.cache.clear()  # one copy at a time: tables of a vocabulary are large
        site.cache[key] = made[key]()
    return site.cache[key]


def static_range(site: Site, records: list[Record]) -> fake_quant.Range:
    """Range of the activations that enter the site over all calibration inputs."""
    ranges = [fake_quant.range_of(r.entering[site.node]) for r in records]
    return min(low for low, _ in ranges), max(high for _, high in ranges)
