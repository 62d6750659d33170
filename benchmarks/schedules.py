"""Schedules of stages: is every stage within its budget, is a killed run resumed to the bit, and what do
schedules do to a small model?

    python benchmarks/schedules.py peaks             the measured peak of every stage of six beside its budget
    python benchmarks/schedules.py kill --times 20   a run killed at random instants and resumed, and one not
    python benchmarks/schedules.py learn [NAMES]     a byte-level model of Python's own sources, three seeds

Seconds are those of this process's CPU, on one thread, so that they hold on a busy machine; planning is not
among them.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from _common import header, markdown
from _masked_bytes import texts
from _schedule_models import PostNorm, gpt2, llama, vit, with_linears
from torch import Tensor, nn

import effcompile
from effcompile.core import torch_compat_memory
from effcompile.runs.initialise import RECIPES
from effcompile.sparse.top_kast import TopKast

SEEDS = (0, 1, 2)
CONTEXT, BATCH, STEPS = 64, 8, 240
PASSES = ["no-pointwise", "no-loss_head", "states.offload=false"]
Batch = dict[str, Tensor]


class Data:
    """Windows of the sources: `at(step)` is the same for every run of a seed."""

    def __init__(self) -> None:
        self.train, self.valid = (text.long() for text in texts())

    def at(self, seed: int, step: int, length: int = CONTEXT, batch: int = BATCH) -> Batch:
        generator = torch.Generator().manual_seed(1_000_003 * seed + step)
        starts = torch.randint(0, len(self.train) - length, (batch, 1), generator=generator)
        ids = self.train[starts + torch.arange(length)]
        return {"input_ids": ids, "labels": ids}

    def loss(self, model: nn.Module) -> float:
        """On 64 windows of files that nothing is trained on."""
        starts = torch.arange(64)[:, None] * ((len(self.valid) - CONTEXT) // 64)
        ids = self.valid[starts + torch.arange(CONTEXT)]
        with torch.no_grad():
            found = float(model.eval()(input_ids=ids, labels=ids).loss)
        model.train()
        return found


DATA: Data


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=3e-3, weight_decay=0.01)


# ------------------------------------------------------------ peaks


def image(stage: effcompile.Stage) -> Batch:
    side = stage.image or 32
    return {"pixel_values": torch.randn(4, 3, side, side), "labels": torch.arange(4)}


def tokens(stage: effcompile.Stage) -> Batch:
    ids = torch.randint(0, 256, (4, stage.sequence or 64))
    return {"input_ids": ids, "labels": ids}


def six() -> Iterator[tuple[str, nn.Module, list[effcompile.Stage], Callable[..., Batch]]]:
    stage = effcompile.Stage
    yield (
        "length",
        gpt2(),
        [stage(steps=2, sequence=32), stage(steps=2, sequence=64), stage(steps=2, sequence=128)],
        tokens,
    )
    yield "resolution", vit(), [stage(steps=2, image=32), stage(steps=2, image=64)], image
    yield "stacking", gpt2(), [stage(steps=2, depth=2), stage(steps=2, depth=4)], tokens
    yield "layer drop", gpt2(), [stage(steps=6, layers=0.75)], tokens
    yield (
        "MAE 0.25",
        vit(),
        [stage(steps=2, image=64, tokens=0.25), stage(steps=2)],
        lambda s: image(stage(steps=1, image=64)),
    )
    yield "sparse → dense", llama(), [stage(steps=2, sparsity=0.75), stage(steps=2)], tokens


def peaks() -> list[list[str]]:
    """Each schedule under 0.85 of what its largest stage takes unplanned; the peak of a whole step, by
    torch's allocator.
    """
    rows = []
    for name, model, stages, inputs in six():
        free = effcompile.schedule(
            copy.deepcopy(model), stages, inputs=inputs, optimizer=adamw, passes=PASSES
        )
        budget = int(0.85 * max(priced.peak or 0 for priced in free.priced))
        run = effcompile.schedule(model, stages, inputs=inputs, optimizer=adamw, passes=PASSES, memory=budget)
        for active in run:
            given, most = inputs(active.stage), 0
            while active.left:
                there = resident(model, active, given)
                with torch_compat_memory.watched_memory("cpu") as peak:
                    active.step(**given)
                most = max(most, there + peak())
            foreseen = run.priced[active.number].peak or 0
            rows.append([
                f"{name}: {active.stage.sizes or 'dense'}", f"{budget / 2**20:.3f}",
                f"{foreseen / 2**20:.3f}", f"{most / 2**20:.3f}",
                "yes" if foreseen <= budget and most <= budget else "NO",
            ])  # fmt: skip
            print(rows[-1], file=sys.stderr, flush=True)
    return rows


def resident(model: nn.Module, active: effcompile.runs.Active, given: Batch) -> int:
    """Bytes that are there before a step: the model's, the inputs', and the optimizer's states."""
    states = [v for state in active.optimizer.state.values() for v in state.values() if isinstance(v, Tensor)]
    return sum(t.nbytes for t in (*model.parameters(), *model.buffers(), *given.values(), *states))


