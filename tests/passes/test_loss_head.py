"""The loss head in chunks, and tied gradients summed in place: found, refused with a reason, and equal to
eager.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from step_helpers import VOCABULARY, assert_equal, distance, eager, joint_step, run, tiny
from torch import Tensor, nn

from effcompile.capture.training import capture_training
from effcompile.core.errors import UsageError
from effcompile.core.torch_compat_memory import peak_of_memory_events
from effcompile.ir.step import Step
from effcompile.passes.training.loss_head import (
    OPTIONS,
    accumulate_embeddings,
    declined_loss_heads,
    find_loss_heads,
    with_loss_head,
)

aten, ours = torch.ops.aten, torch.ops.effcompile
IN_PLACE = (ours.embedding_backward_into.default, aten.addmm_.default, aten.add_.Tensor)
ROWS = 70


@functools.lru_cache
def captured(name: str, dtype: torch.dtype = torch.float32, batch: int = 2) -> tuple[nn.Module, Step]:
    model, inputs = tiny(name, batch=batch)
    return model.to(dtype), joint_step(model, inputs)


def targets(step: Step) -> list[Any]:
    return [node.target for node in step.graph.nodes if node.op == "call_function"]


def shapes(step: Step) -> list[tuple[int, ...]]:
    values = [node.meta.get("val") for node in step.graph.nodes]
    return [tuple(v.shape) for v in values if isinstance(v, Tensor)]


def rewritten(step: Step, option: str, chunks: int = 2) -> Step:
    (head,) = find_loss_heads(step)
    return accumulate_embeddings(with_loss_head(step, head, option, chunks))


# ---------------------------------------------------------------------- models of transformers


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "t5", "gemma2", "albert"])
def test_equals_eager(name: str) -> None:
    model, step = captured(name)
    before = len(step.graph.nodes)
    (head,) = find_loss_heads(step)
    assert not declined_loss_heads(step) and head.options == OPTIONS and head.chunk_counts == (2, 4)
    assert (head.rows, head.classes, head.width, head.logits_bytes) == (
        134,
        VOCABULARY,
        16,
        134 * VOCABULARY * 4,
    )
    inputs = tiny(name, ignored=0.6)[1]  # the first chunk of two has no label at all
    expected = eager(model, inputs, 1.5)
    assert_equal(run(step, model, inputs, 1.5), expected, 1e-6)
    for option, chunks in (("chunked", 2), ("chunked", 4), ("rechunked", 4)):
        copy = with_loss_head(step, head, option, chunks)
        assert_equal(run(copy, model, inputs, 1.5), expected, 1e-5)
        assert (134, VOCABULARY) not in shapes(copy) and (2, 67, VOCABULARY) not in shapes(copy)
    assert with_loss_head(step, head, "whole", 0) is step
    assert len(step.graph.nodes) == before


@pytest.mark.parametrize("name", ["gpt2", "t5"])
def test_bf16_is_as_near_to_fp32_as_eager_is(name: str) -> None:
    model, step = captured(name, torch.bfloat16)
    inputs = tiny(name, ignored=0.3)[1]
    wide = tiny(name)[0]
    wide.load_state_dict(model.state_dict())
    exact, own = eager(wide, inputs), eager(model, inputs)
    floor = 1e-3 * max(float(grad.norm()) for grad in exact[1].values())
    for option in ("chunked", "rechunked"):
        loss, gradients = run(rewritten(step, option), model, inputs)
        assert distance(loss, exact[0]) <= 1e-2
        for key, grad in exact[1].items():
            assert gradients[key].dtype == torch.bfloat16
            assert distance(gradients[key], grad, floor) <= 1e-2 + distance(own[1][key], grad, floor), key


@pytest.mark.parametrize("option", ["chunked", "rechunked"])
def test_no_label_at_all_and_odd_rows(option: str) -> None:
    model, step = captured("gpt2", batch=1)
    (head,) = find_loss_heads(step)
    assert head.rows == 67 and head.chunk_counts == (2,)
    copy = with_loss_head(step, head, option, 2)
    for ignored in (0.0, 0.9, 1.0):
        inputs = tiny("gpt2", batch=1, ignored=ignored)[1]
        assert_equal(run(copy, model, inputs), eager(model, inputs), 1e-5)


@pytest.mark.parametrize(("name", "sums"), [("gpt2", 1), ("bert", 1), ("t5", 2), ("llama", 0)])
def test_tied_gradients_are_summed_in_place(name: str, sums: int) -> None:
    model, step = captured(name)
    inputs = tiny(name)[1]
    for option in OPTIONS:
        copy = rewritten(step, option)
        assert targets(copy).count(ours.embedding_backward_into.default) == sums
        whole = list(copy.graph.find_nodes(op="call_function", target=aten.embedding_dense_backward.default))
        assert [n.args[2] for n in whole if n.args[2] == VOCABULARY] == (
            [VOCABULARY] if name == "llama" else []
        )
        assert_equal(run(copy, model, inputs), eager(model, inputs), 1e-5)


def test_shared_layers_multiply_into_one_gradient() -> None:
    model, step = captured("albert")
    copy = accumulate_embeddings(step)
    assert (
        targets(step).count(aten.mm.default) - targets(copy).count(aten.mm.default)
        == targets(copy).count(aten.addmm_.default)
        > 8
    )
    inputs = tiny("albert", ignored=0.2)[1]
    assert_equal(run(copy, model, inputs), eager(model, inputs), 1e-5)


def test_new_nodes_are_attributed_and_valued() -> None:
    _, step = captured("bert")
    for option in ("chunked", "rechunked"):
        copy = rewritten(step, option)
        old = {node.name for node in step.graph.nodes}
        for node in copy.graph.nodes:
            assert "val" in node.meta or node.op == "output"
            if node.name not in old:
                stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
                assert stack or node.target in IN_PLACE, node
        heads = [n for n in copy.graph.nodes if str(n.target).startswith("effcompile.loss_head")]
        assert [
            list((n.meta.get("nn_module_stack") or n.meta["fwd_nn_module_stack"]).values())[-1][0]
            for n in heads
        ] == ["model.cls.predictions.decoder"] * len(heads)


@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_steps_of_capture_training(name: str) -> None:
    """The same graph, tidied: no checks, no detach, fewer views."""
    model, inputs = tiny(name, ignored=0.3)
    step = capture_training(model, (), inputs)
    expected = eager(model, inputs, 1.5)
    for option in ("chunked", "rechunked"):
        copy = rewritten(step, option, 4)
        assert ours.embedding_backward_into.default in targets(copy)
        assert_equal(run(copy, model, inputs, 1.5), expected, 1e-5)


def test_kept_outputs_keep_the_logits() -> None:
    model, inputs = tiny("gpt2")
    step = capture_training(model, (), inputs, keep_outputs=True)
    assert find_loss_heads(step) == []
    assert "kept as an output" in str(declined_loss_heads(step)[0].reason)


# ---------------------------------------------------------------------- small models of our own


class Head(nn.Module):
    """Embedding, a layer, and a loss head that the test writes: `head(self, hidden (2, 35, 8), labels) ->
    loss`.
    """

    def __init__(self, head: Callable[..., Any], *, tied: bool = False, vocabulary: int = 40) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.layer = nn.Embedding(vocabulary, 8), nn.Linear(8, 8)
        self.lm_head = nn.Linear(8, vocabulary, bias=False)
        self.bias, self.matrix = (
            nn.Parameter(torch.randn(vocabulary)),
            nn.Parameter(torch.randn(8, vocabulary)),
        )
        if tied:
            self.lm_head.weight = self.embed.weight
        self.head = head

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        return self.head(self, torch.tanh(self.layer(self.embed(input_ids))), labels)


def ce(logits: Tensor, target: Tensor, **options: Any) -> Tensor:
    return nn.functional.cross_entropy(
        logits.reshape(-1, logits.shape[-1]).float(), target.reshape(-1), **options
    )


def small(head: Callable[..., Any], length: int = 35, **options: Any) -> tuple[Head, dict[str, Tensor], Step]:
    model = Head(head, **options)
    torch.manual_seed(1)
    batch = {"input_ids": torch.randint(0, 40, (2, length)), "labels": torch.randint(0, 40, (2, length))}
    batch["labels"][0, 3:20] = -100
    return model, batch, joint_step(model, batch, loss=called)


def called(model: nn.Module, batch: dict[str, Tensor]) -> Any:
    return model(**batch)


ACCEPTED: dict[str, Callable[..., Any]] = {
    "shifted by slices": lambda m, h, y: ce(m.lm_head(h)[:, :-1].contiguous(), y[:, 1:]),
    "sliced twice": lambda m, h, y: ce(m.lm_head(h)[:, 1:][:, :-1:1], y[:, 1:-1]),
    "bias added apart": lambda m, h, y: ce(m.lm_head(h) + m.bias, y),
    "biased, then scaled and capped": lambda m, h, y: ce(
        5 * torch.tanh((m.lm_head(h) + m.bias) * 0.3 / 2), y
    ),
    "weight as (D, V)": lambda m, h, y: ce(torch.addmm(m.bias, h.view(-1, 8), m.matrix), y),
    "sum over a number": lambda m, h, y: ce(m.lm_head(h), y, reduction="sum") / 7,
    "loss used twice": lambda m, h, y: (lambda loss: loss * loss + 3 * loss)(ce(m.lm_head(h), y)),
    "another ignore_index": lambda m, h, y: ce(m.lm_head(h), y.clamp(min=0), ignore_index=7),
    "frozen weight": lambda m, h, y: ce(nn.functional.linear(h, m.lm_head.weight.detach(), m.bias), y),
    "frozen trunk": lambda m, h, y: ce(m.lm_head(h.detach()), y),
    "frozen bias": lambda m, h, y: ce(nn.functional.linear(h, m.lm_head.weight, m.bias.detach()), y),
    "hidden states used again": lambda m, h, y: ce(m.lm_head(h), y) + h.square().mean(),
}


@pytest.mark.parametrize("kind", ACCEPTED)
def test_heads_of_other_forms(kind: str) -> None:
    model, batch, step = small(ACCEPTED[kind])
    (head,) = find_loss_heads(step) or pytest.fail(str(declined_loss_heads(step)))
    expected = eager(model, batch, 1.5, loss=called)
    for option in ("chunked", "rechunked"):
        copy = (
            with_loss_head(step, head, option, 2)
            if 2 in head.chunk_counts
            else pytest.fail(f"{head.rows} rows")
        )
        assert aten._log_softmax.default not in targets(copy)
        assert_equal(run(copy, model, batch, 1.5), expected, 1e-5)


def small_classifier(m: Head, h: Tensor, y: Tensor) -> Tensor:
    return ce(h @ m.matrix[:, :5], y % 5)


REFUSED: dict[str, tuple[Callable[..., Any], str]] = {
    "logits are shown": (lambda m, h, y: (lambda z: (ce(z, y), z))(m.lm_head(h)), "kept as an output"),
    "logits are used again": (
        lambda m, h, y: (lambda z: ce(z, y) + z.square().mean())(m.lm_head(h)),
        "its logits are also read by",
    ),
    "label smoothing": (lambda m, h, y: ce(m.lm_head(h), y, label_smoothing=0.1), "label smoothing"),
    "class weights": (lambda m, h, y: ce(m.lm_head(h), y, weight=torch.ones(40)), "weighted"),
    "losses per row": (lambda m, h, y: ce(m.lm_head(h), y, reduction="none").square().sum(), "kept per row"),
    "scaled by a tensor": (lambda m, h, y: ce(m.lm_head(h) * m.bias[0], y), "scaled by a tensor"),
    "an unknown step": (lambda m, h, y: ce(torch.relu(m.lm_head(h)), y), "aten.relu stands between"),
    "vocabulary cut": (
        lambda m, h, y: ce(m.lm_head(h)[..., :30], y.clamp(max=29)),
        "the axis of its 30 classes is cut",
    ),
    "classes in the middle": (
        lambda m, h, y: nn.functional.cross_entropy(m.lm_head(h).transpose(1, 2), y),
        "last axis",
    ),
    "rounded logits": (lambda m, h, y: ce(m.lm_head(h).bfloat16(), y), "torch.bfloat16 before the softmax"),
    "no gradient": (lambda m, h, y: ce(m.lm_head(h).detach(), y) + h.mean(), "no gradient"),
    "few classes": (small_classifier, "nothing to gain"),
    "no matrix product": (
        lambda m, h, y: ce(torch.cumsum(h.repeat(1, 1, 5), -1), y),
        "aten.cumsum stands between",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_refusals_say_why(kind: str) -> None:
    head, reason = REFUSED[kind]
    _, _, step = small(head)
    assert find_loss_heads(step) == []
    (said,) = declined_loss_heads(step)
    assert reason in str(said.reason), said


def test_few_rows_and_fp16() -> None:
    head = ACCEPTED["bias added apart"]
    (said,) = declined_loss_heads(small(head, length=31)[2])
    assert "62 rows are too few" in str(said.reason)
    model = Head(lambda m, h, y: ce(m.lm_head(h), y)).half()
    batch = {"input_ids": torch.randint(0, 40, (2, 33)), "labels": torch.randint(0, 40, (2, 33))}
    (found,) = find_loss_heads(joint_step(model, batch, loss=called))
    assert found.options == ("whole", "rechunked")


def test_wrong_options_are_named() -> None:
    _, _, step = small(ACCEPTED["frozen trunk"])
    (head,) = find_loss_heads(step)
    for option, chunks, words in (
        ("chunkd", 2, "chunked, rechunked"),
        ("chunked", 3, "takes 2 chunks; given 3"),
    ):
        with pytest.raises(UsageError, match=words):
            with_loss_head(step, head, option, chunks)
    with pytest.raises(UsageError, match="another step"):
        with_loss_head(with_loss_head(step, head, "chunked", 2), head, "chunked", 2)


# ---------------------------------------------------------------------- gradients summed in place


def test_an_embedding_without_another_gradient_is_left_alone() -> None:
    _, _, step = small(ACCEPTED["bias added apart"])
    copy = accumulate_embeddings(step)
    assert targets(copy) == targets(step) and aten.embedding_dense_backward.default in targets(copy)


def twice(m: Head, h: Tensor, y: Tensor) -> Tensor:
    """The table is read twice, by index, and once by a product whose gradient is read elsewhere."""
    return (m.lm_head(h) * m.bias).square().mean() + (m.embed(y.clamp(min=0)) * h).mean()


@pytest.mark.parametrize("padding", [None, 5])
def test_two_embeddings_and_a_product(padding: int | None) -> None:
    model, batch, _ = small(twice, tied=True)
    model.embed.padding_idx = padding
    batch["input_ids"][:, :9] = 5
    step = joint_step(model, batch, loss=called)
    copy = accumulate_embeddings(step)
    assert targets(copy).count(ours.embedding_backward_into.default) == 2
    assert aten.embedding_dense_backward.default not in targets(copy)
    assert_equal(run(copy, model, batch, 2.0), eager(model, batch, 2.0, loss=called), 1e-5)


def test_a_gradient_with_another_reader_is_not_overwritten() -> None:
    """Sums whose terms are read again, or are no tensors of their own, stay."""
    model, batch, step = small(
        lambda m, h, y: (m.bias.sum() * 3 + m.bias.exp().sum()) + (h @ m.matrix).mean(), tied=True
    )
    copy = accumulate_embeddings(step)
    assert targets(copy).count(aten.add_.Tensor) == 1  # d exp is written to; d sum is one number, expanded
    assert_equal(run(copy, model, batch), eager(model, batch, loss=called), 1e-6)


def test_a_term_that_is_also_returned_is_not_overwritten() -> None:
    model, batch, step = small(twice, tied=True)
    first = step.gradients["embed.weight"].args[0]  # a sum itself
    output = step.graph.output_node()
    output.args = (tuple(first if r is step.gradients["layer.bias"] else r for r in step.results),)
    copy = accumulate_embeddings(step)
    assert_equal(run(copy, model, batch), run(step, model, batch), 1e-6)
    assert [targets(copy).count(target) for target in IN_PLACE] == [1, 0, 1]


def test_by_frequency_is_left_to_aten() -> None:
    model, batch, _ = small(twice, tied=True)
    model.embed.scale_grad_by_freq = True
    step = joint_step(model, batch, loss=called)
    copy = accumulate_embeddings(step)
    assert ours.embedding_backward_into.default not in targets(
        copy
    ) and aten.embedding_dense_backward.default in targets(copy)
    assert_equal(run(copy, model, batch), eager(model, batch, loss=called), 1e-5)


def test_the_graph_is_in_order_and_the_allocator_agrees() -> None:
    """At the highest instant of the run, two thirds of the logits' memory are gone."""
    model, batch, _ = small(ACCEPTED["frozen bias"], vocabulary=4000, tied=True)
    step = joint_step(model, batch, loss=called)
    peaks = {}
    for option in OPTIONS:
        copy = rewritten(step, option)
        copy.graph.lint()
        run(copy, model, batch)
        with torch.profiler.profile(profile_memory=True) as profile:
            run(copy, model, batch)
        peaks[option] = peak_of_memory_events(profile)
    logits = ROWS * 4000 * 4
    assert peaks["whole"] >= 3 * logits
    assert max(peaks["chunked"], peaks["rechunked"]) <= peaks["whole"] - 2 * logits
