"""A cache in bf16 or in 8 bits: its bytes, its results against a cache that rounds, and the plans that choose
it.
"""

from __future__ import annotations

import copy
import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from generation_models import Planned, bare, captured, ids, tiny
from torch import fx, nn

import effcompile
from effcompile.backends.torch.in_place import in_place
from effcompile.core.errors import FormatError, LoweringError
from effcompile.core.torch_compat_memory import watched_memory
from effcompile.core.types import Kwargs
from effcompile.ir.cache import CacheLayout, CacheLeaf, Growth
from effcompile.ir.formats import W4, Form
from effcompile.ir.plan import Plan
from effcompile.ops.cache_rows import into
from effcompile.ops.cached_attention import cached_attention
from effcompile.search.generation.held import beside_rows

CONTEXT = 64


def in_8_bits(rows: torch.Tensor) -> torch.Tensor:
    scale = rows.abs().amax(3, keepdim=True) / 127
    return torch.where(scale > 0, (rows / scale).round() * scale, 0.0)


def in_4_bits(rows: torch.Tensor) -> torch.Tensor:
    """Of at most 32 numbers."""
    top = rows.gather(3, rows.abs().argmax(3, keepdim=True))
    scale = (top / -8).bfloat16().float()
    return torch.where(scale != 0, (rows / scale).round().clamp(-8, 7) * scale, 0.0)


ROUNDINGS = {
    "": lambda rows: rows, "bfloat16": lambda rows: rows.bfloat16().float(),
    "int8": in_8_bits, "uint8": in_4_bits,
}  # fmt: skip
#: A mix: what each leaf is held in, by turns.
MIX = ("int8", "uint8", "bfloat16", "", "uint8")


class Rounding(transformers.DynamicCache):
    """The oracle: what is written is rounded first; all else is transformers'."""

    layout: CacheLayout

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer: int, *args: Any, **kwargs: Any) -> Any:
        held = {leaf.name: leaf.held for leaf in self.layout}
        keys, values = (
            ROUNDINGS[held[f"layers.{layer}.{side}"]](rows)
            for side, rows in (("keys", keys), ("values", values))
        )
        return super().update(keys, values, layer, *args, **kwargs)


WAYS = [
    ("llama", "uint8"),
    ("llama", "int8"),
    ("llama", "mix"),
    ("gemma3_text", "mix"),
    ("gpt2", "bfloat16"),
    ("t5", "int8"),
]


@pytest.fixture(scope="module", params=WAYS, ids="-".join)
def narrow(request: pytest.FixtureRequest) -> Planned:
    kind, dtype = request.param
    found = captured(kind)
    names = [leaf.name for leaf in found[1].layout]
    mixed = dict(zip(names, itertools.cycle(MIX), strict=False))
    return bare(found, context=CONTEXT, narrow=mixed if dtype == "mix" else dtype, chunk=32)


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
    rounding.layout = executable.lowered.layout
    told = logits(model, rounding, text, sizes)
    torch.testing.assert_close(found, told, rtol=2e-3, atol=2e-3)  # a code that is half way goes either way
    assert float((found - told).norm() / told.norm()) < 5e-4
    exact = logits(model, transformers.DynamicCache(config=model.config), text, sizes)
    assert 1e-5 < float((found - exact).norm() / exact.norm()) < 0.2


def test_the_model_itself_goes_on_behind_it(narrow: Planned) -> None:
    """As behind what was rounded; its own rows it does not round. And the plan goes on behind the model."""
    model, executable = narrow
    if model.config.is_encoder_decoder:
        pytest.skip("its cache has two parts")
    text, layout = ids(2, 30), executable.lowered.layout
    cache, rounding = (kind(config=model.config) for kind in (transformers.DynamicCache, Rounding))
    rounding.layout = layout
    logits(executable, cache, text[:, :20], [12, 1, 7])
    logits(model, rounding, text[:, :20], [12, 1, 7])
    copied = copy.deepcopy(cache)
    rounding.layout = plain(layout)
    told = logits(model, rounding, text[:, 20:], [6, 1, 3])
    for each in (cache, copied):
        found = logits(model, each, text[:, 20:26], [6])
        found = torch.cat([found, logits(executable, each, text[:, 26:], [1, 3])], 1)
        torch.testing.assert_close(found, told, rtol=2e-3, atol=2e-3)
        assert float((found - told).norm() / told.norm()) < 5e-4


def plain(layout: CacheLayout) -> CacheLayout:
    return CacheLayout(leaves=tuple(replace(leaf, held="") for leaf in layout))


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
    assert [side.dtype for side in held] == [getattr(torch, leaf.held or "float32") for leaf in layout]
    assert sum(side.untyped_storage().nbytes() for side in held) == layout.nbytes(CONTEXT, 2)
    if not any(leaf.window for leaf in layout):
        assert layout.nbytes(CONTEXT, 2) == sum(
            2 * CONTEXT * leaf.shape[0] * row_bytes(leaf.held, leaf.shape[1]) for leaf in layout
        )


