"""Training steps of an unusual kind are planned and right, or refused in words."""

from __future__ import annotations

import copy
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import effcompile
from effcompile.core.errors import CaptureError, GuardError, InternalError, UsageError
from effcompile.core.reasons import Because
from effcompile.proof.training.exact import rounded_otherwise
from effcompile.proof.training.verify import Result, compare
from effcompile.report.reasons import words


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32, bias=False), nn.Linear(32, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x))).square().mean()


class Lookup(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 16, sparse=True)

    def forward(self, ids: Tensor) -> Tensor:
        return self.table(ids).square().mean()


class Resized(nn.Module):
    """A head of images that are brought to one size before a batch norm, which sees no bias."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        self.mode = mode
        self.project, self.fuse, self.norm = (
            nn.Linear(8, 16),
            nn.Conv2d(16, 16, 1, bias=False),
            nn.BatchNorm2d(16),
        )

    def forward(self, x: Tensor) -> Tensor:
        image = self.project(x).transpose(1, 2).reshape(len(x), -1, 6, 6)
        larger = F.interpolate(image, size=(19, 17), mode=self.mode)
        return torch.sin(self.norm(self.fuse(larger))).square().mean()


class Squared(nn.Module):
    def __init__(self, inner: nn.Sequential) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).square().mean()


@pytest.mark.parametrize("mode", ["bilinear", "nearest", "bicubic"])
def test_images_are_resized_by_one_operator_as_autograd_has_it(mode: str) -> None:
    torch.manual_seed(0)
    model, x = Resized(mode), torch.randn(2, 36, 8)
    twin = copy.deepcopy(model)
    planned = effcompile.optimize(model, inputs=x, mode="training", minimize="memory")
    for stepped in (planned, twin):
        stepped(x).backward()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)  # type: ignore[arg-type]


@pytest.mark.parametrize("frozen", [False, True], ids=["training", "one in eval mode"])
def test_a_batch_norm_without_momentum_has_the_mean_of_all_batches(frozen: bool) -> None:
    """Its factor is one over the number of batches: another one at every step."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8, momentum=None), nn.ReLU(), nn.Conv2d(8, 8, 3)]
    model = Squared(nn.Sequential(*layers, nn.BatchNorm2d(8, momentum=None, affine=False), nn.Sigmoid()))
    model.inner[1].train(not frozen)
    own = copy.deepcopy(model)
    planned = effcompile.optimize(model, inputs=torch.randn(4, 3, 9, 9), mode="training")
    assert "forward" not in vars(model.inner[1]) and int(model.inner[4].num_batches_tracked) == 0
    for images in torch.randn(4, 4, 3, 9, 9):
        for stepped in (planned, own):
            stepped.zero_grad()
            stepped(images).backward()
        for (name, ours), theirs in zip(model.named_buffers(), own.buffers(), strict=True):
            torch.testing.assert_close(ours, theirs, msg=name)
        for ours, theirs in zip(model.parameters(), own.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad)
    counted = [int(model.inner[at].num_batches_tracked) for at in (1, 4)]
    assert counted == ([0, 4] if frozen else [4, 4])
    model.inner[4].momentum = 0.1
    with pytest.raises(GuardError, match=r"momentum was None and is 0\.1"):
        planned(images)


def test_sparse_gradients_are_refused_in_words() -> None:
    with pytest.raises(CaptureError, match=r"table: nn.Embedding\(sparse=True\).*`sparse` to False"):
        effcompile.optimize(Lookup(), inputs=torch.randint(0, 50, (4, 8)), mode="training")


class Inverted(Small):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x @ torch.linalg.inv(self.up.weight[:16]))


def test_an_operator_that_also_checks_is_refused_in_words() -> None:
    with pytest.raises(CaptureError, match=r"_linalg_check_errors.*use inv_ex, solve_ex and cholesky_ex"):
        effcompile.optimize(Inverted(), inputs=torch.randn(4, 16), mode="training")


