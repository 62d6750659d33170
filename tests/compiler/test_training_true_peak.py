"""The budget counts the model, not the graph: what the loss does not read is alive all the same."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn

from effcompile.compiler import optimize_training
from effcompile.core import torch_compat_memory
from effcompile.core.errors import GuardError, InfeasibleError
from effcompile.core.goal import Goal
from effcompile.runtime.training import TrainingExecutable

pytestmark = pytest.mark.usefixtures("quick_training")
WIDTH, ROWS = 32, 64
_TANGENT = 4  # of the gradient that arrives at the loss, where autograd's own is freed before the peak


class Plain(nn.Module):
    """Three layers, of which subclasses hold more than they read."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(3)))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.head(self.layers(x)), y)


class UnusedTower(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Sequential(nn.Linear(500, 501), nn.BatchNorm1d(501))


class UnusedBuffers(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(300, 301))
        self.register_buffer("hidden", torch.ones(7, 11), persistent=False)


class Attributes(Plain):
    """A tensor attribute, and tensors in a list, that are no buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.randn(100, 101)
        self.kept = [torch.randn(50, 51), {"x": torch.randn(20, 21)}]


class Views(Plain):
    """All weights are views of one storage, which has room for more."""

    def __init__(self) -> None:
        super().__init__()
        flat, at = torch.randn(3 * WIDTH * WIDTH + 10_000), 0
        for layer in self.layers:
            assert isinstance(layer, nn.Sequential) and isinstance(layer[0], nn.Linear)
            layer[0].weight = nn.Parameter(flat[at : at + WIDTH * WIDTH].view(WIDTH, WIDTH))
            at += WIDTH * WIDTH


class Tied(Plain):
    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers[1:]:
            layer[0].weight = self.layers[0][0].weight  # type: ignore[index, union-attr]
        self.again = self.head.weight


def spectral() -> nn.Module:
    model = Plain()
    nn.utils.parametrizations.spectral_norm(model.head)
    return model


def old_spectral() -> nn.Module:
    model = Plain()
    nn.utils.spectral_norm(model.head)  # type: ignore[no-untyped-call]
    return model


class Pooled(nn.Module):
    """BERT whose pooler the loss does not read."""

    def __init__(self) -> None:
        super().__init__()
        import transformers as hf

        config = hf.BertConfig(
            vocab_size=50, hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=2,
            intermediate_size=WIDTH, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )  # fmt: skip
        self.bert = hf.BertModel(config)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        ids = (x[:, :8].abs() * 10).long() % 50
        hidden = self.bert(input_ids=ids).last_hidden_state
        return hidden.square().mean() + y.float().mean()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "unused tower": UnusedTower, "unused buffers": UnusedBuffers, "attributes": Attributes,
    "views of one storage": Views, "tied": Tied, "spectral_norm": spectral, "old spectral_norm": old_spectral,
    "BERT's pooler": Pooled,
}  # fmt: skip


def nbytes(tensors: Iterable[Any]) -> int:
    """Bytes of distinct storages, told apart by address."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def held(model: nn.Module) -> list[torch.Tensor]:
    """All that the models above hold, named by hand where it is neither parameter nor buffer."""
    more = [model.table, model.kept[0], model.kept[1]["x"]] if isinstance(model, Attributes) else []
    more += [model.head.weight] if "head.weight_orig" in dict(model.named_parameters()) else []  # type: ignore[union-attr, list-item]
    return [*model.parameters(), *model.buffers(), *more]


def true_peak(planned: TrainingExecutable, model: nn.Module, batch: dict[str, torch.Tensor]) -> int:
    before = nbytes([*held(model), *batch.values()])
    with torch_compat_memory.memory_profile() as profile:
        planned(**batch).backward()
    return before + torch_compat_memory.peak_of_memory_events(profile)


@pytest.mark.parametrize("name", MODELS)
def test_the_peak_counts_what_the_loss_does_not_read(name: str) -> None:
    torch.manual_seed(0)
    model = MODELS[name]().train()
    batch = {"x": torch.randn(ROWS, WIDTH), "y": torch.randint(0, 4, (ROWS,))}
    planned = optimize_training(model, (), batch, goal=Goal(mode="training"), passes=["checkpoint"])
    assert planned.plan.measured is not None
    assert planned.plan.measured.peak_bytes == true_peak(planned, model, batch)
    assert planned.plan.predicted.peak_bytes in (
        planned.plan.measured.peak_bytes,
        planned.plan.measured.peak_bytes + _TANGENT,
    )
    assert planned.plan.measured_baseline is not None and planned.plan.baseline.peak_bytes is not None
    # autograd may keep more
    assert (planned.plan.measured_baseline.peak_bytes or 0) >= planned.plan.baseline.peak_bytes


@pytest.mark.parametrize("name", ["unused tower", "attributes"])
def test_a_budget_below_the_models_own_bytes_is_infeasible_in_words(name: str) -> None:
    torch.manual_seed(0)
    model = MODELS[name]().train()
    batch = {"x": torch.randn(ROWS, WIDTH), "y": torch.randint(0, 4, (ROWS,))}
    own = nbytes([*held(model), *batch.values()])
    with pytest.raises(InfeasibleError, match="parameters, buffers, inputs") as refused:
        optimize_training(
            model, (), batch, goal=Goal(mode="training", memory=own - 1000), passes=["checkpoint"]
        )
    least = int(refused.value.nearest["memory"])
    assert least > own
    planned = optimize_training(
        model, (), batch, goal=Goal(mode="training", memory=least), passes=["checkpoint"]
    )
    assert true_peak(planned, model, batch) <= least


def test_one_tensor_given_twice_counts_once() -> None:
    torch.manual_seed(0)

    class Both(Plain):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return (self.layers(x) - y).square().mean()

    model, x = Both().train(), torch.randn(ROWS, WIDTH)
    planned = optimize_training(
        model, (), {"x": x, "y": x}, goal=Goal(mode="training"), passes=["checkpoint"]
    )
    assert planned.plan.measured is not None
    assert (
        planned.plan.predicted.peak_bytes
        == planned.plan.measured.peak_bytes
        == true_peak(planned, model, {"x": x, "y": x})
    )


LAID: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "expanded": lambda x: x[:1].expand(ROWS, WIDTH),
    "cut out": lambda x: torch.cat([x, x], 1)[:, :WIDTH],
    "transposed": lambda x: x.t().contiguous().t(),
    "every other": lambda x: torch.cat([x, x], 0)[::2],
}


