"""What an option changes at one site: δ(x) = f_q(x) − f(x) on recorded inputs, with the backend's rounding
emulated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.nn import functional as F  # noqa: N812 - its customary name

from effcompile.estimate import fake_quant
from effcompile.estimate.codings import by_value, parts_of, some_rows
from effcompile.ir.formats import INT8_CHANNEL, INT8_DYNAMIC, INT8_TOKEN, Form, WeightFormat
from effcompile.ir.program import Program
from effcompile.ops.byte_codings import Coding
from effcompile.sites.parts import LinearSite, attentions, embeddings, gelus, linears, merges, weight_of

#: Kinds of sites whose result follows from what enters them alone: under an option theirs takes its place
#: (`result_of`).
REPLACED = ("linear", "gelu")

#: int8_dynamic with the weight scale that a merge with its neighbours would impose.
MERGED = Form(word="merged", weights=INT8_DYNAMIC)


#: Makes a weight (N, K).
Weight = Callable[[], torch.Tensor]
#: (site, option) → the weight that a linear has under an option that changes nothing else.
Weights = Mapping[tuple[str, str], Weight]


@dataclass(frozen=True, slots=True)
class Coded:
    """A weight (N, K) in the place of the given one, in bytes as the rows that it meets are."""

    weight: Weight

    def __call__(self) -> torch.Tensor:
        return fake_quant.weight(self.weight(), INT8_TOKEN)


@dataclass(slots=True, kw_only=True, eq=False)
class Site:
    """A place and what is needed to compute δ there.

    `weight`: (N, K) for linears, the table for embeddings.
    """

    name: str
    kind: str
    node: fx.Node
    x: fx.Node | None
    weight: torch.Tensor | None = None
    bias: fx.Node | None = None
    options: tuple[Form, ...] = ()
    rounds: bool = True  # products of bf16 are rounded, as torch's are; else they come out in fp32
    shared_peak: float | None = None  # the largest |w| over a merge that this linear belongs to
    coding: Coding | None = None  # how it has x, where it is in bytes, and what its bias (N) has more then
    correction: torch.Tensor | float = 0.0
    # options that are another weight (N, K) in the place of this
    replaced: Mapping[Form, Weight] = field(default_factory=dict)
    cache: dict[Form, torch.Tensor] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class ErrorRecord:
    """One input's forward pass: tensors at the sites, and the gradients drawn there (one list per output
    group).
    """

    inputs: list[Any]
    outputs: list[torch.Tensor]
    results: dict[fx.Node, Any]
    entering: dict[fx.Node, Any]
    biases: dict[fx.Node, Any]
    batch: int
    # what entered the last site, as each way to round it gives it: neighbours read the same (`_entering`)
    rounded: dict[Any, Any] = field(default_factory=dict)
    # sites where samples of the batch do not influence each other
    separate: set[fx.Node] = field(default_factory=set)
    gradients: list[dict[fx.Node, list[torch.Tensor]]] = field(default_factory=list)


def find_sites(
    program: Program,
    options: Mapping[str, tuple[Form, ...]],
    weights: Weights | None = None,
    rounds: bool = True,
) -> list[Site]:
    """The sites with the options that fit them, and those that are another weight."""
    found = []
    found_linears = linears(program)
    peaks = (
        _shared_peaks(program, found_linears)
        if Form(weights=INT8_DYNAMIC) in options.get("linear", ())
        else {}
    )
    for s in found_linears:
        forms = tuple(
            f for f in options.get("linear", ()) if f.weights is not None and not s.k % (f.weights.group or 1)
        )
        if s.site in peaks:
            forms = (*forms, MERGED)
        replaced = {
            Form(word=option): weight for (site, option), weight in (weights or {}).items() if site == s.site
        }
        found.append(Site(
            name=s.site, kind="linear", node=s.node, x=s.x, weight=weight_of(program, s), bias=s.bias,
            options=(*forms, *replaced), shared_peak=peaks.get(s.site), replaced=replaced, rounds=rounds,
        ))  # fmt: skip
    taken = {site.name for site in found}
    tables, tanh, heads = (tuple(options.get(kind, ())) for kind in ("embedding", "gelu", "attention"))
    found += [
        Site(
            name=e.site,
            kind="embedding",
            node=e.node,
            x=None,
            weight=program.tensor(e.weight),
            options=tables,
        )
        for e in embeddings(program)
        if e.site not in taken
    ]
    for g in gelus(program):
        x = g.node.args[0]
        found.append(
            Site(name=g.site, kind="gelu", node=g.node, x=x if isinstance(x, fx.Node) else None, options=tanh)
        )
    for a in attentions(program):
        found += _of_attention(a.site, a.node, heads)
    return [site for site in found if site.options]


def _of_attention(name: str, node: fx.Node, forms: tuple[Form, ...]) -> Iterator[Site]:
    """Places of one site, whose errors add: q and k; where both products are narrower also v, twice, since
    weights that are rounded by as much each move the result as rounded values do.
    """
    q, k, v = node.args[:3]
    for form in forms:
        for value in (q, k) if form.word == "sdpa_int8" else (q, k, v, v):
            if isinstance(value, fx.Node):
                yield Site(name=name, kind="attention", node=value, x=None, options=(form,))


def _shared_peaks(program: Program, sites: list[LinearSite]) -> dict[str, float]:
    """Largest |w| over each group of mergeable linears, for members that do not have it themselves."""
    peaks = {}
    for merge in merges(program, sites):
        own = {m.site: fake_quant.peak_of(weight_of(program, m)) for m in merge.members}
        peaks.update({site: max(own.values()) for site, peak in own.items() if peak < max(own.values())})
    return peaks


def is_static(option: Form) -> bool:
    """Whether what enters a linear is rounded within a range that is fixed."""
    return option.weights is not None and option.weights.activation == "static int8"


#: Form of an attention → how what it multiplies is rounded.
_HEADS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sdpa_bf16": fake_quant.bf16,
    "sdpa_int8": fake_quant.uint8,
    "sdpa_int8_token": fake_quant.rows,
}


@torch.no_grad()
def delta_of(site: Site, option: Form, record: ErrorRecord, limits: fake_quant.Range | None) -> torch.Tensor:
    """What the option adds to the site's result on this input."""
    result = record.results[site.node].detach()
    if site.kind in REPLACED:
        bias = None if site.bias is None else record.biases[site.node]
        return result_of(site, option, record.entering[site.node], bias, limits, record.rounded).sub_(result)
    if site.kind == "embedding":
        assert site.weight is not None
        assert option.weights is not None
        return (
            fake_quant.table_rows(result, option.weights, fake_quant.range_of(site.weight.detach())) - result
        )
    return _HEADS[option.word](result) - result


