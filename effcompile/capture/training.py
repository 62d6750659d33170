"""From an unmodified torch model to one joint graph of its training step: forward, loss and backward.

torch.export traces the forward with the loss inside, state is lifted to placeholders (one per distinct
tensor), and AOTAutograd traces autograd through that graph without decomposing further. Where torch.export
cannot, Dynamo gives the forward graph.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from effcompile.capture import mends as known
from effcompile.capture import training_graph
from effcompile.capture.aliases import refuse_aliases
from effcompile.capture.config_reads import recording
from effcompile.capture.cumulative import cumulative_statistics
from effcompile.capture.diagnose import capture_error, depends_on_values, place_of
from effcompile.capture.draws import no_python_randomness
from effcompile.capture.exported import Exported, copied
from effcompile.capture.known_values import Fixed, KnownValues, around_forward
from effcompile.capture.memory import CalledAlone, as_it_was, refuse_memory, written_into
from effcompile.capture.state import ModelGuards
from effcompile.capture.training_inputs import Refill, StepInputs, split_tensors
from effcompile.capture.training_outputs import OutputLayout, check_loss
from effcompile.core import torch_compat, torch_compat_aot, torch_compat_export
from effcompile.core.errors import CaptureError, EffcompileError, InputsError
from effcompile.core.reasons import Because, Reason
from effcompile.core.stages import causes, first_line
from effcompile.core.types import Args, Kwargs
from effcompile.ir.resident import resident_bytes
from effcompile.ir.roles import Entering
from effcompile.ir.step import Step
from effcompile.ops.ctc import TraceableCTC

Loss = Callable[[Any, Any], Tensor]
#: Changes a forward graph in place before its gradients are traced; called with the graph and the values of
#: its placeholders.
Edit = Callable[[fx.GraphModule, Sequence[Tensor]], None]
_DYNAMO = "traced by Dynamo, for torch.export cannot take {name}"


@dataclass(slots=True, kw_only=True)
class _Subject:
    """What is captured, and, once the forward has run, what it returned, and places that it wrote to."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: StepInputs
    loss: Loss | None
    keep_outputs: bool
    edit: Edit | None
    tensors: list[Tensor]
    refill: Refill
    exported: Exported
    noted: list[str] = field(default_factory=list)
    mends: list[Reason] = field(default_factory=list)
    layout: OutputLayout | None = None


