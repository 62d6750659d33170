"""What comparing a planned step with the model's own showed is kept, where that ran leanly and for nothing
else: the same bits once more need no second comparison.

Known by the hash of all that both steps follow from: the captured graph, the bytes of weights, buffers and
inputs, what was decided (but for what is made again, which changes no bit), the machine with its threads and
torch's settings, versions, and all code of ours. It holds where the planned step, run today, gives the loss
and gradients of that day to the bit, and the user's living model, its forward run today, the loss of that
day: its backward is autograd's of that.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
from torch.utils import _pytree as pytree

from effcompile.capture.facts import settings_and_autocast
from effcompile.core import torch_compat
from effcompile.core.files import cache_folder
from effcompile.core.findings import Together
from effcompile.core.kept_json import recalled, remember
from effcompile.core.reasons import Because
from effcompile.ir import content
from effcompile.ir.figures import Check
from effcompile.ir.plan import Plan, as_reason
from effcompile.ir.step import Step
from effcompile.machine.room import device_of
from effcompile.passes.training.checkpoint import Checkpoint
from effcompile.proof.digests import Digests, digest, digests
from effcompile.proof.spool import Spool
from effcompile.proof.training import verify
from effcompile.proof.training.kept import what_runs
from effcompile.proof.training.lean import products_in_fp32, wide_products
from effcompile.search.training.prepare import Prepared
from effcompile.search.training.work import Work

#: Files that are kept, and bytes of one.
_MOST_FILES, _MOST_BYTES = 64, 64 << 10
#: What in the environment may change how libraries multiply and add.
_READ_BY_LIBRARIES = ("MKL", "OMP", "KMP", "GOMP", "ONEDNN", "DNNL", "OPENBLAS", "ATEN", "TORCH_", "PYTORCH_")
AGAIN = Because(
    "the model's own step was not run whole again: that day's comparison was of the same weights, inputs and "
    "code, and today both the planned step's results and the loss of the model's own forward are the same "
    "to the bit"
)


class KeptAgreement(msgspec.Struct, kw_only=True, frozen=True):
    """Hashes of the planned step's results and of the model's own loss, and the checks that they passed on
    that day.
    """

    planned: str
    loss: str
    day: str
    checks: list[Check]


class HoldsAgain(NamedTuple):
    """Checks that hold again, and the model's own loss of today."""

    checks: list[Check]
    loss: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Proven:
    """What is known of a planned step that is to be run.

    kept: what another day's comparison of the same one found.
    called: the model's own loss where it was called while it was captured, from the same seed, of the weights
    that still are there; None where that was otherwise.
    """

    work: Work
    path: Path
    kept: KeptAgreement | None
    called: torch.Tensor | None = None

    @classmethod
    def of(cls, work: Work, prepared: Prepared, plan: Plan) -> Proven | None:
        """None where what the steps follow from cannot be told by its bytes."""
        source = prepared.case.source
        if source is None or device_of(work.model) != "cpu" or _is_hooked(work):
            return None
        captured, _ = source.capture_with_front()
        # what is made again, and within which budget, changes no bit; if it does, the results say so
        decided = tuple(d for d in plan.decisions if d.kind != Checkpoint.name)
        compared = replace(plan, decisions=decided, goal=replace(plan.goal, memory=None))
        follows = hashlib.sha256(repr((what_runs(compared), own_code(), computing_settings())).encode())
        try:
            for each in digests(_followed(work, captured, prepared.step)):
                follows.update(each)
        except content.UNREADABLE:
            return None
        path = cache_folder() / "agreements" / f"{follows.hexdigest()}.json"
        kept = _kept(path)
        if kept is not None and source.waits:  # the model's own step is not run whole, most likely
            with work.progress.step("run the original forward"):
                source.call_alone()
        called = None if products_in_fp32(work.model) else source.called
        return cls(work=work, path=path, kept=kept, called=called)

    def held(self, found: verify.Result) -> HoldsAgain | None:
        """The checks of another day, where they are those of today's run, too; None where the model's own
        step has to be run.
        """
        kept = self.kept
        if kept is None or kept.planned != _results(found):
            return None
        loss = self.called
        if loss is None:
            with self.work.progress.step("run the original forward"):
                loss = _own_loss(self.work)
        if loss is None or digest(loss).hex() != kept.loss:
            return None
        said = Because("compared on {name}; today the same bits", (kept.day,))
        told = [
            replace(check, note=Together.of([*([check.note] if check.note else []), said]))
            for check in kept.checks
        ]
        return HoldsAgain(told, loss)

    def keep(self, found: verify.Result, loss: torch.Tensor, checks: list[Check]) -> None:
        """Keep what was found today. `loss`: the model's own."""
        if (planned := _results(found)) is None:
            return
        day = date.today().isoformat()
        kept = KeptAgreement(planned=planned, loss=digest(loss).hex(), day=day, checks=checks)
        remember(self.path, kept, _MOST_FILES)