@pytest.mark.parametrize("kind", [torch.optim.Muon, torch.optim.Adafactor, torch.optim.ASGD])
def test_optimizers_that_want_matrices_or_read_their_tensors(kind: Any) -> None:
    """Two planned updates are the optimizer's own."""
    model, x = Small(), torch.randn(4, 16)
    twin = copy.deepcopy(model)
    planned = effcompile.optimize(
        model, inputs=x, mode="training", optimizer=kind(model.parameters(), lr=0.01)
    )
    theirs = kind(twin.parameters(), lr=0.01)
    for _ in range(2):
        for stepped, optimizer in ((planned, planned.optimizer), (twin, theirs)):
            optimizer.zero_grad()
            stepped(x).backward()
            optimizer.step()
    assert all(
        torch.allclose(a, b, atol=1e-6) for a, b in zip(model.parameters(), twin.parameters(), strict=True)
    )


def test_an_optimizer_of_sparse_gradients_is_refused_in_words() -> None:
    model = Small()
    with pytest.raises(
        UsageError, match=r"SparseAdam cannot be planned: its step raises .* Leave the optimizer out"
    ):
        effcompile.optimize(
            model,
            inputs=torch.randn(4, 16),
            mode="training",
            optimizer=torch.optim.SparseAdam(list(model.parameters())),
        )


class Writes(nn.Module):
    """Under autocast it writes the products of a linear layer, in 16 bits, into a tensor in 32."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor, order: Tensor) -> Tensor:
        z = torch.zeros_like(x)
        z[order] = self.a(x)
        return self.b(z).square().mean()


def test_a_dtype_in_which_no_kernel_writes_is_declined() -> None:
    inputs = (torch.randn(4, 8, 16), torch.tensor([3, 1, 0, 2]))
    planned = effcompile.optimize(
        Writes(), inputs=inputs, mode="training", max_error=0.05, passes=["precision.always=true"]
    )
    reasons = {
        refusal.option: words(refusal.reason)
        for refusal in planned.plan.declined
        if refusal.by == "precision"
    }
    assert any("index_put" in reason and "which PyTorch refuses" in reason for reason in reasons.values()), (
        reasons
    )
    planned(*inputs).backward()


def test_a_stage_of_training_that_fails_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise IndexError("boom")

    monkeypatch.setattr("effcompile.search.training.work.prepare", broken)
    with pytest.raises(InternalError, match=r"at the stage 'plan': IndexError: boom.*report"):
        effcompile.plan(Small(), inputs=torch.randn(4, 16), mode="training")


@pytest.mark.parametrize("grad", [True, False])
def test_torch_compile_falls_back_on_errors_that_nobody_foresaw(
    grad: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise IndexError("boom")

    place = "effcompile.compiler.training_backend" if grad else "effcompile.search.captured.capture"
    monkeypatch.setattr(place, broken)
    torch._dynamo.reset()
    model, x = Small(), torch.randn(4, 16)
    compiled = torch.compile(model, backend="effcompile")
    with torch.set_grad_enabled(grad), pytest.warns(UserWarning, match="IndexError: boom"):
        found = compiled(x)
    assert torch.allclose(found, model(x))


@pytest.mark.parametrize("grad", [True, False])
def test_torch_compile_of_a_layer_with_a_fast_path(grad: bool) -> None:
    """nn.TransformerEncoderLayer's fast path is one operator without a derivative."""
    torch._dynamo.reset()
    layer, x = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval(), torch.randn(2, 5, 16)
    compiled = torch.compile(layer, backend="effcompile", options={"max_error": 0.05})
    with torch.set_grad_enabled(grad), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = compiled(x)
        assert float((found - layer(x)).norm() / found.norm()) < 0.05


def _result(**gradients: Tensor) -> Result:
    return Result(loss=torch.tensor(1.0), gradients=gradients, peak_bytes=None)


WEIGHT = torch.randn(64, generator=torch.Generator().manual_seed(0))
NOISE = torch.full((8,), 3e-8)  # of the size that rounding leaves where the gradient is zero