@torch.no_grad()
def result_of(
    site: Site,
    option: Form,
    x: torch.Tensor,
    bias: torch.Tensor | None,
    limits: fake_quant.Range | None,
    known: dict[Any, Any] | None = None,
) -> torch.Tensor:
    """What a linear or a GELU gives under the option, of what enters it. `known`: see `_entering`."""
    if site.kind == "gelu":
        return F.gelu(x, approximate="tanh")
    held = INT8_TOKEN if isinstance(site.replaced.get(option), Coded) else option.weights
    coding = site.coding if option.weights == INT8_TOKEN else None
    entering = x if held is None else _entering(x, held, limits, {} if known is None else known, coding)
    moved = F.linear(entering, _stored(site, option))
    if coding is not None:
        moved.add_(site.correction)
    if site.rounds and held is not None and held.activation == "bf16":
        # the product is rounded before the bias is added, in fp32
        moved = fake_quant.bf16(moved)
    return moved if bias is None else moved.add_(bias)


def _entering(
    x: torch.Tensor,
    held: WeightFormat,
    limits: fake_quant.Range | None,
    known: dict[Any, Any],
    coding: Coding | None = None,
) -> torch.Tensor:
    """What the format multiplies of x, scales of columns taken off again. `known` holds what was rounded of
    the last x: formats of which only the weights differ, and linears that read one value, share it.
    """
    of = (x.data_ptr(), x.shape, x.stride())
    if known.get("of") != of:
        known.clear()
        known["of"], known["held"] = of, x  # held, so that no other tensor takes its place in memory
    key = (held.activation.replace("blocks", "groups"), held.group, limits, id(coding))
    if key not in known:
        if coding is None or coding.columns is None:
            known[key] = fake_quant.activation(x, held, limits)
        else:
            known[key] = fake_quant.lowered_rows(coding.entering(x)).div_(coding.columns)
    return known[key]


def _stored(site: Site, option: Form) -> torch.Tensor:
    """The weight as the option stores it; the formats of 8 bits with a scale per channel share theirs."""
    held = option.weights
    coding = site.coding if held == INT8_TOKEN else None
    shared = held is not None and held.bits == 8 and held.scale == "channel" and not held.block
    shared = shared and coding is None
    key = Form(weights=INT8_CHANNEL) if shared else option
    assert site.weight is not None
    if key not in site.cache:
        site.cache.clear()  # one copy at a time: tables of a vocabulary are large
        if key in site.replaced:
            site.cache[key] = site.replaced[key]()
        else:
            assert key.weights is not None
            weight = site.weight if coding is None else coding.weight(site.weight)
            made = fake_quant.weight(weight, key.weights, site.shared_peak if key == MERGED else None)
            if coding is not None:
                site.correction = coding.correction(site.weight, made)
                made = made if coding.columns is None else made.mul_(coding.columns)
            site.cache[key] = made
    return site.cache[key]


def choose_codings(sites: list[Site], records: list[ErrorRecord]) -> None:
    """Choose how linears that may be in bytes have x, by what it is on these inputs."""
    coded = {s.name: s for s in sites if any(form.weights == INT8_TOKEN for form in s.options)}
    values = {name: s.x for name, s in coded.items() if s.x is not None}
    rows = {
        value: some_rows([record.entering[coded[name].node] for record in records])
        for name, value in values.items()
    }
    weights = {name: parts_of(s.node, s.weight) for name, s in coded.items() if s.weight is not None}
    for name, coding in by_value(values, weights, rows).items():
        coded[name].coding = coding


def static_range(site: Site, records: list[ErrorRecord]) -> fake_quant.Range:
    """Range of the activations that enter the site over all calibration inputs."""
    ranges = [fake_quant.range_of(r.entering[site.node]) for r in records]
    return min(low for low, _ in ranges), max(high for _, high in ranges)
