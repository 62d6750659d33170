"""The passes by name, in order of application.

Third parties register under the entry point group `effcompile.passes`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from effcompile.core.errors import UsageError
from effcompile.core.installed import entry_points
from effcompile.core.names import unknown_pass
from effcompile.ir.plan import Plan
from effcompile.passes.attention import Attention
from effcompile.passes.base import Choice, Context, Declined, Option, Pass
from effcompile.passes.fold import Fold
from effcompile.passes.last_token_logits import Logits
from effcompile.passes.merge import Merge
from effcompile.passes.norm_gate_rotary import Rows
from effcompile.passes.norm_gelu_fusion import Fuse
from effcompile.passes.option_text import value_of
from effcompile.passes.precompute import Precompute
from effcompile.passes.predicted_attention import Predict
from effcompile.passes.propose import propose_all
from effcompile.passes.quantize import Quantize
from effcompile.passes.sparsify import Sparsify
from effcompile.passes.speculate import Speculate
from effcompile.passes.structured_pruning import Shrink
from effcompile.passes.training.base import StepPass
from effcompile.passes.training.bitmask import Bitmask
from effcompile.passes.training.checkpoint import Checkpoint
from effcompile.passes.training.compress import Compress
from effcompile.passes.training.frozen import Frozen
from effcompile.passes.training.fused_attention import FusedAttention
from effcompile.passes.training.heads import LossHeads
from effcompile.passes.training.int8 import Int8Products
from effcompile.passes.training.levers import Levers, composed
from effcompile.passes.training.microbatch import Microbatch
from effcompile.passes.training.offload import Offload
from effcompile.passes.training.parts import Parts
from effcompile.passes.training.pipeline import Pipeline
from effcompile.passes.training.pointwise import Pointwise
from effcompile.passes.training.precision import Precision
from effcompile.passes.training.shard import Shard
from effcompile.passes.training.states import States
from effcompile.passes.training.tensor import TensorParallel
from effcompile.passes.training.tiled import TiledGradients
from effcompile.passes.training.wide import WideProducts
from effcompile.schedules.ways import Way

__all__ = [
    "IN_BACKWARD",
    "OPTIONAL",
    "PASSES",
    "TRAINING_PASSES",
    "Choice",
    "Context",
    "Declined",
    "Levers",
    "Option",
    "Pass",
    "TrainingPasses",
    "load_passes",
    "load_training_passes",
    "optional_in",
    "over_values",
    "propose_all",
    "registered",
    "registered_for_training",
    "ways",
    "with_gradients_consumed",
]

#: name → class. Structure changes first, so that precision is put on what is left.
PASSES: dict[str, type[Any]] = {
    "shrink": Shrink,
    "fold": Fold,
    "merge": Merge,
    "logits": Logits,
    "attention": Attention,
    "predict": Predict,
    "fuse": Fuse,
    "rows": Rows,
    "quantize": Quantize,
    "precompute": Precompute,
    "sparsify": Sparsify,
    "speculate": Speculate,
}

#: Ours that decide about a whole training step (training/base.py), in order of application. First those whose
#: options are captured when the search takes them up; then those that capture the step anew, and those that
#: change its graph: those of installed packages come before the last of them; then what stands beside the
#: step.
_CAPTURED_LATE: dict[str, type[Any]] = {"microbatch": Microbatch}
_OF_THE_GRAPH: dict[str, type[Any]] = {
    "tensor": TensorParallel,
    "precision": Precision,
    "attention": FusedAttention,
    "loss_head": LossHeads,
    "parts": Parts,
    "wide": WideProducts,
    "tiled": TiledGradients,
    "int8": Int8Products,
    "frozen": Frozen,
    "pointwise": Pointwise,
}
_BESIDE: dict[str, type[Any]] = {"shard": Shard, "pipeline": Pipeline, "states": States}
_OWN_STEP_PASSES = {**_CAPTURED_LATE, **_OF_THE_GRAPH, **_BESIDE}
#: Ours over values, in the order in which the ways of several are told.
_OVER_VALUES: dict[str, type[Any]] = {"offload": Offload, "compress": Compress, "bitmask": Bitmask}
#: The passes of a training step: those of the whole step, and those of its blocks.
TRAINING_PASSES: dict[str, type[Any]] = {
    **_OWN_STEP_PASSES,
    "checkpoint": Checkpoint,
    **_OVER_VALUES,
}

#: Those that take part only where they are named, or one of their options is set; naming them leaves out no
#: other.
OPTIONAL: frozenset[str] = frozenset(
    {
        "offload",
        "compress",
        "bitmask",
        "fold",
        "predict",
        "speculate",
        "microbatch",
        "precision",
        "frozen",
        "int8",
    }
)


def optional_in(plan: Plan) -> list[str]:
    """Those that carry out decisions of a plan: it names them."""
    return sorted(OPTIONAL & {decision.by for decision in plan.decisions})


_GROUP, _TRAINING_GROUP, _LEVER_GROUP = (
    "effcompile.passes",
    "effcompile.training_passes",
    "effcompile.value_levers",
)
#: What a pass of an installed package is asked.
_ASKED = {
    _GROUP: ("name", "exact", "propose", "apply", "measured_options", "replaced_weights"),
    _TRAINING_GROUP: ("name", "exact", "propose", "apply"),
    _LEVER_GROUP: ("name", "exact", "known", "share", "ways", "takes", "rates"),
}
#: The option by which gradients are consumed in the backward, which asks more of the loop around the step.
IN_BACKWARD = f"{States.name}.in_backward"


def registered() -> dict[str, type[Any]]:
    """Our passes, then those of installed packages.

    Raises:
        UsageError: an installed pass cannot be imported, or takes a name that is in use.
    """
    return _with_installed(PASSES, _GROUP)


def registered_for_training() -> dict[str, type[Any]]:
    """Our passes of a training step, then those of installed packages: of the whole step (base.py), and over
    values (levers.py).

    Raises:
        UsageError: an installed pass cannot be imported, or takes a name that is in use.
    """
    return _with_installed(TRAINING_PASSES, _TRAINING_GROUP) | over_values()


def over_values() -> dict[str, type[Any]]:
    """Our levers over values, then those of installed packages (passes/training/levers.py), in the order in
    which their ways are told.

    Raises:
        UsageError: an installed lever cannot be imported, takes a name that is in use, or says no ways.
    """
    found, names = _with_installed(TRAINING_PASSES, _LEVER_GROUP), list[str]()
    levers = {name: cls for name, cls in found.items() if name in _OVER_VALUES or name not in TRAINING_PASSES}
    for name, cls in levers.items():
        sound = isinstance(cls.known, tuple) and all(
            isinstance(way, Way) and way.by == name for way in cls.known
        )
        names += [way.name for way in cls.known] if sound else []
        if not sound or len(set(names)) < len(names):
            raise UsageError(
                f"The lever {name!r} must know a tuple of ways, each by itself and of a name of its own. "
                "Mend or remove it."
            )
    return levers


def ways() -> dict[str, Way]:
    """Every way to hold a value elsewhere that a plan may have, by its name."""
    return {
        way.name: way for way in composed([way for lever in over_values().values() for way in lever.known])
    }


def _with_installed(own: Mapping[str, type[Any]], group: str) -> dict[str, type[Any]]:
    found = dict(own)
    for entry in entry_points(group=group):
        if entry.name in found:
            raise UsageError(
                f"The pass {entry.name!r} of {entry.value} has a name that is taken. Rename its entry "
                f"point in {group}."
            )
        try:
            found[entry.name] = entry.load()
        except Exception as error:
            raise UsageError(
                f"The pass {entry.name!r} ({entry.value}) cannot be imported: {error}. Mend or remove it."
            ) from error
        if missing := [member for member in _ASKED[group] if not hasattr(found[entry.name], member)]:
            raise UsageError(
                f"The pass {entry.name!r} ({entry.value}) has no {', '.join(missing)}. Mend or remove it; "
                "CONTRIBUTING.md says what a pass is asked."
            )
    return found


def load_passes(
    spec: Sequence[str] | None = None, unnamed: Collection[str] | None = None
) -> tuple[Pass, ...]:
    """Passes from their description, in order of application.

    `quantize` selects: once a name is given, only the named passes run. `quantize.group_size=64` sets an
    option (and selects its pass where others are selected). `no-merge` leaves one out. None or an empty list:
    those that take part `unnamed`: all but the optional ones, which take part where they are named or set and
    leave out no other.

    Raises:
        UnknownNameError: no such pass. UsageError: no such option, or a value that does not fit its type.
    """
    known = registered()
    selected = _selected(known, spec, frozenset(known) - set(unnamed) if unnamed else OPTIONAL)
    return tuple(cls(**settings) for cls, settings in selected.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingPasses:
    """The passes of a training step: of the whole step, in order of application; of its blocks.

    late: those of the whole step, the first ones, whose options are captured when the search takes them up.
    pipeline, tensor, shard: of them, those that divide the step among ranks.
    """

    late: tuple[StepPass, ...] = ()
    step: tuple[StepPass, ...]
    checkpoint: Checkpoint
    levers: Levers
    pipeline: Pipeline = field(default_factory=Pipeline)
    tensor: TensorParallel = field(default_factory=TensorParallel)
    shard: Shard = field(default_factory=Shard)

    @property
    def whole(self) -> tuple[StepPass, ...]:
        """Those of the whole step."""
        return (*self.late, *self.step)

    @property
    def exact(self) -> tuple[TrainingPasses, list[str]]:
        """Those that change no numbers, and the names of the others."""
        others = [each.name for each in self.step if not each.exact] + [
            each.name for each in self.levers.values if not each.exact
        ]
        step = tuple(each for each in self.step if each.exact)
        values = tuple(each for each in self.levers.values if each.exact)
        return replace(self, step=step, levers=replace(self.levers, values=values)), others

    def carrying_out(self, names: Collection[str]) -> TrainingPasses:
        """With those of ours that decide about the whole step and are named, whether they were left out or
        not.
        """
        have = {each.name: each for each in self.whole}
        ours = {
            name: have.get(name) or cls()
            for name, cls in _OWN_STEP_PASSES.items()
            if name in have or name in names
        }
        late, step = _in_order({**have, **ours})
        return replace(self, late=late, step=step)


def load_training_passes(
    spec: Sequence[str] | None = None, *, inexact: bool = False, linked: bool = False
) -> TrainingPasses:
    """The passes of a training step, described as in `load_passes`.

    Optimizer states are planned wherever an optimizer is given.

    Args:
        spec: which. `offload`, `compress`, `bitmask`, `precision`, `frozen`, `int8`, `microbatch` take part
            only where they are named or set.
        inexact: an error is allowed: `precision` and `frozen` take part too, unless passes are selected or
            they are left out.
        linked: the target has a link to a host: so does `offload`.

    Raises:
        UnknownNameError: no such pass. UsageError: no such option, a value that does not fit, or
            `no-checkpoint`.
    """
    known = registered_for_training()
    unasked = {
        name
        for name, yes in ((Precision.name, inexact), (Frozen.name, inexact), (Offload.name, linked))
        if yes
    }
    selected = _selected(known, spec, OPTIONAL - unasked)
    if "checkpoint" not in selected:
        raise UsageError(
            "A training plan is made by the pass 'checkpoint'; it cannot be left out. Leave memory out to "
            "keep everything."
        )
    made = {name: cls(**settings) for name, (cls, settings) in selected.items()}
    made.setdefault(States.name, States(offload=False))  # left out: held as given
    levers = over_values()
    blocks = {"checkpoint", *levers}
    late, step = _in_order({name: each for name, each in made.items() if name not in blocks})
    return TrainingPasses(
        late=late,
        step=step,
        checkpoint=made["checkpoint"],
        levers=Levers(values=tuple(made[name] for name in levers if name in made)),
        pipeline=made.get(Pipeline.name, Pipeline()),
        tensor=made.get(TensorParallel.name, TensorParallel()),
        shard=made.get(Shard.name, Shard()),
    )


def with_gradients_consumed(spec: Sequence[str] | None) -> tuple[str, ...] | None:
    """A description under which a step consumes its gradients in the backward, where it may need less; None
    where this one settles that.
    """
    said = tuple(spec or ())
    return (
        None
        if any(each.partition("=")[0].strip() == IN_BACKWARD for each in said)
        else (*said, f"{IN_BACKWARD}=true")
    )


def _in_order(passes: Mapping[str, StepPass]) -> tuple[tuple[StepPass, ...], tuple[StepPass, ...]]:
    """Passes over a whole step in order of application: those captured late, and the others.

    Those of installed packages stand before our last one that changes the graph.
    """
    *first, last = _OF_THE_GRAPH
    installed = [name for name in passes if name not in _OWN_STEP_PASSES]

    def named(names: Iterable[str]) -> tuple[StepPass, ...]:
        return tuple(passes[name] for name in names if name in passes)

    return named(_CAPTURED_LATE), named((*first, *installed, last, *_BESIDE))


def _selected(
    known: dict[str, type[Any]], spec: Sequence[str] | None, optional: frozenset[str] = frozenset()
) -> dict[str, tuple[type[Any], dict[str, Any]]]:
    """name → class and settings of the passes that a description selects, in order of application.

    `optional` ones are not selected unless they are named or set, and do not narrow what is.
    """
    names: list[str] = []
    excluded: set[str] = set()
    settings: dict[str, dict[str, Any]] = {}
    for item in spec or ():
        head, equals, value = item.partition("=")
        name, dot, option = head.strip().partition(".")
        if not dot and not equals and name.startswith("no-") and name not in known:
            excluded.add(_known(name.removeprefix("no-"), known))
        elif dot or equals:
            cls = known[_known(name, known)]
            settings.setdefault(name, {})[option] = value_of(cls, name, option, equals, value.strip())
        else:
            names.append(_known(name, known))
    asked = {*names, *settings}
    selected = asked if set(names) - OPTIONAL else asked | (set(known) - optional)
    return {name: (cls, settings.get(name, {})) for name, cls in known.items() if name in selected - excluded}


def _known(name: str, known: dict[str, type[Any]]) -> str:
    if name in known:
        return name
    for mode, passes in (("inference", PASSES), ("training", TRAINING_PASSES)):
        if name in passes:
            raise UsageError(
                f"The pass {name!r} is for the mode {mode!r}, which is not the goal's. Known here: "
                f"{', '.join(known)}."
            )
    raise unknown_pass(name, known)