# ------------------------------------------------------------ killed and resumed


def child(file: str, out: str) -> None:
    """A run that is saved after every step, resumed where a file is there; writes a digest of its end."""
    torch.manual_seed(0)
    model = gpt2(4, dropout=0.1)
    stages = [
        effcompile.Stage(steps=6, depth=2, sequence=16),
        effcompile.Stage(steps=6, depth=4, sequence=32),
    ]
    run = effcompile.schedule(model, stages, inputs=tokens, optimizer=adamw, passes=PASSES)
    if os.path.exists(file):
        run.resume(file)
    else:
        torch.manual_seed(5)
    for active in run:
        while active.left:
            number = sum(run.done)
            generator = torch.Generator().manual_seed(number)
            ids = torch.randint(0, 256, (4, active.stage.sequence), generator=generator)
            active.step(input_ids=ids, labels=ids)
            run.save(file)
            time.sleep(0.05)
    print(hash(tuple(float(v.double().sum()) for v in model.state_dict().values())), file=open(out, "w"))  # noqa: SIM115


def kill(times: int) -> list[list[str]]:
    rng, rows = random.Random(0), []
    with tempfile.TemporaryDirectory() as folder:
        whole, start = Path(folder) / "whole.txt", time.time()
        subprocess.run(
            [sys.executable, __file__, "child", str(Path(folder) / "whole.pt"), str(whole)], check=True
        )
        took = time.time() - start
        for number in range(times):
            file, out = Path(folder) / f"{number}.pt", Path(folder) / f"{number}.txt"
            kills = 0
            while not out.exists():
                process = subprocess.Popen([sys.executable, __file__, "child", str(file), str(out)])
                try:
                    process.wait(timeout=rng.uniform(0.4, 1.0) * took if kills < 2 else 20 * took)
                except subprocess.TimeoutExpired:
                    process.send_signal(signal.SIGKILL)
                    process.wait()
                    kills += 1
            rows.append([str(number), str(kills), "yes" if out.read_text() == whole.read_text() else "NO"])
            print(rows[-1], file=sys.stderr, flush=True)
    return rows


# ------------------------------------------------------------ learning


def scheduled(
    seed: int, stages: list[effcompile.Stage], **asked: Any
) -> tuple[list[float], list[float], nn.Module, effcompile.Run]:
    """A run: validation loss and CPU seconds after every 20 steps, seconds without planning and without
    validation.
    """
    torch.manual_seed(seed)
    model = gpt2()
    run = effcompile.schedule(
        model,
        stages,
        inputs=lambda stage: DATA.at(0, 0, stage.sequence or CONTEXT),
        optimizer=adamw,
        passes=PASSES,
        **asked,
    )
    torch.manual_seed(seed)
    losses, seconds, spent = [], [], 0.0
    for active in run:
        while active.left:
            given = DATA.at(seed, sum(run.done), active.stage.sequence or CONTEXT)
            start = time.process_time()
            active.step(**given)
            spent += time.process_time() - start
            if sum(run.done) % 20 == 0:
                losses.append(DATA.loss(run.model))
                seconds.append(spent)
    return losses, seconds, model, run


