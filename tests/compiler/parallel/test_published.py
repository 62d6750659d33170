"""The closed form against steps whose figures others published; benchmarks/parallel.py prints
more of them.
"""

from dataclasses import replace

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from effcompile.ir.strategy import Strategy
from effcompile.machine.cluster import Cluster
from effcompile.machine.machines import load_target
from effcompile.planner.parallel import bytes as held
from effcompile.planner.parallel.division import Division, DivisionProblem, Solved
from effcompile.planner.parallel.model import Model
from effcompile.search.parallel.describe import describe

WITHIN = 0.15


def described(model: torch.nn.Module, tokens: int, target: str) -> Model:
    ids = torch.zeros(1, tokens, dtype=torch.long, device="meta")
    return describe(model, (), {"input_ids": ids, "labels": ids}, target=load_target(target))


@pytest.fixture(scope="module")
def gpt_175b() -> Model:
    with torch.device("meta"):
        model = GPT2LMHeadModel(
            GPT2Config(
                n_embd=12288,
                n_layer=96,
                n_head=96,
                vocab_size=51200,
                n_positions=2048,
                attn_pdrop=0,
                resid_pdrop=0,
                embd_pdrop=0,
            )
        )
    return described(model, 2048, "a100-80gb")


@pytest.fixture(scope="module")
def llama_8b() -> Model:
    with torch.device("meta"):
        model = LlamaForCausalLM(
            LlamaConfig(
                hidden_size=4096,
                intermediate_size=14336,
                num_hidden_layers=32,
                num_attention_heads=32,
                num_key_value_heads=8,
                vocab_size=128256,
            )
        )
    return described(model, 8192, "h100-sxm")


def solved(model: Model, target: str, strategy: Strategy, batch: int) -> Solved:
    machine = load_target(target)
    assert machine.cluster is not None
    if target == "h100-sxm":  # torchtitan's have HBM2e
        machine = replace(machine, memory_bandwidth=2.4e12)
    problem = DivisionProblem(
        model=model, cluster=Cluster.of(machine.cluster, strategy.world), target=machine, global_batch=batch
    )
    return Division(problem=problem, strategy=strategy).solve(None)


@pytest.mark.parametrize(("recompute", "sp", "seconds"), [("none", True, 13.75), ("full", False, 18.13)])
def test_megatron_s_175b_takes_the_published_seconds(
    gpt_175b: Model, recompute: str, sp: bool, seconds: float
) -> None:
    """Korthikanti et al. 2022 (arXiv 2205.05198), table 5: iteration times of 64 A100; rates were fitted to
    its eight rows together.
    """
    strategy = Strategy.of(
        tp=8, pp=8, vpp=3, schedule="interleaved", engine="megatron", recompute=recompute, sp=sp
    )
    assert solved(gpt_175b, "a100-80gb", strategy, 64).seconds == pytest.approx(seconds, rel=WITHIN)


def test_fsdp2_s_8b_has_the_published_peak_and_seconds(llama_8b: Model) -> None:
    """torchtitan docs/performance.md, table 1, compiled: 8 H100, local batch 2, selective operators: 77.0
    GiB, 6,667 tokens/s/device.
    """
    found = solved(
        llama_8b, "h100-sxm", Strategy(dp=8, zero=3, micro_batch=2, engine="fsdp2", recompute="op"), 16
    )
    inside = found.peak_bytes - found.ranks[0].standing[held.BESIDE]
    assert inside / (1 << 30) == pytest.approx(77.0, rel=0.05)
    assert found.seconds == pytest.approx(2 * 8192 / 6667, rel=WITHIN)


def test_an_8b_model_has_its_flops(llama_8b: Model) -> None:
    """Chowdhery et al. 2022, appendix B: 6 P + 12 L H Q T operations a token, all pairs counted, the table's
    lookup not.
    """
    parameters = llama_8b.parameters - llama_8b.embedding
    expected = 8192 * (6 * parameters + 12 * 32 * 4096 * 8192)
    assert llama_8b.flops == pytest.approx(expected, rel=0.01)
