"""Rematerialisation in plain numbers: blocks with their storages and operators, and the chain that they make
up.

Vocabulary. A *value* is one storage made in the forward. A *block* is a run of consecutive forward operators
and the run of backward steps that differentiates them. A chain of blocks runs forward 0 … n−1, then backward
n−1 … 0. A kept value lives from where it is made until its block's backward has read it for the last time; a
value that is not kept is freed after its last reader in the forward and, if the backward needs it, is made
again: right before its first reader there. A value may also be held in another *form*: put away when it is
made (offloaded to the host, compressed), freed after its last reader in the forward, and restored in the
backward before the first step that needs it. Bytes throughout; seconds throughout.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """One forward operator: it reads and makes values; views are no operators of their own.

    Attributes:
        name: unique in the block.
        reads: values that it reads. Those that the block does not know (parameters, inputs of the model,
            values that stay alive in any case) are left out.
        makes: values that it makes.
        seconds: time to run it (again).
        workspace: bytes alive only while it runs.
        repeatable: whether it may run again in the backward.
        state: of one that draws, the bytes of the generator's state: kept from its run on where it runs
            again, and held once more while it does, so that the numbers are the same.
    """

    name: str
    reads: tuple[str, ...]
    makes: tuple[str, ...]
    seconds: float
    workspace: int = 0
    repeatable: bool = True
    state: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class BackwardStep:
    """One backward operator, in the fixed order of the backward.

    Attributes:
        name: unique in the block.
        reads: values of the forward that it reads.
        live: bytes of storages made by the backward that are alive while it runs (its result and workspace
            included, gradients of parameters that stay included), relative to the block's first step: what
            was there when the block's backward began counts 0. The same whatever is kept.
    """

    name: str
    reads: tuple[str, ...]
    live: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Residency:
    """A way to hold a value from forward to backward other than as it is.

    It is put away right after it was made (an entering value: when the block's forward begins), and restored
    when the first backward step that needs it, or an operator recomputed for that step, is about to run.

    Attributes:
        name: unique among the value's forms, e.g. "offload".
        held: device bytes between forward and backward: of a packed copy that stays on the device.
        staged: device bytes from the beginning of the block's backward (and, in its forward, to the end):
            `held`, or more where copies over the link overlap with compute: what is on its way.
        packed: device bytes of the packed copy beside the value, while it is put away and restored; 0 without
            one. `staged` is `held`, `packed`, or, without a packed copy, the value's bytes: then it is the
            value itself.
        host: bytes of host memory.
        workspace: bytes alive only while it is packed or unpacked, beside the value and the packed copy.
        seconds: time to pack and unpack it. out, back: time of the link, device to host and host to device.
    """

    name: str
    held: int = 0
    staged: int = 0
    packed: int = 0
    host: int = 0
    workspace: int = 0
    seconds: float = 0.0
    out: float = 0.0
    back: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockProblem:
    """What there is to decide in one block.

    Attributes:
        nbytes: value → bytes: those that its operators make, and `entering`.
        entering: values made by an earlier block that this block's forward reads and that nobody else keeps,
            the residual stream above all. They are there during the block's forward; in the backward only if
            kept (no operator of the block makes them again).
        leaving: values that later blocks' forwards read: alive when the block's forward ends, and no longer
            this block's to keep, so its backward finds them only if kept here as well. (Keeping one costs its
            bytes here.)
        forced: values that must be kept, whatever it costs.
        forward, backward: operators in order.
        forms: value → further forms in which it may be held; not of leaving or forced values.
        hidden: per backward step its seconds, where copies over the link run beside the compute and only what
            they lag behind costs time (simulate.stall). None: a copy stops everything else, and costs its
            whole time.
        scarce: whether host bytes count in the front: not where the host has room for everything.
    """

    nbytes: Mapping[str, int]
    entering: tuple[str, ...]
    leaving: tuple[str, ...]
    forced: frozenset[str]
    forward: tuple[Op, ...]
    backward: tuple[BackwardStep, ...]
    forms: Mapping[str, tuple[Residency, ...]] = field(default_factory=dict)
    hidden: tuple[float, ...] | None = None
    scarce: bool = False


def with_states(problem: BlockProblem, drawn: Collection[str] | None = None) -> BlockProblem:
    """The block with the states of generators as values: each is made right before the operator that draws,
    which reads it.

    What makes one does not run again, so that a draw can only be repeated where its state is kept.

    Args:
        problem: the block.
        drawn: names of the operators whose states are wanted; None for all.
    """
    ops: list[Op] = []
    nbytes = dict(problem.nbytes)
    for op in problem.forward:
        if op.state and (drawn is None or op.name in drawn):
            name = state_of(op)
            nbytes[name] = op.state
            ops.append(Op(name=name, reads=(), makes=(name,), seconds=0.0, repeatable=False))
            op = replace(op, reads=(*op.reads, name))
        ops.append(op)
    return (
        problem if len(ops) == len(problem.forward) else replace(problem, forward=tuple(ops), nbytes=nbytes)
    )


def state_of(op: Op) -> str:
    """The name of the value that is the generator's state before an operator; no other value has it."""
    return f"state of {op.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockOption:
    """One way to run a block.

    Attributes:
        kept: values kept from forward to backward.
        recomputed: names of the operators that run again.
        kept_bytes: bytes of `kept`, and of packed copies that stay on the device.
        forward_peak: most bytes of the block's own values (entering ones included) and workspace alive at an
            instant of its forward, plus kept ones.
        backward_peak: most bytes at an instant of its backward: kept values not yet freed (a kept value is
            freed after its last reader), recomputed values, workspace and `BackwardStep.live`.
        seconds: extra time: the recomputed operators', packing and unpacking, and the copies that compute
            does not hide.
        label: the user's word for it ("keep all", "recompute gelu, layer_norm"); may be "".
        entering_kept: bytes of `kept` that are entering values: what a group spares by remaking them.
        forms: value → the name of the form in which it is held; these are not in `kept`.
        host_bytes: bytes on the host between forward and backward.
    """

    kept: frozenset[str]
    recomputed: tuple[str, ...]
    kept_bytes: int
    forward_peak: int
    backward_peak: int
    seconds: float
    label: str = ""
    entering_kept: int = 0
    forms: Mapping[str, str] = field(default_factory=dict, hash=False)
    host_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockStage:
    """One block in its place in the chain.

    Attributes:
        name: unique, e.g. "transformer.h.3".
        kind: class of identical blocks; the stages of one kind have the same options.
        forward_base: bytes alive when its forward begins that no option decides about (beside parameters,
            inputs: those are in the chain's base) and that are not among its own entering values.
        backward_base: the same when its backward begins: gradients so far, gradients on their way.
        rerun_seconds: time to run its forward once more, to remake its leaving values from its entering ones.
        entering_bytes: bytes of its entering values: what is freed when they are remade by a group.
        rerun_peak: most bytes of its own values alive at an instant of such a re-run that keeps nothing but
            what leaves.
    """

    name: str
    kind: str
    forward_base: int
    backward_base: int
    rerun_seconds: float = 0.0
    entering_bytes: int = 0
    rerun_peak: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainProblem:
    """Which option for which stage: least extra seconds with every instant within the budget.

    Attributes:
        base: bytes alive throughout: parameters, buffers, inputs.
        budget: the limit on every instant, base included; None: no limit.
        options: kind → its options.
        stages: in forward order.
        forward_slack, backward_slack: stage name → bytes to add to that stage's instant, from the simulation
            of what an earlier solution of this problem became (may be negative).
        groupable: runs (first, last) of stage indices whose entering values a group may drop and remake:
            within one, each stage's leaving values are the next one's entering values.
        host: the limit on host bytes of all stages together; None: no limit.
    """

    base: int
    budget: int | None
    options: Mapping[str, tuple[BlockOption, ...]]
    stages: tuple[BlockStage, ...]
    forward_slack: Mapping[str, int] = field(default_factory=dict)
    backward_slack: Mapping[str, int] = field(default_factory=dict)
    groupable: tuple[tuple[int, int], ...] = ()
    host: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Stages first … last whose entering values, but the first one's, are not kept.

    When the backward reaches the last stage, the forwards of first … last−1 run again from the first one's
    entering values and keep only each stage's entering values, which live until that stage's backward is
    done. So the option of `first` keeps its entering values whole, and the options of the others keep some of
    theirs (`entering_kept` > 0). No stage of a group holds a value in another form: the re-run may read it
    before its block restores it.
    """

    first: int
    last: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainSolution:
    """The choice, proven.

    Attributes:
        choice: per stage, the index into `options[kind]`.
        groups: stages that are remade together.
        seconds: extra time in all.
        bound: no choice within the budget takes less: proven.
        gap: (seconds − bound) / reference, where reference is the step's time given by the caller, so that a
            gap of 0.01 means one per cent of a step.
        status: plan.Certificate's words.
        peak: predicted bytes at the highest instant; instant: which one ("forward transformer.h.3", "backward
            lm_head").
        smallest: the least budget for which the solver has found a solution with these options (informative).
        host: bytes on the host at the end of the forward, when there are most of them.
        solver: name and version. solve_seconds: time taken.
        by_walk: the dynamic program, which was exact, is the only proof.
    """

    choice: tuple[int, ...]
    groups: tuple[Group, ...]
    seconds: float
    bound: float
    gap: float
    status: str
    peak: int
    instant: str
    smallest: int
    solver: str
    solve_seconds: float
    host: int = 0
    by_walk: bool = False
