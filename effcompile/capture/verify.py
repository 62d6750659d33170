"""Proof that a captured graph computes what the model does: at the example, at a second shape, with a padded
mask.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from effcompile.capture.diagnose import place_of
from effcompile.capture.mends import as_reference
from effcompile.core.errors import InputsError
from effcompile.core.findings import Padding
from effcompile.core.reasons import Because
from effcompile.core.stages import first_line
from effcompile.core.types import Args, Forward, Inputs, Kwargs, Outputs
from effcompile.ir.export import allowed, resized, run_mended, sizes_of
from effcompile.ir.figures import Check
from effcompile.ir.program import Program, TensorSpec

#: Relative L2 that re-ordered fp32 arithmetic may cost.
LIMIT = 1e-5

#: Elements that are compared at a time: in float64, several times over, they take some 2 MiB.
_PIECE = 1 << 15
#: Sums of squares in fp32 from which on what is rounded to 0 is nothing beside them.
_DOUBTFUL = 1e-12

#: How another length is made from the example's, in the order of trial.
_STEPS: tuple[Callable[[int], int], ...] = (
    # long ones are cut: comparing them costs seconds
    lambda size: size + max(size // 2, 2) if size < 64 else size // 2 + 1,
    lambda size: size * 2,
    lambda size: size // 2 if size >= 4 else size + 1,
    lambda size: size + 1,
    lambda size: size + 8,
)

Variant = tuple[str, Args, Kwargs]
Sizes = dict[str, int]

#: Graph → the sizes at which it ran: other values of these sizes run, too.
_RAN = WeakKeyDictionary[nn.Module, list[Sizes]]()


def verify_capture(program: Program, model: nn.Module) -> list[Check]:
    """Compare `program.module` with the original model on every variant of the example inputs; errors are
    relative L2.

    A padded mask must change the output of both: the note gives by how much, or that the model itself ignores
    it.

    Raises:
        InputsError: the model itself raises with the example inputs.
    """
    accepted = list[Sizes]()
    with as_reference(model):
        wanted = _guarded(lambda args, kwargs: model(*args, **kwargs))
        found = _guarded(partial(run_mended, program))
        checks, before = list[Check](), None
        for variant in _variants(program, _accepts(program, model, accepted)):
            theirs = wanted(*variant[1:])
            why_not_alike = partial(_why_not_alike, model, wanted)
            checks.append(_check(program, variant, theirs, before, wanted, found, why_not_alike))
            before = theirs
    if all(check.passed for check in checks):
        _RAN.setdefault(program.module, []).extend(accepted)
    return checks


def variants(program: Program, right: Collection[str] = ()) -> list[Variant]:
    """Inputs to verify with, as (name, args, kwargs): the example, other sizes, a padded mask; values are the
    example's. `right`: masks that are padded on the right, by name, and not on the left.

    Needs no model: a second shape is one that the captured graph admits and runs at.
    """
    with torch.no_grad():
        return _variants(program, runs_at(program), right)


def runs_at(program: Program) -> Callable[[Sizes], bool]:
    """Whether the captured graph runs with the example's inputs at the given sizes."""
    return _accepts(program, program.module)


def relative_error(found: object, wanted: object) -> float:
    """Largest ‖y − y₀‖ / ‖y₀‖ over the tensors of two outputs; inf where they differ in number, dtype, shape,
    NaN or infinities.
    """
    ours, theirs = _tensors(found), _tensors(wanted)
    if len(ours) != len(theirs):
        return math.inf
    return max((_relative(a, b) for a, b in zip(ours, theirs, strict=True)), default=0.0)


def second_sizes(
    program: Program, runs: Callable[[Sizes], bool], *, batch_only: bool = False
) -> Sizes | None:
    """Other sizes for all dynamic axes at once (or the batch alone) that the graph admits and that `runs`;
    None without any.

    Short sequences are made longer (which also catches constants baked at the example's size), long ones
    shorter.
    """
    here = sizes_of(program)
    batch = {"batch": here["batch"] + 1} if "batch" in here else {}
    others = {name: size for name, size in here.items() if name != "batch" and not batch_only}
    for step in _STEPS if others else _STEPS[:1]:
        sizes = batch | {name: step(size) for name, size in others.items()}
        if sizes and allowed(program, sizes) and runs(sizes):
            return sizes
    return None


