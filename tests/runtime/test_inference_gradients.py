"""What an optimized inference model does in a loss: it never takes part silently without a gradient."""

from typing import Any

import pytest
import torch
from torch import nn

import effcompile
from effcompile.compiler import Executable, optimize
from effcompile.core.errors import InputsError
from effcompile.core.goal import Goal


class Net(nn.Module):
    """Returns floats, integers, and one of its inputs as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.b(torch.relu(self.a(x)))
        return {"y": y, "best": y.argmax(-1), "x": x}


@pytest.fixture(scope="module", params=["onnxruntime", "torch-eager"])
def made(request: Any) -> tuple[nn.Module, Executable]:
    torch.manual_seed(0)
    model = Net()
    return model, optimize(
        model, (torch.randn(4, 16),), {}, goal=Goal(), target="cpu-generic", backend=request.param
    )


def test_a_mixed_loss_is_refused_in_words_and_never_loses_a_gradient(made: Any) -> None:
    model, fast = made
    upstream = nn.Linear(16, 16)
    features = upstream(torch.randn(4, 16))
    result = fast(features)["y"]
    assert torch.allclose(result, model(features)["y"], atol=1e-5)
    with pytest.raises(
        InputsError,
        match=r"no backward, and an input of this call requires one, .*no_grad\(\) or take \.detach",
    ):
        (result.square().mean() + features.mean()).backward()
    assert upstream.weight.grad is None
    (fast(features)["y"].detach().square().mean() + features.mean()).backward()
    assert upstream.weight.grad is not None


def test_the_models_own_parameters_are_not_lost_either(made: Any) -> None:
    model, fast = made
    x = torch.randn(4, 16)
    with pytest.raises(InputsError, match="parameters of the model require one"):
        fast(x)["y"].mean().backward()
    model.requires_grad_(False)
    try:
        assert not fast(x)["y"].requires_grad
    finally:
        model.requires_grad_(True)


def test_a_gradient_that_may_be_missing_is_refused_too(made: Any) -> None:
    """torch.autograd.grad runs no backward that leads to nothing it asks for, and gives None there where it
    may.
    """
    model, fast = made
    x = torch.randn(4, 16, requires_grad=True)
    for wanted in (x, model.a.weight, model.b.bias):
        with pytest.raises(InputsError, match="no backward"):
            torch.autograd.grad(fast(x)["y"].mean(), [wanted], allow_unused=True)


def test_without_gradients_nothing_is_in_the_way(made: Any) -> None:
    _, fast = made
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            found = fast(torch.randn(4, 16))
            assert not any(value.requires_grad for value in found.values()) and found["y"].numpy().shape == (
                4,
                16,
            )


def test_results_can_be_changed_in_place_and_the_inputs_stay_the_users(made: Any) -> None:
    _, fast = made
    x = torch.randn(4, 16)
    found = fast(x)
    assert (
        not x.requires_grad
        and x.grad_fn is None
        and not found["best"].requires_grad
        and torch.equal(found["x"], x)
    )
    found["y"] += 1
    found["y"][0] = 0
    assert not fast(x)["y"][0].eq(0).all()


def test_the_original_is_trained_after_train(made: Any) -> None:
    model, fast = made
    fast.train()
    try:
        fast(torch.randn(4, 16))["y"].mean().backward()
        assert model.a.weight.grad is not None
    finally:
        fast.eval()
        model.zero_grad()


@pytest.mark.parametrize(
    "transform",
    [
        lambda f, x: torch.func.grad(f)(x),
        lambda f, x: torch.func.vmap(f)(x[None]),
        lambda f, x: torch.func.jvp(f, (x,), (x,)),
    ],
)
def test_transforms_of_torch_func_are_refused_in_words(made: Any, transform: Any) -> None:
    with pytest.raises(InputsError, match=r"within a transform of torch\.func"):
        transform(lambda x: made[1](x)["y"].sum(), torch.randn(4, 16))


@pytest.mark.parametrize(
    "trace",
    [lambda f, x: torch.export.export(f, (x,)), lambda f, x: torch.jit.trace(f, (x,))],
    ids=["export", "jit"],
)
def test_traces_are_refused_in_words(made: Any, trace: Any) -> None:
    """What is lowered would be recorded as constants, or fake weights taken for a change."""
    with pytest.raises(InputsError, match=r"within torch\.export or torch\.jit\.trace"):
        trace(made[1], torch.randn(4, 16))


def test_forward_mode_autograd_is_refused_as_its_tangent_would_be_lost(made: Any) -> None:
    x = torch.randn(4, 16)
    with torch.autograd.forward_ad.dual_level(), pytest.raises(InputsError, match=r"within a transform"):
        made[1](torch.autograd.forward_ad.make_dual(x, x))


@pytest.mark.parametrize(
    "change",
    [lambda m: m.to(torch.bfloat16), lambda m: m.half(), lambda m: m.double(), lambda m: m.to("meta")],
)
def test_another_dtype_or_device_is_refused_and_the_same_one_is_not(made: Any, change: Any) -> None:
    model, fast = made
    with pytest.raises(
        InputsError,
        match=r"fixed when it is planned: torch.float32 on cpu. They cannot become .* Convert the model",
    ):
        change(fast)
    assert model.a.weight.dtype == torch.float32 and model.a.weight.device.type == "cpu"
    assert (
        fast.to("cpu") is fast
        and fast.float() is fast
        and fast.to(torch.float32)(torch.randn(4, 16))["y"].shape == (4, 16)
    )


def test_a_decorated_function_refuses_too() -> None:
    @effcompile.optimize(target="cpu-generic", backend="torch-eager")
    def scaled(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.gelu(x @ y)

    x, y = torch.randn(4, 8), torch.randn(8, 8)
    assert not scaled(x, y).requires_grad
    with pytest.raises(InputsError, match="A gradient arrived"):
        scaled(x.requires_grad_(), y).sum().backward()
