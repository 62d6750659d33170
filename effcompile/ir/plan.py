"""The Plan: what was decided, what was declined, at what predicted and measured cost, with which proof.

Stable, versioned JSON; saved atomically; validated on load (never unpickled); knows no torch. msgspec is
imported where a plan is written or read, so that the kernels alone run on machines without it
(benchmarks/gpu.py).
"""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from effcompile.core import spoken
from effcompile.core.cost import Cost
from effcompile.core.errors import FormatError, UnknownNameError, UsageError, clipped
from effcompile.core.files import read_bounded, write_atomically
from effcompile.core.goal import Goal
from effcompile.core.json_keys import repeated_key
from effcompile.core.mask import Sees
from effcompile.core.reason_kinds import KINDS
from effcompile.core.reasons import Because, Reason
from effcompile.core.units import format_bytes, format_error, format_seconds
from effcompile.ir.distributed import Distributed
from effcompile.ir.figures import Candidate, Certificate, Check, Totals, check_reasons
from effcompile.ir.footprint import excess
from effcompile.ir.formats import Form
from effcompile.ir.guards import Guard
from effcompile.ir.sane import objection
from effcompile.ir.signature import Signature
from effcompile.ir.step_figures import Fit, LeverRow, MemoryTimeline

if TYPE_CHECKING:
    from rich.console import Console

FORMAT = "effcompile-plan"
VERSION = 2
#: A plan.json of more is none: one of a thousand layers has some megabytes.
MOST_BYTES = 256 << 20

