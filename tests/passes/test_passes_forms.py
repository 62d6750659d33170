"""attention, fuse and logits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from form_names import form, names
from pass_helpers import by_work, context, outputs, plan_with, split

from effcompile.core.goal import Goal
from effcompile.ir.export import reexport
from effcompile.ir.program import Program
from effcompile.machine.target import KernelCall
from effcompile.passes.attention import Attention
from effcompile.passes.last_token_logits import Logits
from effcompile.passes.norm_gelu_fusion import Fuse
from effcompile.report.reasons import words
from effcompile.sites.attention.normalise import EAGER
from effcompile.sites.parts import attentions, gelus, linears

LAST = Goal(max_error=0.05, reads="last")


def test_attention_offers_the_forms_that_exist_and_pay(bert: Program) -> None:
    def price(call: KernelCall) -> float | None:
        return {"attention/sdpa": 2e-3, "attention/packed": 1e-3}.get(call.kernel)

    choices, declined = split(Attention(int8=False).propose(bert, context(price, goal=Goal())))
    assert [s.site for s in attentions(bert)] == list(choices)
    assert all([o.name for o in c.options] == ["sdpa", "packed"] for c in choices.values())
    assert {words(d.reason) for d in declined} == {
        f"onnxruntime has no attention/{form} kernel here" for form in ("sdpa_fp32", "tiled", "math")
    }
    site = next(iter(choices))
    assert Attention().apply(bert, plan_with({site: "packed"})).tags == {site: form("packed")}


def test_one_node_stays_one_where_the_backend_has_no_separate_kernels(bert: Program) -> None:
    """ONNX Runtime was told `math` of an eager model, for the price of the parts, and held SDPA."""
    eager = bert.editable("eager")
    for found in attentions(eager):
        found.node.meta[EAGER] = True

    def price(call: KernelCall) -> float | None:
        return {"attention/sdpa": 2e-3, "matmul/fp32": 1e-5, "softmax/fp32": 1e-5}.get(call.kernel)

    choices, _ = split(Attention(int8=False).propose(eager, context(price, goal=Goal())))
    assert choices and all([o.name for o in c.options] == ["sdpa"] for c in choices.values())


def test_int8_attention_needs_error_its_measurement_and_int8_projections(bert: Program) -> None:
    def price(call: KernelCall) -> float | None:
        return {"attention/sdpa": 2e-3, "attention/sdpa_int8": 1e-3}.get(call.kernel)

    found = attentions(bert)
    exact, refused = split(Attention(int8=True).propose(bert, context(price, goal=Goal())))
    assert all([o.name for o in c.options] == ["sdpa"] for c in exact.values())
    assert "goal allows no error (max_error = 0)" in {
        words(d.reason) for d in refused if d.option == "sdpa_int8"
    }
    _, refused = split(Attention(int8=True).propose(bert, context(price, sensitivity={})))
    assert {words(d.reason) for d in refused if d.option == "sdpa_int8"} == {
        "its error at the output was not measured"
    }
    errors = {(site.site, "sdpa_int8"): 1e-6 for site in found}
    choices, _ = split(Attention(int8=True).propose(bert, context(price, sensitivity=errors)))
    for site in found:
        option = choices[site.site].option("sdpa_int8")
        assert option.cost.error_squared == 1e-6
        layer = site.site.partition(":")[0]
        assert option.requires == {f"{layer}.query": ("int8_static",), f"{layer}.key": ("int8_static",)}


def test_attention_of_ours_is_taken_where_it_was_measured_to_be_faster(bert: Program) -> None:
    prices = {"attention/sdpa": 2e-3, "attention/sdpa_fp32": 1e-3}
    exact = Goal()
    choices, _ = split(Attention().propose(bert, context(lambda call: prices.get(call.kernel), goal=exact)))
    assert all([o.name for o in c.options] == ["sdpa", "sdpa_fp32"] for c in choices.values())
    assert all(c.option("sdpa_fp32").cost.error_squared == 0 for c in choices.values())
    slower = {**prices, "attention/sdpa_fp32": 3e-3}
    _, refused = split(Attention().propose(bert, context(lambda call: slower.get(call.kernel), goal=exact)))
    assert {words(d.reason) for d in refused if d.option == "sdpa_fp32"} == {
        "not faster: 3.00 ms against 2.00 ms (sdpa)"
    }
    training = Goal(mode="training")
    for of, goal in ((Attention(fp32=False), exact), (Attention(), training)):
        choices, refused = split(of.propose(bert, context(lambda call: prices.get(call.kernel), goal=goal)))
        assert "sdpa_fp32" not in {o.name for c in choices.values() for o in c.options}
        assert "sdpa_fp32" not in {d.option for d in refused}


@pytest.mark.parametrize("word", ["sdpa_bf16", "sdpa_int8_token"])
def test_narrower_attention_needs_error_and_its_measurement(bert: Program, word: str) -> None:
    def price(call: KernelCall) -> float | None:
        return {"attention/sdpa": 2e-3, f"attention/{word}": 1e-3}.get(call.kernel)

    found = attentions(bert)
    exact, refused = split(Attention().propose(bert, context(price, goal=Goal())))
    assert all([o.name for o in c.options] == ["sdpa"] for c in exact.values())
    assert word not in {d.option for d in refused}
    _, refused = split(Attention().propose(bert, context(price, sensitivity={})))
    assert {words(d.reason) for d in refused if d.option == word} == {
        "its error at the output was not measured"
    }
    errors = {(site.site, word): 1e-7 for site in found}
    choices, _ = split(Attention().propose(bert, context(price, sensitivity=errors)))
    assert all(choices[site.site].option(word).cost.error_squared == 1e-7 for site in found)
    slower = context(lambda call: 3e-3 if word in call.kernel else 1e-3, sensitivity=errors)
    _, refused = split(Attention().propose(bert, slower))
    assert {words(d.reason) for d in refused if d.option == word} == {
        "not faster: 3.00 ms against 1.00 ms (sdpa)"
    }


def with_turned_query(program: Program) -> Program:
    """A copy in which q of the first attention is negated right before it."""
    edited = program.editable("test")
    node = attentions(edited)[0].node
    with edited.graph.inserting_before(node):
        turned = edited.graph.call_function(torch.ops.aten.neg.default, (node.args[0],))
    turned.meta = dict(node.args[0].meta)
    node.update_arg(0, turned)
    return edited


def test_int8_attention_is_not_offered_where_q_is_no_linears_result(bert: Program) -> None:
    edited = with_turned_query(bert)
    _, declined = split(Attention(int8=True).propose(edited, context(lambda call: 1e-3)))
    assert "q or k is not a linear's result as it stands" in {
        words(d.reason) for d in declined if d.option == "sdpa_int8"
    }


def test_attention_is_not_packed_where_heads_are_not_split_before_it(bert: Program) -> None:
    edited = with_turned_query(bert)
    _, declined = split(Attention().propose(edited, context(lambda call: 1e-3)))
    assert [words(d.reason) for d in declined if d.option == "packed"] == [
        "the heads of q are not split right before it, so packing would add a transpose"
    ]


def test_a_slower_fusion_is_declined_with_both_figures(bert: Program) -> None:
    def price(call: KernelCall) -> float:
        return {"add_norm/split": 1e-4, "add_norm/fused": 5e-4}.get(call.kernel, 1e-3)

    choices, declined = split(Fuse(gelu=False).propose(bert, context(price)))
    assert {tuple(o.name for o in c.options) for c in choices.values()} == {("split",)}
    assert {words(d.reason) for d in declined} == {"not faster: 500 µs against 100 µs (split)"}


def test_tanh_needs_a_goal_with_error_and_a_measured_one(bert: Program) -> None:
    choices, declined = split(Fuse(norms=False).propose(bert, context(goal=Goal())))
    assert {o.name for c in choices.values() for o in c.options} == {"erf"}
    assert [words(d.reason) for d in declined] == ["goal allows no error (max_error = 0)"]
    _, declined = split(Fuse(norms=False).propose(bert, context(lambda call: 1e-3, sensitivity={})))
    assert {words(d.reason) for d in declined} == {"its error at the output was not measured"}


def test_tanh_rewrites_the_graph_of_a_copy(bert: Program) -> None:
    first, second = [g.site for g in gelus(bert)]
    after = Fuse().apply(
        bert, plan_with({first: "tanh", second: "erf", "encoder.layer.0.output.LayerNorm:add_norm": "fused"})
    )
    assert [g.site for g in gelus(after)] == [second] and len(gelus(bert)) == 2
    assert names(after.tags) == {
        first: "tanh",
        second: "erf",
        "encoder.layer.0.output.LayerNorm:add_norm": "fused",
    }
    moved = (outputs(after)[0] - outputs(bert)[0]).norm() / outputs(bert)[0].norm()
    assert 0 < moved < 1e-3


def test_logits_are_all_kept_unless_only_the_last_is_read(gpt2: Program, bert: Program) -> None:
    assert list(Logits().propose(gpt2, context())) == []
    assert list(Logits().propose(bert, context(goal=LAST))) == []


def test_last_is_priced_by_the_rows_it_computes(gpt2: Program) -> None:
    choices, _ = split(Logits().propose(gpt2, context(goal=LAST)))
    option = choices["lm_head:rows"].option("last@int8_dynamic")
    m, k, n = next(s.dims for s in linears(gpt2) if s.site == "lm_head")
    spent = [by_work(KernelCall("linear/int8_dynamic", (rows, k, n))) for rows in (2, m)]
    assert option.cost.seconds == pytest.approx(spent[0] - spent[1]) and option.requires == {
        "lm_head": ("int8_dynamic",)
    }
    exact, _ = split(Logits().propose(gpt2, context(goal=Goal(reads="last"))))
    assert [o.name for o in exact["lm_head:rows"].options] == ["all", "last"]


def test_last_computes_the_last_row_only(gpt2: Program) -> None:
    after = Logits().apply(gpt2, plan_with({"lm_head:rows": "last@w8"}))
    after.graph.lint()
    (full,), (last,) = outputs(gpt2), outputs(after)
    assert last.shape == (2, 1, 100)
    torch.testing.assert_close(last, full[:, -1:], rtol=1e-6, atol=1e-6)
    assert after.outputs[0].shape[1:] == (1, 100) and gpt2.outputs[0].shape[1] != 1
    assert next(s for s in linears(after) if s.site == "lm_head").m == 2
    assert names(after.tags) == {"lm_head:rows": "last@w8"}
    ids = torch.randint(0, 100, (3, 9))
    other = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    again = torch.utils._pytree.tree_leaves(reexport(after).module()(**other))
    torch.testing.assert_close(again[0], outputs(gpt2, **other)[0][:, -1:], rtol=1e-5, atol=1e-6)


def test_a_plan_without_logits_leaves_the_program(gpt2: Program) -> None:
    assert Logits().apply(gpt2, plan_with({})) == replace(gpt2, history=("logits",))
