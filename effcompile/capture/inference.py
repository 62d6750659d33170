"""From an unmodified torch model to a Program for inference, through torch.export."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from effcompile.capture import axes as dynamic_axes
from effcompile.capture import cleanup, simplify, written_out, written_parts
from effcompile.capture.calls import CallChecks
from effcompile.capture.config_reads import ConfigReads, recording
from effcompile.capture.diagnose import capture_error, depends_on_values, own_error, place_of
from effcompile.capture.known_values import Fixed, KnownValues, around_forward
from effcompile.capture.layouts import keep_strides
from effcompile.capture.memory import as_it_was
from effcompile.capture.mends import (
    CACHE_ATTRIBUTES,
    CACHE_MEND,
    MOST_GATHERED,
    evaluating,
    mended,
    named_arguments,
)
from effcompile.capture.state import ModelGuards
from effcompile.capture.verify import second_sizes
from effcompile.core import torch_compat, torch_compat_aot
from effcompile.core.errors import EffcompileError, InputsError, InternalError
from effcompile.core.garbage import uncollected
from effcompile.core.reasons import Because, Reason
from effcompile.core.stages import first_line, stage
from effcompile.core.torch_compat_export import fakes_made_anew
from effcompile.core.torch_compat_functional import functional
from effcompile.core.types import Args, Kwargs, Outputs
from effcompile.ir.export import allowed, grow, refresh_shapes, resized, shapes_for, sizes_of, unmet_guard
from effcompile.ir.program import Program
from effcompile.ops import by_expert

Dynamic = bool | Mapping[str, Any] | None
#: Relative difference of an output that another order of sums may make.
_SAME = 1e-5
#: More axes than inputs have that all layers read, and modules of about ten layers.
_MANY_AXES, _MANY_MODULES = 16, 120


@dataclass(frozen=True, slots=True, kw_only=True)
class _Attempt:
    """One way to export: torch.export's word for each axis of each leaf (`axes`) or the user's
    own (`given`); `knowing` the values of integer inputs or not.
    """

    axes: Sequence[Mapping[int, Any]]
    wanted: Sequence[Mapping[int, bool]]
    given: Mapping[str, Any] | None = None
    knowing: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _Subject:
    """What is captured."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    leaves: Sequence[dynamic_axes.InputLeaf]
    output_names: Sequence[str]
    mends: tuple[Reason, ...]
    still: Collection[str]


def capture(
    model: nn.Module,
    args: Args = (),
    kwargs: Kwargs | None = None,
    *,
    dynamic: Dynamic = None,
    still: Collection[str] = (),
    gathered: int = MOST_GATHERED,
) -> Program:
    """Capture a model for inference. The model is left as it was: training flags, config, attributes.

    Args:
        model: any nn.Module; it is run once with the example inputs.
        args: example positional inputs.
        kwargs: example keyword inputs.
        dynamic: None or True: batch and sequence axes are dynamic wherever the model's code allows it
            (`Program.fixed` says where not, and why); False: all shapes are the example's; a mapping:
            torch.export's `dynamic_shapes`.
        still: names of inputs of which no axis but the batch's is another size in another call.
        gathered: bytes of experts' weights that the graph may copy at once; more, and experts take their
            tokens in groups, which not every backend can.

    Raises:
        InputsError: the model itself raises, or returns NaN or nothing but empty tensors, with these inputs.
        CaptureError: torch.export cannot trace it; names the line, the construct and the fix.
    """
    torch_compat_aot.begin_autograd()
    args, kwargs = pytree.tree_map(_copied, (tuple(args), dict(kwargs or {})))
    call = CallChecks(model.forward, type(model).__name__, args, kwargs)
    read = ConfigReads()
    with evaluating(model), torch.no_grad(), recording(model, read):
        original = _run_eager(model, args, kwargs)
    ready = mended(model, kwargs, args, gathered)
    with ready as mends, named_arguments(model, args, kwargs), recording(model, read):
        outputs = _run_eager(model, args, kwargs) if CACHE_MEND in mends else original
        # many configs ask for a cache that never comes
        cached = len(pytree.tree_leaves(outputs)) != len(pytree.tree_leaves(original))
        subject = _Subject(
            model=model,
            args=args,
            kwargs=kwargs,
            leaves=dynamic_axes.tensor_leaves(model, args, kwargs),
            output_names=dynamic_axes.output_names(outputs),
            mends=tuple(mend for mend in mends if mend != CACHE_MEND or cached),
            still=still,
        )
        with as_it_was(model):
            program = _first_success(subject, dynamic)
    free = CACHE_ATTRIBUTES if CACHE_MEND in mends else ()
    state = ModelGuards(model, training=False, mended=free, configurations=read)
    if state.names_gradients and _minds_gradients(model, args, kwargs, original):
        state = ModelGuards(model, training=False, mended=free, configurations=read, minds_gradients=True)
    return replace(program, call=call, state=state)