#: What an option is made of: a number, a word, names.
Setting = bool | int | str | tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The option taken at a site.

    Attributes:
        site: unique name of the place, the module's qualified name where there is one.
        kind: what is decided there: "linear", "embedding", "attention", "merge", "norm", "gelu", "logits"; in
            training "checkpoint" (what a block keeps from forward to backward), "loss head", "gradient"
            (where it is accumulated).
        option: the option taken, as it is printed. `baseline`: the option the unplanned model has.
        form: what the option means; None where the site is decided by other means (a training step's).
        by: the pass that proposed it.
        cost, baseline_cost: predicted costs of the two.
        why: what speaks for it; None where it is the cheapest that fits with all others.
        note: what is known of the place; an attention's mask is in its form.
        applied: what the backend found in the lowered artifact at this site ("" before lowering).
        settings: what the option stands for, where its name does not say it: enough to apply the plan again.

    Raises:
        UsageError: an option that is not what its form is printed as; a sentence where a reason is wanted.
    """

    site: str
    kind: str
    option: str
    baseline: str
    by: str
    cost: Cost
    baseline_cost: Cost
    why: Reason | None = None
    note: Reason | None = None
    applied: str = ""
    settings: Mapping[str, Setting] = field(default_factory=dict, hash=False)
    form: Form | None = None

    @property
    def known(self) -> Reason | None:
        """What is known of the place: the note, with the mask of the form."""
        mask = self.form.mask if self.form is not None else None
        return (
            replace(self.note, form=mask) if isinstance(self.note, Sees) and mask is not None else self.note
        )

    def __post_init__(self) -> None:
        if self.form is not None and self.form.name != self.option:
            raise UsageError(
                f"the option {self.option!r} at {self.site!r} has the form of {self.form.name!r}"
            )
        check_reasons(f"the option {self.option!r} at {self.site!r}", self.why, self.note)


@dataclass(frozen=True, slots=True, kw_only=True)
class Declined:
    """An option not taken, and why: the binding limit, or why it cannot be or does not pay."""

    site: str
    kind: str
    option: str
    by: str
    reason: Reason
    cost: Cost | None = None

    def __post_init__(self) -> None:
        check_reasons(f"the declined option {self.option!r} at {self.site!r}", self.reason)


def as_reason(wanted: type, data: object) -> Reason:
    """A reason of a saved plan by its kind; a sentence in plans that are older than reasons as data.

    Raises:
        ValueError: no reason has such a kind.
    """
    import msgspec

    if wanted is not Reason:
        raise NotImplementedError(f"a plan holds no {wanted.__name__}")
    if isinstance(data, str):
        return Because(data)
    kind = data.get("kind") if isinstance(data, dict) else data
    if not isinstance(kind, str) or kind not in KINDS:
        raise ValueError(
            f"a reason of the kind {clipped(repr(kind), 120)} is not known; there are {', '.join(KINDS)}"
        )
    return msgspec.convert(data, KINDS[kind], dec_hook=as_reason)


#: Predicted and measured seconds further apart than this factor do not bear each other out, beyond what a
#: call itself takes in Python.
FAR_APART, _CALL_SECONDS = 1.5, 5e-3


@dataclass(frozen=True, kw_only=True)
class Plan:
    """See the module's docstring. `rows` of equal decisions are grouped by the report, not here."""

    model: str
    fingerprint: str  # of the captured graph and parameter shapes: a plan is re-applied only to its model
    parameters: int
    goal: Goal
    target: str
    target_line: str
    backend: str
    decisions: tuple[Decision, ...]
    declined: tuple[Declined, ...]
    certificate: Certificate
    baseline: Totals  # predicted, of the unplanned model in stock torch
    predicted: Totals
    measured: Totals | None = None
    measured_baseline: Totals | None = None
    candidates: tuple[Candidate, ...] = ()
    checks: tuple[Check, ...] = ()
    stress: tuple[Check, ...] = ()  # the error under inputs that no limit was promised for
    inputs: tuple[str, ...] = ()
    calibration_inputs: str = ""  # "the user's" or how they were generated
    settings: Mapping[str, Any] = field(default_factory=dict)  # backend settings tuned by measurement
    notes: tuple[Reason, ...] = ()  # mends, fallbacks, corrections: nothing silent
    guards: tuple[Guard, ...] = ()  # what the capture took for granted; checked at each call
    signature: Signature | None = None  # the calls that the artifact holds for
    versions: Mapping[str, str] = field(default_factory=dict)
    # file name beside plan.json → SHA-256 of what was written with it
    artifact: Mapping[str, str] = field(default_factory=dict)
    memory_timeline: MemoryTimeline | None = None  # of a training step
    # of a training step with a budget: none, each lever alone, the best pair, all
    levers: tuple[LeverRow, ...] = ()
    fit: Fit | None = None  # of a training step on a machine that is not here
    distributed: Distributed | None = None  # of a training step on many devices

    def __post_init__(self) -> None:
        check_reasons("a note", *self.notes)
        check_reasons("a backend", *(candidate.note for candidate in self.candidates))

    @property
    def batch(self) -> int | None:
        """The examples of a step, where that was decided."""
        found = next(
            (
                decision.settings.get("examples")
                for decision in self.decisions
                if decision.kind == "batch size"
            ),
            None,
        )
        return found if isinstance(found, int) else None

    @property
    def peak_bytes(self) -> int | None:
        """Measured peak where there is one, else predicted."""
        measured = self.measured.peak_bytes if self.measured else None
        return measured if measured is not None else self.predicted.peak_bytes

    @property
    def met(self) -> bool:
        """True when every check passed and the memory limit holds; in training for the predicted and the
        measured peak.
        """
        return self.over_memory is None and all(check.passed for check in self.checks)

    @property
    def misjudged(self) -> float | None:
        """Predicted over measured seconds where the two are further apart than models of time are; None where
        they agree.
        """
        predicted, measured = self.predicted.seconds, self.measured.seconds if self.measured else None
        if not predicted or not measured or abs(predicted - measured) < _CALL_SECONDS:
            return None
        return None if 1 / FAR_APART <= predicted / measured <= FAR_APART else predicted / measured

    @property
    def seconds_measured(self) -> float:
        """0 where nothing was."""
        return (self.measured.seconds if self.measured else None) or 0.0

    @property
    def over_memory(self) -> tuple[str, int] | None:
        """("measured" or "predicted", bytes) of a peak over the limit; None when the limit holds.

        A measured peak replaces the predicted one; in training, where the predicted peak is simulated and
        must hold on any machine, both count.
        """
        peaks = {
            "measured": self.measured.peak_bytes if self.measured else None,
            "predicted": self.predicted.peak_bytes,
        }
        known = {how: peak for how, peak in peaks.items() if peak is not None}
        if self.goal.mode != "training":
            known = dict(list(known.items())[:1])
        over = [(how, peak) for how, peak in known.items() if excess(peak, self.goal.memory)]
        return over[0] if over else None

    @property
    def unmeasured(self) -> Plan:
        """What was decided, without what a run found: who carries it out again checks and measures anew."""
        return replace(self, checks=(), stress=(), measured=None, measured_baseline=None, candidates=())

    def options(self) -> dict[str, str]:
        """site → option taken, as it is printed."""
        return {d.site: d.option for d in self.decisions}

    def same_choices(self, other: Plan) -> bool:
        """Whether the same backend is to build the same."""
        return self.backend == other.backend and self.options() == other.options()

    def forms(self) -> dict[str, Form]:
        """site → what the option taken there means."""
        return {d.site: d.form for d in self.decisions if d.form is not None}

    def decision(self, site: str) -> Decision:
        """The decision at a site.

        Raises:
            UnknownNameError: no such site in this plan.
        """
        for decision in self.decisions:
            if decision.site == site:
                return decision
        raise UnknownNameError("site", site, [d.site for d in self.decisions])

    def file(self, folder: Path, name: str) -> Path:
        """A file of the folder that is opened as a part of the artifact.

        Raises:
            FormatError: the plan names other files, so that those were compared with what was saved.
        """
        if self.artifact and name not in self.artifact:
            raise FormatError(
                f"The plan in {clipped(repr(str(folder)))} does not describe {clipped(repr(name))}, which a "
                f"plan for {self.backend} opens: its files are {clipped(', '.join(sorted(self.artifact)))}. "
                "Write both again with `effcompile optimize -o`."
            )
        return folder / name

    def with_changes(self, **changes: Any) -> Plan:
        return replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """The plan as JSON-ready data, `format` and `version` first."""
        import msgspec

        body: dict[str, Any] = msgspec.to_builtins(self)
        return {"format": FORMAT, "version": VERSION, **body}

    @classmethod
    def from_dict(cls, data: object, *, source: str = "plan") -> Plan:
        """A plan from `to_dict` data, every field validated.

        Raises:
            FormatError: foreign data, another version, or a field of the wrong type (named).
        """
        import msgspec

        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise FormatError(
                f"{source} is not an effcompile plan: it has no 'format': {FORMAT!r}. Make one with "
                "`effcompile plan`."
            )
        if data.get("version") != VERSION:
            version = data.get("version")
            mend = (
                "Update effcompile, or plan again"
                if isinstance(version, int) and version > VERSION
                else "Plan again"
            )
            raise FormatError(
                f"{source} has plan version {str(version)[:20]}; this effcompile reads version {VERSION}. "
                f"{mend}."
            )
        try:
            plan = msgspec.convert(
                {k: v for k, v in data.items() if k not in ("format", "version")}, cls, dec_hook=as_reason
            )
            wrong = objection(plan)
        except (msgspec.ValidationError, UsageError, RecursionError) as error:
            raise FormatError(
                f"{source} is not a valid plan: {clipped(error)}. Plan again, or restore the file."
            ) from error
        if wrong is not None:
            raise FormatError(
                f"{source} is not a valid plan: {clipped(wrong)}. Plan again, or restore the file."
            )
        return plan

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the plan as JSON: to a temporary file first, then renamed over `path`."""
        import msgspec

        return write_atomically(
            Path(path), msgspec.json.format(msgspec.json.encode(self.to_dict()), indent=1)
        )

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Read and validate a plan.json, given itself or as the folder that it is in.

        Raises:
            UsageError: no such file, or no path. FormatError: not a valid plan.
        """
        import msgspec

        if not isinstance(path, (str, os.PathLike)):
            raise UsageError(
                f"A {type(path).__name__} is no plan. Give a Plan, or the path of a plan.json or of its "
                "folder."
            )
        file = Path(path) / "plan.json" if os.path.isdir(path) else Path(path)
        if not os.path.lexists(file):
            raise UsageError(
                f"Cannot read the plan {str(file)!r}: there is no such file. `effcompile optimize MODEL -o "
                "DIR` writes one, and so does plan.save(path)."
            )
        try:
            data = msgspec.json.decode(content := read_bounded(file, MOST_BYTES, "the plan"))
            repeated = repeated_key(content)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise FormatError(
                f"{str(file)!r} is not valid JSON ({error}). It may be cut off; plan again or restore it."
            ) from error
        if repeated is not None:
            raise FormatError(
                f"{str(file)!r} says {clipped(repr(repeated))} twice in one object, and only one can hold. "
                "Remove the wrong one, plan again, or restore the file."
            )
        return cls.from_dict(data, source=repr(str(file)))

    def report(self, console: Console | None = None, *, verbose: bool = False) -> None:
        """Print the plan; see effcompile.report."""
        spoken.print_plan(self, console, verbose)

    def __repr__(self) -> str:
        """One line: a frontier is a list of plans, and each has thousands of fields."""
        of, how = (self.measured, "measured") if self.measured else (self.predicted, "predicted")
        parts = [self.backend, f"{format_seconds(of.seconds)} {how}" if of.seconds else ""]
        parts += [f"peak {format_bytes(self.peak_bytes)}" if self.peak_bytes else ""]
        parts += [f"error {format_error(of.error)}" if of.error else ""]
        return f"<Plan of {self.model} for {self.goal.mode}: {', '.join(filter(None, parts))}>"

    def __str__(self) -> str:
        """The report as plain text, as wide as the terminal."""
        from rich.console import Console

        self.report(Console(file=(text := io.StringIO()), color_system=None, force_terminal=False))
        return text.getvalue()

    def _repr_html_(self) -> str:
        """The report, as a notebook shows the value of a cell."""
        from rich.console import Console

        shown = Console(record=True, width=100, file=io.StringIO(), force_terminal=True)
        self.report(shown)
        return shown.export_html(
            inline_styles=True, code_format='<pre style="line-height:1.2;overflow-x:auto">{code}</pre>'
        )