def row_bytes(dtype: str, width: int) -> int:
    """Of one head: four or two bytes a number, one and a scale of four, or half of one and a scale of two."""
    return {"": 4 * width, "bfloat16": 2 * width, "int8": width + 4, "uint8": width // 2 + 2}[dtype]


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


def cache_of(plan: Plan) -> tuple[set[str], int, int]:
    """(options, bytes, the model's own bytes) of all leaves."""
    found = [decision for decision in plan.decisions if decision.kind == "cache"]
    return (
        {decision.option for decision in found},
        sum(decision.cost.bytes_kept for decision in found),
        sum(decision.baseline_cost.bytes_kept for decision in found),
    )


def error_of(plan: Plan) -> float:
    return math.sqrt(sum(each.cost.error_squared for each in plan.decisions if each.kind == "cache"))


def test_its_form_is_in_the_solve(llama: nn.Module) -> None:
    """Bytes are those of 512 tokens, keys and values, 4 heads of 8; the peak falls by what a narrower form
    saves, less what widening one head's rows takes.
    """
    own, codes = 512 * 2 * 4 * 8 * 4, 512 * 2 * 4 * (4 + 2)
    smallest = effcompile.plan(llama, TEXT, minimize="memory", **GIVEN)
    assert cache_of(smallest) == ({"int4_row_groups"}, codes, own)
    assert 0 < error_of(smallest) < 0.2
    assert cache_of(effcompile.plan(llama, TEXT, **{**GIVEN, "max_error": None})) == (set(), 0, 0)
    exact = effcompile.plan(
        llama, TEXT, minimize="memory", **{**GIVEN, "max_error": error_of(smallest) / 1e5}
    )
    assert cache_of(exact) == ({"fp32"}, own, own)
    assert exact.predicted.peak_bytes - smallest.predicted.peak_bytes >= own - codes - 3 * 512 * 8 * 4


def test_what_was_decided_is_built_and_compared(llama: nn.Module) -> None:
    """At an error that all of it in 8 bits would be over: some leaves are, others are not."""
    error = error_of(effcompile.plan(llama, TEXT, minimize="memory", **GIVEN)) / 2
    executable = effcompile.optimize(
        llama, TEXT, minimize="memory", passes=["rows"], **{**GIVEN, "max_error": error}
    )
    plan, layout = executable.plan, executable.lowered.layout
    found = {each.site: each for each in plan.decisions if each.kind == "cache"}
    names = {"": "fp32", "bfloat16": "bf16", "int8": "int8_rows", "uint8": "int4_row_groups"}
    assert {leaf.site: names[leaf.held] for leaf in layout} == {site: d.option for site, d in found.items()}
    assert all(each.applied == each.option for each in found.values()) and len(cache_of(plan)[0]) > 1
    assert layout.nbytes(512, 1) == cache_of(plan)[1]
    assert all(check.passed and check.error > 0 for check in plan.checks)
    told = [str(note) for note in plan.notes]
    assert any("weights and cache at 128 tokens of context" in note for note in told)
    assert any("cache: keys of 1 layers in" in note for note in told)
    again = effcompile.optimize(llama, TEXT, plan=plan)
    assert again.lowered.layout == layout
    with pytest.raises(
        FormatError, match=r"holds cache\.layers\.0\.keys in w4; leaves of a cache are held in fp32"
    ):
        effcompile.optimize(llama, TEXT, plan=altered(plan, "cache.layers.0.keys"))
    with pytest.raises(FormatError, match=r"decides about cache\.layers\.7\.keys, and the"):
        effcompile.optimize(llama, TEXT, plan=altered(plan, "cache.layers.0.keys", "cache.layers.7.keys"))


def altered(plan: Plan, site: str, to: str = "") -> Plan:
    """With another form at a site, or that decision at another site."""
    changed: Kwargs = {"site": to} if to else {"option": "w4", "form": Form(weights=W4)}
    found = (replace(each, **changed) if each.site == site else each for each in plan.decisions)
    return replace(plan, decisions=tuple(found))


def test_a_memory_is_kept_where_a_prompt_fills_the_context(llama: nn.Module) -> None:
    """Its own cache needs 81,920 bytes more than the smallest plan; the peak that is measured reads a prompt
    of the whole context.
    """
    smallest = effcompile.plan(llama, TEXT, minimize="memory", **GIVEN)
    memory = smallest.predicted.peak_bytes + 40_000
    executable = effcompile.optimize(llama, TEXT, memory=memory, **GIVEN)
    assert cache_of(executable.plan)[0] != {"fp32"} and executable.plan.measured.peak_bytes <= memory


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("context", [5, 70, 900])
@pytest.mark.parametrize("held", ["bfloat16", "int8", "uint8"])
def test_a_call_of_few_tokens_holds_no_more_beside_its_rows_than_is_foreseen(
    held: str, context: int, threads: int
) -> None:
    """What threads hold of narrow rows grows with them, and a short context has nothing that is larger."""
    leaf = CacheLeaf(name="layers.0.keys", layer=0, growth=Growth.FULL, shape=(2, 64)).narrowed(held)
    rows = into(torch.randn(1, 2, context, 64), dtype := getattr(torch, held)).to(dtype)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        foreseen = beside_rows(leaf, context, 1, 8, min(context, 512))
        for tokens in (1, min(context, 8)):
            query = torch.randn(1, tokens, 8, 64).transpose(1, 2)
            cached_attention(query, rows, rows, None, 0.3)  # kernels are compared at their first call
            with watched_memory("cpu") as peak:
                made = cached_attention(query, rows, rows, None, 0.3)
            assert peak() - made.nbytes <= foreseen
        assert beside_rows(leaf, 5, 1, 8, 5, "cuda") < beside_rows(leaf, 5, 1, 8, 5)  # its kernels hold none
    finally:
        torch.set_num_threads(before)
