"""Micro-batches in the plan: the whole batch's loss and gradients, the bytes that were planned, and what
cannot be divided.
"""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from generation_models import more
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from train_helpers import VOCABULARY, Batch, Skips, gpt2, measured, t5

import effcompile
from effcompile.compiler import TrainingExecutable, optimize_training, plan_training
from effcompile.compiler.training.compile import frontier_training
from effcompile.core.errors import FormatError, InfeasibleError, InputsError, UsageError
from effcompile.core.goal import Goal
from effcompile.ir.plan import Plan
from effcompile.passes.training.microbatch import Microbatch
from effcompile.report.reasons import words

pytestmark = pytest.mark.usefixtures("quick_training")
BASE = ["no-pointwise", "no-attention", "checkpoint.groups=false"]


def uneven(batch: int = 4, length: int = 16) -> Batch:
    """Ids with labels of which each example has another number; the first has none."""
    torch.manual_seed(1)
    ids = torch.randint(0, VOCABULARY, (batch, length))
    labels = ids.clone()
    for i in range(batch):
        labels[i, i * length // batch :] = -100
    return {"input_ids": ids, "labels": labels, "position_ids": torch.arange(length)[None]}


def vit() -> tuple[nn.Module, Batch]:
    import transformers as hf

    torch.manual_seed(0)
    config = hf.ViTConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64, image_size=16,
        patch_size=8, num_labels=5, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return hf.ViTForImageClassification(config).train(), {
        "pixel_values": torch.randn(4, 3, 16, 16),
        "labels": torch.tensor([0, 3, 1, 4]),
    }


def bert() -> tuple[nn.Module, Batch]:
    import transformers as hf

    torch.manual_seed(0)
    config = hf.BertConfig(
        vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=64, max_position_embeddings=32, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    batch = uneven()
    mask = torch.ones_like(batch["input_ids"])
    mask[2:, 9:] = 0
    return hf.BertForMaskedLM(config).train(), {**batch, "attention_mask": mask}


def plain_gpt2() -> tuple[nn.Module, Batch]:
    return gpt2(layers=1, dropout=0.0)[0], uneven()


class Net(nn.Module):
    """A small network with a loss of one's own."""

    def __init__(self, loss: Any, norm: bool = False) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 16), nn.Linear(16, 3)
        self.norm = nn.BatchNorm1d(16) if norm else nn.Identity()
        self.loss = loss

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.loss(self.down(torch.relu(self.norm(self.up(x)))), y)


def net(loss: Any, norm: bool = False, batch: int = 8) -> tuple[nn.Module, Batch]:
    torch.manual_seed(0)
    return Net(loss, norm).train(), {"x": torch.randn(batch, 6), "y": torch.randn(batch, 3)}


def optimize(model: nn.Module, batch: Batch, count: int) -> Any:
    return optimize_training(
        model, (), batch, goal=Goal(mode="training"), passes=[*BASE, f"microbatch.count={count}"]
    )


def loss_of(model: nn.Module, batch: Batch) -> torch.Tensor:
    outputs = model(**batch)
    return outputs if isinstance(outputs, torch.Tensor) else outputs["loss"]


def assert_same(planned: TrainingExecutable, model: nn.Module, batch: Batch) -> None:
    """Loss and gradients, by the model's own calls, with a gradient at the loss that is not 1."""
    ours, theirs = (measured(lambda m=m: 3 * loss_of(m, batch), m, 0)[0] for m in (planned, model))
    torch.testing.assert_close(ours[0], theirs[0], rtol=1e-5, atol=1e-6)
    assert ours[1].keys() == theirs[1].keys()
    for name, gradient in theirs[1].items():
        torch.testing.assert_close(
            ours[1][name], gradient, rtol=1e-4, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize(("make", "count"), [(plain_gpt2, 2), (vit, 2), (bert, 4)])
def test_loss_gradients_and_bytes_are_as_planned(make: Any, count: int) -> None:
    model, batch = make()
    planned = optimize(model, batch, count)
    plan = planned.plan
    size = 4 // count
    assert plan.options()["batch"] == f"{count} micro-batches of {size}"
    assert plan.measured.peak_bytes == pytest.approx(plan.predicted.peak_bytes, rel=0.02)
    assert plan.checks[0].error > 0, "sums in another order are bit-identical: was anything divided?"
    assert_same(planned, model, batch)
    assert (
        plan.memory_timeline.peak_bytes
        == plan.predicted.peak_bytes
        == sum(plan.memory_timeline.parts.values())
    )


def small_t5() -> tuple[nn.Module, Batch]:
    model, batch = t5(layers=1)
    batch["labels"][0, 4:] = -100
    return model, batch


def sliding() -> tuple[nn.Module, Batch]:
    import transformers as hf

    torch.manual_seed(0)
    config = hf.MistralConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, sliding_window=4, use_cache=False,
    )  # fmt: skip
    ids = torch.randint(1, VOCABULARY, (2, 12))
    labels = torch.where(ids > 60, -100, ids)
    labels[1, 5:] = -100
    return hf.MistralForCausalLM(config).train(), {"input_ids": ids, "labels": labels}


@pytest.mark.parametrize("make", [sliding, *more(small_t5)])
def test_one_example_at_a_time(make: Any) -> None:
    model, batch = make()
    planned = optimize(model, batch, 2)
    assert planned.plan.options()["batch"] == "2 micro-batches of 1"
    if make is not small_t5:  # whose dropout draws other numbers
        assert_same(planned, model, batch)


class Specialised(nn.Module):
    """Computes one example by other operators than several, times `factor`."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.up, self.down, self.factor = nn.Linear(6, 16), nn.Linear(16, 5), factor

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        single = x.shape[0] == 1
        h = (self.up.weight @ x[0] + self.up.bias)[None] * self.factor if single else self.up(x)
        return nn.functional.cross_entropy(self.down(torch.relu(h)), y)


def test_one_example_may_be_captured_as_other_operators() -> None:
    torch.manual_seed(0)
    model, batch = Specialised(1.0).train(), {"x": torch.randn(4, 6), "y": torch.tensor([1, -100, 3, 0])}
    planned = optimize(model, batch, 4)
    assert planned.plan.options()["batch"] == "4 micro-batches of 1"
    assert any("read off two at a time" in str(note) for note in planned.plan.notes)
    assert_same(planned, model, batch)
    assert_same(planned, model, {**batch, "y": torch.tensor([-100, 2, -100, 4])})


def test_one_example_that_is_computed_otherwise_is_found_by_running() -> None:
    torch.manual_seed(0)
    plan = optimize(
        Specialised(2.0).train(), {"x": torch.randn(4, 6), "y": torch.tensor([1, 2, 3, 0])}, 4
    ).plan
    assert "batch" not in plan.options()
    assert any(
        "run, and not the whole batch's" in words(d.reason)
        for d in plan.declined
        if d.kind == "micro-batches"
    )


def test_labels_that_fall_otherwise_are_weighted_otherwise() -> None:
    model, batch = plain_gpt2()
    planned = optimize(model, batch, 2)
    labels = batch["labels"].flip(0)
    labels[3, 2] = 5
    assert_same(planned, model, {**batch, "labels": labels})
    nothing = {**batch, "labels": torch.full_like(labels, -100)}
    assert loss_of(planned, nothing).isnan() and loss_of(model, nothing).isnan()
    with pytest.raises(InputsError, match=r"input_ids"):
        planned(**{name: value[:2] for name, value in batch.items()})


LOSSES = {
    "masked mean": lambda z, y: (((z - y) ** 2) * (y > 0)).sum() / (y > 0).sum(),
    "sum": lambda z, y: 0.5 * nn.functional.mse_loss(z, y, reduction="sum"),
    "means": lambda z, y: nn.functional.smooth_l1_loss(z, y) + 0.1 * (z**2).mean(),
    "sum over the batch's size": lambda z, y: ((z - y) ** 2).sum() / z.shape[0],
    "classes with weights": lambda z, y: nn.functional.cross_entropy(
        z, (y[:, 0] > 0).long(), weight=torch.tensor([1.0, 5.0, 2.0])
    ),
}


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_losses_are_normalised_as_the_whole_batchs(loss: Any) -> None:
    model, batch = net(loss)
    planned = optimize(model, batch, 4)
    assert planned.plan.options()["batch"] == "4 micro-batches of 2"
    assert_same(planned, model, batch)
    assert_same(planned, model, {"x": batch["x"].flip(0), "y": batch["y"] + torch.arange(8)[:, None] - 4})


@pytest.mark.parametrize(
    ("loss", "norm", "reason"),
    [
        (nn.functional.mse_loss, True, r"norm normalises by statistics of the whole batch \(BatchNorm"),
        (
            lambda z, y: nn.functional.cross_entropy(z @ y.T, torch.arange(len(z))),
            False,
            r"compares examples with each other.*\(8, 8\)",
        ),
        (lambda z, y: ((z - z.mean(0)) ** 2).mean(), False, r"looks at the whole batch"),
        (
            lambda z, y: nn.functional.mse_loss(z, y).sqrt(),
            False,
            r"aten\.sqrt.* works on values of the whole batch",
        ),
        (lambda z, y: (torch.softmax(z, 0) * y).mean(), False, r"goes over the examples"),
        # its axis is not written
        (lambda z, y: torch.sort(z.flatten()).values.mean(), False, r"aten\.sort.* goes over the examples"),
        (
            lambda z, y: (torch.sort(z, stable=True, dim=0).values * y).mean(),
            False,
            r"aten\.sort.* goes over the examples",
        ),
        (lambda z, y: (z.flip(1, 0) * y).mean(), False, r"aten\.flip.* goes over the examples"),
        (lambda z, y: (z.roll(1) * y).mean(), False, r"goes over the examples"),
        (
            lambda z, y: (torch.cummax(z, 0).values * y).mean(),
            False,
            r"aten\.cummax.* goes over the examples",
        ),
        (lambda z, y: z.square().sum() + (z - y).square().mean(), False, r"means over different counts"),
        (
            lambda z, y: z.square().mean() + torch.softmax(z, 1).mean(0).square().sum(),
            False,
            r"aten\.pow.* works on values of the whole",
        ),
        (lambda z, y: (z * (y > y.mean())).mean(), False, r"looks at the whole batch"),
        (lambda z, y: ((z - y) ** len(z)).sum(), False, r"aten\.pow.* computes with the size of the batch"),
        (
            lambda z, y: nn.functional.mse_loss(z, y) + 1 / len(z),
            False,
            r"aten\.add.* computes with the size of the batch",
        ),
    ],
    ids=[
        "BatchNorm",
        "contrastive",
        "centred",
        "root",
        "softmax over the batch",
        "sort over the batch",
        "stable sort",
        "flip of two axes",
        "roll when flat",
        "running maximum",
        "sum and mean",
        "load balancing",
        "mask by the batch",
        "power",
        "added",
    ],
)
def test_what_is_no_sum_over_examples_is_declined(loss: Any, norm: bool, reason: str) -> None:
    model, batch = net(loss, norm)
    plan = optimize(model, batch, 2).plan
    assert "batch" not in plan.options()
    declined = [d for d in plan.declined if d.kind == "micro-batches"]
    assert len(declined) == 1 and re.search(reason, words(declined[0].reason)), declined


def neighbours(y: torch.Tensor) -> torch.Tensor:
    """Of each example the mean with the one before and after."""
    return nn.functional.avg_pool1d(y.T, 3, 1, 1).T


def test_what_the_graph_does_not_show_is_found_by_running() -> None:
    """Each example's loss is weighed by its neighbours': the shapes are those of a sum over examples."""
    model, batch = net(lambda z, y: ((z - y) ** 2 * neighbours(y)).mean())
    plan = optimize(model, batch, 2).plan
    assert "batch" not in plan.options()
    assert any(
        "run, and not the whole batch's" in words(d.reason)
        for d in plan.declined
        if d.kind == "micro-batches"
    )
    assert any("no micro-batches" in str(note) for note in plan.notes)


def test_the_least_budget_that_is_named_is_feasible_where_running_refutes_micro_batches() -> None:
    model, batch = net(lambda z, y: ((z - y) ** 2 * neighbours(y)).mean())
    passes = [*BASE, "microbatch"]
    with pytest.raises(InfeasibleError, match="no micro-batches") as caught:
        optimize_training(model, (), batch, goal=Goal(mode="training", memory=1), passes=passes)
    least = int(caught.value.nearest["memory"])
    assert least > least_memory(model, batch, passes)  # planned alone: nothing was run
    plan = optimize_training(model, (), batch, goal=Goal(mode="training", memory=least), passes=passes).plan
    assert plan.met and "batch" not in plan.options()


class Drawing(nn.Module):
    """Draws as functions do: in evaluation mode, too."""

    def __init__(self, draw: Any) -> None:
        super().__init__()
        self.up, self.down, self.draw = nn.Linear(6, 16), nn.Linear(16, 3), draw

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(self.down(self.draw(torch.relu(self.up(x)))), y)


def attended(h: torch.Tensor) -> torch.Tensor:
    q_BHTD = h.view(-1, 2, 2, 4)  # noqa: N806
    return nn.functional.scaled_dot_product_attention(q_BHTD, q_BHTD, q_BHTD, dropout_p=0.3).flatten(1)


DRAWS = {
    "dropout": lambda h: nn.functional.dropout(h, 0.3),
    "alpha dropout": lambda h: nn.functional.alpha_dropout(h, 0.3, training=True),
    "attention": attended,
    "noise": lambda h: h + 0.1 * torch.randn_like(h),
    "Bernoulli": lambda h: h * torch.bernoulli(torch.full((len(h), 1), 0.9)),
    "mask": lambda h: h.masked_fill(torch.rand(len(h), 1) < 0.2, 0.0),
}


@pytest.mark.parametrize("name", DRAWS)
def test_functions_that_draw_are_no_reason_against_micro_batches(name: str) -> None:
    torch.manual_seed(0)
    model = Drawing(DRAWS[name]).train()
    plan = optimize(model, {"x": torch.randn(8, 6), "y": torch.randn(8, 3)}, 2).plan
    assert plan.options()["batch"] == "2 micro-batches of 4", plan.notes
    assert [check.passed for check in plan.checks] == [True, True]


def test_dropout_is_checked_on_the_same_numbers() -> None:
    model, batch = gpt2(layers=1)[0], uneven()
    plan = optimize(model, batch, 2).plan
    assert [check.name for check in plan.checks] == [
        "loss and all gradients, as eager",
        "micro-batches as the whole batch, without dropout",
    ]
    assert any("same distribution, not the same numbers" in str(note) for note in plan.notes)


def test_a_batch_that_does_not_divide_is_refused() -> None:
    model, batch = net(nn.functional.mse_loss)
    with pytest.raises(UsageError, match=r"a batch of 8 does not divide into 3.*: 2 and 4\."):
        optimize(model, batch, 3)


def least_memory(
    model: nn.Module, batch: Batch, passes: list[str], max_error: float | None = None, **more: Any
) -> int:
    with pytest.raises(InfeasibleError) as caught:
        plan_training(
            model, (), batch, goal=Goal(mode="training", memory=1, max_error=max_error), passes=passes, **more
        )
    return int(caught.value.nearest["memory"])


def test_a_budget_that_only_micro_batches_meet_and_the_plan_applied_again(tmp_path: Path) -> None:
    model, batch = net(LOSSES["masked mean"], batch=16)
    passes = [*BASE, "microbatch", "states.in_backward=true"]
    sgd = lambda p: torch.optim.SGD(p, lr=0.1)  # noqa: E731
    memory = least_memory(model, batch, passes, optimizer=sgd)
    assert memory < least_memory(model, batch, [*BASE, "states.in_backward=true"], optimizer=sgd)
    planned = optimize_training(
        model, (), batch, goal=Goal(mode="training", memory=memory), passes=passes, optimizer=sgd
    )
    plan = planned.plan
    assert plan.met and plan.measured.peak_bytes <= memory and "micro-batches" in plan.options()["batch"]
    assert any(
        "summed over micro-batches" in words(d.reason) for d in plan.declined if "consumed" in d.option
    )
    plan.save(tmp_path / "plan.json")
    again = effcompile.optimize(
        model, inputs=batch, plan=Plan.load(tmp_path / "plan.json"), optimizer=sgd, passes=BASE
    )
    assert (
        again.plan.options() == plan.options() and again.plan.measured.peak_bytes == plan.measured.peak_bytes
    )
    for wrong, said in (
        (3, "a divisor of the batch of 16"),
        (True, "where a int is wanted"),
        ("2", "where a int is wanted"),
    ):
        decisions = (
            replace(d, settings={"count": wrong}) if d.site == "batch" else d for d in plan.decisions
        )
        changed = plan.with_changes(decisions=tuple(decisions))
        with pytest.raises(FormatError, match=said):
            effcompile.optimize(model, inputs=batch, plan=changed, optimizer=sgd, passes=BASE)


def test_the_fastest_division_is_taken_and_a_frontier_has_several() -> None:
    model, batch = net(nn.functional.mse_loss)
    plan = optimize_training(
        model, (), batch, goal=Goal(mode="training", memory="1GiB"), passes=[*BASE, "microbatch"]
    ).plan
    assert "batch" not in plan.options()
    assert {d.option for d in plan.declined if d.kind == "micro-batches"} == {
        f"{k} micro-batches of {8 // k}" for k in (2, 4, 8)
    }
    front = frontier_training(
        model, (), batch, goal=Goal(mode="training"), passes=[*BASE, "microbatch"], points=6
    )
    assert any("batch" in plan.options() for plan in front)


def test_all_levers_together_are_within_their_budget() -> None:
    """Micro-batches beside recomputation, offload, 8-bit values and optimizer states."""
    torch.manual_seed(0)
    model, batch = Skips(layers=1).train(), {"x": torch.randn(6, 24), "y": torch.randint(0, 8, (6,))}
    named = [*BASE, "microbatch.count=3", "offload.bandwidth=12GB", "compress", "states.eight_bit=true"]
    low = least_memory(model, batch, named, max_error=0.05, optimizer=torch.optim.AdamW)
    goal = Goal(mode="training", max_error=0.05, memory=low)
    plan = optimize_training(model, (), batch, goal=goal, passes=named, optimizer=torch.optim.AdamW).plan
    assert plan.options()["batch"] == "3 micro-batches of 2"
    assert plan.met and plan.measured.peak_bytes <= low
    assert plan.predicted.peak_bytes == pytest.approx(plan.measured.peak_bytes, rel=0.02)
    # all of them in the micro-batches that are wanted
    assert {row.levers for row in plan.levers} >= {(), ("recompute",), ("compress",)}


@given(st.integers(1, 400), st.integers(1, 30))
def test_micro_batches_are_the_divisors(batch: int, count: int) -> None:
    assert Microbatch().counts(batch) == [k for k in range(2, batch + 1) if batch % k == 0]
    if batch % count == 0:
        assert Microbatch(count=count).counts(batch) == [count] * (count > 1)
    else:
        with pytest.raises(UsageError, match=rf"of {batch} does not divide into {count} "):
            Microbatch(count=count).counts(batch)


def test_plans_for_other_machines_divide_too() -> None:
    model, batch = plain_gpt2()
    fake = {name: value.to("meta") for name, value in batch.items()}
    plan = plan_training(
        model.to("meta"),
        (),
        fake,
        goal=Goal(mode="training"),
        target="h100-sxm",
        passes=[*BASE, "microbatch.count=2"],
    )
    assert plan.options()["batch"] == "2 micro-batches of 2"
