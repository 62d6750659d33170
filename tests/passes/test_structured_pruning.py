"""Whole neurons and heads: found in captured graphs, priced as smaller layers, cut, and equal to zeroing the
columns that read them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from form_names import names
from hypothesis import given, settings
from hypothesis import strategies as st
from pass_helpers import by_work, context, outputs, plan_with, split
from torch import nn

from effcompile.backends.torch import TorchEager
from effcompile.capture.inference import capture
from effcompile.compiler.apply import apply_passes
from effcompile.core.errors import LoweringError, UnknownNameError, UsageError
from effcompile.core.goal import Goal
from effcompile.estimate import sensitivity
from effcompile.ir.plan import Plan
from effcompile.ir.program import Program, shape_of
from effcompile.passes import load_passes, propose_all
from effcompile.passes.base import Choice, Declined
from effcompile.passes.channel_dependencies import _components
from effcompile.passes.prunable_groups import Structure, structures
from effcompile.passes.structure_cuts import worth
from effcompile.passes.structured_pruning import Shrink
from effcompile.passes.weight_saliency import SaliencyScores, output_gradients
from effcompile.report.reasons import words
from effcompile.sites.parts import linears

NEURONS, HEADS = "layers.0:neurons", "layers.0.attention:heads"


class Attention(nn.Module):
    """Grouped queries: 4 query heads of 8, 2 key heads; shapes are written out as constants."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv, self.out = nn.Linear(32, 32), nn.Linear(32, 32, bias=False), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        k, v = self.kv(x).split(16, dim=-1)
        q, k, v = (part.view(*x.shape[:2], -1, 8).transpose(1, 2) for part in (self.q(x), k, v))
        k, v = (part[:, :, None].expand(-1, 2, 2, -1, 8).reshape(x.shape[0], 4, -1, 8) for part in (k, v))
        found = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.out(found.transpose(1, 2).reshape(*x.shape[:2], 32))


class Layer(nn.Module):
    """An attention and a gated feed-forward with a bias of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.norm = Attention(), nn.LayerNorm(32)
        self.gate, self.up, self.down = nn.Linear(32, 64), nn.Linear(32, 64, bias=False), nn.Linear(64, 32)
        self.shift = nn.Parameter(torch.randn(64) / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm(x))
        h = self.norm(x)
        return x + self.down(torch.nn.functional.silu(self.gate(h)) * (self.up(h) + self.shift))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList([Layer()]), nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def program_of(made: nn.Module, *shape: int) -> Program:
    return capture(
        made.eval(), (torch.randn(*(shape or (3, 5, 32)), generator=torch.Generator().manual_seed(1)),)
    )


@pytest.fixture(scope="module")
def program() -> Program:
    torch.manual_seed(0)
    return program_of(Model())


def by_name(program: Program) -> dict[str, Structure]:
    return {structure.site: structure for structure in structures(program)}


def members(structure: Structure) -> tuple[list[str], list[str]]:
    return tuple(
        [site.site.rpartition(".")[2] for site, _ in group] for group in (structure.makes, structure.reads)
    )


def plan_of(options: Mapping[str, str]) -> Plan:
    made = plan_with(options)
    return replace(
        made,
        decisions=tuple(replace(d, kind=d.site.rpartition(":")[2].partition("#")[0]) for d in made.decisions),
    )


def zeroed(program: Program, structure: Structure, keep: torch.Tensor) -> list[torch.Tensor]:
    """The program's outputs with nothing read from some units."""
    saved = []
    with torch.no_grad():
        for site, units in structure.reads:
            weight = program.tensor(site.weight)
            assert weight is not None
            saved.append((weight, weight.clone()))
            (weight.T if site.transposed else weight)[:, ~keep[units]] = 0
        found = outputs(program)
        for weight, value in saved:
            weight.copy_(value)
    return found


# ---------------------------------------------------------------- what is found


