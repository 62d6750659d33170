"""A step that is interrupted or killed while values lie in the mapped pool: no file stays, and the pool's
bytes come back.
"""

import os
import signal
import sys
import traceback
from contextlib import redirect_stdout
from pathlib import Path

STEP = """
import gc, os, signal, sys, warnings
warnings.filterwarnings("ignore")
import torch
from train_helpers import gpt2
from effcompile.compiler import optimize_training
from effcompile.proof.training import timed
from effcompile.core import timing
from effcompile.core.goal import Goal
from effcompile.ops import offload
from effcompile.passes.training import checkpoint

timing.PATIENCE, timed._TIMING_SECONDS, checkpoint.SECONDS_PER_BLOCK = 0.02, 0.0, 0.1
torch.set_num_threads(1)
folder, model = sys.argv[1], gpt2(layers=1, n_positions=64)[0]
ids = torch.randint(1, 96, (4, 48))
batch = {"input_ids": ids, "labels": ids}
passes = ["no-pointwise", "no-loss_head", "checkpoint.groups=false"]
passes += [f"offload.folder={folder}", "offload.bandwidth=500GB"]
budget = None
for _ in range(2):  # the least that is feasible, where values have to go to the host
    try:
        goal = Goal(mode="training", memory=budget or 1)
        planned = optimize_training(model, (), batch, goal=goal, passes=passes)
    except Exception as error:
        budget = int(error.nearest["memory"])
pool, fetched = offload.host_pool(folder), offload.Slot.release


def interrupted(slot):
    offload.Slot.release = fetched
    os.kill(os.getpid(), sent)
    fetched(slot)


def step():
    model.zero_grad()
    torch.manual_seed(0)
    planned(**batch).loss.backward()
    return [p.grad.clone() for p in model.parameters()]


wanted = step()
offload.Slot.release, sent = interrupted, signal.SIGINT
try:
    step()
except KeyboardInterrupt:
    print("interrupted with", pool.in_use > 0, flush=True)
gc.collect()
print("left", pool.in_use, all(map(torch.equal, step(), wanted)), os.listdir(folder), flush=True)
offload.Slot.release, sent = interrupted, signal.SIGKILL
step()
"""


def test_no_stray_files_and_a_pool_that_works_on(tmp_path: Path) -> None:
    folder, said = tmp_path / "pool", tmp_path / "said"
    folder.mkdir()
    child = os.fork()
    if child == 0:
        try:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            sys.argv = ["-c", str(folder)]
            with said.open("w") as out, redirect_stdout(out):
                exec(STEP, {})
        except BaseException:
            said.write_text(traceback.format_exc())
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert said.read_text().splitlines() == ["interrupted with True", "left 0 True []"]
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    assert list(folder.iterdir()) == []
