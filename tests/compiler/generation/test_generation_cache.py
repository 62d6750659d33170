"""A cache in bf16: its bytes, its results against a cache that rounds, and the plans that choose it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from generation_models import captured, ids, tiny
from torch import fx, nn

import effcompile
from effcompile.backends import load_backend
from effcompile.backends.torch.in_place import in_place
from effcompile.compiler.generation.lower import lower_step
from effcompile.core.errors import LoweringError
from effcompile.core.goal import Goal
from effcompile.ir.plan import Certificate, Plan, Totals
from effcompile.runtime.generation.executable import GenerationExecutable
from effcompile.runtime.generation.steps import CacheRoom

CONTEXT = 64
Planned = tuple[nn.Module, GenerationExecutable]


class Rounding(transformers.DynamicCache):
    """The oracle: what is written is rounded to bf16 first; all else is transformers'."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        rounded = (side.bfloat16().float() for side in (key_states, value_states))
        return super().update(*rounded, *args, **kwargs)


@pytest.fixture(scope="module", params=["llama", "gemma3_text", "gpt2", "t5"])
def narrow(request: pytest.FixtureRequest) -> Planned:
    model, step = captured(request.param)
    step = replace(step, layout=step.layout.narrowed())
    nothing = Totals()
    proof = Certificate(status="", objective=0.0, bound=0.0, gap=0.0, sites=0, alternatives=0, seconds=0.0, solver="")
    plan = Plan(
        model="", fingerprint="", parameters=0, goal=Goal.of(mode="generation", context=CONTEXT), target="", target_line="",
        backend="torch-eager", decisions=(), declined=(), certificate=proof, baseline=nothing, predicted=nothing,
    )  # fmt: skip
    lowered, parts = lower_step(step, step.program, load_backend("torch-eager"), plan, CacheRoom(context=CONTEXT, chunk=32))
    return model, GenerationExecutable(model, step, lowered, plan, parts)


def logits(run: Any, cache: Any, text: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    at, parts = 0, []
    with torch.no_grad():
        for size in sizes:
            parts.append(run(text[:, at : at + size], past_key_values=cache, use_cache=True).logits)
            at += size
    return torch.cat(parts, 1)


def test_it_is_the_model_behind_a_cache_that_rounds(narrow: Planned) -> None:
    model, executable = narrow
    if model.config.is_encoder_decoder:
        pytest.skip("its cache has two parts")
    text, sizes = ids(2, 30), [12, 1, 1, 5, *[1] * 11]
    found = logits(executable, transformers.DynamicCache(config=model.config), text, sizes)
    told = logits(model, Rounding(config=model.config), text, sizes)
    torch.testing.assert_close(found, told, rtol=1e-4, atol=1e-4)
    exact = logits(model, transformers.DynamicCache(config=model.config), text, sizes)
    assert 1e-5 < float((found - exact).norm() / exact.norm()) < 2e-2


@pytest.mark.parametrize("tokens", [1, 7, 20, 33, 60])
def test_its_bytes_are_those_of_the_layout(narrow: Planned, tokens: int) -> None:
    """The oracle counts the storages that the cache holds."""
    model, executable = narrow
    if model.config.is_encoder_decoder:
        pytest.skip("its cache has two parts")
    cache = transformers.DynamicCache(config=model.config)
    executable(ids(2, tokens), past_key_values=cache)
    held = [side for layer in cache.layers for side in (layer.keys, layer.values)]
    assert {side.dtype for side in held} == {torch.bfloat16}
    layout = executable.lowered.layout
    assert sum(side.untyped_storage().nbytes() for side in held) == layout.nbytes(CONTEXT, 2) == layout.widened().nbytes(CONTEXT, 2) // 2


@pytest.mark.parametrize("how", [{}, {"num_beams": 3}, {"prompt_lookup_num_tokens": 3}], ids=["greedy", "beams", "drafts"])
def test_it_generates(narrow: Planned, how: dict[str, Any]) -> None:
    """A left-padded row is the row alone; beams and drafts move its rows."""
    model, executable = narrow
    row, mask = ids(1, 9), torch.ones(1, 12, dtype=torch.int64)
    common: dict[str, Any] = {"max_new_tokens": 20, "do_sample": False, **how}
    alone = executable.generate(row, **common)
    assert alone.shape[1] == (21 if model.config.is_encoder_decoder else 29)
    if not model.config.is_encoder_decoder and not how:
        mask[0, :3] = 0
        padded = torch.cat([torch.zeros(1, 3, dtype=torch.int64), row], 1)
        assert torch.equal(executable.generate(padded, attention_mask=mask, **common)[:, 3:], alone)


def test_a_cache_that_something_else_reads_stays() -> None:
    graph = fx.Graph()
    past, new = graph.placeholder("past"), graph.placeholder("new")
    longer = graph.call_function(torch.ops.aten.cat.default, ([past, new], 2))
    graph.output((graph.call_function(torch.ops.aten.matmul.default, (new, longer)), longer))
    module = fx.GraphModule(nn.Module(), graph)
    assert in_place(module, {0: 8}) is not None
    with pytest.raises(LoweringError, match="matmul_default takes the model's own dtype"):
        in_place(module, {0: 8}, [0])


@pytest.fixture(scope="module")
def llama() -> nn.Module:
    return tiny("llama", num_hidden_layers=1, num_key_value_heads=4)


GIVEN: dict[str, Any] = {
    "mode": "generation", "context": 512, "prompt": 8, "new": 8, "target": "cpu-generic", "backend": "torch-eager", "max_error": 0.9,
}  # fmt: skip


TEXT = {"input_ids": ids(1, 40)}


def cache_of(plan: Plan) -> tuple[str, int, int] | None:
    """(option, bytes, the model's own bytes)."""
    found = [(d.option, d.cost.bytes_kept, d.baseline_cost.bytes_kept) for d in plan.decisions if d.kind == "cache"]
    return found[0] if found else None


def test_a_plan_chooses_it_where_the_models_own_does_not_fit(llama: nn.Module) -> None:
    own = 512 * 2 * 32 * 4
    smallest = effcompile.plan(llama, TEXT, minimize="memory", **GIVEN)
    assert cache_of(smallest) == ("bf16", own // 2, own)
    assert smallest.predicted.peak_bytes is not None
    assert cache_of(effcompile.plan(llama, TEXT, memory=smallest.predicted.peak_bytes + own // 4, **GIVEN)) == ("bf16", own // 2, own)
    assert cache_of(effcompile.plan(llama, TEXT, **GIVEN)) is None  # nothing is gained: it is as fast, and memory is no limit
    assert cache_of(effcompile.plan(llama, TEXT, **{**GIVEN, "max_error": None})) is None


def test_both_caches_are_built_and_compared(llama: nn.Module) -> None:
    executable = effcompile.optimize(llama, TEXT, **GIVEN)
    names = {candidate.backend for candidate in executable.plan.candidates}
    assert names == {"torch-eager", "torch-eager, cache in bf16"} and all(check.passed for check in executable.plan.checks)
    narrow = executable.lowered.layout.narrow
    assert (cache_of(executable.plan) is not None) == narrow
    assert any("weights and cache at 128 tokens of context" in str(note) for note in executable.plan.notes)