def test_a_gated_feed_forward_and_grouped_heads_are_found(program: Program) -> None:
    found = by_name(program)
    assert set(found) == {NEURONS, HEADS} and not any(s.refused for s in found.values())
    assert (found[NEURONS].count, members(found[NEURONS])) == (64, (["gate", "up"], ["down"]))
    assert (found[HEADS].count, members(found[HEADS])) == (2, (["kv", "q"], ["out"]))
    (_, kv), (_, q) = found[HEADS].makes
    assert q.tolist() == [0] * 16 + [1] * 16 and kv.tolist() == ([0] * 8 + [1] * 8) * 2


@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_transformers_models_are_understood(name: str, request: pytest.FixtureRequest) -> None:
    found = structures(request.getfixturevalue(name))
    assert [(s.kind, s.count, s.refused) for s in found] == [
        ("heads", 4, None),
        ("neurons", 256 if name == "gpt2" else 128, None),
    ] * 2


def _variant(attention: nn.Module | None = None, **parts: Any) -> Program:
    torch.manual_seed(0)
    made = Model()
    if attention is not None:
        made.layers[0].attention = attention
    for name, part in parts.items():
        setattr(made.layers[0], name, part)
    return program_of(made)


class Returning(nn.Module):
    """Hidden values that leave the model, that come from elsewhere, or that are picked by their number."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.a, self.b, self.shift = (
            how,
            nn.Linear(32, 32),
            nn.Linear(32, 32),
            nn.Parameter(torch.randn(32)),
        )

    def forward(self, x: torch.Tensor) -> Any:
        h = torch.relu(self.a(x))
        if self.how == "returned":
            return self.b(h), h
        if self.how == "residual":
            return self.b(h + x)
        if self.how == "picked":
            return self.b(h) * h[..., 3:4]
        if self.how == "sorted":
            return self.b(h.sort(dim=-1).values) + h.sum()
        if self.how == "tied":
            return self.b(h) + self.a(x + 1)
        return self.b(h * self.shift) + self.shift  # shared


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("returned", "the model returns them"),
        ("tied", "a is tied"),
        ("shared", "differs by channel"),
    ],
)  # fmt: skip
def test_what_cannot_shrink_says_why(how: str, reason: str) -> None:
    program = program_of(Returning(how), 3, 5, 32)
    (structure,) = structures(program)
    assert reason in words(structure.refused)
    choices, declined = split(Shrink(neurons=(0.5,), sites=("a",)).propose(program, context()))
    assert not choices and [d.reason for d in declined] == [structure.refused]
    with pytest.raises(LoweringError, match="settings"):
        Shrink(neurons=(0.5,), sites=("a",)).apply(program, plan_of({structure.site: "-50%"}))


@pytest.mark.parametrize("how", ["residual", "picked", "sorted"])
def test_units_that_are_mixed_are_left_alone(how: str) -> None:
    assert not [s for s in structures(program_of(Returning(how), 3, 5, 32)) if not s.refused]


class Biased(Attention):
    """A bias per head, as ALiBi has."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            part.view(*x.shape[:2], 4, 8).transpose(1, 2)
            for part in (self.q(x), self.q(x + 1), self.q(x + 2))
        )
        bias = torch.arange(4.0)[:, None, None] * torch.ones(x.shape[1], x.shape[1])
        return self.out(nn.functional.scaled_dot_product_attention(q, k, v, bias).transpose(1, 2).flatten(2))


def test_a_bias_by_head_and_narrow_weights_are_refused() -> None:
    found = by_name(_variant(Biased()))
    assert found[HEADS].refused and not found[NEURONS].refused
    narrow = capture(Model().eval().bfloat16(), (torch.randn(2, 3, 32).bfloat16(),))
    assert all("bfloat16" in words(s.refused) for s in structures(narrow))


def test_a_chain_gives_no_linear_to_two_structures() -> None:
    program = program_of(
        nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 8)), 4, 32
    )
    first, second = structures(program)
    assert not first.refused and "already" in words(second.refused)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 19), st.integers(0, 19)), max_size=30))
def test_components_are_those_of_a_search(edges: list[tuple[int, int]]) -> None:
    near: dict[int, set[int]] = {i: {i} for i in range(20)}
    for _ in range(20):
        for a, b in edges:
            near[a] = near[b] = near[a] | near[b]
        near = {i: set().union(*(near[j] for j in found)) for i, found in near.items()}
    pairs = [(torch.tensor([a]), torch.tensor([b])) for a, b in edges]
    assert _components(20, pairs).tolist() == [min(near[i]) for i in range(20)]