def test_a_gradient_that_is_zero_but_for_rounding_passes() -> None:
    """A key's bias: mathematically zero, and so its relative error is about 1 between any two orders of
    summing.
    """
    wanted, truth = (
        _result(w=WEIGHT, k_bias=NOISE),
        _result(w=WEIGHT.double() + 1e-8, k_bias=torch.zeros(8).double()),
    )
    found = _result(w=WEIGHT, k_bias=-NOISE)
    check = compare(found, wanted, None, lambda: replace(truth, named="float64's"))
    assert (
        check.passed
        and "k_bias: off by rounding alone" in str(check.note)
        and "near to float64's" in str(check.note)
    )
    without = compare(found, wanted, None)
    assert without.passed and "by the scale of the whole gradient" in str(without.note)


def test_a_small_gradient_in_16_bits_is_judged_by_the_rounding_of_its_dtype() -> None:
    """A key's weight in bf16: a difference of products that nearly cancel, each rounded to 8 bits."""
    weight, key = WEIGHT.bfloat16(), (0.01 * WEIGHT).bfloat16()
    wanted = _result(w=weight, k=key)
    near = compare(_result(w=weight, k=key * 1.08), wanted, 0.02)
    assert (
        near.passed
        and "k: off by rounding alone" in str(near.note)
        and "by the scale of the whole gradient" in str(near.note)
    )
    assert not compare(_result(w=weight, k=-key), wanted, 0.01).passed
    assert not compare(_result(w=weight * 1.08, k=key), wanted, 0.02).passed


def test_the_rounding_of_a_model_in_16_bits_is_measured_by_rounding_otherwise() -> None:
    """Gradients of a deep bf16 model move by far more than one rounding; a wrong one moves by
    more than that.
    """
    torch.manual_seed(0)
    model, x = (
        nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(8))).bfloat16(),
        torch.randn(16, 32).bfloat16(),
    )

    def result() -> Result:
        model.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return Result(
            loss=loss.detach(),
            gradients={n: p.grad.clone() for n, p in model.named_parameters()},
            peak_bytes=None,
        )

    wanted = result()
    with rounded_otherwise(model) as narrow:
        first, second = result(), result()
    assert narrow and not any(module._forward_hooks for module in model.modules())
    assert torch.equal(result().gradients["0.0.weight"], wanted.gradients["0.0.weight"])
    assert compare(first, wanted, None, lambda: second).passed
    wrong = replace(first, gradients={**first.gradients, "3.0.weight": -first.gradients["3.0.weight"]})
    assert not compare(wrong, wanted, None, lambda: second).passed
    with rounded_otherwise(nn.Linear(2, 2)) as narrow:
        assert not narrow


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("size", [1e-5, 1e-3, 1.0])
def test_a_gradient_that_is_wrong_fails_however_small_it_is(size: float, exact: bool) -> None:
    small = size * WEIGHT[:8]
    wanted, truth = _result(w=WEIGHT, b=small), _result(w=WEIGHT.double(), b=small.double())
    # 1e-7 of the usual gradient is rounding, as far as fp32 alone can tell
    slightly = [small * 1.01] if exact or size > 1e-4 else []
    for wrong in (-small, torch.zeros(8), NOISE, *slightly):
        check = compare(
            _result(w=WEIGHT, b=wrong), wanted, None, (lambda: truth) if exact else (lambda: None)
        )
        assert not check.passed and "largest at b" in str(check.note)


def test_float64_is_asked_only_where_a_gradient_fails() -> None:
    def never() -> Result:
        raise AssertionError("asked")

    assert compare(_result(w=WEIGHT), _result(w=WEIGHT), None, never).note == Because("bit-identical")
    assert compare(_result(w=WEIGHT * (1 + 1e-6)), _result(w=WEIGHT), None, never).passed