def _kept(path: Path) -> KeptAgreement | None:
    """What a file says, if all of its checks passed."""
    kept: KeptAgreement | None = recalled(path, KeptAgreement, _MOST_BYTES, "a kept comparison", as_reason)
    if kept is None or not kept.checks or not all(0 <= check.error <= check.limit for check in kept.checks):
        return None
    return kept


def _is_hooked(work: Work) -> bool:
    """Whether the model's backward does what no graph shows: somebody is called with gradients."""
    tables = ("_backward_hooks", "_backward_pre_hooks")
    modules = any(vars(module).get(table) for module in work.model.modules() for table in tables)
    everywhere = any(torch_compat.global_module_hooks())
    leaves = itertools.chain(work.model.parameters(), work.leaves.values())
    return modules or everywhere or any(map(torch_compat.has_gradient_hooks, leaves))


def _followed(work: Work, *steps: Step) -> Iterator[object]:
    """What the steps' results follow from, beside what runs them."""
    for step in steps:
        yield from (line for _, line in content.lines(step.graph))
        yield from itertools.chain.from_iterable((node.name, value) for node, value in step.constants.items())
    for name, tensor in itertools.chain(work.model.named_parameters(), work.model.named_buffers()):
        yield from ((name, tensor.requires_grad, tensor.stride()), tensor)
    leaves, tree = pytree.tree_flatten((work.args, dict(work.kwargs)))
    yield str(tree)
    yield from leaves


def _results(found: verify.Result) -> str | None:
    """Hash of loss and gradients, read where they lie; None where they have no bytes to read."""
    gradients = found.gradients
    try:
        if isinstance(gradients, Digests):
            each = gradients.in_order()
        else:
            names = sorted(gradients)
            read = gradients.mapped if isinstance(gradients, Spool) else gradients.__getitem__
            each = list(zip(names, digests(map(read, names)), strict=True))
        return hashlib.sha256(repr((digest(found.loss), each)).encode()).hexdigest()
    except content.UNREADABLE:
        return None


def _own_loss(work: Work) -> torch.Tensor | None:
    """The model's own loss, of a forward that keeps nothing for its backward; None where it does not run
    so.
    """
    nothing = torch.autograd.graph.saved_tensors_hooks(lambda _: None, _no_backward)
    try:
        with verify.restored(work.model, work.leaves), nothing, wide_products(work.model):
            torch.manual_seed(verify.SEED)
            return work.eager_loss().detach().clone()
    except Exception:
        return None  # a forward that differentiates: run leanly, it is told from one that fails


def _no_backward(_: None) -> torch.Tensor:
    raise RuntimeError("nothing is kept for a backward here")


def computing_settings() -> tuple[object, ...]:
    """Of torch and of the environment, that change how an operator computes."""
    environment = sorted(
        (name, value) for name, value in os.environ.items() if name.startswith(_READ_BY_LIBRARIES)
    )
    return (
        settings_and_autocast(None), torch.get_autocast_dtype("cpu"), torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(), torch.backends.mkldnn.enabled, torch.get_num_threads(),
        torch.get_num_interop_threads(), torch.backends.cpu.get_cpu_capability(), torch.__config__.show(),
        environment,
    )  # fmt: skip


@functools.cache
def own_code() -> str:
    """All code of this package: what another one compared is not believed."""
    here = Path(__file__).parents[2]
    digest = hashlib.sha256()
    for file in sorted(here.rglob("*")):
        if file.suffix in (".py", ".cpp", ".h", ".toml"):
            digest.update(f"{file.relative_to(here)}\0".encode() + file.read_bytes())
    return digest.hexdigest()
