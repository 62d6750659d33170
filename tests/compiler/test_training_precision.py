"""Products of a step in 16 bits: what torch.autocast computes, measured against fp32, and fp32 wherever that
is not allowed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from train_helpers import Batch, Results, differing, eager, gpt2, measured

from effcompile.compiler import frontier_training, optimize_training, plan_training
from effcompile.core.errors import FormatError, UnknownNameError, UsageError
from effcompile.core.goal import Goal
from effcompile.ir.plan import Plan
from effcompile.report.reasons import words
from effcompile.search.training.operator_costs import OperatorCosts

pytestmark = pytest.mark.usefixtures("quick_training")
#: What only changes the order of sums left out, so that there is one way to compute what autocast computes.
AS_WRITTEN = ["no-pointwise", "no-loss_head", "no-attention"]
ALWAYS = [*AS_WRITTEN, "precision.always=true"]
FP16 = [*ALWAYS, "precision.dtypes=fp16"]


def llama() -> tuple[nn.Module, Batch]:
    import transformers as hf

    torch.manual_seed(0)
    config = hf.LlamaConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
    )
    ids = torch.randint(1, 96, (4, 32))
    return hf.LlamaForCausalLM(config).train(), {"input_ids": ids, "labels": ids}


def bert() -> tuple[nn.Module, Batch]:
    import transformers as hf

    torch.manual_seed(0)
    config = hf.BertConfig(
        vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, max_position_embeddings=64,
    )  # fmt: skip
    ids = torch.randint(1, 96, (4, 32))
    return hf.BertForMaskedLM(config).train(), {"input_ids": ids, "labels": ids}


class Line(nn.Module):
    """A loss of `factor` times a small network's error, whose gradient at the output may be as large as one
    likes.
    """

    def __init__(self, factor: float = 1.0) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
        self.factor = factor

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.factor * nn.functional.mse_loss(self.net(x).float(), y)


def line(factor: float = 1.0, size: float = 1.0) -> tuple[nn.Module, Batch]:
    torch.manual_seed(0)
    return Line(factor).train(), {"x": size * torch.randn(6, 8), "y": torch.randn(6, 4)}


@pytest.fixture(scope="module")
def made() -> dict[str, tuple[nn.Module, Batch]]:
    return {"gpt2": gpt2(layers=2, dropout=0.0), "llama": llama(), "bert": bert()}


def goal(memory: int | None = None, error: float | None = 0.1) -> Goal:
    return Goal(mode="training", memory=memory, max_error=error)


def under_autocast(model: nn.Module, batch: Batch, dtype: torch.dtype = torch.bfloat16) -> Results:
    def loss() -> torch.Tensor:
        with torch.autocast("cpu", dtype=dtype):
            return loss_of(model(**batch))

    return measured(loss, model, 0)[0]


def loss_of(outputs: Any) -> torch.Tensor:
    return outputs if isinstance(outputs, torch.Tensor) else outputs.loss


def precision(plan: Plan) -> str:
    return next((d.option for d in plan.decisions if d.kind == "precision"), "fp32")


def reasons(plan: Plan) -> dict[str, str]:
    return {d.option: words(d.reason) for d in plan.declined if d.kind == "precision"}


def whole_error(found: Results, wanted: Results) -> float:
    """The relative error of all gradients as one vector."""
    apart = sum(float((found[1][name].double() - g.double()).square().sum()) for name, g in wanted[1].items())
    return float((apart / sum(float(g.double().square().sum()) for g in wanted[1].values())) ** 0.5)


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
def test_loss_and_gradients_are_those_of_autocast_with_their_error_told(made: Any, name: str) -> None:
    model, batch = made[name]
    executable = optimize_training(model, (), batch, goal=goal(), passes=[*ALWAYS, "no-tiled"])
    plan = executable.plan
    assert precision(plan) == "bf16 autocast" and plan.met and plan.predicted.error is None
    assert abs(plan.predicted.peak_bytes - plan.measured.peak_bytes) <= 0.02 * plan.measured.peak_bytes
    found = measured(lambda: loss_of(executable(**batch)), model, 0)[0]
    error = whole_error(found, eager(model, batch))
    if name == "llama":  # traced, HuggingFace's attention is given a mask and repeated heads; run, neither
        assert whole_error(found, under_autocast(model, batch)) < error / 2
    else:
        assert differing(found, under_autocast(model, batch)) == []
    assert {g.dtype for g in found[1].values()} == {torch.float32} == {p.dtype for p in model.parameters()}
    assert plan.measured.error == plan.checks[0].error and 0 < error <= plan.checks[0].error * 1.000001 <= 0.1
    assert "cosine of the whole gradient 0.99" in str(plan.checks[0].note) or "gradient 1.0" in str(
        plan.checks[0].note
    )


def test_products_and_what_is_kept_for_them_are_in_16_bits(made: Any) -> None:
    model, batch = made["gpt2"]
    runner = optimize_training(model, (), batch, goal=goal(), passes=ALWAYS).runner
    products = [
        n
        for n in runner.step.graph.nodes
        if getattr(n.target, "__name__", "") in ("mm.default", "addmm.default")
    ]
    assert len(products) > 20 and {n.meta["val"].dtype for n in products} == {torch.bfloat16}
    casts = [n for n in runner.step.graph.nodes if "_to_copy" in str(n.target)]
    assert len({(n.args[0], str(n.kwargs)) for n in casts}) == len(casts)  # each value once a step
    assert len({n.args[0] for n in casts} & set(runner.step.parameters)) > 10


def test_without_an_allowed_error_all_is_fp32_bit_by_bit(made: Any) -> None:
    model, batch = made["gpt2"]
    for error, passes in ((None, AS_WRITTEN), (0.0, ["precision", *AS_WRITTEN])):
        executable = optimize_training(model, (), batch, goal=goal(error=error), passes=passes)
        assert differing(measured(lambda: executable(**batch).loss, model, 0)[0], eager(model, batch)) == []  # noqa: B023
        assert not [
            d for d in (*executable.plan.decisions, *executable.plan.declined) if d.kind == "precision"
        ]
        assert any("precision is not proposed" in str(note) for note in executable.plan.notes) == (
            error == 0.0
        )
    allowed = plan_training(model, (), batch, goal=goal(), passes=["no-precision"])
    assert precision(allowed) == "fp32" and not reasons(allowed)


def test_with_checkpoints_within_a_budget_and_applied_again(made: Any, tmp_path: Path) -> None:
    model, batch = made["gpt2"]
    front = frontier_training(model, (), batch, goal=goal(), points=6, passes=ALWAYS)
    least, most = front[0].predicted.peak_bytes, front[-1].predicted.peak_bytes
    memory = (least + most) // 2
    plan = optimize_training(model, (), batch, goal=goal(memory), passes=ALWAYS).plan
    assert max(plan.predicted.peak_bytes, plan.measured.peak_bytes) <= memory < most
    assert any(d.kind == "checkpoint" and d.option != "keep everything" for d in plan.decisions)
    again = optimize_training(
        model, (), batch, goal=goal(), plan=Plan.load(plan.save(tmp_path / "plan.json")), passes=AS_WRITTEN
    )
    assert again.plan.measured.peak_bytes == plan.measured.peak_bytes
    assert again.plan.checks[0].error == plan.checks[0].error
    assert differing(measured(lambda: again(**batch).loss, model, 0)[0], under_autocast(model, batch)) == []


def test_a_saved_plan_in_an_unknown_precision_is_refused() -> None:
    model, batch = line()
    data = plan_training(model, (), batch, goal=goal(), passes=ALWAYS).to_dict()
    next(d for d in data["decisions"] if d["kind"] == "precision")["settings"]["dtype"] = "fp2"
    with pytest.raises(FormatError, match=r"precision 'fp2'; known: bf16, fp16, fp8"):
        optimize_training(model, (), batch, goal=goal(), plan=Plan.from_dict(data), passes=AS_WRITTEN)


def test_a_dtype_whose_error_is_too_large_gives_way_to_the_next_and_to_fp32() -> None:
    model, batch = line()
    errors = [
        optimize_training(model, (), batch, goal=goal(), passes=passes).plan.checks[0].error
        for passes in (ALWAYS, FP16)
    ]
    assert 2 * errors[1] < errors[0]  # three bits more
    middle = optimize_training(model, (), batch, goal=goal(error=sum(errors) / 2), passes=ALWAYS).plan
    assert precision(middle) == "fp16 autocast" and middle.met
    assert (
        "relative error was" in reasons(middle)["bf16 autocast"]
        and "above the goal's" in reasons(middle)["bf16 autocast"]
    )
    least = optimize_training(model, (), batch, goal=goal(error=1e-7), passes=ALWAYS)
    assert (
        precision(least.plan) == "fp32"
        and set(reasons(least.plan)) == {"bf16 autocast", "fp16 autocast"}
        and least.scaler is None
    )
    assert differing(measured(lambda: least(**batch), model, 0)[0], eager(model, batch)) == []


def test_it_is_taken_only_where_it_is_predicted_to_be_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = line()

    def seconds(wide: float, narrow: float) -> Any:
        return lambda _, node: (
            narrow if "bfloat16" in str(getattr(node.meta.get("val"), "dtype", "")) else wide
        )

    for wide, narrow, wanted in ((1e-3, 1e-5, "bf16 autocast"), (1e-5, 1e-3, "fp32")):
        monkeypatch.setattr(OperatorCosts, "seconds", seconds(wide, narrow))
        monkeypatch.setattr("effcompile.passes.training.precision.product_ratio", lambda *_: 0.5)
        plan = plan_training(model, (), batch, goal=goal(), passes=AS_WRITTEN)
        assert precision(plan) == wanted
        if wanted == "fp32":
            assert "more a step" in reasons(plan)["bf16 autocast"]
        else:
            assert "less a step" in words(plan.decision("step").why) and "cast once a step" in words(
                plan.decision("step").note
            )


def test_slow_arithmetic_is_declined_as_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = line()
    monkeypatch.setattr("effcompile.passes.training.precision.product_ratio", lambda *_: 3.25)
    found = reasons(plan_training(model, (), batch, goal=goal(), passes=AS_WRITTEN))
    assert (
        found["bf16 autocast"] == "products in bf16 take 3.2 × as long as in fp32 on this machine, measured"
    )
    assert "fp16" in found["fp16 autocast"]


def test_what_is_narrow_already_stays_as_it_is() -> None:
    model, batch = line()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        plan = optimize_training(model, (), batch, goal=goal(), passes=ALWAYS).plan
    assert (
        set(reasons(plan).values()) == {"the step computes in bf16 already, as it was given"}
        and precision(plan) == "fp32"
    )
    narrow, batch = gpt2(layers=1, dropout=0.0)  # parameters in bf16
    plan = plan_training(narrow.bfloat16(), (), batch, goal=goal(), passes=ALWAYS)
    assert set(reasons(plan).values()) == {"the step computes in bf16 already, as it was given"}


def test_machines_that_are_not_here_by_their_peaks() -> None:
    import transformers as hf

    with torch.device("meta"):
        config = hf.GPT2Config(
            n_layer=1,
            n_embd=1024,
            n_head=16,
            vocab_size=8192,
            n_positions=512,
            use_cache=False,
            bos_token_id=0,
            eos_token_id=0,
        )
        model = hf.GPT2LMHeadModel(config).train()
        ids = torch.zeros(16, 512, dtype=torch.long)
    batch = {"input_ids": ids, "labels": ids}
    plans = {
        name: plan_training(model, (), batch, goal=goal(), target=name) for name in ("h100-sxm", "v100-32gb")
    }
    assert (
        precision(plans["h100-sxm"]) == "bf16 autocast" and precision(plans["v100-32gb"]) == "fp16 autocast"
    )
    assert "has no arithmetic in bf16" in reasons(plans["v100-32gb"])["bf16 autocast"]
    taken = plans["h100-sxm"].decision("step")
    assert taken.cost.seconds < 0 and taken.cost.bytes_kept < taken.baseline_cost.bytes_kept


def test_unknown_dtypes_are_told() -> None:
    model, batch = line()
    with pytest.raises(UnknownNameError, match="bf16"):
        plan_training(model, (), batch, goal=goal(), passes=["precision.dtypes=bf61"])
    with pytest.raises(UsageError, match="empty"):
        plan_training(model, (), batch, goal=goal(), passes=["precision.dtypes="])


def test_fp8_needs_a_gpu_that_has_it() -> None:
    model, batch = line()
    named = [*AS_WRITTEN, "precision.dtypes=fp8"]
    assert (
        "compute capability 8.9"
        in reasons(plan_training(model, (), batch, goal=goal(), passes=named))["fp8 linears"]
    )
    there = plan_training(model, (), batch, goal=goal(), passes=named, target="a100-80gb")
    assert "has no arithmetic in fp8" in reasons(there)["fp8 linears"]


def test_fp8_elsewhere_is_predicted_and_its_error_said_to_be_unmeasured() -> None:
    model, batch = Line().train(), {"x": torch.randn(4096, 1024), "y": torch.randn(4096, 1024)}
    model.net = nn.Sequential(nn.Linear(1024, 1024), nn.Tanh(), nn.Linear(1024, 1024))
    plans = {
        dtype: plan_training(
            model, (), batch, goal=goal(), passes=[*ALWAYS, f"precision.dtypes={dtype}"], target="h100-sxm"
        )
        for dtype in ("bf16", "fp8")
    }
    assert precision(plans["fp8"]) == "fp8 linears" and "unmeasured" in words(
        plans["fp8"].decision("step").note
    )
    # the first layer's input needs no gradient
    products = 2 * 3 * 2 * 4096 * 1024 * 1024 - 2 * 4096 * 1024 * 1024
    assert plans["fp8"].predicted.seconds > products / 1978.9e12 / 0.75
    assert all("bf16" not in str(node) for node in plans["fp8"].notes)


def test_fp8_linears_are_torchaos_with_emulated_products(monkeypatch: pytest.MonkeyPatch) -> None:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    monkeypatch.setattr("effcompile.passes.training.precision.unavailable", lambda _: None)
    torch.manual_seed(0)
    model, batch = Line().train(), {"x": torch.randn(32, 32), "y": torch.randn(32, 16)}
    model.net = nn.Sequential(nn.Linear(32, 48), nn.Tanh(), nn.Linear(48, 16), nn.Linear(16, 16))
    executable = optimize_training(
        model, (), batch, goal=goal(error=0.5), passes=[*ALWAYS, "precision.dtypes=fp8"]
    )
    assert precision(executable.plan) == "fp8 linears" and executable.plan.met
    assert {type(m) for m in model.net} == {nn.Linear, nn.Tanh}
    found = measured(lambda: executable(**batch), model, 0)[0]
    assert 1e-3 < whole_error(found, eager(model, batch)) <= executable.plan.checks[0].error * 1.000001
    kinds = {
        n.meta["val"].dtype
        for n in executable.runner.step.graph.nodes
        if isinstance(n.meta.get("val"), torch.Tensor)
    }
    assert torch.float8_e4m3fn in kinds and torch.float8_e5m2 in kinds
    convert_to_float8_training(model, config=Float8LinearConfig(emulate=True))
    assert whole_error(found, under_autocast(model, batch)) < 1e-3


# ------------------------------------------------------------------ fp16: the scaled loss


def test_a_loss_scale_that_is_too_large_comes_down_until_gradients_fit() -> None:
    model, batch = line(factor=1e4)
    executable = optimize_training(model, (), batch, goal=goal(), passes=FP16)
    assert precision(executable.plan) == "fp16 autocast" and executable.plan.met
    assert "scaled loss" in words(executable.plan.decision("step").note)
    assert 0 < executable.scaler.get_scale() < 65536
    found = measured(lambda: executable(**batch), model, 0)[0]
    assert whole_error(found, eager(model, batch)) < 0.01


def test_small_gradients_do_not_vanish() -> None:
    model, batch = line(factor=1e-6)
    executable = optimize_training(model, (), batch, goal=goal(), passes=FP16)
    wanted = eager(model, batch)
    assert whole_error(measured(lambda: executable(**batch), model, 0)[0], wanted) < 0.01
    assert whole_error(under_autocast(model, batch, torch.float16), wanted) > 0.01  # unscaled they do


def test_activations_that_overflow_leave_fp32() -> None:
    model, batch = line(size=1e6)
    plan = optimize_training(model, (), batch, goal=goal(), passes=FP16).plan
    assert precision(plan) == "fp32" and plan.met and "it overflows: " in reasons(plan)["fp16 autocast"]


def test_an_overflow_in_training_withholds_the_gradients_and_lowers_the_scale() -> None:
    model, batch = line()
    executable = optimize_training(model, (), batch, goal=goal(), passes=FP16)
    optimizer = torch.optim.AdamW(executable.parameters(), lr=0.1)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    scale = executable.scaler.get_scale()
    with pytest.warns(UserWarning, match=r"gradients are withheld.*the loss scale goes from"):
        executable(x=1e6 * batch["x"], y=batch["y"]).backward()
    optimizer.step()
    assert all(torch.equal(p, before[name]) and p.grad is None for name, p in model.named_parameters())
    assert not optimizer.state and executable.scaler.get_scale() == scale / 2
    executable(**batch).backward()
    optimizer.step()
    assert not any(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_gradients_are_not_consumed_before_an_overflow_is_seen() -> None:
    model, batch = line()
    adamw = torch.optim.AdamW(model.parameters())
    plan = plan_training(
        model,
        (),
        batch,
        goal=goal(),
        passes=[*FP16, "states.in_backward=true", "states.offload=false"],
        optimizer=adamw,
    )
    assert not any(d.option == "consumed in the backward" for d in plan.decisions)
    refused = [words(d.reason) for d in plan.declined if "gradients consumed in the backward" in d.option]
    assert refused and all("an overflow must be seen" in reason for reason in refused)


def test_micro_batches_in_16_bits(made: Any) -> None:
    """In bf16; below in fp16."""
    model, batch = made["llama"]
    executable = optimize_training(
        model, (), batch, goal=goal(), passes=[*ALWAYS, "microbatch.count=2", "precision.dtypes=bf16"]
    )
    plan = executable.plan
    assert (
        precision(plan) == "bf16 autocast"
        and plan.met
        and any(d.kind == "micro-batches" for d in plan.decisions)
    )
    assert plan.measured.peak_bytes == pytest.approx(plan.predicted.peak_bytes, rel=0.02)
    assert (
        whole_error(
            measured(lambda: 3 * loss_of(executable(**batch)), model, 0)[0], three_times(eager(model, batch))
        )
        < 0.02
    )


def three_times(found: Results) -> Results:
    return 3 * found[0], {name: 3 * gradient for name, gradient in found[1].items()}


def test_an_overflow_in_any_micro_batch_withholds_all_gradients() -> None:
    model, batch = line()
    executable = optimize_training(model, (), batch, goal=goal(), passes=[*FP16, "microbatch.count=3"])
    assert (
        precision(executable.plan) == "fp16 autocast"
        and executable.plan.options()["batch"] == "3 micro-batches of 2"
    )
    plan = executable.plan
    assert plan.met and plan.measured.peak_bytes == pytest.approx(plan.predicted.peak_bytes, rel=0.02)
    found = measured(lambda: 3 * executable(**batch), model, 0)[0]
    assert whole_error(found, three_times(eager(model, batch))) < 0.02
    scale = executable.scaler.get_scale()
    large = batch["x"].clone()
    large[3] *= 1e6
    with pytest.warns(UserWarning, match=r"gradients are withheld.*the loss scale goes from"):
        executable(x=large, y=batch["y"]).backward()
    assert all(p.grad is None for p in model.parameters()) and executable.scaler.get_scale() == scale / 2
    found = measured(lambda: executable(**batch), model, 0)[0]
    assert whole_error(found, eager(model, batch)) < 0.01


@pytest.mark.parametrize("passes", [FP16, [*FP16, "microbatch.count=3"]], ids=["whole", "micro-batches"])
def test_an_outer_loss_scale_is_refused(passes: list[str]) -> None:
    model, batch = line()
    executable = optimize_training(model, (), batch, goal=goal(), passes=passes)
    with pytest.raises(
        UsageError, match=r"65536, as from torch\.amp\.GradScaler\. .*Leave yours out, or .*enabled=False"
    ):
        torch.amp.GradScaler("cpu").scale(executable(**batch)).backward()
    optimizer = torch.optim.SGD(executable.parameters(), lr=0.1)
    before = [p.detach().clone() for p in model.parameters()]
    off = torch.amp.GradScaler("cpu", enabled=False)
    off.scale(executable(**batch)).backward()
    off.step(optimizer)
    off.update()
    assert not any(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
    # a weight of the loss: it does not make fp16 overflow
    found = measured(lambda: 1000 * executable(**batch), model, 0)[0]
    wanted = eager(model, batch)
    assert (
        whole_error(found, (wanted[0], {name: 1000 * gradient for name, gradient in wanted[1].items()}))
        < 0.01
    )
