"""Whether a captured graph holds where dynamic axes are 1 long.

torch.export takes an axis of size 1 for a constant, so that no graph is ever traced there, and its bounds of
2 say nothing about the model. The model itself may raise at one token (InstanceNorm), or go another way (`if
x.shape[1] == 1`): so both are run there. So they are where something else within the graph is 1 long, a text
without its first token: torch's guards exclude these sizes, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations

import torch
from torch import nn
from torch.utils import _pytree as pytree

from effcompile.capture.mends import as_reference
from effcompile.capture.verify import relative_error
from effcompile.core.reasons import Because
from effcompile.core.stages import first_line
from effcompile.ir.export import allowed, domain_of, resized, sizes_of, unmet_guard
from effcompile.ir.program import Program

#: Relative L2 that re-ordered arithmetic may cost, by the size in bytes of the narrowest output.
_LIMITS = {1: 0.3, 2: 5e-2, 4: 1e-4, 8: 1e-4}
#: Axes that may be 1 together; models have two or three in all.
_TOGETHER = 2
#: Sizes up to which a guard is tried: one that excludes larger ones is left alone.
_SMALL = 16


def without_unproven_ones(program: Program, model: nn.Module) -> Program:
    """The program, its domain without the axes of size 1 where its graph is not what the model is.

    A graph that raises there is left alone: it raises at the call.
    """
    domain, fixed = domain_of(program), []
    with as_reference(model), torch.no_grad():
        for axes, tried in list(_ones(program)):
            if any(gone <= axes for gone in domain.not_one):
                continue
            reason = _objection(program, model, tried)
            if reason is not None:
                domain = replace(domain, not_one=(*domain.not_one, axes))
                text = (
                    "fixed: {} of 1 are not taken: {}" if len(axes) > 1 else "fixed: {} of 1 is not taken: {}"
                )
                fixed.append(Because.of(text, " and ".join(sorted(axes)), reason))
    if fixed:
        program.module.meta["effcompile_domain"] = domain
    return replace(program, fixed=(*program.fixed, *fixed)) if fixed else program


def without_needless_guards(program: Program, model: nn.Module) -> Program:
    """The program, its domain without the guards that something is not 1 long where the graph is the model
    all the same (MobileBERT at two tokens).
    """
    domain = domain_of(program)
    with as_reference(model), torch.no_grad():
        needless = {guard for guard in domain.guards if _is_needless(guard, program, model)}
    if needless:
        guards = tuple(guard for guard in domain.guards if guard not in needless)
        program.module.meta["effcompile_domain"] = replace(domain, guards=guards)
    return program


def _is_needless(guard: str, program: Program, model: nn.Module) -> bool:
    """Whether it excludes a few small sizes of one axis alone, at each of which the graph is the model."""
    if not guard.endswith(" != 1") or guard.count(".size()[") != 1:
        return False
    here = sizes_of(program)
    for name in here:
        sizes = [here | {name: size} for size in range(2, _SMALL + 1)]
        broken = [each for each in sizes if unmet_guard(program.module, [guard], *resized(program, each))]
        if broken and broken[-1] is not sizes[-1]:
            return all(_is_model(program, model, each) for each in broken)
    return False


def _is_model(program: Program, model: nn.Module, sizes: dict[str, int]) -> bool:
    args, kwargs = resized(program, sizes)
    try:
        ours, theirs = program.module(*args, **kwargs), model(*args, **kwargs)
    except Exception:  # the one or the other does not take it
        return False
    return relative_error(ours, theirs) <= _limit(ours)


def _ones(program: Program) -> Iterator[tuple[frozenset[str], list[dict[str, int]]]]:
    """Axes to be 1, singly, then together, and sizes at which they are: others as small as the graph admits,
    and as they are. Where they are 1 at the example nothing is to be shown.
    """
    here = sizes_of(program)
    for count in range(1, _TOGETHER + 1):
        for axes in combinations(here, count):
            others = [dict.fromkeys(here, small) for small in (2, 3)] + [here]
            tried = [given | dict.fromkeys(axes, 1) for given in others]
            found = [sizes for sizes in tried if allowed(program, sizes)]
            if found and here not in found:
                yield frozenset(axes), found


def _objection(program: Program, model: nn.Module, tried: list[dict[str, int]]) -> str | None:
    """Why the graph is not the model at the first of these sizes that the model itself takes, or at any;
    None.

    A text that was cut short may have lost what the model looks for, its image.
    """
    raised = None
    for sizes in tried:
        args, kwargs = resized(program, sizes)
        try:
            ours = program.module(*args, **kwargs)
        except Exception:
            return None
        try:
            theirs = model(*args, **kwargs)
        except Exception as error:
            raised = raised or f"the model itself raises there: {first_line(error)}"
            continue
        apart = relative_error(ours, theirs)
        return (
            f"the model goes another way there (relative error {apart:.1e})" if apart > _limit(ours) else None
        )
    return raised


def _limit(outputs: object) -> float:
    floats = [t for t in pytree.tree_leaves(outputs) if isinstance(t, torch.Tensor) and t.is_floating_point()]
    return max((_LIMITS[t.element_size()] for t in floats), default=_LIMITS[8])