def _variants(program: Program, runs: Callable[[Sizes], bool], right: Collection[str] = ()) -> list[Variant]:
    here = sizes_of(program)
    found: list[Variant] = [("example", program.args, dict(program.kwargs))]
    base, base_sizes = found[0], here
    sizes = second_sizes(program, runs) or second_sizes(program, runs, batch_only=True)
    if sizes is not None:
        base_sizes = here | sizes
        base = (f"second shape {'×'.join(map(str, base_sizes.values()))}", *resized(program, base_sizes))
        found.append(base)
    padded = _padded(program, base, right)
    return found if padded is None else [*found, ("padded mask " + _shape_text(base_sizes, program), *padded)]


def _shape_text(sizes: Sizes, program: Program) -> str:
    return "×".join(map(str, sizes.values())) or "×".join(map(str, _mask_shape(program)))


def _mask_shape(program: Program) -> tuple[int, ...]:
    return next(
        (tuple(t.shape) for s, t in zip(program.inputs, program.flat_inputs(), strict=True) if is_mask(s, t)),
        (),
    )


def _padded(program: Program, base: Variant, right: Collection[str]) -> Inputs | None:
    """The inputs with the first quarter of the tokens of the first of three rows masked out, of the second
    all but one, and so on; None where no input is a padding mask.

    On the left, unless the mask is one of `right`: the right end of a causal model's output would not see a
    pad on its right. A row keeps at least one token. What attends to one token alone has its value, where
    others have the mean of many: ranges that hold there hold for short texts beside long ones.
    """
    specs = iter(program.inputs)
    changed = False

    def pad(leaf: object) -> object:
        nonlocal changed
        if not isinstance(leaf, torch.Tensor):
            return leaf
        spec = next(specs)
        if not is_mask(spec, leaf) or spec.values is not None:
            return leaf
        changed = True
        mask, token = leaf.clone(), token_value(spec, leaf)
        for at, row in enumerate(mask):
            tokens = (row == token).nonzero().flatten()
            most = len(tokens) - 1
            hidden = min((max(1, len(tokens) // 4), most, 0)[at % 3], most)
            row[tokens[-hidden:] if hidden and spec.name in right else tokens[:hidden]] = not token
        return mask

    args, kwargs = pytree.tree_map(pad, base[1:])
    return (args, kwargs) if changed else None


def token_value(spec: TensorSpec, mask: torch.Tensor) -> bool:
    """What stands for a token in a mask: its only value, else 1; in a `padding_mask`, which marks the pads,
    0.
    """
    values = mask.unique()
    return bool(values[0]) if len(values) == 1 else not spec.name.endswith("padding_mask")


def is_mask(spec: TensorSpec, tensor: torch.Tensor) -> bool:
    """A 2-D padding mask of zeros and ones, by its name and values."""
    named = spec.name.endswith(("attention_mask", "padding_mask")) or spec.name == "mask"
    if (
        not named
        or tensor.ndim != 2
        or tensor.shape[1] < 2
        or not bool(((tensor == 0) | (tensor == 1)).all())
    ):
        return False
    return tensor.shape[0] != tensor.shape[1] or spec.name != "mask" or not tensor.is_floating_point()


def _check(
    program: Program,
    variant: Variant,
    theirs: object,
    before: object,
    wanted: Callable[..., object],
    found: Callable[..., object],
    why_not_alike: Callable[[Args, Kwargs], str],
) -> Check:
    """`theirs`: what the model returns. `before`: for the variant before, from which a padded one is made."""
    name, args, kwargs = variant
    ours = found(args, kwargs)
    if isinstance(theirs, Exception):
        if name == "example":
            raise InputsError(
                f"{program.name} itself raises with the example inputs: {first_line(theirs)}"
            ) from theirs
        return Check(
            name=name,
            error=0.0,
            limit=LIMIT,
            note=Because("not compared: the model itself raises: {name}", (first_line(theirs),)),
        )
    if isinstance(ours, Exception):
        return Check(
            name=name,
            error=math.inf,
            limit=LIMIT,
            note=Because("the captured graph raises: {name}", (first_line(ours),)),
        )
    check = Check(name=name, error=relative_error(ours, theirs), limit=LIMIT)
    if not check.passed and relative_error(wanted(args, kwargs), theirs) > LIMIT:
        return replace(
            check,
            note=Because(
                "the model itself returns something else at each call: {name}",
                (why_not_alike(args, kwargs),),
            ),
        )
    return _with_sensitivity(check, theirs, before) if name.startswith("padded") else check


class _DrawError(Exception):
    """Raised in the place of a random operator."""


class _NoDraws(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise _DrawError(str(func))
        return func(*args, **(kwargs or {}))


def _why_not_alike(model: nn.Module, wanted: Callable[..., object], args: Args, kwargs: Kwargs) -> str:
    """The first operator of the model that draws random numbers, and the line it comes from, or the buffers
    that it writes.
    """
    before = {name: buffer._version for name, buffer in model.named_buffers()}
    with _NoDraws():
        found = wanted(args, kwargs)
    if isinstance(found, _DrawError):
        return f"{found} draws random numbers ({place_of(found)})"
    written = [name for name, buffer in model.named_buffers() if buffer._version != before.get(name)]
    if written:
        return f"its forward writes {', '.join(written[:3])}, in evaluation mode, too"
    return "none of its operators is known to be random"


def _with_sensitivity(check: Check, theirs: object, unmasked: object) -> Check:
    """State how much the pad changes the model's own output: an error of 0 proves nothing where that is 0."""
    effect = math.inf if isinstance(unmasked, Exception) else relative_error(theirs, unmasked)
    return replace(
        check,
        note=Padding(effect=effect)
        if math.isfinite(effect)
        else Because("the model itself raises without the padding"),
    )


def _relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        return math.inf
    apart = size = 0.0
    for ours, theirs in zip(*(t.detach().reshape(-1).split(_PIECE) for t in (found, wanted)), strict=True):
        if ours.dtype is torch.float32:  # whose differences are as exact as they are
            moved, held = float((gap := ours - theirs).dot(gap)), float(theirs.dot(theirs))
            if _DOUBTFUL < held < math.inf and moved < math.inf:  # nothing is too small or too large for it
                apart, size = apart + moved, size + held
                continue
        a, b = ours.to(torch.float64), theirs.to(torch.float64)
        moved, held = float((a - b).square_().sum()), float(b.square().sum())
        if not math.isfinite(moved + held):
            same = (a == b) | (a.isnan() & b.isnan())  # equal infinities and NaNs carry no error
            if not bool((same | (a.isfinite() & b.isfinite())).all()):
                return math.inf
            moved = float(torch.where(same, 0.0, a - b).square().sum())
            held = float(torch.where(b.isfinite(), b, 0.0).square().sum())
        apart += moved
        size += held
    return 0.0 if apart == 0 else math.sqrt(apart / size) if size > 0 else math.inf


def _guarded(call: Callable[..., object]) -> Forward:
    """The call's result, or what it raised."""

    def run(args: Args, kwargs: Kwargs) -> Outputs:
        try:
            return call(args, kwargs)
        except Exception as error:
            return error

    return run


def _accepts(
    program: Program, module: nn.Module, accepted: list[Sizes] | None = None
) -> Callable[[Sizes], bool]:
    """Whether `module` runs with the program's inputs at the given sizes, which are then among
    `accepted`.
    """
    ran = _RAN.setdefault(module, []) if accepted is None else accepted

    def runs(sizes: Sizes) -> bool:
        if (whole := sizes_of(program) | sizes) in ran:
            return True
        args, kwargs = resized(program, sizes)
        try:
            module(*args, **kwargs)
        except Exception:
            return False
        ran.append(whole)
        return True

    return runs


def _tensors(outputs: Outputs) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, torch.Tensor)]
