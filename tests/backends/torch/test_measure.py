"""Kernels are timed where torch has them and refused where not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch
from form_names import KNOWN, form
from torch._dynamo.utils import counters
from torch._inductor import config as inductor_config
from torch._inductor import cpu_vec_isa
from torch_formats import lacking, where_there

from effcompile.backends.torch import TorchEager, TorchInductor, measure, measure_linears
from effcompile.core.torch_compat_narrow import has_bf16_products
from effcompile.ir.formats import TABLE_INT8_GROUPS
from effcompile.machine.grid import grid
from effcompile.machine.target import KERNELS, KernelCall
from effcompile.ops import bf16_attention, int8_attention, row_program, rows_native, tape
from effcompile.ops.group_linear import group_linear
from effcompile.ops.torch_attention import runs_in

DIMS = {call.kernel: call.dims for call in grid(quick=True)}
DIMS["linear/int13_token"] = (9, 64, 64)  # more rows than a program of few tokens takes


def _has_bf16_attention() -> bool:
    return bf16_attention.fallback_reason() is None or (has_bf16_products() and runs_in(torch.bfloat16))


ABSENT = {
    "attention/packed",
    "attention/sdpa_int8",
    "linear/2:4",
    "linear/w8",
    "embedding/int8",
    *(kernel for kernel in KERNELS if kernel.startswith("rows/") and isinstance(rows_native.kernels(), str)),
    *(["add_norm/fused"] if isinstance(rows_native.kernels(), str) else []),
    *([] if _has_bf16_attention() else ["attention/sdpa_bf16"]),
    *([] if int8_attention.fallback_reason() is None else ["attention/sdpa_int8_token"]),
}


def _where_there(kernel: str) -> Any:
    name = kernel.removeprefix("linear/")
    return where_there(name, id=kernel, value=kernel) if name in KNOWN and name != kernel else kernel


@pytest.mark.parametrize("kernel", [_where_there(k) for k in KERNELS if k not in ABSENT])
def test_times_every_kernel_it_has(kernel: str) -> None:
    seconds = TorchEager().measure(KernelCall(kernel, DIMS[kernel]))
    assert seconds is not None
    assert 0 < seconds < 1


@pytest.mark.parametrize("kernel", sorted(ABSENT))
def test_has_no_such_kernel(kernel: str) -> None:
    assert TorchEager().measure(KernelCall(kernel, DIMS.get(kernel, (1, 2, 8, 8, 16)))) is None


def test_4_bit_needs_whole_groups() -> None:
    assert TorchEager().measure(KernelCall("linear/w4", (4, 64, 64, 32))) is not None
    call = KernelCall("linear/w4", (4, 40, 64, 32))
    assert TorchEager().measure(call) is None
    assert (
        str(TorchEager().lacks(call))
        == "4-bit weights need K a multiple of 32 and N of 32; here K = 40, N = 64"
    )


def test_what_torch_lacks_on_any_machine_it_says() -> None:
    assert "groups of 32, 64, 128, 256, not of 16" in str(
        TorchEager().lacks(KernelCall("linear/w4", (4, 64, 64, 16)))
    )
    assert "w8_channel" in str(TorchEager().lacks(KernelCall("linear/w8", (4, 64, 64, 32))))
    assert TorchEager().lacks(KernelCall("linear/w4", (4, 64, 64, 64))) is None


@pytest.mark.parametrize(
    ("kernel", "engine"),
    [
        ("linear/int8_token", "torch-eager"), ("linear/fp32", "torch-eager"), ("linear/bf16", "torch-eager"),
        ("embedding/fp32", "torch-eager"), ("attention/math", "torch-eager"),
        ("linear/int8_static", "torch-inductor"), ("norm/layer", "torch-inductor"),
    ],
)  # fmt: skip
def test_an_operator_that_is_one_to_both_engines_is_priced_as_eagers(kernel: str, engine: str) -> None:
    call = KernelCall(kernel, DIMS[kernel])
    assert measure.priced_as("torch-inductor", call) == engine
    for other in ("torch-eager", "torch", "onnxruntime"):
        assert measure.priced_as(other, call) == other


@pytest.mark.skipif(lacking("int8_dynamic") is not None, reason="no such kernel here")
def test_a_product_of_codes_is_timed_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    call = KernelCall("product/int8", (8, 32, 48))
    made = counters["stats"]["unique_graphs"]
    assert measure.measure(
        call, measure.priced_as("torch-inductor", call).removeprefix("torch-"), device="cpu"
    )
    assert counters["stats"]["unique_graphs"] == made
    (body,) = measure_linears.linears(form("int8_static").weights, call.dims, "eager", 1)
    assert body().shape == measure_linears.of_codes(call.dims, "eager")().shape == (8, 48)


def test_kernels_of_inductor_are_timed_as_it_compiles_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its cache gave them for another ATEN_CPU_CAPABILITY, and it built every instruction set first."""
    seen: list[int | None] = []
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "avx2")
    monkeypatch.setattr(cpu_vec_isa, "pick_vec_isa", lambda: SimpleNamespace(bit_width=lambda: 256))
    noted = lambda dims, engine: lambda: seen.append(inductor_config.cpp.simdlen)  # noqa: E731
    monkeypatch.setitem(measure._KERNELS, "norm/layer", noted)
    for engine, width in (("eager", None), ("inductor", 256)):
        seen.clear()
        measure.measure(KernelCall("norm/layer", DIMS["norm/layer"]), engine)
        assert set(seen) == {width}


