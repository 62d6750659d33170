"""Gradients of a planned step beyond its parameters': to its inputs, and through outputs that are returned
for show.
"""

from typing import Any

import pytest
import torch
from torch import nn
from train_helpers import gpt2, twin

from effcompile.compiler import TrainingExecutable, frontier_training, optimize_training, plan_training
from effcompile.core.errors import InputsError
from effcompile.core.goal import Goal

pytestmark = pytest.mark.usefixtures("quick_training")


def optimize(
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Any = None,
    memory: int | None = None,
    **request: Any,
) -> Any:
    goal = Goal(mode="training", memory=memory, max_error=request.pop("max_error", None))
    return optimize_training(model, args, kwargs or {}, goal=goal, **{"passes": ["no-pointwise"], **request})


class Net(nn.Module):
    """Cross entropy of a residual MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.head = nn.Linear(16, 64), nn.Linear(64, 16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.head(self.down(torch.relu(self.up(x))) + x), y)


@pytest.fixture
def net() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return Net(), torch.randn(8, 16), torch.randint(0, 4, (8,))


def leaf(x: torch.Tensor) -> torch.Tensor:
    return x.detach().clone().requires_grad_()


def same_gradients(ours: nn.Module, theirs: nn.Module) -> bool:
    pairs = zip(ours.parameters(), theirs.parameters(), strict=True)
    return all(
        (a.grad is None) == (b.grad is None) and (a.grad is None or torch.allclose(a.grad, b.grad, atol=1e-6))
        for a, b in pairs
    )


def test_an_input_that_requires_a_gradient_gets_it(net: Any) -> None:
    model, x, y = net
    executable, eager = optimize(model, (leaf(x), y)), twin(model)
    for _ in range(2):
        ours, theirs = leaf(x), leaf(x)
        executable(ours, y).backward()
        eager(theirs, y).backward()
        assert ours.grad is not None and theirs.grad is not None and bool(theirs.grad.any())
        assert torch.equal(ours.grad, theirs.grad) and same_gradients(executable, eager)


def test_what_makes_an_input_is_trained_and_left_alone_by_planning(net: Any) -> None:
    model, x, y = net
    encoder = nn.Linear(16, 16)
    executable, eager, encoder_twin = optimize(model, (encoder(x), y)), twin(model), twin(encoder)
    assert all(p.grad is None for p in (*encoder.parameters(), *model.parameters()))
    for trained, behind in ((executable, encoder), (eager, encoder_twin)):
        stepper = torch.optim.SGD([*behind.parameters(), *trained.parameters()], lr=0.5)
        for _ in range(4):
            stepper.zero_grad()
            trained(behind(x), y).backward()
            stepper.step()
    for a, b in zip(
        (*encoder.parameters(), *model.parameters()),
        (*encoder_twin.parameters(), *eager.parameters()),
        strict=True,
    ):
        assert torch.equal(a, b)


def test_a_new_gradient_is_refused_in_words_and_an_unwanted_one_is_none(net: Any) -> None:
    model, x, y = net
    executable = optimize(model, (x, y))
    with pytest.raises(InputsError, match=r"x requires a gradient at this call .* or give x.detach\(\)"):
        executable(leaf(x), y)
    with torch.no_grad():
        assert float(executable(leaf(x), y)) > 0
    executable = optimize(model, (leaf(x), y))
    executable(x, y).backward()
    assert x.grad is None and model.head.weight.grad is not None


def test_a_frozen_model_trains_what_is_before_it(net: Any) -> None:
    model, x, y = net
    model.requires_grad_(False)
    ours, theirs = leaf(x), leaf(x)
    executable = optimize(model, (leaf(x), y))
    executable(ours, y).backward()
    model(theirs, y).backward()
    assert (
        ours.grad is not None
        and torch.equal(ours.grad, theirs.grad)
        and all(p.grad is None for p in model.parameters())
    )


def test_soft_prompts_of_a_language_model_within_a_budget() -> None:
    model, batch = gpt2(layers=1, dropout=0.0)
    passes = ["no-pointwise", "loss_head.chunks=4"]
    embedded = model.get_input_embeddings()(batch["input_ids"]).detach()
    kwargs = {"inputs_embeds": leaf(embedded), "labels": batch["labels"]}
    free = plan_training(
        model, (), kwargs, goal=Goal(mode="training"), passes=["no-pointwise", "no-loss_head"]
    ).peak_bytes
    executable = optimize(model, kwargs=kwargs, memory=free * 19 // 20, passes=passes)
    assert executable.plan.measured.peak_bytes <= free * 19 // 20
    eager, ours, theirs = twin(model), leaf(embedded), leaf(embedded)
    executable(inputs_embeds=ours, labels=batch["labels"]).loss.backward()
    eager(inputs_embeds=theirs, labels=batch["labels"]).loss.backward()
    assert (
        ours.grad is not None
        and theirs.grad is not None
        and torch.allclose(ours.grad, theirs.grad, atol=1e-7, rtol=1e-4)
    )
    assert "inputs_embeds [2 × 16 × 32] float32, with its gradient" in executable.plan.inputs


def test_an_input_and_a_parameter_of_one_name_are_two() -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.x = nn.Parameter(torch.randn(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.x * x).square().sum()

    model, given = Scale(), torch.randn(4)
    executable, ours = optimize(model, (leaf(given),)), leaf(given)
    executable(ours).backward()
    assert ours.grad is not None and model.x.grad is not None
    assert torch.allclose(ours.grad, 2 * given * model.x.detach() ** 2) and torch.allclose(
        model.x.grad, 2 * model.x.detach() * given**2
    )


def test_a_gradient_in_16_bits_arrives_in_the_inputs_own_dtype(net: Any) -> None:
    model, x, y = net
    executable = optimize(
        model, (leaf(x), y), max_error=0.1, passes=["no-pointwise", "precision.always=true"]
    )
    ours, theirs = leaf(x), leaf(x)
    executable(ours, y).backward()
    twin(model)(theirs, y).backward()
    assert ours.grad is not None and theirs.grad is not None and ours.grad.dtype == torch.float32
    assert float((ours.grad - theirs.grad).norm() / theirs.grad.norm()) < 0.1


class Auxiliary(nn.Module):
    """A loss, and an auxiliary one beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = torch.tanh(self.body(x))
        logits = self.head(hidden)
        return {
            "loss": nn.functional.cross_entropy(logits, y),
            "aux": hidden.square().mean(),
            "logits": logits,
            "best": logits.argmax(-1),
        }


