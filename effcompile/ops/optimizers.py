"""Forms of an optimizer: the user's own, the same with 8-bit states, or another that keeps less.

What cannot be changed is declined.

A form is built for any tensors (parameters, pieces of them, copies on the host, tensors without data) with
the options of the user's parameter group, which are read anew at every step: learning rate schedules work as
usual.
"""

from __future__ import annotations

import copy
import inspect
from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch.optim import Optimizer

from effcompile.core.errors import InputsError, UsageError
from effcompile.core.reasons import Unsupported
from effcompile.ops.lion8 import Lion8bit
from effcompile.ops.replaced_optimizer import has_hooks

Group = Mapping[str, Any]

GIVEN, EIGHT_BIT, LION8 = "given", "8-bit", "lion8"
#: Where a group of the user's has what a form of another class counts in its own: not among its own options.
COUNTED = "counted"
#: Optimizers that the user may allow instead, ours or pytorch-optimizer's → (class, factor of the learning
#: rate, of the weight decay). Lion: learning rate 3–10 times smaller, decay as much larger than AdamW's (Chen
#: et al. 2023, arXiv 2302.06675, §5).
CHANGES: Mapping[str, tuple[str, float, float]] = {
    "lion": ("Lion", 1 / 3, 3.0),
    "lamb": ("Lamb", 1.0, 1.0),
    "lars": ("LARS", 1.0, 1.0),
    LION8: ("Lion8bit", 1 / 3, 3.0),
}

#: torch.optim's classes with one kernel for all of a parameter's update.
_FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)
#: Those that look at several parameters at once, or run the model again.
_NOT_SINGLE = ("LBFGS", "SparseAdam")
_SINGLE = ("Lion", "LARS")
#: Options of torch.optim's that no other form has: which way an update goes, and how.
_GIVEN_ALONE = ("maximize", "capturable", "differentiable")
#: 8-bit states in pieces of so many elements on a CPU, where torchao's update is not compiled: its working
#: memory is 60 B/element.
CPU_PIECE = 1 << 18


@dataclass(frozen=True, slots=True)
class StatesForm:
    """`name`: GIVEN, EIGHT_BIT or a key of CHANGES.

    `fused`: one kernel per parameter. `piece`: elements updated at once, 0 for all.
    """

    name: str = GIVEN
    fused: bool = False
    piece: int = 0


def given_form(optimizer: Optimizer, device: str) -> StatesForm:
    """The user's optimizer; by torch's fused kernels where it has them and the user has not chosen others."""
    plain = all(
        not group.get(key)
        for group in optimizer.param_groups
        for key in ("foreach", "capturable", "differentiable")
    )
    chosen = any(group.get("fused") is False for group in optimizer.param_groups)
    able = (
        type(optimizer) in _FUSED
        and device in ("cpu", "cuda")
        and not (device == "cpu" and _is_narrow_sgd(optimizer))
    )
    return StatesForm(fused=able and plain and not chosen and not optimizer.state)


def _is_narrow_sgd(optimizer: Optimizer) -> bool:
    """SGD of 16-bit parameters, which torch's fused CPU kernel updates wrongly (2.13.0: off by as much as the
    update itself).
    """
    narrow = (torch.bfloat16, torch.float16)
    return type(optimizer) is torch.optim.SGD and any(
        p.dtype in narrow for group in optimizer.param_groups for p in group["params"]
    )


def check(optimizer: object) -> Optimizer:
    """The optimizer, if its memory can be planned.

    Raises:
        UsageError: no torch optimizer, or one whose step runs the model again.
    """
    if not isinstance(optimizer, Optimizer):
        raise UsageError(
            f"optimizer is a {type(optimizer).__name__}. Give a torch.optim.Optimizer of the model's "
            "parameters, or a function optimizer(parameters) that returns one."
        )
    if needs_closure(optimizer):
        raise UsageError(
            f"{type(optimizer).__name__}.step needs a closure, which runs the model several times within one "
            "step: its memory cannot be planned. Leave the optimizer out, and give `memory` without what it "
            "takes."
        )
    return optimizer


def needs_closure(optimizer: Optimizer) -> bool:
    """Whether `step` has a required argument."""
    taken = inspect.signature(type(optimizer).step).parameters.values()
    return any(
        p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) for p in list(taken)[1:]
    )


def one_by_one(optimizer: Optimizer) -> Unsupported | None:
    """None where each parameter is updated by itself, else why its update cannot be taken apart."""
    kind = type(optimizer)
    package = kind.__module__.partition(".")[0]
    single = (
        (package == "torch" and kind.__name__ not in _NOT_SINGLE)
        or package == "torchao"
        or kind.__name__ in _SINGLE
    )
    if not single:
        return Unsupported.of("{} is not known to update each parameter by itself", kind.__name__)
    if optimizer.state:
        return Unsupported.of("this {} has states already; plan before its first step", kind.__name__)
    hooked = has_hooks(optimizer)
    return Unsupported.of("this {} has hooks around its step", kind.__name__) if hooked else None


