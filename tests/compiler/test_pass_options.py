"""Every option of every pass reaches the artifact, or changes the plan in the stated way; read by other means
than the package's own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
import transformers
from torch import Tensor, nn

import effcompile
from effcompile.backends import load_backend
from effcompile.backends.base import Lowered
from effcompile.backends.torch.lowered import TorchLowered
from effcompile.capture import capture
from effcompile.compiler.apply import apply_passes
from effcompile.core.goal import Goal
from effcompile.estimate.sensitivity import Sensitivity
from effcompile.ir.plan import Plan
from effcompile.ir.program import Program
from effcompile.machine.target import KernelCall, Target
from effcompile.ops import fp32_attention, int8_attention
from effcompile.ops.bf16_attention import told
from effcompile.passes import PASSES, load_passes
from effcompile.report.reasons import words
from effcompile.search import pricing
from effcompile.search.machine import Machine
from effcompile.search.regimes import Regimes
from effcompile.search.search import Search
from effcompile.sites.attention.normalise import normalised
from effcompile.sites.parts import linears

WIDTH, LENGTH = 64, 64


class Layer(nn.Module):
    """Causal attention of four heads, a residual norm and a feed-forward."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.norm, self.up, self.down = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 4 * WIDTH),
            nn.Linear(4 * WIDTH, WIDTH),
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).view(*x.shape[:2], 4, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        seen = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = self.norm(x + self.out(seen.transpose(1, 2).reshape(x.shape)))
        return x + self.down(nn.functional.gelu(self.up(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layers, self.head = (
            nn.Embedding(50, WIDTH),
            nn.ModuleList([Layer()]),
            nn.Linear(WIDTH, 50),
        )

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@pytest.fixture(scope="module")
def program() -> Program:
    torch.manual_seed(0)
    made = normalised(capture(Model().eval(), (torch.randint(0, 50, (2, LENGTH)),)))
    return made


class Small(dict[tuple[str, str], float]):
    """Every option at every site makes a small error."""

    def get(self, key: tuple[str, str], default: Any = None) -> Any:
        return 1e-8


def cheap(call: KernelCall) -> float:
    """What reduces something costs less: fewer bits, fewer blocks, listed tiles."""
    if call.kernel.startswith(("predict/", "attention/tiles")):
        return 1e-9
    if call.kernel == "linear/sparse":
        return 1e-7 * call.dims[3] * call.dims[4] ** 2 / (call.dims[1] * call.dims[2])
    if call.kernel.startswith("linear/"):
        m, k, n = call.dims[:3]
        return 1e-12 * m * k * n * (1.0 if call.format is None else call.format.bits / 32)
    return {
        "attention/sdpa_int8": 1e-7,
        "attention/sdpa_bf16": 2e-7,
        "attention/sdpa_int8_token": 3e-7,
        "attention/causal_fp32": 5e-7,
        "gelu/tanh": 1e-7,
        "embedding/int8": 1e-7,
        "embedding/int8_rows": 1e-7,
        "embedding/int8_row_groups": 1e-7,
    }.get(call.kernel, 1e-6)


@dataclass(frozen=True)
class Made:
    """A plan and what one backend made of it."""

    plan: Plan
    program: Program
    lowered: Lowered | None

    def onnx(self, folder: Path) -> onnx.ModelProto:
        assert self.lowered is not None
        return onnx.load(self.lowered.save(folder)[0])

    def weight(self, site: str) -> Tensor:
        (found,) = (each for each in linears(self.program) if each.site == site)
        value = self.program.tensor(found.weight)
        assert value is not None
        return value.detach()


@pytest.fixture
def make(program: Program) -> Callable[..., Made]:
    target = Target(
        name="test", description="test", device="cpu", cores=2, memory_bytes=2**33, memory_bandwidth=2e10,
        link_bandwidth=1e10, peak_flops={"fp32": 1e11}, probe=lambda backend, call: cheap(call),
    )  # fmt: skip

    def made(*spec: str, backend: str = "onnxruntime", lower: bool = True) -> Made:
        passes, chosen = load_passes(spec), load_backend(backend)
        options = pricing.measured_options(passes)
        search = Search(
            regimes=Regimes.of_call(program), program=program, goal=Goal(max_error=0.5),
            machine=Machine(target=target), passes=passes, calibration_inputs="none",
            sensitivity=Sensitivity(errors=Small(), method="given"), formats=pricing.formats(options),
        )  # fmt: skip
        plan = search.plan_for(chosen)
        applied = apply_passes(program, passes, plan)
        return Made(plan, applied, chosen.lower(applied, plan, [program.flat_inputs()]) if lower else None)

    return made


Make = Callable[..., Made]
Check = Callable[[Make, Path], None]


def kinds(made: Made) -> set[str]:
    return {d.kind for d in made.plan.decisions}


def blocks_of(model: onnx.ModelProto) -> set[tuple[int, int]]:
    """(bits, block size) of the products with weights in groups."""
    found = [
        {a.name: a.i for a in node.attribute} for node in model.graph.node if node.op_type == "MatMulNBits"
    ]
    return {(int(each["bits"]), int(each["block_size"])) for each in found}


def quantize_options(make: Make, folder: Path) -> None:
    assert blocks_of(make("quantize.options=w4", "quantize").onnx(folder / "4")) == {(4, 32)}
    assert blocks_of(make("quantize.options=w8", "quantize").onnx(folder / "8")) == {(8, 32)}


def quantize_group_size(make: Make, folder: Path) -> None:
    for size in (16, 64):
        made = make("quantize", "quantize.options=w4", f"quantize.group_size={size}")
        assert blocks_of(made.onnx(folder / str(size))) == {(4, size)}
        assert {d.option for d in made.plan.decisions if d.kind == "linear"} == {f"w4g{size}"}
    made = make("quantize", "quantize.options=w4", "quantize.group_size=64", backend="torch-eager")
    calls = [node for node in made.lowered.program.graph.nodes if "int4pack" in str(node.target)]  # type: ignore[union-attr]
    assert [node.args[2] for node in calls] and {node.args[2] for node in calls} == {64}
    for backend in ("torch-eager", "triton", "openvino"):
        made = make("quantize", "quantize.options=w4", "quantize.group_size=16", backend=backend, lower=False)
        reasons = {words(d.reason) for d in made.plan.declined if d.option == "w4g16"}
        assert len(reasons) == 1 and not reasons & {""}
        assert {d.option for d in made.plan.decisions if d.kind == "linear"} == {"fp32"}


def quantize_embeddings(make: Make, folder: Path) -> None:
    def tables(model: onnx.ModelProto) -> set[int]:
        weights = {
            tensor.name: tensor.data_type for tensor in model.graph.initializer if len(tensor.dims) == 2
        }
        return {
            weights[node.input[0]]
            for node in model.graph.node
            if node.op_type == "Gather" and node.input[0] in weights
        }

    whole = {onnx.TensorProto.FLOAT}
    assert (
        tables(make("quantize", "quantize.options=w4", "quantize.embeddings=no").onnx(folder / "no")) == whole
    )
    assert tables(
        make("quantize", "quantize.options=w4", "quantize.embeddings=yes").onnx(folder / "yes")
    ).isdisjoint(whole)


def fuse_norms(make: Make, folder: Path) -> None:
    assert "norm" in kinds(make("fuse", lower=False)) and "norm" not in kinds(
        make("fuse", "fuse.norms=no", lower=False)
    )


def fuse_gelu(make: Make, folder: Path) -> None:
    def forms(model: onnx.ModelProto) -> set[bytes]:
        return {
            a.s
            for node in model.graph.node
            if node.op_type == "Gelu"
            for a in node.attribute
            if a.name == "approximate"
        }

    assert forms(make("fuse").onnx(folder / "yes")) == {b"tanh"}
    assert forms(make("fuse", "fuse.gelu=no").onnx(folder / "no")) <= {b"none"}


def attention_int8(make: Make, folder: Path) -> None:
    """By OpenVINO with what it requires of the projections; by the torch backends by a kernel of ours."""
    made = make(
        "attention",
        "quantize",
        "quantize.options=int8_static",
        "attention.int8=yes",
        backend="openvino",
        lower=False,
    )
    assert {d.option for d in made.plan.decisions if d.kind == "attention"} == {"sdpa_int8"}
    without = ("attention", "attention.int8=no", "quantize", "quantize.options=int8_static")
    made = make(*without, backend="openvino", lower=False)
    assert "sdpa_int8" not in {d.option for d in (*made.plan.decisions, *made.plan.declined)}

    made = make("attention", "attention.bf16=no", backend="torch-eager")
    assert {d.option for d in made.plan.decisions if d.kind == "attention"} == {"sdpa_int8_token"}
    assert isinstance(made.lowered, TorchLowered)
    assert made.lowered.program.calls(torch.ops.effcompile.int8_attention.default)
    assert made.lowered.settings["attentions in bytes"] == int8_attention.told()
    made = make("attention", "attention.bf16=no", "attention.int8=no", backend="torch-eager")
    assert "sdpa_int8_token" not in {d.option for d in (*made.plan.decisions, *made.plan.declined)}


def attention_bf16(make: Make, folder: Path) -> None:
    """Its operator stands in the graph of the torch backends, none without it."""

    def called(made: Made) -> set[str]:
        assert isinstance(made.lowered, TorchLowered)
        return {str(node.target) for node in made.lowered.program.graph.nodes}

    made = make("attention", backend="torch-eager")
    assert {d.option for d in made.plan.decisions if d.kind == "attention"} == {"sdpa_bf16"}
    assert "effcompile.bf16_attention.default" in called(made)
    assert made.lowered is not None and made.lowered.settings["attentions of bf16"] == told()
    made = make("attention", "attention.bf16=no", backend="torch-eager")
    assert "sdpa_bf16" not in {d.option for d in (*made.plan.decisions, *made.plan.declined)}
    assert "effcompile.bf16_attention.default" not in called(made)


def attention_fp32(make: Make, folder: Path) -> None:
    """The same of the exact one, which costs less here than sdpa, and more than products of bf16."""
    made = make("attention", "attention.bf16=no", "attention.int8=no", backend="torch-eager")
    assert {d.option for d in made.plan.decisions if d.kind == "attention"} == {"causal_fp32"}
    assert isinstance(made.lowered, TorchLowered)
    assert {form.word for form in made.lowered.applied.values()} >= {"causal_fp32"}
    assert made.lowered.program.calls(torch.ops.effcompile.fp32_attention.default)
    assert made.lowered.settings["attentions of fp32"] == fp32_attention.told()
    made = make(
        "attention", "attention.bf16=no", "attention.int8=no", "attention.fp32=no", backend="torch-eager"
    )
    assert "causal_fp32" not in {d.option for d in (*made.plan.decisions, *made.plan.declined)}


def predicted(make: Make, *spec: str) -> Mapping[str, Any]:
    """The arguments of the predictor that stands in the graph."""
    made = make(
        "predict", "predict.least=16", "predict.block=16", "predict.mass=0.5", *spec, backend="torch-eager"
    )
    (call,) = (node for node in made.lowered.program.graph.nodes if "predicted_tiles" in str(node.target))  # type: ignore[union-attr]
    schema = call.target._schema.arguments
    return {
        **{a.name: a.default_value for a in schema},
        **dict(zip([a.name for a in schema], call.args, strict=False)),
        **call.kwargs,
    }


def predict_method(make: Make, folder: Path) -> None:
    assert predicted(make, "predict.method=pooled")["method"] == "pooled"


def predict_figure(name: str, value: float) -> Check:
    def check(make: Make, folder: Path) -> None:
        assert predicted(make, f"predict.{name}={value}")[name] == value

    return check


def predict_least(make: Make, folder: Path) -> None:
    made = make("predict", "predict.least=65", lower=False, backend="torch-eager")
    assert any("fewer than predict.least = 65" in words(d.reason) for d in made.plan.declined)


def predict_seconds(make: Make, folder: Path) -> None:
    made = make(
        "predict",
        "predict.least=16",
        "predict.block=16",
        "predict.seconds=0",
        lower=False,
        backend="torch-eager",
    )
    assert any("within predict.seconds = 0" in words(d.reason) for d in made.plan.declined)


def shrink_neurons(make: Make, folder: Path) -> None:
    assert make("shrink", "shrink.neurons=0.5").weight("layers.0.up").shape == (2 * WIDTH, WIDTH)


def shrink_heads(make: Make, folder: Path) -> None:
    assert make("shrink", "shrink.heads=0.5").weight("layers.0.q").shape == (WIDTH // 2, WIDTH)


def saliency(name: str, setting: str, site: str) -> Check:
    """Another measure of what a weight is worth keeps other weights."""

    def check(make: Make, folder: Path) -> None:
        kept = [make(name, setting, f"{name}.saliency={how}").weight(site) for how in ("magnitude", "wanda")]
        assert kept[0].shape == kept[1].shape and not torch.equal(*kept)

    return check


def shrink_sites(make: Make, folder: Path) -> None:
    made = make("shrink", "shrink.neurons=0.5", "shrink.heads=0.5", "shrink.sites=*neurons")
    assert (
        made.weight("layers.0.q").shape == (WIDTH, WIDTH) and made.weight("layers.0.up").shape[0] == 2 * WIDTH
    )


def shrink_masks(make: Make, folder: Path) -> None:
    kept = torch.arange(4 * WIDTH) % 2 == 0
    torch.save({"layers.0:neurons": kept}, folder / "masks.pt")
    before = make("fuse", lower=False).weight("layers.0.up")
    made = make("shrink", "shrink.saliency=given", f"shrink.masks={folder / 'masks.pt'}")
    assert torch.equal(made.weight("layers.0.up"), before[kept])


def pattern(made: Made, folder: Path, site: str = "up") -> tuple[int, float]:
    """Block side and density of the block-sparse product of a layer, from the file."""
    nodes = {node.name: node for node in made.onnx(folder).graph.node if node.op_type == "BlockSparseLinear"}
    weights = {t.name: t for t in made.onnx(folder).graph.initializer}
    (node,) = (
        node for name, node in nodes.items() if site in node.input[1] or site in name or len(nodes) == 1
    )
    figures = {a.name: a.i for a in node.attribute}
    kept = np.prod(weights[node.input[1]].dims[:1])
    return int(figures["block"]), float(kept * figures["block"] ** 2 / (figures["rows"] * figures["cols"]))


ONE = ("sparsify", "sparsify.sites=layers.0.up")


def sparsify_sparsity(make: Make, folder: Path) -> None:
    for share in (0.5, 0.75):
        assert pattern(
            make(*ONE, "sparsify.block=16", f"sparsify.sparsity={share}"), folder / str(share)
        ) == (16, 1 - share)


def sparsify_block(make: Make, folder: Path) -> None:
    for block in (4, 8):
        assert pattern(
            make(*ONE, f"sparsify.block={block}", "sparsify.sparsity=0.5"), folder / str(block)
        ) == (block, 0.5)


def sparsify_sites(make: Make, folder: Path) -> None:
    made = make(*ONE, "sparsify.block=16", "sparsify.sparsity=0.5")
    assert int((made.weight("layers.0.up") == 0).sum()) == 2 * WIDTH * WIDTH and bool(
        made.weight("layers.0.down").all()
    )


def sparsify_masks(make: Make, folder: Path) -> None:
    kept = (torch.arange(4 * WIDTH) < 2 * WIDTH)[:, None].expand(-1, WIDTH)
    torch.save({"layers.0.up": kept}, folder / "masks.pt")
    made = make(
        "sparsify", "sparsify.block=16", "sparsify.saliency=given", f"sparsify.masks={folder / 'masks.pt'}"
    )
    assert torch.equal(made.weight("layers.0.up") != 0, kept) and pattern(made, folder / "out") == (16, 0.5)


def speculate_drafts(make: Make, folder: Path) -> None:
    """A pass of generation, whose executable `make` does not build."""
    config = transformers.LlamaConfig(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        vocab_size=50,
        max_position_embeddings=64,
    )
    made = effcompile.optimize(
        transformers.LlamaForCausalLM(config).eval(),
        inputs={"input_ids": torch.randint(0, 50, (1, 16))},
        mode="generation",
        context=32,
        prompt=8,
        new=8,
        backend="torch-eager",
        passes=["speculate.drafts=4"],
    )
    said = [d for d in (*made.plan.decisions, *made.plan.declined) if d.by == "speculate"]
    assert {d.option for d in said} - {"one a step"} == {"look-up of 4"}


#: (pass, option) → what shows that it is heard.
CHECKS: dict[tuple[str, str], Check] = {
    ("shrink", "neurons"): shrink_neurons,
    ("shrink", "heads"): shrink_heads,
    ("shrink", "saliency"): saliency("shrink", "shrink.neurons=0.5", "layers.0.up"),
    ("shrink", "sites"): shrink_sites,
    ("shrink", "masks"): shrink_masks,
    ("attention", "int8"): attention_int8,
    ("attention", "bf16"): attention_bf16,
    ("attention", "fp32"): attention_fp32,
    ("predict", "method"): predict_method,
    ("predict", "mass"): predict_figure("mass", 0.25),
    ("predict", "least"): predict_least,
    ("predict", "detail"): predict_figure("detail", 3),
    ("predict", "pool"): predict_figure("pool", 2),
    ("predict", "block"): predict_figure("block", 32),
    ("predict", "seconds"): predict_seconds,
    ("fuse", "norms"): fuse_norms,
    ("fuse", "gelu"): fuse_gelu,
    ("quantize", "options"): quantize_options,
    ("quantize", "group_size"): quantize_group_size,
    ("quantize", "embeddings"): quantize_embeddings,
    ("sparsify", "sparsity"): sparsify_sparsity,
    ("sparsify", "block"): sparsify_block,
    ("sparsify", "saliency"): saliency("sparsify", "sparsify.sparsity=0.5", "layers.0.up"),
    ("sparsify", "sites"): sparsify_sites,
    ("sparsify", "masks"): sparsify_masks,
    ("speculate", "drafts"): speculate_drafts,
}


def test_no_option_is_left_out() -> None:
    assert set(CHECKS) == {(name, field.name) for name, cls in PASSES.items() for field in fields(cls)}


@pytest.mark.parametrize(("name", "option"), CHECKS)
def test_an_option_reaches_the_artifact(name: str, option: str, make: Make, tmp_path: Path) -> None:
    CHECKS[name, option](make, tmp_path)
