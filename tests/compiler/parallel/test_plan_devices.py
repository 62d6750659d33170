"""From a model to a plan for many devices, by the Python entry and the command line; nothing
needs a device.
"""

import json
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from typer.testing import CliRunner

import effcompile
from effcompile.cli import app
from effcompile.cli.strategy import parse_strategy
from effcompile.core.errors import UnknownNameError, UsageError
from effcompile.machine.machines import load_target
from effcompile.planner.parallel.model import Model
from effcompile.report.devices import strategy_text
from effcompile.search.parallel import plan as planning
from effcompile.search.parallel.describe import describe
from effcompile.search.parallel.layers import runs_of, shortened

TOKENS = 128


def llama(layers: int = 12) -> nn.Module:
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=1000,
    )
    with torch.device("meta"):
        return LlamaForCausalLM(config)


def inputs() -> dict[str, Tensor]:
    ids = torch.zeros(1, TOKENS, dtype=torch.long, device="meta")
    return {"input_ids": ids, "labels": ids}


@pytest.fixture
def described_once(described: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """One capture serves them all: what is planned is what was described, with as many layers as the model
    has.
    """

    def as_before(model: nn.Module, *_: object, **__: object) -> Model:
        return replace(described, order=(0,) * len(model.model.layers))

    monkeypatch.setattr(planning, "describe", as_before)


@pytest.fixture(scope="module")
def plan() -> effcompile.Plan:
    return effcompile.plan(
        llama().train(),
        inputs(),
        mode="training",
        target="h100-sxm",
        devices=16,
        global_batch=32,
        strategy={"pp": 2},
    )


@pytest.fixture(scope="module")
def described():
    return describe(llama(), (), inputs(), target=load_target("h100-sxm"))


def test_a_description_is_the_whole_model_s(described):
    """Counted from the modules, not from the capture of three of the twelve layers."""
    model = llama()
    assert described.parameters == sum(p.numel() for p in model.parameters())
    assert (described.depth, described.heads, described.key_heads, described.hidden) == (12, 8, 4, 64)
    assert (described.embedding, described.head, described.vocabulary) == (64_000, 64_000, 1000)
    assert described.causal
    assert not described.tied
    (layer,) = described.layers
    linears = [m for m in model.model.layers[0].modules() if isinstance(m, nn.Linear)]
    products = sum(2 * TOKENS * m.in_features * m.out_features for m in linears)
    assert layer.forward.products == products
    assert layer.backward.products == 2 * products
    assert layer.sums == 2
    stream = TOKENS * 64 * 2
    assert layer.rules["full"].kept.total == stream
    assert layer.rules["full"].kept.split == 0
    assert 0 < layer.rules["op"].kept.total < layer.rules["none"].kept.total
    assert layer.rules["none"].again.products == 0


def test_attributes_that_happen_to_be_a_layer_s_number_tell_nothing_apart(described):
    """Layer 2 of a model with 2 queries to each key, layer 8 of one with heads of 8."""
    assert len(described.layers) == 1
    assert runs_of(llama())[0].kinds == (0,) * 12


def test_a_layer_that_is_cut_in_two_is_put_together():
    """Qwen3's norms of queries and keys make narrow places within a layer."""
    config = Qwen3Config(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=300,
    )
    with torch.device("meta"):
        model = Qwen3ForCausalLM(config)
    (layer,) = describe(model, (), inputs(), target=load_target("h100-sxm")).layers
    linears = [m for m in model.model.layers[0].modules() if isinstance(m, nn.Linear)]
    assert layer.forward.products == sum(2 * TOKENS * m.in_features * m.out_features for m in linears)
    assert layer.rules["full"].kept.total <= layer.rules["none"].kept.total


def test_a_tied_table_counts_once():
    with torch.device("meta"):
        model = GPT2LMHeadModel(
            GPT2Config(n_layer=4, n_embd=64, n_head=4, vocab_size=500, n_positions=TOKENS)
        )
    found = describe(model, (), inputs(), target=load_target("h100-sxm"))
    assert found.tied
    assert found.parameters == sum(p.numel() for p in model.parameters())


def test_the_model_is_as_it_was():
    model = llama()
    shortened(model, runs_of(model), torch.bfloat16)
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in llama().named_parameters()]
    assert all(p.dtype == torch.float32 for p in model.parameters())


def test_layers_of_two_kinds_are_told_apart():
    model = llama(8)
    for i, layer in enumerate(model.model.layers):
        layer.wide = bool(i % 2)
    (run,) = runs_of(model)
    assert run.kinds == (0, 1) * 4
    assert run.shown == 4


def test_a_model_without_layers_is_refused():
    with pytest.raises(UsageError, match="nothing in it repeats"):
        runs_of(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))


def test_the_plan_says_how_the_step_is_divided(plan):
    found = plan.distributed
    assert found is not None
    assert found.verdict == "fits"
    assert found.strategy.world == 16 == len(found.ranks)
    assert found.strategy.pp == 2 == len(found.stages)
    assert sum(end - begin for stage in found.stages for begin, end in stage.layers) == 12
    assert sum(found.spent.values()) == pytest.approx(found.seconds)
    assert plan.predicted.peak_bytes == found.peak_bytes
    assert found.bound_seconds <= found.seconds
    assert effcompile.Plan.from_dict(json.loads(json.dumps(plan.to_dict()))).distributed == found


