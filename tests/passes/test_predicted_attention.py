"""Predicted attention as an option: taken where attention is concentrated and it pays, declined with its
figures where not.
"""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from pass_helpers import context, machine, outputs, plan_with, split
from torch import Tensor, nn

from effcompile.capture import capture
from effcompile.compiler import optimize
from effcompile.core.goal import Goal
from effcompile.ir.formats import Form
from effcompile.ir.plan import Plan
from effcompile.ir.program import Program
from effcompile.machine.target import KernelCall
from effcompile.passes.attention import Attention
from effcompile.passes.predicted_attention import Predict
from effcompile.report.reasons import words
from effcompile.sites.attention.normalise import normalised
from effcompile.sites.parts import attentions

LENGTH, BLOCK = 256, 32
OURS = torch.ops.effcompile
FORM = {"least": 128, "block": BLOCK, "pool": 4}
ALL = ("pooled", "sanger", "elsa", "dota", "a3", "vitcod")


class Layer(nn.Module):
    """Causal attention of two heads, between linears. `sharpness` scales the scores."""

    def __init__(self, sharpness: float, width: int = 32) -> None:
        super().__init__()
        self.sharpness, self.heads = sharpness, 2
        self.q, self.k, self.v, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        with torch.no_grad():
            self.q.weight.copy_(torch.eye(width))
            self.k.weight.copy_(torch.eye(width))

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        q, k, v = (f(x).view(b, s, self.heads, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.sharpness)
        return x + self.out(y.transpose(1, 2).reshape(b, s, -1))


def tokens(length: int = LENGTH, batch: int = 1, seed: int = 0) -> Tensor:
    """Blocks of tokens of four kinds in turn: where scores are sharp, each sees its own kind only."""
    generator = torch.Generator().manual_seed(seed)
    kinds = torch.linalg.qr(torch.randn(32, 32, generator=torch.Generator().manual_seed(1)))[0][:4] * 4.0
    return kinds[torch.arange(length) // BLOCK % 4] + 0.2 * torch.randn(
        batch, length, 32, generator=generator
    )


def captured(sharpness: float, *, dynamic: bool = False) -> Program:
    torch.manual_seed(0)
    program = normalised(capture(Layer(sharpness).eval(), (tokens(),), dynamic=dynamic))
    return replace(program, calibration=(((tokens(),), {}), ((tokens(seed=3),), {})))


def by_keys(call: KernelCall) -> float | None:
    """Exact attention 1 s, listed tiles by the keys that they hold, a predictor a tenth."""
    kind, _, form = call.kernel.partition("/")
    if kind == "predict":
        return 0.1
    if form == "tiles":
        return call.dims[5] / call.dims[3]
    return 0.5 if form == "causal" else None if form == "packed" else 1.0


SHARP, DIFFUSE = 2.0, 0.01


@pytest.fixture(scope="module")
def sharp() -> Program:
    return captured(SHARP)


@pytest.mark.parametrize("method", ALL)
def test_concentrated_attention_is_offered_with_its_recall_and_measured_error(
    sharp: Program, method: str
) -> None:
    choices, declined = split(
        Predict(method=(method,), **FORM).propose(sharp, context(by_keys, goal=Goal(max_error=0.05)))
    )
    assert not declined
    ((site, choice),) = choices.items()
    option = choice.option(method)
    assert (
        choice.baseline == "causal"
        and [o.name for o in choice.options] == ["causal", method]
        and option.by == "predict"
    )
    recall, density = re.fullmatch(
        r"recall (\S+) of softmax mass at (\d+)% of tiles", words(option.note)
    ).groups()
    assert float(recall) > 0.97 and int(density) < 70
    assert 0 < option.cost.error < 0.05
    assert option.cost.seconds < choice.option("causal").cost.seconds

    edited = Predict(method=(method,), **FORM).apply(sharp, plan_with({site: option.form}))
    (want,), (found,) = (outputs(p) for p in (sharp, edited))
    moved = float((found - want).norm() / want.norm())
    assert moved == pytest.approx(option.cost.error, rel=0.6), (
        "the error of the example is about that of all calibration inputs"
    )
    assert (method == "vitcod") == (not list(edited.calls(OURS.predicted_tiles.default)))
    (node,) = edited.calls(OURS.attention.default)
    assert node.kwargs["block_q"] == BLOCK and len(node.args[9]) == 4
    assert not list(sharp.calls(OURS.attention.default)), "the program it was made of is as it was"


def test_the_error_is_that_of_the_model_over_its_calibration_inputs(sharp: Program) -> None:
    choices, _ = split(Predict(**FORM).propose(sharp, context(by_keys)))
    ((site, choice),) = choices.items()
    edited = Predict(**FORM).apply(sharp, plan_with({site: choices[site].option("sanger").form}))
    pairs = [(outputs(edited, *args), outputs(sharp, *args)) for args, _ in sharp.calibration]
    moved = sum(float((a - b).double().square().sum()) for (a,), (b,) in pairs)
    assert choice.option("sanger").cost.error_squared == pytest.approx(
        moved / sum(float(b.double().square().sum()) for _, (b,) in pairs), rel=1e-3
    )


def test_spread_out_attention_is_declined_with_its_figures() -> None:
    program = captured(DIFFUSE)
    choices, declined = split(Predict(method=("sanger", "a3"), **FORM).propose(program, context(by_keys)))
    assert not choices and {d.option for d in declined} == {"sanger", "a3"}
    assert all(
        re.match(
            r"recall \S+ of softmax mass at \d+% of tiles; not faster: .* against .* \(causal\)",
            words(d.reason),
        )
        for d in declined
    )


def test_a_predictor_that_loses_what_matters_is_declined_for_its_error() -> None:
    program = captured(DIFFUSE)
    ask = context(by_keys, goal=Goal(max_error=1e-3))
    choices, (refused,) = split(Predict(mass=0.2, **FORM).propose(program, ask))
    assert not choices and refused.cost is not None
    assert re.match(
        r"recall 0\.\d+ of softmax mass at \d+% of tiles; would bring the error to .*, above .*",
        words(refused.reason),
    )


@pytest.mark.parametrize(
    ("settings", "goal", "reason"),
    [
        ({}, Goal(), "goal allows no error"),
        ({"least": 1024}, Goal(max_error=0.1), "its 256 keys are fewer than predict.least = 1024"),
        ({"seconds": 0.0}, Goal(max_error=0.1), "not measured within predict.seconds = 0"),
    ],
)
def test_it_says_why_it_does_not_take_part(
    sharp: Program, settings: dict[str, float], goal: Goal, reason: str
) -> None:
    choices, (refused,) = split(Predict(**{**FORM, **settings}).propose(sharp, context(by_keys, goal=goal)))
    assert not choices and reason in words(refused.reason)


def test_a_backend_without_the_kernels_is_told() -> None:
    def price(call: KernelCall) -> float | None:
        return None if call.kernel.startswith(("predict/", "attention/tiles")) else 1.0

    choices, (refused,) = split(Predict(**FORM).propose(captured(SHARP), context(price)))
    assert not choices and words(refused.reason) == "onnxruntime has no attention/tiles kernel here"


def test_calibrated_tiles_are_for_one_length() -> None:
    program = captured(SHARP, dynamic=True)
    choices, (refused,) = split(
        Predict(method=("vitcod", "sanger"), **FORM).propose(program, context(by_keys))
    )
    assert refused.option == "vitcod" and "its length is dynamic" in words(refused.reason)
    (site,) = choices
    edited = Predict(**FORM).apply(program, plan_with({site: choices[site].option("sanger").form}))
    x = tokens(180, batch=3)
    (want,), (found,) = outputs(program, x), outputs(edited, x)
    assert 0 < float((found - want).norm() / want.norm()) < 0.05


class Biased(Layer):
    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x)[:, None]
        bias = torch.arange(x.shape[1])[None] * -0.1
        return nn.functional.scaled_dot_product_attention(
            q, q, self.v(x)[:, None], attn_mask=bias.expand(x.shape[1], -1)
        )


