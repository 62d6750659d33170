"""The Python entry points: optimize (function and decorator), plan, frontier."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Literal, Unpack, overload

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from effcompile.arguments import (
    GoalLike,
    Model,
    Options,
    PlanLike,
    declare,
    goal_of_plan,
    inputs_to_calibrate,
    many_devices,
    ready,
    told,
)
from effcompile.as_module import as_module, check_trained_by_calls
from effcompile.bucketed import Bucketed, Shapes, bucketed
from effcompile.capture.training import Loss
from effcompile.compiler import (
    AnyOptimizer,
    Batch,
    Dynamic,
    Executable,
    OnChange,
    Progress,
    Request,
    TrainingExecutable,
    load,
)
from effcompile.core.effort import Effort
from effcompile.core.errors import UsageError
from effcompile.core.goal import GoalFields, Mode
from effcompile.core.types import Example
from effcompile.deferred import Deferred
from effcompile.dynamo import dynamo_backend
from effcompile.fallback import answering
from effcompile.ir.plan import Plan
from effcompile.ir.strategy import Strategy, StrategyFields
from effcompile.loader.loaded import as_inputs
from effcompile.machine.target import Target
from effcompile.modes import carry_out, make_frontier, make_plan
from effcompile.ops.replaced_optimizer import check_not_stepped
from effcompile.search.many_devices import Devices

if TYPE_CHECKING:  # its module needs transformers
    from effcompile.runtime.generation.executable import GenerationExecutable

__all__ = ["Deferred", "Executable", "dynamo_backend", "frontier", "load", "optimize", "plan"]


class Decorator:
    """What `optimize` without a model returns: for a function or a module, or for a class of modules."""

    def __init__(self, request: Request) -> None:
        self.request = request

    @overload
    def __call__(self, model: type[nn.Module]) -> Callable[..., Deferred]: ...
    @overload
    def __call__(self, model: Model) -> Deferred: ...
    def __call__(self, model: Model | type[nn.Module]) -> Deferred | Callable[..., Deferred]:
        return _later(model, self.request)


@overload
def optimize(
    model: Model,
    inputs: Example | Iterable[Example],
    *,
    mode: Literal["training"],
    shapes: Shapes,
    **options: Unpack[Options],
) -> Bucketed: ...
@overload
def optimize(
    model: Model,
    inputs: Example | Iterable[Example],
    *,
    plan: PlanLike,
    shapes: Shapes,
    **options: Unpack[Options],
) -> Bucketed: ...
@overload
def optimize(
    model: Model, inputs: Example, *, mode: Literal["training"], **options: Unpack[Options]
) -> TrainingExecutable: ...
@overload
def optimize(  # type: ignore[overload-overlap] # without inputs another mode waits for them
    model: Model, inputs: Example | None = ..., *, mode: Literal["generation"], **options: Unpack[Options]
) -> GenerationExecutable: ...
@overload
def optimize(
    model: Model, inputs: Example, *, mode: Literal["inference"] = ..., **options: Unpack[Options]
) -> Executable: ...
@overload
def optimize(
    model: Model,
    inputs: Example,
    *,
    goal: GoalLike = ...,
    plan: PlanLike = ...,
    mode: Mode = ...,
    **options: Unpack[Options],
) -> Executable | TrainingExecutable | GenerationExecutable: ...
@overload
def optimize(
    model: type[nn.Module],
    *,
    goal: GoalLike = ...,
    plan: PlanLike = ...,
    mode: Mode = ...,
    **options: Unpack[Options],
) -> Callable[..., Deferred]: ...
@overload
def optimize(
    model: Model,
    inputs: None = ...,
    *,
    goal: GoalLike = ...,
    plan: PlanLike = ...,
    mode: Mode = ...,
    **options: Unpack[Options],
) -> Deferred: ...
@overload
def optimize(
    model: None = ...,
    *,
    goal: GoalLike = ...,
    plan: PlanLike = ...,
    mode: Mode = ...,
    **options: Unpack[Options],
) -> Decorator: ...
def optimize(
    model: Model | type[nn.Module] | None = None,
    inputs: Example | Iterable[Example] | None = None,
    *,
    goal: GoalLike = None,
    target: str | Target = "auto",
    backend: str | None = None,
    plan: PlanLike = None,
    optimizer: AnyOptimizer = None,
    batch: Batch = None,
    lr: tuple[float, ...] | None = None,
    passes: Sequence[str] | None = None,
    dynamic: Dynamic = None,
    calibration: Iterable[Example] | None = None,
    loss: Loss | None = None,
    keep_outputs: bool = False,
    on_change: OnChange | None = None,
    mesh: DeviceMesh | None = None,
    shapes: Shapes | None = None,
    effort: Effort = "normal",
    progress: bool | Progress = False,
    **goal_fields: Unpack[GoalFields],
) -> (
    Executable
    | TrainingExecutable
    | Bucketed
    | GenerationExecutable
    | Deferred
    | Decorator
    | Callable[..., Deferred]
):
    """Turn a model into one that meets the goal, verified against the original.

    `effcompile.optimize(model, inputs=batch, mode="training", memory="900MiB")` plans the training step: its
    forward, loss and backward stay within the memory, and a plain loop or HF's Trainer runs on the result.
    `effcompile.optimize(model, mode="generation", context=2048)` plans prefill and decoding of a Hugging Face
    model at once; the result has its generate(), and `inputs` are text to measure errors on.

    Call it with a model, or use it as a decorator: on a function of tensors, on a `forward` method, or on an
    nn.Module class (which then makes optimized instances). Without `inputs` the work is done at the first
    call.

    Args:
        model: an nn.Module, a function of tensors, or an nn.Module class. None: return a decorator.
        inputs: example inputs: a tensor, a tuple of positional or a dict of keyword arguments.
        goal: the goal; `goal_fields` change it.
        target: a machine's name or .toml file, or a Target; "auto" is this machine.
        backend: one backend's name; None compares all that are installed.
        plan: a Plan or the path of a plan.json to apply again, without solving.
        optimizer: in training: a torch optimizer of the model's parameters, or optimizer(parameters) that
            returns one. Its states then count, and are planned too; use the result's `optimizer`.
        batch: in generation, rows that are generated at once. In training, sizes of the batch to choose from:
            "auto", "8..64", a number or several. The plan is of the one that takes most examples a second
            within the memory; `inputs` are repeated or cut to it, and the result is to be given such batches.
        lr: a learning rate and the batch that it is good for, (3e-4, 256), and behind them the critical batch
            where it was measured (`critical_batch`): the plan says the one for its batch, by the optimizer's
            law.
        passes: the passes to use, e.g. ["quantize.group_size=64"]; None uses all.
        dynamic: True to keep batch and sequence free, False to fix all shapes, or torch.export's dynamic
            shapes.
        calibration: inputs on which errors are measured; None generates some.
        loss: in training, `loss(outputs, inputs)` for a forward that returns none.
        keep_outputs: in training, also return what the model returns beside the loss (logits): it takes
            memory.
        on_change: what a call does that the plan does not hold for, because its arguments, or the model's
            attributes, hooks or weights, are not as they were: "error" says what changed, "eager" runs the
            model's own forward with one warning, "replan" plans again. None is "error", and "replan" for a
            Deferred.
        mesh: in training under torchrun: the data-parallel ranks, each of which gives the inputs of its own
            part of the batch. One plan is made for all, `memory` is each rank's, and the model's parameters
            become DTensors: make the optimizer of those of the result.
        shapes: in training (examples, tokens) of the batches that come, [(8, 128), (8, 256)]: each is planned
            now, smaller batches are padded where that is exact, and others run eagerly with a word; "auto"
            chooses them for the batches of a loader, `inputs`.
        effort: how long planning searches, 15, 60 or 600 seconds at the most: "low", "normal", "high". What
            is not proven then is told. High also prices backends in full that cannot win.
        progress: True to show on stderr what is being done, or a Progress that is told.
        **goal_fields: mode="training", memory="6GiB", minimize="memory", max_error=0.01, reads="last".

    Returns:
        An Executable (in training a TrainingExecutable), or (without inputs) a Deferred, which makes them
        when it is called.

    Raises:
        UsageError: something in the request is wrong. InfeasibleError: no plan meets the goal.
        VerificationError: the result is not within the declared error.
    """
    loaded = plan if plan is None or isinstance(plan, Plan) else Plan.load(plan)
    request = Request(
        goal=declare(goal, goal_fields)
        if loaded is None
        else goal_of_plan(loaded, goal, goal_fields, backend),
        target=target,
        backend=backend,
        plan=loaded,
        passes=passes,
        dynamic=dynamic,
        calibration=inputs_to_calibrate(calibration),
        loss=loss,
        keep_outputs=keep_outputs,
        optimizer=optimizer,
        batch=batch,
        lr=lr,
        on_change=on_change,
        mesh=mesh,
        effort=effort,
        progress=told(progress),
    )
    if request.training:
        check_trained_by_calls(model)
        check_not_stepped(optimizer)
    if mesh is not None and (model is None or inputs is None):
        raise UsageError("A step on a mesh is planned by all ranks together: give the model and `inputs`.")
    if shapes is not None:
        if model is None or inputs is None:
            raise UsageError("shapes are planned at once: give the model and `inputs`.")
        return bucketed(ready(as_module(model), request), inputs, shapes, request)
    if model is None:
        return Decorator(request)
    if request.goal.mode == "generation":
        # nothing is learned from a call: its inputs are text to compare with
        return carry_out(request, as_module(model), *(((), {}) if inputs is None else as_inputs(inputs)))
    if inputs is None or (isinstance(model, type) and issubclass(model, nn.Module)):
        return _later(model, request)
    module = ready(as_module(model), request)
    return answering(carry_out(request, module, *as_inputs(inputs)), request)


def plan(
    model: Model,
    inputs: Example,
    *,
    goal: GoalLike = None,
    target: str | Target = "auto",
    backend: str | None = None,
    optimizer: AnyOptimizer = None,
    batch: Batch = None,
    lr: tuple[float, ...] | None = None,
    passes: Sequence[str] | None = None,
    dynamic: Dynamic = None,
    calibration: Iterable[Example] | None = None,
    loss: Loss | None = None,
    keep_outputs: bool = False,
    devices: Devices | None = None,
    nodes: str | None = None,
    strategy: Strategy | StrategyFields | None = None,
    global_batch: int | None = None,
    batch_tokens: int | None = None,
    effort: Effort = "normal",
    progress: bool | Progress = False,
    **goal_fields: Unpack[GoalFields],
) -> Plan:
    """Decide without lowering; works for machines that are not here (target="h100-sxm").

    Arguments as in `optimize`.

    `devices` divides a training step among so many, "auto" among the fewest that are enough, a Cluster among
    its own; the plan's `distributed` says how. `nodes` says how they stand ("8x8"), `strategy` what of a
    Strategy is given, the rest is free, and `global_batch` or `batch_tokens` how large a step is: the inputs'
    batch on each device where neither is given.

    Raises:
        UsageError: something in the request is wrong. InfeasibleError: no plan meets the goal.
    """
    request = Request(
        goal=declare(goal, goal_fields),
        target=target,
        backend=backend,
        passes=passes,
        dynamic=dynamic,
        calibration=inputs_to_calibrate(calibration),
        loss=loss,
        keep_outputs=keep_outputs,
        optimizer=optimizer,
        batch=batch,
        lr=lr,
        effort=effort,
        progress=told(progress),
        devices=many_devices(devices, nodes, strategy, global_batch, batch_tokens),
    )
    return make_plan(request, ready(as_module(model), request), *as_inputs(inputs))


def frontier(
    model: Model,
    inputs: Example,
    *,
    points: int | None = None,
    goal: GoalLike = None,
    target: str | Target = "auto",
    backend: str | None = None,
    optimizer: AnyOptimizer = None,
    passes: Sequence[str] | None = None,
    dynamic: Dynamic = None,
    calibration: Iterable[Example] | None = None,
    loss: Loss | None = None,
    keep_outputs: bool = False,
    effort: Effort = "normal",
    progress: bool | Progress = False,
    **goal_fields: Unpack[GoalFields],
) -> list[Plan]:
    """Predicted plans along the memory-time front, least memory first; of inference those of the best
    backend.

    At most `points` of them: None for 8, in training 20. The other arguments are those of `plan`.

    Raises:
        UsageError: something in the request is wrong. InfeasibleError: no plan meets the goal.
    """
    if points is not None and (not isinstance(points, int) or points < 1):
        raise UsageError(f"points = {points!r} must be a whole number, at least 1.")
    request = Request(
        goal=declare(goal, goal_fields), target=target, backend=backend, passes=passes, dynamic=dynamic,
        calibration=inputs_to_calibrate(calibration), loss=loss, keep_outputs=keep_outputs,
        optimizer=optimizer, effort=effort, progress=told(progress),
    )  # fmt: skip
    return make_frontier(request, ready(as_module(model), request), *as_inputs(inputs), points)


def _later(model: Model | type[nn.Module], request: Request) -> Deferred | Callable[..., Deferred]:
    """The model, or a class's instances, optimized at the first call."""
    if request.batch is not None:
        raise UsageError("A batch is chosen together with its model: give `inputs`, too.")
    if isinstance(model, type) and issubclass(model, nn.Module):
        if request.optimizer is not None:
            raise UsageError(
                "An optimizer is of one model's parameters: give it to effcompile.optimize(model, ...), "
                "not to a class."
            )
        return _factory(model, request)
    module = ready(as_module(model), request, stacklevel=4)
    if request.optimizer is not None:
        raise UsageError("An optimizer is planned together with its model: give `inputs`, too.")
    return Deferred(module, request)


def _factory(model_class: type[nn.Module], request: Request) -> Callable[..., Deferred]:
    """What a decorated class becomes: a function that makes optimized instances."""

    @functools.wraps(model_class, updated=())
    def make(*args: object, **kwargs: object) -> Deferred:
        return Deferred(model_class(*args, **kwargs), request)

    return make
