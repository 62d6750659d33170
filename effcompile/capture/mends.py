"""Known fixes without which a model cannot be captured: applied for the time of the capture, undone after,
reported.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from effcompile.core import torch_compat
from effcompile.core.reasons import Because, Reason
from effcompile.core.types import Args, Kwargs, Outputs

#: What says whether a call returns a cache: Trainer and generate() set it, and a graph without a cache is
#: right whatever it says.
CACHE_ATTRIBUTES = ("use_cache",)
CACHE_MEND = Because("use_cache=False: the output has no key/value cache, which torch.export cannot return")

#: What a mend did (None: nothing), and how to undo it.
Mend = tuple[Reason | None, list[Callable[[], object]]]
_NOTHING: Mend = (None, [])
_EXPERTS = "_experts_implementation_internal"
#: Bytes of experts' weights that a captured graph may copy at once.
MOST_GATHERED = 1 << 30


@contextlib.contextmanager
def as_reference(model: nn.Module) -> Iterator[tuple[Reason, ...]]:
    """The original model as results are compared with: eval mode, no gradient, no key/value cache in the
    output.
    """
    with contextlib.ExitStack() as stack, torch.no_grad():
        stack.enter_context(evaluating(model))
        said = _apply(stack, _without_cache(model))
        if _has_torch_transformer(model):
            stack.enter_context(torch_compat.traceable_transformer())
            said += (
                Because(
                    "torch.nn.Transformer's fused inference path is off: captured as plain operators, "
                    "masks applied as given"
                ),
            )
        yield said


@contextlib.contextmanager
def mended(
    model: nn.Module, kwargs: Kwargs, args: Args = (), gathered: int = MOST_GATHERED
) -> Iterator[tuple[Reason, ...]]:
    """The model as it is captured with these inputs: `as_reference` and what only tracing needs.

    `gathered`: see `capture`. Yields the mends.
    """
    with contextlib.ExitStack() as stack:
        said = stack.enter_context(as_reference(model))
        said += _apply(stack, _merged_adapters(model))
        yield (
            said
            + _apply(stack, _loss_type(model, kwargs))
            + _apply(stack, _batched_experts(model, (args, kwargs), gathered))
        )


def _apply(stack: contextlib.ExitStack, mend: Mend) -> tuple[Reason, ...]:
    said, undos = mend
    for undo in undos:
        stack.callback(undo)
    return (said,) if said else ()


@contextlib.contextmanager
def named_arguments(model: nn.Module, args: Args, kwargs: Kwargs) -> Iterator[None]:
    """`forward(**kwargs)` with its keywords named in the signature: torch.export loses dynamic axes inside
    `**kwargs`.
    """
    signature = inspect.signature(model.forward)
    try:
        bound = signature.bind(*args, **kwargs).arguments
    except TypeError:  # the model's own error message is the better one
        bound = {}
    rest = [p for p in signature.parameters.values() if p.kind is p.VAR_KEYWORD and p.name in bound]
    if not rest:
        yield
        return
    extra = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in bound[rest[0].name]]
    original = model.forward

    def forward(*given: object, **named: object) -> Outputs:
        return original(*given, **named)

    named = signature.replace(
        parameters=[*(p for p in signature.parameters.values() if p not in rest), *extra]
    )
    with another_forward(model, forward, named):
        yield


@contextlib.contextmanager
def another_forward(
    model: nn.Module, forward: Callable[..., Outputs], signature: inspect.Signature
) -> Iterator[None]:
    """The model with this forward, which is seen to take what the signature says."""
    was = vars(model).get("forward")
    vars(forward)["__signature__"] = signature
    vars(model)["forward"] = forward
    try:
        yield
    finally:
        del vars(model)["forward"]
        if was is not None:
            vars(model)["forward"] = was


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode; each module gets its own flag back.

    What torch.export made has no modes: it is what it is.
    """
    flags = [(module, module.training) for module in model.modules()]
    with contextlib.suppress(NotImplementedError):
        model.eval()
    try:
        yield
    finally:
        for module, training in flags:
            module.training = training


def _merged_adapters(model: nn.Module) -> Mend:
    """peft's adapters (LoRA and those like it) merged into the weights that they change: no operators of
    theirs are left.

    Each layer is replaced, for the time of the capture, by a copy of its base layer with the merged weight.
    """
    undos: list[Callable[[], object]] = []
    for parent in list(model.modules()):
        for name, layer in list(parent._modules.items()):
            merged = _merged(layer)
            if merged is not None:
                parent._modules[name] = merged
                undos.append(partial(parent._modules.__setitem__, name, layer))
    if not undos:
        return _NOTHING
    return Because(
        "adapters merged into the weights of {} layers: the graph has the base model's operators",
        (len(undos),),
    ), undos


