"""Models whose outputs, layouts or kernels are not the usual ones: they are optimized and answer as eager
does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils import _pytree as pytree
from torch_formats import lacking

import effcompile
from effcompile.core.errors import CaptureError, InternalError, LoweringError, UsageError, VerificationError
from effcompile.machine.machines import load_target
from effcompile.machine.target import Target


class Of(nn.Module):
    """A linear layer whose result a function turns into the model's output."""

    def __init__(self, returns: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.linear, self.norm, self.returns = nn.Linear(16, 16), nn.BatchNorm1d(16), returns

    def forward(self, x: Tensor) -> Any:
        return self.returns(self.linear(x), x)


OUTPUTS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "None in a tuple": lambda h, x: (h, None),
    "None in a dict": lambda h, x: {"b": None, "a": h},
    "plain values": lambda h, x: (3, h, "text", True, 2.5),
    "sizes": lambda h, x: (x.shape[0], h, x.shape[1] * 2 + 1, x.numel() // 3, x.shape[0] / 2),
    "a shape": lambda h, x: (h, x.shape),
    "nested": lambda h, x: {"inner": [(h, None), {"n": 1}], "h": h},
    "one tensor twice": lambda h, x: (h, h),
    "an input": lambda h, x: (h, x),
    "a view of another output": lambda h, x: (h, h.transpose(1, 2)),
}


@pytest.fixture
def target() -> Target:
    """A machine that is known, so that no kernels are timed."""
    found = load_target("cpu-generic")
    absent = {"bf16": lacking("bf16"), "int8": lacking("int8_channel")}  # plans run here
    return replace(
        found,
        peak_flops={dtype: peak for dtype, peak in found.peak_flops.items() if absent.get(dtype) is None},
    )


@pytest.mark.parametrize("backend", ["torch-eager", pytest.param("onnxruntime", marks=pytest.mark.slow)])
@pytest.mark.parametrize("returns", OUTPUTS.values(), ids=list(OUTPUTS))
def test_what_a_model_returns_beside_tensors_is_returned(
    returns: Callable[..., Any], backend: str, target: Target
) -> None:
    model = Of(returns).eval()
    run = effcompile.optimize(model, inputs=torch.randn(2, 5, 16), backend=backend, target=target)
    for shape in ((2, 5, 16), (3, 7, 16)):
        _same(run, model, torch.randn(shape))


def test_a_number_read_from_a_tensor_is_refused_in_words() -> None:
    with pytest.raises(CaptureError, match=r"Return the tensor itself"):
        effcompile.optimize(
            Of(lambda h, x: (h, h.sum().item())).eval(), inputs=torch.randn(2, 5, 16), backend="torch-eager"
        )


def test_verification_calls_the_executable_as_a_user_does(
    monkeypatch: pytest.MonkeyPatch, target: Target
) -> None:
    """A fault between the artifact's flat results and what the user receives is found."""
    monkeypatch.setattr(
        "effcompile.ir.program.Program.with_plain_results", lambda self, tensors, inputs: [tensors[0], 4]
    )
    with pytest.raises(VerificationError, match="beside the tensors"):
        effcompile.optimize(
            Of(lambda h, x: (h, 3)).eval(), inputs=torch.randn(2, 5, 16), backend="torch-eager", target=target
        )


@pytest.mark.parametrize("backend", ["torch-eager", pytest.param("onnxruntime", marks=pytest.mark.slow)])
def test_inputs_that_are_not_contiguous(backend: str, target: Target) -> None:
    model = Of(lambda h, x: h.view(-1, 16) + x.reshape(-1, 16)).eval()
    strided = torch.randn(5, 2, 16).transpose(0, 1)
    for example in (strided, torch.randn(2, 5, 16)):
        run = effcompile.optimize(model, inputs=example, backend=backend, target=target)
        _same(run, model, strided)
    viewed = Of(lambda h, x: x.view(-1, 16) * 2).eval()
    run = effcompile.optimize(viewed, inputs=torch.randn(2, 5, 16), backend=backend, target=target)
    assert torch.equal(run(strided), strided.reshape(-1, 16) * 2)


class Divided(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.div(x, 3, rounding_mode="trunc"), torch.div(x, x.abs() % 5 + 2, rounding_mode="trunc")


def test_large_integers_are_divided_as_integers(target: Target) -> None:
    model = Divided().eval()
    ids = torch.arange(-10, 10).view(2, 10)
    run = effcompile.optimize(model, inputs=ids, backend="onnxruntime", target=target)
    for x in (ids, ids * 7 - 2**40):
        assert all(map(torch.equal, run(x), model(x)))


def test_a_negated_view_is_taken(target: Target) -> None:
    model, x = Of(lambda h, x: x * 2).eval(), torch.randn(2, 5, 16)
    run = effcompile.optimize(model, inputs=x, backend="onnxruntime", target=target)
    assert torch.equal(run(torch._neg_view(x)), -2 * x)


NORMED: dict[str, Callable[[Tensor], Tensor]] = {
    "batch norm": lambda h: F.batch_norm(h, None, None, training=True),
    "group norm": lambda h: F.group_norm(h, 4),
    "instance norm": F.instance_norm,
}


@pytest.mark.parametrize(
    "after",
    [lambda h: h.reshape(10, 16), lambda h: h.transpose(1, 2).reshape(10, 16), lambda h: h.flatten(1)],
)
@pytest.mark.parametrize("norm", NORMED.values(), ids=list(NORMED))
def test_norms_of_a_transposed_view(
    norm: Callable[[Tensor], Tensor], after: Callable[[Tensor], Tensor], target: Target
) -> None:
    """Kernels lay their result out otherwise than tracing thinks, so that a reshape that was traced as a view
    is none.
    """
    model = Of(lambda h, x: after(norm(h.transpose(1, 2))))
    x = torch.randn(2, 5, 16)
    _same(effcompile.optimize(model.eval(), inputs=x, backend="torch-eager", target=target), model, x)
    step = Of(
        lambda h, x: (after(norm(h.transpose(1, 2))) ** 2 * torch.arange(16)[: x.shape[-1]].sum()).mean()
    ).train()
    planned = effcompile.optimize(step, inputs=x, mode="training")
    assert torch.allclose(planned(x), step(x))
    planned(torch.randn(5, 2, 16).transpose(0, 1)).backward()


def test_a_training_step_takes_inputs_of_other_strides() -> None:
    model = Of(lambda h, x: h.view(10, 16).square().mean()).train()
    planned = effcompile.optimize(model, inputs=torch.randn(2, 5, 16), mode="training")
    strided = torch.randn(5, 2, 16).transpose(0, 1)
    found, wanted = planned(strided), model(strided)
    found.backward()
    assert torch.allclose(found, wanted)


class Biased(nn.Module):
    """Attention with a learned additive bias, as T5 makes it: with gradients it is computed by another
    kernel, laid out otherwise.
    """

    def __init__(self, looked_up: bool) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.table, self.bias, self.looked_up = (
            nn.Embedding(20, 2),
            nn.Parameter(torch.randn(2, 10, 10)),
            looked_up,
        )
        self.register_buffer("distance", torch.randint(0, 20, (10, 10)))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.view(*x.shape[:2], 2, 8).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        bias = self.table(self.distance).permute(2, 0, 1)[None] if self.looked_up else self.bias
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        return self.out(mixed.transpose(1, 2).reshape(*x.shape[:2], 16))


@pytest.mark.parametrize("max_error", [None, 3e-2])
@pytest.mark.parametrize("looked_up", [False, True])
def test_attention_with_a_learned_bias(looked_up: bool, max_error: float | None, target: Target) -> None:
    model, x = Biased(looked_up).eval(), torch.randn(3, 10, 16)
    run = effcompile.optimize(model, inputs=x, backend="torch-eager", target=target, max_error=max_error)
    found, wanted = run(x), model(x)
    assert float((found - wanted).norm() / wanted.norm()) <= (max_error or 1e-5)


def test_a_pass_that_fails_is_named_with_the_way_around(
    monkeypatch: pytest.MonkeyPatch, target: Target
) -> None:
    def broken(*_: object) -> None:
        raise KeyError("no such thing")

    monkeypatch.setattr("effcompile.passes.quantize.Quantize.apply", broken)
    with pytest.raises(
        InternalError, match=r"'pass quantize': KeyError.*report.*--pass no-quantize"
    ) as raised:
        effcompile.optimize(
            Of(lambda h, x: h).eval(), inputs=torch.randn(2, 5, 16), backend="torch-eager", target=target
        )
    assert isinstance(raised.value.__cause__, KeyError) and raised.value.stage == "pass quantize"


@pytest.mark.parametrize(
    ("place", "stage"),
    [
        ("effcompile.capture.inference.refresh_shapes", "tidy the captured graph"),
        ("effcompile.search.captured.verify_capture", "verify the capture"),
        ("effcompile.backends.torch.backend.edit", "lower to torch-eager"),
        ("effcompile.compiler.settle.verify", "verify torch-eager"),
        ("effcompile.compiler.compile.fingerprint", "optimize"),
    ],
)
def test_every_stage_names_itself(
    place: str, stage: str, monkeypatch: pytest.MonkeyPatch, target: Target
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("boom")

    model, x = Of(lambda h, x: h).eval(), torch.randn(2, 5, 16)
    plan = effcompile.plan(model, inputs=x, backend="torch-eager", target=target)
    monkeypatch.setattr(place, broken)
    with pytest.raises(InternalError, match=rf"at the stage '{stage}': RuntimeError: boom"):
        effcompile.optimize(model, inputs=x, plan=plan)


def test_an_interrupt_is_left_alone(monkeypatch: pytest.MonkeyPatch, target: Target) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("effcompile.compiler.settle.verify", interrupted)
    with pytest.raises(KeyboardInterrupt):
        effcompile.optimize(
            Of(lambda h, x: h).eval(), inputs=torch.randn(2, 5, 16), backend="torch-eager", target=target
        )


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
    ],
)
def test_too_little_memory_is_told_as_such(
    error: Exception, monkeypatch: pytest.MonkeyPatch, target: Target
) -> None:
    def short(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("effcompile.compiler.settle.verify", short)
    with pytest.raises(
        effcompile.EffcompileError, match="Memory ran out while the model was planned or verified"
    ):
        effcompile.optimize(
            Of(lambda h, x: h).eval(), inputs=torch.randn(2, 5, 16), backend="torch-eager", target=target
        )


def test_an_artifact_that_fails_at_a_call_says_so(target: Target) -> None:
    def broken(*_: Tensor) -> list[Tensor]:
        raise IndexError("boom")

    run = effcompile.optimize(
        Of(lambda h, x: h).eval(), inputs=torch.randn(2, 5, 16), backend="torch-eager", target=target
    )
    run._lowered = broken
    with pytest.raises(
        LoweringError, match="as lowered to torch-eager failed with these inputs: IndexError: boom"
    ):
        run(torch.randn(2, 5, 16))


def _same(run: Any, model: nn.Module, *inputs: Tensor) -> None:
    with torch.no_grad():
        wanted = pytree.tree_flatten_with_path(model(*inputs))[0]
    found = pytree.tree_flatten_with_path(run(*inputs))[0]
    for (place, a), (other, b) in zip(found, wanted, strict=True):
        assert place == other
        assert (
            torch.allclose(a, b, rtol=1e-4, atol=1e-5)
            if isinstance(b, Tensor)
            else (a == b and type(a) is type(b))
        )


@pytest.mark.parametrize("backend", [None, "onnxruntime"])
def test_a_model_in_bf16_goes_to_a_backend_that_takes_it(backend: str | None) -> None:
    """No arrays of that dtype are to be had for the others: they are left out with the reason, and refused
    where they are asked for.
    """
    model, x = nn.Sequential(nn.Linear(16, 16), nn.GELU()).bfloat16().eval(), torch.randn(4, 16).bfloat16()
    if backend is not None:
        with pytest.raises(UsageError, match="is bfloat16, and ONNX Runtime is given NumPy's arrays"):
            effcompile.optimize(model, inputs=x, backend=backend)
        return
    run = effcompile.optimize(model, inputs=x)
    assert "is bfloat16" in {c.backend: str(c.note) for c in run.plan.candidates}["onnxruntime"]
    assert torch.allclose(run(x), model(x))


def test_calibration_inputs_by_name_for_an_example_by_position(target: Target) -> None:
    model, x = Of(lambda h, x: h).eval(), torch.randn(2, 5, 16)
    calibration = [{"x": torch.randn(2, 5, 16)}, torch.randn(2, 5, 16)]
    run = effcompile.optimize(
        model, inputs=x, backend="torch-eager", target=target, max_error=3e-2, calibration=calibration
    )
    assert float((run(x) - model(x)).norm() / model(x).norm()) <= 3e-2
    with pytest.raises(effcompile.EffcompileError, match="cannot be called so"):
        effcompile.optimize(
            model, inputs=x, backend="torch-eager", target=target, max_error=3e-2, calibration=[{"y": x}]
        )


@pytest.mark.parametrize("max_error", [1e-3, 3e-2, 0.1])
def test_a_linear_that_reads_another_one(max_error: float, target: Target) -> None:
    """Both become other operators, the second of what the first one became."""
    model, x = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)).eval(), torch.randn(6, 16)
    run = effcompile.optimize(model, inputs=x, backend="torch-eager", target=target, max_error=max_error)
    assert float((run(x) - model(x)).norm() / model(x).norm()) <= max_error


