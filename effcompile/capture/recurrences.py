"""Recurrences of state-space and linear-attention layers as operators, while a step of generation is traced.

Hugging Face's forms of several tokens loop in Python over tokens or chunks, which no graph of any length
holds, and Mamba's begins with an empty state. What they compute is one function of a module, which all models
of that kind have by the same name; here it is the operator of ops/recurrence.py, behind the state that the
layer read from its cache. One token and many then are one graph.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
import threading
from collections.abc import Iterator
from contextvars import ContextVar

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812
from transformers.activations import ACT2FN

from effcompile.capture.caches import left_alone
from effcompile.capture.coded_layers import HFLayer
from effcompile.capture.resumed import ResumedCache
from effcompile.core.errors import UsageError
from effcompile.core.types import Forward, HFModel, Kwargs
from effcompile.ops.recurrence import delta_rule, short_conv, state_space

#: The cache of the step that this thread traces.
_TRACED: ContextVar[ResumedCache | None] = ContextVar("traced", default=None)
#: Modules are everybody's: one step at a time.
_LOCK = threading.RLock()


@contextlib.contextmanager
def carrying(model: HFModel, cache: ResumedCache) -> Iterator[None]:
    """Layers of the model run as operators behind the states of this cache.

    Raises:
        UsageError: a layer's state was not carried so: it is computed by another recurrence.
    """
    modules = {sys.modules[type(module).__module__] for module in model.modules()}
    with _LOCK, contextlib.ExitStack() as stack:
        for module in modules:
            for name, form in _FORMS.items():
                if (own := vars(module).get(name)) is not None:
                    stack.callback(setattr, module, name, own)
                    setattr(module, name, _either(own, form))
        token = _TRACED.set(cache)
        stack.callback(_TRACED.reset, token)
        yield
    left = cache.left()
    if left:
        raise UsageError(
            f"Layer {left[0]} of the model ({_kind(model, left[0])}) keeps a recurrent state, which it "
            "computes by a recurrence that a captured step does not carry yet: those of Mamba, Mamba-2 and "
            f"gated delta nets can be planned. {left_alone()}"
        )


def _kind(model: HFModel, layer: int) -> str:
    """The classes of the layer's modules that know which layer they are."""
    own = [each for each in model.modules() if getattr(each, "layer_idx", None) == layer]
    return ", ".join(dict.fromkeys(type(each).__name__ for each in own)) or type(model).__name__


def _either(own: Forward, form: Forward) -> Forward:
    """Ours in the thread that traces, the model's own in others."""
    signature = inspect.signature(own)

    def called(*args: object, **kwargs: object) -> object:
        cache = _TRACED.get()
        if cache is None:
            return own(*args, **kwargs)
        given = signature.bind(*args, **kwargs).arguments
        behind = (
            cache.convolving(given["hidden_states"])
            if form is _convolution
            else cache.taken(by_heads=form is _mamba)
        )
        return own(*args, **kwargs) if behind is None else form(behind, given)

    return called


def _convolution(layer: HFLayer, given: Kwargs) -> Tensor:
    """`causal_conv1d_fn`: of the new tokens alone."""
    _, before, x, at = layer.convolved
    activation = given.get("activation")
    silu = activation in ("silu", "swish")
    made, layer.conv_states[at] = short_conv(
        x.transpose(1, 2), given["weight"], given.get("bias"), before, silu
    )
    layer.convolved = None
    if activation is not None and not silu:
        made = ACT2FN[activation](made)
    return made.transpose(1, 2)


def _steps(dt: Tensor, bias: Tensor | None, softplus: bool) -> Tensor:
    """How far each token goes."""
    dt = dt if bias is None else dt + bias.to(dt.dtype)
    return F.softplus(dt) if softplus else dt


def _mamba(state: Tensor, given: Kwargs) -> tuple[Tensor, Tensor]:
    """`mamba_selective_scan`, which Zamba calls for each of its heads: channels are heads of one row."""
    dt = _steps(given["dt"].transpose(1, 2), given.get("delta_bias"), given.get("delta_softplus", False))
    x, b, c = (given[name].transpose(1, 2) for name in ("hidden_states", "B", "C"))
    made, after = state_space(x, dt, given["A"], b, c, given.get("D"), state)
    made, gate = made.transpose(1, 2), given.get("z")
    return (made if gate is None else made * F.silu(gate)), after


def _mamba2(state: Tensor, given: Kwargs) -> tuple[Tensor, Tensor]:
    """`mamba2_chunk_scan`."""
    dt = _steps(given["dt"], given.get("dt_bias"), given.get("dt_softplus", False))
    dt = torch.clamp(dt, *given.get("dt_limit", (0.0, float("inf"))))
    made: tuple[Tensor, Tensor] = state_space(
        given["hidden_states"], dt, given["A"][:, None], given["B"], given["C"], given.get("D"), state
    )
    return made


def _gated_delta(state: Tensor, given: Kwargs) -> tuple[Tensor, Tensor]:
    """`torch_chunk_gated_delta_rule`."""
    names = ("query", "key", "value", "g", "beta")
    normed = bool(given.get("use_qk_l2norm_in_kernel"))
    made, after = delta_rule(*(given[name] for name in names), state, normed)
    return made.to(given["query"].dtype), after


#: A recurrence's name in the modules of transformers → ours.
_FORMS: dict[str, Forward] = {
    "causal_conv1d_fn": _convolution,
    "mamba_selective_scan": _mamba,
    "mamba2_chunk_scan": _mamba2,
    "torch_chunk_gated_delta_rule": _gated_delta,
}