def looped(
    seed: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: int = STEPS,
    batch: int = BATCH,
    after: Callable[[], object] = lambda: None,
    pick: Tensor | None = None,
) -> float:
    """A plain loop; returns the validation loss at its end.

    `pick`: numbers of the batches that are taken, over and over.
    """
    torch.manual_seed(seed)
    for step in range(steps):
        loss = model(**DATA.at(seed, step if pick is None else int(pick[step % len(pick)]), batch=batch)).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        after()
    return DATA.loss(model)


def seeded(seed: int, **shape: Any) -> nn.Module:
    torch.manual_seed(seed)
    return gpt2(**shape)


def reached(losses: list[float], seconds: list[float], wanted: float) -> float:
    return next((spent for loss, spent in zip(losses, seconds, strict=True) if loss <= wanted), float("nan"))


def growth(seed: int) -> dict[str, float]:
    """Progressive length and depth against one stage of as many steps."""
    stage, third = effcompile.Stage, STEPS // 3
    one = scheduled(seed, [stage(steps=STEPS)])
    ways = {
        "length": [stage(steps=third, sequence=CONTEXT // 2), stage(steps=2 * STEPS // 3 + third // 2)],
        "stacking": [stage(steps=third, depth=2), stage(steps=2 * STEPS // 3 + third // 2, depth=4)],
    }
    found = {"one stage: loss": one[0][-1], "one stage: s": one[1][-1]}
    for name, stages in ways.items():
        losses, seconds, *_ = scheduled(seed, stages)
        found |= {
            f"{name}: loss": losses[-1],
            f"{name}: s": seconds[-1],
            f"{name}: s to that loss": reached(losses, seconds, one[0][-1]),
        }
    return found


def averages(seed: int) -> dict[str, float]:
    """The mean of the last five checkpoints beside the last weights, in mid-run and at the end of eight times
    the steps.
    """
    torch.manual_seed(seed)
    given = DATA.at(0, 0)
    run = effcompile.schedule(
        gpt2(),
        [effcompile.Stage(steps=8 * STEPS, average=5)],
        inputs=lambda stage: given,
        optimizer=adamw,
        passes=PASSES,
    )
    found = {}
    for active in run:
        while active.left:
            active.step(**DATA.at(seed, sum(run.done)))
            if active.left in (4 * STEPS, 1):
                when = "mid-run" if active.left > 1 else "end"
                found |= {
                    f"{when}: last": DATA.loss(run.model),
                    f"{when}: mean of 5": DATA.loss(run.averaged()),
                }
    return found


def dropping(seed: int) -> dict[str, float]:
    one, less = (
        scheduled(seed, [effcompile.Stage(steps=STEPS)]),
        scheduled(seed, [effcompile.Stage(steps=STEPS, layers=0.75)]),
    )
    return {"all: loss": one[0][-1], "all: s": one[1][-1], "0.75: loss": less[0][-1], "0.75: s": less[1][-1]}


def encoder(seed: int) -> dict[str, float]:
    """Seconds of a step of a vision encoder, on all patches and on a quarter of them."""
    torch.manual_seed(seed)
    stages = [effcompile.Stage(steps=30, image=64), effcompile.Stage(steps=30, image=64, tokens=0.25)]
    run = effcompile.schedule(vit(), stages, inputs=image, optimizer=adamw, passes=PASSES)
    found = {}
    for active, name in zip(run, ("all patches: ms", "a quarter: ms"), strict=True):
        times = []
        while active.left:
            given, start = image(active.stage), time.process_time()
            active.step(**given)
            times.append(time.process_time() - start)
        found[name] = 1000 * statistics.median(times)
    return found


def large_batch(seed: int) -> dict[str, float]:
    """Sixteen times the batch for a sixteenth of the steps: AdamW by the square-root law, LAMB by the same
    and at four times that.
    """
    from pytorch_optimizer import Lamb

    rate, ways = (
        4 * 3e-3,
        {"AdamW": (torch.optim.AdamW, 1), "LAMB": (Lamb, 1), "LAMB at 4 x its rate": (Lamb, 4)},
    )
    small = seeded(seed)
    found = {"AdamW, batch 8": looped(seed, small, adamw(small.parameters()), STEPS)}
    for name, (kind, times) in ways.items():
        model = seeded(seed)
        found[f"{name}, batch 128"] = looped(
            seed, model, kind(model.parameters(), lr=times * rate, weight_decay=0.01), STEPS // 16, 16 * BATCH
        )
    return found


def without_warmup(seed: int) -> dict[str, float]:
    """Post-LN at a high rate without warm-up: as initialised by torch, and by T-Fixup, which takes the norms
    away.
    """
    found = {}
    for name in ("default", "t-fixup"):
        torch.manual_seed(seed)
        model = PostNorm().train()
        if name != "default":
            RECIPES[name](model, "layers")
        found[name] = looped(seed, model, torch.optim.Adam(model.parameters(), lr=5e-3), STEPS // 2)
    return found


def sparse(seed: int) -> dict[str, float]:
    """Nine weights of ten zero: Top-KAST, RigL's growth by gradient, growth at random."""
    found = {}
    for name in ("random", "gradient", "Top-KAST"):
        model = seeded(seed)
        linear = with_linears(model)
        optimizer = adamw(linear.parameters())
        if name == "Top-KAST":
            held: Any = TopKast(linear, sparsity=0.9, backward_sparsity=0.8, every=STEPS // 20)
        else:
            held = effcompile.DynamicSparsity(
                linear,
                optimizer,
                sparsity=0.9,
                block=1,
                growth=name,
                updates=20,
                steps=STEPS,
                prune_ratio=0.1,
                execution="masked",
            )
        found[name] = looped(seed, linear, optimizer, after=held.step)
    return found


def important(seed: int) -> dict[str, float]:
    """Half of 96 batches by the norm of their gradients after some steps, and half at random."""
    early = seeded(seed)
    looped(seed, early, adamw(early.parameters()), STEPS // 8)
    batches = [{name: value[:1] for name, value in DATA.at(seed, number).items()} for number in range(96)]
    scores = effcompile.scores(early, batches)
    by_norm = scores.values.topk(48).indices
    at_random = torch.randperm(96, generator=torch.Generator().manual_seed(seed))[:48]
    found = {"scoring: s": scores.seconds}
    for name, pick in (("all", torch.arange(96)), ("GraNd", by_norm), ("random", at_random)):
        model = seeded(seed)
        found[name] = looped(seed, model, adamw(model.parameters()), pick=pick)
    return found


EXPERIMENTS: dict[str, Callable[[int], dict[str, float]]] = {
    "growth": growth, "averages": averages, "dropping": dropping, "encoder": encoder,
    "large_batch": large_batch, "without_warmup": without_warmup, "sparse": sparse, "important": important,
}  # fmt: skip


def learn(names: list[str]) -> list[list[str]]:
    global DATA
    DATA, rows = Data(), []
    for name in names or EXPERIMENTS:
        found = []
        for seed in SEEDS:
            found.append(EXPERIMENTS[name](seed))
            print(name, seed, json.dumps(found[-1]), file=sys.stderr, flush=True)
        for key in found[0]:
            values = [one[key] for one in found if not math.isnan(one[key])]
            spread = f"{statistics.stdev(values):.2g}" if len(values) > 1 else "–"
            missed = f" (not in {len(found) - len(values)} of {len(found)})" * (len(values) < len(found))
            rows.append([name, key, f"{statistics.mean(values):.4g}{missed}" if values else "never", spread])
    return rows


def main() -> int:
    torch.set_num_threads(1)
    # it asks norms that an initialisation takes away for their epsilon
    torch.backends.mha.set_fastpath_enabled(False)
    if sys.argv[1:2] == ["child"]:
        child(*sys.argv[2:])
        return 0
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("peaks", "kill", "learn"))
    parser.add_argument("names", nargs="*")
    parser.add_argument("--times", type=int, default=20)
    options = parser.parse_args()
    if options.what == "peaks":
        heads, rows = ["schedule: stage", "budget MiB", "predicted", "measured", "within"], peaks()
    elif options.what == "kill":
        heads, rows = ["run", "kills", "equal to the bit"], kill(options.times)
    else:
        heads, rows = ["experiment", "what", "mean of 3 seeds", "± standard deviation"], learn(options.names)
    print("\n".join([*header("Schedules of stages", 1), *markdown(heads, rows)]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