def test_outputs_for_show_say_so_when_they_are_differentiated(net: Any) -> None:
    _, x, y = net
    executable: TrainingExecutable = optimize(Auxiliary(), (x, y), keep_outputs=True)
    output = executable(x, y)
    with pytest.raises(
        InputsError, match=r"A gradient arrived at aux, .* outputs.loss \+ .* or take aux.detach"
    ):
        (output["loss"] + output["aux"]).backward()
    with pytest.raises(InputsError, match="A gradient arrived at logits"):
        executable(x, y)["logits"].sum().backward()
    assert not output["best"].requires_grad
    output = executable(x, y)
    (output["loss"] + output["aux"].detach()).backward()
    assert executable.head.weight.grad is not None


def test_an_auxiliary_loss_within_the_loss_is_trained(net: Any) -> None:
    _, x, y = net
    model = Auxiliary()
    eager = twin(model)
    executable = optimize(
        model, (x, y), keep_outputs=True, loss=lambda outputs, inputs: outputs["loss"] + outputs["aux"]
    )
    loss, outputs = executable(x, y)
    loss.backward()
    theirs = eager(x, y)
    (theirs["loss"] + theirs["aux"]).backward()
    assert same_gradients(executable, eager) and torch.equal(
        outputs["logits"].detach(), theirs["logits"].detach()
    )


