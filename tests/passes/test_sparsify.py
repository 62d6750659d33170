"""Sparse forms of linears: found in the zeros of a model, or pruned; priced, applied, lowered and run from
disk.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from form_names import form, forms, names
from hypothesis import given, settings
from hypothesis import strategies as st
from pass_helpers import LOOSE, context, outputs, plan_with, split
from torch import nn

from effcompile.backends.base import Lowered
from effcompile.backends.torch import TorchEager, TorchInductor, load
from effcompile.capture.inference import capture
from effcompile.core.cost import Provenance
from effcompile.core.errors import FormatError, LoweringError, UnknownNameError, UsageError
from effcompile.core.goal import Goal
from effcompile.estimate import sensitivity
from effcompile.estimate.nodes import kernel_calls
from effcompile.ir.formats import sparse_format
from effcompile.ir.program import Program
from effcompile.machine.target import KernelCall, Target
from effcompile.ops.block_sparse import fallback_reason
from effcompile.passes import propose_all, sparsify
from effcompile.passes.base import Context, Option
from effcompile.passes.quantize import Quantize
from effcompile.passes.sparse_forms import given_forms
from effcompile.passes.sparsify import Sparsify
from effcompile.passes.weight_saliency import SaliencyScores
from effcompile.report.reasons import words
from effcompile.sites.parts import linears
from effcompile.sparse import BlockPattern, BlockSparseLinear
from effcompile.sparse.forms import pattern_format, stored_bytes

UP, DOWN, HEAD = "layers.0.up", "layers.0.down", "head"


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.head = nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def model(masks: Mapping[str, torch.Tensor] | None = None) -> nn.Module:
    torch.manual_seed(0)
    made = Model().eval()
    with torch.no_grad():
        for site, mask in (masks or {}).items():
            made.get_parameter(f"{site}.weight").mul_(mask)
    return made


def program_of(made: nn.Module) -> Program:
    return capture(made, (torch.randn(3, 5, 32, generator=torch.Generator().manual_seed(1)),))


@pytest.fixture(scope="module")
def dense() -> Program:
    return program_of(model())


@pytest.fixture(scope="module")
def masks() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    return {
        UP: BlockPattern.random(64, 32, 8, 0.75, generator).mask(),
        DOWN: BlockPattern.random(32, 64, 4, 0.75, generator).mask(),
    }


def by_flops(call: KernelCall) -> float:
    """Sparse products two and a half times as slow per FLOP as dense ones."""
    return call.flops * (2.5e-11 if call.kernel == "linear/sparse" else 1e-11)


def options(
    program: Program, made: Sparsify, ctx: Context
) -> tuple[dict[str, dict[str, Option]], dict[tuple[str, str], str]]:
    choices, declined = split(made.propose(program, ctx))
    return {site: {o.name: o for o in c.options} for site, c in choices.items()}, {
        (d.site, d.option): words(d.reason) for d in declined
    }


# ---------------------------------------------------------------- found zeros


def test_zeros_are_offered_exactly_with_their_blocks_time_and_bytes(masks: dict[str, torch.Tensor]) -> None:
    found, _ = options(program_of(model(masks)), Sparsify(), context(by_flops, goal=Goal(), sensitivity={}))
    assert set(found) == {UP, DOWN}
    option = found[UP]["sparse8@0.75"]
    assert option.cost.error_squared == 0 and option.cost.provenance is Provenance.MEASURED
    assert option.cost.seconds == pytest.approx(by_flops(KernelCall("linear/sparse", (15, 32, 64, 8, 8))))
    assert option.cost.weight_bytes == 8 * 64 * 4 + 4 * (9 + 5 + 3 * 8) == stored_bytes(8, 8, 64, 32)
    assert found[UP]["fp32"].cost.weight_bytes == 4 * 64 * 32
    assert "eps = time per sparse FLOP / time per dense FLOP = 2.5, break-even 4.0" in words(option.note)
    # the same entries in smaller pieces
    assert "sparse4@0.75" in found[DOWN] and not {"unstructured@0.75"} & set(found[DOWN])


def test_a_dense_model_gets_nothing_unless_asked_for(dense: Program) -> None:
    assert list(Sparsify().propose(dense, context(by_flops))) == []


def test_two_of_four_is_known_by_its_pattern() -> None:
    mask = torch.tensor([[1, 0, 1, 0], [0, 1, 1, 0]]).repeat(32, 8)
    assert [
        form.format.name for form in given_forms(model({UP: mask}).get_parameter(f"{UP}.weight").detach())
    ] == ["2:4"]


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_a_given_form_keeps_every_entry_and_is_named_as_it_is_found(data: st.DataObject) -> None:
    block, rows, cols = (
        data.draw(st.sampled_from(values)) for values in ((1, 4, 8, 16), (1, 2, 3), (1, 2, 5))
    )
    grid = torch.tensor(
        data.draw(st.lists(st.booleans(), min_size=rows * cols * 16, max_size=rows * cols * 16))
    ).view(4 * rows, 4 * cols)
    weight = torch.rand(4 * rows * block, 4 * cols * block) + 0.5
    weight *= grid.repeat_interleave(block, 0).repeat_interleave(block, 1)
    for each in given_forms(weight):
        pattern, values = BlockPattern.from_dense(weight, each.block)
        assert torch.equal(pattern.to_dense(values), weight) and torch.equal(each.mask(), pattern.blocks())
        assert each.format == pattern_format(pattern.blocks(), each.block) and each.format.block == each.block
        assert each.kept == pattern.nnz and stored_bytes(each.kept, each.block, *weight.shape) == sum(
            tensor.nbytes for tensor in (values, *pattern.indices)
        )


def test_names() -> None:
    assert [sparse_format(1, 10, b).name for b in (1, 16)] == ["unstructured@0.90", "sparse16@0.90"]
    assert sparse_format(1, 1000, 4).name == "sparse4@0.9990"


# ---------------------------------------------------------------- pruning


def test_pruning_competes_in_the_choice_of_a_linear_inside_a_block(dense: Program) -> None:
    made = Sparsify(sparsity=(0.75,))
    errors = dict.fromkeys(made.replaced_weights(dense), 1e-06) | {
        (s.site, "bf16"): 1e-6 for s in linears(dense)
    }
    choices, declined = propose_all(
        (Quantize(options=("bf16",)), made), dense, context(by_flops, sensitivity=errors)
    )
    names = {c.site: [o.name for o in c.options] for c in choices}
    sparse = [f"{head}@0.75" for head in ("unstructured", "sparse4", "sparse8", "sparse16")]
    assert names[UP][0] == "fp32" and set(sparse) < set(names[UP]) and names[HEAD] == ["fp32", "bf16"]
    assert {d.option: words(d.reason) for d in declined if d.site == UP}["2:4"] == (
        "no gain here: eps = time per sparse FLOP / time per dense FLOP = 2.5, break-even 2.0"
    )


def test_an_exact_goal_refuses_pruning_once(dense: Program) -> None:
    found, declined = options(dense, Sparsify(sparsity=(0.5,), block=8), context(by_flops, goal=Goal()))
    assert not found and declined == {("", "sparse8@0.50"): "goal allows no error (max_error = 0)"}


def test_what_is_slower_but_smaller_is_offered_where_memory_counts(masks: dict[str, torch.Tensor]) -> None:
    program = program_of(model(masks))
    slow = lambda call: 1.0 if call.kernel == "linear/sparse" else 1e-6  # noqa: E731
    assert not options(program, Sparsify(), context(slow, goal=Goal()))[0]
    assert "sparse8@0.75" in options(program, Sparsify(), context(slow, goal=Goal(minimize="memory")))[0][UP]


@pytest.mark.parametrize("saliency", ["magnitude", "wanda"])
def test_measured_errors_are_those_of_the_pruned_model(dense: Program, saliency: str) -> None:
    """Against running the model with the pruned weight.

    The head is linear, so that first order is all there is.
    """
    made = Sparsify(sparsity=(0.5,), block=4, saliency=saliency, sites=(HEAD,))
    weights = made.replaced_weights(dense)
    measured = sensitivity.measure(dense, [(dense.args, {})], {}, weights=weights, probes=64)
    (reference,) = outputs(dense)
    assert list(weights) == [(HEAD, "sparse4@0.50"), (HEAD, "sparse4@0.50+int8")]
    after = made.apply(dense, plan_with({HEAD: "sparse4@0.50"}))
    (found,) = outputs(after)
    assert measured.errors[HEAD, "sparse4@0.50"] == pytest.approx(
        float(((found - reference).norm() / reference.norm()) ** 2), rel=0.3
    )


def test_wanda_weighs_inputs() -> None:
    whole = model()
    with torch.no_grad():
        whole.head.weight.fill_(1.0)
        whole.head.weight[:, 16:] = 0.5
        whole.layers = nn.ModuleList()
    x = torch.ones(1, 2, 32)
    x[..., 16:] = 10.0
    program = capture(whole, (x,))
    for saliency, kept in (("magnitude", slice(0, 16)), ("wanda", slice(16, 32))):
        made = Sparsify(sparsity=(0.5,), block=8, saliency=saliency, sites=(HEAD,))
        weight = made.replaced_weights(program)[HEAD, "sparse8@0.50"]
        expected = torch.zeros(8, 32)
        expected[:, kept] = whole.head.weight.detach()[:, kept]
        assert torch.equal(weight(), expected)


def test_a_given_mask_prunes_what_it_leaves_out(
    dense: Program, masks: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    torch.save(masks, tmp_path / "masks.pt")
    made = Sparsify(saliency="given", masks=str(tmp_path / "masks.pt"), block=4)
    weights = made.replaced_weights(dense)
    assert {site for site, _ in weights} == {UP, DOWN}
    for (site, option), weight in weights.items():
        coded = option.endswith("+int8")
        assert not (weight()[~masks[site]]).any()
        assert coded or torch.equal(
            weight(), dense.module.get_parameter(f"{site}.weight").detach() * masks[site]
        )


# ------------------------------------------- models without data, and with block-sparse layers of their own


def test_a_model_without_data_has_no_zeros_but_can_be_pruned() -> None:
    program = capture(Model().eval().to("meta"), (torch.randn(3, 5, 32, device="meta"),))
    assert list(Sparsify().propose(program, context(by_flops))) == []
    found, _ = options(program, Sparsify(sparsity=(0.75,), block=8), context(by_flops))
    assert set(found) == {f"layers.{i}.{leaf}" for i in (0, 1) for leaf in ("up", "down")}


def test_a_block_sparse_layer_is_priced_by_its_blocks(masks: dict[str, torch.Tensor]) -> None:
    made = model(masks)
    made.layers[0].up = BlockSparseLinear.from_linear(made.layers[0].up, BlockPattern.from_mask(masks[UP], 8))
    calls = [call for found in kernel_calls(program_of(made)).values() for call in found]
    assert (
        KernelCall("linear/sparse", (15, 32, 64, 8, 8)) in calls
        and KernelCall("linear/fp32", (15, 32, 64)) in calls
    )


# ---------------------------------------------------------------- what is refused


def test_bad_settings_say_what_is_allowed(dense: Program, tmp_path: Path) -> None:
    for settings_, error, match in (
        ({"sparsity": (1.0,)}, UsageError, r"in \[0, 1\)"),
        ({"sparsity": (-0.1,)}, UsageError, r"in \[0, 1\)"),
        ({"block": 3}, UsageError, "1, 4, 8, 16, 32, 64"),
        ({"saliency": "wnda"}, UnknownNameError, "Did you mean 'wanda'"),
        ({"saliency": "given"}, UsageError, "masks"),
        ({"masks": "x.pt"}, UsageError, "saliency=given"),
    ):
        with pytest.raises(error, match=match):
            Sparsify(**settings_)
    with pytest.raises(UnknownNameError, match="linear site"):
        list(Sparsify(sparsity=(0.5,), sites=("nowhere.*",)).propose(dense, context(by_flops)))
    with pytest.raises(UsageError, match="There is no"):
        list(Sparsify(saliency="given", masks=str(tmp_path / "none.pt")).propose(dense, context(by_flops)))
    (tmp_path / "text.pt").write_text("no masks")
    with pytest.raises(FormatError, match="holds no masks"):
        list(Sparsify(saliency="given", masks=str(tmp_path / "text.pt")).propose(dense, context(by_flops)))
    torch.save({UP: torch.ones(3, 3)}, tmp_path / "other.pt")
    with pytest.raises(UsageError, match="mask for another model"):
        list(Sparsify(saliency="given", masks=str(tmp_path / "other.pt")).propose(dense, context(by_flops)))


def test_refusals_name_their_reason(dense: Program) -> None:
    _, declined = options(dense, Sparsify(sparsity=(0.5,), block=64), context(by_flops))
    assert "nearest first: 32" in declined[UP, "sparse64"]
    half = Sparsify(sparsity=(0.7,), block=8)
    _, declined = options(dense, half, context(lambda call: None if call.kernel == "linear/sparse" else 1.0))
    assert declined[UP, "sparse8@0.69"].startswith("onnxruntime has no linear/sparse kernel here")
    _, declined = options(dense, half, context(by_flops, sensitivity={}))
    assert declined[UP, "sparse8@0.69"] == "its error at the output was not measured"
    modelled = Target(
        name="t", description="", device="cpu", cores=1, memory_bytes=1, memory_bandwidth=1e10,
        link_bandwidth=1e10, peak_flops={"fp32": 1e11},
    )  # fmt: skip
    _, declined = options(dense, half, Context(goal=LOOSE, target=modelled, backend="b", sensitivity={}))
    assert "not modelled" in declined[UP, "sparse8@0.69"]


def test_without_kernels_it_says_what_is_lacking_or_who_has_them(
    dense: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    half = Sparsify(sparsity=(0.5,), block=8)
    none = lambda call: None if call.kernel == "linear/sparse" else 1.0  # noqa: E731
    monkeypatch.setattr(sparsify, "fallback_reason", lambda x, block: None)
    _, declined = options(dense, half, context(none, backend="openvino"))
    assert (
        declined[UP, "sparse8@0.50"]
        == "openvino has no linear/sparse kernel here; torch and onnxruntime have"
    )
    failing = context(none)
    failing = replace(
        failing,
        target=replace(failing.target, failure=lambda backend, call: f"{backend} is too old for {call}"),
    )
    _, declined = options(dense, half, failing)
    assert declined[UP, "sparse8@0.50"] == (
        "onnxruntime has no linear/sparse kernel here: onnxruntime is too old for linear/sparse 15×32×64×16×8"
    )
    monkeypatch.setattr(
        sparsify, "fallback_reason", lambda x, block: "no C++ compiler: c++ is not on the PATH"
    )
    _, declined = options(dense, half, context(none, backend="torch-eager"))
    assert (
        declined[UP, "sparse8@0.50"]
        == "torch-eager has no linear/sparse kernel here: no C++ compiler: c++ is not on the PATH"
    )


def test_eps_is_told_over_this_backends_dense_product_and_over_the_plain_one(
    masks: dict[str, torch.Tensor],
) -> None:
    def price(backend: str, call: KernelCall) -> float:
        return by_flops(call) * (2 if backend == "torch" else 1)  # not packed, it takes twice as long

    target = replace(context().target, probe=price)
    found, _ = options(
        program_of(model(masks)), Sparsify(), Context(goal=Goal(), target=target, backend="torch-eager")
    )
    assert "= 2.5 (1.2 over F.linear), break-even 4.0" in words(found[UP]["sparse8@0.75"].note)


def test_empty_rows_are_served(masks: dict[str, torch.Tensor]) -> None:
    mask = masks[UP].clone()
    mask[16:40] = 0
    made = model({UP: mask})
    (option,) = (
        form.format.name
        for form in given_forms(made.get_parameter(f"{UP}.weight").detach())
        if form.block == 8
    )
    x = torch.randn(3, 5, 32)
    with torch.no_grad():
        torch.testing.assert_close(_lowered(made, {UP: option})(x)[0], made(x), rtol=1e-4, atol=1e-5)


def test_several_shares_compete_in_one_choice(dense: Program) -> None:
    found, _ = options(dense, Sparsify(sparsity=(0.75, 0.9), block=8), context(by_flops))
    assert list(found[UP]) == ["fp32", "sparse8@0.75", "sparse8@0.91"]


def test_blocks_in_bytes_are_an_option_of_torchs_engines(dense: Program) -> None:
    """Their error is that of pruned weights in bytes, and what is built is read off the operator."""
    made = Sparsify(sparsity=(0.75,), block=8)
    here = replace(
        context(lambda call: 1e-9 if call.kernel == "linear/sparse_int8" else 1e-3), backend="torch-eager"
    )
    measured = {(UP, "sparse8@0.75"): 1e-4, (UP, "sparse8@0.75+int8"): 2e-4}
    found, _ = options(dense, made, replace(here, sensitivity=measured))
    option, dense_form = found[UP]["sparse8@0.75+int8"], found[UP]["fp32"]
    assert option.cost.error_squared == 2e-4 and option.cost.weight_bytes < dense_form.cost.weight_bytes / 4
    plan, x = plan_with({UP: "sparse8@0.75+int8"}), torch.randn(3, 5, 32)
    lowered = TorchEager().lower(made.apply(dense, plan), plan, [])
    assert lowered.applied[UP] == option.form and "sparse int8 linears" in lowered.settings
    assert lowered(x)[0].isfinite().all()
    elsewhere = replace(here, backend="onnxruntime", sensitivity=measured)
    assert not any("+int8" in name for name in options(dense, made, elsewhere)[0].get(UP, {}))


def test_bytes_of_more_blocks_than_were_planned_are_not_found(dense: Program) -> None:
    """What the operator says is held against what it holds: this weight was not pruned."""
    plan = plan_with({UP: "sparse8@0.75+int8"})
    lowered = TorchEager().lower(dense.tagged(plan.forms(), "test"), plan, [])
    assert UP not in lowered.applied and HEAD in lowered.applied


def test_snip_scores_are_taken_for_blocks_too(dense: Program) -> None:
    made = Sparsify(sparsity=(0.5,), block=8, saliency="snip", sites=(HEAD,))
    weight = made.replaced_weights(dense)[HEAD, "sparse8@0.50"]
    head = next(site for site in linears(dense) if site.site == HEAD)
    scores = SaliencyScores(dense, "snip", [head]).of(head).view(1, 8, 4, 8).sum((1, 3)).flatten()
    kept = weight().view(8, 4, 8).abs().sum((0, 2)) > 0
    assert set(kept.nonzero().flatten().tolist()) == set(scores.topk(2).indices.tolist())


def test_tied_and_narrow_weights_are_refused(masks: dict[str, torch.Tensor]) -> None:
    made = model(masks)
    made.layers[1].up.weight = made.layers[0].up.weight
    found, declined = options(program_of(made), Sparsify(), context(by_flops))
    assert UP not in found and DOWN in found and "tied" in declined[UP, "sparse8@0.75"]
    narrow = capture(model(masks).bfloat16(), (torch.randn(2, 3, 32).bfloat16(),))
    found, declined = options(narrow, Sparsify(), context(by_flops))
    assert not found and "bfloat16" in declined[UP, "sparse8@0.75"]


def test_a_plan_for_other_weights_is_not_applied(dense: Program) -> None:
    with pytest.raises(LoweringError, match="not that sparse"):
        Sparsify().apply(dense, plan_with({UP: "sparse8@0.75"}))


# ---------------------------------------------------------------- applied, lowered, run


def test_apply_changes_exactly_the_planned_weights(dense: Program) -> None:
    before = {name: value.clone() for name, value in dense.module.state_dict().items()}
    after = Sparsify(sparsity=(0.5,), block=8).apply(dense, plan_with({UP: "sparse8@0.50", DOWN: "fp32"}))
    assert names(after.tags) == {UP: "sparse8@0.50"} and [s.site for s in linears(after)] == [
        s.site for s in linears(dense)
    ]
    for old, new in zip(linears(dense), linears(after), strict=True):
        a, b = dense.tensor(old.weight), after.tensor(new.weight)
        assert a is not None and b is not None
        assert torch.equal(b, a) == (old.site != UP)
        assert torch.equal(b[b != 0], a[b != 0])
    assert all(torch.equal(dense.module.state_dict()[name], value) for name, value in before.items())


def _lowered(made: nn.Module, tags: dict[str, str]) -> Lowered:
    return TorchEager().lower(Sparsify().apply(program_of(made), plan_with(tags)), plan_with(tags), [])


def test_the_artifact_has_the_blocks_runs_and_runs_again_from_disk(
    masks: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    made, tags = model(masks), {UP: "sparse8@0.75", DOWN: "sparse4@0.75"}
    lowered = _lowered(made, tags)
    assert {site: lowered.applied[site] for site in tags} == forms(tags) and lowered.applied[HEAD] == form(
        "fp32"
    )
    dense_bytes = sum(p.nbytes for p in made.parameters())
    saved = sum(
        4 * 64 * 32 - stored_bytes(kept, block, *shape)
        for kept, block, shape in ((8, 8, (64, 32)), (32, 4, (32, 64)))
    )
    assert lowered.weight_bytes == dense_bytes - saved
    lowered.save(tmp_path)
    for rows in (5, 9):
        x = torch.randn(3, 5, 32) if rows == 5 else torch.randn(3, 5, 32) * 2
        with torch.no_grad():
            reference = made(x)
        for found in (lowered(x)[0], load(tmp_path / "model.pt2")(x)):
            torch.testing.assert_close(found, reference, rtol=1e-4, atol=1e-5)


def test_what_is_found_is_read_from_the_artifact(masks: dict[str, torch.Tensor]) -> None:
    """The tag says 4, the pass says 8: what stands in the graph is what is reported."""
    program = program_of(model(masks)).tagged(forms({UP: "sparse4@0.75"}), "test")
    assert TorchEager().lower(program, plan_with({}), []).applied[UP] == form("sparse4@0.75")
    wrong = program_of(model(masks)).tagged(forms({UP: "sparse8@0.10"}), "test")
    assert TorchEager().lower(wrong, plan_with({}), []).applied[UP] == form("sparse8@0.75")


def test_transposed_weights_are_pruned_and_lowered() -> None:
    from transformers.pytorch_utils import Conv1D

    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.c = Conv1D(32, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.c(x)

    torch.manual_seed(0)
    program = capture(Turned().eval(), (torch.randn(2, 4, 16),))
    after = Sparsify(sparsity=(0.5,), block=8, sites=("c",)).apply(program, plan_with({"c": "sparse8@0.50"}))
    lowered = TorchEager().lower(after, plan_with({}), [])
    assert lowered.applied["c"] == form("sparse8@0.50")
    torch.testing.assert_close(lowered(*program.args)[0], outputs(after)[0], rtol=1e-4, atol=1e-5)


def test_a_sparse_product_is_timed_where_there_are_kernels() -> None:
    call = KernelCall("linear/sparse", (16, 64, 32, 3, 8))
    kernels = fallback_reason(torch.empty(0), 8) is None
    assert (TorchEager().measure(call) is not None) == kernels
    assert TorchEager().measure(KernelCall("linear/sparse", (16, 64, 32, 3, 7))) is None


@pytest.mark.slow
def test_inductor_keeps_the_blocks_and_its_artifact_opens(
    masks: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    made, tags = model(masks), {UP: "sparse8@0.75", DOWN: "sparse4@0.75"}
    lowered = TorchInductor().lower(Sparsify().apply(program_of(made), plan_with(tags)), plan_with(tags), [])
    assert {site: lowered.applied[site] for site in tags} == forms(tags)
    lowered.save(tmp_path)
    x = torch.randn(3, 5, 32)
    with torch.no_grad():
        reference = made(x)
    for found in (lowered(x)[0], load(tmp_path / "model.pt2")(x)):
        torch.testing.assert_close(found, reference, rtol=1e-4, atol=1e-5)
