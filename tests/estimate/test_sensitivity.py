"""Predicted output errors against those of really quantised runs."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from form_names import form
from torch import fx, nn
from torch.nn import functional as F  # noqa: N812

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from effcompile.backends.torch.edit_attentions import edit_attentions
from effcompile.capture.inference import capture
from effcompile.estimate import fake_quant
from effcompile.estimate.sensitivity import Sensitivity, describe_generated, generate_inputs, measure
from effcompile.ir.program import Program
from effcompile.sites.parts import attentions, embeddings, gelus, linears, merges

OPTIONS = {
    "linear": ("bf16", "int8_dynamic", "int8_channel", "w8", "w8_channel", "w4"),
    "embedding": ("int8", "int8_rows", "int8_row_groups"),
    "gelu": ("tanh",),
}
FORMS = {kind: tuple(map(form, names)) for kind, names in OPTIONS.items()}
WEIGHTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "bf16": fake_quant.bf16,
    "int8_dynamic": fake_quant.per_tensor,
    "int8_channel": fake_quant.per_channel,
    "w8": lambda w: fake_quant.grouped(w, 8, 32),
    "w8_channel": fake_quant.per_channel,
    "w4": lambda w: fake_quant.grouped(w, 4, 32),
}


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Tiny products are slower on two threads of a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Quantised(fx.Interpreter):
    """Runs a program with chosen linears really quantised: every later site sees the moved activations."""

    def __init__(self, program: Program, chosen: dict[str, str]) -> None:
        super().__init__(program.module)
        self.sites = {s.node: (s, chosen[s.site]) for s in linears(program) if s.site in chosen}

    def run_node(self, n: fx.Node) -> Any:
        if n not in self.sites:
            return super().run_node(n)
        site, option = self.sites[n]
        x, w = self.env[site.x], self.env[site.weight]
        w = WEIGHTS[option](w.T.contiguous() if site.transposed else w)
        if option.startswith("int8"):
            x = fake_quant.uint8(x)
        elif option in ("w8", "w4"):
            x = fake_quant.block_int8(x, 32)
        else:
            x = fake_quant.bf16(x)
        y = F.linear(x, w)
        y = fake_quant.bf16(y) if option in ("bf16", "w8_channel") else y
        return y + self.env[site.bias] if site.bias is not None else y


def true_error(program: Program, inputs: list[Any], chosen: dict[str, str]) -> float:
    """Squared relative error, the largest over the outputs."""
    sums: dict[int, list[float]] = {}
    for args, kwargs in inputs:
        flat = torch.utils._pytree.tree_leaves((args, kwargs))
        with torch.no_grad():
            pair = [Quantised(program, c).run(*flat, enable_io_processing=False) for c in ({}, chosen)]
        for o, (y, z) in enumerate(zip(*map(torch.utils._pytree.tree_leaves, pair), strict=True)):
            entry = sums.setdefault(o, [0.0, 0.0])
            entry[0] += float((z - y).square().sum())
            entry[1] += float(y.square().sum())
    return max(a / b for a, b in sums.values())


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *[m for _ in range(3) for m in (nn.Linear(64, 64), nn.GELU())], nn.Linear(64, 10)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def tiny(name: str, batch: int = 2) -> Program:
    from transformers import BertConfig, BertModel, GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    if name == "mlp":
        return capture(Mlp().eval(), (torch.randn(8 * batch, 64),))
    bert = BertConfig(
        num_hidden_layers=2, hidden_size=64, intermediate_size=128, num_attention_heads=4, vocab_size=100
    )
    gpt2 = GPT2Config(
        n_layer=2, n_embd=64, n_head=4, vocab_size=100, use_cache=False, bos_token_id=0, eos_token_id=0
    )
    model = BertModel(bert) if name == "bert" else GPT2LMHeadModel(gpt2)
    text = {
        "input_ids": torch.randint(0, 100, (batch, 16)),
        "attention_mask": torch.ones(batch, 16, dtype=torch.long),
    }
    return capture(model.eval(), (), text)


@pytest.fixture(scope="module", params=["mlp", "bert", "gpt2"])
def measured(request: pytest.FixtureRequest, one_thread: None) -> tuple[Program, list[Any], Sensitivity]:
    program = tiny(request.param)
    inputs = generate_inputs(program)
    return program, inputs, measure(program, inputs, FORMS, budget_seconds=600)


def test_single_sites_are_within_a_factor_of_three(measured: tuple[Program, list[Any], Sensitivity]) -> None:
    program, inputs, found = measured
    for site in linears(program):
        for option in ("bf16", "int8_dynamic", "w4"):
            true = true_error(program, inputs, {site.site: option})
            assert true / 3 < found.errors[site.site, option] < 3 * true, (site.site, option)


def test_sites_add_up_to_the_error_of_all_together(measured: tuple[Program, list[Any], Sensitivity]) -> None:
    program, inputs, found = measured
    for option in OPTIONS["linear"]:
        true = true_error(program, inputs, {s.site: option for s in linears(program)})
        assert true / 3 < sum(found.errors[s.site, option] for s in linears(program)) < 3 * true, option


def test_every_site_and_option_has_a_finite_error(measured: tuple[Program, list[Any], Sensitivity]) -> None:
    program, _, found = measured
    wanted = {(s.site, o) for s in linears(program) for o in OPTIONS["linear"]}
    wanted |= {(s.site, o) for s in embeddings(program) for o in OPTIONS["embedding"]} | {
        (s.site, "tanh") for s in gelus(program)
    }
    extra = {(m.site, "merged@int8_dynamic") for m in merges(program)}
    assert wanted <= set(found.errors) <= wanted | extra
    assert all(math.isfinite(e) and e >= 0 for e in found.errors.values())
    assert "Hutchinson" in found.method and found.draws >= 8


def test_a_merge_adds_what_the_common_weight_scale_adds() -> None:
    """Q with weights 30 times smaller than k's: under one scale, nearly nothing of q is left."""

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k = nn.Linear(32, 32), nn.Linear(32, 32)
            with torch.no_grad():
                self.q.weight.mul_(1 / 30)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.q(x) - self.q.bias, self.k(x)

    program = capture(Pair().eval(), (torch.randn(4, 6, 32),))
    inputs = generate_inputs(program)
    found = measure(program, inputs, {"linear": (form("int8_dynamic"),)})
    peak = fake_quant.peak_of(next(s for s in [program.tensor(linears(program)[1].weight)] if s is not None))
    w = program.tensor(linears(program)[0].weight)
    assert w is not None
    expected = float((fake_quant.per_tensor(w, peak) - w).square().sum() / w.square().sum())
    assert expected / 3 < found.errors[":merge", "merged@int8_dynamic"] < 3 * expected


