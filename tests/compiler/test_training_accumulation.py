"""Gradient accumulation in HuggingFace's Trainer: a planned model weighs every label as the plain
model does.
"""

import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import fx, nn
from train_helpers import VOCABULARY, Batch, gpt2, twin

import effcompile
from effcompile.compiler import TrainingExecutable, optimize_training
from effcompile.core.goal import Goal
from effcompile.proof.training import items as asking
from effcompile.proof.training.items import NOT_TAKEN

pytestmark = pytest.mark.usefixtures("quick_training")
PASSES = ["no-pointwise"]


def optimize(model: nn.Module, batch: Batch, *passes: str, memory: int | None = None) -> TrainingExecutable:
    return optimize_training(
        model, (), batch, goal=Goal(mode="training", memory=memory), passes=[*PASSES, *passes]
    )


def uneven(count: int = 8, length: int = 16) -> list[dict[str, torch.Tensor]]:
    """Examples with 1, 3, 5 ... labels that count."""
    generator = torch.Generator().manual_seed(3)
    made = []
    for i in range(count):
        ids = torch.randint(0, VOCABULARY, (length,), generator=generator)
        labels = ids.clone()
        labels[: length - 1 - 2 * i if i < length // 2 else 0] = -100
        made.append({"input_ids": ids, "labels": labels})
    return made


def trained(
    model: nn.Module, folder: Path, examples: list[Any], **options: Any
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """(the losses that Trainer logs, the parameters it leaves)."""
    arguments = hf.TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=3,
        learning_rate=0.05, lr_scheduler_type="constant", logging_steps=1, report_to=[], save_strategy="no",
        use_cpu=True, seed=0, data_seed=0, disable_tqdm=True, **options,
    )  # fmt: skip
    trainer = hf.Trainer(model=model, args=arguments, train_dataset=examples, data_collator=_stacked)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses, {name: p.detach().clone() for name, p in model.named_parameters()}


def _stacked(examples: list[Mapping[str, torch.Tensor]]) -> Batch:
    return {name: torch.stack([example[name] for example in examples]) for name in examples[0]}


def small() -> tuple[nn.Module, list[dict[str, torch.Tensor]]]:
    return gpt2(layers=1, dropout=0.0)[0], uneven()


Plain = tuple[nn.Module, list[float], dict[str, torch.Tensor]]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Plain:
    """The model after the plain Trainer, its losses, its parameters."""
    model, examples = small()
    return model, *trained(model, tmp_path_factory.mktemp("plain"), examples)


@pytest.mark.parametrize("way", ["deferred", "loss head in chunks"])
def test_trainer_with_accumulation_and_uneven_labels_is_the_plain_trainer(
    way: str, plain: Plain, tmp_path: Path
) -> None:
    (model, examples), (left_plain, wanted, parameters) = small(), plain
    if way == "deferred":
        planned = effcompile.optimize(model, mode="training", passes=PASSES)
    else:
        planned = optimize(model, _stacked(examples[:2]), "loss_head.chunks=2")
    found, left = trained(planned, tmp_path, examples)
    assert found == pytest.approx(wanted, rel=1e-4)
    for name, value in parameters.items():
        assert torch.allclose(left[name], value, rtol=1e-3, atol=1e-5), name
    means = [float(left_plain(**_stacked(examples[i : i + 2])).loss) for i in range(2)]
    assert means[0] != pytest.approx(means[1], rel=1e-3)  # or else a mean of means would do


def gradients(model: nn.Module, call: Callable[[], torch.Tensor]) -> dict[str, torch.Tensor | None]:
    model.zero_grad()
    call().backward()
    return {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("items", [7, 7.0, torch.tensor(7), torch.tensor([7.0]), None])
def test_a_number_of_items_in_every_form(items: Any) -> None:
    model, examples = small()
    batch, plain = _stacked(examples[3:5]), twin(model)
    planned = optimize(model, batch)
    assert planned.accepts_loss_kwargs is True
    number = items.reshape(()) if isinstance(items, torch.Tensor) else items
    ours = gradients(planned, lambda: planned(**batch, num_items_in_batch=items).loss)
    theirs = gradients(plain, lambda: plain(**batch, num_items_in_batch=number).loss)
    for name, gradient in theirs.items():
        other = ours[name]
        assert (
            gradient is not None
            and other is not None
            and torch.allclose(other, gradient, rtol=1e-4, atol=1e-7)
        ), name


def test_an_example_of_few_labels_tells_what_is_taken() -> None:
    """The model is asked with a number of items that no example can have: with as many as it has, its loss is
    the plain mean.
    """
    model, examples = small()
    batch, plain = _stacked(examples[1:2]), twin(model)
    assert int((batch["labels"][:, 1:] >= 0).sum()) == 3
    planned = optimize(model, batch)
    assert float(planned(**batch, num_items_in_batch=7).loss) == pytest.approx(
        float(plain(**batch, num_items_in_batch=7).loss), rel=1e-5
    )


def test_the_model_is_run_once_to_be_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its plain loss is known: it was verified."""
    model, examples = small()
    batch, asked = _stacked(examples[3:5]), list[bool]()
    forward = model.forward

    def counted(*args: Any, **kwargs: Any) -> Any:
        asked.append("num_items_in_batch" in kwargs)
        return forward(*args, **kwargs)

    monkeypatch.setattr(model, "forward", counted)
    monkeypatch.setattr(asking, "accepts_items", lambda model: True)
    optimize(model, batch)
    assert asked[-1] and asked.count(True) == 1


def test_where_the_verified_loss_tells_nothing_the_model_is_run_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    work = types.SimpleNamespace(loss=None, kwargs={}, model=nn.Identity(), args=())
    step = types.SimpleNamespace(leaves=lambda args, kwargs: [])
    monkeypatch.setattr(asking, "accepts_items", lambda model: True)
    monkeypatch.setattr(asking, "_losses", lambda work, more: torch.tensor(2.0 * (5 / 3.5 if more else 1)))
    monkeypatch.setattr(asking, "labels_counted", lambda step: fx.Graph())
    monkeypatch.setattr(asking, "run_graph", lambda graph, given: (torch.tensor(5),))
    for known in (None, torch.tensor(2.0), torch.tensor(7.0)):
        found, notes = asking.items_of(work, step, known)  # type: ignore[arg-type]
        assert found is not None and found.counted is not None and not notes


@pytest.mark.parametrize("passes", [[], ["loss_head.chunks=2"]])
def test_a_batch_without_a_label_adds_nothing(passes: list[str]) -> None:
    model, examples = small()
    batch = _stacked(examples[3:5])
    planned = optimize(model, batch, *passes)
    empty = {**batch, "labels": torch.full_like(batch["labels"], -100)}
    loss = planned(**empty, num_items_in_batch=torch.tensor(9)).loss
    loss.backward()
    assert float(loss) == 0.0
    assert all(p.grad is None or not bool(p.grad.any()) for p in model.parameters())


def test_it_is_an_input_where_it_was_one_at_planning() -> None:
    model, examples = small()
    batch, plain = _stacked(examples[3:5]), twin(model)
    planned = optimize(model, {**batch, "num_items_in_batch": 5})
    assert planned.accepts_loss_kwargs is True
    for items in (5, 11, torch.tensor(23)):
        assert float(planned(**batch, num_items_in_batch=items).loss) == pytest.approx(
            float(plain(**batch, num_items_in_batch=items).loss), rel=1e-5
        )


def test_a_model_whose_loss_ignores_it_or_is_more_than_a_mean_is_known() -> None:
    class Ignoring(hf.GPT2LMHeadModel):
        def forward(self, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:
            return super().forward(input_ids=input_ids, labels=labels)

    class Penalised(hf.GPT2LMHeadModel):
        def forward(self, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:
            outputs = super().forward(input_ids=input_ids, labels=labels, **kwargs)
            return {"loss": outputs.loss + 0.1 * self.transformer.wte.weight.square().mean()}

    base, batch = gpt2(layers=1, dropout=0.0)
    planned = optimize(Ignoring(base.config).train(), batch)
    assert planned.accepts_loss_kwargs is True
    assert torch.equal(planned(**batch, num_items_in_batch=3).loss, planned(**batch).loss)
    planned = optimize(Penalised(base.config).train(), batch)
    assert planned.accepts_loss_kwargs is False and NOT_TAKEN in planned.plan.notes


@pytest.mark.parametrize("of", ["shifted", "as they are"])
def test_of_a_large_batch_the_model_is_asked_with_a_few_positions_of_one_example(
    of: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it says there is what it says of the whole batch, with labels that begin late in one example and
    are missing in another.
    """

    class Unshifted(hf.GPT2LMHeadModel):
        def forward(self, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:
            logits = super().forward(input_ids=input_ids).logits.flatten(0, 1)
            if (items := kwargs.get("num_items_in_batch")) is None:
                return {"loss": nn.functional.cross_entropy(logits, labels.flatten())}
            return {"loss": nn.functional.cross_entropy(logits, labels.flatten(), reduction="sum") / items}

    small, _ = gpt2(layers=1, dropout=0.1)
    model = (small if of == "shifted" else Unshifted(small.config)).train()
    ids = torch.randint(0, VOCABULARY, (9, 32), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[:, :20], labels[1], labels[2] = -100, -100, ids[2]
    labels[2, :10] = -100
    batch, plain, asked = {"input_ids": ids, "labels": labels}, twin(model), list[tuple[int, ...]]()
    losses = asking._losses
    monkeypatch.setattr(
        asking,
        "_losses",
        lambda work, more: (asked.append(work.kwargs["labels"].shape), losses(work, more))[1],
    )
    planned = optimize(model, batch)
    assert asked == [(1, 26), (1, 26)] and planned.accepts_loss_kwargs is True
    planned.eval(), plain.eval()  # of dropout the two would draw other numbers
    found, wanted = (each(**batch, num_items_in_batch=500) for each in (planned, plain))
    loss = lambda outputs: outputs["loss"] if isinstance(outputs, dict) else outputs.loss  # noqa: E731
    assert float(loss(found)) == pytest.approx(float(loss(wanted)), rel=1e-5)


def test_a_model_that_a_few_positions_tell_nothing_of_is_asked_with_its_batch() -> None:
    class Whole(hf.GPT2LMHeadModel):
        def forward(self, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:
            assert len(input_ids) == 9, "9 examples, please"
            return super().forward(input_ids=input_ids, labels=labels, **kwargs)

    model = Whole(gpt2(layers=1, dropout=0.0)[0].config).train()
    ids = torch.randint(0, VOCABULARY, (9, 32), generator=torch.Generator().manual_seed(1))
    planned = optimize(model, {"input_ids": ids, "labels": ids})
    assert planned.accepts_loss_kwargs is True
    found, wanted = (each(ids, labels=ids, num_items_in_batch=500).loss for each in (planned, model))
    assert float(found) == pytest.approx(float(wanted), rel=1e-5)


def test_what_a_model_notes_of_a_few_positions_is_forgotten() -> None:
    model = nn.Linear(2, 2)
    model.length = 32  # type: ignore[assignment]
    with asking.as_it_was(model):
        model.length = 16  # type: ignore[assignment]
        model.more = 1  # type: ignore[assignment]
    assert model.length == 32 and not hasattr(model, "more")