def declined(name: str, optimizer: Optimizer) -> Unsupported | None:
    """None where the optimizer may take the form, else the reason."""
    kind = type(optimizer)
    if (reason := one_by_one(optimizer)) is not None:
        return reason
    if name != GIVEN and (option := _unlike(name, kind, optimizer.param_groups)) is not None:
        form = "the 8-bit one" if name == EIGHT_BIT else f"the one that {name!r} names"
        return Unsupported.of("the option {} of this {} is not in {}", option, kind.__name__, form)
    if name == EIGHT_BIT:
        if kind not in (torch.optim.Adam, torch.optim.AdamW):
            return Unsupported.of("there is no 8-bit {}: Adam and AdamW have one", kind.__name__)
        return None if find_spec("torchao") else Unsupported("it needs torchao: pip install torchao")
    if name in CHANGES and name != LION8:
        return (
            None
            if find_spec("pytorch_optimizer")
            else Unsupported("it needs pytorch-optimizer: pip install pytorch-optimizer")
        )
    return None


def _unlike(name: str, kind: type[Optimizer], groups: Sequence[Group]) -> str | None:
    """An option of a group that the form would do without: maximize=True, it would go the other way."""
    decoupled = issubclass(kind, torch.optim.AdamW)
    for group in groups:
        for key in _GIVEN_ALONE:
            if group.get(key):
                return f"{key}={group[key]}"
        if name == EIGHT_BIT and group.get("decoupled_weight_decay", decoupled) is not decoupled:
            return f"decoupled_weight_decay={not decoupled}"
    return None


def check_groups(form: StatesForm, given: Optimizer, groups: Sequence[Group]) -> None:
    """Make sure that the form can still do what the groups say.

    Raises:
        InputsError: an option was set since it was planned.
    """
    if form.name != GIVEN and (option := _unlike(form.name, type(given), groups)) is not None:
        raise InputsError(
            f"{option} was set on a group of the planned optimizer, whose form {form.name!r} has no such "
            "option. Take it back, or plan again with it."
        )


def build(form: StatesForm, optimizer: Optimizer, group: Group, tensors: Sequence[torch.Tensor]) -> Optimizer:
    """An optimizer of this form with the group's options, for these tensors alone, without states."""
    if form.name == GIVEN:
        return _rebuilt(optimizer, options(form, group), tensors)
    if form.name == LION8:
        return Lion8bit(tensors, **options(form, group))
    module = import_module("torchao.optim" if form.name == EIGHT_BIT else "pytorch_optimizer")
    name = f"{type(optimizer).__name__}8bit" if form.name == EIGHT_BIT else CHANGES[form.name][0]
    made: Optimizer = getattr(module, name)(list(tensors), **options(form, group))
    return made


def options(form: StatesForm, group: Group) -> dict[str, Any]:
    """What the user's group says, in the form's own options."""
    if form.name == GIVEN:
        kept = {key: value for key, value in group.items() if key not in ("params", COUNTED)}
        return {**kept, "fused": True} if form.fused else kept
    if form.name == EIGHT_BIT:
        return {key: group[key] for key in ("lr", "betas", "eps", "weight_decay", "amsgrad")}
    _, rate, decay = CHANGES[form.name]
    found = {"lr": group["lr"] * rate, "weight_decay": group.get("weight_decay", 0.0) * decay}
    return (
        {**found, "betas": group["betas"], "eps": group["eps"]}
        if form.name == "lamb" and "betas" in group
        else found
    )


def update_options(inner: Optimizer, form: StatesForm, group: Group) -> None:
    """The group's present options and counters, in place (torchao keeps its learning rate in a tensor)."""
    mine = inner.param_groups[0]
    for key, value in (options(form, group) | group.get(COUNTED, {})).items():
        if isinstance(mine.get(key), torch.Tensor) and not isinstance(value, torch.Tensor):
            mine[key].fill_(value)
        else:
            mine[key] = value


def numbers_of(inner: Optimizer) -> dict[str, float]:
    """What may be a counter in its group."""
    return {key: value for key, value in inner.param_groups[0].items() if type(value) in (int, float)}


def keep_counted(form: StatesForm, group: dict[str, Any], counted: Mapping[str, float]) -> None:
    """Write what a step has counted into the user's group, which the next one reads and a state_dict has."""
    if counted and form.name == GIVEN:
        group.update(counted)
    elif counted:
        group[COUNTED] = {**group.get(COUNTED, {}), **counted}


def pieces(form: StatesForm, tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensor, or flat views of it that are updated one after the other."""
    count = tensor.numel()
    if not form.piece or count <= form.piece or not tensor.is_contiguous():
        return [tensor]
    flat = tensor.view(-1)
    return [flat[start : start + form.piece] for start in range(0, count, form.piece)]


#: What belongs to one optimizer: also its `step`, where a scheduler has wrapped it.
_BOUND = ("state", "param_groups", "step")


def _rebuilt(
    optimizer: Optimizer, chosen: Mapping[str, object], tensors: Sequence[torch.Tensor]
) -> Optimizer:
    """The optimizer's class and attributes with other tensors and no states; works for classes whose
    arguments we do not know. Tensors among its options, too, are others: a step may write into them.
    """
    made: Optimizer = type(optimizer).__new__(type(optimizer))
    own = {
        k: _own(v) for k, v in vars(optimizer).items() if k not in _BOUND and not k.startswith("_optimizer_")
    }
    own |= {k: OrderedDict() for k in vars(optimizer) if k.startswith("_optimizer_")}
    group = {k: _own(v) for k, v in chosen.items()}
    made.__dict__.update(own, state=defaultdict(dict), param_groups=[{**group, "params": list(tensors)}])
    return made


def _own(value: object) -> object:
    """A copy that a step may write into."""
    return value.detach().clone() if isinstance(value, torch.Tensor) else copy.copy(value)
