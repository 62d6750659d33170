"""Tensor parallelism on gloo ranks, alone and beside data parallelism, is training in one process; what
cannot be divided is said.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from captured_once import captured_once
from rank_helpers import (
    STEPS,
    Trained,
    batch_of,
    blocks_of,
    model_of,
    optimizer_of,
    part,
    source_of,
    trained,
    worst_error,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate

import effcompile
from effcompile.backends.torch.ranks import Ranks, ordered_mesh, refuse_other_inputs, spread_parameters
from effcompile.backends.torch.training import StepRunner
from effcompile.capture.training import capture_training
from effcompile.core import torch_compat_memory
from effcompile.core.errors import GuardError, InputsError, UsageError
from effcompile.passes.training.base import Case
from effcompile.passes.training.shard import BY_BLOCK, spread_over
from effcompile.passes.training.split import Split
from effcompile.passes.training.tensor import TensorParallel
from effcompile.proof.parallel.processes import on_ranks
from effcompile.proof.training.alive import alive_bytes
from effcompile.schedules.emit import emit
from effcompile.schedules.simulate import simulate

RELATIVE = 1e-5


@dataclass(frozen=True, kw_only=True)
class Found:
    losses: list[float]
    errors: list[tuple[float, str]]
    taken: list[str]
    declined: dict[str, str]
    local: int
    peaks: list[int]
    predicted: int
    replicas_equal: bool


def undivided(name: str, dp: int) -> list[Case]:
    """The step of each part of the batch: captured before the ranks are forked, which would all capture the
    same.
    """
    first, step = source_of(name)
    others = [
        replace(first, kwargs=part(batch_of(name, 2 * dp), group, dp), made={}) for group in range(1, dp)
    ]
    return [Case(step=step, source=first), *(Case(step=source.capture(), source=source) for source in others)]


def run(rank: int, cases: list[Case], wanted: Trained, dp: int, tp: int) -> Found:
    """STEPS steps with a graph divided over tp ranks, captured by each, and a batch divided over dp."""
    mesh = init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))
    case = cases[mesh["dp"].get_local_rank()]
    assert case.source is not None
    model, mine = case.source.model, dict(case.source.kwargs)
    made, split = TensorParallel(ranks=tp, rank=mesh["tp"].get_local_rank())._made(case, tp)
    step = spread_over(made.step, model, dp, BY_BLOCK) if dp > 1 else made.step
    assert step.spread is not None
    cut = blocks_of(step)
    emitted = emit(cut, frozenset(s for block in cut.blocks for s in block.entering))
    ranks = Ranks(mesh=ordered_mesh(mesh), spread=step.spread)
    runner = StepRunner(model, step, emitted, ranks=ranks)
    runner.guarded = False
    spread_parameters(model, ranks)
    optimizer = optimizer_of(model)
    base = alive_bytes("cpu", model, mine, list(step.constants.values()))
    losses, errors, peaks = [], [], []
    for at in range(STEPS):
        with torch_compat_memory.watched_memory("cpu") as peak:
            loss = runner.loss((), mine)
            loss.backward()
        peaks.append(base + peak())
        total = loss.detach().clone()
        del loss
        dist.all_reduce(total)
        losses.append(float(total) / dp / tp)
        errors.append(
            worst_error(
                {n: p.grad for n, p in model.named_parameters() if p.grad is not None}, wanted.gradients[at]
            )
        )
        optimizer.step()
        optimizer.zero_grad()
        errors.append(worst_error(dict(model.named_parameters()), wanted.parameters[at]))
    replicas = [p.to_local() for n, p in model.named_parameters() if n not in split.parts]
    return Found(
        losses=losses, errors=errors, taken=list(split.taken),
        declined={site: reason.text for site, reason in split.declined.items()},
        local=sum(p.to_local().numel() for p in model.parameters()), peaks=peaks,
        predicted=simulate(cut, emitted).peak_bytes,
        replicas_equal=dp > 1 or all(equal_everywhere(p.detach(), tp) for p in replicas),
    )  # fmt: skip


def equal_everywhere(tensor: torch.Tensor, ranks: int) -> bool:
    found = [torch.empty_like(tensor) for _ in range(ranks)]
    dist.all_gather(found, tensor.contiguous())
    return all(torch.equal(tensor, other) for other in found)


def check(found: list[Found], wanted: Any) -> None:
    for rank in found:
        assert rank.losses == pytest.approx(wanted.losses, rel=RELATIVE)
        assert max(rank.errors)[0] < RELATIVE, max(rank.errors)
        assert rank.replicas_equal
        assert max(rank.peaks) <= 1.02 * rank.predicted, (rank.peaks, rank.predicted)


#: What else has biases (vit): where EFFCOMPILE_EVERY is set.
MODELS = ["llama", "gpt2", "bert", "qwen3", *(["vit"] if os.environ.get("EFFCOMPILE_EVERY") else [])]


@pytest.mark.parametrize("name", MODELS)
def test_two_ranks_with_half_of_the_heads_and_neurons_each(name: str) -> None:
    """Grouped queries (llama), a fused transposed QKV (gpt2), biases (bert), and norms of each head that
    all ranks have (qwen3).
    """
    source, _ = source_of(name)
    model = source.model
    wanted = trained(model, source.kwargs)
    found = on_ranks(run, 2, undivided(name, 1), wanted, 1, 2)
    check(found, wanted)
    kinds = [site.rpartition(":")[2] for site in found[0].taken]
    assert kinds.count("neurons") == kinds.count("heads") == 2, (found[0].taken, found[0].declined)
    assert found[0].local < sum(p.numel() for p in model.parameters())


def test_four_ranks_two_along_each_axis() -> None:
    """The rank's parts of the weights are sharded over the data-parallel ranks, and gathered there."""
    wanted = trained(model_of("tied"), batch_of("tied", 4))
    found = on_ranks(run, 4, undivided("tied", 2), wanted, 2, 2)
    check(found, wanted)
    assert len(found[0].taken) == 3


