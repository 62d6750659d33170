"""CTC's loss as one operator: losses and gradients as torch's own, memory as said, and planned in a step."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F  # noqa: N812
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import effcompile
from effcompile.core.torch_compat_memory import peak_of_memory_events
from effcompile.ops.ctc import TraceableCTC
from effcompile.ops.workspace import workspace_bytes


def _case(seed: int, steps: int, batch: int, longest: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    draw = torch.Generator().manual_seed(seed)
    return (
        torch.randn(steps, batch, 6, generator=draw, dtype=dtype),
        torch.randint(1, 6, (batch, longest), generator=draw),
        torch.randint(1, steps + 1, (batch,), generator=draw),
        torch.randint(0, longest + 1, (batch,), generator=draw),
    )


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 1000), steps=st.integers(1, 12), batch=st.integers(1, 3), longest=st.integers(1, 6),
    reduction=st.sampled_from(["mean", "sum", "none"]), zero=st.booleans(), double=st.booleans(),
    form=st.sampled_from(["padded", "in a row", "lists"]),
)  # fmt: skip
def test_losses_and_gradients_are_torchs(
    seed: int, steps: int, batch: int, longest: int, reduction: str, zero: bool, double: bool, form: str
) -> None:
    x, targets, lengths, sizes = _case(seed, steps, batch, longest, torch.double if double else torch.float)
    if form == "in a row":
        targets = torch.cat([row[:size] for row, size in zip(targets, sizes, strict=True)])
    given = (tuple(lengths.tolist()), tuple(sizes.tolist())) if form == "lists" else (lengths, sizes)

    def run() -> tuple[Tensor, Tensor]:
        leaf = x.clone().requires_grad_()
        loss = F.ctc_loss(leaf.log_softmax(-1), targets, *given, reduction=reduction, zero_infinity=zero)
        (gradient,) = torch.autograd.grad((loss * 3).sum(), leaf)
        return loss, gradient

    expected = run()
    with TraceableCTC():
        got = run()
    for ours, torchs in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, torchs, equal_nan=True)


def test_workspace_is_never_below_the_allocators_trace() -> None:
    x, targets, lengths, _ = _case(1, 60, 4, 20, torch.float)
    args = (x, targets, lengths, torch.full((4,), 20), 0, True)  # all are as long as they may be
    run = torch.ops.effcompile.ctc_loss.default
    run(*args)
    with torch.profiler.profile(profile_memory=True) as profile:
        results = run(*args)
    said = workspace_bytes(run, args)
    measured = peak_of_memory_events(profile) - sum(result.nbytes for result in results)
    assert said is not None and measured <= said <= 1.05 * measured + 600


class Speech(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.front, self.head = nn.Conv1d(8, 64, 3, 2, 1), nn.Linear(64, 12)
        self.layer = nn.TransformerEncoderLayer(64, 4, 256, dropout=0.1, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(F.gelu(self.front(x)).transpose(1, 2))).log_softmax(-1).transpose(0, 1)


def _loss(log_probs: Tensor, inputs: dict[str, Tensor]) -> Tensor:
    frames = torch.full((log_probs.shape[1],), log_probs.shape[0])
    return F.ctc_loss(log_probs, inputs["targets"], frames, inputs["sizes"])


def test_a_step_with_it_is_planned_and_equals_eager() -> None:
    torch.manual_seed(0)
    model = Speech().train()
    eager = copy.deepcopy(model)

    def batch(seed: int) -> dict[str, Tensor]:
        draw = torch.Generator().manual_seed(seed)
        return {
            "x": torch.randn(3, 8, 80, generator=draw),
            "targets": torch.randint(1, 12, (3, 9), generator=draw),
            "sizes": torch.randint(1, 10, (3,), generator=draw),  # the longest differs from step to step
        }

    free = effcompile.plan(model, batch(0), mode="training", loss=_loss).peak_bytes
    step = effcompile.optimize(model, batch(0), mode="training", loss=_loss, memory=int(0.85 * free))
    assert step.plan.measured is not None and step.plan.measured.peak_bytes <= 0.85 * free
    for seed in range(3):
        given = batch(seed)
        torch.manual_seed(seed)
        loss = step(**given)
        loss.backward()
        torch.manual_seed(seed)
        expected = _loss(eager(given["x"]), given)
        expected.backward()
        torch.testing.assert_close(loss, expected)
    for ours, torchs in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, torchs.grad)