def _minds_gradients(model: nn.Module, args: Args, kwargs: Kwargs, original: Outputs) -> bool:
    """Whether the model returns something else where gradients are enabled, which they were not
    at capture.
    """
    with evaluating(model), torch.enable_grad():
        found = _tensors(_run_eager(model, args, kwargs))
    return not all(_alike(a, b) for a, b in zip(found, _tensors(original), strict=True))


def _alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.shape != b.shape or a.is_meta:  # without values the shape is all
        return a.shape == b.shape
    return torch.allclose(a, b, rtol=_SAME, equal_nan=True) if a.is_floating_point() else torch.equal(a, b)


def _copied(leaf: object) -> object:
    """A contiguous copy of a tensor.

    One tensor given twice (attention of x to x), or one that the model holds, too, would become one input of
    the graph; and torch.export loses the dynamic axes of a strided input, such as a slice of a batch of
    tokens.
    """
    if not isinstance(leaf, torch.Tensor) or leaf.layout is not torch.strided:
        return leaf
    return leaf.detach().clone(memory_format=torch.contiguous_format)


def _run_eager(model: nn.Module, args: Args, kwargs: Kwargs) -> Outputs:
    """The model's own output.

    Raises:
        InputsError: it raises, returns no tensor, only empty ones, or NaN.
    """
    try:
        outputs = model(*args, **kwargs)
    except Exception as error:
        accepted = "Give inputs that `model(*args, **kwargs)` accepts."
        raise own_error(error, model, "these inputs", accepted) from error
    for name, tensor in zip(dynamic_axes.output_names(outputs), _tensors(outputs), strict=True):
        if tensor.is_floating_point() and not torch_compat.is_fake(tensor) and bool(tensor.isnan().any()):
            raise InputsError(
                f"{type(model).__name__}: outputs are NaN for the example inputs ({name}, "
                f"{int(tensor.isnan().sum())} of {tensor.numel()} values), so that no result could be "
                "compared with them. Check the weights and the inputs."
            )
    if not _tensors(outputs):
        raise InputsError(
            f"{type(model).__name__} returns no tensor with these inputs, but {type(outputs).__name__}."
        )
    if not any(tensor.numel() for tensor in _tensors(outputs)):
        shapes = ", ".join(str(list(tensor.shape)) for tensor in _tensors(outputs))
        raise InputsError(
            f"{type(model).__name__} returns nothing but empty tensors with these inputs ({shapes}), so that "
            "no result could be compared with them. Give example inputs of at least one element, a batch of "
            "1 or more."
        )
    return outputs


def _first_success(subject: _Subject, dynamic: Dynamic) -> Program:
    """Export with as many dynamic axes as the model allows, down to none."""
    refusals: list[tuple[_Attempt, str]] = []
    error: Exception | None = None
    *_, static = attempts = [*_attempts(subject, dynamic)]
    outcome = cache(partial(_outcome, subject, attempts))
    for number, attempt in enumerate(attempts):
        program = outcome(number)
        if isinstance(program, Exception):
            error = program
            refusals.append((attempt, f"{first_line(error)} ({place_of(error)})"))
            last = outcome(len(attempts) - 1) if depends_on_values(error) else None
            if isinstance(last, Exception) and depends_on_values(last):  # whatever axes are dynamic
                error = last
                break
            continue
        refusal = _only_example(program)
        if refusal is None:
            text = "fixed: {} of {}: fixed at the example's size. {}"
            lines = {
                why: Because.of(text, *_lost(subject, refused, attempt), why)
                for refused, why in reversed(refusals)
            }
            return replace(program, fixed=(*reversed(lines.values()), *program.fixed))
        refusals.append((attempt, f"the graph assumes {refusal}"))
    assert error is not None
    if isinstance(error, EffcompileError):
        raise error
    if depends_on_values(error):
        with contextlib.suppress(Exception):
            return _export(subject, replace(static, knowing=True))
    raise capture_error(error, subject.model) from error