def test_functional_call_with_other_parameters_is_right(net: Any) -> None:
    model, x, y = net
    executable = optimize(model, (x, y))
    others = {name: leaf(torch.randn_like(p)) for name, p in model.named_parameters()}
    theirs = {name: leaf(p) for name, p in others.items()}
    torch.func.functional_call(executable, others, (x, y)).backward()
    torch.func.functional_call(twin(model), theirs, (x, y)).backward()
    for name, p in others.items():
        assert p.grad is not None and theirs[name].grad is not None and torch.equal(p.grad, theirs[name].grad)
    assert all(p.grad is None for p in model.parameters())


def test_transforms_of_torch_func_are_refused_in_words(net: Any) -> None:
    model, x, y = net
    executable = optimize(model, (x, y))
    parameters = dict(model.named_parameters())
    with pytest.raises(InputsError, match=r"within a transform of torch\.func .* use loss\.backward\(\)"):
        torch.func.grad(lambda p: torch.func.functional_call(executable, p, (x, y)))(parameters)
    with pytest.raises(InputsError, match=r"within a transform of torch\.func"):
        torch.func.vmap(lambda one: executable(one, y))(x[None])


def test_a_trace_of_the_step_is_refused_in_words(net: Any) -> None:
    model, x, y = net
    with pytest.raises(InputsError, match=r"within torch\.export .* or the model itself there"):
        torch.export.export(optimize(model, (x, y)), (x, y))


def test_a_frozen_parameter_is_not_updated_in_the_backward(net: Any) -> None:
    model, x, y = net
    request = {
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "passes": ["no-pointwise", "states.in_backward=true"],
    }
    front = frontier_training(model, (x, y), {}, goal=Goal(mode="training"), **request)
    executable = optimize(model, (x, y), memory=front[0].peak_bytes, **request)
    assert executable.runner.consumed
    model.head.requires_grad_(False)
    with pytest.raises(InputsError, match="is frozen now, and the planned backward would update it"):
        executable(x, y)


def test_a_gradient_that_the_backward_has_consumed_cannot_be_clipped_or_read(net: Any) -> None:
    model, x, y = net
    eager = twin(model)
    request = {
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "passes": ["no-pointwise", "states.in_backward=true"],
    }
    front = frontier_training(model, (x, y), {}, goal=Goal(mode="training"), **request)
    executable = optimize(model, (x, y), memory=front[0].peak_bytes, **request)
    executable(x, y).backward()
    for read in (
        # of no gradients at all it says 0 and clips nothing
        lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
        lambda: nn.utils.clip_grad_value_(model.parameters(), 1.0),
        lambda: sum(float(p.grad.norm()) for p in model.parameters() if p.grad is not None),
        lambda: torch.stack([p.grad for p in model.head.parameters()]),
    ):
        with pytest.raises(InputsError, match=r"that this plan's backward has consumed.*in_backward=false"):
            read()
    assert "consumed" in repr(model.head.weight.grad)
    executable.optimizer.step()
    assert all(p.grad is None for p in model.parameters())
    executable.optimizer.step(lambda: executable(x, y).backward())
    theirs = torch.optim.SGD(eager.parameters(), lr=0.1)
    for _ in range(2):
        eager(x, y).backward()
        theirs.step()
        theirs.zero_grad()
    assert all(
        torch.allclose(a, b, atol=1e-6) for a, b in zip(model.parameters(), eager.parameters(), strict=True)
    )


@pytest.mark.parametrize("passes", [["no-pointwise"], ["no-pointwise", "microbatch.count=2"]])
def test_a_penalty_on_the_gradient_is_refused_in_words(net: Any, passes: list[str]) -> None:
    model, x, y = net
    executable = optimize(model, (x, y), passes=passes)
    gradients = torch.autograd.grad(executable(x, y), list(model.parameters()), create_graph=True)
    eager = twin(model)
    wanted = torch.autograd.grad(eager(x, y), list(eager.parameters()))
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(gradients, wanted, strict=True))
    with pytest.raises(InputsError, match=r"differentiated again .* the second derivative would be lost"):
        (executable(x, y) + sum(g.square().sum() for g in gradients)).backward()
    with pytest.raises(InputsError, match="differentiated again"):
        torch.autograd.grad(gradients[0].sum(), [list(model.parameters())[-1]], allow_unused=True)