@pytest.mark.parametrize("laid", LAID)
def test_copies_of_inputs_that_lie_otherwise_are_counted(laid: str) -> None:
    """The graph wants strides of its own, so that a view of a larger tensor is copied at each call."""
    torch.manual_seed(0)
    model = Plain().train()
    batch = {"x": LAID[laid](torch.randn(ROWS, WIDTH)), "y": torch.randint(0, 4, (ROWS,))}
    with pytest.raises(InfeasibleError) as refused:
        optimize_training(model, (), batch, goal=Goal(mode="training", memory=1), passes=["checkpoint"])
    least = int(refused.value.nearest["memory"])
    planned = optimize_training(
        model, (), batch, goal=Goal(mode="training", memory=least), passes=["checkpoint"]
    )
    assert true_peak(planned, model, batch) <= least


def test_a_copy_that_the_budget_leaves_no_room_for_is_refused() -> None:
    torch.manual_seed(0)
    model = Plain().train()
    batch = {"x": torch.randn(ROWS, WIDTH), "y": torch.randint(0, 4, (ROWS,))}
    other = {**batch, "x": LAID["cut out"](batch["x"])}
    free = optimize_training(model, (), batch, goal=Goal(mode="training"), passes=["checkpoint"])
    torch.testing.assert_close(free(**other), model(**other))
    peak = free.plan.predicted.peak_bytes
    assert peak is not None
    tight = optimize_training(
        model, (), batch, goal=Goal(mode="training", memory=peak), passes=["checkpoint"]
    )
    with pytest.raises(GuardError, match=r"x has other strides .* takes 8192 bytes, .* leaves \d+ to such"):
        tight(**other)
    torch.testing.assert_close(tight(**batch), model(**batch))
    roomy = optimize_training(
        model, (), batch, goal=Goal(mode="training", memory=peak + 8192), passes=["checkpoint"]
    )
    torch.testing.assert_close(roomy(**other), model(**other))
    copied = true_peak(roomy, model, other) - nbytes([other["x"]]) + nbytes([batch["x"]])
    assert copied <= peak + 8192


