"""The plan of a training step on many devices: described, searched, solved rank by rank, told."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from effcompile.core.cost import Cost, Provenance
from effcompile.core.errors import UsageError
from effcompile.core.installed import versions
from effcompile.core.reasons import Because, Reason
from effcompile.core.types import Args, Kwargs
from effcompile.ir.distributed import Distributed
from effcompile.ir.figures import Certificate, Totals
from effcompile.ir.plan import Decision, Declined, Plan
from effcompile.ir.strategy import Strategy, StrategyFields
from effcompile.machine.cluster import Cluster, Links
from effcompile.machine.machines import known_targets, load_target
from effcompile.machine.target import Target
from effcompile.planner import OPTIMAL, SINGLE, UNPROVEN
from effcompile.planner.parallel.division import DivisionProblem, Solved
from effcompile.planner.parallel.engines import ENGINES
from effcompile.planner.parallel.fewest import fewest, nearest_changes
from effcompile.planner.parallel.model import Model
from effcompile.planner.parallel.search import MOST_SOLVES, Found, search
from effcompile.planner.parallel.strategy import check_model
from effcompile.planner.parallel.tell import tell
from effcompile.search.many_devices import ManyDevices
from effcompile.search.parallel.describe import describe
from effcompile.search.progress import QUIET, Progress, entry
from effcompile.search.request import Request

_SITE = "devices"


@entry("plan")
def plan_devices(
    model: nn.Module, args: Args, kwargs: Kwargs, request: Request, *, progress: Progress = QUIET
) -> Plan:
    """The fastest division of the step among the devices that `request.devices` asks for, or the judgement of
    a given one.

    Nothing of the model is run, and no more of it is captured than one layer of each kind and its neighbours.
    Where nothing fits, the plan is of the division that needs the least, with the verdict "no".

    Raises:
        UsageError: no training, a target without a cluster, a strategy that divides neither devices nor
            model.
        CaptureError, InputsError: the step cannot be captured.
    """
    many = request.devices
    assert many is not None, "asked for many devices"
    target, links = _machine(request, many)
    asked = many.strategy
    with progress.step("describe the model"):
        found = describe(
            model, args, kwargs, target=target, loss=request.loss, precision=asked.get("precision", "bf16")
        )
    limit = (
        target.memory_bytes if request.goal.memory is None else min(request.goal.memory, target.memory_bytes)
    )
    work = StrategySearch(
        request=request,
        many=many,
        model=found,
        target=target,
        links=links,
        limit=limit,
        batch=_batch(args, kwargs),
    )
    with progress.step("divide the step"):
        return work.plan()


def _machine(request: Request, many: ManyDevices) -> tuple[Target, Links]:
    """The target and its links.

    Raises:
        UsageError: it is no training; this machine, or one whose links are not known.
    """
    if not request.training:
        raise UsageError("devices divide a training step: ask for mode='training', or leave devices out.")
    with_links = [name for name in known_targets() if load_target(name).cluster is not None]
    if request.target == "auto":
        raise UsageError(
            "devices are planned for a machine with links between devices. Give target, one of: "
            f"{', '.join(with_links)}."
        )
    target = request.target if isinstance(request.target, Target) else load_target(request.target)
    links = many.cluster.links if many.cluster is not None else target.cluster
    if links is None:
        raise UsageError(
            f"The target {target.name!r} has no [cluster] section, so nothing is known of the links between "
            f"its devices. Write one into a target file of your own, or take one of: {', '.join(with_links)}."
        )
    return target, links


def _batch(args: Args, kwargs: Kwargs) -> int:
    """Sequences of the example inputs."""
    shapes = [t.shape for t in pytree.tree_leaves((args, dict(kwargs))) if isinstance(t, Tensor) and t.dim()]
    return int(shapes[0][0]) if shapes else 1


@dataclass(frozen=True, kw_only=True)
class StrategySearch:
    """One request on its way to a plan."""

    request: Request
    many: ManyDevices
    model: Model
    target: Target
    links: Links
    limit: int
    batch: int

    def problem(self, devices: int) -> DivisionProblem:
        """The same for so many devices.

        Raises:
            UsageError: they cannot stand so, or the batch is none.
        """
        per_node = self.per_node
        if devices == self.many.devices:
            cluster = self.many.cluster or Cluster.of(self.links, devices, self.many.nodes)
        else:
            cluster = Cluster(nodes=1, per_node=per_node, links=self.links).with_devices(devices)
        return DivisionProblem(
            model=self.model, cluster=cluster, target=self.target, global_batch=self._global_batch(devices)
        )

    @property
    def per_node(self) -> int:
        return self.many.per_node or self.links.devices_per_node

    def _global_batch(self, devices: int) -> int:
        if self.many.batch_tokens is not None:
            count, left = divmod(self.many.batch_tokens, self.model.sequence)
            if left or not count:
                near = max(1, round(self.many.batch_tokens / self.model.sequence)) * self.model.sequence
                raise UsageError(
                    f"batch_tokens = {self.many.batch_tokens} is no whole number of sequences of "
                    f"{self.model.sequence} tokens (those of the example inputs). The nearest that is: "
                    f"{near}."
                )
            return count
        return self.many.global_batch or self.batch * devices

    def plan(self) -> Plan:
        auto = self.many.devices == "auto"
        asked = self.many.strategy
        wanted = fewest(self.problem, self.per_node, asked, self.limit) if auto else None
        devices = wanted if self.many.devices == "auto" else self.many.devices
        if devices is None:
            raise UsageError(
                f"No number of devices of {self.target.name} is enough for {self.model.name} with this "
                "strategy. Leave more of it free, or give inputs of fewer tokens."
            )
        problem = self.problem(devices)
        check_asked(problem, asked)
        found = search(problem, asked, self.limit)
        solved = found.best
        if solved is None:
            assert found.nearest is not None, "there was a division"
            solved = found.nearest.lean()
        fits = found.best is not None
        enough = wanted or fewest(
            self.problem, self.per_node, asked, self.limit, below=devices + 1 if fits else None
        )
        changes = (
            () if fits else tuple(nearest_changes(problem, asked, self.limit, enough, solved.peak_bytes))
        )
        return self._told(problem, found, solved, tell(problem, solved, found, self.limit, enough, changes))

    def _told(self, problem: DivisionProblem, found: Found, solved: Solved, distributed: Distributed) -> Plan:
        certificate = _certificate(found, solved, distributed)
        return Plan(
            model=self.model.name,
            fingerprint=hashlib.sha256(repr(self.model).encode()).hexdigest()[:16],
            parameters=self.model.parameters,
            goal=self.request.goal,
            target=self.target.name,
            target_line=self.target.describe(),
            backend="torch",
            decisions=tuple(_decisions(solved)),
            declined=tuple(_declined(found)),
            certificate=certificate,
            baseline=Totals(),
            predicted=Totals(seconds=solved.seconds, peak_bytes=solved.peak_bytes),
            inputs=(f"global batch of {problem.global_batch} × {self.model.sequence} tokens",),
            notes=_notes(problem, solved, found),
            versions=versions(),
            distributed=distributed,
        )


def check_asked(problem: DivisionProblem, asked: StrategyFields) -> None:
    """Refuse what no strategy with these fields can be, before any is looked at.

    Raises:
        UsageError: it says what does not divide what.
    """
    filled: StrategyFields = {**asked}
    if asked.get("vpp", 1) > 1 and "schedule" not in asked:
        filled["schedule"] = "interleaved"
    if asked.get("vpp", 1) > 1 and "pp" not in asked:
        filled.pop("vpp")
    if asked.get("schedule") == "interleaved":
        filled = {**filled, "vpp": asked.get("vpp", 2), "pp": asked.get("pp", 2)}
    if asked.get("sp") and "tp" not in asked:
        filled.pop("sp")
    if "cuts" in asked and "pp" not in asked:
        raise UsageError("cuts are the layers of each stage: give pp, too.")
    strategy = Strategy.of(**filled)
    devices, given = problem.cluster.devices, [axis for axis in ("dp", "tp", "pp", "cp") if axis in asked]
    written = " × ".join(f"{axis} {strategy.size(axis)}" for axis in given)
    if devices % strategy.world or (len(given) == 4 and strategy.world != devices):
        raise UsageError(
            f"{written} = {strategy.world} do not divide {devices} devices. Their product must be the "
            "number of devices."
        )
    model = problem.model
    check_model(
        strategy, layers=model.depth, heads=model.heads, key_heads=model.key_heads, sequence=model.sequence,
        global_batch=problem.global_batch,
    )  # fmt: skip


def _certificate(found: Found, solved: Solved, told: Distributed) -> Certificate:
    gap = max(0.0, 1 - told.bound_seconds / told.seconds) if told.seconds else 0.0
    whole = found.best is not None and found.solves < MOST_SOLVES
    return Certificate(
        status=SINGLE if found.considered == 1 else OPTIMAL if whole else UNPROVEN,
        objective=told.seconds,
        bound=told.bound_seconds,
        gap=gap,
        sites=len(solved.ranks),
        alternatives=found.considered + sum(found.dropped.values()),
        seconds=found.seconds,
        solver="bounds in closed form over every divisor, each rank by the chain solver (z3)",
        rounds=found.solves,
    )


def _decisions(solved: Solved) -> Iterator[Decision]:
    """The mesh and what is chosen with it, as decisions of the whole step."""
    s = solved.strategy
    cost = Cost(seconds=solved.seconds, bytes_transient=solved.peak_bytes, provenance=Provenance.MODELLED)
    taken = {
        "mesh": (f"dp {s.dp} × tp {s.tp} × pp {s.pp} × cp {s.cp}", "dp 1 × tp 1 × pp 1 × cp 1"),
        "zero": (f"ZeRO-{s.zero}", "ZeRO-0"),
        "micro-batch": (f"{s.micro_batch}", "1"),
        "schedule": (s.schedule + (f", {s.vpp} stages a rank" if s.vpp > 1 else ""), "1f1b"),
        "sequence parallel": ("on" if s.sp else "off", "off"),
        "precision": (s.precision, "fp32"),
        "offload": (s.offload, "none"),
        "recompute": (s.recompute, "none"),
    }
    for kind, (option, baseline) in taken.items():
        yield Decision(
            site=f"{_SITE}: {kind}", kind=kind, option=option, baseline=baseline, by="devices", cost=cost,
            baseline_cost=Cost(), settings={"engine": s.engine},
        )  # fmt: skip


_KINDS = ("dp", "tp", "pp", "cp", "zero", "micro_batch", "sp", "schedule", "offload")


def _declined(found: Found) -> Iterator[Declined]:
    """The options of each axis that were not taken, from the search's record."""
    if found.record is None or not found.record.solutions:
        return
    for kind in _KINDS:
        for option, reason in found.record.declined(kind):
            yield Declined(site=f"{_SITE}: {kind}", kind=kind, option=option, by="devices", reason=reason)


def _notes(problem: DivisionProblem, solved: Solved, found: Found) -> tuple[Reason, ...]:
    s, engine = solved.strategy, ENGINES[solved.strategy.engine]
    sources = sorted(
        {
            f"{name}: {engine.sources[name]}"
            for name in ("products", "error", "logit_bytes")
            if name in engine.sources
        }
    )
    notes = [
        Because("all figures are predicted in closed form, and simulated rank by rank; nothing was run"),
        Because("counted are the buffers and the loss head of the engine '{name}'", (s.engine,)),
        *map(Because, sources),
    ]
    if s.precision == "bf16":
        notes.append(
            Because(
                "products in bf16 with fp32 master weights and states; --strategy precision=fp32 plans in "
                "fp32"
            )
        )
    if found.solves >= MOST_SOLVES:
        notes.append(
            Because(
                "the search stopped after {} exact solves: the bound is that of the next strategy",
                (MOST_SOLVES,),
            )
        )
    if s.cp > 1:
        notes.append(Because("context parallelism is planned; its lowering has not been proven on ranks"))
    return tuple(notes)