def test_scores_that_a_predictor_cannot_know_are_left_exact() -> None:
    program = normalised(capture(Biased(1.0).eval(), (tokens(),)))
    choices, (refused,) = split(Predict(**FORM).propose(program, context(by_keys)))
    assert not choices and "bias" in words(refused.reason)


class Padded(Layer):
    """The same with padding on its right."""

    def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
        b, s, _ = x.shape
        q, k, v = (f(x).view(b, s, self.heads, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        seen = torch.ones(s, s, dtype=torch.bool).tril()[None, None] & attention_mask[:, None, None].bool()
        y = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=self.sharpness)
        return x + self.out(y.transpose(1, 2).reshape(b, s, -1))


@pytest.mark.parametrize("method", ["sanger", "vitcod"])
def test_padding_is_respected_whatever_was_seen_in_calibration(method: str) -> None:
    torch.manual_seed(0)
    model, whole = Padded(SHARP).eval(), torch.ones(1, LENGTH, dtype=torch.int64)
    program = normalised(capture(model, (tokens(), whole), dynamic=False))
    program = replace(program, calibration=(((tokens(), whole), {}),))
    (site,) = (s.site for s in attentions(program))
    predict = Predict(method=(method,), **FORM)
    choices, declined = split(predict.propose(program, context(by_keys)))
    assert method in [o.name for o in choices[site].options], declined
    edited = predict.apply(program, plan_with({site: choices[site].option(method).form}))
    short = whole.clone()
    short[0, 160:] = 0
    changed = tokens()
    changed[:, 160:] = 77.0  # what is hidden must not matter
    first, second = (outputs(edited, x, short)[0][:, :160] for x in (tokens(), changed))
    torch.testing.assert_close(first, second)
    assert float((first - model(tokens(), short)[:, :160]).norm() / first.norm()) < 0.05


def test_end_to_end_with_quantized_linears_verified_and_told() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Layer(SHARP), Layer(SHARP)).eval()

    def price(call: KernelCall) -> float:
        found = (
            by_keys(call)
            if call.kernel.startswith(("attention/", "predict/"))
            else 1e-3
            if "fp32" in call.kernel
            else 1e-4
        )
        return 9.0 if found is None else found

    passes = [
        "predict",
        "predict.method=sanger,elsa",
        *(f"predict.{name}={value}" for name, value in FORM.items()),
    ]
    made = optimize(
        model, (tokens(),), {}, goal=Goal(max_error=0.1), target=machine(price), backend="torch-eager",
        passes=passes, calibration=[((tokens(seed=seed),), {}) for seed in (5, 6)],
    )  # fmt: skip
    taken = [d for d in made.plan.decisions if d.kind == "attention"]
    assert (
        len(taken) == 2
        and {d.option for d in taken} <= {"sanger", "elsa"}
        and all(d.applied == d.option for d in taken)
    )
    assert all("of softmax mass at" in words(d.note) for d in taken)
    assert any(d.kind == "linear" and d.option != "fp32" for d in made.plan.decisions)
    assert made.plan.checks and all(check.passed for check in made.plan.checks)
    want = model(tokens(seed=9))
    assert float((made(tokens(seed=9)) - want).norm() / want.norm()) < 0.1
    again = optimize(model, (tokens(),), {}, goal=made.plan.goal, plan=Plan.from_dict(made.plan.to_dict()))
    told = [d for d in again.plan.decisions if d.kind == "attention"]
    assert [(d.form, d.applied) for d in told] == [(d.form, d.option) for d in taken], (
        "the plan says how, no pass has to be set up again"
    )


def test_other_decisions_are_left_to_the_attention_pass(sharp: Program) -> None:
    (site,) = (s.site for s in attentions(sharp))
    plan = plan_with({site: "causal"})
    edited = Predict(**FORM).apply(Attention().apply(sharp, plan), plan)
    assert edited.tags == {site: Form(word="causal")} and not list(edited.calls(OURS.attention.default))
