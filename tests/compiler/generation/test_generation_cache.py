"""A cache in bf16 or in 8 bits: its bytes, its results against a cache that rounds, and the plans that choose
it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from generation_models import Planned, bare, captured, ids, tiny
from torch import fx, nn

import effcompile
from effcompile.backends.torch.in_place import in_place
from effcompile.core.errors import LoweringError
from effcompile.ir.cache import CacheLeaf
from effcompile.ir.plan import Plan

CONTEXT = 64


def in_8_bits(rows: torch.Tensor) -> torch.Tensor:
    scale = rows.abs().amax(3, keepdim=True) / 127
    return torch.where(scale > 0, (rows / scale).round() * scale, 0.0)


ROUNDINGS = {"bfloat16": lambda rows: rows.bfloat16().float(), "int8": in_8_bits}


class Rounding(transformers.DynamicCache):
    """The oracle: what is written is rounded first; all else is transformers'."""

    dtype = ""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return super().update(*map(ROUNDINGS[self.dtype], (key_states, value_states)), *args, **kwargs)


WAYS = [
    ("llama", "bfloat16"),
    ("llama", "int8"),
    ("gemma3_text", "int8"),
    ("gpt2", "bfloat16"),
    ("t5", "int8"),
]


@pytest.fixture(scope="module", params=WAYS, ids="-".join)
def narrow(request: pytest.FixtureRequest) -> Planned:
    kind, dtype = request.param
    return bare(captured(kind), context=CONTEXT, narrow=dtype, chunk=32)


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
    rounding = Rounding(config=model.config)
    rounding.dtype = executable.lowered.layout.narrow
    told = logits(model, rounding, text, sizes)
    torch.testing.assert_close(found, told, rtol=2e-3, atol=2e-3)  # a code that is half way goes either way
    assert float((found - told).norm() / told.norm()) < 5e-4
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
    layout = executable.lowered.layout
    assert {side.dtype for side in held} == {getattr(torch, layout.narrow)}
    assert sum(side.untyped_storage().nbytes() for side in held) == layout.nbytes(CONTEXT, 2)
    if not any(leaf.window for leaf in layout):
        assert layout.nbytes(CONTEXT, 2) == sum(
            2 * CONTEXT * leaf.shape[0] * row_bytes(layout.narrow, leaf) for leaf in layout
        )


def row_bytes(dtype: str, leaf: CacheLeaf) -> int:
    """Of one head: two bytes a number, or one and a scale of four."""
    return 2 * leaf.shape[1] if dtype == "bfloat16" else leaf.shape[1] + 4


@pytest.mark.parametrize(
    "how", [{}, {"num_beams": 3}, {"prompt_lookup_num_tokens": 3}], ids=["greedy", "beams", "drafts"]
)
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
    "mode": "generation", "context": 512, "prompt": 8, "new": 8, "target": "cpu-generic",
    "backend": "torch-eager", "max_error": 0.9,
}  # fmt: skip


TEXT = {"input_ids": ids(1, 40)}


def cache_of(plan: Plan) -> tuple[str, int, int] | None:
    """(option, bytes, the model's own bytes)."""
    found = [
        (d.option, d.cost.bytes_kept, d.baseline_cost.bytes_kept) for d in plan.decisions if d.kind == "cache"
    ]
    return found[0] if found else None


def test_its_form_is_in_the_solve(llama: nn.Module) -> None:
    """Bytes are those of 512 tokens, keys and values, 4 heads of 8; the peak falls by what a narrower form
    saves, less what widening one head's rows takes.
    """
    own, codes = 512 * 2 * 4 * 8 * 4, 512 * 2 * 4 * (8 + 4)
    smallest = effcompile.plan(llama, TEXT, minimize="memory", **GIVEN)
    assert cache_of(smallest) == ("int8_rows", codes, own)
    (found,) = (decision for decision in smallest.decisions if decision.kind == "cache")
    assert 0 < found.cost.error < 0.05
    assert cache_of(effcompile.plan(llama, TEXT, **{**GIVEN, "max_error": None})) is None
    exact = effcompile.plan(llama, TEXT, minimize="memory", **{**GIVEN, "max_error": found.cost.error / 1e3})
    assert cache_of(exact) == ("fp32", own, own)
    assert exact.predicted.peak_bytes - smallest.predicted.peak_bytes >= own - codes - 3 * 512 * 8 * 4


def test_what_was_decided_is_built_and_compared(llama: nn.Module) -> None:
    executable = effcompile.optimize(llama, TEXT, minimize="memory", **GIVEN)
    (found,) = (decision for decision in executable.plan.decisions if decision.kind == "cache")
    assert found.applied == found.option == "int8_rows" and executable.lowered.layout.narrow == "int8"
    assert all(check.passed and check.error > 0 for check in executable.plan.checks)
    assert any("weights and cache at 128 tokens of context" in str(note) for note in executable.plan.notes)


def test_a_memory_is_kept_where_a_prompt_fills_the_context(llama: nn.Module) -> None:
    """Its own cache needs 81,920 bytes more than the smallest plan; the peak that is measured reads a prompt
    of the whole context.
    """
    smallest = effcompile.plan(llama, TEXT, minimize="memory", **GIVEN)
    memory = smallest.predicted.peak_bytes + 40_000
    executable = effcompile.optimize(llama, TEXT, memory=memory, **GIVEN)
    assert executable.lowered.layout.narrow and executable.plan.measured.peak_bytes <= memory
