from __future__ import annotations

import itertools

import pytest
from form_names import held, names
from pass_helpers import context, plan_with, split

from effcompile.core.errors import UnknownNameError, UsageError
from effcompile.core.goal import Goal
from effcompile.ir.formats import LINEAR_FORMATS, TABLE_FORMATS
from effcompile.ir.program import Program
from effcompile.machine.target import KernelCall
from effcompile.passes.quantize import Quantize, stored_bytes
from effcompile.report.reasons import words
from effcompile.sites.parts import embeddings, linears


def test_an_exact_goal_gets_fp32_alone_and_one_refusal_per_option(bert: Program) -> None:
    choices, declined = split(Quantize().propose(bert, context(goal=Goal())))
    assert {o.name for c in choices.values() for o in c.options} == {"fp32"}
    assert [d.option for d in declined] == [*list(LINEAR_FORMATS)[1:], *list(TABLE_FORMATS)[1:]]
    assert {words(d.reason) for d in declined} == {"goal allows no error (max_error = 0)"}


def test_every_site_gets_every_option_that_the_backend_has(bert: Program) -> None:
    choices, declined = split(
        Quantize().propose(bert, context(lambda c: None if "bf16" in c.kernel else 1e-3))
    )
    assert set(choices) == {s.site for s in linears(bert)} | {s.site for s in embeddings(bert)}
    for site in linears(bert):
        assert [o.name for o in choices[site.site].options] == [o for o in LINEAR_FORMATS if o != "bf16"]
    assert {words(d.reason) for d in declined} == {"onnxruntime has no linear/bf16 kernel here"}


def test_what_does_not_pay_fit_or_was_not_measured_says_so(gpt2: Program) -> None:
    def price(call: KernelCall) -> float:
        return 2e-3 if call.kernel == "linear/bf16" else 1e-3

    site = next(s for s in linears(gpt2) if s.site == "lm_head")  # tied: its fp32 option costs no bytes
    known = {(s.site, o): 1e-6 for s in linears(gpt2) for o in LINEAR_FORMATS if o != "w8"}
    _, declined = split(Quantize(group_size=128).propose(gpt2, context(price, sensitivity=known)))
    reasons = {(d.site, d.option): words(d.reason) for d in declined}
    assert reasons[site.site, "bf16"] == "not faster: 2.00 ms against 1.00 ms (fp32)"
    assert reasons[site.site, "w4g128"] == "K = 64 is not a multiple of group_size = 128"
    assert reasons["transformer.h.1.mlp.c_proj", "w8g128"] == "its error at the output was not measured"


def test_bytes_of_a_tied_table_are_those_that_will_be_stored(gpt2: Program) -> None:
    """All four combinations of the tied table's two readers, against what each stores."""
    choices, _ = split(
        Quantize().propose(gpt2, context(lambda call: 1e-3 if "fp32" in call.kernel else 1e-4))
    )
    wte, head = choices["transformer.wte"], choices["lm_head"]
    site = next(s for s in linears(gpt2) if s.site == "lm_head")
    table = 4 * site.n * site.k
    stored = {
        ("fp32", "fp32"): table,
        ("fp32", "int8_dynamic"): table + stored_bytes(site, held("int8_dynamic")),
        ("int8", "int8_dynamic"): 2 * stored_bytes(site, held("int8_dynamic")),
    }
    for a, b in itertools.product(("fp32", "int8"), ("fp32", "int8_dynamic")):
        first, second = wte.option(a), head.option(b)
        allowed = a in second.requires.get("transformer.wte", (a,))
        assert allowed == ((a, b) in stored)
        if allowed:
            assert first.cost.weight_bytes + second.cost.weight_bytes == stored[a, b]


def test_without_the_embedding_pass_the_tied_table_stays(gpt2: Program) -> None:
    choices, _ = split(
        Quantize(embeddings=False).propose(
            gpt2, context(lambda call: 1e-3 if "fp32" in call.kernel else 1e-4)
        )
    )
    head, site = choices["lm_head"], next(s for s in linears(gpt2) if s.site == "lm_head")
    assert "transformer.wte" not in choices
    assert head.option("int8_dynamic").cost.weight_bytes - head.option(
        "fp32"
    ).cost.weight_bytes == stored_bytes(site, held("int8_dynamic"))


def test_baseline_bytes_add_up_to_the_weights_read_at_sites(gpt2: Program, bert: Program) -> None:
    for program in (gpt2, bert):
        choices, _ = split(Quantize().propose(program, context()))
        tables = {}
        for site in [*linears(program), *embeddings(program)]:
            value = program.tensor(site.weight)
            assert value is not None
            tables[value.data_ptr()] = value.numel() * 4
        assert sum(c.option("fp32").cost.weight_bytes for c in choices.values()) == sum(tables.values())


def test_stored_bytes_are_what_onnxruntime_stores(bert: Program) -> None:
    import numpy as np
    from onnxruntime.capi._pybind_state import quantize_matmul_4bits

    site = linears(bert)[0]
    packed = np.zeros((site.n, site.k // 32, 16), np.uint8)
    scales = np.zeros(site.n * site.k // 32, np.float32)
    zero = np.zeros((site.n, site.k // 64), np.uint8)
    quantize_matmul_4bits(
        packed, np.ones((site.k, site.n), np.float32), scales, zero, 32, site.n, site.k, True
    )
    assert stored_bytes(site, held("w4")) == packed.nbytes + scales.nbytes


def test_apply_tags_what_is_there(bert: Program) -> None:
    sites = [s.site for s in linears(bert)]
    after = Quantize().apply(
        bert, plan_with({sites[0]: "w4", "embeddings.word_embeddings": "int8", "not.there": "bf16"})
    )
    assert names(after.tags) == {sites[0]: "w4", "embeddings.word_embeddings": "int8"}
    assert not bert.tags


def test_options_are_checked() -> None:
    with pytest.raises(UnknownNameError, match="int8_dynamic"):
        Quantize(options=("int8_dynamc",))
    with pytest.raises(UsageError, match="16, 32"):
        Quantize(group_size=33)
