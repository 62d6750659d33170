"""A format is one arithmetic: what is priced and emulated is what the backend stores and computes, in bytes
and in error.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from form_names import held
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch_formats import where_there

import effcompile
from effcompile.backends import load_backend
from effcompile.capture import capture
from effcompile.core.goal import Goal
from effcompile.estimate import fake_quant
from effcompile.ir.formats import BF16, FP32, Form
from effcompile.machine.machines import load_target
from effcompile.ops import bf16_linear
from effcompile.passes.base import Context
from effcompile.passes.pricing import price_linear
from effcompile.sites.parts import embeddings, linears, stored_format

N, K = 96, 256
LINEARS = {
    "torch-eager": (
        "bf16",
        "int8_dynamic",
        "int8_channel",
        "int8_token",
        "int8_static",
        "w8_channel",
        "w4",
        "w4g64",
        "w4g128",
        "int8_groups",
        "int4_groups",
    ),
    "onnxruntime": ("int8_dynamic", "int8_channel", "int8_static", "w8", "w8g64", "w4", "w4g16", "w4g128"),
}
TABLES = {"torch-eager": "int8_rows", "onnxruntime": "int8"}


def pairs() -> list[Any]:
    torchs = [
        where_there(name, name, value="torch-eager", id=f"torch-eager-{name}")
        for name in LINEARS["torch-eager"]
    ]
    return [*torchs, *(("onnxruntime", name) for name in LINEARS["onnxruntime"])]


@pytest.mark.parametrize(("backend", "name"), pairs())
def test_a_linear(backend: str, name: str) -> None:
    torch.manual_seed(0)
    model, x, fmt = nn.Linear(K, N).eval(), torch.randn(64, K), held(name)
    program = capture(model, (x,))
    (site,) = linears(program)
    lowered = load_backend(backend).lower(program.tagged({site.site: Form(weights=fmt)}, "test"), None, [[x]])  # type: ignore[arg-type]
    assert lowered.weight_bytes == pytest.approx(fmt.stored_bytes(N, K) + 4 * N, rel=0.02)
    with torch.no_grad():
        exact = model(x)
        emulated = F.linear(
            fake_quant.activation(x, fmt, fake_quant.range_of(x)), fake_quant.weight(model.weight, fmt)
        )
        whole = backend == "torch-eager" and fmt == BF16 and bf16_linear.multiplies(len(x))
        rounds = fmt.activation == "bf16" and not whole  # our tiles leave sums in fp32
        emulated = (fake_quant.bf16(emulated) if rounds else emulated) + model.bias
    measured, predicted = (float((y - exact).norm() / exact.norm()) for y in (lowered(x)[0], emulated))
    assert predicted == pytest.approx(measured, rel=0.1)


@pytest.mark.parametrize("backend", TABLES)
def test_a_table(backend: str) -> None:
    torch.manual_seed(0)
    model, ids, fmt = nn.Embedding(100, K).eval(), torch.randint(0, 100, (3, 7)), held(TABLES[backend])
    program = capture(model, (ids,))
    (site,) = embeddings(program)
    lowered = load_backend(backend).lower(
        program.tagged({site.site: Form(weights=fmt)}, "test"), None, [[ids]]
    )
    assert lowered.weight_bytes == pytest.approx(fmt.stored_bytes(100, K), rel=0.02)
    with torch.no_grad():
        rows = model(ids)
        emulated = fake_quant.table_rows(rows, fmt, fake_quant.range_of(model.weight))
    measured, predicted = (float((y - rows).norm() / rows.norm()) for y in (lowered(ids)[0], emulated))
    assert predicted == pytest.approx(measured, rel=0.1)


def test_a_model_in_16_bits_is_priced_in_them_and_nothing_of_it_is_said_to_be_lost() -> None:
    """Its linears are the baseline: priced as products of 16 bits, found in the artifact as they
    were given.
    """
    config = transformers.LlamaConfig(
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=48,
        vocab_size=64,
    )
    model = transformers.AutoModelForCausalLM.from_config(config).eval().to(torch.bfloat16)
    planned = effcompile.optimize(
        model, inputs={"input_ids": torch.ones(2, 8, dtype=torch.int64)}, backend="torch-eager"
    )
    found = [d for d in planned.plan.decisions if d.kind in ("linear", "merge", "embedding")]
    assert found and all(d.applied == d.option for d in found), [(d.site, d.option, d.applied) for d in found]
    assert any("16 bits" in str(note) for note in planned.plan.notes)
    program = capture(model, (), {"input_ids": torch.ones(2, 8, dtype=torch.int64)})
    target = load_target("h100-sxm")
    half, whole = (
        price_linear(
            Context(goal=Goal(), target=target, backend="torch", stored=stored), FP32, (512, 1024, 4096)
        )
        for stored in (stored_format(program), FP32)
    )
    assert half is not None and whole is not None and half.seconds < whole.seconds