@pytest.mark.parametrize("name", ["int8_token", "int8_groups", where_there("w4"), where_there("w8_channel")])
def test_copies_have_weights_of_their_own_and_the_same_product(name: str) -> None:
    first, *others = measure_linears.linears(form(name).weights, (4, 64, 64), "eager", 3)
    wanted = first()
    for other in others:
        assert torch.equal(other(), wanted)
        pointers = [{w.data_ptr() for w in each.weights} for each in (first, other)]
        assert not pointers[0] & pointers[1]


@pytest.mark.skipif(not row_program.available(), reason="no kernels are compiled here")
@pytest.mark.parametrize("name", ["fp32", "int8_token", "int8_groups", "int4_groups"])
@pytest.mark.parametrize("rows", [1, 3])
def test_few_rows_are_timed_as_one_call_that_makes_all_products(name: str, rows: int) -> None:
    """Each on the weight of its own: x is drawn anew, so the products are those of the call's x."""
    held, dims = form(name).weights, (rows, 96, 64)
    made = measure_linears.linears(held, dims, "eager", 3)
    for at, body in enumerate(made):  # so that no two are alike
        if name == "fp32":
            body.weights[0].mul_(at + 1)
    call = measure_linears.in_one_call(held, dims, made)
    products = call()
    (x,) = call.args
    assert len(products) == 3 and all(each.shape == (1, rows, 64) for each in products)
    for product, body in zip(products, made, strict=True):
        alone = body.product.func(x, *body.weights) if name in ("fp32", "int8_token") else None
        wanted = group_linear(x, body.weights[0], 64, body.weights[1]) if alone is None else alone
        torch.testing.assert_close(product, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", [where_there(name) for name in ("fp32", "int8_token", "int13_token")])
def test_more_rows_are_timed_as_one_tape(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All steps run, none from Python, and the last is the product of its own weight."""
    monkeypatch.setattr(measure_linears, "packing", lambda *dims, ours: "ours")
    held, dims = form(name).weights, (17, 96, 64)
    made = measure_linears.linears(held, dims, "eager", 3)
    made[2].weights[1].mul_(2)  # scales or the bias: else all were alike
    call = measure_linears.in_one_call(held, dims, made)
    counts: list[int] = []
    if (run := tape._runner()) is not None:
        monkeypatch.setattr(tape, "_runner", lambda: lambda *given: (counts.append(given[1]), run(*given)))
    (product,) = call()
    (x,) = call.args
    run_from_python = made[2].product.func
    given = ("ours", x) if name == "fp32" else (x,)
    torch.testing.assert_close(product, run_from_python(*given, *made[2].weights), rtol=0, atol=0)
    assert counts == ([3] if run is not None else [])


@pytest.mark.parametrize(("name", "rows"), [where_there("int8_channel", 9), where_there("bf16", 1)])
def test_what_no_call_does_together_is_called_one_by_one(name: str, rows: int) -> None:
    held = form(name).weights
    made = measure_linears.linears(held, (rows, 64, 64), "eager", 2)
    assert measure_linears.in_one_call(held, (rows, 64, 64), made) is None


def test_a_short_attention_of_ours_is_timed_as_batches_and_torchs_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A tape calls it without Python, whose call of 16 queries took three times as long as the kernel."""
    asked = dict[str, tuple[int, ...]]()
    one, many = (2, 12, 16, 16, 32), (16, 12, 16, 16, 32)
    for kernel in ("attention/sdpa", "attention/sdpa_fp32", "attention/sdpa_bf16"):
        make = lambda dims, engine, kernel=kernel: asked.update({kernel: dims})  # noqa: E731
        monkeypatch.setitem(measure._KERNELS, kernel, make)
        monkeypatch.setattr(bf16_attention, "fallback_reason", lambda: None)
        measure.measure(KernelCall(kernel, one), "eager")
    assert asked == {"attention/sdpa": one, "attention/sdpa_fp32": many, "attention/sdpa_bf16": many}
    monkeypatch.setattr(bf16_attention, "fallback_reason", lambda: "asked for")
    measure.measure(KernelCall("attention/sdpa_bf16", one), "eager")
    assert asked["attention/sdpa_bf16"] == one, "by torch, called from Python"


def test_a_table_in_groups_has_any_width() -> None:
    """Its last dimension is no group's size."""
    call = KernelCall("embedding/int8_row_groups", (3, 70))
    assert call.format == TABLE_INT8_GROUPS
    seconds = TorchEager().measure(call)
    assert seconds is not None and seconds > 0


@pytest.mark.skipif(not row_program.available(), reason="no kernels are compiled here")
def test_torchs_own_weights_of_few_rows_end_no_region() -> None:
    for kernel, more in (("linear/w4", (32,)), ("linear/w8_channel", ())):
        few = KernelCall(kernel, (1, 512, 512, *more))
        assert TorchEager().measure(few) is None and "one call of all layers" in str(TorchEager().lacks(few))
        assert TorchEager().lacks(KernelCall(kernel, (64, 512, 512, *more))) is None


@pytest.fixture
def nothing_compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))

    def forget() -> None:
        torch._dynamo.reset()
        measure._build_ahead.cache_clear()
        measure_linears._compiled.cache_clear()

    forget()
    yield
    forget()