class _RoundedHeads(fx.Interpreter):
    """Runs a program with q and k of one attention rounded to 8 bits."""

    def __init__(self, program: Program, node: fx.Node) -> None:
        super().__init__(program.module)
        self.rounded = set(node.all_input_nodes[:2])

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        return fake_quant.uint8(result) if n in self.rounded else result


def test_an_attentions_q_and_k_are_one_site() -> None:
    program = tiny("bert")
    inputs = [(program.args, program.kwargs), *generate_inputs(program, 2)]
    found = measure(program, inputs, {"attention": (form("sdpa_int8"),)}, budget_seconds=30.0)
    wanted = program.module(*program.args, **program.kwargs)[0]
    for site in attentions(program):
        moved = _RoundedHeads(program, site.node).run(*program.flat_inputs())[0]
        true = float((moved - wanted).norm() / wanted.norm())
        assert true / 3 < math.sqrt(found.errors[site.site, "sdpa_int8"]) < 3 * true


@pytest.mark.parametrize("word", ["sdpa_bf16", "sdpa_int8_token"])
def test_a_narrower_attention_is_priced_with_its_weights(word: str) -> None:
    """By what the operator itself makes of the model."""
    program = tiny("bert")
    inputs = [(program.args, program.kwargs), *generate_inputs(program, 2)]
    found = measure(program, inputs, {"attention": (form(word),)}, budget_seconds=30.0)
    wanted = program.module(*program.args, **program.kwargs)[0]
    for site in attentions(program):
        edited = program.editable("test").tagged({site.site: form(word)}, "test")
        edit_attentions(edited)
        edited.module.recompile()
        moved = edited.module(*program.args, **program.kwargs)[0]
        true = float((moved - wanted).norm() / wanted.norm())
        assert true / 3 < math.sqrt(found.errors[site.site, word]) < 3 * true