@pytest.mark.slow
def test_clip_with_its_contrastive_loss(quick_training: Path) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    text = {**sizes, "vocab_size": 99, "max_position_embeddings": 20, "bos_token_id": 0, "eos_token_id": 98}
    vision = {**sizes, "image_size": 32, "patch_size": 8}
    torch.manual_seed(0)
    model = transformers.CLIPModel(
        transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=16)
    ).train()
    inputs = {
        "input_ids": torch.randint(0, 99, (8, 10)),
        "attention_mask": torch.ones(8, 10, dtype=torch.long),
        "pixel_values": torch.randn(8, 3, 32, 32),
        "return_loss": True,
    }
    free = effcompile.plan(model, inputs, mode="training").predicted.peak_bytes
    assert free is not None
    planned = effcompile.optimize(model, inputs=inputs, mode="training", memory=int(0.8 * free))
    assert all(check.passed for check in planned.plan.checks)


class Remembering(nn.Module):
    """A recurrent layer, and what it returned last, for whoever looks at it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.last, self.all = nn.LSTM(8, 8, batch_first=True), None, []

    def forward(self, x: Tensor) -> Tensor:
        result = self.layer(x)[0]
        self.last = result.detach()
        self.all.append(self.last)
        return result.square().mean()


def test_a_recurrent_layer_is_right_and_its_module_keeps_its_attributes() -> None:
    torch.manual_seed(0)
    model, x = Remembering().train(), torch.randn(3, 4, 8)
    twin = copy.deepcopy(model)
    planned = effcompile.optimize(model, inputs=x, mode="training", passes=["checkpoint"])
    assert vars(model)["last"] is None
    assert all(type(kept) is Tensor for kept in model.all)
    assert any("model.last" in words(note) for note in planned.plan.notes)
    found, wanted = planned(x), twin(x)
    found.backward()
    wanted.backward()
    assert torch.allclose(found, wanted)
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.allclose(ours.grad, theirs.grad, atol=1e-7)


class Layered(nn.Module):
    """Recurrent layers of each kind with dropout between them, one of them both ways."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.LSTM(8, 8, num_layers=2, dropout=0.4, bidirectional=True, proj_size=4)
        self.second = nn.GRU(8, 8, num_layers=2, dropout=0.3, batch_first=True)
        self.third = nn.RNN(8, 8, num_layers=2, dropout=0.3)

    def forward(self, x: Tensor) -> Tensor:
        return self.third(self.second(self.first(x)[0])[0])[0].square().mean()


def test_dropout_between_recurrent_layers_is_drawn_as_eager_does(quick_training: Path) -> None:
    """torch's trace of nn.LSTM leaves it out, so that it has to be put in."""
    torch.manual_seed(0)
    model, x = Layered().train(), torch.randn(4, 3, 8)
    twin = copy.deepcopy(model)
    planned = effcompile.optimize(model, inputs=x, mode="training", passes=["checkpoint"])
    for seed in (1, 2):  # each step draws anew
        losses = []
        for step in (planned, twin):
            torch.manual_seed(seed)
            losses.append(step(x))
            losses[-1].backward()
        assert torch.allclose(*losses)
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.allclose(ours.grad, theirs.grad, atol=1e-7)


@torch.no_grad()
def _change(model: nn.Module, how: str) -> None:
    states = {name: tensor * 0.8 for name, tensor in model.state_dict().items()}
    if how == "another parameter":
        model.rows.weight_hh_l0 = nn.Parameter(states["rows.weight_hh_l0"])
    elif how == "in place":
        model.load_state_dict(states)
    elif how == "assigned":
        model.load_state_dict(states, assign=True)
    else:
        for name, parameter in model.named_parameters():
            parameter.data = states[name]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.GRU(8, 8, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.rows(x)[0].square().mean()


def test_a_planned_step_reads_torchs_list_of_weights_anew(quick_training: Path) -> None:
    model, x = Recurrent().train(), torch.randn(2, 5, 8)
    planned = effcompile.optimize(model, inputs=(x,), mode="training", passes=["no-pointwise"])
    for how in ("in place", "data", "another parameter", "in place", "assigned", "in place"):
        _change(model, how)
        found = torch.autograd.grad(planned(x), [*model.parameters()])
        wanted = torch.autograd.grad(Recurrent.forward(model, x), [*model.parameters()])
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-7)