def in_16_bits(rank: int, exact: dict[str, torch.Tensor]) -> tuple[dict[str, float], bool, list[bool]]:
    """By the user's way in: how far each gradient is from fp32's; whether what all ranks have is the same;
    what was checked.
    """
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    inputs = dict(batch_of("tied", 2))
    planned = effcompile.optimize(
        model_of("tied").bfloat16(), inputs=inputs, mode="training", mesh=mesh, passes=["checkpoint"]
    )
    planned.runner.loss((), inputs).backward()
    with torch_compat_memory.watched_memory("cpu") as peak:
        # gloo's threads may hold what is compared while the step runs
        refuse_other_inputs(planned.runner.ranks, inputs.values())
    assert peak() == 0
    with pytest.raises(
        InputsError, match="Ranks 0 and 1 stand in one place along 'dp' and were called with different inputs"
    ):
        planned(**{**inputs, "input_ids": inputs["input_ids"] if rank else inputs["input_ids"] ^ 1})
    gradients = {name: p.grad for name, p in planned.named_parameters()}
    assert any(p.placements != (Replicate(),) for p in planned.parameters())
    equal = all(
        equal_everywhere(g.to_local(), 2) for g in gradients.values() if g.placements == (Replicate(),)
    )
    return (
        distances({name: g.full_tensor() for name, g in gradients.items()}, exact),
        equal,
        [c.passed for c in planned.plan.checks],
    )


def distances(found: dict[str, torch.Tensor], exact: dict[str, torch.Tensor]) -> dict[str, float]:
    return {name: float((found[name].float() - value).norm() / value.norm()) for name, value in exact.items()}


def gradients_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    model(**batch_of("tied", 2)).loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def test_in_16_bits_ranks_are_as_near_to_fp32_as_one_process() -> None:
    """Each rank rounds its part of a sum, so that no two gradients are equal: what counts is how far both are
    from fp32's.
    """
    exact = gradients_of(model_of("tied").bfloat16().float())
    own = distances(gradients_of(model_of("tied").bfloat16()), exact)
    for found, equal, checked in on_ranks(in_16_bits, 2, exact):
        assert equal
        assert checked == [True]
        assert 0 < max(found.values()) <= 1.5 * max(own.values()), (found, own)


