"""Many devices on the command line: what `optimize --devices` writes for torchrun, and `verify`."""

from __future__ import annotations

import ast
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from effcompile import console, report
from effcompile.cli.options import AsJson, PlanFile
from effcompile.cli.strategy import parse_strategy
from effcompile.core.errors import UsageError
from effcompile.core.files import write_atomically
from effcompile.core.reasons import Because
from effcompile.core.units import format_bytes
from effcompile.exports import exported
from effcompile.ir import saved
from effcompile.ir.plan import Plan
from effcompile.loader.source import Reading

if TYPE_CHECKING:
    from effcompile.cli.job import Wanted
    from effcompile.compiler.parallel.verify import Proof

TRAIN = "train.py"
#: Part of a strategy → the option of the pass `pipeline`.
_STAGES = {"vpp": "stages", "schedule": "schedule", "cuts": "cuts"}
#: Parts of a strategy that a step which is carried out has in any case.
_LOWERED: dict[str, object] = {
    "pp": 1,
    "cp": 1,
    "vpp": 1,
    "sp": False,
    "recompute": "planned",
    "engine": "ours",
    "offload": "none",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Axes:
    """How many ranks stand along each axis of the mesh.

    zero: whether parameters are replicated (0; 1: each rank has the optimizer's states of its rows) or
        sharded (3) along dp. stages: how those of a pipeline are
    asked for.
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    zero: int | None = None
    stages: tuple[str, ...] = ()

    @property
    def several(self) -> bool:
        return self.dp * self.tp * self.pp > 1

    @property
    def passes(self) -> list[str]:
        """What planning is asked."""
        words = {0: "replicated", 1: "states", 3: "block,weight"}
        forms = [] if self.zero is None else [f"shard.forms={words[self.zero]}"]
        stages = [f"pipeline.ranks={self.pp}", *(f"pipeline.{option}" for option in self.stages)] * (
            self.pp > 1
        )
        return [f"shard.ranks={self.dp}", f"tensor.ranks={self.tp}", *forms, *stages]


def axes_asked(devices: int | None, strategy: str | None, mode: object, backend: str | None) -> Axes:
    """What --devices and --strategy say, checked before torch is loaded.

    Raises:
        UsageError: no such number of devices, or a strategy that is not lowered.
    """
    given = dict(parse_strategy(strategy or ""))
    if devices is None:
        if given:
            raise UsageError("--strategy divides a step among devices: give --devices, too.")
        return Axes()
    _check_devices(devices, mode, backend)
    tp, pp, zero = int(str(given.pop("tp", 1))), int(str(given.pop("pp", 1))), given.pop("zero", None)
    dp = int(str(given.pop("dp", max(1, devices // (tp * pp)))))
    stages = tuple(
        f"{option}={_written(given.pop(name))}"
        for name, option in _STAGES.items()
        if pp > 1 and name in given
    )
    if zero not in (None, 0, 1, 3):
        raise UsageError(
            f"--strategy zero={zero} can be planned (effcompile plan), not carried out: give 3, with which a "
            "rank holds less (each block decides what it gathers again, or keeps, which is ZeRO-2), 1 "
            "(states alone are divided) or 0."
        )
    if others := [f"{name}={value}" for name, value in given.items() if _LOWERED.get(name) != value]:
        raise UsageError(
            f"--strategy {others[0]} can be planned (effcompile plan), not carried out. Give dp, tp, pp "
            "and zero here."
        )
    if dp * tp * pp != devices:
        raise UsageError(
            f"--strategy dp={dp},tp={tp},pp={pp} is {dp * tp * pp} ranks, and --devices {devices}. They "
            "multiply to the devices."
        )
    return Axes(dp=dp, tp=tp, pp=pp, zero=None if zero is None else int(str(zero)), stages=stages)


def _written(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _check_devices(devices: int, mode: object, backend: str | None) -> None:
    if devices < 1:
        raise UsageError(f"--devices {devices}: give the number of ranks, at least 1.")
    if mode == "inference":
        raise UsageError("--devices divides a training step. Add --mode training, or leave --devices out.")
    if backend not in (None, "torch"):
        raise UsageError(
            f"--backend {backend}: a training step runs on the backend 'torch'. Leave the backend out."
        )


def plan_for_ranks(
    wanted: Wanted, devices: int, output: Path | None, spec: str, reading: Reading
) -> tuple[Plan, list[Path]]:
    """The plan for several ranks; with a folder, also written, with the script that torchrun runs.

    Raises:
        UsageError: of another mode than training.
    """
    if not wanted.request.training:
        raise UsageError("--devices divides a training step. Add --mode training, or leave --devices out.")
    # An optimizer of the sharded parameters is there only on the ranks, which make it.
    counted = callable(wanted.request.optimizer)
    made = (wanted if counted else replace(wanted, request=replace(wanted.request, optimizer=None))).planned()
    if wanted.request.optimizer is not None and not counted:
        note = Because("the optimizer's states, of one rank's shards, are not in the plan: leave them room")
        made = made.with_changes(notes=(*made.notes, note))
    if output is None:
        return made, []
    text = _SCRIPT.format(
        model=_absolute(spec), reading=replace(reading, training=True), devices=devices, counted=counted
    )

    def write(folder: Path) -> list[Path]:
        (folder / TRAIN).write_text(text, encoding="utf-8")
        return [folder / TRAIN]

    saved.save(made, output, artifact=write, beside={saved.REPORT: report.html_report(made)})
    return made, sorted(output.iterdir())


def _absolute(spec: str) -> str:
    """What names a model, wherever the script is started: a file (with a name in it), a folder, or an id."""
    file, colon, name = spec.rpartition(":")
    whole = Path(spec).exists() or not colon
    path = Path(spec if whole else file)
    if not path.exists():
        return spec
    return str(path.resolve()) + ("" if whole else f":{name}")


def launch_lines(output: Path, devices: int) -> list[str]:
    """What to type: on one machine, and under Slurm."""
    script = output / TRAIN
    torchrun = (
        f"torchrun --rdzv-backend c10d --rdzv-endpoint localhost:0 --nproc-per-node {devices} "
        f"--max-restarts 3 {script}"
    )
    nodes = (
        "srun --nodes $NODES --ntasks-per-node 1 torchrun --rdzv-backend c10d --rdzv-endpoint "
        "$HEAD:29500 --nnodes $NODES"
    )
    return [torchrun, f"{nodes} --nproc-per-node $(({devices}/NODES)) --max-restarts 3 {script}"]


def export(
    plan: PlanFile,
    engine: Annotated[
        str,
        typer.Option(
            "--engine", metavar="NAME", help="fsdp2, hf, deepspeed, accelerate, megatron or torchtitan."
        ),
    ],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write it there, not to stdout.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write a plan for many devices as the configuration of a stock engine, with the peak that is predicted
    under it.
    """
    text = exported(Plan.load(plan), engine)
    if output is not None:
        write_atomically(output, text.encode())
    if as_json:
        console.emit({"engine": engine, "text": text, "file": None if output is None else str(output)})
    else:
        typer.echo(text if output is None else f"{output}: for {engine}\n", nl=False)


def verify(
    plan: PlanFile,
    ranks: Annotated[int, typer.Option("--ranks", help="Processes of this machine, 2 or more.")] = 2,
    model: Annotated[
        str | None,
        typer.Option(
            "--model", metavar="MODEL.PY", help="What was planned; without it, the file that train.py names."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Train a small copy of a plan for many devices on gloo ranks of this machine, and compare with one
    process.
    """
    if not 2 <= ranks <= 16:
        raise UsageError(f"--ranks {ranks}: give 2 to 16 processes of this machine.")
    loaded_plan = Plan.load(plan)
    spec = model or _model_of(plan)
    with console.steps(as_json) as steps:
        from effcompile.compiler.parallel.verify import verify_plan
        from effcompile.loader.reading import load

        with steps.step("load the model"):
            loaded = load(spec, Reading(training=True))
        with loaded.telling():
            proof = verify_plan(
                loaded_plan,
                loaded.model.train(),
                loaded.args,
                loaded.kwargs,
                ranks=ranks,
                loss=loaded.loss,
                progress=steps,
            )
    if as_json:
        console.emit(_data(proof))
    else:
        _print(proof)
    if not proof.passed:
        raise typer.Exit(1)


def _model_of(plan: Path) -> str:
    """The model that the script beside a plan names.

    Raises:
        UsageError: there is no such script.
    """
    script = (plan if plan.is_dir() else plan.parent) / TRAIN
    try:
        tree = ast.parse(script.read_text(encoding="utf-8"))
    except (OSError, SyntaxError) as error:
        raise UsageError(
            f"There is no {str(script)!r} that names the model. Give it: --model MODEL.PY."
        ) from error
    for node in tree.body:
        if (
            isinstance(node, ast.Assign)
            and getattr(node.targets[0], "id", "") == "MODEL"
            and isinstance(node.value, ast.Constant)
        ):
            return str(node.value.value)
    raise UsageError(f"{str(script)!r} has no line MODEL = ... Give the model: --model MODEL.PY.")


def _data(proof: Proof) -> dict[str, object]:
    ranks = [
        {
            "loss_error": rank.loss,
            "gradient_error": rank.gradient[0],
            "gradient": rank.gradient[1],
            "parameter_error": rank.parameter[0],
            "parameter": rank.parameter[1],
            "peak_bytes": max(rank.peaks),
            "predicted_bytes": rank.predicted,
        }
        for rank in proof.ranks
    ]
    return {
        "passed": proof.passed,
        "subject": proof.subject,
        "form": proof.form,
        "limit": proof.limit,
        "ranks": ranks,
    }


def _print(proof: Proof) -> None:
    typer.echo(
        f"{proof.subject}, {proof.form}: {proof.steps} steps on {len(proof.ranks)} gloo ranks against one "
        f"process (limit {proof.limit:g})"
    )
    typer.echo("rank  loss      gradient  parameter  peak        predicted")
    for number, rank in enumerate(proof.ranks):
        errors = f"{rank.loss:<9.1e} {rank.gradient[0]:<9.1e} {rank.parameter[0]:<10.1e}"
        typer.echo(f"{number:<5} {errors} {format_bytes(max(rank.peaks)):<11} {format_bytes(rank.predicted)}")
    worst = max(proof.ranks, key=lambda rank: rank.error)
    if proof.passed:
        typer.echo("Passed: every loss, gradient and parameter, and every rank's peak.")
    else:
        where = worst.gradient[1] if worst.error == worst.gradient[0] else worst.parameter[1]
        typer.echo(f"Not passed: the largest error is {worst.error:.1e}, at {where or 'the loss'}.")


_SCRIPT = '''"""One rank of a planned training step. It reads what torchrun sets, and its own checkpoints.

torchrun --rdzv-backend c10d --rdzv-endpoint localhost:0 --nproc-per-node {devices} --max-restarts 3 train.py
"""

import gc
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

import effcompile
from effcompile.capture.training_outputs import loss_in
from effcompile.compiler.parallel.lower import mesh_for
from effcompile.ir.plan import Plan
from effcompile.loader.reading import load
from effcompile.loader.source import Reading

MODEL = {model!r}
READING = {reading!r}
COUNTED = {counted}  # the optimizer's states are in the plan
HERE = Path(__file__).resolve().parent
CHECKPOINTS = Path(os.environ.get("CHECKPOINTS", "checkpoints"))
STEPS = int(os.environ.get("STEPS", "10"))
#: By parameter: ranks of a pipeline have others in their groups.
OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)


def main() -> None:
    if "RANK" not in os.environ:
        sys.exit("This is one rank of {devices}: start it with torchrun, as its first lines say.")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if sys.platform == "linux" and os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE"):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all here: the machine may have no network name
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    plan = Plan.load(HERE / "plan.json")
    mesh = mesh_for(plan, device)
    loaded = load(MODEL, READING)
    given = loaded.kwargs or loaded.args  # a rank's: your data loader's batches of its place along "dp"
    make = loaded.optimizer if callable(loaded.optimizer) else torch.optim.AdamW
    asked = {{"optimizer": make}} if COUNTED else {{}}
    asked |= {{"inputs": given, "loss": loaded.loss}}
    model = effcompile.optimize(loaded.model.train(), plan=plan, mesh=mesh, **asked)
    optimizer = model.optimizer or make(list(model.parameters()))

    first = last_step()
    if first:
        state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer, options=OPTIONS)))
        dcp.load(state, checkpoint_id=CHECKPOINTS / str(first))
        states = {{"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}}
        set_state_dict(model, optimizer, options=OPTIONS, **states)
    for step in range(first, STEPS):
        loss = loss_in(model(*loaded.args, **loaded.kwargs))
        loss.backward()
        # model.clip_grad_norm_(1.0) is by all ranks' gradients; torch's own sees those of one rank's stages
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        if dist.get_rank() == 0:
            print(f"step {{step}} loss {{float(total) / dist.get_world_size():.7f}}", flush=True)
        state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer, options=OPTIONS)))
        dcp.save(state, checkpoint_id=CHECKPOINTS / str(step + 1))


def last_step() -> int:
    """The last step whose checkpoint is whole; 0 for none."""
    whole = (each.parent.name for each in CHECKPOINTS.glob("*/.metadata"))
    return max((int(name) for name in whole if name.isdigit()), default=0)


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
    # The last that held a group: gloo's threads end with it. One that lets go of a tensor while Python leaves
    # aborts the process.
    gc.collect()
'''