def _outcome(subject: _Subject, attempts: Sequence[_Attempt], number: int) -> Program | Exception:
    """What is exported so, or why it is not."""
    try:
        return _export(subject, attempts[number])
    except InternalError:  # torch.export did its part
        raise
    except Exception as error:
        return error


def _attempts(subject: _Subject, dynamic: Dynamic) -> Iterator[_Attempt]:
    """The user's own shapes, or batch and sequence, then each alone; at last nothing dynamic."""
    static: list[dict[int, Any]] = [{} for _ in subject.leaves]
    if isinstance(dynamic, Mapping):
        named = [_given_axes(dynamic, leaf) for leaf in subject.leaves]
        yield _Attempt(axes=named, wanted=[dict.fromkeys(axes, True) for axes in named], given=dynamic)
    elif dynamic is not False:
        wanted = dynamic_axes.candidates(subject.leaves, subject.still)
        batch = [{axis: expected for axis, expected in axes.items() if axis == 0} for axes in wanted]
        rest = [{axis: expected for axis, expected in axes.items() if axis != 0} for axes in wanted]
        for choice in (wanted, batch, rest) if wanted != batch else (batch,):
            if any(choice):
                yield _Attempt(
                    axes=[dict.fromkeys(axes, torch.export.Dim.AUTO) for axes in choice], wanted=choice
                )
    yield _Attempt(axes=static, wanted=static)


def _given_axes(given: Mapping[str, object], leaf: dynamic_axes.InputLeaf) -> dict[int, Any]:
    """Axes that the user's `dynamic_shapes` name for an input; nested inputs are left to
    torch.export alone.
    """
    spec = given.get(leaf.name)
    pairs = (
        spec.items()
        if isinstance(spec, Mapping)
        else enumerate(spec)
        if isinstance(spec, (tuple, list))
        else ()
    )
    return {
        axis: dim
        for axis, dim in pairs
        if dim is not None and dim is not torch.export.Dim.STATIC and not isinstance(dim, int)
    }


def _lost(subject: _Subject, refused: _Attempt, taken: _Attempt) -> tuple[str, str]:
    """The axes that one attempt would have made dynamic and another does not, and the inputs: `batch and
    seq`, `input_ids, labels`.
    """
    gone = [set(before) - set(after) for before, after in zip(refused.wanted, taken.wanted, strict=True)]
    names = [leaf.name for leaf, axes in zip(subject.leaves, gone, strict=True) if axes]
    axes = set().union(*gone)
    return " and ".join((["batch"] if 0 in axes else []) + (["seq"] if axes - {0} else [])), ", ".join(names)


def _export(subject: _Subject, attempt: _Attempt) -> Program:
    """One export and its clean-up."""
    args, kwargs = grow(subject.args, subject.kwargs, attempt.axes)
    shapes = dict(attempt.given) if attempt.given else shapes_for(subject.model, args, kwargs, attempt.axes)
    given = [(leaf.name, leaf.tensor) for leaf in subject.leaves]
    known = KnownValues(subject.model, given) if attempt.knowing else None
    anew = fakes_made_anew(_seldom_alike(subject.model, attempt))
    with torch_compat.quiet_export(), anew, around_forward(subject.model, known), uncollected():
        exported, module = functional(
            torch.export.export(subject.model, args, kwargs, dynamic_shapes=shapes, strict=False)
        )
    with stage("tidy the captured graph"):
        program = _tidied(subject, attempt, exported, module)
    return program if known is None else _of_values(subject, program, known.fixed())