@pytest.mark.usefixtures("described_once")
def test_a_given_strategy_is_judged_as_it_is(plan):
    found = plan.distributed
    given = effcompile.Strategy.of(**parse_strategy(strategy_text(found.strategy)))
    again = effcompile.plan(
        llama().train(),
        inputs(),
        mode="training",
        target="h100-sxm",
        devices=16,
        global_batch=32,
        strategy=given,
    )
    assert again.distributed.peak_bytes == found.peak_bytes
    assert again.distributed.seconds == pytest.approx(found.seconds)
    assert again.distributed.considered == 1


MODEL = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM

def model():
    with torch.device("meta"):
        return LlamaForCausalLM(LlamaConfig(
            hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=8,
            num_key_value_heads=4, vocab_size=1000))

def inputs():
    ids = torch.zeros(1, 128, dtype=torch.long, device="meta")
    return {"input_ids": ids, "labels": ids}
"""


def run(tmp_path, *more: str):
    path = tmp_path / "model.py"
    path.write_text(MODEL)
    return CliRunner().invoke(app, ["plan", str(path), "--mode", "training", "--target", "h100-sxm", *more])


def test_the_command_emits_what_is_agreed(tmp_path):
    ran = run(
        tmp_path,
        "--nodes",
        "2x8",
        "--batch-tokens",
        "4096",
        "--strategy",
        "dp=8,tp=2",
        "--json",
        "-o",
        str(tmp_path / "out"),
    )
    assert ran.exit_code == 0, ran.output
    data = json.loads(ran.stdout)["distributed"]
    assert {"verdict", "peak_bytes", "low_bytes", "high_bytes", "seconds", "strategy", "ranks"} <= set(data)
    assert (data["strategy"]["dp"], data["strategy"]["tp"], data["global_batch"], len(data["ranks"])) == (
        8,
        2,
        32,
        16,
    )
    assert "stage 0" in (tmp_path / "out" / "report.html").read_text()


@pytest.mark.usefixtures("described_once")
def test_auto_takes_the_fewest(tmp_path):
    ran = run(tmp_path, "--devices", "auto", "--json")
    assert ran.exit_code == 0, ran.output
    assert len(json.loads(ran.stdout)["distributed"]["ranks"]) == 1


@pytest.mark.usefixtures("described_once")
def test_what_does_not_fit_exits_with_one(tmp_path):
    ran = run(
        tmp_path,
        "--devices",
        "8",
        "--memory",
        "2GiB",
        "--strategy",
        "dp=8,recompute=full,engine=fsdp2",
        "--global-batch",
        "8",
    )
    assert ran.exit_code == 0, ran.output
    ran = run(tmp_path, "--devices", "8", "--memory", "1GiB", "--global-batch", "8")
    assert ran.exit_code == 1
    assert "DOES NOT FIT" in ran.stdout


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--devices", "0"], "devices = 0"),
        (["--devices", "many"], "must be a number of devices, or auto"),
        (["--devices", "7", "--strategy", "tp=7"], "tp = 7 does not divide the model's 8 heads"),
        (["--devices", "8", "--strategy", "pp=8"], "more than the model's 4 layers"),
        (["--devices", "8", "--global-batch", "9", "--strategy", "dp=8"], "global_batch = 9 does not divide"),
        (["--devices", "12"], "not whole nodes of 8"),
        (["--devices", "64", "--nodes", "8x4"], "are 32 devices, not 64"),
        (["--devices", "8", "--strategy", "dp=2,tp=2,pp=1,cp=1"], "do not divide 8 devices"),
        (["--devices", "8", "--batch-tokens", "100"], "no whole number of sequences of 128 tokens"),
        (["--strategy", "tp=2"], "give --devices"),
    ],
)
@pytest.mark.usefixtures("described_once")
def test_bad_requests_say_what_is_allowed(tmp_path, more, said):
    path = tmp_path / "model.py"
    path.write_text(MODEL)
    with pytest.raises(UsageError, match=said):
        CliRunner().invoke(
            app,
            ["plan", str(path), "--mode", "training", "--target", "h100-sxm", *more],
            catch_exceptions=False,
        )


def test_targets_without_links_and_inference_are_refused():
    for target in ("rtx4090", "auto"):
        with pytest.raises(UsageError, match="h100-sxm"):
            effcompile.plan(llama().train(), inputs(), mode="training", target=target, devices=8)
    with pytest.raises(UsageError, match="mode='training'"):
        effcompile.plan(llama(), inputs(), target="h100-sxm", devices=8)
    with pytest.raises(UsageError, match="give devices, too"):
        effcompile.plan(llama(), inputs(), mode="training", target="h100-sxm", strategy={"tp": 2})


@pytest.mark.parametrize(
    "text", ["dp=8,tp=2,pp=2,vpp=2,schedule=interleaved,sp=1,zero=1,micro_batch=2", "pp=2,cuts=7/5", ""]
)
def test_a_strategy_is_read_as_it_is_written(text):
    given = parse_strategy(text)
    assert parse_strategy(strategy_text(effcompile.Strategy.of(**given))) | given == parse_strategy(
        strategy_text(effcompile.Strategy.of(**given))
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [("dp", "not NAME=VALUE"), ("dp=x", "whole number"), ("tp=2,tp=4", "twice"), ("zero=5", "0, 1, 2 or 3")],
)
def test_a_strategy_that_is_none_is_refused(text, said):
    with pytest.raises(UsageError, match=said):
        parse_strategy(text)
    with pytest.raises(UnknownNameError, match="micro_batch"):
        parse_strategy("microbatch=2")