def _merged(layer: nn.Module | None) -> nn.Module | None:
    """A copy of a tuner layer's base layer with its active adapters in the weight; None for another layer, or
    where peft cannot.
    """
    if layer is None or not all(
        hasattr(layer, name) for name in ("merge", "get_base_layer", "active_adapters", "disable_adapters")
    ):
        return None
    if layer.disable_adapters:
        return None
    twin: Any = copy.deepcopy(layer)
    try:
        with torch.no_grad():
            if not twin.merged:
                twin.merge(safe_merge=True)
    except Exception:  # quantised or otherwise special bases: captured as they are
        return None
    base = twin.get_base_layer()
    return base if twin.merged and isinstance(base, nn.Module) else None


def _configs(model: nn.Module) -> list[Any]:
    """The distinct HF config objects in a model."""
    found = (getattr(module, "config", None) for module in model.modules())
    return list({id(config): config for config in found if config is not None}.values())


def _without_cache(model: nn.Module) -> Mend:
    caching = [config for config in _configs(model) if getattr(config, "use_cache", None) is True]
    if not caching:
        return _NOTHING
    for config in caching:
        config.use_cache = False
    return CACHE_MEND, [partial(setattr, config, "use_cache", True) for config in caching]


def _has_torch_transformer(model: nn.Module) -> bool:
    kinds = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer, nn.MultiheadAttention)
    return any(isinstance(module, kinds) for module in model.modules())


def _loss_type(model: nn.Module, kwargs: Kwargs) -> Mend:
    """HF warns through a logger where a class has no loss type; name the loss that it falls back to."""
    if kwargs.get("labels") is None or getattr(model, "loss_type", "") is not None:
        return _NOTHING
    vars(model)["loss_type"] = "ForCausalLM"
    said = Because("loss_type='ForCausalLM': what HuggingFace falls back to for this class")
    return said, [partial(setattr, model, "loss_type", None)]


def _batched_experts(model: nn.Module, inputs: object = (), most: int = MOST_GATHERED) -> Mend:
    """MoE experts as batched matmuls: their other forms loop over data or exist in no exchange format.

    These copy an expert's weights for every token that it is chosen for; where that is more than `most`
    bytes, experts take their tokens in groups.
    """
    experts = [module for module in model.modules() if "Experts" in type(module).__name__]
    if not experts:
        return _NOTHING
    gathered = _gathered_bytes(model, experts, inputs)
    if gathered <= most:
        why = Because("experts_implementation='batched_mm': all experts as batched matmuls")
        return _experts_as(model, "batched_mm", why)
    text = (
        "experts_implementation='grouped_mm': experts one by one, for as batched matmuls they "
        "would copy {bytes} of weights"
    )
    return _experts_as(model, "grouped_mm", Because(text, (gathered,)))


def _grouped_experts(model: nn.Module) -> Mend:
    """MoE experts as products of rows sorted by expert, where the model loops over the experts that were
    chosen: no weight is copied.
    """
    text = "experts_implementation='grouped_mm': one product per expert, of the tokens that chose it"
    return _experts_as(model, "grouped_mm", Because(text))


def _experts_as(model: nn.Module, form: str, why: Reason) -> Mend:
    """One of HuggingFace's forms of experts, where the model has them and takes that form; said where it is
    another than it had.
    """
    setter = getattr(model, "set_experts_implementation", None)
    before = [(config, getattr(config, _EXPERTS)) for config in _configs(model) if hasattr(config, _EXPERTS)]
    if setter is None or all(was == form for _, was in before):
        return _NOTHING
    undos: list[Callable[[], object]] = [partial(setattr, config, _EXPERTS, was) for config, was in before]
    try:
        setter(form)
    except (ValueError, RuntimeError, NotImplementedError, AttributeError):
        for undo in undos:
            undo()
        return _NOTHING
    return why, undos


def _gathered_bytes(model: nn.Module, experts: list[nn.Module], inputs: object) -> int:
    """Of the largest copy that batched matmuls make: one expert's matrix for each token and each expert
    chosen for it.
    """
    tokens = max(
        (math.prod(leaf.shape[:2]) for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, torch.Tensor)),
        default=1,
    )
    chosen = max(
        (
            k
            for config in _configs(model)
            if isinstance(k := getattr(config, "num_experts_per_tok", None), int)
        ),
        default=1,
    )
    stacked = [p for module in experts for p in module.parameters(recurse=False) if p.dim() == 3]
    return tokens * chosen * max((p[0].numel() * p.element_size() for p in stacked), default=0)
