from __future__ import annotations

import pytest
import torch
from form_names import form, names
from hypothesis import given, settings
from hypothesis import strategies as st
from pass_helpers import Block, by_work, context, outputs, plan_with, split
from torch import nn

from effcompile.backends import BACKENDS
from effcompile.capture.inference import capture
from effcompile.core.goal import Goal
from effcompile.ir.export import reexport
from effcompile.ir.program import Program
from effcompile.machine.target import KernelCall
from effcompile.passes.merge import VIEW_SPLITS, Merge
from effcompile.report.reasons import words
from effcompile.sites.parts import linears, merges


def merged(program: Program, precision: str = "int8_dynamic") -> Program:
    chosen = {site.site: f"merged@{precision}" for site in merges(program)}
    chosen |= {m.site: precision for site in merges(program) for m in site.members}
    return Merge().apply(program, plan_with(chosen))


@pytest.mark.parametrize("name", ["block", "bert"])
def test_a_merge_changes_nothing_but_the_graph(name: str, request: pytest.FixtureRequest) -> None:
    program = request.getfixturevalue(name)
    before, keys = outputs(program), sorted(dict(program.module.named_parameters()))
    found = merges(program)
    assert found
    after = merged(program)
    after.graph.lint()
    for y, z in zip(before, outputs(after), strict=True):
        torch.testing.assert_close(z, y, rtol=1e-6, atol=1e-6)
    there = {site.site for site in linears(after)}
    for site in found:
        assert site.merged_site in there
        assert after.tags[site.merged_site] == form("int8_dynamic") and after.tags[site.site] == form(
            "merged@int8_dynamic"
        )
        assert not there & {m.site for m in site.members}
        assert not any(
            key.startswith(m.site + ".")
            for m in site.members
            for key in dict(after.module.named_parameters())
        )
    assert sorted(dict(program.module.named_parameters())) == keys
    assert all(torch.equal(a, b) for a, b in zip(before, outputs(program), strict=True))


def test_a_merged_program_exports_again_with_its_dynamic_axes(bert: Program) -> None:
    after = merged(bert)
    again = reexport(after).module()
    other = {
        "input_ids": torch.randint(0, 100, (3, 11)),
        "attention_mask": torch.ones(3, 11, dtype=torch.long),
    }
    other["attention_mask"][0, :4] = 0
    with torch.no_grad():
        got = torch.utils._pytree.tree_leaves(again(**other))
    for y, z in zip(outputs(bert, **other), got, strict=True):
        torch.testing.assert_close(z, y, rtol=1e-5, atol=1e-6)