class Bags(nn.Module):
    """Embedding bags: their kernels make one index more than their shapes say, and the backward of a maximum
    copies what it reads.
    """

    def __init__(self, mode: str) -> None:
        super().__init__()
        self.bag, self.head = nn.EmbeddingBag(50, 16, mode=mode), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.head(self.bag((x[:, :5].abs() * 10).long() % 50)), y)


class InPlace(nn.Module):
    """Writes through views of chunks, which as a graph copies the whole storage behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.head = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, 4)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.wide(x)
        h[:, 4:8].mul_(2.0)
        u, v = (h * 2).chunk(2, -1)
        w = v.clone()
        w[1:].add_(1.0)
        return nn.functional.cross_entropy(self.head(u * w), y)


class Renewed(nn.Module):
    """Buffers whose old values the backward reads."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(WIDTH, WIDTH, dtype=dtype), nn.Linear(WIDTH, 4, dtype=dtype)
        for i in range(3):
            self.register_buffer(f"scale_{i}", torch.ones(1024, dtype=dtype))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.body(x[:8].to(self.body.weight.dtype))
        for scale in self.buffers():
            h = torch.tanh(h * scale.clone()[:WIDTH])
            scale.mul_(0.9)
        return nn.functional.cross_entropy(self.head(h).float(), y[:8])


SIMULATED: dict[str, Callable[[], nn.Module]] = {
    "bag, mean": lambda: Bags("mean"), "bag, max": lambda: Bags("max"), "in place": InPlace,
    "buffers": lambda: Renewed(torch.float32), "buffers, bf16": lambda: Renewed(torch.bfloat16),
}  # fmt: skip


@pytest.mark.parametrize("name", SIMULATED)
def test_the_simulation_is_not_below_the_allocator(name: str) -> None:
    torch.manual_seed(0)
    model = SIMULATED[name]().train()
    batch = {"x": torch.randn(ROWS, WIDTH), "y": torch.randint(0, 4, (ROWS,))}
    planned = optimize_training(model, (), batch, goal=Goal(mode="training"), passes=["checkpoint"])
    peak = true_peak(planned, model, batch)
    assert planned.plan.predicted.peak_bytes in (peak, peak + _TANGENT)


class Narrow(nn.Module):
    """A layer whose weights are in 16 bits, beside wide ones."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow, self.head = (
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16),
            nn.Linear(WIDTH, 4),
        )

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.wide(x)
        return nn.functional.cross_entropy(self.head(h + self.narrow(h.bfloat16()).float()), y)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_an_update_in_16_bits_is_compared_within_their_rounding(kind: type[torch.optim.SGD]) -> None:
    torch.manual_seed(0)
    model = Narrow().train()
    batch = {"x": torch.randn(ROWS, WIDTH), "y": torch.randint(0, 4, (ROWS,))}
    optimizer = kind(model.parameters(), lr=0.1)
    planned = optimize_training(
        model, (), batch, goal=Goal(mode="training"), passes=["checkpoint", "states"], optimizer=optimizer
    )
    update = planned.plan.checks[-1]
    assert update.name == f"parameters after two updates, as {kind.__name__}'s" and update.passed