def _seldom_alike(model: nn.Module, attempt: _Attempt) -> bool:
    """Whether operators see symbolic sizes, and few that were seen before: each layer has axes of its own, as
    a cache has, or there are few layers.

    Measured on Llamas, with torch's cache of them and without: steps of 2 layers 1.5 and 1.1 s, of 24 14.0
    and 11.3; forwards of 2 layers 1.4 and 0.9, of 6 2.5 and 2.2, of 24 6.3 and 8.4.
    """
    axes = sum(len(of) for of in attempt.axes)
    return axes > _MANY_AXES or (axes > 0 and sum(1 for _ in model.modules()) < _MANY_MODULES)


def _of_values(subject: _Subject, program: Program, fixed: Fixed) -> Program:
    """The program of what is fixed of its inputs' values alone."""
    inputs = [
        replace(
            spec,
            values=tuple(leaf.tensor.flatten().tolist()) if leaf.name in fixed.values else None,
            counts=fixed.counts.get(leaf.name, ()),
        )
        for leaf, spec in zip(subject.leaves, program.inputs, strict=True)
    ]
    return replace(program, inputs=tuple(inputs), fixed=(*fixed.said, *program.fixed))


def _tidied(
    subject: _Subject, attempt: _Attempt, exported: torch.export.ExportedProgram, module: fx.GraphModule
) -> Program:
    """What was exported as a Program: its boundary read, its graph cleaned."""
    # without torch's hook that compares sizes with the traced ones
    module = fx.GraphModule(module, module.graph)
    found = dynamic_axes.read_boundary(
        exported, module.graph, subject.leaves, attempt.wanted, subject.output_names
    )
    stuck = [_stuck(leaf, spec.shape) for leaf, spec in zip(subject.leaves, found.inputs, strict=True)]
    if any(stuck):  # the model's code fixed an axis that was 1 and that we had repeated: leave it at 1
        again = [
            {a: d for a, d in axes.items() if a not in gone}
            for axes, gone in zip(attempt.axes, stuck, strict=True)
        ]
        program = _export(subject, replace(attempt, axes=again, given=None))
        return replace(program, fixed=tuple(dict.fromkeys((*found.fixed, *program.fixed))))
    _clean(module, subject)
    module.meta["effcompile_domain"] = found.domain
    specs = [
        {axis: torch.export.Dim.AUTO for axis, dim in enumerate(spec.shape) if isinstance(dim, str)}
        for spec in found.inputs
    ]
    return Program(
        name=type(subject.model).__name__,
        module=module,
        args=subject.args,
        kwargs=subject.kwargs,
        inputs=found.inputs,
        outputs=found.outputs,
        returned=found.returned,
        dynamic_shapes=shapes_for(module, subject.args, subject.kwargs, specs) if any(specs) else None,
        mends=subject.mends,
        fixed=found.fixed,
    )


def _stuck(leaf: dynamic_axes.InputLeaf, shape: Sequence[int | str]) -> set[int]:
    """Axes whose constant size in the graph is not the user's: they had been repeated for tracing."""
    return {axis for axis, dim in enumerate(shape) if isinstance(dim, int) and dim != leaf.tensor.shape[axis]}


def _clean(module: fx.GraphModule, subject: _Subject) -> None:
    cleanup.drop_asserts(module.graph)
    cleanup.share_tied_weights(module)
    refresh_shapes(module, subject.args, subject.kwargs)
    cleanup.refuse_layouts(module.graph)
    cleanup.drop_copies(module.graph)
    cleanup.compute_once(module.graph)
    simplify.simplify(module.graph)
    written_parts.side_by_side(module.graph)
    written_out.as_operators(module.graph)
    by_expert.as_ours(module.graph)
    keep_strides(module.graph)
    cleanup.name_modules(module.graph)
    module.graph.lint()
    module.recompile()


def _only_example(program: Program) -> str | None:
    """The guard that keeps a dynamic graph from every size but the example's, or from that one (a batch of 1,
    traced as 2); None where both are admitted.
    """
    here = sizes_of(program)
    if not here:
        return None
    tried, guards = here, program.module.meta["effcompile_domain"].guards
    if allowed(program, here):
        if second_sizes(program, lambda sizes: allowed(program, sizes)) is not None:
            return None
        tried = {name: size + max(2, size // 2) for name, size in here.items()}
    return unmet_guard(program.module, guards, *resized(program, tried)) or "sizes of the example"


def _tensors(outputs: Outputs) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, torch.Tensor)]