def declined(name: str, tp: int) -> Split:
    model = model_of(name)
    split = Split(model=model, ranks=tp, rank=0)
    before = {n: id(p) for n, p in model.named_parameters()}
    capture_training(model, (), dict(batch_of(name, 2)), edit=split.edit)
    assert {n: id(p) for n, p in model.named_parameters()} == before
    return split


def test_what_does_not_divide_is_said() -> None:
    """Two key heads over three ranks; 48 neurons divide."""
    split = declined("llama", 3)
    assert [str(reason) for site, reason in split.declined.items() if site.endswith("heads")] == [
        "its 2 heads do not divide by 3"
    ] * 2
    assert [site.rpartition(":")[2] for site in split.taken] == ["neurons", "neurons"]


def planned_over(model: torch.nn.Module, inputs: object, tp: int) -> effcompile.Plan:
    with captured_once():
        return effcompile.plan(model, inputs, mode="training", passes=["checkpoint", f"tensor.ranks={tp}"])


@pytest.mark.parametrize(
    ("tp", "said"),
    [(3, r"its 2 heads do not divide by 3 .*Of tp, 2 would divide"), (7, "do not divide by 7")],
)
def test_heads_that_do_not_divide_are_an_error(tp: int, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        planned_over(model_of("llama"), dict(batch_of("llama", 2)), tp)


class ByHand(torch.nn.Module):
    """x @ W.T, of which no structure is found."""

    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.randn(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.w.T).relu().square().mean()


def test_a_model_without_structures_is_an_error() -> None:
    with pytest.raises(
        UsageError, match=r"Nothing of the model can be divided among 2 tensor-parallel ranks"
    ):
        planned_over(ByHand(), (torch.randn(4, 8),), 2)


class Dropping(torch.nn.Module):
    """A layer whose attention, neurons and residuals drop: of the first two each rank has a part."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(3))
        self.out, self.up, self.down = (torch.nn.Linear(a, b) for a, b in ((16, 16), (16, 24), (24, 16)))
        self.drop = torch.nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (each(x).unflatten(-1, (4, 4)).transpose(1, 2) for each in self.qkv)
        mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=0.2, is_causal=True)
        x = x + self.drop(self.out(mixed.transpose(1, 2).flatten(-2)))
        return (x + self.down(self.drop(self.up(x).relu()))).square().mean()


def dropping() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(Dropping()).train()


def seeded(model: torch.nn.Module, seed: int = 0) -> list[float]:
    """Losses of STEPS steps with dropout."""
    optimizer, losses = optimizer_of(model), []
    x = torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(1))
    torch.manual_seed(seed)
    for _ in range(STEPS):
        loss = model(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def with_dropout(rank: int) -> tuple[list[float], set[str], bool, str]:
    mesh, x = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), torch.zeros(2, 6, 16)
    made = effcompile.optimize(dropping(), inputs=(x,), mode="training", mesh=mesh, passes=["checkpoint"])
    losses = seeded(made)
    parts = {str(p.placements) for p in made.parameters()}
    checked = [check.passed for check in made.plan.checks] == [True]
    with pytest.raises(GuardError) as refused:
        seeded(made, rank)
    return losses, parts, checked, str(refused.value)


def test_dropout_over_tensor_parallel_ranks_is_that_of_one_process() -> None:
    """To the numbers: of heads and neurons each rank draws all and has its own. Ranks that are seeded
    otherwise are told.
    """
    wanted = seeded(dropping())
    assert wanted != pytest.approx(seeded(dropping(), 1), rel=RELATIVE)
    for losses, parts, checked, said in on_ranks(with_dropout, 2):
        assert losses == pytest.approx(wanted, rel=RELATIVE)
        assert parts == {"(Shard(dim=0),)", "(Shard(dim=1),)", "(Replicate(),)"}
        assert checked
        assert said.startswith("Ranks 0 and 1 stand in one place along 'dp', and drew other random numbers")