def test_transposed_weights_are_stacked_along_their_columns() -> None:
    class Conv(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.randn(8, 4)), nn.Parameter(torch.randn(8, 6))
            self.bias = nn.Parameter(torch.randn(6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cat([torch.mm(x, self.a), torch.addmm(self.bias, x, self.b)], dim=1)

    program = capture(Conv().eval(), (torch.randn(3, 8),))
    after = merged(program)
    assert [site.dims for site in linears(after)] == [(3, 8, 10)]
    torch.testing.assert_close(outputs(after)[0], outputs(program)[0], rtol=1e-6, atol=1e-6)


class Chained(nn.Module):
    """Two linears of one input, one of which two others read (a decoder of boxes, layer by layer)."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = self.a(x)
        return torch.cat([self.b(x), self.c(a), self.d(a)], dim=-1)


class Turned(nn.Module):
    """A view of what is turned twice, which it is of a linear's own result alone (Longformer)."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, batch, _ = x.shape
        a, b = (y.view(rows, batch, 2, 4).permute(1, 2, 0, 3) for y in (self.a(x), self.b(x)))
        return a.reshape(2 * batch, rows, 4) @ b.reshape(2 * batch, rows, 4).mT


@pytest.mark.parametrize("model", [Chained(), Turned()])
def test_merges_of_merges_and_views_of_views(model: nn.Module) -> None:
    program = capture(model.eval(), (torch.randn(3, 2, 8),), dynamic=False)
    after = merged(program)
    assert len(linears(after)) == len(linears(program)) // 2
    torch.testing.assert_close(outputs(after)[0], outputs(program)[0], rtol=1e-5, atol=1e-6)


@settings(max_examples=5, deadline=None)
@given(widths=st.tuples(*[st.integers(1, 20)] * 3), rows=st.integers(2, 6))
def test_any_widths_merge(widths: tuple[int, int, int], rows: int) -> None:
    program = capture(Block(k=8, widths=widths).eval(), (torch.randn(2, rows, 8),))
    torch.testing.assert_close(outputs(merged(program))[0], outputs(program)[0], rtol=1e-5, atol=1e-6)


def test_separate_leaves_the_graph(block: Program) -> None:
    site = merges(block)[0]
    after = Merge().apply(block, plan_with({site.site: "separate"}))
    assert [s.site for s in linears(after)] == [s.site for s in linears(block)]
    assert names(after.tags)[site.site] == "separate" and after.history == ("merge",)


def test_each_precision_is_priced_and_required_of_all_members(block: Program) -> None:
    choices, _ = split(Merge().propose(block, context()))
    choice = choices[merges(block)[0].site]
    option = choice.option("merged@int8_dynamic")
    assert option.requires == {"q": ("int8_dynamic",), "k": ("int8_dynamic",), "v": ("int8_dynamic",)}
    members = [by_work(KernelCall("linear/int8_dynamic", m.dims)) for m in merges(block)[0].members]
    expected = (
        by_work(KernelCall("linear/int8_dynamic", (10, 32, 56)))
        + by_work(KernelCall("pointwise/fp32", (560,)))
        - sum(members)
    )
    assert option.cost.seconds == pytest.approx(expected)
    assert option.cost.weight_bytes == 4 * 32  # zeros for the bias that k lacks


@pytest.mark.parametrize("backend", ["torch-eager", "torch-inductor", "onnxruntime", "openvino"])
def test_a_split_costs_a_copy_where_it_is_no_view(block: Program, backend: str) -> None:
    assert backend in BACKENDS and set(BACKENDS) >= VIEW_SPLITS
    site = merges(block)[0]
    choices, _ = split(Merge().propose(block, context(backend=backend)))
    copy = 0.0 if backend.startswith("torch") else by_work(KernelCall("pointwise/fp32", (560,)))
    apart = sum(by_work(KernelCall("linear/fp32", m.dims)) for m in site.members)
    wanted = by_work(KernelCall("linear/fp32", (10, 32, 56))) + copy - apart
    assert choices[site.site].option("merged").cost.seconds == pytest.approx(wanted)


def test_one_call_that_codes_x_is_never_dearer_than_several(block: Program) -> None:
    def noisy(call: KernelCall) -> float:
        wide = call.kernel.startswith("linear/") and call.dims[2] == 56
        return 2.0 if wide else 1e-3 if call.kernel.startswith("linear/") else 1e-5

    choices, _ = split(Merge().propose(block, context(noisy, backend="torch-eager")))
    options = {option.name: option.cost.seconds for option in choices[":merge"].options}
    assert options["merged@int8_token"] == pytest.approx(-2e-5) and options["merged@int8_channel"] > 1


def test_a_coding_timed_as_longer_than_the_linears_saves_no_more_than_they_take(block: Program) -> None:
    """A plan of less than no seconds was saved, and refused when it was opened."""
    given = context(
        lambda call: 1.0 if call.kernel == "pointwise/fp32" else by_work(call), backend="torch-eager"
    )
    found = split(Merge().propose(block, given))[0][":merge"].options
    costs = {option.name: option.cost.seconds for option in found if option.name != "separate"}
    (site,) = merges(block)
    for name, seconds in costs.items():
        family = name.removeprefix("merged").removeprefix("@") or "fp32"
        members = [by_work(KernelCall(f"linear/{family}", m.dims)) for m in site.members]
        assert sum(members) + seconds >= max(members) - 1e-12, name


def test_an_exact_goal_merges_in_fp32_only_and_a_missing_kernel_is_declined(block: Program) -> None:
    exact, declined = split(Merge().propose(block, context(goal=Goal())))
    assert [o.name for o in exact[":merge"].options] == ["separate", "merged"] and not declined
    choices, declined = split(
        Merge().propose(block, context(lambda call: None if "bf16" in call.kernel else 1e-3))
    )
    assert "merged@bf16" not in [o.name for o in choices[":merge"].options]
    assert [words(d.reason) for d in declined] == ["onnxruntime has no linear/bf16 kernel here"]
