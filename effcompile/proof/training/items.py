"""Whether the model's loss follows `num_items_in_batch`, and the planned one can.

Read off the graph, and checked by running the model.
"""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import fx, nn
from torch.utils._pytree import tree_leaves, tree_map

from effcompile.backends.torch.boxed import run_graph
from effcompile.backends.torch.items import ITEMS, Items
from effcompile.capture.memory import as_it_was
from effcompile.core.goal import EXACT_TOLERANCE
from effcompile.core.reasons import Because, Reason
from effcompile.core.types import Kwargs
from effcompile.ir.step import Step
from effcompile.passes.training.items import labels_counted
from effcompile.proof.training import verify
from effcompile.runtime.training import TrainingExecutable
from effcompile.search.training.work import Work

#: No number of labels: a mean over as many as are said is the plain mean.
_PROBE = 3.5
#: Positions of one example that a model is asked with where its batch has many more: what divides a loss
#: is the same there.
_WINDOW, _MANY = 16, 256
_IGNORED = -100  # what HuggingFace's losses leave out
NOT_TAKEN = Because(
    "{name} is not taken: the loss is not one mean over labels. With gradient accumulation HuggingFace's "
    "Trainer then averages the batches' means, where the model alone would weigh every label alike. Plan "
    "with {name} among the inputs to have it taken.",
    (ITEMS, ITEMS),
)


def items_of(
    work: Work, step: Step, loss: torch.Tensor | None = None
) -> tuple[Items | None, tuple[Reason, ...]]:
    """How the planned loss takes `num_items_in_batch`, and a note where the model itself would take it and
    the plan does not.

    loss: the model's own as it was verified; where it leaves the question open, or is None, it is run again.
    """
    if work.loss is not None or ITEMS in work.kwargs or not accepts_items(work.model):
        return None, ()
    counted = labels_counted(step)
    if (part := _window(work, step, counted)) is not None:
        with as_it_was(work.model):  # what it notes of other sizes is not what was captured
            plain, probed = (_losses(part.work, more) for more in ({}, {ITEMS: torch.tensor(_PROBE)}))
        if plain is not None and probed is not None and float(plain):
            if _near(probed, plain.double()):
                return Items(leaves=step.leaves, counted=None), ()
            if _near(probed, plain.double() * part.labels / _PROBE):
                return Items(leaves=step.leaves, counted=counted), ()
    if (probed := _losses(work, {ITEMS: torch.tensor(_PROBE)})) is None:
        return None, ()
    count = None if counted is None else float(run_graph(counted, step.leaves(work.args, work.kwargs))[0])
    for again in (False, True):
        plain = _losses(work, {}) if again else loss
        if plain is not None and _near(probed, plain.double()):
            return Items(leaves=step.leaves, counted=None), ()
        if plain is not None and count is not None and _near(probed, plain.double() * count / _PROBE):
            return Items(leaves=step.leaves, counted=counted), ()
    return None, (NOT_TAKEN,) if plain is not None else ()


class _Window(NamedTuple):
    """The request with the first positions of one example for inputs, and how many labels count there by the
    step's graph.
    """

    work: Work
    labels: float


def _window(work: Work, step: Step, counted: fx.Graph | None) -> _Window | None:
    """The example whose labels count earliest, up to there; None where inputs are few, or are not all of the
    labels' batch and length.

    The graph is of the whole batch's sizes: it counts labels of which all but the window's are left out.
    """
    read = [] if counted is None else [bool(node.users) for node in counted.find_nodes(op="placeholder")]
    if counted is None or sum(read) != 1:
        return None
    leaves, given = step.leaves(work.args, work.kwargs), (work.args, dict(work.kwargs))
    labels = leaves[read.index(True)]
    tensors = [leaf for leaf in tree_leaves(given) if isinstance(leaf, torch.Tensor)]
    if labels.dim() != 2 or labels.numel() < _MANY or any(t.shape[:2] != labels.shape for t in tensors):
        return None
    firsts = (labels != _IGNORED).int().argmax(dim=1).tolist()
    row = min(range(len(firsts)), key=lambda row: (labels[row, firsts[row]] == _IGNORED, firsts[row]))
    at = (slice(row, row + 1), slice(0, firsts[row] + _WINDOW))
    shown = torch.full_like(labels, _IGNORED)
    shown[at] = labels[at]
    leaves[read.index(True)] = shown
    count = float(run_graph(counted, leaves)[0])
    args, kwargs = tree_map(lambda leaf: leaf[at] if isinstance(leaf, torch.Tensor) else leaf, given)
    return _Window(replace(work, args=args, kwargs=kwargs), count) if count else None


def _near(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Whether a loss is another one but for rounding: with gradients attention may be another kernel."""
    allowed = max(EXACT_TOLERANCE, 4 * torch.finfo(found.dtype).eps)
    return float((found.double() - wanted).abs()) <= allowed * float(wanted.abs())


def accepts_items(model: nn.Module) -> bool:
    """Whether HuggingFace's Trainer would give the model `num_items_in_batch`: its own rule."""
    if not hasattr(model, "config"):
        return False
    base = getattr(model, "get_base_model", None)  # of peft
    inner = base() if callable(base) else model
    if hasattr(inner, "accepts_loss_kwargs"):
        return bool(inner.accepts_loss_kwargs)
    return any(
        p.kind is inspect.Parameter.VAR_KEYWORD for p in inspect.signature(inner.forward).parameters.values()
    )


def _losses(work: Work, more: Kwargs) -> torch.Tensor | None:
    """The original's loss, with more keyword arguments; None where it does not take them."""
    probing = replace(work, kwargs={**work.kwargs, **more})
    with verify.restored(work.model), torch.no_grad():
        torch.manual_seed(verify.SEED)
        try:
            return probing.eager_loss().detach()
        except Exception:  # a model's own checks of keywords and lengths raise what they like
            return None


def taking_items(
    result: TrainingExecutable, work: Work, step: Step, loss: torch.Tensor | None
) -> TrainingExecutable:
    """The planned model, which takes `num_items_in_batch` where it can, and says where it cannot.

    `step`: as captured. `loss`: see `items_of`.
    """
    result.runner.items, notes = items_of(work, step, loss)
    result.plan = replace(result.plan, notes=tuple(dict.fromkeys((*result.plan.notes, *notes))))
    if hasattr(work.model, "config"):
        setattr(result, "accepts_loss_kwargs", result.runner.takes_items)  # noqa: B010
    return result