def capture_training(
    model: nn.Module,
    args: Args = (),
    kwargs: Kwargs | None = None,
    *,
    loss: Loss | None = None,
    keep_outputs: bool = False,
    edit: Edit | None = None,
    exported: Exported | None = None,
) -> Step:
    """Capture one training step.

    The model is left as it was, and runs in its own mode: call `model.train()` for dropout.

    Args:
        model: any nn.Module.
        args: example positional inputs; tensors among them become inputs of the graph, with a gradient where
            they require one; other values are fixed.
        kwargs: example keyword inputs, labels among them. What the forward does not take is for `loss` alone.
        loss: `loss(outputs, inputs)`, for a forward that returns none; `inputs` are the kwargs if there are
            no args, the args if there are no kwargs, else (args, kwargs).
        keep_outputs: also return what the model returns beside the loss (logits, ...), for show: no gradient
            goes through it.
        edit: changes the exported forward, a flat aten graph whose parameters are get_attr nodes, before
            autograd is traced through it. Called with no graph that Dynamo gave: its operators are not
            aten's.
        exported: the forward of an earlier capture, which is not traced again; filled where it is empty.

    Raises:
        InputsError: the model itself raises with these inputs, one of them is neither tensor nor plain value,
            or the model has a forward hook beside a `loss`.
        CaptureError: nothing requires a gradient, no loss is returned, or the forward cannot be traced: names
            the line, the construct and the fix.
    """
    torch_compat_aot.begin_autograd()
    args, kwargs = tuple(args), dict(kwargs or {})
    given = (leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
    if not any(tensor.requires_grad for tensor in (*model.parameters(), *given)):
        raise CaptureError(
            f"No parameter of {type(model).__name__} requires a gradient and no input does, so that there is "
            "nothing to train. Unfreeze those that are to be trained: parameter.requires_grad_(True)."
        )
    if loss is not None and model._forward_hooks:
        raise InputsError(
            f"{type(model).__name__} has a forward hook, which would be given the planned step's loss in the "
            "place of what the forward returns, as `loss` is a function beside the model. Put what the hook "
            "does into the forward or `loss`, or register it on a submodule."
        )
    inputs = StepInputs(model, args, kwargs)
    tensors, refill = split_tensors(inputs, args, kwargs)
    subject = _Subject(
        model=model, args=args, kwargs=kwargs, inputs=inputs, loss=loss, keep_outputs=keep_outputs, edit=edit,
        tensors=tensors, refill=refill, exported=exported or Exported(),
    )  # fmt: skip
    first = subject.exported.front is None
    with torch.enable_grad(), torch.random.fork_rng(devices=_devices(model)), _mended(subject) as written:
        joint = _joint(subject)
        inputs.fix(subject.exported.fixed)
        subject.mends += subject.exported.fixed.said
        step = _step(subject, joint)
    read = subject.exported.configurations
    beside = {} if loss is None else {"loss": loss}
    state = ModelGuards(
        model, training=True, mended=known.CACHE_ATTRIBUTES, configurations=read, beside=beside
    )

    def ask() -> CalledAlone:
        with torch.random.fork_rng(devices=_devices(model)):
            return refuse_memory(model, lambda: _loss_alone(subject))

    constants = (each.value for each in joint.roles.enters(Entering.CONSTANT).values())
    refuse_aliases(model, constants, state.held_tensors())
    if first and (written or subject.noted or state.may_keep):
        subject.exported.call(model, ask)
    subject.exported.follow(state.leave)
    return replace(step, state=state)


class _StepModule(nn.Module):
    """Flat tensors in; (loss, *tensors for show) out.

    The user's model is a submodule, so that its names are known.
    """

    def __init__(self, subject: _Subject) -> None:
        super().__init__()
        setattr(self, training_graph.WRAPPED, subject.model)
        self._subject = subject

    @property
    def subject(self) -> _Subject:
        return self._subject

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        subject = self._subject
        args, kwargs = subject.refill(tensors)
        taken, named = (
            subject.inputs.forward_part(args, kwargs) if subject.loss is not None else (args, kwargs)
        )
        # its forward, for hooks on the outermost module run around a planned step, when that is called
        model: nn.Module = getattr(self, training_graph.WRAPPED)
        with written_into(model, subject.noted):
            outputs = model.forward(*taken, **named)
        if subject.layout is None:
            subject.layout = OutputLayout.of(
                outputs, own_loss=subject.loss is not None, keep_outputs=subject.keep_outputs
            )
        if subject.loss is not None:
            loss = subject.loss(outputs, (args, kwargs) if args and kwargs else args or kwargs)
        else:
            loss = subject.layout.pick_loss(outputs)
        where = (
            "The result of loss(outputs, inputs)"
            if subject.loss
            else f"The loss that {type(subject.model).__name__} returned"
        )
        return (check_loss(loss, where), *(tensor.detach() for tensor in subject.layout.pick(outputs)))


def _joint(subject: _Subject) -> training_graph.JointGraph:
    """The joint graph by the first way that works.

    Raises:
        CaptureError: none does; says what torch.export, the first of them, stumbled over.
    """
    try:
        return _joined(subject, _known_front)
    except Exception as error:
        _raise_ours(error)
        first = error
    _run_eager(subject)
    why = (
        str(first)
        if isinstance(first, _PythonGradientError)
        else f"this forward: {first_line(first)} ({place_of(first, subject.model)})"
    )
    for mend in (known._grouped_experts, known._batched_experts):  # batched copies weights for every token
        with _with(mend, subject.model) as said, contextlib.suppress(Exception):
            if said:
                joint = _joined(subject, _export_front)
                subject.mends += said
                return joint
    if depends_on_values(first):
        subject.exported.knowing = True
        with contextlib.suppress(Exception):
            return _joined(subject, _known_front)
        subject.exported.knowing, subject.exported.fixed = False, Fixed()
    with contextlib.suppress(Exception):
        joint = _joined(subject, _dynamo_front)
        subject.mends.append(Because(_DYNAMO, (why,)))
        return joint
    if isinstance(first, _PythonGradientError):
        raise CaptureError(
            f"{type(subject.model).__name__} cannot be captured for training: it defines a gradient in "
            f"Python by {first}, which neither torch.export nor Dynamo records. Mend it: write it with torch "
            "operators, or as a torch.library.custom_op with its own register_autograd. A hook on the whole "
            "model, or on a parameter, runs around a planned step; take others off (handle.remove())."
        ) from first
    raise capture_error(first, subject.model) from first


def _joined(
    subject: _Subject, front: Callable[[_StepModule, list[Tensor]], fx.GraphModule]
) -> training_graph.JointGraph:
    with torch_compat.quiet_export(), cumulative_statistics(subject.model):
        graph = front(_StepModule(subject), subject.tensors)
        return training_graph.join(training_graph.lift(graph, subject.model, subject.tensors), subject.model)


class _PythonGradientError(Exception):
    """The forward defines a gradient in Python, which torch.export does not record. Says what, and where."""


def _known_front(module: _StepModule, tensors: list[Tensor]) -> fx.GraphModule:
    """As an earlier capture traced it, else traced."""
    known = module.subject.exported
    if known.front is None:
        front = _traced(module, tensors)
        known.keep(copied(front), module.subject.layout)
    else:
        front, module.subject.layout = copied(known.front), known.layout
    return _edited(front, module, tensors)


def _export_front(module: _StepModule, tensors: list[Tensor]) -> fx.GraphModule:
    return _edited(_traced(module, tensors), module, tensors)


def _traced(module: _StepModule, tensors: list[Tensor]) -> fx.GraphModule:
    subject = module.subject
    known = KnownValues(subject.model, subject.inputs.named) if subject.exported.knowing else None
    with (
        no_python_randomness(),
        TraceableCTC(),
        torch_compat_aot.python_gradients() as noted,
        recording(subject.model, subject.exported.configurations),
        around_forward(module, known),
    ):
        front = torch.export.export(module, tuple(tensors), strict=False).module(check_guards=False)
    if noted:
        raise _PythonGradientError(noted[0])
    if known is not None:
        subject.exported.fixed = known.fixed()
    assert isinstance(front, fx.GraphModule)
    return front


def _edited(front: fx.GraphModule, module: _StepModule, tensors: list[Tensor]) -> fx.GraphModule:
    if module.subject.edit is not None:
        module.subject.edit(front, tensors)
        front.recompile()
    return front


def _dynamo_front(module: _StepModule, tensors: list[Tensor]) -> fx.GraphModule:
    module.subject.exported.configurations.of.clear()  # Dynamo reads attributes in ways of its own
    return torch_compat_aot.dynamo_front(module, tensors)


def through_dynamo(step: Step) -> bool:
    """Whether Dynamo traced the forward, for torch.export could not take it, or not what an edit had made of
    it.
    """
    return any(isinstance(mend, Because) and mend.text == _DYNAMO for mend in step.mends)


def _raise_ours(error: BaseException) -> None:
    """Raise the effcompile error that the traced forward ran into, if that is what torch wraps."""
    for seen in causes(error):
        if isinstance(seen, EffcompileError):
            raise seen


def _run_eager(subject: _Subject) -> None:
    """Run the step without tracing, which tells its output's layout; buffers get their values back.

    Raises:
        InputsError: the model, or the loss, itself raises with these inputs.
    """
    subject.layout = None
    buffers = {buffer: buffer.detach().clone() for buffer in subject.model.buffers()}
    try:
        _loss_alone(subject)
    except EffcompileError:
        raise
    except Exception as error:
        called = ", which is called as loss(outputs, inputs)," if subject.loss is not None else ""
        raise InputsError(
            f"The training step of {type(subject.model).__name__} itself raises with these inputs, before "
            f"effcompile does anything. {first_line(error)}\n  at {place_of(error, subject.model)}\n  Give "
            f"inputs that the model and the loss{called} accept."
        ) from error
    finally:
        with torch.no_grad():
            for buffer, value in buffers.items():
                buffer.copy_(value)


def _loss_alone(subject: _Subject) -> Tensor:
    """The loss of the model itself. No backward follows: activations are not kept for one, unless the forward
    takes a gradient itself (forces, a gradient penalty).
    """

    def run() -> Tensor:
        loss: Tensor = _StepModule(subject)(*(tensor.clone() for tensor in subject.tensors))[0]
        return loss.detach()

    with torch.enable_grad():
        try:
            with torch.autograd.graph.saved_tensors_hooks(lambda tensor: None, lambda held: held):
                return run()
        except EffcompileError:
            raise
        except Exception:  # it has read what was not kept, or raises anyway
            return run()


@contextlib.contextmanager
def _mended(subject: _Subject) -> Iterator[list[str]]:
    """The model as it is traced: no key/value cache, and what HuggingFace or torch cannot be
    traced without.

    Yields what tracing put back, in the end: attributes that the forward writes.
    """
    model = subject.model
    with contextlib.ExitStack() as stack:
        written = stack.enter_context(as_it_was(model))
        if any(isinstance(module, nn.LSTM) for module in model.modules()):
            # oneDNN's layer is traced as inference has it
            stack.enter_context(torch.backends.mkldnn.flags(enabled=False))
        if any(isinstance(module, nn.RNNBase) for module in model.modules()):
            stack.enter_context(torch_compat_export.recurrent_dropout())
        cache = known._apply(stack, known._without_cache(model))
        subject.mends += cache if "use_cache" in inspect.signature(model.forward).parameters else ()
        if known._has_torch_transformer(model):
            stack.enter_context(torch_compat.traceable_transformer())
        subject.mends += known._apply(stack, known._loss_type(model, subject.kwargs))
        yield written


@contextlib.contextmanager
def _with(mend: Callable[[nn.Module], known.Mend], model: nn.Module) -> Iterator[tuple[Reason, ...]]:
    """The model with a mend, and what it did; nothing where it changes nothing."""
    with contextlib.ExitStack() as stack:
        yield known._apply(stack, mend(model))


def _devices(model: nn.Module) -> list[int]:
    """The CUDA devices whose random state a trial run would change."""
    return sorted(
        {p.device.index for p in model.parameters() if p.device.type == "cuda" and p.device.index is not None}
    )


def _step(subject: _Subject, joint: training_graph.JointGraph) -> Step:
    layout = subject.layout
    assert layout is not None
    constants = [entry.value for entry in joint.roles.enters(Entering.CONSTANT).values()]
    given = resident_bytes(subject.model, subject.args, subject.kwargs, constants)
    return Step(
        name=type(subject.model).__name__,
        module=joint.module,
        roles=joint.roles,
        cut_off=layout.cut_off,
        leaves=subject.inputs.leaves,
        fixed=subject.inputs.listed,
        rebuild=layout.rebuild,
        dropped=layout.dropped,
        mends=tuple(subject.mends),
        args=subject.args,
        kwargs=subject.kwargs,
        resident_bytes=given + subject.inputs.copied_bytes,
        copied_bytes=subject.inputs.copied_bytes,
    )
