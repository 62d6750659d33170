"""RMSNorm, SwiGLU and rotary positions found in Hugging Face models as they write them, proven, priced and
replaced; left elsewhere.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from pass_helpers import context, outputs, plan_with, split
from torch import nn
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    T5Config,
    T5EncoderModel,
)

import effcompile
from effcompile.backends.torch import TorchEager, edit
from effcompile.backends.torch.lowered import ARTIFACT, load
from effcompile.capture.inference import capture
from effcompile.core.goal import Goal
from effcompile.ir.program import Program
from effcompile.machine.machines import load_target
from effcompile.machine.target import KernelCall
from effcompile.ops.rows_held import HeldGate
from effcompile.passes.base import Context
from effcompile.passes.norm_gate_rotary import Rows
from effcompile.report.reasons import words
from effcompile.sites.attention.normalise import normalised
from effcompile.sites.rows import RowSite, row_sites, unmatched

SIZES = {
    "vocab_size": 60,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "head_dim": 8,
}
ONE = {"num_hidden_layers": 1}
H100 = load_target("h100-sxm")
#: Model → (how to make it, what is in it: Gemma gates by GELU and T5 has positions of its own).
MODELS: dict[str, tuple[Callable[[], nn.Module], dict[str, int]]] = {
    "llama": (lambda: LlamaForCausalLM(LlamaConfig(**SIZES)), {"rms_norm": 5, "swiglu": 2, "rotary": 4}),
    "qwen3": (
        lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES | ONE)),
        {"rms_norm": 5, "swiglu": 1, "rotary": 2},
    ),
    "gemma2": (lambda: Gemma2ForCausalLM(Gemma2Config(**SIZES | ONE)), {"rms_norm": 5, "rotary": 2}),
    "t5": (
        lambda: T5EncoderModel(
            T5Config(vocab_size=60, d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4)
        ),
        {"rms_norm": 3},
    ),
}


@cache
def model(name: str, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    made = MODELS[name][0]().eval()
    with torch.no_grad():
        for key, value in made.named_parameters():
            if "norm" in key:
                value.copy_(torch.rand_like(value) + 0.5)  # weights of 1 would hide one that is not read
    return made.to(dtype)


def program_of(name: str, dtype: torch.dtype = torch.float32) -> Program:
    return _captured(name, dtype)


@cache
def _captured(name: str, dtype: torch.dtype) -> Program:
    return normalised(capture(model(name, dtype), (), {"input_ids": torch.arange(24).view(2, 12)}))


def on(*, backend: str = "triton", goal: Goal | None = None, target: Any = H100) -> Context:
    return replace(context(goal=goal or Goal(), backend=backend), target=target)


def fused(program: Program, only: tuple[str, ...] = ("rms_norm", "swiglu", "rotary")) -> Program:
    return Rows().apply(
        program, plan_with({site.site: "fused" for site in row_sites(program) if site.form in only})
    )


# ---------------------------------------------------------------- found


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, torch.float32) for name in MODELS), ("llama", torch.bfloat16), ("t5", torch.float16)],
)
def test_every_one_of_a_model_is_found_and_replaced_without_changing_it(
    name: str, dtype: torch.dtype
) -> None:
    program = program_of(name, dtype)
    sites = row_sites(program)
    assert Counter(site.form for site in sites) == MODELS[name][1] and not unmatched(program, sites)
    after = fused(program)
    assert not row_sites(after) and not list(
        after.calls(torch.ops.aten.rsqrt.default, torch.ops.aten.silu.default)
    )
    after.graph.lint()
    tolerance = 2e-5 if dtype == torch.float32 else 4e-2
    for found, wanted in zip(outputs(after), outputs(program), strict=True):
        assert found.dtype == wanted.dtype
        assert (found.double() - wanted.double()).norm() <= tolerance * wanted.double().norm()


def test_the_sum_before_a_norm_is_made_with_it_where_the_sum_is_read_later_too() -> None:
    sites = {site.site: site for site in row_sites(program_of("llama"))}
    first, middle = (
        sites["model.layers.0.input_layernorm:rms_norm"],
        sites["model.layers.0.post_attention_layernorm:rms_norm"],
    )
    assert first.total is None and first.dims == (24, 32)
    # the next residual
    assert middle.total is not None and len(set(middle.total.users) - set(middle.nodes)) == 1
    after = fused(program_of("llama"), ("rms_norm",))
    (both,) = (
        node
        for node in after.calls(torch.ops.effcompile.rms_norm.default)
        if "0.post_attention" in str(node.meta["nn_module_stack"])
    )
    sums = [user for user in both.users if user.args[1] == 1]
    assert len(sums) == 1 and sums[0].users


class Written(nn.Module):
    """One chain, written by hand."""

    def __init__(self, chain: Callable[[torch.Tensor, torch.Tensor], Any]) -> None:
        super().__init__()
        self.chain, self.weight = chain, nn.Parameter(torch.rand(16) + 0.5)

    def forward(self, x: torch.Tensor) -> Any:
        return self.chain(x, self.weight)


def sites_of(chain: Callable[[torch.Tensor, torch.Tensor], Any], *shape: int) -> list[RowSite]:
    return row_sites(capture(Written(chain).eval(), (torch.randn(*(shape or (2, 5, 16))),), dynamic=False))


def root(x: torch.Tensor) -> torch.Tensor:
    return torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


RIGHT = {
    "weight last": lambda x, w: x * root(x) * w,
    "weight first": lambda x, w: w * (x * root(x)),
    "squared by itself": lambda x, w: w * (x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6)),
    "weight from 1": lambda x, w: x * root(x) * (1.0 + w),
}
WRONG = {
    "a mean of something else": lambda x, w: w * (x * torch.rsqrt((x * w).mean(-1, keepdim=True) + 9.0)),
    "over another axis": lambda x, w: w * (x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + 1e-6)),
    "a cube": lambda x, w: w * (x * torch.rsqrt(x.pow(4).mean(-1, keepdim=True) + 1e-6)),
    "no weight": lambda x, w: x * root(x) + w,
    "another factor": lambda x, w: w * ((x + 1.0) * root(x)),
    "a part is returned": lambda x, w: (lambda scaled: (w * scaled, scaled))(x * root(x)),
    "up of another shape": lambda x, w: torch.nn.functional.silu(x) * w,
    "a plain silu": lambda x, w: torch.nn.functional.silu(x) + x,
}


@pytest.mark.parametrize("name", list(RIGHT))
def test_a_norm_is_a_norm_however_it_is_written(name: str) -> None:
    assert [site.form for site in sites_of(RIGHT[name])] == ["rms_norm"]


@pytest.mark.parametrize("name", list(WRONG))
def test_what_looks_like_one_and_computes_something_else_is_left(name: str) -> None:
    assert not sites_of(WRONG[name])


def turned(x: torch.Tensor, sign: float, swap: bool) -> torch.Tensor:
    first, second = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat((sign * second, first) if not swap else (-first, second), dim=-1)


def test_a_rotation_the_other_way_or_of_other_halves_is_left() -> None:
    angles = torch.rand(1, 5, 16)
    cos, sin = angles.cos().unsqueeze(1), angles.sin().unsqueeze(1)
    shape = (2, 3, 5, 16)
    half = lambda x: torch.cat((-x[..., 8:], x[..., :8]), -1)  # noqa: E731
    assert [
        s.form
        for s in sites_of(
            lambda x, w: x * angles.cos().unsqueeze(1) + half(x) * angles.sin().unsqueeze(1), *shape
        )
    ] == ["rotary"]
    for chain in (
        lambda x, w: x * cos + turned(x, 1.0, False) * sin,
        lambda x, w: x * cos + turned(x, -1.0, True) * sin,
        lambda x, w: x * cos - half(x) * sin,
    ):
        assert not sites_of(chain, *shape)


def test_a_result_that_lies_otherwise_in_memory_is_left() -> None:
    """What follows may be a view that only this order allows."""
    assert not sites_of(lambda x, w: torch.nn.functional.silu(x.transpose(0, 1)) * x.transpose(0, 1))
    assert sites_of(lambda x, w: torch.nn.functional.silu(x) * x.exp())


def test_a_sum_that_is_read_before_the_norm_is_done_stays_apart() -> None:
    def chain(x: torch.Tensor, w: torch.Tensor) -> Any:
        total = x + x.flip(0)
        inverse = root(total)
        early = total * 2.0
        return w * (total * inverse), early

    (site,) = sites_of(chain)
    assert site.total is None


# ---------------------------------------------------------------- offered


def test_it_is_priced_by_the_memory_that_it_moves() -> None:
    program = program_of("llama")
    choices, declined = split(Rows().propose(program, on()))
    assert len(choices) == 11 and not declined
    option = choices["model.layers.0.post_attention_layernorm:rms_norm"].option("fused")
    price = H100.price("triton", KernelCall("rows/add_rms_norm", (24, 32)))
    assert (
        price is not None
        and option.cost.seconds == price[0]
        and words(option.note).endswith("the residual sum among them")
    )
    assert (
        option.cost.seconds
        < choices["model.layers.0.post_attention_layernorm:rms_norm"].option("separate").cost.seconds
    )
    assert (
        KernelCall("rows/add_rms_norm", (24, 32)).bytes
        == 2 * KernelCall("rows/rms_norm", (24, 32)).bytes
        == 4 * 4 * 24 * 32
    )


@pytest.mark.parametrize(
    ("backend", "why"),
    [("torch-inductor", "Inductor fuses"), ("onnxruntime", "the triton backend has, on a GPU")],
)
def test_elsewhere_it_is_declined_once(backend: str, why: str) -> None:
    choices, declined = split(Rows().propose(program_of("llama"), on(backend=backend)))
    assert not choices and len(declined) == 1 and why in words(declined[0].reason)


def test_a_cpu_has_them_in_fp32() -> None:
    priced = lambda call: 1e-6 if call.kernel.startswith("rows/") else 1e-3  # noqa: E731
    here = context(priced, goal=Goal(), backend="torch-eager")
    choices, declined = split(Rows().propose(program_of("llama"), here))
    assert len(choices) == 11 and not declined
    _, declined = split(Rows().propose(program_of("llama", torch.bfloat16), here))
    assert len(declined) == 1 and "the triton backend has, on a GPU" in words(declined[0].reason)


def test_a_cpu_computes_them_by_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edit, "packing", lambda *dims, ours: "none")  # a gate stands alone
    gates = []
    told = HeldGate.told
    monkeypatch.setattr(HeldGate, "told", lambda *given: gates.append(made := told(*given)) or made)
    given, llama = {"input_ids": torch.arange(24).view(2, 12)}, model("llama", torch.float32)
    program = capture(llama, (), given)
    plan = plan_with({site.site: "fused" for site in row_sites(program)})
    lowered = TorchEager().lower(Rows().apply(program, plan), plan, [])
    lowered.save(tmp_path)
    with torch.no_grad():
        wanted = llama(**given).logits
        for found in (lowered(given["input_ids"])[0], load(tmp_path / ARTIFACT)(**given)[0]):
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    assert len(gates) == 2 * llama.config.num_hidden_layers and None not in gates


def test_a_model_without_any_hears_nothing_of_it(bert: Program) -> None:
    assert list(Rows().propose(bert, on())) == []


def test_in_16_bits_the_one_rounding_is_an_error_that_has_to_be_allowed() -> None:
    program = program_of("llama", torch.bfloat16)
    _, declined = split(Rows().propose(program, on()))
    assert len(declined) == 11 and "the goal allows no error" in words(declined[0].reason)
    choices, _ = split(Rows().propose(program, on(goal=Goal(max_error=0.05))))
    assert all(0 < choice.option("fused").cost.error_squared < 1e-5 for choice in choices.values())


def test_no_gain_and_no_match_are_told() -> None:
    def chain(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return w * (x * root(x)) + x * root(x + 1.0)

    program = capture(Written(chain).eval(), (torch.randn(2, 5, 16),), dynamic=False)
    slow = context(
        lambda call: 1.0 if call.kernel.startswith("rows/") else 1e-6, goal=Goal(), backend="triton"
    )
    choices, declined = split(Rows().propose(program, slow))
    assert [o.name for c in choices.values() for o in c.options] == ["separate"]
    assert sorted(words(d.reason).partition(":")[0] for d in declined) == [
        "its 1/√ is not that of an RMSNorm with one weight per column", "not faster",
    ]  # fmt: skip


def test_a_whole_plan_for_a_gpu_that_is_not_here_takes_them() -> None:
    plan = effcompile.plan(
        model("llama", torch.float32),
        {"input_ids": torch.arange(24).view(2, 12)},
        target="h100-sxm",
        backend="triton",
    )
    rowed = [d for d in plan.decisions if d.kind == "rows"]
    assert Counter(d.option for d in rowed) == {"fused": 11} and plan.backend == "triton"
    assert all(d.cost.seconds < d.baseline_cost.seconds for d in rowed)
    separate = sum(d.baseline_cost.seconds for d in rowed)
    assert (
        plan.predicted.seconds is not None
        and plan.baseline.seconds is not None
        and separate < plan.baseline.seconds
    )


# ---------------------------------------------------------------- found again in what was built


def test_what_is_built_tells_which_are_fused() -> None:
    program = fused(program_of("llama"), ("swiglu", "rotary"))
    lowered = TorchEager().lower(program, plan_with({}), [])
    assert (
        lowered.applied["model.layers.1.mlp:swiglu"].word == "fused"
        and lowered.applied["model.layers.1.self_attn:rotary#2"].word == "fused"
    )
    assert lowered.applied["model.norm:rms_norm"].word == "separate"
    torch.testing.assert_close(
        lowered(*program.flat_inputs())[0], outputs(program_of("llama"))[0], rtol=1e-4, atol=1e-5
    )