class Flagged(nn.Module):
    """Arguments that are no tensors stand among the graph's placeholders."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor, flag: bool = True, scale: float = 2.0, mask: Tensor | None = None) -> Tensor:
        y: Tensor = self.up(x) * scale
        return self.down(y.relu()) if flag else y


@pytest.mark.parametrize("backend", ["torch-eager", "onnxruntime"])
def test_a_plan_with_an_error_of_a_model_with_plain_arguments(backend: str, target: Target) -> None:
    inputs = {"x": torch.randn(4, 64), "flag": True, "scale": 2.0, "mask": None}
    model = Flagged().eval()
    run = effcompile.optimize(model, inputs=inputs, max_error=0.05, backend=backend, target=target)
    assert any(d.option != d.baseline for d in run.plan.decisions)
    assert float((run(**inputs) - model(**inputs)).norm() / model(**inputs).norm()) <= 0.05


class Patches(nn.Module):
    """Numbers of which the first is a row to look up, as Pix2Struct's patches begin with theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.linear = nn.Embedding(6, 16), nn.Linear(9, 16)

    def forward(self, patches: Tensor) -> Tensor:
        return self.linear(patches[:, :, 1:]) + self.rows(patches[:, :, 0].long())  # type: ignore[no-any-return]


@pytest.mark.parametrize("backend", ["torch-eager", "onnxruntime"])
@pytest.mark.parametrize("max_error", [None, 0.05])
def test_indices_that_begin_rows_of_numbers(backend: str, max_error: float | None) -> None:
    torch.manual_seed(0)
    model, patches = Patches().eval(), torch.randn(2, 5, 10) * 9
    patches[:, :, 0] = torch.arange(5)
    made = effcompile.optimize(model, inputs=patches, backend=backend, max_error=max_error)
    other = torch.cat([torch.full((2, 5, 1), 3.0), -patches[:, :, 1:]], 2)
    for given in (patches, other):
        wanted = model(given)
        assert float((made(given) - wanted).norm() / wanted.norm()) < (max_error or 1e-5)
    for wrong in (-1.0, 6.0):
        other[0, 0, 0] = wrong
        with pytest.raises(Exception, match=r"index|range|bounds"):
            made(other)
