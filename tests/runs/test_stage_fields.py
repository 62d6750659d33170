"""The other fields of a stage: what each does, what it costs, what it says, and what it refuses."""

from __future__ import annotations

import pytest
import torch
from rich.console import Console
from stage_models import PASSES, Stack, batch_at, made, taken
from torch import nn
from transformers import ViTConfig, ViTForImageClassification

import effcompile
from effcompile.core.errors import UsageError
from effcompile.estimate.optimizer import state_bytes
from effcompile.ops.optimizers import StatesForm
from effcompile.runs import Run, Stage
from effcompile.runs.fields.layers import graphs
from effcompile.runs.plateau import Plateau
from effcompile.sparse.top_kast import TopKast


def said(run: Run) -> str:
    console = Console(width=160, record=True, file=None)
    run.report(console)
    return console.export_text()


# ------------------------------------------------------------ resolution


def vit() -> ViTForImageClassification:
    torch.manual_seed(0)
    config = ViTConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=16,
        patch_size=4,
        num_labels=3,
    )
    return ViTForImageClassification(config)


def images(stage: Stage, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    side = stage.image or 16
    return {
        "pixel_values": torch.randn(2, 3, side, side, generator=generator),
        "labels": torch.tensor([0, 2]),
    }


def test_positions_and_their_moments_are_interpolated_to_the_resolution() -> None:
    model = vit()
    before = model.vit.embeddings.position_embeddings.detach().clone()
    run = made(Stage(steps=1, image=16), Stage(steps=1, image=32), model=model, inputs=images, target="auto")
    assert (run.plans[0].peak_bytes or 0) < (run.plans[1].peak_bytes or 0)
    stages = iter(run)
    first = next(stages)
    first.step(**images(first.stage))
    moment = first.optimizer.state[model.vit.embeddings.position_embeddings]["exp_avg_sq"].clone()
    trained = model.vit.embeddings.position_embeddings.detach().clone()
    assert not torch.equal(trained, before)
    second = next(stages)
    after = model.vit.embeddings.position_embeddings
    assert after.shape == (1, 65, 16) and model.config.image_size == 32
    for old, new in ((trained, after.detach()), (moment, second.optimizer.state[after]["exp_avg_sq"])):
        grid = old[0, 1:].T.reshape(16, 4, 4)
        oracle = torch.stack(
            [
                torch.nn.functional.interpolate(one[None, None], size=(8, 8), mode="bicubic")[0, 0]
                for one in grid
            ]
        )
        torch.testing.assert_close(new[0, 1:], oracle.reshape(16, 64).T, rtol=1e-5, atol=1e-7)
        assert torch.equal(new[0, 0], old[0, 0])
    assert torch.isfinite(second.step(**images(second.stage)))


def test_a_resolution_that_patches_do_not_divide() -> None:
    with pytest.raises(UsageError, match="patches of 4 pixels, which do not divide it"):
        made(Stage(steps=1, image=18), model=vit(), inputs=images)


# ------------------------------------------------------------ layers and tokens


@pytest.mark.parametrize(("depth", "share"), [(12, 0.8), (4, 0.75), (2, 0.5), (24, 0.5), (3, 0.9)])
def test_graphs_run_the_share_of_the_layers_on_average(depth: int, share: float) -> None:
    found = graphs(depth, share)
    assert sum(graph.share for graph in found) == pytest.approx(1)
    assert sum(graph.share * (depth - len(graph.dropped)) for graph in found) == pytest.approx(share * depth)
    assert all(0 not in graph.dropped and graph.share >= 0 for graph in found) and not found[0].dropped


def test_fewer_layers_cost_less_and_run_as_the_model_without_them() -> None:
    run = made(Stage(steps=8, layers=0.5), target="auto")
    [priced] = run.priced
    assert not priced.graphs[0].dropped and len(priced.plans) > 1
    assert priced.seconds < (priced.plans[0].predicted.seconds or 0)
    assert priced.peak == max(
        priced.plans[0].peak_bytes or 0,
        *[(plan.peak_bytes or 0) + priced.states for plan in priced.plans[1:]],
    )
    plain, seen = Stack(), set()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01)
    for stage in run:
        while stage.left:
            graph, batch = stage._drawn()[0], batch_at(seed=stage.left)
            seen.add(graph.dropped)
            hidden = plain.table(batch["ids"])
            for place, block in enumerate(plain.blocks):
                hidden = hidden if place in graph.dropped else block(hidden)
            loss = nn.functional.cross_entropy(plain.head(hidden).flatten(0, 1), batch["labels"].flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            torch.testing.assert_close(stage.step(**batch), loss.detach(), rtol=1e-5, atol=1e-6)
    assert len(seen) > 1


def test_layers_run_on_a_share_of_the_tokens_and_the_others_pass_by() -> None:
    model = Stack(depth=2)
    run = made(Stage(steps=1, sequence=16), Stage(steps=1, sequence=16, tokens=0.25), model=model)
    assert (run.priced[1].flops or 0) < 0.6 * (run.priced[0].flops or 0)
    assert (run.plans[1].peak_bytes or 0) < (run.plans[0].peak_bytes or 0)
    seen = []
    hooks = [
        block.up.register_forward_hook(lambda module, args, out: seen.append(args[0].shape[1]))
        for block in model.blocks
    ]
    entered = effcompile.runs.entering.enter(
        model, run.optimizer, {}, run.stages[1], 1, run.layers, batch_at(16)
    )
    with entered.around(entered.graphs[0]):
        model(**batch_at(16))
    assert seen == [4, 4]
    for hook in hooks:
        hook.remove()


def test_tokens_are_dropped_in_a_planned_step() -> None:
    run = made(Stage(steps=2, tokens=0.5), target="auto")
    assert all(torch.isfinite(loss) for loss in taken(run))


# ------------------------------------------------------------ sparsity


def test_a_sparse_stage_trains_few_weights_and_is_plain_again_after_it() -> None:
    run = made(
        Stage(steps=1), Stage(steps=2, sparsity=0.75), Stage(steps=1), target="auto", model=Stack(depth=1)
    )
    stages = iter(run)
    first = next(stages)
    while first.left:
        first.step(**batch_at(seed=first.left))
    second = next(stages)
    masks = second.entered.effects[0]._held.masks()  # type: ignore[attr-defined]
    assert {round(float(mask.float().mean()), 2) for mask in masks.values()} == {0.25}
    while second.left:
        second.step(**batch_at(seed=second.left))
    third = next(stages)
    assert all(
        type(block.up) is nn.Linear and float((block.up.weight == 0).float().mean()) > 0.7
        for block in run.model.blocks
    )
    assert torch.isfinite(third.step(**batch_at()))
    assert "sparsity 0.75 in 2 linears" in said(run)


def test_top_kast_computes_with_the_largest_and_gives_gradients_to_more() -> None:
    layer = Stack(depth=1)
    weight = layer.blocks[0].up.weight.detach().clone()
    kast = TopKast(layer, sparsity=0.8, backward_sparsity=0.5, every=1, penalty=0.0)
    up = layer.blocks[0].up
    x = torch.randn(5, 16)
    out = up(x)
    order = weight.abs().flatten().argsort(descending=True)
    forward, backward = torch.zeros(512), torch.zeros(512)
    forward[order[: round(0.2 * 512)]] = 1
    backward[order[:256]] = 1
    torch.testing.assert_close(out, nn.functional.linear(x, weight * forward.view_as(weight), up.bias))
    out.sum().backward()
    dense = torch.ones(5, 32).T @ x
    torch.testing.assert_close(up.weight.grad, dense * backward.view_as(weight))
    kast.release()
    assert torch.equal(up.weight, weight * forward.view_as(weight)) and "top_kast_forward" not in dict(
        up.named_buffers()
    )


def test_top_kast_in_a_planned_step() -> None:
    run = made(Stage(steps=2, sparsity=0.8, backward_sparsity=0.5), target="auto", model=Stack(depth=1))
    assert all(torch.isfinite(loss) for loss in taken(run))
    assert "Top-KAST" in said(run)


# ------------------------------------------------------------ averages, precision, data


def test_the_average_of_the_last_checkpoints_and_its_bytes() -> None:
    plain, run = made(Stage(steps=6)), made(Stage(steps=6, average=3), target="auto")
    size = sum(p.nbytes for p in run.model.parameters())
    assert (
        run.priced[0].beside == 3 * size
        and (run.priced[0].peak or 0) == (run.plans[0].peak_bytes or 0) + 3 * size
    )
    assert plain.priced[0].beside == 0
    kept: list[torch.Tensor] = []
    for stage in run:
        with pytest.raises(UsageError, match="no checkpoint to average yet"):
            run.averaged()
        while stage.left:
            stage.step(**batch_at(seed=stage.left))
            kept.append(run.model.head.weight.detach().clone())
    torch.testing.assert_close(run.averaged().head.weight, torch.stack(kept[-3:]).mean(0))
    with pytest.raises(UsageError, match="nothing is left"):
        made(Stage(steps=6, average=3), memory=2 * size)


def test_a_stage_in_sixteen_bits_and_the_last_in_thirty_two() -> None:
    run = made(Stage(steps=1, precision="bf16"), Stage(steps=1, precision="fp32"), max_error=0.05)
    decided = [{d.option for d in plan.decisions if d.kind == "precision"} for plan in run.plans]
    assert any("bf16" in option for option in decided[0]) and not any(
        "bf16" in option for option in decided[1]
    )
    with pytest.raises(UsageError, match="say what error of the gradient is allowed"):
        made(Stage(steps=1, precision="bf16"))


def test_scores_are_norms_of_each_examples_gradient() -> None:
    model = Stack(depth=1)
    batch = batch_at(examples=4)
    found = effcompile.scores(model, [batch, batch_at(seed=1)])
    assert found.values.shape == (6,) and found.seconds > 0 and model.training
    for place in range(4):
        model.zero_grad()
        model(ids=batch["ids"][place : place + 1], labels=batch["labels"][place : place + 1]).backward()
        whole = torch.cat([p.grad.flatten() for p in model.parameters()]).norm()
        torch.testing.assert_close(found.values[place], whole.detach(), rtol=1e-4, atol=0)
    model.zero_grad()


def test_error_norms_of_a_model_with_logits() -> None:
    model, batch = vit(), images(Stage(steps=1))
    found = effcompile.scores(model, [batch], kind="el2n")
    with torch.no_grad():
        wrong = model.eval()(pixel_values=batch["pixel_values"]).logits.softmax(-1)
    wrong[0, 0] -= 1
    wrong[1, 2] -= 1
    torch.testing.assert_close(found.values, wrong.norm(dim=-1))


def test_a_stage_of_the_highest_scores() -> None:
    scores = effcompile.runs.Scores(torch.tensor([3.0, 1.0, 2.0, 9.0]), "grand", 0.5)
    run = made(Stage(steps=1, data=0.5, scores=scores), target="auto")
    stage = next(iter(run))
    assert stage.examples is not None and stage.examples.tolist() == [0, 3]
    assert "2 of 4 examples by grand, of score 6 on average (3.75 at random); scoring took 500 ms" in said(
        run
    )


# ------------------------------------------------------------ initialisation


@pytest.mark.parametrize("name", ["fixup", "t-fixup", "rezero", "skipinit", "layerscale", "mup"])
def test_initialisations_say_the_gradient_of_each_layer(name: str) -> None:
    run = made(Stage(steps=1, init=name))
    assert f"init '{name}': gradient norm by layer" in run.notes[0][0] and "→" in run.notes[0][0]


@pytest.mark.parametrize("name", ["fixup", "rezero", "skipinit"])
def test_layers_that_begin_as_the_identity_and_learn(name: str) -> None:
    run = made(Stage(steps=2, init=name), target="auto", model=Stack(depth=2))
    batch = batch_at()
    stage = next(iter(run))
    hidden = run.model.table(batch["ids"])
    for block in run.model.blocks:
        torch.testing.assert_close(block(hidden), hidden)
    before = {key: value.detach().clone() for key, value in run.model.named_parameters()}
    while stage.left:
        stage.step(**batch)
    moved = {key for key, value in run.model.named_parameters() if not torch.equal(value, before[key])}
    assert any("gain" in key for key in moved) or name == "fixup"
    assert any("down" in key for key in moved)


def test_learning_rates_by_width() -> None:
    run = made(Stage(steps=1, init="mup"), target="auto", model=Stack(depth=1, width=32))
    stage = next(iter(run))
    rates = {p.shape: group["lr"] for group in stage.optimizer.param_groups for p in group["params"]}
    assert rates[torch.Size([64, 32])] == pytest.approx(0.01 * 256 / 32) and rates[
        torch.Size([32, 64])
    ] == pytest.approx(0.01 * 256 / 64)
    assert rates[torch.Size([32])] == 0.01


def test_muon_keeps_one_moment_of_each_matrix_and_follows_the_square_root() -> None:
    def muon(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.Muon([p for p in parameters if p.dim() == 2], lr=0.01)

    run = made(Stage(steps=1), optimizer=muon, lr=(0.01, 8), model=Stack(depth=1))
    matrices = [p for p in run.model.parameters() if p.dim() == 2]
    pairs = [(run.optimizer.param_groups[0], p) for p in matrices]
    counted = state_bytes(StatesForm(), run.optimizer, pairs, "cpu").state_bytes
    for p in matrices:
        p.grad = torch.ones_like(p)
    run.optimizer.step()
    held = sum(
        v.nbytes
        for state in run.optimizer.state.values()
        for v in state.values()
        if isinstance(v, torch.Tensor)
    )
    assert counted == held == sum(p.nbytes for p in matrices)
    assert run.rows()[0].rate == pytest.approx(0.01 * (2 / 8) ** 0.5)


# ------------------------------------------------------------ plateaus, totals, bad input


def test_a_plateau_is_a_loss_that_no_longer_falls() -> None:
    falling, flat = Plateau(steps=50), Plateau(steps=50)
    for number in range(30):
        falling.add(5 - 0.1 * number)
        flat.add(5 - 0.1 * min(number, 12))
    assert not falling.reached and flat.reached


def test_a_stage_ends_at_its_plateau() -> None:
    run = made(
        Stage(steps=200, until="plateau"), target="auto", optimizer=lambda ps: torch.optim.SGD(ps, lr=0.0)
    )
    assert len(taken(run)) == 40 and run.left(0) == 0


def test_stages_are_suggested_and_the_report_says_so() -> None:
    run = made(stages="auto", steps=40)
    assert (
        [stage.steps for stage in run.stages] in ([40], [20, 20])
        and run.stages[-1].depth == 4
        and len(run.model.blocks) == 4
    )
    assert "suggested, not proven, by 12 measured steps of each depth" in said(run)
    with pytest.raises(UsageError, match="wants the steps"):
        made(stages="auto")
    with pytest.raises(UsageError, match="steps are for stages='auto'"):
        made(Stage(steps=1), steps=3)


def test_what_a_run_comes_to() -> None:
    run = made(Stage(steps=10, sequence=16))
    told = run.to_dict()
    size = sum(p.numel() for p in run.model.parameters())
    assert told["tokens"] == 10 * 2 * 16 and told["tokens_per_parameter"] == pytest.approx(320 / size)
    assert told["flops_6nd"] == 6 * size * 320
    linears = 4 * 2 * (16 * 32) + 16 * 32
    assert told["flops"] == pytest.approx(10 * 32 * 3 * 2 * linears, rel=0.02)
    assert told["kilowatt_hours"] == pytest.approx(700 * told["seconds"] / 3600 / 1000)
    text = said(run)
    assert (
        "for each parameter, beside 20 (Chinchilla)" in text and "kWh at 700 W" in text and "by 6ND" in text
    )
    assert "What it comes to" in run.html() and "<script src" not in run.html()


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"layers": 0}, "above 0 and at most 1"),
        ({"tokens": 0.0}, "above 0 and at most 1"),
        ({"tokens": 1.5}, "above 0 and at most 1"),
        ({"sparsity": 1}, "above 0 and below 1"),
        ({"data": 0.5}, "wants scores="),
        ({"average": 0}, "at least 1"),
        ({"precision": "fp7"}, "one of fp32, bf16, fp16, fp8, int8"),
        ({"init": "xavier"}, "one of 'fixup'"),
        ({"sparsity": 0.5, "backward_sparsity": 0.8}, "at least as large"),
        ({"until": "tomorrow"}, "'plateau' is wanted"),
        ({"depth": 0}, "at least 1"),
        ({"layers": "most"}, "above 0"),
    ],
)
def test_values_that_are_none(wrong: dict[str, object], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        Stage(steps=1, **wrong)  # type: ignore[arg-type]


def test_an_initialisation_later_than_at_the_start_and_too_few_layers() -> None:
    with pytest.raises(UsageError, match="only the first stage begins"):
        made(Stage(steps=1), Stage(steps=1, init="rezero"))
    with pytest.raises(UsageError, match="leaves less than one"):
        made(Stage(steps=1, layers=0.1), passes=PASSES)