def test_behind_integers_the_model_is_run_instead() -> None:
    class Pick(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.score, self.table = nn.Linear(32, 50), nn.Embedding(50, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.table(self.score(x).argmax(-1))

    program = capture(Pick().eval(), (torch.randn(2, 32, 32),))
    inputs = generate_inputs(program, count=2)
    found = measure(program, inputs, {"linear": (form("w4"),)})
    score = linears(program)[0].site
    assert found.errors[score, "w4"] == pytest.approx(true_error(program, inputs, {score: "w4"}), rel=1e-4)
    assert found.errors[score, "w4"] > 0


class Assigns(Mlp):
    """Writes a slice, of which torch differentiates the write but not what functionalising makes of it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        y[:, ::2] = 2 * y[:, 1::2]
        return y


@torch.library.custom_op("effcompile_tests::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@doubled.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


class Opaque(Mlp):
    """Part of a site's effect comes through an operator that has no derivative."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return y + doubled(y)


@pytest.mark.parametrize("kind", [Assigns, Opaque])
def test_what_torch_does_not_differentiate_is_priced_all_the_same(kind: type[Mlp]) -> None:
    torch.manual_seed(0)
    program = capture(kind().eval(), (torch.randn(8, 64),))
    inputs = generate_inputs(program, 3)
    found = measure(program, inputs, {"linear": FORMS["linear"]})
    assert ("Hutchinson" in found.method) is (kind is Assigns)
    for site in linears(program):
        for option in ("bf16", "w8"):
            predicted = found.errors[site.site, option]
            assert 1 / 9 < predicted / true_error(program, inputs, {site.site: option}) < 9


def test_little_time_and_nothing_to_do_still_give_an_answer() -> None:
    program = tiny("mlp")
    told: list[float] = []
    found = measure(
        program,
        generate_inputs(program),
        FORMS,
        budget_seconds=0,
        progress=lambda what, share: told.append(share),
    )
    assert "one input only" in found.method and {s.site for s in linears(program)} <= {
        site for site, _ in found.errors
    }
    assert told == sorted(told) and all(0 <= share <= 1 for share in told)
    full = measure(program, generate_inputs(program), FORMS, budget_seconds=600)
    total = [sum(e for (_, o), e in f.errors.items() if o == "w4") for f in (found, full)]
    assert 0.2 < total[0] / total[1] < 5
    assert measure(program, generate_inputs(program), {}).errors == {}


def test_generated_inputs_look_like_the_example() -> None:
    program = tiny("bert")
    program.kwargs["attention_mask"][0, :5] = 0
    made = generate_inputs(program, count=3)
    again = generate_inputs(program, count=3)
    for (args, kwargs), (_, same) in zip(made, again, strict=True):
        assert args == () and list(kwargs) == list(program.kwargs)
        assert torch.equal(kwargs["attention_mask"], program.kwargs["attention_mask"])
        assert torch.equal(kwargs["input_ids"], same["input_ids"])
        assert (
            kwargs["input_ids"].shape == (2, 16)
            and kwargs["input_ids"].min() >= 0
            and kwargs["input_ids"].max() < 100
        )
        program.module(**kwargs)
    assert not torch.equal(made[0][1]["input_ids"], made[1][1]["input_ids"])
    assert describe_generated(3) == "generated: 3 random inputs shaped like the example"


def test_generated_floats_have_the_examples_mean_and_deviation() -> None:
    program = capture(nn.Linear(8, 8).eval(), (torch.randn(64, 8) * 3 + 5,))
    ((x,), _) = generate_inputs(program, count=1)[0]
    assert 4 < x.mean() < 6 and 2 < x.std() < 4


def test_errors_are_the_same_by_one_thread_and_by_several() -> None:
    """Sites in threads of their own, and torch's threads as before."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(6)]
    program = capture(nn.Sequential(*layers), (torch.randn(4, 32),))
    options = {"linear": tuple(map(form, ("bf16", "int8_channel", "w4")))}
    inputs = [(program.args, program.kwargs)]
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            found.append(measure(program, inputs, options, budget_seconds=60.0).errors)
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    one, several = found
    assert len(one) == 6 * 3 and one.keys() == several.keys()
    for key, error in one.items():
        assert several[key] == pytest.approx(error, rel=1e-3)
