"""2:4 on sparse tensor cores: offered by a GPU target's law or a measurement, pruned truly 2:4, lowered to
torch's semi-structured form.

The form is real (torch's CUTLASS one is made and read back on a CPU); only the GPU's product itself is stood
in for.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from form_names import form
from pass_helpers import context, outputs, plan_with, split
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import effcompile
from effcompile.backends.base import Lowered
from effcompile.backends.torch import TorchEager, load
from effcompile.backends.torch.edit import edit
from effcompile.backends.torch.edit_attentions import SITE
from effcompile.backends.triton import linears as triton_linears
from effcompile.capture.inference import capture
from effcompile.core.cost import Provenance
from effcompile.core.errors import LoweringError, UsageError
from effcompile.core.goal import Goal
from effcompile.ir.program import Program
from effcompile.machine.machines import load_target
from effcompile.machine.target import KernelCall
from effcompile.ops import two_of_four
from effcompile.ops.two_of_four import compress, linear_on_cores, two_of_four_linear
from effcompile.passes.base import Context, Option
from effcompile.passes.sparsify import Sparsify
from effcompile.report.reasons import words
from effcompile.sites.parts import linears

UP, DOWN, HEAD = "layers.0.up", "layers.0.down", "head"
A100 = load_target("a100-80gb")
SM_80 = ("a100-80gb", "h100-sxm", "h200", "rtx4090")


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(width)])
        self.head = nn.Linear(width, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def program_of(
    dtype: torch.dtype = torch.float32, width: int = 64, rows: int = 5, device: str = "cpu"
) -> Program:
    torch.manual_seed(0)
    return capture(
        Model(width).to(dtype).to(device).eval(), (torch.randn(3, rows, width, device=device).to(dtype),)
    )


@cache
def large(dtype: torch.dtype = torch.bfloat16) -> Program:
    """On the meta device, of a size at which arithmetic binds."""
    return program_of(dtype, 4096, 1024, "meta")


def on(
    target: Any, *, backend: str = "torch-inductor", goal: Goal | None = None, errors: Any = None
) -> Context:
    return replace(
        context(goal=goal or Goal(max_error=0.5), backend=backend, sensitivity=errors), target=target
    )


def offered(
    program: Program, ctx: Context, **settings: Any
) -> tuple[dict[str, dict[str, Option]], dict[tuple[str, str], str]]:
    choices, declined = split(Sparsify(**{"sparsity": (0.5,), "block": 1, **settings}).propose(program, ctx))
    return {site: {o.name: o for o in c.options} for site, c in choices.items()}, {
        (d.site, d.option): words(d.reason) for d in declined
    }


# ---------------------------------------------------------------- planned


@pytest.mark.parametrize("name", SM_80)
def test_the_law_of_a_target_with_sparse_tensor_cores_is_published_modest_and_sourced(name: str) -> None:
    target = load_target(name)
    sizes = (4096, 4096, 4096)
    dense, sparse = (
        target.price("torch-eager", KernelCall(f"linear/{form}", sizes)) for form in ("bf16", "2:4")
    )
    assert dense is not None and sparse is not None and sparse[1] is Provenance.PUBLISHED
    assert 1.0 < dense[0] / sparse[0] <= target.gains["2:4"] <= 1.3
    assert "A100" in target.sources["gains"]
    few = (1, 4096, 4096)  # bytes bind: torch's kernels gain nothing there
    assert (
        target.price("t", KernelCall("linear/2:4", few))[0]
        == target.price("t", KernelCall("linear/bf16", few))[0]
    )


@pytest.mark.parametrize("name", ["v100-32gb", "mi300x", "ipu-mk2"])
def test_targets_without_them_have_no_such_price(name: str) -> None:
    assert load_target(name).price("torch-eager", KernelCall("linear/2:4", (64, 64, 64))) is None


@pytest.mark.parametrize("name", ["a100-80gb", "h100-sxm"])
def test_it_is_offered_for_16_bit_weights_with_its_bytes_error_and_eps(name: str) -> None:
    found, _ = offered(large(), on(load_target(name), errors={(UP, "2:4"): 4e-4, (DOWN, "2:4"): 1e-4}))
    option = found[UP]["2:4"]
    assert option.cost.seconds < found[UP]["fp32"].cost.seconds
    assert (
        option.cost.weight_bytes == 4096 * 8192 * 2 * 9 // 16
        and found[UP]["fp32"].cost.weight_bytes == 4096 * 8192 * 2
    )
    assert option.cost.error_squared == 4e-4 and option.cost.provenance is Provenance.PUBLISHED
    assert "break-even 2.0" in words(option.note) and "×1.24 where arithmetic binds: torchao" in words(
        option.note
    )


def test_a_model_in_fp32_multiplies_in_bf16_and_bears_both_errors() -> None:
    errors = {
        (site, option): error for site in (UP, DOWN) for option, error in (("2:4", 4e-4), ("bf16", 1e-6))
    }
    found, _ = offered(large(torch.float32), on(A100, errors=errors))
    assert found[UP]["2:4"].cost.error_squared == pytest.approx(4e-4 + 1e-6)
    _, declined = offered(large(torch.float32), on(A100, errors={(UP, "2:4"): 4e-4}))
    assert (
        declined[UP, "2:4"]
        == "its error at the output was not measured, or that of bf16, in which it multiplies"
    )


def test_declined_with_the_reason() -> None:
    reason = lambda program, ctx: offered(program, ctx)[1][UP, "2:4"]  # noqa: E731
    assert reason(program_of(torch.bfloat16), on(A100)).startswith("no gain here: eps")  # 15 rows: bytes bind
    assert "N a multiple of 32 and K of 64; here N = 96, K = 48" in reason(
        program_of(torch.bfloat16, 48), on(A100)
    )
    assert reason(large(), on(load_target("v100-32gb"))).startswith(
        "v100-32gb has no sparse tensor cores on record"
    )
    assert "torch-eager, torch-inductor and triton have" in reason(large(), on(A100, backend="onnxruntime"))
    double = program_of(torch.float64)
    # as bf16, like fp32; at 15 rows without a gain
    assert reason(double, on(A100)).startswith("no gain here")
    assert "not measured" in reason(large(), on(A100, errors={}))


def test_an_exact_goal_allows_zeros_that_are_there_in_16_bits_alone() -> None:
    torch.manual_seed(0)
    made = Model(1024).eval()
    with torch.no_grad():
        made.layers[0].up.weight.mul_(torch.tensor([1.0, 0, 1, 0]).repeat(256))
    x = torch.randn(1, 2048, 1024)
    exact = on(A100, goal=Goal())
    _, declined = offered(capture(made, (x,)), exact, sparsity=())
    assert declined[UP, "2:4"] == "it multiplies in bf16, and the goal allows no error (max_error = 0)"
    found, _ = offered(capture(made.bfloat16(), (x.bfloat16(),)), exact, sparsity=())
    assert found[UP]["2:4"].cost.error_squared == 0.0


def test_a_whole_plan_takes_it_where_the_error_is_allowed_and_nowhere_else() -> None:
    """Solved with all other choices, from measured errors, on a target that is not here; on a CPU no law
    offers it.

    The target's arithmetic is slow enough to bind in a small model (a processor without products in bf16
    takes a minute for a large one), and it has none in bytes, which would be faster still.
    """
    torch.manual_seed(0)
    made, x = Model().bfloat16().eval(), torch.randn(2, 16, 64).bfloat16()
    h100 = load_target("h100-sxm")
    slow = replace(
        h100, peak_flops={dtype: h100.peak_flops[dtype] / 1e6 for dtype in ("fp32", "bf16", "fp16")}
    )
    plan = lambda target, error: effcompile.plan(  # noqa: E731
        made,
        (x,),
        target=target,
        max_error=error,
        passes=["sparsify.sparsity=0.5", "sparsify.block=1", "no-merge"],
    )
    chosen = {d.site: d for d in plan(slow, 0.6).decisions}
    assert {chosen[UP].option, chosen[DOWN].option} == {"2:4"} and chosen[HEAD].option != "2:4"
    assert chosen[UP].cost.error_squared > 0 and chosen[UP].by == "sparsify"
    strict = plan(slow, 1e-4)
    assert "2:4" not in {d.option for d in strict.decisions}
    assert "above 1.0e-4" in next(
        words(d.reason) for d in strict.declined if d.site == UP and d.option == "2:4"
    )
    assert "2:4" not in {d.option for d in plan("cpu-generic", 0.6).decisions}


def test_where_the_weight_lies_on_a_gpu_a_measurement_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    from effcompile.passes import sparsify

    monkeypatch.setattr(sparsify, "on_cores", lambda context, weight: True)
    times = {"linear/bf16": 3e-4, "linear/2:4": 2e-4}
    found, _ = offered(
        large(), context(lambda call: times.get(call.kernel), goal=Goal(max_error=0.5), backend="triton")
    )
    assert found[UP]["2:4"].cost.provenance is Provenance.MEASURED and "×" not in words(found[UP]["2:4"].note)
    _, declined = offered(large(), context(lambda call: 3e-4, goal=Goal(max_error=0.5), backend="triton"))
    assert declined[UP, "2:4"].startswith(
        "no gain here: eps = time per sparse FLOP / time per dense FLOP in 16 bits = 2.0, break-even 2.0"
    )
    _, declined = offered(large(), context(lambda call: None, goal=Goal(max_error=0.5), backend="triton"))
    assert declined[UP, "2:4"] == "triton has no linear/2:4 kernel here"


# ---------------------------------------------------------------- pruned


@pytest.mark.parametrize("saliency", ["magnitude", "wanda"])
def test_the_weight_that_is_kept_is_truly_two_of_four(saliency: str) -> None:
    program = program_of()
    after = Sparsify(sparsity=(0.5,), block=1, saliency=saliency).apply(program, plan_with({UP: "2:4"}))
    dense, pruned = (p.tensor(next(s.weight for s in linears(p) if s.site == UP)) for p in (program, after))
    assert dense is not None and pruned is not None
    kept = pruned.reshape(-1, 4) != 0
    assert (kept.sum(1) == 2).all() and torch.equal(pruned.reshape(-1, 4)[kept], dense.reshape(-1, 4)[kept])
    if saliency == "magnitude":
        best = dense.reshape(-1, 4).abs().topk(2).indices
        assert torch.equal(torch.zeros_like(kept).scatter(1, best, True), kept)


# ---------------------------------------------------------------- lowered


@pytest.fixture
def cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """This CPU as if it had sparse tensor cores: torch makes its CUTLASS form here too, past a check of the
    device.
    """
    form = torch.sparse.SparseSemiStructuredTensorCUTLASS
    monkeypatch.setattr(two_of_four, "no_cores", lambda device: None)
    monkeypatch.setattr(form, "_validate_device_dim_dtype_shape", classmethod(lambda cls, tensor: None))
    monkeypatch.setattr(torch.sparse, "to_sparse_semi_structured", form.from_dense)


def lowered(program: Program) -> tuple[Lowered, Program]:
    pruned = Sparsify(sparsity=(0.5,), block=1).apply(program, plan_with({UP: "2:4", DOWN: "2:4"}))
    return TorchEager().lower(pruned, plan_with({}), []), pruned


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_lowered_found_run_and_run_again_from_disk(cores: None, dtype: torch.dtype, tmp_path: Any) -> None:
    program = program_of(dtype)
    made, pruned = lowered(program)
    assert {made.applied[UP].name, made.applied[DOWN].name} == {"2:4"} and made.applied[HEAD].name != "2:4"
    dense_bytes = sum(p.nbytes for p in program.module.parameters())
    wide = sum(
        p.nbytes for name, p in program.module.named_parameters() if "layers" in name and "weight" in name
    )
    assert made.weight_bytes == dense_bytes - wide + 2 * two_of_four.stored_bytes(128, 64)
    made.save(tmp_path)
    (wanted,) = outputs(pruned)
    for found in (made(*program.args)[0], load(tmp_path / "model.pt2")(*program.args)):
        assert found.dtype == dtype
        torch.testing.assert_close(found, wanted, rtol=3e-2, atol=3e-2)
    calls = [node.target for node in made.program.graph.nodes]  # type: ignore[attr-defined]
    assert calls.count(torch.ops.effcompile.two_of_four_linear.default) == 2


def test_without_sparse_tensor_cores_a_plan_with_it_runs_as_single_weights() -> None:
    made, pruned = lowered(program_of())
    assert made.applied[UP].name == "2:4"
    torch.testing.assert_close(made(*pruned.args)[0], outputs(pruned)[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_bf16_away_from_a_cpu_is_a_plain_product_and_nothing_in_a_model_of_16_bits(
    dtype: torch.dtype,
) -> None:
    """On the meta device in the place of a GPU: what is emitted there, and its dtypes."""
    program = program_of(dtype, device="meta").tagged({UP: form("bf16")}, "test")
    edited = edit(program, [])
    (node,) = (node for node in edited.graph.nodes if node.meta.get(SITE) == UP)
    assert node.target is torch.ops.aten.linear.default
    weight = edited.tensor(node.args[1])
    assert weight is not None and weight.dtype == (torch.bfloat16 if dtype == torch.float32 else dtype)
    assert outputs(edited)[0].dtype == dtype
    with pytest.raises(LoweringError, match="implemented for CPU"):
        edit(program.tagged({UP: form("w8")}, "test"), [])


def test_a_shape_that_is_not_taken_is_refused_by_name(cores: None) -> None:
    with pytest.raises(
        LoweringError,
        match=r"layers\.0\.up as 2:4: 2:4 kernels need N a multiple of 32 and K of 64; here N = 96, K = 48",
    ):
        lowered(program_of(width=48))


def weight(n: int = 64, k: int = 128, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    torch.manual_seed(0)
    return (torch.randn(n, k) * torch.tensor([1.0, 0, 0, 1]).repeat(k // 4)).to(dtype)


def test_torchs_own_class_reaches_the_gpus_product_with_what_we_hold(cores: None) -> None:
    """`linear_on_cores` up to the very operator that only a GPU has, which is stood in for by the product
    that it documents.
    """
    packed, meta = compress(weight())
    assert meta is not None
    x, bias = torch.randn(5, 128).bfloat16(), torch.randn(64).bfloat16()
    called: list[str] = []

    def product(kept: torch.Tensor, places: torch.Tensor, dense: torch.Tensor, **_: Any) -> torch.Tensor:
        called.append("mm")
        assert dense.shape == (128, 8), "rows are padded to what the kernels take"
        form = torch.sparse.SparseSemiStructuredTensorCUTLASS
        held = form(
            torch.Size((64, 128)),
            packed=kept,
            meta=places,
            packed_t=None,
            meta_t=None,
            compressed_swizzled_bitmask=None,
        )
        return held.to_dense() @ dense

    library = torch.library.Library("aten", "IMPL", "CPU")
    try:
        library.impl("_sparse_semi_structured_mm", product)
        library.impl(
            "_sparse_semi_structured_addmm",
            lambda added, kept, places, dense, **_: product(kept, places, dense) + added[:, None],
        )
        with torch.no_grad():
            found, plain = (
                linear_on_cores(x, packed, meta, bias, 64),
                linear_on_cores(x, packed, meta, None, 64),
            )
    finally:
        library._destroy()
    assert called == ["mm", "mm"]
    wanted = torch.nn.functional.linear(x, weight())
    torch.testing.assert_close(plain, wanted, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(found, wanted + bias, rtol=2e-2, atol=3e-2)


def test_the_operator_stands_every_check_and_counts_the_half_that_is_done(cores: None) -> None:
    packed, meta = compress(weight(dtype=torch.float16))
    x = torch.randn(2, 3, 128).half()
    arguments = (x, packed, meta, None, 64)
    torch.library.opcheck(two_of_four_linear, arguments, test_utils=("test_schema", "test_faketensor"))
    with FlopCounterMode(display=False) as counter:
        two_of_four_linear(*arguments)
    assert counter.get_total_flops() == 2 * 6 * 128 * 64 // 2


def test_bad_weights_and_inputs_are_refused(cores: None) -> None:
    with pytest.raises(UsageError, match="more than two"):
        compress(torch.ones(64, 64, dtype=torch.bfloat16))
    with pytest.raises(UsageError, match="float16 and bfloat16"):
        compress(weight(dtype=torch.float32))
    packed, meta = compress(weight())
    for x in (torch.randn(3, 64).bfloat16(), torch.randn(3, 128)):
        with pytest.raises(UsageError, match="half of the values"):
            two_of_four_linear(x, packed, meta, None, 64)
    with pytest.raises(UsageError, match="cuSPARSELt's form"):
        two_of_four_linear(
            torch.randn(3, 128).bfloat16(),
            torch.cat([packed.flatten(), packed.flatten()[:512]]),
            None,
            None,
            64,
        )


def test_no_cores_names_what_is_lacking(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "NVIDIA's" in (two_of_four.no_cores(torch.device("cpu")) or "")
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.backends.cusparselt, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 0))
    assert "this GPU has 7.0" in (two_of_four.no_cores(torch.device("cuda")) or "")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    assert "no cuSPARSELt" in (two_of_four.no_cores(torch.device("cuda")) or "")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 6))
    assert two_of_four.no_cores(torch.device("cuda")) is None


@pytest.mark.skipif(
    two_of_four.no_cores(torch.device("cuda")) is not None if torch.cuda.is_available() else True,
    reason="needs a GPU",
)
def test_on_a_gpu() -> None:
    program = program_of(torch.bfloat16, device="cuda")
    made, pruned = lowered(program)
    assert made.applied[UP].name == "2:4"
    torch.testing.assert_close(made(*program.args)[0], outputs(pruned)[0], rtol=3e-2, atol=3e-2)
    with torch.device("cuda"):
        assert triton_linears.half_body(KernelCall("linear/2:4", (64, 64, 64))) is not None