@pytest.mark.skipif(TorchInductor().unavailable() is not None, reason="no C++ compiler")
@pytest.mark.skipif(lacking("int8_dynamic") is not None, reason="no such kernel here")
def test_the_first_price_of_inductor_has_its_kernels_of_a_kind_built_at_once(nothing_compiled: None) -> None:
    """While one is generated, others are built: then none is generated any more, at whatever shape."""
    in_bytes = [
        *(KernelCall(f"linear/int8_{kind}", (8, 32, 48)) for kind in ("dynamic", "channel", "static")),
        *(KernelCall(f"linear/int8_{kind}", (1, 64, 32)) for kind in ("dynamic", "static")),
    ]
    between = [
        KernelCall("gelu/erf", (1000,)),
        KernelCall("gelu/tanh", (77,)),
        KernelCall("add_norm/split", (16, 40)),
    ]
    pointwise = [KernelCall("pointwise/fp32", (12,)), KernelCall("pointwise/fp32", (1,))]
    for calls, least in ((between, 3), (in_bytes, 2), (pointwise, 1)):
        before = counters["stats"]["unique_graphs"]
        assert measure.measure(calls[0], "inductor", device="cpu")
        made = counters["stats"]["unique_graphs"]
        assert made - before >= least
        assert all(measure.measure(call, "inductor", device="cpu") for call in calls[1:])
        assert counters["stats"]["unique_graphs"] == made


@pytest.mark.skipif(TorchInductor().unavailable() is not None, reason="no C++ compiler")
def test_what_cannot_be_built_ahead_fails_where_it_is_timed(
    nothing_compiled: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(dims: tuple[int, ...], engine: str) -> NoReturn:
        def body() -> NoReturn:
            raise RuntimeError("no such kernel")

        return body  # type: ignore[return-value]

    monkeypatch.setitem(measure._KERNELS, "gelu/erf", broken)
    assert measure.measure(KernelCall("pointwise/fp32", (12,)), "inductor", device="cpu")
    with pytest.raises(RuntimeError, match="no such kernel"):
        measure.measure(KernelCall("gelu/erf", (12,)), "inductor", device="cpu")