# ---------------------------------------------------------------- what is cut


@pytest.mark.parametrize("name", ["program", "bert", "gpt2"])
def test_shrinking_equals_zeroing_what_reads_and_leaves_smaller_weights(
    name: str, request: pytest.FixtureRequest
) -> None:
    program: Program = request.getfixturevalue(name)
    shrink = Shrink(neurons=(0.5,), heads=(0.5,))
    for structure in structures(program):
        option = "-50%"
        after = shrink.apply(program, plan_of({structure.site: option}))
        scores = SaliencyScores(program, "magnitude", structure.members)
        keep = torch.zeros(structure.count, dtype=torch.bool)
        keep[worth(structure, scores).topk(structure.count // 2).indices] = True
        for found, expected in zip(outputs(after), zeroed(program, structure, keep), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        assert names(after.tags) == {structure.site: option}
        sizes = {site.site: (site.n, site.k) for site in structure.shrunk(structure.count // 2)}
        for old, new in zip(linears(program), linears(after), strict=True):
            assert (new.n, new.k) == sizes.get(old.site, (old.n, old.k)) and shape_of(new.node)[-1] == new.n
        saved = sum(
            4 * (a.n * a.k - b.n * b.k + (a.n - b.n) * (a.bias is not None))
            for a, b in zip(linears(program), linears(after), strict=True)
        )
        constants = 4 * 32 if name == "program" and structure.kind == "neurons" else 0
        assert program.weight_bytes() - after.weight_bytes() == saved + constants


def test_all_structures_at_once_run_at_other_sizes(program: Program) -> None:
    shrink = Shrink(neurons=(0.5,), heads=(0.5,))
    after = shrink.apply(program, plan_of({NEURONS: "-50%", HEADS: "-50%"}))
    lowered = TorchEager().lower(after, plan_with({}), [])
    for shape in ((3, 5, 32), (2, 9, 32)):
        x = torch.randn(shape)
        torch.testing.assert_close(lowered(x)[0], outputs(after, x)[0], rtol=1e-4, atol=1e-5)
    assert lowered.weight_bytes < program.weight_bytes()


def test_what_nobody_reads_goes_exactly_and_unasked(program: Program) -> None:
    torch.manual_seed(0)
    made = Model()
    with torch.no_grad():
        made.layers[0].down.weight[:, 40:] = 0
        made.layers[0].attention.out.weight[:, :16] = 0
    sparse = program_of(made)
    shrink = Shrink()
    assert not list(shrink.propose(program, context(goal=Goal()))) and not shrink.replaced_weights(sparse)
    choices, _ = split(shrink.propose(sparse, context(goal=Goal())))
    assert {site: [o.name for o in c.options] for site, c in choices.items()} == {
        NEURONS: ["all", "-37.5%", "-37.5% merged"], HEADS: ["all", "-50%", "-50% merged"],
    }  # fmt: skip
    after = shrink.apply(sparse, plan_of({NEURONS: "-37.5%", HEADS: "-50%"}))
    for found, expected in zip(outputs(after), outputs(sparse), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_given_masks_choose_the_units(program: Program, tmp_path: Path) -> None:
    masks = {NEURONS: torch.arange(64) % 2 == 0, HEADS: torch.tensor([False, True])}
    torch.save(masks, tmp_path / "masks.pt")
    after = Shrink(saliency="given", masks=str(tmp_path / "masks.pt")).apply(
        program, plan_of({NEURONS: "-50%"})
    )
    expected = zeroed(program, by_name(program)[NEURONS], masks[NEURONS])
    torch.testing.assert_close(outputs(after), expected, rtol=1e-4, atol=1e-5)
    for wrong, error in (
        ({NEURONS: torch.ones(3)}, UsageError),
        ({"nowhere:heads": torch.ones(2)}, UnknownNameError),
    ):
        torch.save(wrong, tmp_path / "wrong.pt")
        with pytest.raises(error, match=r"another model|nowhere"):
            list(Shrink(saliency="given", masks=str(tmp_path / "wrong.pt")).propose(program, context()))


# ---------------------------------------------------------------- what it is worth, and what it costs


@pytest.mark.parametrize("how", ["magnitude", "wanda", "snip"])
def test_measured_errors_are_those_of_the_smaller_model(program: Program, how: str) -> None:
    """Against running it; attention and norms behind are not linear, so loosely."""
    shrink = Shrink(neurons=(0.5,), saliency=how)
    (key,) = weights = shrink.replaced_weights(program)
    measured = sensitivity.measure(program, [(program.args, {})], {}, weights=weights, probes=64).errors[key]
    (before,), (after,) = (
        outputs(program),
        outputs(shrink.apply(program, plan_of({NEURONS: key[1].rpartition(" ")[2]}))),
    )
    assert measured == pytest.approx(float(((after - before).norm() / before.norm()) ** 2), rel=0.5)


def test_snip_is_the_first_order_change_of_the_outputs(program: Program) -> None:
    """Against a single entry moved, on a model linear in it: the head's gradient is its input, over the
    output's norm.
    """
    (head,) = [site for site in linears(program) if site.site == "head"]
    found = output_gradients(program, [head])["head"]
    assert found.shape == (8, 32) and bool((found > 0).all())
    with torch.no_grad():
        before = outputs(program)[0]
        weight = program.tensor(head.weight)
        assert weight is not None
        weight[2, 3] += 1e-2
        moved = (outputs(program)[0] - before).norm() / before.norm() / 1e-2
        weight[2, 3] -= 1e-2
    assert float(found[2, 3]) == pytest.approx(float(moved), rel=0.7)  # a root mean square of four draws
    assert torch.equal(SaliencyScores(program, "snip", [head]).of(head), found * weight.abs())


def test_wanda_and_snip_see_what_magnitude_does_not() -> None:
    """Two neurons of equal weights, one that never fires."""
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 8))
    with torch.no_grad():
        made[0].bias[:16] = -100.0
    program = program_of(made, 64, 32)
    (structure,) = structures(program)
    for how in ("wanda", "snip"):
        assert (
            worth(structure, SaliencyScores(program, how, structure.members)).topk(16).indices.min() >= 16
        ), how


def test_the_price_is_that_of_smaller_layers_for_each_form_of_the_members(program: Program) -> None:
    """Neurons under every precision that is offered, separate and merged; chosen together, the sum of all
    sites is the smaller model's.
    """
    passes = load_passes(
        [
            "shrink",
            "merge",
            "quantize.options=int8_dynamic",
            "quantize",
            "shrink.neurons=0.5",
            "shrink.heads=0.5",
        ]
    )
    choices, _ = propose_all(passes, program, context())
    found = {c.site: c for c in choices}
    assert [o.name for o in found[NEURONS].options] == [
        "all", *(f"-50%{form}" for form in ("", " merged", " int8_dynamic", " merged@int8_dynamic")),
    ]  # fmt: skip
    merge = next(c for c in choices if c.kind == "merge" and "gate" in str(c.options[1].requires))
    option = found[NEURONS].option("-50% merged@int8_dynamic")
    assert option.requires[merge.site] == ("merged@int8_dynamic",) and option.requires["layers.0.down"] == (
        "int8_dynamic",
    )
    m = 15
    dims = {"layers.0.gate": (m, 32, 64), "layers.0.up": (m, 32, 64), "layers.0.down": (m, 64, 32)}
    for name, precision, shapes in (
        ("-50%", "fp32", [(m, 32, 32), (m, 32, 32), (m, 32, 32)]),
        ("-50% int8_dynamic", "int8_dynamic", [(m, 32, 32), (m, 32, 32), (m, 32, 32)]),
    ):
        after = sum(by_work(_call(precision, shape)) for shape in shapes)
        spent = sum(found[site].option(precision).cost.seconds for site in dims)
        assert spent + found[NEURONS].option(name).cost.seconds == pytest.approx(after)
    smaller = Shrink(neurons=(0.5,)).apply(program, plan_of({NEURONS: "-50%"}))
    assert (
        program.weight_bytes() - smaller.weight_bytes() - 4 * 32
        == -found[NEURONS].option("-50%").cost.weight_bytes
    )


def _call(precision: str, shape: tuple[int, int, int]) -> Any:
    from effcompile.machine.target import KernelCall

    return KernelCall(f"linear/{precision}", shape)


def test_it_is_offered_only_under_an_error_budget_and_where_it_was_asked_for(program: Program) -> None:
    assert list(Shrink().propose(program, context())) == []
    found = list(Shrink(neurons=(0.5,), heads=(0.5,)).propose(program, context(goal=Goal())))
    assert {(d.kind, words(d.reason)) for d in found if isinstance(d, Declined)} == {
        ("neurons", "goal allows no error (max_error = 0)"),
        ("heads", "goal allows no error (max_error = 0)"),
    }  # fmt: skip
    _, declined = split(Shrink(neurons=(0.5,)).propose(program, context(sensitivity={})))
    assert [words(d.reason) for d in declined] == ["its error at the output was not measured"]
    _, declined = split(Shrink(neurons=(0.5,)).propose(program, context(lambda call: 1.0)))
    assert declined and all(words(d.reason).startswith("no gain here") for d in declined)
    _, declined = split(Shrink(heads=(0.5,)).propose(program_of(nn.Linear(32, 8), 4, 32), context()))
    assert [(d.site, d.kind) for d in declined] == [("", "heads")]


def test_several_shares_compete(program: Program) -> None:
    choices, _ = split(Shrink(neurons=(0.25, 0.5, 0.9)).propose(program, context()))
    assert {o.name.partition(" ")[0] for o in choices[NEURONS].options} == {"all", "-25%", "-50%", "-87.5%"}
    wide = program_of(nn.Sequential(nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 8))), 4, 32)
    (choice,) = (
        c for c in Shrink(neurons=(0.25, 0.52, 0.9)).propose(wide, context()) if isinstance(c, Choice)
    )
    assert {o.name.partition(" ")[0] for o in choice.options} == {"all", "-25%", "-50%", "-87.5%"}


def test_other_passes_act_on_what_is_left(bert: Program) -> None:
    """Merged, quantised and shrunk at once, as the solve can choose."""
    spec = ["shrink", "merge", "quantize", "shrink.neurons=0.5", "shrink.heads=0.5"]
    passes = load_passes(spec)
    choices, _ = propose_all(passes, bert, context())
    options: dict[str, str] = {}
    for choice in choices:
        wanted = {"heads": "-50% merged", "neurons": "-50%", "merge": "merged"}.get(
            choice.kind, choice.baseline
        )
        options[choice.site] = wanted
    for choice in choices:
        assert all(
            options[site] in allowed for site, allowed in choice.option(options[choice.site]).requires.items()
        )
    plan = plan_of(options)
    kinds = {c.site: c.kind for c in choices}
    plan = replace(plan, decisions=tuple(replace(d, kind=kinds[d.site]) for d in plan.decisions))
    after = apply_passes(bert, passes, plan)
    assert {site.n for site in linears(after) if "query_key_value" in site.site} == {3 * 32}
    alone = apply_passes(bert, [p for p in passes if p.name == "shrink"], plan)
    for found, expected in zip(outputs(after), outputs(alone), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (["shrink.neurons=1.0"], r"in \[0, 1\)"),
        (["shrink.heads=-0.5"], r"in \[0, 1\)"),
        (["shrink.neurons=half"], "list of numbers"),
        (["shrink.saliency=wnda"], "Did you mean 'wanda'"),
        (["shrink.masks=x.pt"], "saliency=given"),
        (["shrink.saliency=given"], "masks"),
    ],
)
def test_bad_settings_say_what_is_allowed(spec: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        load_passes(spec)


def test_unknown_sites_and_masks_are_named(program: Program, tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError, match="structure"):
        list(Shrink(neurons=(0.5,), sites=("nowhere.*",)).propose(program, context()))
    with pytest.raises(UsageError, match="There is no"):
        list(Shrink(saliency="given", masks=str(tmp_path / "none.pt")).propose(program, context()))
    with pytest.raises(LoweringError, match="which this model"):
        Shrink().apply(program, plan_of({NEURONS: "-50%"}))
